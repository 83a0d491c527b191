"""From the flag to the socket: a follower of a served model that has only the address."""

from __future__ import annotations

import json
import time

import numpy as np
import pytest

from kvweave.config import CacheConfig, EngineConfig
from kvweave.engine.engine import Engine
from kvweave.engine.types import GenerateRequest, SamplingParams
from kvweave.events.follower import EventFollower
from kvweave.prefix.events import AllBlocksCleared, BlockStored, KVEvent
from kvweave.prefix.hash_index import namespace_seed, page_hashes
from kvweave.prefix.lease import Namespace

WHERE = {"endpoint": "tcp://127.0.0.1:0", "bind": True, "replay_endpoint": "tcp://127.0.0.1:0"}


@pytest.fixture
def engine(tiny):
    cache = CacheConfig(
        prefix_cache_backend="radix", max_total_tokens=512, kv_events_config=json.dumps(WHERE)
    )
    engine = Engine(EngineConfig(cache=cache), tiny("llama"))
    yield engine
    engine.close()


def test_a_served_prompt_is_published_under_reproducible_hashes(engine):
    prompt = tuple(range(50))
    request = GenerateRequest(rid="a", prompt_ids=prompt, sampling=SamplingParams(max_tokens=1))
    engine.add(request)
    while engine.has_work:
        engine.step()
    tokens = np.array(prompt, np.int32)
    seed = namespace_seed(Namespace(engine.loaded.identity))
    stored = BlockStored(tuple(page_hashes(tokens, 16, seed)), None, prompt[:48], 16)
    assert told(engine, 1) == [stored]
    engine.flush_cache()
    assert told(engine, 2) == [stored, AllBlocksCleared()]


def told(engine: Engine, count: int) -> list[KVEvent]:
    """The events that a new follower receives; new followers are tried until they are `count`.

    The publisher's thread cannot replay batches before it has sent them, and batches that are sent
    while a subscription begins are lost.
    """
    publisher = engine.components.events
    deadline = time.monotonic() + 60
    events: list[KVEvent] = []
    while len(events) < count and time.monotonic() < deadline:
        follower = EventFollower(publisher.endpoint, publisher.replay_endpoint)
        if follower.wait(5):
            events = follower.drain()
        follower.close()
    return events
