"""Queries about past prompts, and the JSON objects that the explorer shows of them.

Queries find donors of KV, shared text, and why shared text was not reused. With `texts` None the
JSON holds no text and no token ids: only lengths, positions and sources.
"""

from __future__ import annotations

import codecs
import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvweave.explorer.history import REFRESHED, Record, SourceRun
from kvweave.fuzzy.matcher import EqualRun, TextIndex, window_hashes
from kvweave.kv.pool import IntArray
from kvweave.prefix.contract import Declined, NodeSnapshot, NotReused, TreeSnapshot
from kvweave.prefix.lease import RequestView, Tier
from kvweave.server.metrics import RequestMetrics, milliseconds
from kvweave.server.responses import TokenTexts

if TYPE_CHECKING:
    from kvweave.engine.engine import Engine


BLOCK = 8
SURE_TO_BE_FOUND = 2 * BLOCK - 1
_SECONDS = 2.0
"""Limit of one search; it then returns the runs found so far."""


class SharedRun(NamedTuple):
    """`length` equal tokens, from `start` of the prompt and from `donor_start` of the donor."""

    donor: Record
    start: int
    length: int
    donor_start: int

    @property
    def exact_there(self) -> bool:
        """Whether the donor's KV of the run depends on nothing approximate."""
        return self.donor_start + self.length <= self.donor.lends_up_to


def computed_mask(record: Record) -> npt.NDArray[np.bool_]:
    """Positions of the prompt that no donor served: bool, (length)."""
    mask = np.ones(record.prompt_length, np.bool_)
    mask[: record.exact] = False
    for span in record.spans:
        mask[span.start : span.end] = False
    return mask


def shared_runs(record: Record, earlier: Sequence[Record], most: int) -> list[SharedRun]:
    """The `most` longest runs that `record` computed and one of `earlier` has, longest first.

    They do not overlap in the prompt and have SURE_TO_BE_FOUND tokens or more. Runs of the same
    salt and exact ones, which could have been reused, rank as if they were longer.
    """

    def worth(run: SharedRun) -> int:
        return run.length * (1 + (run.donor.salt == record.salt) + run.exact_there)

    computed = computed_mask(record)
    windows = window_hashes(record.prompt, BLOCK, seed=0)
    deadline = time.monotonic() + _SECONDS
    found: list[SharedRun] = []
    for donor in earlier:
        index = TextIndex(donor.tokens, BLOCK, seed=0)
        for run in index.runs(record.prompt, windows, deadline - time.monotonic()):
            found += _computed_parts(computed, donor, run)
    found.sort(key=worth, reverse=True)
    kept: list[SharedRun] = []
    for one in found:
        if len(kept) < most and not any(_overlap(one, other) for other in kept):
            kept.append(one)
    return kept


def _computed_parts(
    computed: npt.NDArray[np.bool_], donor: Record, run: EqualRun
) -> Iterator[SharedRun]:
    """The parts of `run` that were computed, of SURE_TO_BE_FOUND tokens or more."""
    mask = computed[run.start : run.start + run.length]
    edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0)).tolist()
    for first, last in zip(edges[::2], edges[1::2], strict=True):
        if last - first >= SURE_TO_BE_FOUND:
            yield SharedRun(donor, run.start + first, last - first, run.donor_start + first)


def _overlap(one: SharedRun, other: SharedRun) -> bool:
    return one.start < other.start + other.length and other.start < one.start + one.length


def donor_of(record: Record, run: SourceRun, earlier: Sequence[Record]) -> Record | None:
    """The first of `earlier` with the run's tokens at the donor's position, exact ones first.

    None if the run was computed, for a paraphrase, whose donor has other tokens, and if the donor
    is not in the history any more.
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
        approximate = approximate or donor  # may be exact by now, if it was healed
    return approximate


NOTHING = NotReused(
    "timing",
    "it could be reused now: when this prompt came, it was not cached yet, or was not found in "
    "time",
)


class Explained(NamedTuple):
    """A shared run and the reason why it was not reused."""

    run: SharedRun
    why: NotReused


def explain(engine: Engine, record: Record, runs: Sequence[SharedRun]) -> list[Explained]:
    """The first gate that refuses each run. Runs on the engine's thread; changes nothing."""
    return [Explained(run, _why_not_reused(engine, record, run)) for run in runs]


