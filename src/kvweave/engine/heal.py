"""Healing: computes prompts exactly, while idle, that were served approximately.

A request with moved KV publishes nothing behind its first span, so its prompt would be served
approximately for ever. Once healed, it is an exact prefix like any other.

A step is a lease, one chunk, a publication and a release. Nothing is held in between: a request
that arrives finds every page free or evictable, and healing continues later behind the published
pages.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from kvweave.engine.execution.executor import BatchBuilder, EngineComponents
from kvweave.engine.scheduler.request import RequestGroup, Sequence
from kvweave.engine.scheduler.scheduler import Row
from kvweave.engine.types import GenerateRequest, SamplingParams
from kvweave.errors import ForwardInterruptedError
from kvweave.kv.pool import IntArray
from kvweave.prefix.eviction import Key
from kvweave.prefix.lease import Lease, Namespace, RequestView

logger = logging.getLogger("kvweave.engine")

CHUNK = 128
"""Tokens of one step, or a page if that is longer: what an interruption costs at most."""

_Name: TypeAlias = tuple[Namespace, str | bytes]


@dataclass
class HealCounters:
    """Since start, by EngineSnapshot's names."""

    healed: int = 0
    healed_tokens: int = 0
    heals_preempted: int = 0
    heals_dropped: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class _Prompt:
    rid: str
    """Of the request that it was served to."""
    namespace: Namespace
    tokens: IntArray
    priority: int
    semantic: bool
    session: str | None
    eviction_key: Key
    """Only pages before this key may be evicted for it: none that were used since it was served."""

    @property
    def name(self) -> _Name:
        """Its place in the queue. A session has one, since its earlier prompts do not return."""
        return self.namespace, self.session or self.tokens.tobytes()

    @property
    def view(self) -> RequestView:
        return RequestView(self.rid, self.tokens, self.namespace, self.priority, fuzzy=False)

    def sequence(self, end: int) -> Sequence:
        """A sequence that computes the KV of the first `end` tokens and no answer."""
        tokens = self.tokens[:end]
        request = GenerateRequest(
            rid=self.rid,
            prompt_ids=tuple(tokens.tolist()),
            sampling=SamplingParams(max_tokens=0),
            priority=self.priority,
            cache_salt=self.namespace.salt,
            fuzzy=False,
            fuzzy_semantic=self.semantic,
        )
        return Sequence(RequestGroup(request, self.namespace), 0, 0, tokens, limit=end)


class Healer:
    """Queues prompts to heal, each once, at most `most`; the newest is healed first.

    Of a session that waits for its user or its tools, only the newest prompt is queued.

    Belongs to the engine's thread.
    """

    def __init__(
        self,
        components: EngineComponents,
        batch_builder: BatchBuilder,
        most: int,
        give_back: Callable[[Lease], None],
    ) -> None:
        self.counters = HealCounters()
        self._components = components
        self._cache = components.cache
        self._batch_builder = batch_builder
        self._give_back = give_back
        self._most = most
        size = self._cache.page_size
        self._chunk = -(-CHUNK // size) * size
        self._waiting: OrderedDict[_Name, _Prompt] = OrderedDict()
        self._begun = False
        """The newest prompt has had a step, and no request has arrived since."""

    def __len__(self) -> int:
        return len(self._waiting)

    def served(self, sequence: Sequence) -> None:
        """Queue the prompt of a complete answer, its lease still held, if it was approximate."""
        lease = sequence.lease
        if not self._most or lease is None or not lease.plan.approximate:
            return
        tokens = sequence.tokens[: sequence.prompt_length].copy()
        if not self._whole(tokens):
            return  # shorter than a page: nothing of it can be cached
        eviction_key = self._cache.eviction_key(lease.priority)
        prompt = _Prompt(
            lease.rid,
            lease.namespace,
            tokens,
            lease.priority,
            lease.semantic,
            lease.session,
            eviction_key,
        )
        self._waiting[prompt.name] = prompt
        self._waiting.move_to_end(prompt.name)
        if len(self._waiting) > self._most:
            self._waiting.popitem(last=False)
            self.counters.heals_dropped += 1

    def give_way(self) -> None:
        """A request has come."""
        self.counters.heals_preempted += self._begun
        self._begun = False

    def clear(self) -> None:
        """Empty the queue."""
        self._waiting.clear()
        self._begun = False

    def step(self, wanted: Callable[[], bool]) -> bool:
        """Compute one chunk, unless `wanted()` first; False if there is nothing to heal.

        On an error that prompt is dropped and its pages are released.
        """
        if not self._waiting:
            return False
        prompt = next(reversed(self._waiting.values()))
        try:
            self._advance(prompt, wanted)
        except ForwardInterruptedError:
            pass  # the chunk is lost, and computed again after the requests that interrupted it
        except Exception as error:
            logger.error(
                "healing the prompt of %s failed",
                prompt.rid,
                exc_info=error,
                extra={"rid": prompt.rid},
            )
            self._drop(prompt)
        return True

    def _advance(self, prompt: _Prompt, wanted: Callable[[], bool]) -> None:
        """Compute and publish the next chunk, if anything is missing and there is room for it."""
        whole, matched = self._whole(prompt.tokens), self._cache.match(prompt.view)
        if matched >= whole:
            return self._forget(prompt)  # others have computed it meanwhile
        end = min(matched + self._chunk, whole)
        sequence = prompt.sequence(end)
        lease = self._cache.lease(sequence.view())
        try:
            if not self._cache.grow(lease, end, prompt.eviction_key):
                return self._drop(prompt)
            self._begun = True
            sequence.start(lease)
            count = sequence.remaining
            row = Row(sequence, count, prefill=True, completes=True)
            batch, _ = self._batch_builder.pack([row])
            with self._components.interruptible(wanted):
                self._components.runner.forward(batch)
            self._cache.publish(lease, sequence.tokens, computed=end)
            self.counters.healed_tokens += count
            if lease.published >= whole:
                self._forget(prompt)
                self.counters.healed += 1
            elif lease.published < end:
                self._drop(prompt)  # the cache cannot keep it: trying again would never end
        finally:
            self._give_back(lease)

    def _whole(self, tokens: IntArray) -> int:
        """Tokens of a prompt that an equal prompt can hit: full pages, never the last token."""
        size = self._cache.page_size
        return (len(tokens) - 1) // size * size

    def _drop(self, prompt: _Prompt) -> None:
        self.counters.heals_dropped += 1
        self._forget(prompt)

    def _forget(self, prompt: _Prompt) -> None:
        self._waiting.pop(prompt.name, None)
        self._begun = False
