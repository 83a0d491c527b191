"""Tests of verifiers, of other packages and the built-in one: they may object, and cost no more."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from kvweave import plugins
from kvweave.config import FuzzyConfig, validate
from kvweave.errors import ConfigError
from kvweave.paraphrase.facts import Verifier
from kvweave.paraphrase.verifiers import Entailment, VerifierWorker, create_verifier
from kvweave.plugins import VERIFIERS, choices_of
from kvweave.prefix.lease import Namespace, Tier
from support.fuzzy_world import HERE
from support.semantic_world import QUESTION, SEMANTIC, SemanticWorld, story

HEAD, TAIL = story(1), story(2)
DONOR = "A child requires a passport for the journey."
ASKED = "A kid needs a passport for the trip."
THEIRS = replace(SEMANTIC, verifier="theirs")


class Fake:
    """A verifier that does what it is set to."""

    def __init__(self, config: FuzzyConfig) -> None:
        self.asked: list[tuple[str, str]] = []
        self.thread = ""
        self.does: Callable[[], Any] = lambda: None

    def __call__(self, donor: str, recipient: str) -> Any:
        self.asked.append((donor, recipient))
        self.thread = threading.current_thread().name
        return self.does()


@pytest.fixture
def offer(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Pretends that an installed package offers a verifier called `theirs`."""

    def offer(value: str) -> None:
        points = {VERIFIERS.group: [EntryPoint("theirs", value, VERIFIERS.group)]}
        monkeypatch.setattr(plugins, "entry_points", lambda group: points.get(group, []))

    return offer


