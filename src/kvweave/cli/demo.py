"""`kvweave demo`: one document in two prompts, with cold and with warm cache, timed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvweave.cli.chat import Session, open_session
from kvweave.cli.flags import takes_settings
from kvweave.config import CacheConfig, EngineConfig, FuzzyConfig, ModelConfig
from kvweave.errors import KvweaveError

if TYPE_CHECKING:
    from kvweave.engine.types import Completion
    from kvweave.explorer.history import SourceRun

BACKEND = "fuzzy_match"
FIRST = "Read this and say in one sentence what it is about.\n\n{document}"
SECOND = (
    "You answer questions about a text. Be brief.\n\nText:\n{document}\n"
    "Question: What did the keeper nail to the wall?"
)
ANSWER_TOKENS = 40
_STYLES = {
    "exact": "black on sky_blue1",
    "moved": "black on light_goldenrod2 underline",
    "paraphrase": "black on plum2 underline",
    "refreshed": "black on light_pink1",
    "fresh": "",
}
_HEAD, _TAIL = 36, 18
"""Tokens of a long run that are shown at its two ends."""


@dataclass(frozen=True, slots=True)
class _Timed:
    """An answer, its prompt, and the time to its first token in seconds."""

    prompt: tuple[int, ...]
    answer: Completion
    first_token: float


@takes_settings(model=ModelConfig)
def demo(model: ModelConfig) -> None:
    """Show what moved text is worth: one document, two wrappers, a cold and a warm clock."""
    console = Console()
    cache = CacheConfig(prefix_cache_backend=BACKEND, max_total_tokens=16_384)
    document = files("kvweave.explorer").joinpath("static/sample.txt").read_text("utf-8")
    # Off: the demo shows by itself what the self-check measures.
    fuzzy = FuzzyConfig(self_check="off")
    with open_session(EngineConfig(model=model, cache=cache, fuzzy=fuzzy)) as session:
        asyncio.run(_show(session, console, document.strip()))


async def _show(session: Session, console: Console, document: str) -> None:
    first, second = (wrapper.format(document=document) for wrapper in (FIRST, SECOND))
    await _ask(session, "Hello.", "warm-up", 2)  # what runs only once must not count
    console.print(f"\n[bold]{session.name}[/] is asked about a document that it has read before,")
    console.print("in a prompt that begins otherwise: no prefix cache would help.\n")
    with console.status("cold: nobody has read the document yet"):
        cold = await _ask(session, second, "cold", ANSWER_TOKENS)
    with console.status("another prompt brings the same document"):
        await _ask(session, first, "warm", 1)
    with console.status("warm: its KV is moved to where it now stands"):
        warm = await _ask(session, second, "warm", ANSWER_TOKENS)
    console.print(_clocks(cold, warm))
    console.print(f"\n[bold]{cold.first_token / warm.first_token:.1f} times sooner.[/]", end=" ")
    if cold.answer.token_ids == warm.answer.token_ids:
        console.print("Both answers are:")
        console.print(_quoted(warm))
    else:
        console.print("The answers, cold and warm:")
        console.print(_quoted(cold))
        console.print()
        console.print(_quoted(warm))
    console.print()
    _map(session, console, warm)


async def _ask(session: Session, text: str, namespace: str, most: int) -> _Timed:
    """Answer greedily; `namespace` separates the caches."""
    from kvweave.engine.types import Completion, GenerateRequest, SamplingParams
    from kvweave.server.prompts import ChatPrompt

    if session.reader.tokenizer.chat_template is None:
        prompt = await session.reader.read(text)
    else:
        chat = ChatPrompt(messages=[{"role": "user", "content": text}])
        prompt, _ = await session.reader.conversation(chat)
    request = GenerateRequest(
        rid=f"demo-{time.monotonic_ns()}",
        prompt_ids=prompt,
        sampling=SamplingParams(max_tokens=most, temperature=0),
        cache_salt=namespace,
    )
    answer, begun, first_token = Completion(), time.perf_counter(), None
    async for delta in session.engine.generate(request):
        if first_token is None:
            first_token = time.perf_counter() - begun
        answer.extend(delta)
    if answer.error is not None or first_token is None:
        raise KvweaveError(f"the demo got no answer: {answer.error}")
    return _Timed(prompt, answer, first_token)


def _quoted(timed: _Timed) -> Padding:
    return Padding(Text(timed.answer.text.strip(), style="italic"), (0, 2))


def _clocks(cold: _Timed, warm: _Timed) -> Table:
    table = Table("", "first token", "tokens computed", "tokens reused", box=None, pad_edge=False)
    for name, timed in (("cold", cold), ("warm", warm)):
        usage = timed.answer.usage
        reused = usage.cached_tokens + usage.moved_tokens
        table.add_row(
            f"[bold]{name}[/]",
            f"{1000 * timed.first_token:,.0f} ms",
            f"{usage.prompt_tokens - reused:,}",
            f"{reused:,}",
        )
    for column in table.columns[1:]:
        column.justify = "right"
    return table


def _map(session: Session, console: Console, timed: _Timed) -> None:
    """Print the prompt, coloured by the source of its KV."""
    from kvweave.explorer.history import counts, source_runs
    from kvweave.explorer.queries import pieces
    from kvweave.server.responses import TokenTexts

    answer = timed.answer
    runs = source_runs(len(timed.prompt), answer.usage.cached_tokens, answer.plan, answer.refreshed)
    legend = Text("The warm prompt:  ")
    for source, count in counts(runs).items():
        if count:
            legend.append(f" {source} {count:,} ", style=_STYLES[source]).append("  ")
    console.print(legend, end="\n\n")
    words = pieces(TokenTexts(session.reader.tokenizer), timed.prompt)
    console.print(Padding(_coloured(runs, words), (0, 2)))
    console.print(
        "\n[dim]The same, live and for every prompt: kvweave serve --prefix-cache-backend "
        f"{BACKEND}, then /explorer[/]",
        soft_wrap=True,
    )


def _coloured(runs: Iterable[SourceRun], words: list[str]) -> Text:
    text = Text()
    for run in runs:
        shown = words[run.start : run.end]
        if len(shown) > _HEAD + _TAIL + 20:
            left_out = f" … {len(shown) - _HEAD - _TAIL:,} tokens … "
            shown = [*shown[:_HEAD], left_out, *shown[-_TAIL:]]
        text.append("".join(shown), style=_STYLES[run.source])
    return text
