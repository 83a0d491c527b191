"""Loading: served models, refused models, and the words of refusals."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedConfig

from kvweave import LLM, SamplingParams
from kvweave.config import ModelConfig
from kvweave.errors import ConfigError, UnsupportedModelError
from kvweave.models import LoadedModel, cpu, hooks, load_model
from kvweave.models.load import context_length_of
from kvweave.server.model_card import card_of
from support.tinymodels import CONTEXT, REFUSED, TINY, VOCABULARY, random_model, save

REASONS = {
    "dynamic": "change with the longest prompt",
    "own_attention": "do not go through transformers' attention interface",
    "state_space": "do not go through transformers' attention interface",
    "stateful": "all or some of its layers do not go through",
    "differential": "calls attention more than once per layer",
    "indexed": "need more than attention to earlier tokens",
    "hybrid": "2 of its 3 layers do not go through",
    "chunked": "in its layer 0, tokens attend to something else",
    "shared_kv": "layer 2 reuses another layer's KV",
    "encoder_decoder": "encoder-decoder",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_served_is_refused_in_words(
    name: str, tiny_folder: Callable[[str], Path]
) -> None:
    if name == "encoder_decoder":
        config = REFUSED[name]()
        folder = tiny_folder("llama").parent / name
        config.save_pretrained(folder)
    else:
        folder = tiny_folder(name)
    with pytest.raises(UnsupportedModelError, match=REASONS[name]) as caught:
        load_model(ModelConfig(model=str(folder), context_length=64))
    assert str(caught.value).startswith(f"{name} cannot be served: ")


def test_a_model_that_states_no_context_needs_a_flag() -> None:
    with pytest.raises(UnsupportedModelError, match="say with --context-length"):
        context_length_of(PreTrainedConfig(), None)
    assert context_length_of(PreTrainedConfig(), 100) == 100


@pytest.mark.parametrize("name", ["state_space", "own_attention"])
def test_no_flag_is_asked_for_where_none_would_help(
    name: str, tiny_folder: Callable[[str], Path]
) -> None:
    with pytest.raises(UnsupportedModelError, match="no --prefix-cache-backend changes that"):
        load_model(ModelConfig(model=str(tiny_folder(name))))


@pytest.mark.parametrize("name", TINY)
def test_a_served_model_says_what_it_is(name: str, tiny: Callable[[str], LoadedModel]) -> None:
    loaded = tiny(name)
    assert loaded.name == name
    assert loaded.vocab_size == VOCABULARY
    assert loaded.context_length == (64 if name == "longrope" else CONTEXT)
    assert 257 in loaded.eos_token_ids
    assert loaded.dtype == torch.float32
    assert len(loaded.layouts) == 3
    assert loaded.tokenizer.decode(loaded.tokenizer("naïve").input_ids) == "naïve"


def test_the_models_own_sampling_is_read(tmp_path: Path) -> None:
    folder = save(TINY["llama"](), tmp_path / "tiny")
    own = {"do_sample": True, "temperature": 0.6, "top_k": 20, "eos_token_id": 257}
    (folder / "generation_config.json").write_text(json.dumps(own))
    llm = LLM(str(folder), max_total_tokens=512)
    assert llm.engine.loaded.sampling == {"temperature": 0.6, "top_k": 20}
    asked = []
    llm.engine.add = asked.append
    llm.generate("x")
    llm.generate("x", SamplingParams(top_k=3))
    assert [(each.sampling.temperature, each.sampling.top_k) for each in asked] == [
        (0.6, 20),
        (1, 3),
    ]


def test_the_long_context_cap_is_logged(
    tiny_folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvweave"):
        load_model(ModelConfig(model=str(tiny_folder("longrope"))))
    assert "context capped at 64 tokens" in caplog.text


def test_a_longer_context_than_the_model_has_is_refused(
    tiny_folder: Callable[[str], Path],
) -> None:
    folder = str(tiny_folder("llama"))
    assert load_model(ModelConfig(model=folder, context_length=100)).context_length == 100
    with pytest.raises(ConfigError, match="--context-length 257 is more than this model's 256"):
        load_model(ModelConfig(model=folder, context_length=CONTEXT + 1))


def test_a_model_without_a_tokenizer_is_refused(
    tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny_folder("llama"), bare)
    for file in bare.glob("*token*"):
        file.unlink()
    with pytest.raises(UnsupportedModelError, match=r"no tokenizer.*--tokenizer"):
        load_model(ModelConfig(model=str(bare)))
    other = ModelConfig(model=str(bare), tokenizer=str(tiny_folder("llama")))
    assert load_model(other).tokenizer.eos_token_id == 257


def test_what_is_not_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="there is no folder or GGUF file"):
        load_model(ModelConfig(model=str(tmp_path / "nothing")))
    with pytest.raises(UnsupportedModelError, match="there is no file"):
        load_model(ModelConfig(model=str(tmp_path / "nothing.gguf")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnsupportedModelError, match=r"holds no config\.json"):
        load_model(ModelConfig(model=str(tmp_path / "empty")))
    (tmp_path / "empty" / "config.json").write_text("{")
    with pytest.raises(UnsupportedModelError, match=r"config\.json cannot be used"):
        load_model(ModelConfig(model=str(tmp_path / "empty")))
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(UnsupportedModelError, match="the folder is what to name"):
        load_model(ModelConfig(model=str(tmp_path / "notes.txt")))


def test_a_broken_gguf_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVWEAVE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF and no more")
    with pytest.raises(UnsupportedModelError, match="cannot be read as a GGUF model"):
        load_model(ModelConfig(model=str(tmp_path / "broken.gguf")))
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_an_unreachable_hub_is_one_sentence() -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"is no folder .* hub did not supply"
    ) as caught:
        load_model(ModelConfig(model="someone/some-model"))
    assert "\n" not in str(caught.value)


def test_a_model_from_the_hub_is_known_by_its_commit(
    tiny_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of the hub client's own cache, as on a machine that has been online once."""
    commit = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "models--someone--tiny"
    shutil.copytree(tiny_folder("llama"), cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    loaded = load_model(ModelConfig(model="someone/tiny"))
    assert loaded.name == "someone/tiny"
    assert loaded.identity.startswith(f"someone/tiny@{commit}:float32:")
    assert loaded.tokenizer.eos_token_id == 257


def test_flags_that_do_not_suit_the_machine_are_refused(
    tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = str(tiny_folder("llama"))
    with pytest.raises(ConfigError, match="--device nonsense cannot be used"):
        load_model(ModelConfig(model=folder, device="nonsense"))
    with pytest.raises(ConfigError, match=r"--chat-template .* cannot be read"):
        load_model(ModelConfig(model=folder, chat_template=str(tmp_path / "none.jinja")))


def test_a_chat_template_from_a_file_replaces_the_models(
    tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    loaded = load_model(ModelConfig(model=str(tiny_folder("llama")), chat_template=str(template)))
    said = loaded.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert said == "[hi]"


def test_identity_follows_content_type_and_nothing_else(
    tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tiny_folder("llama")
    identity = load_model(ModelConfig(model=str(folder))).identity
    copy = tmp_path / "llama"
    shutil.copytree(folder, copy)
    assert load_model(ModelConfig(model=str(copy), served_model_name="x")).identity == identity
    narrow = load_model(ModelConfig(model=str(copy), dtype="bfloat16"))
    assert narrow.identity != identity
    assert narrow.dtype == torch.bfloat16
    save(TINY["llama"](), copy, seed=1)
    assert load_model(ModelConfig(model=str(copy))).identity != identity


def test_positions_count_toward_identity(
    tiny_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "llama"
    shutil.copytree(tiny_folder("llama"), folder)
    before = load_model(ModelConfig(model=str(folder))).identity
    settings = json.loads((folder / "config.json").read_text())
    settings["rope_parameters"]["rope_theta"] = 5000.0
    (folder / "config.json").write_text(json.dumps(settings))
    after = load_model(ModelConfig(model=str(folder))).identity
    assert before.rpartition(":")[2] != after.rpartition(":")[2]


def test_progress_is_told_from_beginning_to_end(tiny_folder: Callable[[str], Path]) -> None:
    told: list[tuple[str, int, int | None]] = []
    load_model(ModelConfig(model=str(tiny_folder("llama"))), lambda *said: told.append(said))
    for what in {said[0] for said in told}:
        own = [(done, total) for name, done, total in told if name == what]
        assert own[0][0] == 0
        assert own[-1][0] == own[-1][1]
        assert own == sorted(own)


def test_a_served_model_does_not_run_outside_a_runner(tiny: Callable[[str], LoadedModel]) -> None:
    with pytest.raises(Exception, match="outside a forward pass of kvweave"):
        tiny("llama").model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=False)


def test_the_compatibility_check_finds_attention_that_is_not_ours(
    tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose scores get a bias (as ALiBi's do) answers otherwise; the check must find it."""
    from transformers.models.llama import modeling_llama

    plain = modeling_llama.create_causal_mask

    def biased(**arguments: object) -> torch.Tensor | None:
        if arguments["config"]._attn_implementation.startswith("kvweave"):
            return plain(**arguments)
        size = arguments["inputs_embeds"].shape[1]
        distance = torch.arange(size)[:, None] - torch.arange(size)[None]
        return torch.where(distance < 0, -torch.inf, -2.0 * distance)[None, None]

    monkeypatch.setattr(modeling_llama, "create_causal_mask", biased)
    with pytest.raises(UnsupportedModelError, match="otherwise than each alone"):
        load_model(ModelConfig(model=str(tiny_folder("llama"))))


def test_a_model_that_stumbles_is_refused_in_words(
    tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaForCausalLM

    def forward(self: LlamaForCausalLM, input_ids: torch.Tensor, use_cache: bool) -> None:
        raise AssertionError("never reached: kvweave passes more than that")

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    with pytest.raises(UnsupportedModelError, match="its code takes no positions"):
        load_model(ModelConfig(model=str(tiny_folder("llama"))))


def test_code_that_cannot_drop_tokens_is_served_without(tmp_path: Path) -> None:
    """Gemma 4 looks up a part of each layer's input by token, so its tensors cannot shrink."""
    from transformers import Gemma4TextConfig

    config = Gemma4TextConfig(
        vocab_size=VOCABULARY,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size=64,
        hidden_size_per_layer_input=8,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=8,
        max_position_embeddings=CONTEXT,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    )
    loaded = load_model(ModelConfig(model=str(save(config, tmp_path / "gemma4"))))
    assert not loaded.prunes_tokens
    assert [layout.window for layout in loaded.layouts] == [8, 8, None]


def test_masks_are_never_built_when_serving(
    tiny: Callable[[str], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is packing looked for: positions that jump must not split or join rows."""
    from transformers import masking_utils

    def forbidden(*_: object) -> None:
        raise AssertionError("looked for packed sequences")

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", forbidden)
    masks = []

    def note(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        **options: object,
    ) -> tuple[torch.Tensor, None]:
        masks.append(mask)
        assert options.get("past_key_values") is None
        assert options.get("cache") is None
        groups = query.shape[1] // value.shape[1]
        return value.repeat_interleave(groups, dim=1).transpose(1, 2), None

    for name in TINY:
        with torch.inference_mode(), hooks.attention(note):
            output = tiny(name).model(
                input_ids=torch.tensor([[1, 2, 3]]),
                position_ids=torch.tensor([[5, 0, 9]]),
                use_cache=False,
            )
        assert output.past_key_values is None
    assert len(masks) == 3 * len(TINY)
    assert all(mask is None for mask in masks)


def test_random_models_are_not_degenerate() -> None:
    """The other tests compare answers: these must differ from token to token."""
    model = random_model(TINY["llama"]())
    with torch.inference_mode():
        logits = model(input_ids=torch.arange(12)[None]).logits[0]
    assert logits.std(dim=0).mean() > 0.1


@pytest.mark.parametrize(
    ("width", "settings", "expected", "of_kv"),
    [
        (256, {}, torch.bfloat16, torch.bfloat16),
        (64, {}, torch.float32, torch.float32),  # too small to gain
        (256, {"dtype": "float32"}, torch.float32, torch.float32),
        (256, {"quantization": "int8"}, torch.float32, torch.bfloat16),
        (256, {"quantization": "int8", "dtype": "float32"}, torch.float32, torch.bfloat16),
        (
            256,
            {"quantization": "int8", "kv_cache_dtype": "float32"},
            torch.float32,
            torch.float32,
        ),
    ],
)
def test_auto_takes_the_faster_number_type_for_float_weights_and_for_kv(
    tmp_path, monkeypatch, width, settings, expected, of_kv
):
    monkeypatch.setattr(cpu, "faster_dtype", lambda: (torch.bfloat16, "it is faster"))
    config = TINY["llama"]()
    config.hidden_size = width
    folder = save(config, tmp_path / "model")
    loaded = load_model(ModelConfig(model=str(folder), device="cpu", **settings))
    assert loaded.dtype == expected
    assert loaded.kv_dtype == of_kv
    assert loaded.dtype_because
    assert (loaded.dtype_because == "it is faster") == (expected == torch.bfloat16)
    facts = card_of(loaded).facts()
    assert facts["dtype_because"] == loaded.dtype_because
    assert ("quantised" in loaded.kv_dtype_because) == (of_kv != expected)
    assert facts["kv_cache_dtype_because"] == loaded.kv_dtype_because
