"""An undo log: a cache operation that fails half-way puts back everything that it changed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

_Key = TypeVar("_Key", bound=Hashable)
_log = logging.getLogger(__name__)


class Journal:
    """Old values of what the current operation changes; write-ahead, newest last.

    Code that changes shared state calls `fields`, `items`, `keys` or `tail` first, and then assigns
    as usual. Outside an operation nothing is recorded. The entries of an operation that returned
    are dropped when the next one begins, so there is no commit that could fail.

    Operations do not nest: one that consists of several must leave each intermediate state valid.
    KV in tensors is not covered. It is written between operations, into pages that only the
    writer owns.
    """

    __slots__ = ("_notices", "_undo")

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] | None = None
        self._notices: list[Callable[[], object]] = []

    def begin(self) -> None:
        """Start to record an operation."""
        self._notices = []
        self._undo = []

    def fields(self, thing: object, *names: str) -> None:
        """These attributes are about to be assigned."""
        if self._undo is not None:
            self._undo += [partial(setattr, thing, name, getattr(thing, name)) for name in names]

    def items(self, array: npt.NDArray[Any], index: Any) -> None:
        """`array[index]` is about to be assigned."""
        if self._undo is not None:
            self._undo.append(partial(array.__setitem__, index, np.array(array[index])))

    def keys(self, mapping: dict[_Key, Any], *keys: _Key) -> None:
        """These entries are about to be set or deleted."""
        if self._undo is not None:
            for key in keys:
                if key in mapping:
                    self._undo.append(partial(mapping.__setitem__, key, mapping[key]))
                else:
                    self._undo.append(partial(mapping.pop, key, None))

    def tail(self, sequence: list[Any]) -> None:
        """`sequence` is about to be appended to."""
        if self._undo is not None:
            self._undo.append(partial(sequence.__delitem__, slice(len(sequence), None)))

    def on_undo(self, call: Callable[..., object], *arguments: object) -> None:
        """Call this while undoing, in its place among the entries."""
        if self._undo is not None:
            self._undo.append(partial(call, *arguments))

    def after_undo(self, call: Callable[..., object], *arguments: object) -> None:
        """Call this once everything is as it was: somebody was told of a change that is void."""
        if self._undo is not None:
            self._notices.append(partial(call, *arguments))

    def undo(self) -> None:
        """Put everything back, newest change first."""
        undo, self._undo = self._undo or [], None
        for step in reversed(undo):
            step()
        for notice in reversed(self._notices):
            try:
                notice()
            except Exception:
                _log.exception("an undone change could not be taken back elsewhere")


class _Journaled(Protocol):
    @property
    def _journal(self) -> Journal: ...


_Self = TypeVar("_Self", bound=_Journaled)
_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def atomic(
    operation: Callable[Concatenate[_Self, _Given], _Result],
) -> Callable[Concatenate[_Self, _Given], _Result]:
    """Makes a method of something with a `_journal` an operation: if it raises, nothing changed."""

    @wraps(operation)
    def whole(self: _Self, /, *given: _Given.args, **more: _Given.kwargs) -> _Result:
        self._journal.begin()
        try:
            return operation(self, *given, **more)
        except BaseException:
            self._journal.undo()
            raise

    return whole
