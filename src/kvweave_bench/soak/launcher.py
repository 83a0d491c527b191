"""`kvweave serve` with traps in it, for soaks: `python -m kvweave_bench.soak.launcher FLAGS`.

The product has no such hooks: they are set here, into the classes of this process, before it starts
to serve. Requests choose their own fate: what is named `f.PHASE.anything` fails in that phase.
Other faults come at random, and must cost nobody anything. Beside that it audits: whatever is
wrong goes as a line of JSON to the file that the environment names.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import sys
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch

from kvweave.engine.engine import Engine
from kvweave.engine.execution import executor
from kvweave.engine.execution.executor import BatchBuilder
from kvweave.engine.execution.runner import ModelRunner
from kvweave.engine.heal import Healer
from kvweave.engine.output import SequenceOutput, SequenceOutputFactory
from kvweave.engine.scheduler.scheduler import Scheduler
from kvweave.engine.stats import Reporter
from kvweave.fuzzy.anchors import SpanIndex
from kvweave.fuzzy.backend import FuzzyCache
from kvweave.kv.relocation import TensorMover
from kvweave.paraphrase.embedders import ModelSubprocess
from kvweave.paraphrase.semantic import SemanticProvider
from kvweave.prefix.base import CacheBackend
from kvweave.prefix.hash import HashCache
from kvweave.prefix.lease import Tier
from kvweave.prefix.radix import RadixCache
from kvweave.prefix.tree import upwards
from kvweave.server.metrics import RequestMetrics
from kvweave.server.service import Service

AUDIT_FILE, SEED = "KVWEAVE_SOAK_AUDIT", "KVWEAVE_SOAK_SEED"
WORDS = "injected by the soak"
FATAL = (
    *("server", "trace", "make", "lease", "record", "grow", "publish", "commit", "pack"),
    *("forward", "layer", "sample", "numbers", "accept", "detokenize"),
)
"""Phases in which a request fails."""
HARMLESS = ("provider", "move", "once")
"""Phases in which a fault costs it reuse or time, and never its answer."""
_CHECK_STEPS = 50
_CHANCE = 0.005

Whose = Callable[..., Iterable[str]]


class InjectedError(RuntimeError):
    """What the soak does to a server."""


class Audit:
    """Appends to a file what has to be known about this server from within."""

    def __init__(self, path: str, seed: int) -> None:
        self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 (for good)
        self.chance = random.Random(seed)
        self.leased = ""
        self.rids: list[str] = []
        """Whose rows are in the forward pass."""
        self.parts: list[Any] = []
        self.batch: Any = None
        self.fired: set[str] = set()

    def say(self, what: str, **facts: Any) -> None:
        self._file.write(json.dumps({"what": what, **facts}) + "\n")

    def trap(self, phase: str, rids: Iterable[str]) -> None:
        for rid in rids:
            if rid.startswith(f"f.{phase}."):
                self.say("fault", phase=phase, rid=rid)
                raise InjectedError(f"{WORDS}: {phase}")

    def maybe(self, phase: str, chance: float = _CHANCE) -> None:
        if self.chance.random() < chance:
            self.say("fault", phase=phase, rid=None)
            raise InjectedError(f"{WORDS}: {phase}")


def before(owner: Any, name: str, then: Callable[..., None]) -> None:
    """Have `then`, which may raise, run before the method."""
    original = getattr(owner, name)

    @wraps(original)
    def trapped(*args: Any, **more: Any) -> Any:
        then(*args)
        return original(*args, **more)

    setattr(owner, name, trapped)


def of_rows(rows: Iterable[Any]) -> list[str]:
    return [row.sequence.group.request.rid for row in rows]


def set_traps(audit: Audit) -> None:
    """Faults that requests bring upon themselves."""
    trap = audit.trap
    before(Service, "respond", lambda _, body, *__: trap("server", [body.rid or ""]))
    before(RequestMetrics, "note", lambda trace, _: trap("trace", [trace.rid]))
    before(SequenceOutputFactory, "make", lambda _, s, *__: trap("make", [s.group.request.rid]))
    for cache in (RadixCache, HashCache):
        before(cache, "lease", lambda _, view: trap("lease", [view.rid]))
        before(cache, "publish", lambda _, lease, *__: trap("publish", [lease.rid]))
    for method in ("record", "grow"):
        before(
            CacheBackend,
            method,
            lambda _, lease, *__, method=method: trap(method, [lease.rid]),
        )
    before(Scheduler, "commit", lambda _, row: trap("commit", of_rows([row])))
    before(SequenceOutput, "accept", lambda answer, *_: trap("accept", of_answer(answer)))
    before(SequenceOutput, "_watch", lambda answer, *_: trap("detokenize", of_answer(answer)))
    for provider in (SpanIndex, SemanticProvider):
        before(provider, "match", lambda _, view, __: trap("provider", [view.rid]))
    before(TensorMover, "move", lambda *_: trap("move", [audit.leased]))
    before(executor, "row_outputs", lambda *_: trap("sample", audit.rids))
    before(ModelRunner, "_attend", lambda _, layer, *__: _in_layer(audit, layer))
    _trap_forward(audit)


def of_answer(answer: SequenceOutput) -> list[str]:
    return [answer.sequence.group.request.rid]


def _in_layer(audit: Audit, layer: Any) -> None:
    if layer.layer_idx == 2:
        audit.trap("layer", audit.rids)


def _trap_forward(audit: Audit) -> None:
    pack, forward = BatchBuilder.pack, ModelRunner.forward

    def packed(self: BatchBuilder, rows: Any) -> Any:
        audit.rids = of_rows(rows)
        audit.trap("pack", audit.rids)
        audit.batch, audit.parts = pack(self, rows)
        return audit.batch, audit.parts

    def computed(self: ModelRunner, batch: Any) -> torch.Tensor:
        if batch is not audit.batch:  # the engine's own
            audit.rids, audit.parts = [], []
        audit.trap("forward", audit.rids)
        if len(audit.rids) > 1:  # alone, it could only be its own fault
            audit.maybe("a pass")
            for rid in audit.rids:
                if rid.startswith("f.once.") and rid not in audit.fired:
                    audit.fired.add(rid)
                    audit.trap("once", [rid])
        logits = forward(self, batch)
        for part in audit.parts:
            if of_rows([part.row])[0].startswith("f.numbers."):
                audit.say("fault", phase="numbers", rid=of_rows([part.row])[0])
                logits[part.first :][: len(part.scored) + 1] = float("nan")
        return logits

    BatchBuilder.pack = packed  # type: ignore[method-assign]
    ModelRunner.forward = computed  # type: ignore[method-assign]


def set_snares(audit: Audit) -> None:
    """Random faults that must not affect any request."""
    for cache in (RadixCache, HashCache):
        before(cache, "release", lambda *_: audit.maybe("release"))
        before(cache, "take_events", lambda *_: audit.maybe("events"))
    before(Reporter, "planned", lambda *_: audit.maybe("counting"))
    before(Reporter, "snapshot", lambda *_: audit.maybe("gauges"))
    before(Healer, "_advance", lambda *_: audit.maybe("healing", 0.05))
    before(ModelSubprocess, "ask", lambda subprocess, _: _kill(audit, subprocess))


def _kill(audit: Audit, subprocess: ModelSubprocess) -> None:
    """Whatever embeds texts dies now and then; the next question starts another."""
    if subprocess._running and audit.chance.random() < 4 * _CHANCE:
        audit.say("fault", phase="embedder killed", rid=None)
        subprocess._running[0].kill()


def look_inside(audit: Audit) -> None:
    """Prove, while it runs, that pages add up and that moved KV is that of the same tokens."""
    lend, step, steps = FuzzyCache.lease, Engine.step, [0]

    def lease(self: FuzzyCache, view: Any) -> Any:
        audit.leased = view.rid
        try:
            given = lend(self, view)
        finally:
            audit.leased = ""
        if given.plan.spans:
            audit.say("approximate", rid=view.rid)
            _look_at_spans(audit, self, view, given)
        return given

    def stepped(self: Engine) -> Any:
        steps[0] += 1
        if steps[0] % _CHECK_STEPS == 0:
            try:
                self.check()
                audit.say("checked")
            except Exception as error:
                audit.say("violation", words=f"{type(error).__name__}: {error}")
        return step(self)

    FuzzyCache.lease = lease  # type: ignore[method-assign]
    Engine.step = stepped  # type: ignore[method-assign]


def _look_at_spans(audit: Audit, cache: FuzzyCache, view: Any, lease: Any) -> None:
    for span in lease.plan.spans:
        if span.generation:
            continue  # of its session, not of the tree
        node = cache._donors.named(span.donor)
        path = [] if node is None else [at.tokens for at in upwards(node)][::-1]
        theirs = [token for run in path for token in run.tolist()]
        theirs = theirs[span.donor_start : span.donor_start + span.length]
        ours = view.tokens[span.start : span.end].tolist()
        if len(theirs) != span.length or (span.tier is Tier.MOVED and theirs != ours):
            audit.say("violation", words=f"{view.rid} was served other tokens at {span}")
    audit.say("spans", count=len(lease.plan.spans))
    if lease.shared:
        audit.say("shared", count=len(lease.shared))


if __name__ == "__main__":
    torch.set_num_threads(1)
    shared = Audit(os.environ[AUDIT_FILE], int(os.environ.get(SEED, "0")))
    look_inside(shared)
    set_traps(shared)
    set_snares(shared)
    sys.argv = ["kvweave", "serve", *sys.argv[1:]]
    runpy.run_module("kvweave.cli.main", run_name="__main__")
