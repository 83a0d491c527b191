"""Routes of the explorer: the page's files, the JSON API behind it, and the whole application."""

from __future__ import annotations

import asyncio
import hashlib
import mimetypes
import time
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from fastapi import APIRouter, FastAPI, Path, Query, Request
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse, Response

from kvweave.config import ClusterConfig, EngineConfig, ServerConfig
from kvweave.engine.selfcheck.gate import SelfCheck
from kvweave.errors import RequestError
from kvweave.explorer.history import History, Record
from kvweave.explorer.queries import (
    declined_paraphrases,
    explain,
    live_view,
    prompt_view,
    shared_runs,
    summary_view,
    tree_view,
    view_of,
    why_not_view,
)
from kvweave.plugins import moving_backends
from kvweave.prefix.contract import TreeSnapshot
from kvweave.prefix.lease import Tier
from kvweave.server.app import build_api
from kvweave.server.model_card import ModelCard
from kvweave.server.service import Service
from kvweave.server.streaming import ServingEngine

if TYPE_CHECKING:
    from kvweave.engine.engine import Engine


POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


@cache
def _contents() -> dict[str, tuple[bytes, str, str]]:
    """Bytes, media type and ETag of every file of the page, by name."""
    found = {}
    for file in files(__package__).joinpath("static").iterdir():
        content = file.read_bytes()
        # The system's table of media types may have anything for scripts.
        kind = "text/javascript" if file.name.endswith(".js") else None
        kind = kind or mimetypes.guess_type(file.name)[0] or "text/plain"
        tag = f'"{hashlib.blake2s(content, digest_size=8).hexdigest()}"'
        found[file.name] = content, kind, tag
    return found


def asset(name: str, request: Request) -> Response:
    """One file of the page; 404 if there is none, 304 if the browser has this version."""
    if name not in _contents():
        raise HTTPException(404)
    content, kind, tag = _contents()[name]
    headers = {
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
        "ETag": tag,
    }
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=f"{kind}; charset=utf-8", headers=headers)


MOST_NODES = 600
PLACED_PROMPTS = 100
"""The newest prompts, whose paths through the tree are looked up."""
_ENGINE_SECONDS = 20.0
"""How long a query waits for the engine's thread."""
_REASONS_SHOWN = 5

_Number = Annotated[int, Path(ge=0, le=2**53)]
_T = TypeVar("_T")


def explorer_router(service: Service, history: History, backend: str) -> APIRouter:
    """Routes below /explorer, where `/` leads to. `backend` is only shown."""
    root, router = APIRouter(), APIRouter(prefix="/explorer")
    texts = None if service.config.hides_text else service.texts

    @router.get("", include_in_schema=False)
    async def page(request: Request) -> Response:
        return asset("index.html", request)

    @router.get("/static/{name}", include_in_schema=False)
    async def static(name: str, request: Request) -> Response:
        return asset(name, request)

    @router.get("/api/overview", name="explorer_overview")
    async def overview(after: Annotated[int, Query(ge=0)] = 0) -> dict[str, Any]:
        """Gauges, live requests, and the prompts with numbers above `after`."""
        now = service.engine.snapshot()
        return {
            "model": service.card.name,
            "backend": backend,
            "moves": backend in moving_backends(),
            "chat": service.reader.tokenizer.chat_template is not None,
            "text_hidden": texts is None,
            "started": history.started,
            "now": time.time(),
            "running": now.running,
            "waiting": now.waiting,
            "total_tokens": now.total_tokens,
            "used_tokens": now.used_tokens,
            "cached_tokens": now.cached_tokens,
            "oldest": history.oldest,
            "live": [live_view(metrics) for metrics in service.live.metrics()],
            "counters": {
                "generated_tokens": now.generated_tokens,
                "evicted_tokens": now.evicted_tokens,
                "preemptions": now.preemptions,
                "heals_waiting": now.heals_waiting,
                "healed": now.healed,
            },
            "prompts": [summary_view(record, texts) for record in history if record.number > after],
        }

    @router.get("/api/prompts/{number}", name="explorer_prompt", responses={404: {}})
    async def prompt(number: _Number) -> dict[str, Any]:
        """The sources of one prompt's tokens."""
        record = _known(history, number)
        lenders = await _paraphrase_lenders(service, history, record)
        return await asyncio.to_thread(prompt_view, record, history.before(record), lenders, texts)

    @router.get("/api/prompts/{number}/why-not", name="explorer_why_not", responses={404: {}})
    async def why_not(number: _Number) -> dict[str, Any]:
        """Text that this prompt computed although an earlier one had it, with reasons."""
        record = _known(history, number)
        earlier = history.before(record)
        runs = await asyncio.to_thread(shared_runs, record, earlier, _REASONS_SHOWN)
        explained, declined = await _on_engine_thread(
            service,
            lambda engine: (explain(engine, record, runs), declined_paraphrases(engine, record)),
        )
        return why_not_view(explained, declined, len(earlier), record, texts)

    @router.get("/api/tree", name="explorer_tree")
    async def tree() -> dict[str, Any]:
        """The tree, its most recently used nodes first."""
        snapshot = await _snapshot(service, history)
        return {"tree": None if snapshot is None else tree_view(snapshot, texts)}

    @root.get("/", include_in_schema=False)
    async def start() -> Response:
        return RedirectResponse("explorer")

    root.include_router(router)
    return root


def _known(history: History, number: int) -> Record:
    record = history.get(number)
    if record is None:
        raise RequestError(
            f"prompt {number} is not remembered (the oldest one is {history.oldest})", status=404
        )
    return record


async def _paraphrase_lenders(service: Service, history: History, record: Record) -> dict[int, int]:
    """Donors of the record's paraphrases: a prompt's number by the tree node that it lies on.

    A paraphrase's donor has other tokens, so that `donor_of` cannot find it.
    """
    if all(span.tier is not Tier.PARAPHRASE for span in record.spans):
        return {}
    try:
        snapshot = await _snapshot(service, history)
    except RequestError:
        return {}  # these names are optional
    nodes = snapshot.nodes if snapshot is not None else ()
    return {node.order: int(node.prompts[0]) for node in nodes if node.prompts}


async def _snapshot(service: Service, history: History) -> TreeSnapshot | None:
    records = list(history)[-PLACED_PROMPTS:]

    def snapshot(engine: Engine) -> TreeSnapshot | None:
        prompts = [view_of(engine, record, record.tokens) for record in records]
        return engine.cache.inspector.tree_snapshot(prompts, MOST_NODES)

    return await _on_engine_thread(service, snapshot)


async def _on_engine_thread(service: Service, at: Callable[[Engine], _T]) -> _T:
    try:
        return await asyncio.wait_for(service.engine.run_on_engine_thread(at), _ENGINE_SECONDS)
    except TimeoutError:
        raise RequestError(
            f"the engine was busy for {_ENGINE_SECONDS:g} seconds; try again later", status=503
        ) from None


def build_app(
    engine: ServingEngine,
    card: ModelCard,
    config: ServerConfig,
    engine_config: EngineConfig | None = None,
    self_check: SelfCheck | None = None,
    cluster: ClusterConfig | None = None,
) -> FastAPI:
    """As `build_api`; with `config.explorer` also the explorer and its history of prompts."""
    if not config.explorer:
        return build_api(engine, card, config, engine_config, self_check, cluster)
    history = History()
    backend = (engine_config or EngineConfig()).cache.prefix_cache_backend
    return build_api(
        engine,
        card,
        config,
        engine_config,
        self_check,
        cluster,
        observer=history,
        more_routes=lambda service: explorer_router(service, history, backend),
    )
