"""Loads a model, inspects it and checks that kvweave can serve it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from kvweave import kernels
from kvweave.config import ModelConfig
from kvweave.errors import ConfigError, KvweaveError, UnsupportedModelError, reason
from kvweave.kv.layout import LayerLayout
from kvweave.models import cpu, hooks
from kvweave.models.cache import Progress, filled_once, no_library_bars, silent
from kvweave.models.compatibility import Compatibility, check_compatibility
from kvweave.models.decoder import Decoder
from kvweave.models.inspect import NO_INTERFACE, inspect_layers
from kvweave.models.quantized import (
    bits_of,
    load_quantized,
    quantize_model,
    save_quantized,
)
from kvweave.models.sources import Source, find_source

_log = logging.getLogger(__name__)


def check_settings(settings: PreTrainedConfig) -> None:
    """Raise UnsupportedModelError, as the end of a sentence about the model, for known cases."""
    if settings.is_encoder_decoder:
        raise UnsupportedModelError("it is an encoder-decoder; kvweave serves decoders only")
    for rope in _rope_settings(settings):
        if "dynamic" in rope["rope_type"]:
            raise UnsupportedModelError(
                "its rotary frequencies change with the longest prompt computed so far (dynamic "
                "NTK scaling), so that one request's KV would depend on another's"
            )


def context_length_of(settings: PreTrainedConfig, wanted: int | None) -> int:
    """Longest prompt plus output: the model's own, or `wanted` if that is not more.

    Raises ConfigError if it is, UnsupportedModelError if neither is known.
    """
    own = _own_context_length(settings)
    if wanted is None:
        if own is None:
            code: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(settings), None)
            if code is not None and (code._is_stateful or not code._supports_attention_backend):
                raise UnsupportedModelError(f"its layers {NO_INTERFACE}")
            raise UnsupportedModelError(
                "its configuration has no max_position_embeddings: say with --context-length how "
                "long a prompt and its output may be"
            )
        return own
    if own is not None and wanted > own:
        raise ConfigError(
            [f"--context-length {wanted} is more than this model's {own} tokens; lower or drop it"]
        )
    return wanted


def _own_context_length(settings: PreTrainedConfig) -> int | None:
    text = settings.get_text_config()
    own: int | None = getattr(text, "max_position_embeddings", None)
    if own is None:
        return None
    for rope in _rope_settings(settings):
        before = rope.get("original_max_position_embeddings")
        if before is None:
            continue
        if rope["rope_type"] == "longrope" and before < own:
            # Past this length the model turns all positions faster or slower, earlier ones too.
            _log.info(
                "context capped at %d tokens (the model's own is %d): beyond, its rotary "
                "frequencies change for the whole prompt, and no cached KV would be right",
                before,
                own,
            )
            own = before
        elif rope["rope_type"] == "yarn":
            # Some configurations state the length before scaling, some the one after.
            own = max(own, int(before * rope.get("factor", 1.0)))
    return own


def _rope_settings(settings: PreTrainedConfig) -> Iterator[Mapping[str, Any]]:
    """Rotary settings, one per kind of layer where the model has several."""
    rope = getattr(settings.get_text_config(), "rope_parameters", None) or {}
    if "rope_type" in rope:
        yield rope
    else:
        yield from (some for some in rope.values() if isinstance(some, Mapping) and some)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LoadedModel:
    """A model ready to serve, and its properties."""

    model: PreTrainedModel
    """Runs only inside `models.hooks.attention`, which sets its attention function."""
    tokenizer: Any
    """A transformers tokenizer; its `chat_template` is the one to use, or None."""
    config: PreTrainedConfig
    path: str
    """The folder or hub name that it came from."""
    name: str
    """What clients call it."""
    identity: str
    """Equal only for equal content, number types and KV layout: belongs in every key of KV."""
    layouts: tuple[LayerLayout, ...]
    context_length: int
    vocab_size: int
    """Logits per token."""
    decoder: Decoder | None = None
    """Runs the model faster than its own code, where that is known how."""
    prunes_tokens: bool
    """Tokens may drop out between its layers."""
    eos_token_ids: frozenset[int]
    sampling: Mapping[str, float]
    """Fields of SamplingParams that the model's generation_config sets."""
    dtype: torch.dtype
    dtype_because: str = ""
    """Why it is that, in words."""
    kv_dtype: torch.dtype
    """Of keys and values in the pool."""
    kv_dtype_because: str = ""
    """Why it is that, in words."""
    device: torch.device
    bits: tuple[int, ...] = ()
    """Of quantised weights; empty without any."""

    @property
    def number_types(self) -> str:
        """Those of the model's arithmetic and of its weights, as in "float32, int4 and int8"."""
        weights = " and ".join(f"int{bits}" for bits in self.bits)
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}, {weights} weights" if weights else name


