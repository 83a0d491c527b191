"""The cache folder of fetched and converted models, and the protocol for progress reports."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from transformers.utils import logging

from kvweave.errors import KvweaveError, reason


def cache_folder() -> Path:
    """`KVWEAVE_CACHE`, else .cache/kvweave in the user's home; it need not exist yet."""
    return Path(os.environ.get("KVWEAVE_CACHE") or Path.home() / ".cache" / "kvweave")


@contextmanager
def filled_once(target: Path) -> Iterator[Path]:
    """A new folder to fill, which becomes `target` in one step when the block ends without error.

    Two processes may fill the same target at once: the first to end wins, and the other's work is
    dropped. A half-filled target is never visible. KvweaveError if the place cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise KvweaveError(
            f"nothing can be kept in {target.parent}: {reason(error)}; name another folder with "
            "the environment variable KVWEAVE_CACHE"
        ) from error
    try:
        yield folder
        folder.chmod(0o755)  # mkdtemp's folders are for their owner alone
        try:
            folder.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Progress(Protocol):
    """Receives the progress of work; called from the thread that does the work."""

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """`done` of `total` units (bytes, or steps) of `what`, words for a person.

        A piece of work begins with `done` 0 and ends with `done` equal to `total`. `total` is None
        while it is unknown; then the next piece's beginning, or the caller's return, is the end.
        """


def silent(what: str, done: int, total: int | None) -> None:
    """A Progress that shows nothing."""


@contextmanager
def no_library_bars() -> Iterator[None]:
    """Hide transformers' own progress bars within the block."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
