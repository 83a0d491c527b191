"""Answers questions about past prompts: who lent KV, what was shared, why it was not reused."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from kvweave.explorer.history import Record, SourceRun
from kvweave.fuzzy.anchors import block_hashes, window_hashes
from kvweave.kv.pool import IntArray
from kvweave.prefix.contract import Declined, Refusal
from kvweave.prefix.lease import RequestView
from kvweave.prefix.plan import Tier
from kvweave.server.responses import TokenTexts

if TYPE_CHECKING:
    from kvweave.engine.engine import Engine

BLOCK = 8
SURE_TO_BE_FOUND = 2 * BLOCK - 1
_DIAGONALS = 48
"""How many are compared whole, those with the most blocks in common first."""


class SharedRun(NamedTuple):
    """`length` equal tokens: from `start` of the prompt on, and from `donor_start` of `donor`."""

    donor: Record
    start: int
    length: int
    donor_start: int

    @property
    def exact_there(self) -> bool:
        """The donor computed it in sight of nothing approximate."""
        return self.donor_start + self.length <= self.donor.lends_up_to


def computed_mask(record: Record) -> npt.NDArray[np.bool_]:
    """Which positions of the prompt were computed without having KV of any donor: (length)."""
    mask = np.ones(record.prompt_length, np.bool_)
    mask[: record.exact] = False
    for span in record.spans:
        mask[span.start : span.end] = False
    return mask


def shared_runs(record: Record, earlier: Sequence[Record], most: int) -> list[SharedRun]:
    """The `most` longest runs that `record` computed and one of `earlier` has, longest first.

    They do not overlap in the prompt, and have SURE_TO_BE_FOUND tokens or more. What could have
    been lent, being of the same salt and exact, counts as longer than what never could.
    """

    def worth(run: SharedRun) -> int:
        return run.length * (1 + (run.donor.salt == record.salt) + run.exact_there)

    computed = computed_mask(record)
    found = [
        run
        for donor, shift in _diagonals(record.prompt, earlier)
        if (run := _longest(record.prompt, computed, donor, shift)) is not None
    ]
    found.sort(key=worth, reverse=True)
    kept: list[SharedRun] = []
    for run in found:
        if len(kept) < most and not any(_overlap(run, other) for other in kept):
            kept.append(run)
    return kept


def _diagonals(prompt: IntArray, earlier: Sequence[Record]) -> list[tuple[Record, int]]:
    """Donors and shifts (position here minus position there) with the most blocks in common."""
    windows = window_hashes(prompt, BLOCK, seed=0)
    if not len(windows):
        return []
    order = np.argsort(windows, kind="stable")
    windows = windows[order]
    counted: list[tuple[int, Record, int]] = []
    for donor in earlier:
        blocks = block_hashes(donor.tokens, BLOCK, seed=0)
        at = np.minimum(np.searchsorted(windows, blocks), len(windows) - 1)
        hits = np.flatnonzero(windows[at] == blocks)
        shifts, counts = np.unique(order[at[hits]] - hits * BLOCK, return_counts=True)
        best = np.argsort(-counts, kind="stable")[:_DIAGONALS]
        counted += [(int(counts[i]), donor, int(shifts[i])) for i in best]
    counted.sort(key=lambda entry: -entry[0])
    return [(donor, shift) for _, donor, shift in counted[:_DIAGONALS]]


def _longest(
    prompt: IntArray, computed: npt.NDArray[np.bool_], donor: Record, shift: int
) -> SharedRun | None:
    """The longest run of equal, computed tokens at this shift."""
    begin, end = max(0, shift), min(len(prompt), len(donor.tokens) + shift)
    there = donor.tokens[begin - shift : end - shift]
    equal = (prompt[begin:end] == there) & computed[begin:end]
    edges = np.flatnonzero(np.diff(equal.astype(np.int8), prepend=0, append=0))
    starts, lengths = edges[::2], edges[1::2] - edges[::2]
    if not len(starts) or lengths.max() < SURE_TO_BE_FOUND:
        return None
    best = int(lengths.argmax())
    start = begin + int(starts[best])
    return SharedRun(donor, start, int(lengths[best]), start - shift)


def _overlap(one: SharedRun, other: SharedRun) -> bool:
    return one.start < other.start + other.length and other.start < one.start + one.length


def donor_of(record: Record, run: SourceRun, earlier: Sequence[Record]) -> Record | None:
    """The first of `earlier` that has the run's tokens where the donor had them, exact ones first.

    None for what nobody lent, for a paraphrase, whose donor has other tokens, and for donors that
    are not remembered any more.
    """
    start = run.donor_start
    if start is None or (run.span is not None and run.span.tier is Tier.PARAPHRASE):
        return None
    wanted, end = record.prompt[run.start : run.end], start + run.length
    approximate = None
    for donor in earlier:
        if donor.salt != record.salt or not np.array_equal(donor.tokens[start:end], wanted):
            continue
        if end <= donor.lends_up_to:
            return donor
        approximate = approximate or donor  # exact by now, if it was healed
    return approximate


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


def pieces(texts: TokenTexts, ids: Iterable[int]) -> list[str]:
    """One text per token, together the whole text: a character belongs to the token that ends it.

    Bytes that make no character become replacement characters.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    found = [decoder.decode(texts.of(token)[1]) for token in ids]
    if found:
        found[-1] += decoder.decode(b"", final=True)
    return found