def load_model(config: ModelConfig, progress: Progress = silent) -> LoadedModel:
    """Find, load, inspect and try the model that `config` names.

    Raises UnsupportedModelError for a model that cannot be had or served, ConfigError for flags
    that do not suit it or this machine, FetchError if the packaged model cannot be fetched.
    """
    device = _device(config.device)
    dtype, because = _dtype(config, device)
    template = _chat_template(config.chat_template)
    source = find_source(config.model, config.revision, dtype, progress)
    if config.dtype == "auto" and dtype == torch.bfloat16 and _is_small(source):
        dtype, because = torch.float32, "layers as small as this model's gain nothing from bfloat16"
    name, *_ = (*config.served_names, source.name)
    try:
        check_settings(source.settings)
        context_length = context_length_of(source.settings, config.context_length)
        tokenizer = _tokenizer(source, config.tokenizer)
        quantization = _quantization(config.quantization, source, dtype, device)
        model = _weights(source, dtype, device, quantization, progress)
        layouts, checked = _inspect(model, context_length)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{source.name} cannot be served: {error}") from error
    model.set_attn_implementation(hooks.SERVING)
    bits = bits_of(model)
    kv_dtype, kv_because = _kv_dtype(config.kv_cache_dtype, dtype, bits)
    if template is not None:
        tokenizer.chat_template = template
    loaded = LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=model.config,
        path=source.path,
        name=name,
        identity=_identity(source, dtype, kv_dtype, bits, layouts),
        layouts=layouts,
        context_length=context_length,
        vocab_size=checked.vocab_size,
        prunes_tokens=checked.prunes_tokens,
        decoder=checked.decoder,
        eos_token_ids=_eos_token_ids(model, tokenizer),
        sampling=_sampling(model),
        dtype=dtype,
        dtype_because=because,
        kv_dtype=kv_dtype,
        kv_dtype_because=kv_because,
        device=device,
        bits=bits,
    )
    by = "its own code" if checked.decoder is None else "compiled kernels, layer by layer"
    _log.info("%s: %s (%s), run by %s", name, loaded.number_types, because, by)
    return loaded


def _device(wanted: str) -> torch.device:
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(wanted)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch's ways of saying that there is none
        raise ConfigError([f"--device {wanted} cannot be used: {reason(error)}"]) from error
    return device


