"""What agents' clients are tested with: a tool, a script of ten steps, and torn streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field

STEPS = 10
MAX_TOKENS = 400
"""More than any enforced answer to this script needs: white space is bounded."""


class Place(BaseModel):
    """A place to look at."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=12, pattern="^[a-z]+$")
    distance: int = Field(ge=0, le=99)


SCHEMA = Place.model_json_schema()
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a place.",
        "parameters": SCHEMA,
        "strict": True,
    },
}
NAMED = {"type": "function", "function": {"name": "look"}}
PLACE_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "place", "schema": SCHEMA, "strict": True},
}


def check(arguments: str | dict[str, Any]) -> None:
    Place.model_validate(json.loads(arguments) if isinstance(arguments, str) else arguments)


def conversation(create: Callable[..., Any], stream: Callable[..., Any]) -> None:
    """Ten steps in OpenAI's form: calls by choice and schemas, with all that was said as history.

    `create(messages, **more)` gives a message; `stream`, the same by the client's own stream.
    """
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Look around."}]
    for step in range(STEPS):
        if step % 3 == 2:
            more: dict[str, Any] = {"response_format": PLACE_FORMAT}
        else:
            choice = NAMED if step % 3 else "required"
            more = {"tools": [LOOK], "tool_choice": choice, "parallel_tool_calls": False}
        message = create(messages, seed=step, **more)
        streamed = stream(messages, seed=step, **more)
        assert (streamed.content or "") == (message.content or "")
        if step % 3 == 2:
            check(message.content)
            messages += [
                {"role": "assistant", "content": message.content},
                {"role": "user", "content": "And now?"},
            ]
            continue
        (call,) = message.tool_calls
        (again,) = streamed.tool_calls
        assert call.function.name == again.function.name == "look"
        assert call.function.arguments == again.function.arguments
        check(call.function.arguments)
        said = {"name": "look", "arguments": call.function.arguments}
        messages += [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": call.id, "type": "function", "function": said}],
            },
            {"role": "tool", "tool_call_id": call.id, "content": "A tree."},
        ]


@contextlib.contextmanager
def torn(url: str, seed: int = 0) -> Iterator[str]:
    """The server at `url` behind a relay that cuts its answers at random bytes.

    A client then gets events, lines and characters in pieces.
    """
    where = urlsplit(url)
    choose = random.Random(seed)
    loop = asyncio.new_event_loop()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, requests = await asyncio.open_connection(where.hostname, where.port)

        async def forward() -> None:
            with contextlib.suppress(ConnectionError):
                while data := await reader.read(1 << 16):
                    requests.write(data)
                requests.close()

        sending = asyncio.ensure_future(forward())
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            while data := await answers.read(1 << 16):
                while data:
                    length = choose.randint(1, 200)
                    writer.write(data[:length])
                    await writer.drain()
                    await asyncio.sleep(0.0005)  # or the pieces would arrive as one
                    data = data[length:]
        sending.cancel()
        requests.close()
        writer.close()

    async def end() -> None:
        listening.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for each in others:
            each.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    listening = loop.run_until_complete(asyncio.start_server(relay, "127.0.0.1", 0))
    port = listening.sockets[0].getsockname()[1]
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(end(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
