"""Verifiers of paraphrases: the one that `--fuzzy-verifier` names, and the built-in `nli`.

A verifier reads both texts after their facts agree, and may only object. If it raises, is late or
never returns, that counts as an objection and costs this one paraphrase.

`nli` asks a model of natural language inference whether each text follows from the other. Any
Hugging Face sequence classifier with a class `entailment` will do; it runs in a process of its own
(`python -m kvweave.paraphrase.verifiers MODEL`).
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import numpy as np

from kvweave.config import FuzzyConfig
from kvweave.errors import ConfigError
from kvweave.fuzzy.guard import LateError, Worker, contained
from kvweave.paraphrase.embedders import Matrix, ModelSubprocess, serve
from kvweave.paraphrase.facts import Verifier
from kvweave.plugins import NO_VERIFIER, VERIFIERS
from kvweave.prefix.lease import Namespace

_log = logging.getLogger(__name__)

VerifierFactory: TypeAlias = Callable[[FuzzyConfig], Verifier]
"""What packages offer under a name in the entry point group `kvweave.verifiers`."""

_REMEMBERED = 2048
_MOST_FAILURES = 3


def create_verifier(config: FuzzyConfig) -> Verifier | None:
    """The chosen verifier, if any; ConfigError if there is none of the name, or it fails."""
    name = config.verifier
    return None if name == NO_VERIFIER else cast(Verifier, VERIFIERS.make(name, config))


class VerifierWorker:
    """A verifier on a thread of its own.

    Its answers are remembered by namespace, late ones too. A verifier that fails several times in
    a row is not asked again, and from then on nothing passes.
    """

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self._worker = Worker("kvweave verifier")
        self._known: dict[tuple[Namespace, str, str], str | None] = {}
        self._failures = 0

    def objection(
        self, namespace: Namespace, donor: str, recipient: str, until: float
    ) -> tuple[str, str] | None:
        """The objection as a kind and a sentence; waits till `until` (time.perf_counter)."""
        try:
            reason = self._answer(namespace, donor, recipient, until)
        except LateError:
            return "late", "the verifier had not answered in time"
        except Exception as error:
            return "failed", f"the verifier failed: {error!r}"
        return None if reason is None else ("vetoed", reason)

    def _answer(self, namespace: Namespace, donor: str, recipient: str, until: float) -> str | None:
        key = namespace, donor, recipient
        if key in self._known:
            return self._known[key]
        if self._failures >= _MOST_FAILURES:
            raise RuntimeError("it is not asked any more")
        left = max(0.0, until - time.perf_counter())
        return self._worker.run(lambda: self._ask(key), left)

    def _ask(self, key: tuple[Namespace, str, str]) -> str | None:
        """Runs on the worker's thread, the only one that writes."""
        _, donor, recipient = key
        try:
            found = contained(lambda: self._verifier(donor, recipient))
            reason = None if found is None else str(found)
        except Exception:
            self._failures += 1
            if self._failures == _MOST_FAILURES:
                what = "failed so often that it is not asked again: nothing passes it any more"
                _log.warning("the verifier of paraphrases %s", what, exc_info=True)
            raise
        self._failures = 0
        self._known[key] = reason
        if len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]
        return reason


_ENTAILED = 0.5
"""From this probability on, entailment outweighs all other classes together."""


class Entailment:
    """A Verifier, for one thread at a time; its model begins to load at once."""

    def __init__(self, config: FuzzyConfig) -> None:
        """ConfigError unless --fuzzy-verifier-model is here, and of the right kind."""
        model = config.verifier_model
        if model is None:
            raise ConfigError(
                [
                    "--fuzzy-verifier nli needs --fuzzy-verifier-model: the folder or the Hugging "
                    "Face name of a model that classifies pairs of sentences"
                ]
            )
        _entailment(_settings(model), model)
        self._process = ModelSubprocess(f"verifier's model {model}", __name__, model)

    def __call__(self, donor: str, recipient: str) -> str | None:
        there, back = self._process.ask([[donor, recipient], [recipient, donor]])[:, 0].tolist()
        if min(there, back) >= _ENTAILED:
            return None
        whose = (
            ("the prompt's", "the donor's") if there <= back else ("the donor's", "the prompt's")
        )
        return (
            f"to the verifier, {whose[0]} words do not follow from {whose[1]} "
            f"(likely to {min(there, back):.0%})"
        )

    def close(self) -> None:
        """End the process."""
        self._process.close()


class Classifier:
    """The model: probabilities that a second text follows from a first one."""

    def __init__(self, model: str) -> None:
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        self._torch = torch
        self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
        self._model: Any = AutoModelForSequenceClassification.from_pretrained(model).eval()
        settings = self._model.config
        self._entailment = _entailment(settings, model)
        positions = getattr(settings, "max_position_embeddings", None) or sys.maxsize
        self._longest = min(positions, self._tokenizer.model_max_length)

    def entailed(self, pairs: Sequence[Sequence[str]]) -> Matrix:
        """float32 (len(pairs), 1). A pair that is too long to be read whole counts as 0."""
        firsts, seconds = ([pair[at] for pair in pairs] for at in (0, 1))
        batch = self._tokenizer(firsts, seconds, padding=True, return_tensors="pt")
        if batch["input_ids"].shape[1] > self._longest:
            return np.zeros((len(pairs), 1), np.float32)
        with self._torch.inference_mode():
            likely = self._model(**batch).logits.float().softmax(-1)
        return cast(Matrix, likely[:, self._entailment, None].numpy())


def _settings(model: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            [
                f"--fuzzy-verifier-model {model} is no model on this machine; a model of the Hub "
                f"is downloaded by: hf download {model}"
            ]
        ) from error


def _entailment(settings: Any, model: str) -> int:
    """The index of the class `entailment`; ConfigError if the model has none."""
    classes = {str(name).lower(): int(at) for at, name in settings.id2label.items()}
    if "entailment" not in classes:
        raise ConfigError(
            [
                f"--fuzzy-verifier-model {model} has no class 'entailment', but "
                f"{', '.join(classes)}: it takes a model of natural language inference"
            ]
        )
    return classes["entailment"]


if __name__ == "__main__":
    serve(lambda: Classifier(sys.argv[1]).entailed, [["It loads.", "It has loaded."]])