@pytest.fixture
def fake(offer: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> Fake:
    one = Fake(THEIRS)
    monkeypatch.setattr(sys.modules[__name__], "make", lambda config: one, raising=False)
    monkeypatch.setattr("kvweave.paraphrase.gate.differing", lambda donor, recipient: None)
    offer(f"{__name__}:make")
    return one


@pytest.fixture
def world(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> SemanticWorld:
    found = SemanticWorld(monkeypatch, THEIRS)
    found.teach(f"{HEAD} {DONOR} {TAIL}{QUESTION}")
    return found


def served(world: SemanticWorld, *sentences: str) -> bool:
    """Ask for a sentence, and see that the request got all the rest of what it might have."""
    running = world.ask(f"{HEAD} {' '.join(sentences or (ASKED,))} {TAIL}{QUESTION}")
    assert running.lease.plan.served_by(Tier.MOVED) + running.lease.plan.exact > 100
    said = world.said(running)
    world.finish(running)
    world.check()
    return bool(said)


def test_a_verifier_is_asked_about_whole_sentences_elsewhere(
    world: SemanticWorld, fake: Fake
) -> None:
    assert served(world)
    assert fake.asked == [(DONOR, ASKED)]
    assert fake.thread == "kvweave verifier"
    assert served(world)
    assert len(fake.asked) == 1  # what it said is remembered


def test_it_objects(world: SemanticWorld, fake: Fake) -> None:
    fake.does = lambda: "a kid may be a goat"
    assert not served(world)
    [refusal] = world.cache.paraphrases.latest_declined
    assert (refusal.kind, refusal.reason) == ("vetoed", "a kid may be a goat")
    assert world.cache.stats().provider["paraphrase_vetoed"] == 1


def test_it_is_not_asked_where_facts_differ(world: SemanticWorld, fake: Fake) -> None:
    world.cache.paraphrases.facts = lambda donor, recipient: "20, 30"
    assert not served(world)
    assert fake.asked == []


def test_one_that_raises_refuses_and_in_the_end_is_left_alone(
    world: SemanticWorld, fake: Fake, caplog: pytest.LogCaptureFixture
) -> None:
    def raises() -> None:
        raise RuntimeError("no opinion")

    fake.does = raises
    for _ in range(5):
        assert not served(world)
    assert world.refused() == {"failed": 5}
    assert len(fake.asked) == 3
    assert caplog.text.count("is not asked again") == 1
    fake.does = lambda: None
    assert not served(world)


def test_one_that_hangs_costs_a_request_no_more_than_the_budget_once(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = SemanticWorld(monkeypatch, replace(THEIRS, semantic_budget_ms=200.0))
    donors = [f"A child requires a big visa of kind k{at} for it." for at in range(4)]
    asked = [f"A kid needs a large visa of kind k{at} for it." for at in range(4)]
    world.teach(f"{HEAD} {' '.join(donors)} {TAIL}{QUESTION}")
    world.provider.queue.vectors(HERE, asked, 20)  # these are known, and wait for nothing
    let = threading.Event()
    fake.does = lambda: let.wait(60) and None
    waits: list[float] = []
    worker = world.cache.paraphrases._verifier
    assert worker is not None
    run = worker._worker.run
    worker._worker.run = lambda call, left: waits.append(left) or run(call, left)  # type: ignore[method-assign,func-returns-value]
    assert not served(world, *asked)
    assert not served(world, *asked)
    assert len(fake.asked) == 1
    assert set(world.refused()) == {"late"}
    assert waits[0] <= 0.2
    let.set()
    deadline = time.monotonic() + 20
    while not worker._known and time.monotonic() < deadline:
        time.sleep(0.005)
    # What came too late is there for the next one, and nobody is asked again.
    fake.does = lambda: "no"
    assert served(world, *asked)


def test_a_budget_is_shared_by_all_questions_of_a_prompt() -> None:
    left: list[float] = []
    worker = VerifierWorker(lambda donor, recipient: None)
    worker._worker.run = lambda call, seconds: left.append(seconds)  # type: ignore[method-assign,func-returns-value]
    until = time.perf_counter() + 5
    for at in range(3):
        worker.objection(HERE, str(at), "it", until)
    assert 5 > left[0] > left[1] > left[2]
    worker.objection(HERE, "past it", "it", time.perf_counter() - 1)
    assert left[3] == 0


def test_answers_are_remembered_by_namespace() -> None:
    asked: list[str] = []
    worker = VerifierWorker(lambda donor, recipient: asked.append(donor))  # type: ignore[func-returns-value]
    until = time.perf_counter() + 20
    for salt in ("a", "a", "b"):
        assert worker.objection(Namespace("m", salt=salt), "it", "is", until) is None
    assert asked == ["it", "it"]


def test_a_panic_in_a_verifier_is_an_objection() -> None:
    def panics(donor: str, recipient: str) -> str | None:
        raise SystemExit

    worker = VerifierWorker(panics)
    for at in range(4):
        found = worker.objection(HERE, str(at), "it", time.perf_counter() + 20)
        assert found is not None
        assert found[0] == "failed"
    assert "not asked any more" in found[1]


# Names.


def test_none_is_the_default_and_packages_offer_more(offer: Callable[[str], None]) -> None:
    offer(f"{__name__}:Fake")
    assert choices_of("verifiers") == ("none", "nli", "theirs")
    assert create_verifier(FuzzyConfig()) is None
    validate(THEIRS)
    assert isinstance(create_verifier(THEIRS), Fake)
    with pytest.raises(ConfigError, match="--fuzzy-verifier is one of none, nli, theirs, not 'x'"):
        validate(replace(SEMANTIC, verifier="x"))


def test_one_that_does_not_load_says_so(
    offer: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer("not.there:Nothing")
    with pytest.raises(ConfigError, match="the verifier 'theirs' does not start: No module"):
        SemanticWorld(monkeypatch, THEIRS)


# The verifier `nli`.


def nli(model: object) -> Verifier | None:
    name = None if model is None else str(model)
    return create_verifier(
        replace(SEMANTIC, verifier="nli", verifier_model=name),
    )


def classifier(folder: Path, *classes: str) -> Path:
    """A tiny model with made-up weights that reads letters, saved in `folder`."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    torch.manual_seed(1)
    letters = [*"abcdefghijklmnopqrstuvwxyz."]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters)]
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(words))
    BertTokenizerFast(str(vocabulary), model_max_length=64).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        initializer_range=0.5,
        id2label=dict(enumerate(classes)),
        label2id={name: at for at, name in enumerate(classes)},
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def test_nli_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nli needs --fuzzy-verifier-model: the folder or"):
        nli(None)
    with pytest.raises(ConfigError, match=r"is no model on this machine; .* hf download"):
        nli(tmp_path / "nothing")
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "bert", "id2label": {"0": "spam", "1": "ham"}})
    )
    with pytest.raises(ConfigError, match="has no class 'entailment', but spam, ham: it takes"):
        nli(tmp_path)


@pytest.mark.parametrize(
    ("there", "back", "reason"),
    [
        (0.9, 0.8, None),
        (0.9, 0.1, "the donor's words do not follow from the prompt's (likely to 10%)"),
        (0.2, 0.7, "the prompt's words do not follow from the donor's (likely to 20%)"),
    ],
)
def test_nli_wants_either_text_to_follow_from_the_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, there: float, back: float, reason: str | None
) -> None:
    import numpy as np

    likely = {("d", "r"): there, ("r", "d"): back}

    class Told:
        def __init__(self, *_: str) -> None:
            pass

        def ask(self, pairs: list[list[str]]) -> Any:
            return np.array([[likely[tuple(pair)]] for pair in pairs], np.float32)  # type: ignore[index]

    monkeypatch.setattr("kvweave.paraphrase.verifiers.ModelSubprocess", Told)
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "bert", "id2label": {"0": "ENTAILMENT", "1": "neutral"}})
    )
    verifier = nli(tmp_path)
    assert verifier is not None
    said = verifier("d", "r")
    assert (said is None) if reason is None else (reason in str(said))


def test_nli_asks_its_model_in_a_process(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = str(classifier(tmp_path, "contradiction", "entailment", "neutral"))
    verifier = nli(folder)
    assert isinstance(verifier, Entailment)
    one, other = "it rains a lot.", "a dog."
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = verifier._process.ask([[one, other], [other, one]])
    with torch.inference_mode():
        for row, pair in zip(found, ((one, other), (other, one)), strict=True):
            logits = model(**tokenizer(*pair, return_tensors="pt")).logits
            assert row[0] == pytest.approx(float(logits.softmax(-1)[0, 1]), abs=1e-5)
    assert found[0, 0] != pytest.approx(found[1, 0], abs=1e-4)
    # What it cannot read to the end does not follow.
    assert verifier._process.ask([[one * 20, other]]).tolist() == [[0.0]]
    verifier.close()
