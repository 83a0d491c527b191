"""The self-check: measuring, the verdict, the kept result, and the fallback to exact reuse."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from kvweave.config import CacheConfig, EngineConfig, FuzzyConfig
from kvweave.engine.engine import Engine
from kvweave.engine.selfcheck import gate
from kvweave.engine.selfcheck.cases import KINDS, SelfCheckCase, build_cases
from kvweave.engine.selfcheck.gate import check_model, guarded, judge
from kvweave.engine.selfcheck.measure import Measured, measure
from kvweave.errors import UnsupportedModelError
from kvweave.models import LoadedModel
from kvweave.prefix.base import approximate_backends, exact_form

[BACKEND] = approximate_backends()
GOOD = Measured("moved", 0.01, True, 300)
RIGHT = Measured("near-duplicate", 0.02, True, 300, "gold", "gold")
MISLED = replace(RIGHT, warm="decoy")


def config_of(**fuzzy: object) -> EngineConfig:
    return EngineConfig(cache=CacheConfig(prefix_cache_backend=BACKEND), fuzzy=FuzzyConfig(**fuzzy))


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of results for this test alone."""
    monkeypatch.setattr(gate, "cache_folder", lambda: tmp_path)
    return tmp_path / "self-checks"


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> list[list[Measured]]:
    """Figures that the next measurements return, one list each; a further measurement fails."""
    found: list[list[Measured]] = []
    monkeypatch.setattr(gate, "measure", lambda *_: found.pop(0))
    return found


@pytest.fixture
def model(tiny: Callable[[str], LoadedModel]) -> LoadedModel:
    return tiny("llama")


# What is measured, on the language model itself.


def short(case: SelfCheckCase) -> SelfCheckCase:
    """For tiny models, whose context is small."""
    return replace(case, donor=case.donor[:40], recipient=case.recipient[:40])


def first_cases(model: LoadedModel) -> list[Measured]:
    return measure(build_cases(model.tokenizer)[: 2 * len(KINDS)], config_of(), model)


@pytest.mark.model
def test_the_packaged_model_passes(packaged: LoadedModel) -> None:
    measured = first_cases(packaged)
    assert {each.kind for each in measured} == set(KINDS)
    assert all(each.moved > 250 for each in measured)
    assert [each.cold for each in measured if each.kind == KINDS[2]] == ["gold", "gold"]
    check = judge("it", measured, config_of())
    assert check.passed, check.sentence
    assert check.misled == 0
    assert 0.001 < check.kl < 0.1  # something was moved, so it cannot be nothing


@pytest.mark.model
def test_keys_turned_by_a_wrong_theta_are_caught(packaged: LoadedModel) -> None:
    pairs = len(packaged.layouts[0].rotary.inv_freq)
    wrong = 1_000_000.0 ** -(np.arange(pairs) / pairs)  # the model's own theta is 100,000
    broken = replace(
        packaged,
        layouts=tuple(
            replace(layout, rotary=replace(layout.rotary, inv_freq=wrong))
            for layout in packaged.layouts
        ),
    )
    check = judge("it", first_cases(broken), config_of())
    assert not check.passed
    assert "--fuzzy-self-check-max-kl allows 0.1" in check.sentence


