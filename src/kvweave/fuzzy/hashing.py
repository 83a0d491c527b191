"""Hashes of token windows: at every offset of a prompt, or one a stride.

Polynomial hashes modulo 2^64 over mixed tokens (Karp and Rabin, 1987), built by doubling: a window
of 2n tokens is two windows of n. All arithmetic is whole-array and wraps on purpose. A hash only
nominates; whoever uses one compares tokens.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvweave.kv.pool import IntArray

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
    """Neighbouring token ids become unrelated 64-bit numbers."""
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
