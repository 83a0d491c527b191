"""Tests of the semblend adapter: what the package proposes, and what of it is served.

The package's interface is faked for full control of its answers; where the package is installed,
the fake is compared with it. These answers are refused:

- a moved document at a position where other tokens stand: the tokens differ;
- chunks that are alike but not equal ("fuzzy chunks"): the tokens differ, the whole run is dropped;
- a verified paraphrase whose facts differ: units, signs and antonyms pass its own gate, some of
  the others do not get so far;
- sentences of a verified paraphrase that reach into the last question, or of which it holds a part;
- slots of donors that were evicted meanwhile, and what makes no sense at all.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import pytest

from kvweave.errors import ConfigError
from kvweave.paraphrase import semblend
from kvweave.paraphrase.semblend import SemblendProvider
from kvweave.prefix.lease import Namespace, Tier
from support.fuzzy_world import HERE, Running, text
from support.semantic_world import SEMANTIC, SemanticWorld, story

CONFIG = replace(SEMANTIC, provider="semblend")


@dataclass
class Signals:
    """semblend's QualitySignals, as far as they are read."""

    cosine_similarity: float = 0.95
    confidence_tier: str = "fuzzy"


@dataclass
class Segment:
    """semblend's FuzzyMatchSegment, as far as it is read."""

    target_positions: Any
    donor_kv_indices: Any


@dataclass
class Result:
    """semblend's FuzzyMatchResult, as far as it is read."""

    cached_token_count: int = 0
    kv_cache_indices: Any = ()
    segments: list[Segment] | None = None
    quality_signals: Signals = field(default_factory=Signals)


class FakeAdapter:
    """semblend's SemBlendProviderAdapter: remembers what it was told, answers what it is set to."""

    def __init__(self) -> None:
        self.slots: list[Any] = []
        self.keys: list[str | None] = []
        self.asked: list[tuple[int, str | None, str | None]] = []
        self.answer: Any = None
        self.raises = False

    def register_donor(
        self,
        request_id: str,
        token_ids: list[int],
        kv_cache: Any,
        cache_start_pos: int,
        cache_end_pos: int,
        *,
        prompt_text: str | None = None,
        extra_key: str | None = None,
        cache_salt: Any = None,
    ) -> bool:
        assert len(token_ids) == len(kv_cache) == cache_end_pos
        assert prompt_text
        self.slots.append(kv_cache)
        self.keys.append(extra_key)
        return True

    def match(
        self,
        prompt_token_ids: list[int],
        already_matched_len: int,
        *,
        prompt_text: str | None = None,
        extra_key: str | None = None,
    ) -> Any:
        self.asked.append((already_matched_len, prompt_text, extra_key))
        if self.raises:
            raise RuntimeError("the donor store is gone")
        return self.answer(already_matched_len) if callable(self.answer) else self.answer

    def clear(self) -> None:
        self.slots.clear()


@pytest.fixture
def adapter(monkeypatch: pytest.MonkeyPatch) -> FakeAdapter:
    fake = FakeAdapter()
    monkeypatch.setattr(semblend, "_made", lambda config: fake)
    return fake


@pytest.fixture
def world(adapter: FakeAdapter, monkeypatch: pytest.MonkeyPatch) -> SemanticWorld:
    found = SemanticWorld(monkeypatch, CONFIG)
    assert isinstance(found.cache._guard._provider, SemblendProvider)
    found.check = lambda: found.cache.check([one.lease for one in found.live])  # type: ignore[method-assign]
    return found


HEAD, DOCUMENT, TAIL = story(1, 3), story(2, 12), story(3, 3)


def start(world: SemanticWorld, said: str, **more: Any) -> Running:
    return world.start(world.text.encode(said), **more)


def spans(running: Running) -> list[tuple[int, int, int]]:
    return [(span.start, span.end, span.donor_start) for span in running.lease.plan.spans]


def test_equal_tokens_at_the_claimed_places_are_served(
    world: SemanticWorld, adapter: FakeAdapter
) -> None:
    world.serve(world.text.encode(f"{HEAD} {DOCUMENT} {TAIL}"))
    [slots] = adapter.slots
    adapter.answer = Result(segments=[Segment(list(range(10, 100)), slots[24:114])])
    running = start(world, f"{story(4, 1)} go on {DOCUMENT} and then {TAIL}")
    [span] = spans(running)
    # Claimed from 10 to 100; grown as far as the tokens are equal.
    assert span == (10, 106, 24)
    assert running.lease.plan.spans[0].tier is Tier.MOVED
    assert world.compute(running)
    world.check()


