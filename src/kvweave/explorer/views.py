"""JSON objects of the explorer's API.

With `texts` None they hold no text and no token ids: only lengths, positions and sources.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvweave.explorer.history import REFRESHED, Record, SourceRun
from kvweave.explorer.queries import Explained, donor_of, pieces
from kvweave.prefix.inspector import Declined
from kvweave.prefix.tree_snapshot import NodeSnapshot, TreeSnapshot
from kvweave.server.request_metrics import RequestMetrics
from kvweave.server.responses import TokenTexts

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
        "first_token_ms": _milliseconds(record.first_token),
        "total_ms": _milliseconds(record.total),
        "fuzzy": record.fuzzy,
        "counts": record.counts,
        "playground": record.rid.startswith(PLAYGROUND),
    }
    if texts is not None:
        head = record.prompt[record.begins_at : record.begins_at + BEGINNING]
        view["beginning"] = "".join(pieces(texts, head.tolist()))
    return view


def prompt_view(
    record: Record, earlier: Sequence[Record], lenders: Mapping[str, int], texts: TokenTexts | None
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
    record: Record, run: SourceRun, earlier: Sequence[Record], lenders: Mapping[str, int]
) -> dict[str, Any]:
    block: dict[str, Any] = {"source": run.source, "start": run.start, "length": run.length}
    if run.donor_start is not None:
        donor = donor_of(record, run, earlier)
        number = None if donor is None else donor.number
        if number is None and run.span is not None:
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
    for run, refusal in explained:
        entry: dict[str, Any] = {
            "start": run.start,
            "length": run.length,
            "donor": run.donor.number,
            "donor_start": run.donor_start,
            "gate": refusal.gate,
            "reason": refusal.reason,
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


def _milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 1)
