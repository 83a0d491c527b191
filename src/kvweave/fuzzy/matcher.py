"""Finds runs of equal tokens between a prompt and other texts: hashes, probing, extension.

All searches for shared text work alike. Each donor text has anchors: the hash of one window of
`stride` tokens at every multiple of the stride. A prompt hashes the window at every offset and
looks each up among the anchors, as rsync does. A hit only nominates: tokens are compared and the
run is extended both ways. A shared run of 2 x stride - 1 tokens holds a whole anchored window
wherever it lies in either text, so it is found.

The span index searches all donors of the tree, pending prompts and the explorer search one text
after another, and the router counts windows without comparing tokens.

Pending donors are running prompts whose text a waiting prompt can use once it is published: two
requests bring the same document behind different headers at the same time. The second can be
served from the first as soon as that has published the document, so it waits if that saves much.

Hashes are polynomials modulo 2^64 over mixed tokens (Karp and Rabin, 1987), built by doubling: a
window of 2n tokens is two windows of n. The arithmetic is whole-array and wraps on purpose.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from kvweave.config import FuzzyConfig
from kvweave.kv.pool import IntArray
from kvweave.prefix.hash_index import namespace_seed
from kvweave.prefix.lease import Lease, RequestView
from kvweave.prefix.tree import common_prefix

HashArray: TypeAlias = npt.NDArray[np.uint64]

_HALF = np.uint64(32)
_BASE = 0x9E3779B97F4A7C15  # odd, so that no power of it loses bits
_SPREAD = np.uint64(0xBF58476D1CE4E5B9)
_FINAL = np.uint64(0x94D049BB133111EB)


def window_hashes(tokens: IntArray, width: int, seed: int) -> HashArray:
    """The hash of `tokens[i : i + width]` for every i: uint64 (max(0, len(tokens) - width + 1))."""
    if len(tokens) < width:
        return np.zeros(0, np.uint64)
    single = _mixed(tokens)
    hashes, length = single, 1
    for bit in bin(width)[3:]:  # the width's binary digits, after the leading one
        joined = hashes[:-length] * _power(length)
        joined += hashes[length:]
        hashes, length = joined, 2 * length
        if bit == "1":
            joined = hashes[:-1] * _power(1)
            joined += single[length:]
            hashes, length = joined, length + 1
    return _finished(hashes, seed)


def block_hashes(tokens: IntArray, width: int, seed: int) -> HashArray:
    """`window_hashes(tokens, width, seed)[::width]`, for a fraction of the work."""
    blocks = len(tokens) // width
    powers = np.array([_power(width - 1 - i) for i in range(width)])
    mixed = _mixed(tokens[: blocks * width]).reshape(blocks, width)
    return _finished((mixed * powers).sum(axis=1, dtype=np.uint64), seed)


def _power(exponent: int) -> np.uint64:
    return np.uint64(pow(_BASE, exponent, 2**64))


def _mixed(tokens: IntArray) -> HashArray:
    """Spreads token ids over 64 bits: neighbouring ids become unrelated numbers."""
    hashes = tokens.astype(np.uint64)
    hashes *= np.uint64(_BASE)
    hashes ^= hashes >> _HALF
    hashes *= _SPREAD
    return hashes


def _finished(hashes: HashArray, seed: int) -> HashArray:
    """Fold the high half, which knows the order of tokens, into the low one, and spread both."""
    hashes = hashes ^ np.uint64(seed)
    hashes ^= hashes >> _HALF
    hashes *= _FINAL
    hashes ^= hashes >> _HALF
    return hashes


def anchors_of(
    tokens: IntArray, start: int, published: int, stride: int, seed: int
) -> tuple[HashArray, IntArray]:
    """Anchors of a text whose first token has position `start`: hashes, and last positions.

    Only windows that end at position `published` or behind it; earlier ones are known already.
    """
    skipped = -start % stride
    hashes = block_hashes(tokens[skipped:], stride, seed)
    first = start + skipped + stride - 1
    ends = np.arange(first, first + stride * len(hashes), stride, dtype=np.int32)
    new = ends >= published
    return hashes[new], ends[new]


Offsets: TypeAlias = npt.NDArray[np.intp]

PLACES_TRIED = 4
"""Places with the same anchor that are compared for the longest run, newest first."""


class Run(Protocol):
    """Equal tokens from position `start` of the prompt on."""

    @property
    def start(self) -> int: ...

    @property
    def length(self) -> int: ...


RunT = TypeVar("RunT", bound=Run)


def runs_through(
    offsets: Offsets, stride: int, longest_at: Callable[[int], RunT | None], seconds: float
) -> list[RunT]:
    """Runs of at least 2 x stride - 1 tokens through hits at `offsets` (ascending), last first.

    `longest_at(i)` gives the longest run through the window at `offsets[i]`, or None if its hash
    was a coincidence. Hits inside a run are skipped. The search goes from the right because the
    newest place of a periodic text is its deepest, where one comparison finds all of it. It stops
    after `seconds` with the runs found so far: a prompt of very many small pieces would take long.
    """
    runs: list[RunT] = []
    at = len(offsets) - 1
    deadline = time.perf_counter() + seconds
    while at >= 0 and time.perf_counter() < deadline:
        run = longest_at(at)
        if run is None or run.length < 2 * stride - 1:
            at -= 1
        else:
            runs.append(run)
            at = int(np.searchsorted(offsets, run.start)) - 1
    return runs


class EqualRun(NamedTuple):
    """`length` equal tokens, from `start` of a prompt and from `donor_start` of another text."""

    start: int
    length: int
    donor_start: int


def run_around(tokens: IntArray, here: int, donor: IntArray, there: int) -> EqualRun:
    """The longest run of equal tokens in which `tokens[here]` meets `donor[there]`."""
    before = common_suffix(tokens[: here + 1], donor[: there + 1])
    after = common_prefix(tokens[here + 1 :], donor[there + 1 :]) if before else 0
    return EqualRun(here + 1 - before, before + after, there + 1 - before)


def common_suffix(a: IntArray, b: IntArray) -> int:
    """How many trailing tokens are equal."""
    length = min(len(a), len(b))
    return common_prefix(a[::-1][:length], b[::-1][:length])


class TextIndex:
    """Anchors of one text, in which prompts are searched."""

    def __init__(
        self, tokens: IntArray, stride: int, seed: int, begin: int = 0, end: int | None = None
    ) -> None:
        """Only windows of `tokens[begin:end]` get anchors; runs extend over all of `tokens`."""
        self._tokens = tokens
        self._stride = stride
        hashes, ends = anchors_of(tokens[begin:end], begin, begin, stride, seed)
        # By hash, and of equal ones the last place first.
        order = np.argsort(hashes[::-1], kind="stable")
        self._hashes, self._ends = hashes[::-1][order], ends[::-1][order]
        # A table of the hashes' first bits rules out most windows for less than a binary search.
        bits = (8 * len(hashes)).bit_length() or 1
        self._shift = np.uint64(64 - bits)
        self._seen = np.zeros(1 << bits, np.bool_)
        self._seen[hashes >> self._shift] = True

    def runs(self, prompt: IntArray, windows: HashArray, seconds: float) -> list[EqualRun]:
        """As `runs_through`; `windows` are the hashes of all the prompt's windows."""
        offsets = np.flatnonzero(self._seen[windows >> self._shift])
        first = np.searchsorted(self._hashes, windows[offsets], side="left")
        behind = np.searchsorted(self._hashes, windows[offsets], side="right")
        found = first < behind
        offsets, first, behind = offsets[found], first[found], behind[found]

        def longest_at(hit: int) -> EqualRun | None:
            offset, place = int(offsets[hit]), int(first[hit])
            ends = self._ends[place : min(int(behind[hit]), place + PLACES_TRIED)].tolist()
            last = offset + self._stride - 1
            runs = [run_around(prompt, last, self._tokens, end) for end in ends]
            best = max(runs, key=lambda run: run.length)
            return best if best.start <= offset else None

        return runs_through(offsets, self._stride, longest_at, seconds)