def test_contiguous_answers_and_merged_segments_are_read_too(
    world: SemanticWorld, adapter: FakeAdapter
) -> None:
    world.serve(world.text.encode(f"{HEAD} {DOCUMENT}"))
    [slots] = adapter.slots
    adapter.answer = Result(cached_token_count=40, kv_cache_indices=slots[24:64])
    assert spans(start(world, f"{DOCUMENT} {TAIL}"))[0][2] == 24 + 2  # behind the first tokens
    targets = [*range(8, 40), *range(60, 90)]
    adapter.answer = Result(
        segments=[Segment(np.array(targets), np.concatenate([slots[24:56], slots[70:100]]))]
    )
    first, second = world.text.encode(DOCUMENT)[:32], world.text.encode(DOCUMENT)[46:76]
    mixed = text(5, 8, 5) + first + text(6, 20, 5) + second + text(7, 9, 5)
    assert [one[0] for one in spans(world.start(mixed))] == [8, 60]


@pytest.mark.parametrize("shift", [-7, -1, 1, 16])
def test_a_document_at_the_wrong_offset_is_refused(
    world: SemanticWorld, adapter: FakeAdapter, shift: int
) -> None:
    """As happens to a document behind a wrapper that was not seen before."""
    world.serve(world.text.encode(f"{HEAD} {DOCUMENT} {TAIL}"))
    [slots] = adapter.slots
    adapter.answer = Result(
        segments=[Segment(list(range(10, 90)), slots[24 + shift : 104 + shift])]
    )
    assert spans(start(world, f"{story(4, 1)} go on {DOCUMENT} and then {TAIL}")) == []
    assert world.cache.stats().provider["refused"] == 1


def test_nearly_equal_chunks_are_dropped_whole(world: SemanticWorld, adapter: FakeAdapter) -> None:
    world.serve(world.text.encode(f"{HEAD} {DOCUMENT} {TAIL}"))
    [slots] = adapter.slots
    changed = world.text.encode(f"{story(4, 1)} go on {DOCUMENT} and then")
    changed[50] += 1
    adapter.answer = Result(segments=[Segment(list(range(10, 90)), slots[24:104])])
    assert spans(world.start(changed)) == []


REST = story(5, 8)
TERM = "The school has ten students and had five guests on 4 March."
SAME = "The school has 10 students and had 5 guests on 4 March."
RICE = "Alice owes Bob 20 kg of rice because they have ten guests for it."


@pytest.mark.parametrize(
    ("donor", "asked", "served"),
    [
        (TERM, SAME, True),
        (TERM, SAME.replace("4", "5"), False),
        (TERM, SAME.replace("March", "April"), False),
        (TERM, SAME.replace("has", "had"), False),
        (RICE, "Bob owes Alice 20 kg of rice because they have 10 guests for it.", False),
        (RICE, "Alice owes Bob 20 lb of rice because they have 10 guests for it.", False),
        (
            RICE.replace("20", "-20"),
            "Alice owes Bob +20 kg of rice because they have 10 guests for it.",
            False,
        ),
        (
            RICE.replace("Bob", "Bob and Carol"),
            "Alice owes Bob and Dora 20 kg of rice because they have 10 guests for it.",
            False,
        ),
    ],
)
def test_its_paraphrases_are_judged_again(
    world: SemanticWorld, adapter: FakeAdapter, donor: str, asked: str, served: bool
) -> None:
    """Units, signs and antonyms pass its own gate; roles and names are refused there already, and
    would be here."""
    world.serve(world.text.encode(f"{HEAD} {donor} {REST}"))
    [slots] = adapter.slots
    adapter.answer = lambda exact: Result(
        cached_token_count=40,
        kv_cache_indices=slots[exact : exact + 40],
        quality_signals=Signals(0.95, "paraphrase_verified"),
    )
    tokens = world.text.encode(f"{HEAD} {asked} {REST}")
    running = world.start(tokens, protected_from=len(tokens) - 10)
    tiers = [span.tier for span in running.lease.plan.spans]
    # What follows is equal, and as such it is moved.
    assert tiers == ([Tier.PARAPHRASE, Tier.MOVED] if served else [Tier.MOVED])
    assert world.refused() == ({} if served else {"facts": 1})
    assert world.compute(running)
    world.check()


