"""Clients that disconnect in any phase leave no state behind; slow clients lose no text."""

import asyncio
import contextlib
import json
import random
import socket

import httpx
import pytest

from kvweave.engine.types import GenerateRequest, OutputDelta, SamplingParams, TokenLogprob, Usage
from kvweave.prefix.lease import Span
from kvweave.server.metrics import Metrics, RequestMetrics
from kvweave.server.streaming import Generation, LiveGenerations
from support.serverkit import TEXT, eventually


def post(server, body) -> socket.socket:
    """Send a request on a bare socket and do not wait for anything."""
    url = httpx.URL(server.url)
    raw = socket.create_connection((url.host, url.port), timeout=20)
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    raw.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
    return raw


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["queue", "prefill", "decode"])
@pytest.mark.parametrize("prompts", [1, 3])
def test_leaving_in_every_phase(server, client, engine, phase, stream, prompts):
    engine.hold = phase
    body = {"prompt": ["x"] * prompts, "max_tokens": 50, "stream": stream}
    raw = post(server, body)
    assert eventually(lambda: list(engine.phases.values()) == [phase] * prompts)
    raw.close()
    assert eventually(lambda: not engine.phases), "the request goes on for nobody"
    assert not engine.pages
    assert eventually(lambda: not server.app.state.service.live)
    engine.hold = None
    assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200


def test_leaving_while_the_body_is_on_its_way(server, client):
    url = httpx.URL(server.url)
    raw = socket.create_connection((url.host, url.port))
    raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{")
    raw.close()
    assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200


def test_leaving_in_the_middle_of_a_stream_is_counted_as_aborted(server, client, engine):
    def aborted():
        [line] = [
            line
            for line in client.get("/metrics").text.splitlines()
            if line.startswith("kvweave:num_aborted_requests_total{")
        ]
        return float(line.rsplit(" ", 1)[1])

    before = aborted()
    engine.step_seconds = 0.01
    raw = post(server, {"prompt": "x", "max_tokens": 1000, "stream": True})
    assert raw.recv(100).startswith(b"HTTP/1.1 200")
    raw.close()
    assert eventually(lambda: not engine.phases)
    assert eventually(lambda: aborted() == before + 1)


def test_many_clients_of_which_a_third_vanish(server, engine):
    """The others get their whole answers."""
    engine.step_seconds = 0.001
    choose = random.Random(7)

    async def one(client, fate):
        body = {"prompt": "x", "max_tokens": 30, "stream": choose.random() < 0.5}
        work = client.post("/v1/completions", json=body)
        if fate is None:
            reply = await work
            assert reply.status_code == 200
            assert "jumps" in reply.text or "data: " in reply.text
            return
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(work, fate)

    async def all_of_them():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as client:
            fates = [choose.uniform(0, 0.4) if n % 3 == 0 else None for n in range(200)]
            await asyncio.gather(*(one(client, fate) for fate in fates))

    asyncio.run(all_of_them())
    assert eventually(lambda: not engine.phases)
    assert not engine.pages


def test_a_stalled_reader_does_not_stall_others_and_misses_nothing(server, client, engine):
    engine.answer = lambda request, index: TEXT * 44  # more than the sockets' buffers, as events
    raw = post(server, {"prompt": ["x"] * 40, "max_tokens": 2000, "stream": True})
    reply = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 5})
    assert reply.status_code == 200
    assert eventually(lambda: not engine.phases), "a reader that stalls must not stall the engine"
    got = b""
    while b"data: [DONE]" not in got[-200:]:
        got += raw.recv(1 << 16)
    raw.close()
    pieces = [json.loads(line[6:]) for line in got.split(b"\n") if line.startswith(b"data: {")]
    texts = {}
    for piece in pieces:
        [choice] = piece["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == dict.fromkeys(range(40), TEXT * 44)
    assert len(pieces) < 40 * len(TEXT) * 44 / 2, "what waited together comes together"


class ListSource:
    """Gives the listed deltas at once."""

    def __init__(self, deltas):
        self.deltas = deltas

    async def generate(self, request):
        for delta in self.deltas:
            yield delta


def test_waiting_deltas_are_joined_per_answer():
    deltas = [
        OutputDelta(
            *("r", index, letter, (number,), Usage()),
            logprobs=(TokenLogprob(number, -1.0),),
            prompt_logprobs=(TokenLogprob(9, None),) if number == 0 else None,
            plan=(Span(4, 2, 7, 8),) if number == 0 else (),
            finish_reason=reason,
        )
        for number, (index, letter, reason) in enumerate(
            [(0, "a", None), (0, "b", None), (1, "c", None), (0, "d", "stop"), (1, "e", "length")]
        )
    ]
    request = GenerateRequest(rid="r", prompt_ids=(1,), sampling=SamplingParams(n=2))

    async def read():
        metrics = Metrics("m", lambda: None)
        measured = RequestMetrics(request, metrics, endpoint="test")
        live = LiveGenerations()
        source = ListSource(deltas)
        async with Generation("r", [request], [measured], source=source, live=live) as generation:
            await asyncio.sleep(0.01)
            batches = [batch async for batch in generation]
        return batches, measured

    batches, measured = asyncio.run(read())
    [batch] = batches
    assert [(d.index, d.text, d.token_ids, d.finish_reason) for _, d in batch] == [
        (0, "abd", (0, 1, 3), "stop"),
        (1, "ce", (2, 4), "length"),
    ]
    for _, delta in batch:
        assert [score.token_id for score in delta.logprobs] == list(delta.token_ids)
    assert batch[0][1].prompt_logprobs == (TokenLogprob(9, None),)
    assert batch[0][1].plan == (Span(4, 2, 7, 8),)
    assert (measured.completion_tokens, measured.outcome) == (5, "length")


def test_leaving_in_the_very_moment_in_which_the_answer_ends():
    """Then nobody waits any more for what is being cleaned up; the rid is free all the same."""

    source = ListSource([OutputDelta("r", 0, "x", (1,), Usage(), finish_reason="length")])

    async def main():
        live = LiveGenerations()
        request = GenerateRequest(rid="r", prompt_ids=(1,))
        measured = RequestMetrics(request, Metrics("toy", lambda: None), endpoint="x")
        generation = Generation("r", [request], [measured], source=source, live=live)

        async def answered():
            async with generation:
                async for _ in generation:
                    pass
                asyncio.current_task().cancel()  # its connection is lost

        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(answered())
        assert len(live) == 0
        assert measured.outcome == "length"

    asyncio.run(main())