_LEAST_SPANS, _LEAST_SHARE = 4, 0.25
"""A request waits for at least this many shortest spans, and this share of the tokens that it
would compute."""


class _PendingDonor:
    """A lease that will publish more of its prompt."""

    def __init__(self, lease: Lease, tokens: IntArray, page_size: int, stride: int) -> None:
        self.lease = lease
        self._tokens = tokens
        self._page_size = page_size
        self._stride = stride
        self._index: TextIndex | None = None
        self._shared: dict[str, tuple[IntArray, list[EqualRun]]] = {}
        """By request: the tokens that were compared, and the result. Neither ever changes."""

    @property
    def remaining(self) -> tuple[int, int]:
        """The positions that it will publish: from, to."""
        end = self.lease.plan.publishable(len(self._tokens))
        return self.lease.published, end // self._page_size * self._page_size

    def shared(self, view: RequestView) -> list[EqualRun] | None:
        """What `compare` found for this prompt; None if it was not called."""
        tokens, runs = self._shared.get(view.rid, (None, None))
        return runs if tokens is view.tokens else None

    def compare(self, view: RequestView, windows: HashArray, seconds: float) -> list[EqualRun]:
        """The runs that `view` shares with unpublished text; `windows` are its hashes."""
        if self._index is None:
            begin, end = self.remaining
            begin -= begin % self._stride
            seed = namespace_seed(self.lease.namespace)
            self._index = TextIndex(self._tokens, self._stride, seed, begin, end)
        runs = self._index.runs(view.tokens, windows, seconds)
        self._shared[view.rid] = view.tokens, runs
        return runs


