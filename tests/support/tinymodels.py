"""Small random models of many kinds, saved as folders so that tests load them as users would."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

from kvweave.models import LoadedModel, hooks

VOCABULARY = 261
"""256 bytes, and a few special tokens."""
CONTEXT = 256

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
_GPT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_positions": CONTEXT,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
_MLA: dict[str, Any] = {
    **_COMMON,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def _rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **settings}


def _build(name: str, **settings: Any) -> Callable[[], PreTrainedConfig]:
    return lambda: getattr(transformers, name)(**settings)


TINY: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": _build("LlamaConfig", **_COMMON),
    "qwen2": _build(
        "Qwen2Config", **_COMMON, use_sliding_window=True, sliding_window=7, max_window_layers=1
    ),
    "qwen3": _build("Qwen3Config", **_COMMON, head_dim=24),
    "mistral": _build("MistralConfig", **_COMMON, sliding_window=9),
    "phi3": _build("Phi3Config", **_COMMON, partial_rotary_factor=0.5),
    "neox": _build(
        "GPTNeoXConfig",
        **{**_COMMON, "num_key_value_heads": 4},
        rotary_pct=0.25,
        tie_word_embeddings=False,
    ),
    "gptj": _build("GPTJConfig", **_GPT, rotary_dim=8, tie_word_embeddings=False),
    "gemma2": _build(
        "Gemma2Config", **_COMMON, head_dim=16, sliding_window=8, attn_logit_softcapping=2.0
    ),
    "gemma3": _build(
        "Gemma3TextConfig",
        **_COMMON,
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "gemma4": _build(
        "Gemma4TextConfig",
        **_COMMON,
        head_dim=16,
        global_head_dim=32,
        sliding_window=8,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
    ),
    "gpt_oss": _build(
        "GptOssConfig",
        **_COMMON,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=64),
    ),
    "smollm3": _build("SmolLM3Config", **_COMMON, no_rope_layers=[1, 0, 1]),
    "yarn": _build(
        "LlamaConfig",
        **_COMMON,
        rope_parameters=_rope("yarn", factor=4.0, original_max_position_embeddings=64),
    ),
    "llama3": _build(
        "LlamaConfig",
        **_COMMON,
        rope_parameters=_rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "linear": _build("LlamaConfig", **_COMMON, rope_parameters=_rope("linear", factor=4.0)),
    "longrope": _build(
        "Phi3Config",
        **_COMMON,
        original_max_position_embeddings=64,
        rope_parameters=_rope(
            "longrope",
            short_factor=[1.0 + 0.1 * i for i in range(8)],
            long_factor=[2.0] * 8,
            original_max_position_embeddings=64,
        ),
    ),
    "mla_half": _build("DeepseekV3Config", **_MLA, rope_interleave=False),
    "mla_interleaved": _build("DeepseekV3Config", **_MLA, rope_interleave=True),
    "mla_v2": _build("DeepseekV2Config", **_MLA),
    "gpt2": _build("GPT2Config", **_GPT),
}
"""Models that kvweave serves."""

REFUSED: dict[str, Callable[[], PreTrainedConfig]] = {
    "dynamic": _build("LlamaConfig", **_COMMON, rope_parameters=_rope("dynamic", factor=4.0)),
    "own_attention": _build(
        "BloomConfig", vocab_size=VOCABULARY, hidden_size=64, n_layer=3, n_head=4
    ),
    "state_space": _build(
        "MambaConfig", vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=3
    ),
    "stateful": _build(
        "Zamba2Config",
        **{**_COMMON, "num_key_value_heads": 4},
        layer_types=["mamba", "hybrid", "hybrid"],
        mamba_d_state=8,
        mamba_ngroups=1,
        n_mamba_heads=4,
    ),
    "differential": _build("DiffLlamaConfig", **_COMMON),
    "indexed": _build(
        "DeepseekV32Config", **_MLA, index_n_heads=2, index_head_dim=16, index_topk=8
    ),
    "hybrid": _build("Lfm2Config", **_COMMON, layer_types=["conv", "full_attention", "conv"]),
    "chunked": _build(
        "Llama4TextConfig",
        **_COMMON,
        attention_chunk_size=32,
        num_local_experts=2,
        intermediate_size_mlp=64,
    ),
    "shared_kv": _build(
        "Gemma3nTextConfig",
        **{**_COMMON, "num_hidden_layers": 4},
        num_kv_shared_layers=2,
        head_dim=16,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        laurel_rank=8,
        activation_sparsity_pattern=[0.0] * 4,
    ),
    "encoder_decoder": _build(
        "T5Config", vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4
    ),
}
"""Models that kvweave refuses at start."""


def random_model(config: PreTrainedConfig, seed: int = 0) -> transformers.PreTrainedModel:
    """A model with random weights, large enough that its answers differ clearly."""
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 0.15)
            elif name.endswith("bias"):
                weight.normal_(0.0, 0.05)
            elif name.endswith("sinks"):
                weight.normal_(0.0, 1.0)
    return model.eval()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte; enough for every text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def save(config: PreTrainedConfig, folder: Path, seed: int = 0) -> Path:
    """Write a random model of this configuration, with a tokenizer, into `folder`."""
    random_model(config, seed).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


CLEAR = 1e-3
"""Logits closer than this may change places by rounding; what follows is not compared."""


@dataclass(frozen=True)
class Reference:
    """What transformers itself says, as far as its choices are clear."""

    prompt: tuple[int, ...]
    tokens: list[int]
    clear: int


def reference(loaded: LoadedModel, prompt: Sequence[int], count: int) -> Reference:
    with hooks.implementation(loaded.model, "eager"), torch.inference_mode():
        output = loaded.model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=0,
        )
    clear = 0
    for logits in output.logits:
        best, second = logits[0].topk(2).values.tolist()
        if best - second < CLEAR:
            break
        clear += 1
    return Reference(tuple(prompt), output.sequences[0, len(prompt) :].tolist(), clear)


def assert_equal(found: list[list[int]], references: Sequence[Reference]) -> None:
    for tokens, expected in zip(found, references, strict=True):
        assert tokens[: expected.clear] == expected.tokens[: expected.clear]
        assert len(tokens) == len(expected.tokens)
