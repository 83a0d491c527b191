"""`kvweave chat`: a conversation in the terminal; each turn reports its cache hits and timing."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console

from kvweave.cli.flags import takes_settings
from kvweave.cli.session import SamplingConfig, Session, open_session
from kvweave.config import EngineConfig
from kvweave.errors import KvweaveError, RequestError

if TYPE_CHECKING:
    from kvweave.engine.types import Usage

_HELP = "/new starts over, /quit (or Ctrl-D) leaves, Ctrl-C stops an answer."


@takes_settings(sampling=SamplingConfig, engine=EngineConfig)
def chat(sampling: SamplingConfig, engine: EngineConfig, given: frozenset[str]) -> None:
    """Talk to a model in the terminal."""
    console = Console(highlight=False)
    engine.warn_without_effect(given)
    with open_session(engine) as session:
        console.print(f"{session.name}. {_HELP}", style="dim", soft_wrap=True)
        conversation = Conversation(session, sampling, console)
        while (line := _read(console)) is not None:
            if line == "/new":
                conversation.messages.clear()
            elif line:
                conversation.turn(line)


def _read(console: Console) -> str | None:
    """One line of input; None at its end."""
    try:
        line = console.input("[bold]> [/bold]").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None
    return None if line == "/quit" else line


@dataclass
class Conversation:
    """The conversation so far, in `messages`."""

    session: Session
    sampling: SamplingConfig
    console: Console
    messages: list[dict[str, str]] = field(default_factory=list)
    _turns: int = 0

    def turn(self, line: str) -> None:
        """Send `line`, print the answer as it comes. A turn that fails leaves no message."""
        self.messages.append({"role": "user", "content": line})
        try:
            answer = asyncio.run(self._answer())
        except KvweaveError as error:
            self.messages.pop()
            self.console.print(f"{error}", style="red", markup=False)
        except KeyboardInterrupt:
            self.messages.pop()
            self.console.print("\n(stopped)", style="dim")
        else:
            self.messages.append({"role": "assistant", "content": answer})

    async def _answer(self) -> str:
        # Imported here: they load numpy and the server's parts.
        from kvweave.engine.types import GenerateRequest, Usage
        from kvweave.server.prompts import ChatPrompt

        self._turns += 1
        prompt, _ = await self.session.reader.conversation(ChatPrompt(messages=self.messages))
        request = GenerateRequest(
            rid=f"turn-{self._turns}", prompt_ids=prompt, sampling=self.sampling.params()
        )
        started, first = time.perf_counter(), None
        answer, tokens, usage = "", 0, Usage()
        async for delta in self.session.engine.generate(request):
            if delta.error is not None:
                raise RequestError(delta.error)
            if first is None:
                first = time.perf_counter() - started
            self.console.print(delta.text, end="", markup=False, soft_wrap=True)
            answer, tokens, usage = answer + delta.text, tokens + len(delta.token_ids), delta.usage
        self.console.print()
        account = _account(usage, tokens, first or 0.0)
        self.console.print(account, style="dim", soft_wrap=True)
        return answer


def _account(usage: Usage, tokens: int, first_token_seconds: float) -> str:
    moved = f", {usage.moved_tokens} moved" if usage.moved_tokens else ""
    return (
        f"({usage.prompt_tokens} prompt tokens, {usage.cached_tokens} cached{moved}; first token "
        f"after {first_token_seconds:.2f} s, {tokens} in all)"
    )
