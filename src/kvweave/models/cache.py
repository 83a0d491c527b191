"""Where models are kept that had to be fetched or converted."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvweave.errors import KvweaveError, reason


def cache_folder() -> Path:
    """`KVWEAVE_CACHE`, else .cache/kvweave in the user's home; it need not exist yet."""
    return Path(os.environ.get("KVWEAVE_CACHE") or Path.home() / ".cache" / "kvweave")


@contextmanager
def filled_once(target: Path) -> Iterator[Path]:
    """A new folder to fill, which becomes `target` in one step when the block ends without error.

    Two processes may fill the same target at once: the first to end wins, and the other's work is
    dropped. Nobody ever sees a half-filled target. KvweaveError if the place cannot be written.
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
