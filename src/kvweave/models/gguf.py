"""GGUF files: dequantised once by transformers, then kept as safetensors in the cache folder.

transformers builds a GGUF file's tokenizer from its vocabulary alone. Text was split into words,
and spaces were added, as the model's own tokenizer did it in training; the file only names the way
to do that. `read_tokenizer` adds what transformers leaves out of it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers import Regex, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from kvweave.errors import UnsupportedModelError, reason
from kvweave.models.cache import Progress, cache_folder, filled_once, no_library_bars, silent

_log = logging.getLogger(__name__)

_FORMAT = 2
"""The version of a converted folder's content; folders of other versions are not used."""

_ENDS = ("eos", "eot", "eom")
"""Keys `tokenizer.ggml.*_token_id` of tokens that end an answer: of a text, a turn, a message."""
_NAMED_ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
    *("<end_of_turn>", "<end_of_utterance>", "<EOT>"),
)
"""Tokens that end an answer by their name. Older files have no key for them."""

_GPT2_SPLIT = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


_EACH_DIGIT = (_split(r"\p{N}"), _GPT2_SPLIT)
_SPLITS: Mapping[str, tuple[pre_tokenizers.PreTokenizer, ...]] = {
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"),
        _EACH_DIGIT,
    ),
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion"), (_GPT2_SPLIT,)),
    "falcon": (_split(r"[\p{P}$+<=>^~|`]+"), _GPT2_SPLIT, _split("[0-9]{3}")),
    "deepseek-coder": (
        *(_split(r"[\r\n]"), _split(r"\s?\p{L}+"), _split(r"\s?\p{P}+")),
        *(_split("[一-龥\u0800-一가-\ud7ff]+"), _split(r"\p{N}"), _BYTES),
    ),
}
"""How text is split before merging, by `tokenizer.ggml.pre`, where transformers has no entry."""
_WHOLE_WORDS = frozenset(
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "lfm2", "tekken")
)
"""Values of `tokenizer.ggml.pre` whose words in the vocabulary are tokens without merging."""

_SAMPLES = ("Hello world", "  two spaces\n\n", "naïve 1234 + 5.6 = ½", "我 😀", "a<b>\tc's")
"""Texts that must come back when their tokens are decoded."""


def converted_folder(name: str, fingerprint: str, dtype: torch.dtype) -> Path:
    """The folder of the conversion of the GGUF file with this content; it need not exist yet."""
    number_type = str(dtype).removeprefix("torch.")
    return cache_folder() / "models" / f"{name}-{fingerprint[:16]}-{number_type}-{_FORMAT}"


def convert(file: Path, target: Path, dtype: torch.dtype, *, progress: Progress = silent) -> None:
    """Write a GGUF file's model and tokenizer into the folder `target`, unless it exists by then.

    Raises UnsupportedModelError for a file that transformers cannot read.
    """
    what = f"Converting {file.name}"
    progress(what, 0, 3)
    try:
        about = _metadata(file)
        tokenizer = read_tokenizer(file, about)
        progress(what, 1, 3)
        with no_library_bars():
            model = AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, dtype=dtype
            )
    except Exception as error:  # whatever a reader does with a broken or unknown file
        raise UnsupportedModelError(
            f"{file} cannot be read as a GGUF model: {reason(error)}"
        ) from error
    progress(what, 2, 3)
    ends = end_tokens(tokenizer, about)
    model.generation_config.eos_token_id = ends or None
    # transformers takes its dequantised weights for quantised ones, and those it does not save.
    model.hf_quantizer = None  # type: ignore[assignment]
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    with no_library_bars(), filled_once(target) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    progress(what, 3, 3)


def read_tokenizer(file: Path, about: Mapping[str, Any] | None = None) -> Any:
    """The tokenizer that a GGUF file describes; differences that cannot be mended are logged."""
    about = _metadata(file) if about is None else about
    tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    core, pre = tokenizer.backend_tokenizer, str(about.get("pre"))
    if isinstance(core.pre_tokenizer, pre_tokenizers.Metaspace):
        # SentencePiece puts a space in front of every text, also of one that begins with a space.
        steps = [normalizers.Prepend("▁")] if about.get("add_space_prefix", True) else []
        core.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
        core.pre_tokenizer = None
    elif about.get("model") == "gpt2":
        if pre in _SPLITS:
            core.pre_tokenizer = pre_tokenizers.Sequence(list(_SPLITS[pre]))
            tokenizer = _as_saved(tokenizer)
        elif isinstance(core.pre_tokenizer, pre_tokenizers.ByteLevel):
            _warn(file, f"it splits text in a way that is not known here ({pre})")
        if pre in _WHOLE_WORDS:
            core.model.ignore_merges = True
            if "add_bos_token" not in about:
                tokenizer.add_bos_token = True
    for sample in _SAMPLES:
        if tokenizer.decode(tokenizer.encode(sample, add_special_tokens=False)) != sample:
            _warn(file, f"the text {sample!r} does not survive it")
            break
    return tokenizer


def _as_saved(tokenizer: Any) -> Any:
    """The same tokenizer in the class that loads a saved one without building it again."""
    if type(tokenizer) is PreTrainedTokenizerFast:
        return tokenizer
    kept = {
        name: tokenizer.init_kwargs[name]
        for name in (*tokenizer.SPECIAL_TOKENS_ATTRIBUTES, "add_bos_token", "add_eos_token")
        if tokenizer.init_kwargs.get(name) is not None
    }
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer.backend_tokenizer, chat_template=tokenizer.chat_template, **kept
    )


def end_tokens(tokenizer: Any, about: Mapping[str, Any]) -> list[int]:
    """Ids of all tokens that end an answer, by the file's keys and by their names."""
    vocabulary = tokenizer.get_vocab()
    found = {about.get(f"{kind}_token_id") for kind in _ENDS}
    # transformers gives its tokenizer classes further tokens, behind those of the file.
    named = {vocabulary.get(name, len(vocabulary)) for name in _NAMED_ENDS}
    found |= {one for one in named if one < about["tokens"]}
    return sorted(int(one) for one in found if one is not None)


def _metadata(file: Path) -> dict[str, Any]:
    """The file's keys `tokenizer.ggml.*`, without that prefix. Of arrays: their length."""
    prefix = "tokenizer.ggml."
    return {
        name.removeprefix(prefix): field.contents() if len(field.types) == 1 else len(field.data)
        for name, field in GGUFReader(file).fields.items()
        if name.startswith(prefix)
    }


def _warn(file: Path, why: str) -> None:
    _log.warning(
        "the tokenizer in %s may give other tokens than the model was trained on: %s; name the "
        "model's original tokenizer with --tokenizer",
        file.name,
        why,
    )
