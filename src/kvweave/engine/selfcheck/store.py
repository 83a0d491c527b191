"""Remembers what a self-check measured, so that the next start need not measure again.

Only figures are kept, never what followed from them: thresholds may change from start to start.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

import kvweave
from kvweave.config import EngineConfig
from kvweave.engine.selfcheck.cases import Case
from kvweave.engine.selfcheck.measure import Measured
from kvweave.models.cache import cache_folder
from kvweave.models.loading import LoadedModel

_log = logging.getLogger(__name__)

_WITHOUT_EFFECT = ("fuzzy_self_check", "fuzzy_time_budget", "fuzzy_heal")
"""What settings begin with that change no answer of the self-check."""

Key = Mapping[str, Any]


def key_of(config: EngineConfig, loaded: LoadedModel, cases: Sequence[Case]) -> Key:
    """All that the figures depend on, as JSON can write it.

    The prompts' tokens stand for the texts, the tokenizer and the chat template.
    """
    prompts = xxhash.xxh3_128()
    for case in cases:
        for tokens in (case.donor, case.recipient):
            prompts.update(tokens.tobytes() + b";")
    fuzzy = {
        name: value
        for name, value in dataclasses.asdict(config.fuzzy).items()
        if not name.startswith(_WITHOUT_EFFECT)
    }
    return {
        "kvweave": kvweave.__version__,
        "model": loaded.identity,
        "device": loaded.device.type,
        "attention": config.model.attention_backend,
        "prompts": prompts.hexdigest(),
        **fuzzy,
    }


def recall(key: Key) -> list[Measured] | None:
    """What `remember` was given with this key; None if that is not known (any more)."""
    try:
        kept = json.loads(_file(key).read_text(encoding="utf-8"))
        if kept["key"] != key:
            return None
        return [Measured(**each) for each in kept["measured"]]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("the self-check is run again, since its result cannot be read: %s", error)
        return None


def remember(key: Key, measured: Sequence[Measured]) -> None:
    """Keep it for `recall`, in any process. A folder that cannot be written costs a log line."""
    file = _file(key)
    kept = {"key": key, "measured": [dataclasses.asdict(each) for each in measured]}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=file.parent, prefix=".")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(kept, stream, indent=1)
        os.replace(scratch, file)
    except OSError as error:
        _log.warning("the next start will run the self-check again: %s", error)


def _file(key: Key) -> Path:
    name = xxhash.xxh3_128_hexdigest(json.dumps(key, sort_keys=True).encode())
    return cache_folder() / "self-checks" / f"{name}.json"
