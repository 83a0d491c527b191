"""Random requests and client behaviour for the soak, the same for one seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvweave_bench.soak.client import Departure
from kvweave_bench.soak.launcher import FATAL, HARMLESS
from kvweave_bench.soak.model import CONTEXT, rendered

DOCUMENTS = 14
_REWORDED = (
    (
        "We don't accept cash, and we can't keep what our guests leave behind.",
        "We do not accept cash, and we cannot keep what our guests leave behind.",
    ),
    (
        "Guests leave the large house before the evening starts.",
        "Guests have to leave the house before the evening begins.",
    ),
)
"""Two that state the same facts, and two that may not."""


@dataclass(slots=True)
class Case:
    """One request. `texts` are its prompts as the model sees them."""

    kind: str
    path: str
    body: Any
    texts: list[str] = field(default_factory=list)
    leave: Departure | None = None
    abort: float | None = None
    """Seconds after which it is aborted by its rid."""
    refused: tuple[int, ...] = ()
    """The statuses of which one must come, for what cannot be served."""

    @property
    def rid(self) -> str:
        return str(self.body["rid"])


class Workload:
    """Documents come and go, so that what is cached is always both of use and in the way."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._number = itertools.count()
        self._documents = [self._text(120, 300) for _ in range(DOCUMENTS)]
        self._system = self._text(50, 60)
        self._chats: list[list[dict[str, str]]] = []
        self._kinds: list[tuple[float, Callable[[], Case]]] = [
            (20, self._prefix),
            (22, self._moved),
            (6, self._paraphrased),
            (10, self._chat),
            (6, self._scored),
            (5, self._several),
            (10, self._leaving),
            (3, self._aborted),
            (10, self._faulty),
            (5, self._refused),
            (3, self._looking),
        ]

    def next(self) -> Case:
        """Somebody's next request."""
        choose = self._random
        if choose.random() < 0.03:
            self._documents[choose.randrange(DOCUMENTS)] = self._text(120, 300)
        weights, makers = zip(*self._kinds, strict=True)
        make: Callable[[], Case] = choose.choices(makers, weights)[0]
        return make()

    def learn(self, case: Case, answer: str) -> None:
        """A conversation goes on behind what was answered."""
        if case.kind == "chat" and len(case.texts[0]) < CONTEXT // 2:
            said = {"role": "assistant", "content": answer}
            self._chats.append([*case.body["messages"], said])
            del self._chats[:-12]

    # Kinds.

    def _prefix(self) -> Case:
        document = self._choose(self._documents)
        head = document[: self._random.randrange(40, len(document))]
        return self._completion("prefix", self._system + head + self._text(4, 30))

    def _moved(self) -> Case:
        parts = self._random.sample(self._documents, self._random.choice([1, 1, 2, 3]))
        if len(parts) > 1:
            parts = [part[: self._random.randrange(40, 200)] for part in parts]
        text = self._text(5, 60) + " ".join(parts) + self._text(10, 30)
        case = self._completion("moved", text)
        if self._random.random() < 0.3:
            case.body["fuzzy_refresh"] = self._choose([0.0, 0.2, 0.5, 1.0])
        return case

    def _paraphrased(self) -> Case:
        """Only the semantic provider finds one sentence where another stands."""
        sentence = self._choose(self._choose(_REWORDED))
        body = f"{self._text(5, 20)}. Read this with care. {sentence} It holds for all of us. "
        return self._completion("paraphrased", body + self._text(20, 60))

    def _chat(self) -> Case:
        if self._chats and self._random.random() < 0.8:
            messages = self._choose(self._chats)
        else:
            messages = [{"role": "system", "content": self._choose(self._documents)[:150]}]
        messages = [*messages, {"role": "user", "content": self._text(10, 40)}]
        body = self._body("chat") | {"messages": messages}
        body.pop("n", None)
        text = rendered(messages)
        too_long = len(text) + body["max_tokens"] > CONTEXT
        refused = (400,) if too_long else ()
        return Case("chat", "/v1/chat/completions", body, [text], refused=refused)

    def _scored(self) -> Case:
        case = self._prefix()
        case.kind = "scored"
        case.body |= {"logprobs": self._choose([0, 2]), "fuzzy": False}
        case.body["echo"] = self._random.random() < 0.5
        return case

    def _several(self) -> Case:
        texts = [self._moved().texts[0], self._prefix().texts[0], self._text(1, 20)]
        body = self._body("several") | {"prompt": texts, "max_tokens": 6}
        return Case("several", "/v1/completions", body, texts)

    def _leaving(self) -> Case:
        case: Case = self._choose([self._prefix, self._moved, self._several])()
        case.kind = "leaving"
        case.body["max_tokens"] = 100
        if case.body["stream"] and self._random.random() < 0.5:
            case.leave = Departure(events=self._random.randrange(1, 9))
        else:
            case.leave = Departure(seconds=self._random.choice([0.0, 0.02, 0.1, 0.3, 0.8]))
        return case

    def _aborted(self) -> Case:
        case: Case = self._choose([self._prefix, self._moved])()
        case.kind, case.abort = "aborted", self._random.choice([0.0, 0.05, 0.2, 0.5])
        case.body["max_tokens"] = 150
        return case

    def _faulty(self) -> Case:
        phase = self._choose([*FATAL, *HARMLESS, "once"])
        case = self._moved() if phase in HARMLESS else self._prefix()
        case.kind = f"fault:{phase}"
        case.body |= {"rid": f"f.{phase}.{next(self._number)}", "max_tokens": 8}
        # To get into every phase: nothing moved, so that it publishes, and in a salt of its own.
        case.body |= {"fuzzy": phase in HARMLESS}
        if phase == "publish":
            case.body["cache_salt"] = case.rid
        return case

    def _refused(self) -> Case:
        good = self._body("refused") | {"prompt": "x"}
        bad: list[tuple[Any, int]] = [
            (b'{"prompt": "x', 400),
            (b"\xff\xfe{}", 400),
            (b"[" * 5000, 400),
            (good | {"prompt": "x" * (CONTEXT + self._random.randrange(5000))}, 400),
            (good | {"prompt": "x" * 1_100_000}, 413),
            (good | {"max_tokens": -1}, 400),
            (good | {"temperature": 1e9}, 400),
            (good | {"prompt": []}, 400),
            (good | {"prompt": [10**6]}, 400),
            (good | {"n": 1000}, 400),
            (good | {"model": "another"}, 404),
            (good | {"logit_bias": {"1000000": 1}}, 400),
            (good | {"stop": ""}, 400),
            (good | {"suffix": "y"}, 400),
            (good | {"rid": "with spaces in it"}, 400),
            (good | {"fuzzy_refresh": 2}, 400),
        ]
        body, status = self._choose(bad)
        return Case("refused", "/v1/completions", body, refused=(status,))

    def _looking(self) -> Case:
        paths = ("/metrics", "/server_info", "/get_load", "/health", "/health_generate")
        pages = ("/v1/models", "/explorer/api/overview", "/explorer/api/tree", "/flush_cache")
        path = self._choose([*paths, *pages])
        return Case("looking", path, {} if path == "/flush_cache" else None)

    # Parts.

    def _completion(self, kind: str, text: str) -> Case:
        return Case(kind, "/v1/completions", self._body(kind) | {"prompt": text}, [text])

    def _body(self, kind: str) -> dict[str, Any]:
        """Greedy, and with all that is special spelt out, so that the answer can be judged."""
        choose = self._random
        body: dict[str, Any] = {
            "rid": f"{kind}-{next(self._number)}",
            "max_tokens": choose.choice([1, 2, 8, 8, 20, 60, 150, 300]),
            "temperature": 0,
            "skip_special_tokens": False,
            "ignore_eos": choose.random() < 0.7,
            "stream": choose.random() < 0.5,
            "return_plan": True,
            "fuzzy": choose.random() < 0.5,
        }
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
        if choose.random() < 0.25:
            body["priority"] = choose.choice([-1, 1, 2])
        if choose.random() < 0.15:
            body["cache_salt"] = choose.choice(["a", "b"])
        if choose.random() < 0.15:
            body["n"] = choose.choice([2, 3])
        if choose.random() < 0.15:
            body["stop"] = [choose.choice("abcdefghijklmnop"), "xyz"]
        return body

    def _choose(self, some: Any) -> Any:
        return self._random.choice(some)

    def _text(self, least: int, most: int) -> str:
        length = self._random.randrange(least, most)
        letters = "abcdefghijklmnopqrstuvwxyz      .,0123456789"
        return "".join(self._random.choices(letters, k=length))
