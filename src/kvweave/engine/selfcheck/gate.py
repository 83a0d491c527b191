"""Decides whether a model may be served with moved KV, from measurements on known prompts.

A model that fails, or that cannot be measured, is served with exact reuse: the engine's settings
get the exact backend's name before the engine is built.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import transformers
import xxhash

from kvweave.config import EngineConfig, FuzzyConfig
from kvweave.config.base import values_of
from kvweave.engine.selfcheck.cases import SelfCheckCase, build_cases
from kvweave.engine.selfcheck.measure import Measured, measure
from kvweave.errors import UnsupportedModelError
from kvweave.models.cache import Progress, cache_folder, silent
from kvweave.models.load import LoadedModel
from kvweave.prefix.base import exact_form
from kvweave.version import __version__

_WITHOUT_EFFECT = (
    "fuzzy_self_check",  # thresholds judge the figures, and do not change them
    "fuzzy_time_budget",
    "fuzzy_heal",
    "fuzzy_session",  # the check's requests belong to none
    "max_total_tokens",  # the check's engine has a pool of its own
    "mem_fraction",
    "kv_events",
)
"""Settings whose names begin so do not change the figures. A setting that is not listed counts."""

OFF, REQUIRE = "off", "require"
"""Values of --fuzzy-self-check beside "on"."""
_ENOUGH = 6
"""Prompts that must have been served with moved KV for a judgement."""

_log = logging.getLogger("kvweave.engine")

Key = Mapping[str, Any]


def key_of(config: EngineConfig, loaded: LoadedModel, cases: Sequence[SelfCheckCase]) -> Key:
    """Everything that the figures depend on, as JSON can write it.

    The prompts' tokens stand for the texts, the tokenizer and the chat template. The model's
    identity covers its content, number type and KV layout.
    """
    prompts = xxhash.xxh3_128()
    for case in cases:
        for tokens in (case.donor, case.recipient):
            prompts.update(tokens.tobytes() + b";")
    settings = {
        name: value
        for name, value in values_of(config.cache, config.fuzzy).items()
        if not name.startswith(_WITHOUT_EFFECT)
    }
    return {
        "kvweave": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": loaded.identity,
        "context_length": loaded.context_length,
        "device": loaded.device.type,
        "attention": config.model.attention_backend,
        "chunked_prefill_size": config.scheduler.chunked_prefill_size,
        "prompts": prompts.hexdigest(),
        **settings,
    }


def recall(key: Key) -> list[Measured] | None:
    """The figures that `remember` kept under this key, or None."""
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
    """Keep figures for `recall` in any process; a folder that cannot be written is logged only."""
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


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """The verdict on a model, a sentence that states it, and the figures behind it."""

    passed: bool
    sentence: str
    measured: tuple[Measured, ...]
    """The prompts that were served with moved KV."""

    @property
    def conclusive(self) -> bool:
        """Enough prompts were served with moved KV to judge the model; else it has not passed."""
        return len(self.measured) >= _ENOUGH

    @property
    def kl(self) -> float | None:
        """Of the next token, in nats, mean over prompts; None if none was served."""
        return fmean(each.kl for each in self.measured) if self.measured else None

    @property
    def misled(self) -> int:
        """Answers that gave the donor's fact where the prompt's own was given cold."""
        return sum(each.misled for each in self.measured)

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "passed": self.passed,
            "sentence": self.sentence,
            "prompts": len(self.measured),
            "kl_mean": self.kl,
            "decoy_answers": self.misled,
        }


def guarded(
    config: EngineConfig, loaded: LoadedModel, progress: Progress = silent
) -> tuple[EngineConfig, SelfCheck | None]:
    """The settings to start an engine with: `config`, or its exact form unless the model passes.

    The second value is None without a check: the backend is exact, or the check is off. Raises
    UnsupportedModelError if --fuzzy-self-check is `require` and the model does not pass, or if its
    keys cannot be moved at all.
    """
    exact = exact_form(config.cache.prefix_cache_backend)
    if exact is None or config.fuzzy.self_check == OFF:
        return config, None
    check = check_model(config, loaded, progress)
    if check.passed:
        _log.info("%s", check.sentence)
        return config, check
    if config.fuzzy.self_check == REQUIRE:
        raise UnsupportedModelError(check.sentence)
    _log.warning("%s", check.sentence)
    cache = replace(config.cache, prefix_cache_backend=exact)
    return replace(config, cache=cache), check


def check_model(
    config: EngineConfig, loaded: LoadedModel, progress: Progress = silent, *, afresh: bool = False
) -> SelfCheck:
    """Judge a model under the settings of an approximate backend; takes about a minute at most.

    Unless `afresh`, the figures of an earlier check with the same key are used. Figures that are
    too few for a judgement, or fewer than those of that check, are not kept: a slow machine
    measures fewer prompts.
    """
    cases = build_cases(loaded.tokenizer)
    key = key_of(config, loaded, cases)
    kept = recall(key)
    if kept is not None and not afresh:
        return judge(loaded.name, kept, config)
    _log.info(
        "the self-check measures how moved text changes the answers of %s; this takes up to a "
        "minute, and the result is kept for the next start",
        loaded.name,
    )
    measured = measure(cases, config, loaded, progress)
    check = judge(loaded.name, measured, config)
    if check.conclusive and len(measured) >= len(kept or ()):
        remember(key, measured)
    return check


def judge(name: str, measured: Sequence[Measured], config: EngineConfig) -> SelfCheck:
    """Compare the figures of the model called `name` with the thresholds."""
    served = tuple(each for each in measured if each.moved)
    check = SelfCheck(True, "", served)
    reasons = _reasons(check, len(measured), config.fuzzy)
    if reasons:
        exact = exact_form(config.cache.prefix_cache_backend)
        remedy = "raise that limit or " if check.conclusive else ""
        sentence = (
            f"{name} is served with exact reuse only ({exact}): {', and '.join(reasons)}; to move "
            f"text all the same, {remedy}say --fuzzy-self-check off"
        )
        return replace(check, passed=False, sentence=sentence)
    sentence = (
        f"{name} may be served with text that moved: of {len(served)} prompts, the next token's KL "
        f"is {check.kl:.3f} nats in the mean, and {check.misled} gave a donor's fact"
    )
    return replace(check, sentence=sentence)


def _reasons(check: SelfCheck, tried: int, limits: FuzzyConfig) -> list[str]:
    """The reasons against moving this model's KV, each as part of a sentence."""
    if not check.conclusive or check.kl is None:
        return [
            f"moved text could not be measured, since only {len(check.measured)} of {tried} "
            f"prompts of the self-check could be served with it under these flags ({_ENOUGH} are "
            "needed; a smaller --page-size or a longer --context-length helps)"
        ]
    found = []
    most_kl, most_misled = limits.self_check_max_kl, limits.self_check_max_decoys
    if not check.kl <= most_kl:  # not a number is no divergence that anyone could accept
        found.append(
            f"moved text changes what it says next by {check.kl:.3f} nats (KL, the mean of "
            f"{len(check.measured)} prompts; --fuzzy-self-check-max-kl allows {most_kl:g})"
        )
    if check.misled > most_misled:
        asked = sum(each.cold == "gold" for each in check.measured)
        found.append(
            f"{check.misled} of {asked} answers gave the fact of another, nearly equal text, where "
            f"it answers rightly cold (--fuzzy-self-check-max-decoys allows {most_misled})"
        )
    return found
