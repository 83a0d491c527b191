"""How long work is reported to whoever shows it: one plain call, no screen in sight."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from transformers.utils import logging


class Progress(Protocol):
    """Told how far a piece of work has come; called from the thread that does the work."""

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """`done` of `total` units (bytes, or steps) of `what`, words for a person.

        A piece of work begins with `done` 0 and ends with `done` equal to `total`. `total` is None
        while nobody knows it; then the end is the next piece's beginning, or the caller's return.
        """


def silent(what: str, done: int, total: int | None) -> None:
    """The Progress that shows nothing."""


@contextmanager
def no_library_bars() -> Iterator[None]:
    """Keep transformers' own bars off the screen within the block: a Progress is told instead."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
