"""`kvweave generate`: prompts continued on the command line."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvweave.cli.flags import takes_settings
from kvweave.cli.session import SamplingConfig, Session, open_session
from kvweave.config import EngineConfig
from kvweave.errors import ConfigError, KvweaveError

if TYPE_CHECKING:
    from kvweave.engine.types import Completion

_Prompts = Annotated[
    list[str] | None, typer.Argument(help="Texts to continue; without any, standard input is one.")
]
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON object per prompt.")]


@takes_settings(sampling=SamplingConfig, engine=EngineConfig)
def generate(
    sampling: SamplingConfig,
    engine: EngineConfig,
    given: frozenset[str],
    prompts: _Prompts = None,
    as_json: _Json = False,
) -> None:
    """Continue one or more prompts and print what comes."""
    texts = prompts or [_standard_input()]
    engine.warn_without_effect(given)
    with open_session(engine) as session:
        asyncio.run(_all(session, texts, sampling, as_json))


def _standard_input() -> str:
    if sys.stdin.isatty():
        raise ConfigError(["there is no prompt: give one as an argument or on standard input"])
    return sys.stdin.read()


async def _all(session: Session, texts: list[str], sampling: SamplingConfig, as_json: bool) -> None:
    """Answer all prompts together and print in order; stream a single one."""
    alone = len(texts) == 1 and not as_json
    tasks = [
        asyncio.create_task(_one(session, place, text, sampling, show=alone))
        for place, text in enumerate(texts)
    ]
    for text, task in zip(texts, tasks, strict=True):
        answer = await task
        if as_json:
            typer.echo(json.dumps(_as_object(text, answer), ensure_ascii=False))
        else:
            typer.echo("" if alone else answer.text)


async def _one(
    session: Session, place: int, text: str, sampling: SamplingConfig, *, show: bool
) -> Completion:
    from kvweave.engine.types import Completion, GenerateRequest  # imported here: it loads numpy

    answer = Completion()
    request = GenerateRequest(
        rid=f"prompt-{place}",
        prompt_ids=await session.reader.read(text),
        sampling=sampling.params(),
    )
    async for delta in session.engine.generate(request):
        if show:
            typer.echo(delta.text, nl=False)
            sys.stdout.flush()
        answer.text += delta.text
        answer.finish_reason, answer.usage = delta.finish_reason, delta.usage
        if delta.error is not None:
            raise KvweaveError(f"prompt {place + 1} failed: {delta.error}")
    return answer


def _as_object(prompt: str, answer: Completion) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "text": answer.text,
        "finish_reason": answer.finish_reason,
        "usage": dataclasses.asdict(answer.usage),
    }
