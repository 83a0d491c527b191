"""Settings of the model: which one, its number type, its device and its attention."""

from __future__ import annotations

from dataclasses import dataclass

from kvweave.config.base import flag, positive


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model, its number type, its device and its attention."""

    model: str | None = flag(
        None,
        "Folder, Hugging Face name or GGUF file; without it, the packaged SmolLM2-135M-Instruct.",
    )
    tokenizer: str | None = flag(
        None, "Folder or name of the tokenizer, when it is not the model's."
    )
    revision: str | None = flag(None, "Hub revision of the model.")
    served_model_name: str | None = flag(
        None, "Name that clients use, or several: a,b; the model's own without it."
    )
    dtype: str = flag(
        "auto", "Number type of weights and KV.", choices=("auto", "float32", "bfloat16")
    )
    device: str = flag("auto", "Torch device: auto, cpu, cuda, cuda:1.")
    context_length: int | None = flag(
        None, "Longest prompt plus output; the model's own without it."
    )
    attention_backend: str = flag(
        "auto", "Implementation of attention.", choices=("auto", "cpu", "sdpa", "flashinfer")
    )
    chat_template: str | None = flag(
        None, "File with a Jinja chat template, instead of the model's."
    )

    @property
    def served_names(self) -> tuple[str, ...]:
        """Names that clients may use; the answers carry the first. Empty: the model's own."""
        names = map(str.strip, (self.served_model_name or "").split(","))
        return tuple(dict.fromkeys(filter(None, names)))

    def problems(self) -> list[str]:
        return positive(self, "context_length")
