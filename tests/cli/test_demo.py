"""kvweave demo: its output, with and without colour."""

import re

import pytest

from kvweave.cli.main import main


@pytest.mark.model
def test_the_demo_prints_both_times_and_the_coloured_prompt(capfd, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("FORCE_COLOR", "1")
    with pytest.raises(SystemExit) as left:
        main(["demo"])
    assert left.value.code == 0
    shown = capfd.readouterr().out
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert shown != plain, "the map has colours"
    assert re.search(r"cold +[\d,]+ ms +\d+ +0\b", plain)
    computed, reused = map(int, re.search(r"warm +[\d,]+ ms +(\d+) +(\d+)", plain).groups())
    seam = 32  # the first tokens of what was moved are computed again
    assert reused > 10 * (computed - seam)
    assert re.search(r"[\d.]+ times sooner", plain)
    assert "The lighthouse at Marrow Point" in plain
    assert re.search(r"moved \d{3}", plain)
