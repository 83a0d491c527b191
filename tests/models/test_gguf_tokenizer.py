"""Tokenizers of GGUF files: text is split, spaced and ended as the file's keys say."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from kvweave.models.gguf import end_tokens, read_tokenizer

NORMAL, CONTROL, BYTE = (
    gguf.TokenType.NORMAL,
    gguf.TokenType.CONTROL,
    gguf.TokenType.BYTE,
)


def write(
    file: Path, kind: str, tokens: Sequence[tuple[str, int]], architecture: str, **keys: Any
) -> Path:
    """A GGUF file that holds a vocabulary and no weights; `keys` as in `tokenizer.ggml.*`."""
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_block_count(1)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model(kind)
    writer.add_token_list([token for token, _ in tokens])
    writer.add_token_types([int(each) for _, each in tokens])
    for name, value in keys.items():
        add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}.get(
            type(value), writer.add_array
        )
        add(f"tokenizer.ggml.{name}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def sentencepiece(file: Path, **keys: Any) -> Any:
    """As Llama 2's, with a few pieces; merges follow from scores."""
    tokens = [("<unk>", CONTROL), ("<s>", CONTROL), ("</s>", CONTROL), ("<|im_end|>", CONTROL)]
    tokens += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    pieces = ["▁▁", "▁h", "hi", "▁hi", "▁", "h", "i", "<", "2"]
    tokens += [(piece, NORMAL) for piece in pieces]
    scores = [0.0] * (len(tokens) - len(pieces)) + [-float(at) for at in range(len(pieces))]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return read_tokenizer(write(file, "llama", tokens, "llama", scores=scores, **ids, **keys))


def byte_level(file: Path, merges: Sequence[str], words: Sequence[str] = (), **keys: Any) -> Any:
    """As GPT-2's: bytes, what the merges make, and further words."""
    made = [merge.replace(" ", "") for merge in merges]
    tokens = [(token, NORMAL) for token in [*bytes_to_unicode().values(), *made, *words]]
    tokens += [("<|endoftext|>", CONTROL), ("<|im_end|>", CONTROL)]
    keys = {"merges": list(merges), "eos_token_id": len(tokens) - 2, **keys}
    return read_tokenizer(write(file, "gpt2", tokens, "qwen2", **keys))


def pieces(tokenizer: Any, text: str) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer.encode(text, add_special_tokens=False))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "vocabulary.gguf"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hi", ["▁hi"]),
        (" ", ["▁▁"]),
        ("  hi", ["▁▁", "▁hi"]),
        ("é", ["▁", "<0xC3>", "<0xA9>"]),
    ],
)
def test_sentencepiece_puts_a_space_in_front_of_every_text(
    file: Path, text: str, expected: list[str]
) -> None:
    tokenizer = sentencepiece(file)
    assert pieces(tokenizer, text) == expected
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert tokenizer.encode("hi")[0] == tokenizer.bos_token_id, "without a key, BOS is added"


def test_a_file_can_say_that_no_space_is_put_in_front(file: Path) -> None:
    tokenizer = sentencepiece(file, add_space_prefix=False, add_bos_token=False)
    assert pieces(tokenizer, "hi hi") == ["hi", "▁hi"]
    assert tokenizer.encode("hi")[0] != tokenizer.bos_token_id


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("gpt-2", "1234", ["12", "34"]),
        ("starcoder", "1234", ["1", "2", "3", "4"]),
        ("smollm", "1234", ["1", "2", "3", "4"]),
        ("falcon", "1234", ["12", "3", "4"]),
        ("gpt-2", "x<=", ["x", "<="]),
        ("falcon", "x<=", ["x", "<="]),
        ("gpt-2", " =", ["Ġ="]),
        ("falcon", " =", ["Ġ", "="]),
        ("deepseek-coder", "12", ["1", "2"]),
    ],
)
def test_text_is_split_as_the_file_says(
    file: Path, tmp_path: Path, pre: str, text: str, expected: list[str]
) -> None:
    tokenizer = byte_level(file, ["1 2", "3 4", "Ġ =", "< ="], pre=pre)
    assert pieces(tokenizer, text) == expected
    tokenizer.save_pretrained(tmp_path / "saved")
    assert pieces(AutoTokenizer.from_pretrained(tmp_path / "saved"), text) == expected


def test_llama_3_takes_whole_words_and_adds_bos(file: Path) -> None:
    keys = {"pre": "llama-bpe", "bos_token_id": 5}
    tokenizer = byte_level(file, ["a b"], ["abc"], **keys)
    assert pieces(tokenizer, "abc") == ["abc"]
    assert tokenizer.encode("abc")[0] == 5
    file.unlink()
    silent = byte_level(file, ["a b"], ["abc"], add_bos_token=False, **keys)
    assert silent.encode("abc") == tokenizer.encode("abc")[1:]


def test_an_unknown_way_of_splitting_is_said(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvweave"):
        byte_level(file, ["a b"], pre="someone-elses")
    assert "not known here (someone-elses)" in caplog.text
    assert "--tokenizer" in caplog.text


def test_text_that_does_not_come_back_is_said(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokens = [("<unk>", CONTROL), ("▁", NORMAL), ("a", NORMAL)]  # nothing for other characters
    with caplog.at_level(logging.WARNING, "kvweave"):
        read_tokenizer(write(file, "llama", tokens, "llama", scores=[0.0] * 3, unknown_token_id=0))
    assert "does not survive it" in caplog.text


def test_every_token_that_ends_a_turn_is_found(file: Path) -> None:
    tokenizer = byte_level(file, ["a b"], pre="gpt-2")
    size = {"tokens": len(tokenizer)}
    end, turn = tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    assert end_tokens(tokenizer, size | {"eos_token_id": 7}) == sorted([7, end, turn])
    assert end_tokens(tokenizer, size | {"eot_token_id": 8, "eom_token_id": 9}) == [8, 9, end, turn]
