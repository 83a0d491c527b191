"""Routes for operators: health, metrics, server facts, flushing the cache, aborting requests."""

from __future__ import annotations

import asyncio
import dataclasses
import platform
import time
import uuid
from collections.abc import Callable
from contextlib import aclosing
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Query
from starlette.responses import JSONResponse, PlainTextResponse, Response

from kvweave.config import ClusterConfig, EngineConfig
from kvweave.config.base import values_of
from kvweave.config.cache import EventsConfig
from kvweave.engine.types import GenerateRequest, SamplingParams
from kvweave.errors import KvweaveError
from kvweave.server import schemas
from kvweave.server.errors import error_response
from kvweave.server.protocol import AbortBody, SessionBody
from kvweave.server.schemas import answers
from kvweave.server.service import Service
from kvweave.version import __version__

if TYPE_CHECKING:
    from kvweave.engine.selfcheck.gate import SelfCheck

_PROBE_SECONDS = 20.0
_PACKAGES = ("torch", "transformers", "fastapi", "uvicorn")
"""Packages whose versions /server_info shows."""


def admin_router(
    service: Service,
    engine_config: EngineConfig,
    self_check: SelfCheck | None = None,
    cluster: ClusterConfig | None = None,
) -> APIRouter:
    """Routes outside /v1, bound to `service`."""
    router = APIRouter()
    card, engine = service.card, service.engine
    events = EventsConfig.wanted(engine_config.cache.kv_events_config)
    settings = _settings(engine_config, service.config, cluster or ClusterConfig())
    versions, started = _versions(), int(time.time())

    def get(path: str, shape: Any, *refusals: int, **more: Any) -> Callable[..., Any]:
        shown = answers(shape, *refusals)
        more.setdefault("methods", ["GET"])
        return router.api_route(path, response_model=None, responses=shown, **more)

    @get("/health", schemas.Health, methods=["GET", "HEAD"])
    async def health() -> Response:
        return JSONResponse({"status": "ok"}) if engine.alive else _dead()

    @get("/health_generate", schemas.Health)
    async def health_generate() -> Response:
        return await _probe(service)

    @router.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return Response(service.metrics.exposition(), media_type="text/plain; version=0.0.4")

    @get("/v1/models/", schemas.ModelList, include_in_schema=False)
    @get("/v1/models", schemas.ModelList)
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card.listing(name) for name in card.names]}

    @get("/v1/models/{name:path}", schemas.ModelFacts, 404)
    async def model(name: str) -> dict[str, Any]:
        card.require(name)
        return card.listing(name)

    @get("/get_model_info", schemas.ModelInfo, name="get_model_info")
    @get("/model_info", schemas.ModelInfo)
    async def model_info() -> dict[str, Any]:
        return card.facts()

    @get("/get_server_info", schemas.ServerInfo, name="get_server_info")
    @get("/server_info", schemas.ServerInfo)
    async def server_info() -> dict[str, Any]:
        now = engine.snapshot()
        # Flat and with SGLang's names: its routers read here what a worker serves.
        return {
            **settings,
            **card.facts(),
            "version": __version__,
            "versions": versions,
            "started": started,
            "max_total_tokens": now.total_tokens,
            "dp_size": 1,
            "fuzzy_self_check_result": None if self_check is None else self_check.facts(),
            "live_requests": len(service.live),
            "kv_events": events and events.described(engine_config.cache.page_size),
            "engine": dataclasses.asdict(now),
        }

    @get("/get_load", list[schemas.Load])
    async def load() -> list[dict[str, Any]]:
        now = engine.snapshot()
        # SGLang's shape, one entry per rank: its router's power_of_two policy reads it.
        return [
            {
                "dp_rank": 0,
                "num_reqs": now.running + now.waiting,
                "num_waiting_reqs": now.waiting,
                "num_tokens": now.used_tokens,
            }
        ]

    @router.post("/flush_cache", response_model=None, responses=answers(schemas.Flushed, 409))
    async def flush_cache(timeout: Annotated[float, Query(ge=0, le=3600)] = 0.0) -> dict[str, Any]:
        await engine.flush_cache(timeout)
        return {"success": True, "message": "the cache is empty"}

    @router.post("/close_session", response_model=None, responses=answers(schemas.SessionClosed))
    async def close_session(body: SessionBody) -> dict[str, Any]:
        return {
            "success": True,
            "tokens": await engine.close_session(body.session_id, body.cache_salt),
        }

    @router.post("/abort_request", response_model=None, responses=answers(schemas.Aborted))
    async def abort_request(body: AbortBody) -> dict[str, Any]:
        aborted = service.live.abort(None if body.abort_all else body.rid)
        return {"success": True, "aborted": aborted}

    return router


async def _probe(service: Service) -> Response:
    """Health check that generates one token, in a namespace of its own."""
    if not service.engine.alive:
        return _dead()
    request = GenerateRequest(
        rid=f"health-{uuid.uuid4().hex}",
        prompt_ids=(0,),
        sampling=SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        cache_salt="kvweave health",
        fuzzy=False,
    )

    async def first_token() -> None:
        async with aclosing(service.engine.generate(request)) as deltas:  # type: ignore[type-var]
            async for _ in deltas:
                pass

    try:
        await asyncio.wait_for(first_token(), _PROBE_SECONDS)
    except TimeoutError:
        return error_response(
            f"the engine made no token within {_PROBE_SECONDS:g} seconds", status=503
        )
    except KvweaveError as failure:
        return error_response(str(failure), status=503)
    return JSONResponse({"status": "ok"})


def _dead() -> Response:
    return error_response("the engine has stopped", status=503, code="engine_dead")


def _versions() -> dict[str, str]:
    return {
        "kvweave": __version__,
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in _PACKAGES},
    }


def _settings(*configs: Any) -> dict[str, Any]:
    """The effective value of every flag by its name; of keys only whether they are set."""
    settings = values_of(*configs)
    for secret in ("api_key", "admin_api_key"):
        settings[secret] = settings[secret] is not None
    return settings
