"""Answers from moved KV against cold ones: how close, how right, how much sooner."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvweave.fuzzy.recompute import STRATEGIES
from kvweave_bench.base import Bench
from kvweave_bench.quality.arms import ABLATIONS, COPY, Arm, parse_arms
from kvweave_bench.quality.cells import Cell, choose_cells
from kvweave_bench.quality.chat import Chat
from kvweave_bench.quality.page import Page, write_page
from kvweave_bench.quality.pairs import Compared, arms_of, compare
from kvweave_bench.quality.summary import in_a_line, rows
from kvweave_bench.quality.writer import Writer
from kvweave_bench.report import Row, check_writable, describe_machine
from kvweave_bench.setting import Setting

_ARMS = (
    Arm(COPY),
    *(Arm(name, 0.15) for name in STRATEGIES),
    *(Arm("mix", budget) for budget in (0.05, 0.3)),
    *(Arm(name) for name in ABLATIONS),
)


def measure(setting: Setting) -> list[Row]:
    """All cells, one after another; the page is written when the last is done."""
    options = setting.options
    cells = choose_cells(options.cells)
    arms = list(_ARMS) if options.arms is None else parse_arms(options.arms)
    html = None if options.html is None else Path(options.html)
    if html is not None:
        check_writable(html, "--html")
    found = [_compare(setting, cell, arms) for cell in cells]
    if html is not None:
        machine = describe_machine() | {"texts": setting.text_origins}
        write_page(html, Page(setting.model_name or "", machine, setting.seed, found))
        setting.console.print(f"page written to {html}", highlight=False)
    return [row for each in found for row in rows(each)]


def _compare(setting: Setting, cell: Cell, arms: list[Arm]) -> Compared:
    # Whatever other cells are chosen, a cell's prompts are the same.
    setting.corpus.rng = np.random.default_rng([setting.seed, *(cell.like or cell.name).encode()])
    chat = Chat(setting.loaded.tokenizer, setting.corpus.tokens)
    writer = Writer(setting.corpus, chat, setting.quick)
    n = cell.weight * setting.n
    cases = [cell.build(writer, number) for number in range(n)]
    with setting.progress(cell.name, n * len(arms_of(cell, arms))) as advance:
        found = compare(setting.loaded, setting.model_config, cell, cases, arms, advance)
    for arm, pairs in found.pairs.items():
        setting.console.print(f"{cell.name}/{arm.name}: {in_a_line(found.cases, pairs)}")
    return found


BENCH = Bench(
    name="quality",
    summary="Answers from moved KV against the same model's cold answers",
    counts="prompts of each kind; near-duplicates 5 times, unrelated ones 9 times as many",
    n=24,
    quick_n=1,
    measure=measure,
    takes=("html", "cells", "arms"),
)