@pytest.mark.parametrize(
    ("protected", "likeness", "refused"), [(30, 0.95, {}), (80, 0.5, {"unlike": 1})]
)
def test_claims_in_the_question_or_of_low_similarity_are_refused(
    world: SemanticWorld,
    adapter: FakeAdapter,
    protected: int,
    likeness: float,
    refused: dict[str, int],
) -> None:
    world.serve(world.text.encode(f"{HEAD} {TERM} {REST}"))
    [slots] = adapter.slots
    adapter.answer = lambda exact: Result(
        cached_token_count=40,
        kv_cache_indices=slots[exact : exact + 40],
        quality_signals=Signals(likeness, "paraphrase_verified"),
    )
    running = world.start(world.text.encode(f"{HEAD} {SAME} {REST}"), protected_from=protected)
    assert Tier.PARAPHRASE not in [span.tier for span in running.lease.plan.spans]
    assert world.refused() == refused


def test_of_a_claim_from_the_beginning_the_first_sentence_is_left_out(
    world: SemanticWorld, adapter: FakeAdapter
) -> None:
    """It stands where nothing is ever lent, and to begin within it would cut it."""
    world.serve(world.text.encode(f"{TERM} {RICE} {REST}"))
    [slots] = adapter.slots
    adapter.answer = Result(
        cached_token_count=60,
        kv_cache_indices=slots[:60],
        quality_signals=Signals(0.95, "paraphrase_verified"),
    )
    first = SAME.replace("The", "Our")
    second = "Alice owes Bob 20 lb of rice because they have 10 guests for it."
    tokens = world.text.encode(f"{first} {second} {REST}")
    running = world.start(tokens, protected_from=len(tokens) - 10)
    assert [span.tier for span in running.lease.plan.spans] == [Tier.MOVED]
    assert world.refused() == {"facts": 1}
    world.check()


def test_a_claim_is_taken_apart_where_sentences_end_in_both_texts(
    world: SemanticWorld, adapter: FakeAdapter
) -> None:
    """One after the other, and not where it is cut off: half a sentence is no fact."""
    donor = f"{HEAD} {TERM} A kid needs a card. {RICE} {TERM} {REST}"
    asked = (
        f"{HEAD} {SAME} A child requires a card. Alice owes Bob 20 lb of rice because they have 10 "
        f"guests for it. {SAME} {REST}"
    )
    world.serve(world.text.encode(donor))
    [slots] = adapter.slots
    last = len(world.text.encode(f"{HEAD} {TERM} A kid needs a card. {RICE} The school"))
    adapter.answer = lambda exact: Result(
        cached_token_count=last - exact,
        kv_cache_indices=slots[exact:last],
        quality_signals=Signals(0.95, "paraphrase_verified"),
    )
    tokens = world.text.encode(asked)
    running = world.start(tokens, protected_from=len(tokens) - 10)
    assert world.said(running) == ["ten students and had five"]
    assert world.refused() == {"lengths": 1, "facts": 1}
    world.check()


def test_slots_of_evicted_donors_mean_nothing(world: SemanticWorld, adapter: FakeAdapter) -> None:
    world.serve(world.text.encode(f"{HEAD} {DOCUMENT} {TAIL}"))
    [slots] = adapter.slots
    adapter.answer = Result(segments=[Segment(list(range(10, 90)), slots[24:104])])
    world.cache.evict(10_000)
    assert spans(start(world, f"{story(4, 1)} go on {DOCUMENT} and then {TAIL}")) == []
    assert world.cache.stats().provider["unknown_donor"] == 1
    assert world.cache.stats().provider["donors"] == 0


def test_the_salt_is_part_of_its_key(world: SemanticWorld, adapter: FakeAdapter) -> None:
    theirs = Namespace("model", salt="theirs")
    prompt = world.text.encode(f"{HEAD} {DOCUMENT} {TAIL}")
    world.serve(prompt, namespace=HERE)
    world.serve(prompt, namespace=theirs)
    start(world, DOCUMENT, namespace=theirs)
    assert len(set(adapter.keys)) == 2
    assert adapter.asked[-1][2] == adapter.keys[1]
    assert "theirs" not in str(adapter.keys)
    # Even if it mixed them up, nothing would cross.
    adapter.answer = Result(segments=[Segment(list(range(2, 80)), adapter.slots[0][26:104])])
    assert spans(start(world, f"{DOCUMENT} {TAIL}", namespace=theirs)) == []


