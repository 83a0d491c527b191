"""A scripted engine behind the real server, on a real port, for tests of everything in between."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import json
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator

import httpx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvweave.config import EngineConfig, ServerConfig
from kvweave.engine.types import (
    EngineSnapshot,
    GenerateRequest,
    Limits,
    OutputDelta,
    TokenLogprob,
    Usage,
)
from kvweave.errors import OverloadedError, RequestError
from kvweave.explorer.routes import build_app
from kvweave.prefix.lease import Span
from kvweave.reorder import SeenPrompts
from kvweave.server.app import DrainingServer, bind
from kvweave.server.model_card import ModelCard

TEXT = "The quick brown fox jumps over the lazy dog. "
CONTEXT = 2048
TEMPLATE = (
    "{% if tools %}{{ tools | length }} tools\n{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "<|start|>{{ message.role }}\n{{ message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def toy_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per byte, in the spelling of byte-level BPE, and two special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: place for place, letter in enumerate(letters)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|end|>", additional_special_tokens=["<|start|>"]
    )
    tokenizer.chat_template = template
    return tokenizer


class FakeEngine:
    """Answers every prompt with TEXT, one byte a token; can be held up and broken at every phase.

    Phases of a request: "queue", "prefill", then "decode". A request holds a page from prefill on.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast | None = None) -> None:
        self.tokenizer = tokenizer or toy_tokenizer()
        self.limits = Limits(CONTEXT, 100 * CONTEXT, len(self.tokenizer))
        self.reset()

    def reset(self) -> None:
        self.alive = True
        self.requests: list[GenerateRequest] = []
        self.phases: dict[str, str] = {}
        self.pages: set[str] = set()
        self.aborts: set[str] = set()
        self.closed: list[tuple[str, str | None]] = []
        self.hold: str | None = None
        """The phase in which every request stays until this is None."""
        self.failure: dict[str, Exception] = {}
        """What is raised on entering a phase; "submit" comes before all."""
        self.error_after: int | None = None
        """Tokens after which an answer ends with finish reason "error"."""
        self.step_seconds = 0.0
        self.capacity = 10_000
        self.answer: Callable[[GenerateRequest, int], str] = lambda request, index: TEXT * 100
        self.usage = Usage()
        self.plan: tuple[Span, ...] = ()
        self.plans: dict[int, tuple[Span, ...]] = {}
        """Of answers that were served differently from the others."""
        self.known = SeenPrompts()
        """What `prefixes` gives; the salts under which it was asked for are in `salts`."""
        self.salts: list[str | None] = []
        self.busy_flush = False
        self.reversed_answers = False

    async def start(self) -> None: ...

    async def stop(self, drain_seconds: float = 0.0) -> None:
        self.alive = False

    def abort(self, rid: str) -> None:
        self.aborts.add(rid)

    async def flush_cache(self, timeout: float = 0.0) -> None:
        if self.busy_flush:
            raise RequestError("1 request is running: the cache cannot be flushed", status=409)

    async def close_session(self, session, cache_salt):
        self.closed.append((session, cache_salt))
        return 7

    async def run_on_engine_thread(self, at):
        return at(self)

    def prefixes(self, cache_salt):
        self.salts.append(cache_salt)
        return self.known

    def snapshot(self) -> EngineSnapshot:
        waiting = sum(phase == "queue" for phase in self.phases.values())
        return EngineSnapshot(
            running=len(self.phases) - waiting,
            waiting=waiting,
            total_tokens=1600,
            used_tokens=16 * len(self.pages),
            prompt_tokens=40,
            hit_tokens={"exact": 8, "moved": 2},
            paraphrase_refused={"facts": 4, "question": 1},
            provider_events={"asked": 9, "late": 2},
            provider_figures={"passages": 31.0},
            heals_waiting=3,
            healed=5,
            healed_tokens=700,
            heals_preempted=2,
            heals_dropped=1,
        )

    def generate(self, request: GenerateRequest) -> AsyncIterator[OutputDelta]:
        self._raise("submit")
        self.limits.check(request)
        if len(self.phases) >= self.capacity:
            raise OverloadedError("the queue is full", retry_after=3)
        self.requests.append(request)
        return self._run(request)

    async def _run(self, request: GenerateRequest) -> AsyncIterator[OutputDelta]:
        try:
            await self._enter(request.rid, "queue")
            self.pages.add(request.rid)
            await self._enter(request.rid, "prefill")
            async for delta in self._decode(request):
                yield delta
        finally:
            del self.phases[request.rid]
            self.pages.discard(request.rid)

    async def _decode(self, request: GenerateRequest) -> AsyncIterator[OutputDelta]:
        sampling = request.sampling
        limit = CONTEXT if sampling.max_tokens is None else sampling.max_tokens
        texts = [self._cut(self.answer(request, at), sampling.stop) for at in range(sampling.n)]
        spelled = [self.tokenizer(text)["input_ids"] for text, _ in texts]  # a token per byte
        readers = [codecs.getincrementaldecoder("utf-8")() for _ in texts]
        lengths = [min(limit, len(text.encode())) for text, _ in texts]
        for step in range(max(max(lengths), 1)):
            if request.rid in self.aborts:
                for index in range(sampling.n):
                    yield self._delta(request, index, "", [], finish_reason="abort")
                return
            order = reversed(range(sampling.n)) if self.reversed_answers else range(sampling.n)
            for index in order:
                text, stop = texts[index]
                if step >= max(lengths[index], 1):
                    continue
                raw = text.encode()[step : min(step + 1, lengths[index])]
                ids = spelled[index][step : step + len(raw)]
                if self.error_after == step:
                    yield self._delta(
                        request, index, "", [], finish_reason="error", error="step broke"
                    )
                    return
                finish = None
                if step + 1 >= lengths[index]:
                    finish = "stop" if lengths[index] == len(text.encode()) else "length"
                yield self._delta(
                    request,
                    index,
                    readers[index].decode(raw),
                    ids,
                    finish_reason=finish,
                    matched_stop=stop if finish == "stop" else None,
                    first=step == 0,
                )
            await self._enter(request.rid, "decode")

    @staticmethod
    def _cut(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
        found = [(text.index(stop), stop) for stop in stops if stop in text]
        return (text[: min(found)[0]], min(found)[1]) if found else (text, None)

    def _delta(
        self, request: GenerateRequest, index: int, text: str, ids: list[int], first=False, **more
    ) -> OutputDelta:
        sampling = request.sampling
        if first and index == 0 and sampling.prompt_logprobs is not None:
            more["prompt_logprobs"] = tuple(
                TokenLogprob(token, None if at == 0 else -2.0, () if at == 0 else ((token, -2.0),))
                for at, token in enumerate(request.prompt_ids)
            )
        scores = ()
        if sampling.logprobs is not None:
            top = tuple((token, -0.5 - token) for token in range(sampling.logprobs))
            scores = tuple(TokenLogprob(token, -math.inf, top) for token in ids)
        return OutputDelta(
            rid=request.rid,
            index=index,
            text=text,
            token_ids=tuple(ids),
            logprobs=scores,
            usage=Usage(
                prompt_tokens=len(request.prompt_ids),
                reuse=self.usage.reuse,
                cache_write_tokens=self.usage.cache_write_tokens,
            ),
            plan=self.plans.get(index, self.plan) if first else (),
            **more,
        )

    async def _enter(self, rid: str, phase: str) -> None:
        self.phases[rid] = phase
        self._raise(phase)
        await asyncio.sleep(self.step_seconds)
        while self.hold == phase and rid not in self.aborts:
            await asyncio.sleep(0.002)

    def _raise(self, phase: str) -> None:
        if phase in self.failure:
            raise self.failure[phase]


class RunningServer:
    """A real server in a thread. `url` is where; leave the `with` block to stop it."""

    def __init__(
        self,
        engine,
        config: ServerConfig,
        card: ModelCard | None = None,
        engine_config: EngineConfig | None = None,
    ) -> None:
        self.engine = engine
        self.card = card or toy_card(engine.tokenizer)
        self.app = build_app(engine, self.card, config, engine_config)
        self.config = config
        self._ready = threading.Event()
        self.url = ""
        self._listening = bind(config)
        self.server = DrainingServer(self.app, config, self._note)
        self.thread = threading.Thread(
            target=lambda: self.server.run(sockets=[self._listening]), daemon=True
        )

    def _note(self, url: str) -> None:
        self.url = url
        self._ready.set()

    def __enter__(self) -> RunningServer:
        self.thread.start()
        assert self._ready.wait(60), "the server did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive(), "the server did not stop"

    def client(self, **more) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, **more)


def toy_card(tokenizer) -> ModelCard:
    return ModelCard(
        name="toy",
        path="/models/toy",
        tokenizer_path="/models/toy",
        context_length=CONTEXT,
        vocab_size=len(tokenizer),
    )


def eventually(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether `holds` becomes true before it is hopeless."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


@contextlib.contextmanager
def in_threads(jobs) -> Iterator[list[threading.Thread]]:
    """Run all jobs at once; wait for them at the end."""
    threads = [threading.Thread(target=job, daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    yield threads
    for thread in threads:
        thread.join(60)


def events(client, path="/v1/completions", **body):
    body = {"max_tokens": 9, "stream": True, **body}
    if "messages" not in body:
        body.setdefault("prompt", "Say it")
    with client.stream("POST", path, json=body) as reply:
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in reply.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def complete(client, **body):
    reply = client.post("/v1/completions", json={"prompt": "Say it", "max_tokens": 9, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


CHAT = "/v1/chat/completions"


def say(client, text="Hi", **body):
    messages = body.pop("messages", [{"role": "user", "content": text}])
    return client.post(CHAT, json={"messages": messages, "max_tokens": 4, **body})


def prompt_text(engine):
    return engine.tokenizer.decode(engine.requests[-1].prompt_ids)