class PendingDonors:
    """Compares what running requests will publish with what waiting ones could use elsewhere."""

    def __init__(self, page_size: int, config: FuzzyConfig) -> None:
        self._page_size = page_size
        self._stride = config.stride
        self._shortest = config.min_span
        self._least = _LEAST_SPANS * config.min_span
        self._least_reuse_ratio = config.min_reuse_ratio
        self._seconds = config.time_budget_ms / 2000
        self._donors: dict[Lease, _PendingDonor] = {}

    def add(self, lease: Lease, tokens: IntArray) -> None:
        """`lease` computes `tokens` and will publish those that its plan leaves exact."""
        donor = _PendingDonor(lease, tokens, self._page_size, self._stride)
        begin, end = donor.remaining
        if end - begin >= self._least:
            self._donors[lease] = donor

    def discard(self, lease: Lease) -> None:
        """`lease` will publish nothing any more."""
        self._donors.pop(lease, None)

    def awaited(self, view: RequestView, matched: int) -> int:
        """Tokens behind `matched` that one running request will soon offer as donor; 0 if few."""
        length = len(view.tokens)
        least = max(
            self._least, _LEAST_SHARE * (length - matched), self._least_reuse_ratio * length
        )
        windows: HashArray | None = None
        most = 0
        for donor in list(self._donors.values()):
            begin, end = donor.remaining
            if end - begin < self._least:
                self.discard(donor.lease)  # what is left to publish only shrinks
            if end - begin < least or donor.lease.namespace != view.namespace:
                continue
            shared = donor.shared(view)
            if shared is None:
                if windows is None:
                    seed = namespace_seed(view.namespace)
                    windows = window_hashes(view.tokens, self._stride, seed)
                shared = donor.compare(view, windows, self._seconds)
            most = max(most, sum(self._useful(shared, matched, begin, end)))
        return most if most >= least else 0

    def _useful(self, shared: list[EqualRun], matched: int, begin: int, end: int) -> Iterator[int]:
        """Lengths of the parts that are neither served already nor published yet."""
        for run in shared:
            skip = max(0, matched - run.start, begin - run.donor_start)
            length = min(run.donor_start + run.length, end) - run.donor_start - skip
            if length >= self._shortest:
                yield length
