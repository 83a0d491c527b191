"""The plug-in's contract, compared with the fake of SGLang and, where installed, with SGLang."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import support.fake_sglang as fake
from kvweave.errors import UnsupportedModelError

HARMLESS = {
    "speculative_algorithm": None,
    "enable_deterministic_inference": False,
    "enable_hierarchical_cache": False,
    "enable_lmcache": False,
    "enable_flexkv": False,
    "enable_unified_cache_external_linker": False,
    "enable_unified_memory": False,
    "enable_hisparse": False,
    "enable_streaming_session": False,
    "enable_session_radix_cache": False,
    "dllm_algorithm": None,
    "kv_canary": "none",
    "enable_pdmux": False,
    "disaggregation_mode": "null",
    "pp_size": 1,
    "dcp_size": 1,
    "attn_cp_size": 1,
}


def _context(pool: Any = None, flags: dict[str, Any] | None = None, **about: Any) -> Any:
    pool = pool or fake.MHATokenToKVPool(16, 1, 1, 1, 4)
    params = fake.CacheInitParams(fake.Allocator(16, 1, pool), 1)
    server_args = SimpleNamespace(**{**HARMLESS, **(flags or {})})
    model = SimpleNamespace(is_multimodal=about.pop("is_multimodal", False))
    return fake.TreeCacheBuildContext(server_args, params, None, model, **about)


def _refusal(context: Any) -> str:
    from kvweave.integrations.sglang.checks import check_stack

    with pytest.raises(UnsupportedModelError) as error:
        check_stack(context)
    return str(error.value)


def test_the_fake_is_as_the_contract_says() -> None:
    from kvweave.integrations.sglang.checks import CHUNKS, differences

    assert differences(fake.find) == []
    # The fake's code is its own, so what SGLang's code names is not asked of it.
    called = {name: needed for name, needed in CHUNKS.items() if not name.endswith("!")}
    assert differences(fake.find, called) == []


def test_the_real_one_is_as_the_contract_says() -> None:
    """Run by `make test-sglang`; without SGLang, its absence is what is found."""
    from kvweave.integrations.sglang.checks import CHUNKS, CONTRACT, differences

    for contract in (CONTRACT, CHUNKS):
        absent = [f"{name.removesuffix('!')} is not there" for name in contract]
        expected = absent if find_spec("sglang") is None else []
        assert differences(contract=contract) == expected


@pytest.mark.usefixtures("sglang")
def test_code_that_names_something_else_is_a_difference() -> None:
    from kvweave.integrations.sglang.checks import differences

    name = "sglang.srt.managers.schedule_policy:PrefillAdder.add_chunked_req!"
    assert differences(fake.find, {name: ("chunked_req_limit", "extend_end")}) == []
    [found] = differences(fake.find, {name: ("chunked_req_limit", "chunk_end")})
    assert found == f"{name[:-1]} has no chunk_end"


@pytest.mark.usefixtures("sglang")
def test_without_what_chunks_need_there_is_one_run_and_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kvweave.integrations.sglang import checks

    monkeypatch.setattr(checks, "CHUNKS", {})
    no_chunks = SimpleNamespace(disable_overlap_schedule=True, chunked_prefill_size=-1)
    [applied] = checks.without_chunks()
    assert "has not applied the plug-in's hooks" in applied
    from kvweave.integrations.sglang import register_hooks

    register_hooks()
    assert checks.without_chunks() == []
    monkeypatch.setattr(
        sys.modules["sglang.srt.runtime_context"], "get_schedule", lambda: no_chunks
    )
    assert checks.without_chunks() == ["--chunked-prefill-size turns chunks off"]
    monkeypatch.setattr(checks, "CHUNKS", {"sglang.srt.nowhere:Adder.add": ()})
    assert checks.without_chunks() == ["in this SGLang, sglang.srt.nowhere:Adder.add is not there"]


@pytest.mark.usefixtures("sglang")
def test_another_sglang_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(fake.UnifiedRadixCache, "on_release")
    monkeypatch.setattr(fake.UnifiedRadixCache, "checkpoint", lambda self, req: None)
    refusal = _refusal(_context())
    assert "UnifiedRadixCache.on_release is not there" in refusal
    assert "UnifiedRadixCache.checkpoint has no up_to" in refusal


@pytest.mark.usefixtures("sglang")
def test_a_plain_stack_is_accepted() -> None:
    from kvweave.integrations.sglang.checks import check_stack

    check_stack(_context())


@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"speculative_algorithm": "EAGLE"}, "--speculative-algorithm EAGLE cannot be combined"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache cannot be combined"),
        ({"enable_deterministic_inference": True}, "moved KV is approximate"),
        ({"kv_canary": "log"}, "--kv-canary log cannot be combined"),
        ({"enable_pdmux": True}, "streams of their own"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode prefill"),
        ({"pp_size": 2}, "--pp-size 2"),
    ],
)
def test_flags_that_moved_kv_does_not_fit_are_refused(flags: dict[str, Any], words: str) -> None:
    assert words in _refusal(_context(flags=flags))


@pytest.mark.usefixtures("sglang")
@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"disable_radix_cache": True}, "--disable-radix-cache leaves nothing"),
        ({"is_hybrid_swa": True}, "sliding-window"),
        ({"is_hybrid_ssm": True}, "recurrent state"),
        ({"is_multimodal": True}, "images or sound"),
    ],
)
def test_models_that_moved_kv_does_not_fit_are_refused(about: dict[str, Any], words: str) -> None:
    assert words in _refusal(_context(**about))


@pytest.mark.usefixtures("sglang")
def test_pools_of_other_shapes_are_refused() -> None:
    import torch

    class MLATokenToKVPool(fake.MHATokenToKVPool):
        pass

    assert "MLATokenToKVPool" in _refusal(_context(MLATokenToKVPool(16, 1, 1, 1, 4)))
    pool = fake.MHATokenToKVPool(16, 1, 1, 1, 4)
    pool.kv_cache_layout, pool.store_dtype = "hnd", torch.uint8
    refusal = _refusal(_context(pool))
    assert "layout 'hnd'" in refusal
    assert "torch.uint8" in refusal


@pytest.mark.usefixtures("sglang")
def test_everything_is_refused_at_once() -> None:
    refusal = _refusal(_context(flags={"pp_size": 2, "enable_lmcache": True}, is_hybrid_swa=True))
    assert refusal.count("; ") == 2


@pytest.mark.usefixtures("sglang")
def test_registering_twice_is_harmless(caplog: pytest.LogCaptureFixture) -> None:
    from kvweave.integrations import sglang as plugin

    plugin.register()
    plugin.register()
    assert fake.get_radix_cache_factory("fuzzy_match") is plugin.build
    assert not caplog.records


@pytest.mark.usefixtures("sglang")
def test_somebody_elses_backend_stays(caplog: pytest.LogCaptureFixture) -> None:
    from kvweave.integrations import sglang as plugin

    fake.register_radix_cache_backend("fuzzy_match", other := object())
    plugin.register()
    assert fake.get_radix_cache_factory("fuzzy_match") is other
    assert "another plug-in" in caplog.text


def test_the_entry_point_is_light() -> None:
    """SGLang loads it in processes that never build a cache."""
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    [module] = re.findall(
        r'\[project.entry-points."sglang.*"\]\nkvweave = "(.+):register"', project
    )
    code = f"import sys, {module}; assert not {{'torch', 'numpy', 'sglang'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
