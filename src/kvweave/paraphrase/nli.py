"""The verifier `nli`: a model of natural language inference has to find that each text follows
from the other.

Any sequence classifier of Hugging Face's with a class `entailment` will do. It runs in a process of
its own (`python -m kvweave.paraphrase.nli MODEL`).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from kvweave.config import FuzzyConfig
from kvweave.errors import ConfigError
from kvweave.paraphrase.model_subprocess import Matrix, ModelSubprocess, serve

_ENTAILED = 0.5
"""The probability from which on entailment outweighs everything else together."""


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
        who = ("the prompt's", "the donor's") if there <= back else ("the donor's", "the prompt's")
        return (
            f"to the verifier, {who[0]} words do not follow from {who[1]} "
            f"(likely to {min(there, back):.0%})"
        )

    def close(self) -> None:
        """End the process."""
        self._process.close()


class Classifier:
    """The model itself: how likely second sentences follow from first ones."""

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
    """The number of its class for what follows."""
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
