"""Resolves the model that the user names to a folder or hub name that transformers can load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from huggingface_hub import hf_hub_download
from transformers import AutoConfig, PreTrainedConfig

from kvweave.config.model import names_a_path
from kvweave.errors import UnsupportedModelError, reason
from kvweave.models import gguf
from kvweave.models.cache import Progress

_BLOCK = 1 << 24


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """A model that was found. `path` is a folder or a hub name, `revision` a hub commit or None.

    `fingerprint` differs whenever the model's content does.
    """

    path: str
    name: str
    settings: PreTrainedConfig
    fingerprint: str
    revision: str | None = None
    dequantized: bool = False
    """The folder holds the float weights of a GGUF file, in the cache folder."""


def find_source(
    model: str | None, revision: str | None, dtype: torch.dtype, progress: Progress
) -> Source:
    """Find the model, and fetch or convert it if necessary; None is the packaged one.

    Raises UnsupportedModelError if it does not exist or is no model.
    """
    if model is None:
        # Here, for `python -m` runs that module itself and must not find it imported.
        from kvweave.models import packaged

        folder = packaged.packaged_model(progress=progress)
        fingerprint = packaged.SHA256[:32]
        return Source(str(folder), packaged.NAME, _settings(folder), fingerprint, dequantized=True)
    path = Path(model).expanduser()
    if path.is_dir():
        return _from_folder(path, progress)
    if path.is_file() or path.suffix == ".gguf":
        return _from_gguf(path, dtype, progress)
    if names_a_path(model):
        raise UnsupportedModelError(f"there is no folder or GGUF file {model}")
    return _from_hub(model, revision)


def _from_folder(folder: Path, progress: Progress) -> Source:
    if not (folder / "config.json").is_file():
        raise UnsupportedModelError(f"{folder} is no model's folder: it holds no config.json")
    settings = _settings(folder)
    files = sorted(
        file for file in folder.iterdir() if file.suffix in (".json", ".safetensors", ".bin")
    )
    return Source(str(folder), folder.resolve().name, settings, _fingerprint(files, progress))


def _from_gguf(file: Path, dtype: torch.dtype, progress: Progress) -> Source:
    if not file.is_file():
        raise UnsupportedModelError(f"there is no file {file}")
    if file.suffix != ".gguf":
        raise UnsupportedModelError(
            f"{file} is neither a GGUF file nor a folder with a model; the folder is what to name"
        )
    fingerprint = _fingerprint([file], progress)
    folder = gguf.converted_folder(file.stem, fingerprint, dtype)
    if not folder.is_dir():
        gguf.convert(file, folder, dtype, progress=progress)
    return Source(str(folder), file.stem, _settings(folder), fingerprint, dequantized=True)


def _from_hub(name: str, revision: str | None) -> Source:
    try:
        config = Path(hf_hub_download(name, "config.json", revision=revision))
    except Exception as error:  # the hub's client has a dozen kinds of errors
        raise UnsupportedModelError(
            f"{name} is no folder and no GGUF file here, and the model hub did not supply a model "
            f"of that name: {reason(error)}"
        ) from error
    # The client keeps each commit's files in a folder named after it.
    commit = config.parent.name
    return Source(name, name, _settings(config.parent), commit, commit)


def _settings(folder: Path) -> PreTrainedConfig:
    try:
        settings: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers raises a dozen kinds
        raise UnsupportedModelError(
            f"{folder / 'config.json'} cannot be used: {reason(error)}"
        ) from error
    return settings


def _fingerprint(files: list[Path], progress: Progress) -> str:
    """A digest of names and contents. What it reads, loading reads again out of the page cache."""
    digest = xxhash.xxh3_128()
    what = "Reading the model's files"
    total, done = sum(file.stat().st_size for file in files), 0
    progress(what, done, total)
    for file in files:
        digest.update(file.name.encode() if len(files) > 1 else b"")
        with file.open("rb") as source:
            while block := source.read(_BLOCK):
                digest.update(block)
                done += len(block)
                progress(what, done, total)
    return digest.hexdigest()
