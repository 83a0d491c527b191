"""Types of request fields: values of several spellings are brought to one, and bounded."""

from __future__ import annotations

import json
import re
from functools import partial
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, WithJsonSchema

MAX_PROMPTS = 1024
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = MAX_BIASES = 1024
MAX_BAD_WORDS = 256
MAX_ALLOWED_IDS = 2**18
MAX_NAME = 256
MAX_MOVABLE = 64
Prompt = str | tuple[int, ...]
_NAME = rf"[!-~]{{1,{MAX_NAME}}}"


def _number(value: Any) -> Any:
    """Numbers as other servers take them: 5.0 for 5, and "0.5" for 0.5. No true for 1."""
    if isinstance(value, str) and len(value) <= 32:
        if re.fullmatch("[-+]?[0-9]+", value):
            return int(value)
        try:
            value = float(value)
        except ValueError:
            return value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _printable(text: str) -> str:
    # A rid goes into a header and into the log.
    if not re.fullmatch(_NAME, text):
        raise ValueError(f"a rid has 1 to {MAX_NAME} printable ASCII characters, without spaces")
    return text


def _short(text: str) -> str:
    if len(text) > MAX_NAME:
        raise ValueError(f"a cache_salt has at most {MAX_NAME} characters")
    return _whole(text)


def _whole(text: str) -> str:
    """Refuse half a surrogate pair, which JSON can write and no text holds."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("it holds half a surrogate pair") from None
    return text


def _texts(value: Any, name: str, most: int) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name} is a string or a list of strings")
    if len(texts) > most:
        raise ValueError(f"at most {most} strings, not {len(texts)}")
    if any(not text for text in texts):
        raise ValueError("strings must not be empty")
    if any(len(text) > MAX_STOP_CHARS for text in texts):
        raise ValueError(f"a string has at most {MAX_STOP_CHARS} characters")
    return tuple(map(_whole, texts))


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """The four shapes of `prompt` as one: a tuple of texts or of token ids, one per prompt."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if _all_ids(value):
            return (tuple(value),)
        if len(value) > MAX_PROMPTS:
            raise ValueError(f"at most {MAX_PROMPTS} prompts, not {len(value)}")
        if all(isinstance(item, str) for item in value):
            return tuple(value)
        if all(isinstance(item, list) and _all_ids(item) for item in value):
            return tuple(tuple(item) for item in value)
    raise ValueError("a string, a list of strings, a list of token ids or a list of such lists")


def _content(value: Any) -> str | tuple[str, ...] | None:
    """A message's text, or the texts of its parts."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("content is a string or a list of parts")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"parts are of type text, with their text, not {kind!r:.80}")
        texts.append(part["text"])
    return tuple(texts)


def _tool_calls(value: Any) -> list[dict[str, Any]]:
    """Calls with their arguments as objects, which is how chat templates read them.

    OpenAI's clients send arguments as JSON text.
    """
    if not isinstance(value, list):
        raise ValueError("tool_calls is a list of calls")
    calls = []
    for call in value:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise ValueError('a call is {"function": {"name": ..., "arguments": ...}}')
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments.strip() or "{}") or {}
            except (ValueError, RecursionError):
                arguments = None
        if not isinstance(arguments, dict):
            raise ValueError(f"the arguments of {function.get('name')!r:.80} are no JSON object")
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return calls


def _bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise ValueError("a map from token ids to numbers")
    if len(value) > MAX_BIASES:
        raise ValueError(f"at most {MAX_BIASES} tokens, not {len(value)}")
    biases = {}
    for token, bias in value.items():
        if not re.fullmatch("[0-9]{1,9}", str(token)):
            raise ValueError(f"a map from token ids to numbers, and {token!r} is no id")
        if type(bias) not in (int, float):
            raise ValueError(f"a map from token ids to numbers, and {bias!r} is no number")
        biases[int(token)] = bias  # an integer may be too large for a float
    return biases


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _all_ids(values: list[Any]) -> bool:
    return set(map(type, values)) <= {int}  # not isinstance: True is no token


_id_schema: dict[str, Any] = {"type": "integer", "minimum": 0}
_ids_schema: dict[str, Any] = {"type": "array", "items": _id_schema, "minItems": 1}
_text_schema: dict[str, Any] = {"type": "string"}
_stop_schema = _text_schema | {"minLength": 1, "maxLength": MAX_STOP_CHARS}
_part_schema: dict[str, Any] = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _text_schema},
    "required": ["type", "text"],
}
Whole = Annotated[int, BeforeValidator(_number)]
Number = Annotated[float, BeforeValidator(_number)]
Rid = Annotated[
    str,
    AfterValidator(_printable),
    WithJsonSchema({"type": "string", "pattern": f"^{_NAME}$"}),
]
CacheSalt = Annotated[
    str, AfterValidator(_short), WithJsonSchema({"type": "string", "maxLength": MAX_NAME})
]
Stops = Annotated[
    tuple[str, ...],
    PlainValidator(partial(_texts, name="stop", most=MAX_STOPS)),
    WithJsonSchema(
        {"anyOf": [_stop_schema, {"type": "array", "items": _stop_schema, "maxItems": MAX_STOPS}]}
    ),
]
BadWords = Annotated[
    tuple[str, ...],
    PlainValidator(partial(_texts, name="bad_words", most=MAX_BAD_WORDS)),
    WithJsonSchema({"type": "array", "items": _stop_schema, "maxItems": MAX_BAD_WORDS}),
]
Content = Annotated[
    str | tuple[str, ...] | None,
    PlainValidator(_content),
    WithJsonSchema({"anyOf": [_text_schema, {"type": "array", "items": _part_schema}]}),
]
ToolCalls = Annotated[
    list[dict[str, Any]],
    PlainValidator(_tool_calls),
    WithJsonSchema({"type": "array", "items": {"type": "object"}}),
]
LogitBias = Annotated[
    dict[int, float],
    PlainValidator(_bias),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_BIASES,
        }
    ),
]
StopIds = Annotated[
    tuple[int, ...],
    BeforeValidator(_frozen),
    Field(max_length=MAX_STOP_IDS, json_schema_extra={"items": _id_schema}),
]
AllowedIds = Annotated[
    tuple[int, ...],
    BeforeValidator(_frozen),
    Field(min_length=1, max_length=MAX_ALLOWED_IDS, json_schema_extra={"items": _id_schema}),
]
Prompts = Annotated[
    tuple[Prompt, ...],
    PlainValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                _text_schema | {"minLength": 1},
                {"type": "array", "items": _text_schema | {"minLength": 1}, "minItems": 1},
                _ids_schema,
                {"type": "array", "items": _ids_schema, "minItems": 1},
            ]
        }
    ),
]