def test_a_prompt_is_registered_once_when_its_last_page_is_there(
    world: SemanticWorld, adapter: FakeAdapter
) -> None:
    prompt = world.text.encode(f"{HEAD} {DOCUMENT} {TAIL}")
    running = world.start(prompt)
    while running.done < len(prompt) - 8:
        assert world.compute(running, 8)
    assert adapter.slots == []
    assert world.compute(running)
    assert [len(slots) for slots in adapter.slots] == [len(prompt) // 4 * 4]
    for _ in range(len(prompt)):  # its answer
        running.tokens.append(prompt[0])
        assert world.compute(running)
    assert len(adapter.slots) == 2
    assert len(adapter.slots[1]) >= 1.5 * len(adapter.slots[0])
    # Only the longer path is known.
    assert world.cache.stats().provider["donors"] == 1
    world.check()


def test_a_request_that_opts_out_is_not_shown_to_it(
    world: SemanticWorld, adapter: FakeAdapter
) -> None:
    prompt = world.text.encode(f"{HEAD} {DOCUMENT} {TAIL}")
    world.serve(prompt, semantic=False)
    assert (adapter.slots, adapter.asked) == ([], [])
    world.serve(world.text.encode(f"{story(4, 1)} {DOCUMENT} {TAIL}"))
    assert len(adapter.slots) == len(adapter.asked) == 1


@pytest.mark.parametrize(
    "answer",
    [
        object(),
        Result(segments=[Segment([1, 2, 3], [4])]),
        Result(segments=[Segment(None, None)]),
        Result(segments=[Segment([-5, -4], [1 << 32, (1 << 32) + 1])]),
        Result(cached_token_count=10**9, kv_cache_indices=["a"]),
        Result(cached_token_count=50, kv_cache_indices=np.arange(50) - 99),
        "nonsense",
    ],
)
def test_nonsense_costs_nothing(world: SemanticWorld, adapter: FakeAdapter, answer: Any) -> None:
    world.serve(world.text.encode(f"{HEAD} {DOCUMENT}"))
    adapter.answer = answer
    running = start(world, f"{DOCUMENT} {TAIL}")
    assert spans(running) == []
    assert world.compute(running)
    world.check()


def test_its_faults_are_survived(world: SemanticWorld, adapter: FakeAdapter) -> None:
    adapter.raises = True
    running = start(world, f"{HEAD} {DOCUMENT}")
    assert world.compute(running)
    assert world.cache.stats().provider["raised"] == 1
    world.cache.reset() if not world.live else world.finish(running)
    world.cache.reset()
    assert adapter.slots == []


def test_it_has_to_be_there_in_a_version_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    for find, told in (
        (absent, r"semblend is not installed: pip install '\.\[semblend\]'"),
        (lambda name: "0.3.19", "is for from 0.3.20 to below 0.4, not 0.3.19"),
        (lambda name: "0.4.0rc1", "is for from 0.3.20 to below 0.4, not 0.4.0rc1"),
    ):
        monkeypatch.setattr(semblend, "version", find)
        with pytest.raises(ConfigError, match=told):
            SemanticWorld(monkeypatch, CONFIG)


def test_the_fake_has_the_surface_of_the_real_one() -> None:
    try:
        version("semblend")
    except PackageNotFoundError:
        pytest.skip("semblend is not installed: there is nothing to compare the fake with")
    from semblend.integration.sglang import config as settings
    from semblend.integration.sglang import provider, types

    real = provider.SemBlendProviderAdapter
    for name in ("register_donor", "match", "clear"):
        ours = inspect.signature(getattr(FakeAdapter, name)).parameters
        theirs = inspect.signature(getattr(real, name)).parameters
        assert list(ours) == [each for each in theirs if each in ours], name
        assert all(ours[each].kind is theirs[each].kind for each in ours), name
    for ours, theirs in (
        (Signals, types.QualitySignals),
        (Segment, types.FuzzyMatchSegment),
        (Result, types.FuzzyMatchResult),
    ):
        assert ours.__dataclass_fields__.keys() <= theirs.__dataclass_fields__.keys()
    assert settings.SemBlendProviderConfig().paraphrase_min_similarity <= 1