def declined_paraphrases(engine: Engine, record: Record) -> list[Declined]:
    """The first declined paraphrase of each passage where none is served, in order.

    Runs on the engine's thread; changes nothing.
    """
    found: dict[int, Declined] = {}
    for each in engine.cache.inspector.declined(record.rid):
        if not any(span.start < each.end and each.start < span.end for span in record.spans):
            found.setdefault(each.start, each)
    return [found[start] for start in sorted(found)]


def _why_not_reused(engine: Engine, record: Record, run: SharedRun) -> NotReused:
    if run.donor.salt != record.salt:
        return NotReused("salt", "the other prompt has another cache_salt")
    view = view_of(engine, record, record.prompt)
    why = engine.cache.inspector.why_not_reused(
        view, record.exact, run.start, run.length, run.donor_start
    )
    return why or _not_cached(engine, run) or NOTHING


def _not_cached(engine: Engine, run: SharedRun) -> NotReused | None:
    cached = engine.cache.match(view_of(engine, run.donor, run.donor.tokens))
    if cached >= run.donor_start + run.length:
        return None
    if not run.exact_there:
        return NotReused(
            "approximate",
            "the other prompt was itself served moved text before this point, and approximate KV "
            "is never reused",
        )
    size = engine.cache.page_size
    if len(run.donor.tokens) - cached <= size:
        reason = f"only whole pages of {size} tokens are kept, and it reaches into the last one"
        return NotReused("page", reason)
    return NotReused("evicted", "its KV is not cached any more, or not to its end")


def view_of(engine: Engine, record: Record, tokens: IntArray) -> RequestView:
    """`tokens` as a request of `record`'s salt and settings."""
    return RequestView(
        rid=str(record.number),
        tokens=tokens,
        namespace=engine.namespace(record.salt),
        fuzzy=record.fuzzy,
    )


