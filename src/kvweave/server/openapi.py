"""The OpenAPI document: clients are generated from it, and fuzzing holds every answer against it.

Routes name what they answer and what is special about their refusals (`answers`); what any request
may meet, by what it carries, is added to all of them here.
"""

from __future__ import annotations

import warnings
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from kvweave.server.keys import Door, Keys
from kvweave.server.schemas import ChatCompletionChunk, ErrorAnswer

_REFUSALS = {
    400: "The request cannot be served as asked; `param` names the field.",
    401: "No key, or a wrong one.",
    403: "It takes the operators' key, not the clients'.",
    404: "There is no such thing here.",
    408: "The body did not arrive in time.",
    409: "Not while requests run.",
    413: "The body is larger than this server takes.",
    415: "The body is compressed.",
    429: "Too many wait already; Retry-After says when to try again.",
    500: "The engine or the server failed on this request; the others go on.",
    503: "The engine has stopped, the server is shutting down, or too many are connected.",
}
_REFERENCE = "#/components/schemas/{model}"
_ALWAYS = (500, 503)
_WITH_PARAMETERS = (400,)
_WITH_A_BODY = (400, 408, 413, 415)
_RETRY = {"Retry-After": {"description": "Seconds.", "schema": {"type": "string"}}}


def answers(
    shape: Any, *refusals: int, event: type[BaseModel] | None = None
) -> dict[int | str, dict[str, Any]]:
    """A route's `responses`: 200 in `shape`, or as a stream of `event`; and its own refusals."""
    success: dict[str, Any] = {"model": shape, "description": "The answer."}
    if event is not None:
        success["content"] = {"text/event-stream": {"itemSchema": _event(event)}}
    return {200: success, **{status: {} for status in refusals}}


def describe(app: FastAPI, keys: Keys) -> None:
    """Let `app` publish its document with all refusals, as this server shapes them."""
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            with warnings.catch_warnings():  # of one name for two methods, which _completed mends
                warnings.filterwarnings("ignore", message="Duplicate Operation ID")
                document = generate()
            app.openapi_schema = _completed(document, keys)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _completed(document: dict[str, Any], keys: Keys) -> dict[str, Any]:
    components = document["components"]
    components["schemas"] |= _shapes()
    for theirs in ("HTTPValidationError", "ValidationError"):
        components["schemas"].pop(theirs, None)
    if keys.any:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if len(operations) > 1:
                operation["operationId"] = f"{method}_{operation['operationId']}"
            _complete(operation, Door.to(path), keys)
    return document


def _complete(operation: dict[str, Any], door: Door, keys: Keys) -> None:
    named = operation.pop("responses")
    operation["responses"] = responses = {"200": named.pop("200")}
    named.pop("422", None)  # FastAPI's; here it is 400, in the shape of all others
    statuses = {*map(int, named), *_ALWAYS}
    if "parameters" in operation:
        statuses |= set(_WITH_PARAMETERS)
    if "requestBody" in operation:
        statuses |= set(_WITH_A_BODY)
    if keys.for_door(door):
        statuses |= {401, 403} if keys.two and door is Door.OPERATOR else {401}
        operation["security"] = [{"key": []}]
    for status in sorted(statuses):
        responses[str(status)] = {
            "description": _REFUSALS[status],
            "content": {"application/json": {"schema": _reference(ErrorAnswer)}},
            **({"headers": _RETRY} if status == 429 else {}),
        }


def _shapes() -> dict[str, Any]:
    """Those that no route names as its answer: of failures, and of what streams carry."""
    shapes: list[type[BaseModel]] = [ErrorAnswer, ChatCompletionChunk]
    _, schemas = models_json_schema(
        [(shape, "serialization") for shape in shapes], ref_template=_REFERENCE
    )
    found: dict[str, Any] = schemas["$defs"]
    return found


def _reference(shape: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REFERENCE.format(model=shape.__name__)}


def _event(chunk: type[BaseModel]) -> dict[str, Any]:
    """A server-sent event: a chunk or a failure as JSON, or [DONE] at the end."""
    some: dict[str, Any] = {"type": "string", "contentMediaType": "application/json"}
    some["contentSchema"] = {"anyOf": [_reference(chunk), _reference(ErrorAnswer)]}
    data = {"anyOf": [{"const": "[DONE]"}, some]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}