def _dtype(config: ModelConfig, device: torch.device) -> tuple[torch.dtype, str]:
    """The number type of arithmetic, and why it is that."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype), "as --dtype says"
    if device.type != "cpu":
        return torch.bfloat16, f"as on every {device.type} device"
    gguf = config.model is None or config.model.endswith(".gguf")
    if config.quantization in ("int8", "int4") or (gguf and config.quantization == "auto"):
        return torch.float32, "kernels multiply by quantised weights in it"
    return cpu.faster_dtype()


def _kv_dtype(wanted: str, dtype: torch.dtype, bits: tuple[int, ...]) -> tuple[torch.dtype, str]:
    """The number type of KV, and why it is that; `bits` are those of quantised weights."""
    if wanted != "auto":
        return getattr(torch, wanted), "as --kv-cache-dtype says"
    if bits and dtype == torch.float32:
        return torch.bfloat16, "beside quantised weights, half the memory of float32"
    return dtype, "as the model's arithmetic"


_SMALL = 256
"""Numbers of a hidden state, below which calls take longer than the arithmetic in them."""


def _is_small(source: Source) -> bool:
    width = getattr(source.settings.get_text_config(), "hidden_size", None)
    return not source.dequantized and width is not None and width < _SMALL


def _chat_template(file: str | None) -> str | None:
    if file is None:
        return None
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"--chat-template {file} cannot be read: {reason(error)}"]) from error


def _tokenizer(source: Source, other: str | None) -> Any:
    path, revision = (source.path, source.revision) if other is None else (other, None)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, revision=revision or "main", trust_remote_code=False
        )
        if not len(tokenizer):
            raise ValueError("its vocabulary is empty")
    except Exception as error:  # transformers raises a dozen kinds
        raise UnsupportedModelError(
            f"no tokenizer can be loaded from {path} ({reason(error)}); name one with --tokenizer"
        ) from error
    return tokenizer


def _quantization(wanted: str, source: Source, dtype: torch.dtype, device: torch.device) -> str:
    """What `wanted` comes to: "none", "kept" (what a file has), "int8" or "int4"."""
    if device.type != "cpu":
        if wanted in ("int8", "int4"):
            raise ConfigError([f"--quantization {wanted} is for CPUs, and this runs on {device}"])
        return "none"
    if wanted != "auto":
        return wanted
    library = kernels.load()
    # Kernels for no instruction set in particular are slower than float32 in torch.
    fast = library is not None and library.level >= 1
    return "kept" if source.dequantized and fast and dtype == torch.float32 else "none"


def _weights(
    source: Source,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str,
    progress: Progress,
) -> PreTrainedModel:
    what = f"Loading {source.name}"
    progress(what, 0, 2)
    if device.type == "cpu":
        cpu.keep_freed_memory()
    folder = Path(source.path)
    kept = folder.with_name(f"{folder.name}-quantized-1") if quantization == "kept" else None
    try:
        with no_library_bars():
            model = None if kept is None else _kept_weights(source, kept)
            if model is None:
                model = _float_weights(source, dtype)
    except Exception as error:  # transformers raises a dozen kinds
        raise UnsupportedModelError(f"its weights cannot be loaded: {reason(error)}") from error
    model.eval()  # type: ignore[no-untyped-call]
    model.requires_grad_(False).to(device)  # type: ignore[arg-type]
    progress(what, 1, 2)
    if device.type == "cpu":
        if quantization != "none" and not bits_of(model):
            bits = None if kept is not None else int(quantization.removeprefix("int"))
            if quantize_model(model, bits) and kept is not None:
                with filled_once(kept) as target:
                    save_quantized(model, target)
        packed = cpu.pack_weights(model)
        _log.debug("%d weights packed for oneDNN", packed)
    progress(what, 2, 2)
    return model


def _float_weights(source: Source, dtype: torch.dtype) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        source.path, revision=source.revision or "main", dtype=dtype, trust_remote_code=False
    )
    return model


def _kept_weights(source: Source, folder: Path) -> PreTrainedModel | None:
    """The model with the quantised weights in `folder`; None if there are none to be used."""
    if not folder.is_dir():
        return None
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                source.settings, dtype=torch.float32
            )
        load_quantized(model, folder)
        model.generation_config = GenerationConfig.from_pretrained(source.path)
    except Exception as error:  # a damaged file, or a model that needs more than its tensors
        _log.warning("%s cannot be used: %s; its float weights are", folder, reason(error))
        return None
    return model


def _inspect(
    model: PreTrainedModel, context_length: int
) -> tuple[tuple[LayerLayout, ...], Compatibility]:
    """Inspect and check a model by running it the way the engine does."""
    try:
        layouts = inspect_layers(model, context_length)
        return layouts, check_compatibility(model, layouts)
    except KvweaveError:
        raise
    except Exception as error:  # whatever a model's code does with a call that it does not expect
        _log.warning("%s: %s", type(model).__name__, reason(error))
        raise UnsupportedModelError(_why_it_does_not_run(model, error)) from error


def _why_it_does_not_run(model: PreTrainedModel, error: Exception) -> str:
    if isinstance(error, TypeError) and "position_ids" in str(error):
        return "its code takes no positions, and kvweave packs tokens of many prompts together"
    try:
        with torch.inference_mode():
            model(input_ids=torch.tensor([[0, 1]], device=model.device), use_cache=False)
    except Exception:
        return "transformers cannot run it either: its configuration does not suit its code"
    return (
        "its layers need more than attention to earlier tokens (such as an index that chooses "
        "tokens for each query, or tokens that are compressed into others)"
    )


def _eos_token_ids(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Every token that ends an answer; generation settings, model and tokenizer may differ."""
    found: set[int | None] = set()
    for owner in (model.generation_config, model.config, tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        found.update(ids if isinstance(ids, (list, tuple)) else [ids])
    return frozenset(int(one) for one in found if one is not None)


_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def _sampling(model: PreTrainedModel) -> dict[str, float]:
    settings = model.generation_config
    said = {name: getattr(settings, name, None) for name in _SAMPLING}
    return {name: value for name, value in said.items() if value is not None}


def _identity(
    source: Source,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    bits: tuple[int, ...],
    layouts: tuple[LayerLayout, ...],
) -> str:
    shape = xxhash.xxh3_64()
    for at in layouts:
        shape.update(f"{at.num_kv_heads},{at.key_dim},{at.value_dim},{at.window};".encode())
        if at.rotary is not None:
            shape.update(f"{at.rotary.interleaved},{at.rotary.offset};".encode())
            shape.update(at.rotary.inv_freq.tobytes())
    number_type = "-".join((str(dtype).removeprefix("torch."), *(f"int{one}" for one in bits)))
    if kv_dtype != dtype:
        number_type += f"+{str(kv_dtype).removeprefix('torch.')}"
    return f"{source.name}@{source.fingerprint}:{number_type}:{shape.hexdigest()}"