def test_its_steps_are_not_logged_as_if_somebody_asked(
    model: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    [case, *_] = build_cases(model.tokenizer)
    with caplog.at_level(logging.INFO, "kvweave.engine"):
        measure([short(case)], config_of(), model)
        assert logging.getLogger("kvweave.engine").level == logging.INFO, "put back"
    assert not [line for line in caplog.messages if "batch" in line]


def test_nothing_of_it_is_published_and_the_addresses_stay_free(model: LoadedModel) -> None:
    events = json.dumps({"endpoint": "tcp://127.0.0.1:0", "bind": True})
    config = config_of()
    config = replace(config, cache=replace(config.cache, kv_events_config=events))
    [case, *_] = build_cases(model.tokenizer)
    with patch("kvweave.engine.factory.open_sink") as opened:
        assert len(measure([short(case)], config, model)) == 1
    opened.assert_not_called()


def test_it_judges_the_seams_that_the_flags_recompute(model: LoadedModel) -> None:
    text = np.arange(10, 60, dtype=np.int32)
    cases = [SelfCheckCase(KINDS[0], text, np.concatenate([text[:2], text[:1], text[4:]]))]
    flags = {"min_span": 8, "stride": 4, "min_suffix": 4}
    found = {
        seams: measure(cases, config_of(refresh_tokens=seams, **flags), model)[0]
        for seams in (0, FuzzyConfig().refresh_tokens)
    }
    assert len({each.moved for each in found.values()}) == 1
    assert min(each.moved for each in found.values()) > 8
    assert len({each.kl for each in found.values()}) == 2


def test_near_duplicates_differ_in_the_fact_and_everything_moves(model: LoadedModel) -> None:
    for case in build_cases(model.tokenizer):
        donor, recipient = (
            model.tokenizer.decode(tokens) for tokens in (case.donor, case.recipient)
        )
        assert donor != recipient
        if case.kind == KINDS[2]:
            assert case.gold in recipient
            assert case.decoy in donor
            assert case.decoy not in recipient.replace(case.gold, "")
            assert case.gold not in donor.replace(case.decoy, "")
        start = recipient.index("\n\n") + 2
        assert recipient[start : start + 200] in donor or case.kind == "reordered"
        assert case.recipient.tolist()[:64] != case.donor.tolist()[:64] or case.kind == "reordered"


# What follows from it.


@pytest.mark.parametrize(
    ("measured", "limits", "words"),
    [
        ([GOOD] * 6, {}, None),
        ([GOOD] * 6, {"self_check_max_kl": 0.005}, "0.010 nats (KL, the mean of 6 prompts"),
        ([replace(GOOD, kl=float("nan"))] * 6, {}, "nan nats"),
        ([GOOD] * 6 + [MISLED], {}, "1 of 1 answers gave the fact of another"),
        ([GOOD] * 6 + [MISLED], {"self_check_max_decoys": 1}, None),
        ([GOOD] * 6 + [replace(MISLED, cold="neither")], {}, None),
        ([GOOD] * 5 + [replace(GOOD, moved=0)], {}, "not be measured, since only 5 of 6 prompts"),
        ([], {}, "not be measured, since only 0 of 0 prompts"),
    ],
)
def test_one_sentence_says_what_was_measured_and_what_to_do(
    measured: list[Measured], limits: dict[str, float], words: str | None
) -> None:
    check = judge("gpt9", measured, config_of(**limits))
    assert check.passed == (words is None)
    assert check.sentence.startswith("gpt9 ")
    if words is not None:
        assert words in check.sentence
        assert f"exact reuse only ({exact_form(BACKEND)})" in check.sentence
        assert "--fuzzy-self-check off" in check.sentence


def test_what_was_not_moved_does_not_make_the_mean_look_better() -> None:
    bad, untouched = replace(GOOD, kl=0.15), replace(GOOD, kl=0.0, moved=0)
    assert not judge("it", [bad] * 6 + [untouched] * 20, config_of()).passed


# What is done about it.


def test_a_model_that_fails_is_served_exactly(
    model: LoadedModel,
    measuring: list[list[Measured]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    measuring += [[replace(GOOD, kl=3.0)] * 6]
    before = config_of()
    config, check = guarded(before, model)
    assert not check.passed
    assert config.cache.prefix_cache_backend == exact_form(BACKEND) == "radix"
    assert replace(config, cache=before.cache) == before
    assert Engine(config, model).cache.name == "radix"
    [record] = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert record.getMessage() == check.sentence


def test_a_model_that_passes_keeps_its_backend(
    model: LoadedModel, measuring: list[list[Measured]]
) -> None:
    measuring += [[GOOD] * 6]
    config, check = guarded(config_of(), model)
    assert check.passed
    assert config == config_of()


def test_a_required_check_that_fails_refuses_the_start(
    model: LoadedModel, measuring: list[list[Measured]]
) -> None:
    measuring += [[MISLED] * 6]
    with pytest.raises(UnsupportedModelError, match="6 of 6 answers"):
        guarded(config_of(self_check="require"), model)


def test_exact_backends_and_a_disabled_check_are_not_measured(
    model: LoadedModel, measuring: list[list[Measured]]
) -> None:
    exact = EngineConfig(cache=CacheConfig(prefix_cache_backend="radix"))
    for config in (exact, config_of(self_check="off")):
        assert guarded(config, model) == (config, None)


def test_keys_that_cannot_be_moved_are_refused_as_before(
    tiny: Callable[[str], LoadedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("gpt2")
    monkeypatch.setattr(gate, "build_cases", lambda _: [*map(short, build_cases(model.tokenizer))])
    with pytest.raises(
        UnsupportedModelError, match=r"keys cannot be moved.* --prefix-cache-backend .*radix"
    ):
        guarded(config_of(), model)


# What is remembered.


def test_the_second_start_measures_nothing(
    model: LoadedModel, measuring: list[list[Measured]], kept: Path
) -> None:
    measuring += [[GOOD] * 5 + [RIGHT]]
    first = check_model(config_of(), model)
    assert check_model(config_of(), model) == first
    # Thresholds judge; they do not change the figures. Nor does the size of the pool.
    assert not check_model(config_of(self_check_max_kl=0.001), model).passed
    assert check_model(config_of(time_budget_ms=10.0, session_donors=False), model) == first
    small = replace(config_of(), cache=replace(config_of().cache, max_total_tokens=4096))
    assert check_model(small, model) == first
    measuring += [[replace(GOOD, kl=2.0)] * 6]
    assert not check_model(config_of(), model, afresh=True).passed
    assert not check_model(config_of(), model).passed
    assert len(list(kept.iterdir())) == 1


def test_a_check_that_ran_out_of_time_does_not_replace_a_fuller_one(
    model: LoadedModel, measuring: list[list[Measured]]
) -> None:
    measuring += [[GOOD] * 10, [replace(GOOD, kl=2.0)] * 9]
    fuller = check_model(config_of(), model)
    assert not check_model(config_of(), model, afresh=True).passed
    assert check_model(config_of(), model) == fuller


def test_too_few_moved_prompts_are_no_pass_and_are_not_remembered(
    model: LoadedModel, measuring: list[list[Measured]]
) -> None:
    measuring += [[GOOD] * 5 + [replace(GOOD, moved=0)] * 17, [GOOD] * 6]
    check = check_model(config_of(), model)
    assert not check.passed
    assert not check.conclusive
    assert "raise that limit" not in check.sentence, "no limit was exceeded"
    assert check_model(config_of(), model).passed


CHANGES = {
    "fuzzy": {"sink_tokens": 9},
    "cache": {"page_size": 1024},
    "model": {"attention_backend": "sdpa"},
    "scheduler": {"chunked_prefill_size": 64},
}
LOADED_CHANGES = {"identity": "another", "context_length": 64}


@pytest.mark.parametrize("changed", [*CHANGES, *LOADED_CHANGES, "version", "torch", "template"])
def test_what_could_change_the_answers_is_measured_anew(
    model: LoadedModel,
    measuring: list[list[Measured]],
    changed: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measuring += [[GOOD] * 6, [replace(GOOD, kl=1.0)] * 6]
    config = config_of()
    check_model(config, model)
    if changed in CHANGES:
        group = replace(getattr(config, changed), **CHANGES[changed])
        config = replace(config, **{changed: group})
    elif changed in LOADED_CHANGES:
        model = replace(model, **{changed: LOADED_CHANGES[changed]})
    elif changed == "version":
        monkeypatch.setattr(gate, "__version__", "999")
    elif changed == "torch":
        monkeypatch.setattr("torch.__version__", "999")
    else:
        monkeypatch.setattr(
            model.tokenizer, "chat_template", "{{ messages[0].content }} Well:", raising=False
        )
    assert not check_model(config, model).passed


@pytest.mark.parametrize("damage", ["{", "{}", '{"key": 1, "measured": []}', "[]", "\xff"])
def test_a_result_that_cannot_be_read_is_measured_again(
    model: LoadedModel, measuring: list[list[Measured]], kept: Path, damage: str
) -> None:
    measuring += [[GOOD] * 6, [RIGHT] * 6]
    check_model(config_of(), model)
    [file] = kept.iterdir()
    file.write_bytes(damage.encode("latin-1"))
    assert check_model(config_of(), model).measured == (RIGHT,) * 6
    assert json.loads(file.read_text())["measured"][0]["cold"] == "gold"


def test_a_folder_that_cannot_be_written_costs_a_line_in_the_log(
    model: LoadedModel,
    measuring: list[list[Measured]],
    kept: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kept.write_text("a file is in the way")
    measuring += [[GOOD] * 6]
    assert check_model(config_of(), model).passed
    assert "the next start will run the self-check again" in caplog.text
