"""A server for tests of the explorer: the pretended model, real caches, one token per byte."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

import httpx

from kvweave.config import CacheConfig, EngineConfig, FuzzyConfig, ServerConfig
from kvweave.engine.async_engine import AsyncEngine
from support.enginekit import make_world
from support.serverkit import RunningServer, eventually, toy_card, toy_tokenizer

PAGE = 16
DOCUMENT = (
    "The ferry to the island leaves at nine, at noon and at five. In winter it does not run on "
    "Mondays. Bicycles travel free, dogs pay half, and the captain takes no bookings by telephone."
)


@contextlib.contextmanager
def explored(backend: str = "fuzzy_match", **server: object) -> Iterator[httpx.Client]:
    """A client of a fresh server over an empty cache."""
    # No seams: a moved text is one run on the page.
    fuzzy = FuzzyConfig(refresh_tokens=0)
    world = make_world(backend, page_size=PAGE, pool_tokens=PAGE * 256, fuzzy=fuzzy)
    tokenizer = world.engine.loaded.tokenizer = toy_tokenizer()
    # It answers in a part of the letters, but reads all of them.
    world.engine.limits = replace(world.engine.limits, vocab_size=len(tokenizer))
    config = EngineConfig(cache=CacheConfig(prefix_cache_backend=backend), fuzzy=fuzzy)
    running = RunningServer(
        AsyncEngine(world.engine),
        ServerConfig(port=0, **server),
        toy_card(tokenizer),
        engine_config=config,
    )
    with running, running.client() as client:
        client.cache = world.engine.cache
        client.service = running.app.state.service
        if key := server.get("admin_api_key", server.get("api_key")):
            client.headers["Authorization"] = f"Bearer {key}"
        yield client
        assert eventually(lambda: not running.app.state.service.live)
    assert world.runner.violations == []


def ask(client: httpx.Client, prompt: str, max_tokens: int = 4, **more: object) -> dict:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    reply = client.post("/v1/completions", json=body | more)
    assert reply.status_code == 200, reply.text
    return reply.json()


def look(client: httpx.Client, path: str) -> dict:
    reply = client.get(f"/explorer/api/{path}")
    assert reply.status_code == 200, reply.text
    return reply.json()
