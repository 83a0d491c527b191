"""Why a prompt computed what an earlier one had computed before: gate by gate, on demand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvweave.kv.pool import IntArray
from kvweave.prefix.base import Declined, Refusal
from kvweave.prefix.lease import RequestView
from kvweave.server.explorer.history import Record
from kvweave.server.explorer.shared import SharedRun

if TYPE_CHECKING:
    from kvweave.engine.engine import Engine

NOTHING = Refusal(
    "timing",
    "nothing speaks against it now: when this prompt came, it was not cached yet, or it was not "
    "found in time",
)


class Explained(NamedTuple):
    """A shared run, and why it was not lent."""

    run: SharedRun
    refusal: Refusal


def explain(engine: Engine, record: Record, runs: Sequence[SharedRun]) -> list[Explained]:
    """The first gate that each run meets. Runs on the engine's thread, and only looks."""
    return [Explained(run, _refusal(engine, record, run)) for run in runs]


def other_words(engine: Engine, record: Record) -> list[Declined]:
    """Where nothing was served in other words although some were proposed, and the first reason;
    in order. Runs on the engine's thread, and only looks."""
    found: dict[int, Declined] = {}
    for each in engine.cache.declined(record.rid):
        if not any(span.start < each.end and each.start < span.end for span in record.spans):
            found.setdefault(each.start, each)
    return [found[start] for start in sorted(found)]


def _refusal(engine: Engine, record: Record, run: SharedRun) -> Refusal:
    if run.donor.salt != record.salt:
        return Refusal("salt", "the other prompt has another cache_salt: nothing is shared across")
    view = view_of(engine, record, record.prompt)
    refusal = engine.cache.refusal(view, record.exact, run.start, run.length, run.donor_start)
    return refusal or _not_cached(engine, run) or NOTHING


def _not_cached(engine: Engine, run: SharedRun) -> Refusal | None:
    cached = engine.cache.match(view_of(engine, run.donor, run.donor.tokens))
    if cached >= run.donor_start + run.length:
        return None
    if not run.exact_there:
        return Refusal(
            "approximate",
            "the other prompt was itself served moved text before this point, and what is "
            "approximate is never lent on",
        )
    size = engine.cache.page_size
    if len(run.donor.tokens) - cached <= size:
        reason = f"only whole pages of {size} tokens are kept, and it reaches into the last one"
        return Refusal("page", reason)
    return Refusal("evicted", "its KV is not cached any more, to its end or at all")


def view_of(engine: Engine, record: Record, tokens: IntArray) -> RequestView:
    """`tokens` of `record` as the cache would see them."""
    return RequestView(
        rid=str(record.number),
        tokens=tokens,
        namespace=engine.namespace(record.salt),
        fuzzy=record.fuzzy,
    )
