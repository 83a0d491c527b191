"""A tiny random model whose text says its tokens: one character, one token, and back.

So whoever reads an answer knows which tokens were chosen, and can ask the model itself whether they
were right.
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

CONTEXT = 1024
SPECIAL = {name: chr(0xE000 + at) for at, name in enumerate(("bos", "eos", "pad", "unk"))}
"""Single characters too, from Unicode's private area."""
EOS_ID = 1
LETTERS = "\n" + "".join(map(chr, range(32, 127))) + "".join(map(chr, range(0xC0, 0x180)))
_IDS = {letter: at for at, letter in enumerate([*SPECIAL.values(), *LETTERS])}
_TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def encode(text: str) -> list[int]:
    """The tokens of a text."""
    return [_IDS[letter] for letter in text]


def rendered(messages: list[dict[str, str]]) -> str:
    """What the chat template makes of a conversation."""
    turns = [f"[{message['role']}] {message['content']}\n" for message in messages]
    return "".join(turns) + "[assistant] "


def save(folder: Path, seed: int) -> None:
    """Write model and tokenizer, as `--model` takes them."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=len(_IDS),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=EOS_ID,
        pad_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 0.12)
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel(_IDS, unk_token=SPECIAL["unk"]))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("(?m)."), "isolated")
    core.decoder = decoders.Fuse()
    names = {f"{name}_token": letter for name, letter in SPECIAL.items()}
    return transformers.PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core, chat_template=_TEMPLATE, **names
    )
