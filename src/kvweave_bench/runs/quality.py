"""Bench: answers from moved KV against cold ones, in quality and speed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvweave.fuzzy.recompute import STRATEGIES
from kvweave_bench.base import Bench
from kvweave_bench.quality import conversation
from kvweave_bench.quality.chat import Chat
from kvweave_bench.quality.page import Page, write_page
from kvweave_bench.quality.pairs import Compared, compare, variants_of
from kvweave_bench.quality.scenarios import Scenario, choose_scenarios
from kvweave_bench.quality.summary import in_a_line, rows
from kvweave_bench.quality.variants import ABLATIONS, COPY, DEFAULT, Variant, parse_variants
from kvweave_bench.quality.writer import Writer
from kvweave_bench.report import Row, check_writable, describe_machine
from kvweave_bench.setting import Setting

_VARIANTS = (
    Variant(DEFAULT),
    Variant(COPY),
    *(Variant(name, 0.15) for name in STRATEGIES),
    *(Variant("mix", budget) for budget in (0.05, 0.3)),
    *(Variant(name) for name in ABLATIONS),
)


def measure(setting: Setting) -> list[Row]:
    """All scenarios, one after another; the page is written when the last is done."""
    options = setting.options
    scenarios = choose_scenarios(options.cells, beside=(conversation.NAME,))
    sessions = options.cells is None or conversation.NAME in options.cells
    variants = list(_VARIANTS) if options.arms is None else parse_variants(options.arms)
    html = None if options.html is None else Path(options.html)
    if html is not None:
        check_writable(html, "--html")
    found = [_compare(setting, scenario, variants) for scenario in scenarios]
    measured = _sessions(setting) if sessions else []
    if html is not None and found:
        machine = describe_machine() | {"texts": setting.text_origins}
        write_page(html, Page(setting.model_name or "", machine, setting.seed, found))
        setting.console.print(f"page written to {html}", highlight=False)
    return [*(row for each in found for row in rows(each)), *measured]


def _sessions(setting: Setting) -> list[Row]:
    setting.corpus.rng = np.random.default_rng([setting.seed, *conversation.NAME.encode()])
    total = conversation.chains(setting) * conversation.turns(setting)
    with setting.progress(conversation.NAME, total) as advance:
        return conversation.measure_sessions(setting, advance)


def _compare(setting: Setting, scenario: Scenario, variants: list[Variant]) -> Compared:
    # Whatever other scenarios are chosen, a scenario's prompts are the same.
    setting.corpus.rng = np.random.default_rng(
        [setting.seed, *(scenario.like or scenario.name).encode()]
    )
    chat = Chat(setting.loaded.tokenizer, setting.corpus.tokens)
    writer = Writer(setting.corpus, chat, setting.quick)
    n = scenario.weight * setting.n
    cases = [scenario.build(writer, number) for number in range(n)]
    with setting.progress(scenario.name, n * len(variants_of(scenario, variants))) as advance:
        found = compare(setting.loaded, setting.model_config, scenario, cases, variants, advance)
    for variant, pairs in found.pairs.items():
        setting.console.print(f"{scenario.name}/{variant.name}: {in_a_line(found.cases, pairs)}")
    return found


BENCH = Bench(
    name="quality",
    counts="prompts of each kind; near-duplicates 5 times, unrelated ones 9 times as many",
    n=24,
    quick_n=1,
    measure=measure,
    takes=("html", "cells", "arms"),
)