def pieces(texts: TokenTexts, ids: Iterable[int]) -> list[str]:
    """One text per token; joined they are the whole text.

    A character belongs to the token that completes it. Invalid bytes become U+FFFD.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    found = [decoder.decode(texts.of(token)[1]) for token in ids]
    if found:
        found[-1] += decoder.decode(b"", final=True)
    return found


MOST_SHOWN = 16_384
"""Prompt tokens whose text is sent; further ones are only counted."""
ANSWER_SHOWN = 1_024
BEGINNING = 24
"""Tokens of a prompt that its entry in the list shows."""
PLAYGROUND = "playground-"
"""How playground.js begins its request ids."""


def live_view(metrics: RequestMetrics) -> dict[str, Any]:
    """A request in progress."""
    return {
        "rid": metrics.rid,
        "endpoint": metrics.endpoint,
        "seconds": round(metrics.total_seconds, 2),
        "answering": metrics.first_token_seconds is not None,
        "prompt_tokens": metrics.usage.prompt_tokens,
        "completion_tokens": metrics.completion_tokens,
        "cached_tokens": metrics.usage.cached_tokens,
        "moved_tokens": metrics.usage.moved_tokens,
    }


def summary_view(record: Record, texts: TokenTexts | None) -> dict[str, Any]:
    """An entry in the list of prompts, and a point in the chart.

    Chat templates and system texts begin most prompts: `beginning` is where this one differs.
    """
    view: dict[str, Any] = {
        "number": record.number,
        "rid": record.rid,
        "endpoint": record.endpoint,
        "namespace": _label(record.salt),
        "arrived": round(record.arrived, 3),
        "outcome": record.outcome,
        "prompt_tokens": record.prompt_length,
        "completion_tokens": len(record.answer),
        "first_token_ms": milliseconds(record.first_token),
        "total_ms": milliseconds(record.total),
        "fuzzy": record.fuzzy,
        "counts": record.counts,
        "playground": record.rid.startswith(PLAYGROUND),
    }
    if texts is not None:
        head = record.prompt[record.begins_at : record.begins_at + BEGINNING]
        view["beginning"] = "".join(pieces(texts, head.tolist()))
    return view


def prompt_view(
    record: Record, earlier: Sequence[Record], lenders: Mapping[int, int], texts: TokenTexts | None
) -> dict[str, Any]:
    """One prompt with its blocks by source; `lenders` holds prompt numbers by tree node."""
    blocks = [_block(record, run, earlier, lenders) for run in record.runs()]
    answer: dict[str, Any] = {"length": len(record.answer)}
    if texts is not None:
        shown = pieces(texts, record.tokens[: min(record.prompt_length, MOST_SHOWN)].tolist())
        for block in blocks:
            block["tokens"] = shown[block["start"] : block["start"] + block["length"]]
        answer["tokens"] = pieces(texts, record.answer[:ANSWER_SHOWN].tolist())
    return {**summary_view(record, texts), "blocks": blocks, "answer": answer}


def _block(
    record: Record, run: SourceRun, earlier: Sequence[Record], lenders: Mapping[int, int]
) -> dict[str, Any]:
    block: dict[str, Any] = {"source": run.source, "start": run.start, "length": run.length}
    if run.donor_start is not None:
        donor = donor_of(record, run, earlier)
        number = None if donor is None else donor.number
        if number is None and run.span is not None and not run.span.generation:
            number = lenders.get(run.span.donor)
        block |= {"donor_start": run.donor_start, "donor": number}
        if run.span is not None and run.span.generation:
            block["generation"] = run.span.generation
        if run.span is not None and run.span.shared and run.source != REFRESHED:
            block["shared"] = run.span.shared
    return block


def why_not_view(
    explained: Iterable[Explained],
    declined: Iterable[Declined],
    compared: int,
    record: Record,
    texts: TokenTexts | None,
) -> dict[str, Any]:
    """Shared runs that were computed, with the gate that refused each, and declined paraphrases.

    A paraphrase's reason quotes text, so it is there only where text may be shown.
    """
    runs = []
    for run, why in explained:
        entry: dict[str, Any] = {
            "start": run.start,
            "length": run.length,
            "donor": run.donor.number,
            "donor_start": run.donor_start,
            "gate": why.gate,
            "reason": why.reason,
        }
        if texts is not None:
            entry["excerpt"] = _excerpt(record, run.start, run.length, texts)
        runs.append(entry)
    words = []
    for each in declined:
        entry = {"start": each.start, "length": each.end - each.start, "gate": each.kind}
        if texts is not None:
            entry["reason"] = each.reason
            entry["excerpt"] = _excerpt(record, each.start, entry["length"], texts)
        words.append(entry)
    computed = record.counts["fresh"]
    return {"compared": compared, "computed": computed, "runs": runs, "other_words": words}


def _excerpt(record: Record, start: int, length: int, texts: TokenTexts) -> str:
    tokens = record.prompt[start : start + min(length, 40)]
    return "".join(pieces(texts, tokens.tolist()))


def tree_view(snapshot: TreeSnapshot, texts: TokenTexts | None) -> dict[str, Any]:
    """The nodes that are shown, and totals of the whole tree."""
    return {
        "page_size": snapshot.page_size,
        "cached_tokens": snapshot.cached_pages * snapshot.page_size,
        "evictable_tokens": snapshot.evictable_pages * snapshot.page_size,
        "shown_tokens": sum(node.length for node in snapshot.nodes),
        "nodes": [_node(node, texts) for node in snapshot.nodes],
    }


def _node(node: NodeSnapshot, texts: TokenTexts | None) -> dict[str, Any]:
    view: dict[str, Any] = {
        "id": node.order,
        "parent": node.parent,
        "namespace": _label(node.namespace.salt),
        "start": node.start,
        "length": node.length,
        "locks": node.locks,
        "hits": node.hits,
        "idle": node.idle,
        "children": node.children,
        "goes": node.goes,
        "prompts": [int(rid) for rid in node.prompts],
    }
    if texts is not None:
        view["head"] = "".join(pieces(texts, node.head.tolist()))
    return view


def _label(salt: str | None) -> str | None:
    """A short hash that tells namespaces apart: a salt may be secret."""
    if salt is None:
        return None
    return hashlib.blake2s(salt.encode(), digest_size=2).hexdigest()
