"""Bench: many askers of one moved document, read where the donor has it, and copied for each."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kvweave.config import CacheConfig, EngineConfig, FuzzyConfig, SchedulerConfig
from kvweave.kv.pool import IntArray
from kvweave_bench.base import Bench
from kvweave_bench.driver import Answer, Driver
from kvweave_bench.measure import Against, row
from kvweave_bench.report import Row
from kvweave_bench.setting import Setting
from kvweave_bench.workloads.prompts import wrapped_documents

_CASES = ((16, 8000, 16), (64, 1024, 16), (64, 1024, 4))
_QUICK_CASES = ((4, 512, 16),)
"""Askers, the document's length, slots per page."""
_WRAPPER_ROOM = 128
_OUTPUT = 8
_SHARED, _COPIES = "shared", "copies"


def measure(setting: Setting) -> list[Row]:
    """Pages held at the peak, and ids against those with copies.

    peak_pages_ratio: 1 is the document once, and what each asker computes itself. peak_documents:
    the same pages, counted in documents. plan_tokens_ratio: what the plans need if no slot is left
    over in a page: the donor's whole prompt once, and of each asker what is computed for it, or
    moved in runs too short to be shared, all answers at full length.
    """
    rows = []
    for askers, length, page_size in _QUICK_CASES if setting.quick else _CASES:
        case = "" if length == _CASES[0][1] else f", {askers} of {length}"
        if page_size != _CASES[0][2]:
            case += f", pages of {page_size}"
        rows += _case(setting, askers, length, page_size, case)
    return rows


def _case(setting: Setting, askers: int, length: int, page_size: int, case: str) -> list[Row]:
    document = setting.corpus.take(length)
    room, distinct = _WRAPPER_ROOM, min(askers, 16)
    found = wrapped_documents(setting.corpus, document, distinct + 1, room)
    donor, *prompts = (each.tokens for each in found)
    # More askers than heads of different lengths: others begin with other tokens.
    prompts += [
        np.concatenate([setting.corpus.take(4), prompts[at % distinct]])
        for at in range(askers - distinct)
    ]
    answers: dict[str, list[Answer]] = {_SHARED: [], _COPIES: []}
    peaks = {}
    with setting.progress(f"{askers} askers of {length} tokens", 2 * setting.n) as advance:
        for turn in range(setting.n):
            for arm in (_SHARED, _COPIES) if turn % 2 == 0 else (_COPIES, _SHARED):
                served, peaks[arm] = _serve(setting, arm, donor, prompts, page_size)
                answers[arm] += served
                advance()
    one_copy = length + sum(map(_computed, answers[_SHARED][:askers]))
    same = [
        float(ours.token_ids == theirs.token_ids)
        for ours, theirs in zip(answers[_SHARED], answers[_COPIES], strict=True)
    ]
    against = Against(_COPIES + case, _first_tokens(answers[_COPIES]))
    pages = [
        Row(metric=metric, arm=arm + case, value=peaks[arm] / tokens, unit="x", n=askers)
        for metric, tokens in (("peak_pages_ratio", one_copy), ("peak_documents", length))
        for arm in (_SHARED, _COPIES)
    ]
    needed = len(donor) + sum(map(_own, answers[_SHARED][:askers]))
    return [
        *pages,
        Row(
            metric="plan_tokens_ratio",
            arm=_SHARED + case,
            value=needed / one_copy,
            unit="x",
            n=askers,
        ),
        replace(row("identical_ids", _SHARED + case, same, "share"), value=float(np.mean(same))),
        row("first_token_ms", _SHARED + case, _first_tokens(answers[_SHARED]), "ms", against),
        row("first_token_ms", _COPIES + case, _first_tokens(answers[_COPIES]), "ms"),
    ]


def _serve(
    setting: Setting, arm: str, donor: IntArray, prompts: list[IntArray], page_size: int
) -> tuple[list[Answer], int]:
    """The prompts at once in a new engine that has served the donor; with the most slots held."""
    driver = _driver(setting, arm, len(donor), len(prompts), page_size)
    driver.serve([donor])
    answers = driver.serve(prompts, max_tokens=_OUTPUT)
    return answers, driver.peak_pages * driver.engine.cache.page_size


def _computed(answer: Answer) -> int:
    """Tokens whose KV is the asker's own by nature: computed for it."""
    usage = answer.usage
    return len(answer.prompt) + _OUTPUT - usage.cached_tokens - usage.moved_tokens


def _own(answer: Answer) -> int:
    """Tokens that cannot be read in the donor's pages: computed, or moved in short runs."""
    short = [span for span in answer.plan if not span.shared]
    again = sum(
        length
        for start, length in answer.refreshed
        for span in short
        if span.start <= start < span.end
    )
    return _computed(answer) + sum(span.length for span in short) - again


def _first_tokens(answers: list[Answer]) -> list[float]:
    return [1e3 * answer.first_token_seconds for answer in answers]


def _driver(setting: Setting, arm: str, longest: int, askers: int, page_size: int) -> Driver:
    fuzzy = FuzzyConfig() if arm == _SHARED else FuzzyConfig(share_span=0)
    room = (askers + 2) * (longest + _WRAPPER_ROOM)
    return Driver(
        setting.loaded,
        EngineConfig(
            model=setting.model_config,
            cache=CacheConfig(
                prefix_cache_backend="fuzzy_match", max_total_tokens=room, page_size=page_size
            ),
            scheduler=SchedulerConfig(max_running_requests=askers),
            fuzzy=fuzzy,
        ),
    )


BENCH = Bench(
    name="shared",
    counts="rounds",
    n=3,
    quick_n=1,
    measure=measure,
)
