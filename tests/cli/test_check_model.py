"""kvweave check-model: a table, a sentence, an exit code."""

from __future__ import annotations

import pytest

from kvweave.cli.main import main
from kvweave.engine.selfcheck import gate
from kvweave.engine.selfcheck.measure import Measured


def run(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as left:
        main(["check-model", *arguments])
    return left.value.code


@pytest.fixture(autouse=True)
def measured(monkeypatch, tmp_path):
    monkeypatch.setattr(gate, "cache_folder", lambda: tmp_path)
    found = [Measured("moved", 0.01 * n, n < 4, 300) for n in range(1, 5)]
    found += [Measured("near-duplicate", 0.02, True, 300, "gold", "gold")] * 2
    monkeypatch.setattr(gate, "measure", lambda *_: found)
    return found


def test_a_table_and_a_sentence(tiny_folder, capsys):
    assert run("--model", str(tiny_folder("llama"))) == 0
    *table, sentence = capsys.readouterr().out.splitlines()
    assert table[1].split() == ["moved", "4", "0.0250", "0.0400", "3", "-", "-", "-"]
    assert table[2].split() == ["near-duplicate", "2", "0.0200", "0.0200", "2", "2", "2", "0"]
    assert "may be served with text that moved" in sentence


def test_a_failed_check_exits_with_1_and_ignores_earlier_results(tiny_folder, measured, capsys):
    folder = str(tiny_folder("llama"))
    assert run("--model", folder) == 0
    measured[:2] = [Measured("moved", 5.0, False, 300)] * 2
    assert run("--model", folder) == 1
    assert "nats" in capsys.readouterr().out
    assert run("--model", folder, "--fuzzy-self-check-max-kl", "9") == 0


def test_negative_thresholds_are_refused(capfd):
    assert run("--fuzzy-self-check-max-kl", "-1", "--fuzzy-self-check-max-decoys", "-2") == 2
    words = capfd.readouterr().err
    assert "--fuzzy-self-check-max-kl must be 0 or more" in words
    assert "--fuzzy-self-check-max-decoys must be 0 or more" in words
