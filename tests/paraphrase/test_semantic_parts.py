"""Tests of the semantic provider's parts: passages, vectors, the queue, the embedder's process."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.paraphrase.embedders import EmbedderProcess
from kvweave.paraphrase.embedding_queue import EmbeddingQueue
from kvweave.paraphrase.gate import LONGEST, Cutter
from kvweave.paraphrase.semantic import Entry, VectorIndex
from kvweave.plugins import EMBEDDERS
from kvweave.prefix.lease import Namespace
from support.fuzzy_world import HERE
from support.semantic_world import Meaning, Words

# Passages.


def passages(text: str) -> list[str]:
    words = Words()
    tokens = np.array(words.encode(text), np.int32)
    cutter = Cutter(words.decode)
    found = cutter.cut(tokens, 100)
    assert [one.start for one in found] == [100, *(one.end for one in found)][: len(found)]
    return [cutter.text(tokens[one.start - 100 : one.end - 100]) for one in found]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two? Three! Four", ["One.", "Two?", "Three!", "Four"]),
        ("a line\nanother", ["a line", "another"]),
        ("<im> user\nHello.<im> bot", ["<im>", "user", "Hello.", "<im>", "bot"]),
        ("", []),
    ],
)
def test_sentences_lines_and_special_tokens_end_passages(text: str, expected: list[str]) -> None:
    assert passages(text) == expected


def test_a_point_within_a_number_ends_nothing() -> None:
    pieces = ["It", " is", " 3", ".", "1", "4", " now", ".", " Yes", "."]
    cutter = Cutter(lambda ids: "".join(pieces[at] for at in ids.tolist()))
    assert cutter.cut(np.arange(10, dtype=np.int32)) == [(0, 8), (8, 10)]


def test_around_finds_whole_sentences() -> None:
    words = Words()
    tokens = np.array(words.encode("A b c. D e f g. H i. J"), np.int32)
    cutter = Cutter(words.decode)
    assert cutter.around(tokens, 5, 7) == (4, 9)
    assert cutter.around(tokens, 3, 5) == (0, 9)
    assert cutter.around(tokens, 4, 9) == (4, 9)
    assert cutter.around(tokens, 12, 13) == (12, 13)
    endless = np.full(4 * LONGEST, words.encode("on")[0], np.int32)
    assert cutter.around(endless, 2 * LONGEST, 2 * LONGEST + 1) == (LONGEST, 3 * LONGEST + 1)


# Vectors.

SPACES = (Namespace("m"), Namespace("m", salt="a"))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 1), st.integers(0, 12), st.integers(0, 30)),
            st.tuples(st.just("evict"), st.integers(0, 12)),
            st.tuples(st.just("ask"), st.integers(0, 1), st.integers(0, 30)),
        ),
        max_size=60,
    )
)
def test_the_index_answers_as_a_list_would(steps: list[tuple]) -> None:  # type: ignore[type-arg]
    directions = np.random.default_rng(3).normal(size=(31, 8)).astype(np.float32)
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    index, model, numbers = VectorIndex(60), [], []

    def entry(space: int, page: int, text: int) -> Entry:
        return Entry(SPACES[space], page, 5, np.full(3 + text % 7, text, np.int32))

    for step in steps:
        if step[0] == "add":
            _, space, page, text = step
            one = entry(space, page, text)
            known = any(e.namespace == one.namespace and e.tokens[0] == text for e in model)
            [number] = index.add([one], directions[[text]])
            assert (number == -1) is known
            if not known:
                numbers.append(number)
                model.append(one)
                while sum(len(e.tokens) for e in model) > 60:
                    model.pop(0)
        elif step[0] == "evict":
            index.remove([step[1]])
            model = [e for e in model if e.page != step[1]]
        else:
            _, space, text = step
            found = index.nearest(SPACES[space], directions[text], 4, -1.0)
            cosine = sorted(
                (
                    float(directions[e.tokens[0]] @ directions[text])
                    for e in model
                    if e.namespace == SPACES[space]
                ),
                reverse=True,
            )
            assert np.allclose([each for each, _ in found], cosine[:4], atol=1e-5)
        index.check()
        assert len(index) == len(model)
    assert numbers == sorted(set(numbers))


def test_an_entry_larger_than_the_index_is_left_out() -> None:
    index = VectorIndex(4)
    entry = Entry(SPACES[0], 1, 0, np.arange(5, dtype=np.int32))
    assert index.add([entry], np.ones((1, 8), np.float32)) == [-1]
    assert index.nearest(SPACES[0], np.ones(8, np.float32), 3, 0.0) == []


# The queue.


class Slow(Meaning):
    """Embeds when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.let = threading.Semaphore(0)

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        assert self.let.acquire(timeout=60)
        return super().encode(texts)  # type: ignore[no-any-return]


def test_urgent_texts_go_before_background_tasks() -> None:
    slow, delivered = Slow(), []
    queue = EmbeddingQueue(slow, quiet=0.01)
    for text in ("first", "second"):
        queue.later(HERE, lambda text=text: [text], delivered.append)
    while not queue._working:
        time.sleep(0.005)
    asked = threading.Thread(target=queue.vectors, args=(HERE, ["urgent"], 20))
    asked.start()
    while not queue._urgent:
        time.sleep(0.005)
    slow.let.release(3)
    assert queue.settle(20)
    asked.join()
    assert slow.texts == ["first", "urgent", "second"]
    assert len(delivered) == 2


def test_tasks_wait_until_the_engine_is_quiet_but_not_for_ever() -> None:
    now = [0.0]
    meaning = Meaning()
    queue = EmbeddingQueue(meaning, quiet=0.02, clock=lambda: now[0])
    queue._quiet = 1.0
    queue.later(HERE, lambda: ["a"], lambda vectors: None)
    time.sleep(0.1)
    assert meaning.texts == []
    now[0] = 0.9
    queue.busy()
    now[0] = 1.5  # quiet for 0.6 only
    time.sleep(0.1)
    assert meaning.texts == []
    for second in range(2, 40):  # never quiet
        now[0] = float(second)
        queue.busy()
    assert queue.settle(20)
    assert meaning.texts == ["a"]


def test_tasks_wait_while_a_request_runs_however_long_it_shows_nothing() -> None:
    """As in the forward pass of a long prompt."""
    now, running = [0.0], [True]
    meaning = Meaning()
    queue = EmbeddingQueue(meaning, quiet=0.02, clock=lambda: now[0], running=lambda: running[0])
    queue._quiet = 1.0
    queue.later(HERE, lambda: ["a"], lambda vectors: None)
    for second in (5.0, 10.0):
        now[0] = second
        with queue._changed:
            queue._changed.notify_all()
        time.sleep(0.05)
        assert meaning.texts == []
    running[0] = False
    now[0] = 10.9  # it has ended, but not for a second
    with queue._changed:
        queue._changed.notify_all()
    time.sleep(0.05)
    assert meaning.texts == []
    now[0] = 11.5
    assert queue.settle(20)
    assert meaning.texts == ["a"]


def test_what_was_embedded_is_not_embedded_again() -> None:
    meaning, delivered = Meaning(), []
    queue = EmbeddingQueue(meaning, quiet=0.01)
    for texts in (["a", "b"], ["b", "a", "c"]):
        queue.later(HERE, lambda texts=texts: texts, delivered.append)
    assert queue.settle(20)
    assert sorted(meaning.texts) == ["a", "b", "c"]
    assert [len(vectors) for vectors in delivered] == [2, 3]
    assert np.array_equal(delivered[1][:2], delivered[0][::-1])
    assert queue.vectors(HERE, ["c"], 0.0)[0] is not None


def test_texts_of_one_namespace_are_unknown_in_another() -> None:
    meaning = Meaning()
    queue = EmbeddingQueue(meaning, quiet=0.01)
    ours, theirs = Namespace("m", salt="a"), Namespace("m", salt="b")
    queue.later(ours, lambda: ["a", "b"], lambda vectors: None)
    assert queue.settle(20)
    assert queue.vectors(ours, ["a"], 0.0)[0] is not None
    assert queue.vectors(theirs, ["b"], 20)[0] is not None
    queue.later(theirs, lambda: ["a"], lambda vectors: None)
    assert queue.settle(20)
    assert meaning.texts == ["a", "b", "b", "a"]


def test_late_ones_are_there_the_next_time() -> None:
    slow = Slow()
    queue = EmbeddingQueue(slow, quiet=0.01)
    assert queue.vectors(HERE, ["a", "b"], 0.01) == [None, None]
    slow.let.release(5)
    assert queue.settle(20)
    found = queue.vectors(HERE, ["b", "a"], 0.0)
    assert all(each is not None for each in found)
    assert sorted(slow.texts) == ["a", "b"]


def test_there_is_room_for_so_many_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvweave.paraphrase.embedding_queue._MOST_TASKS", 3)
    slow, ran = Slow(), []
    queue = EmbeddingQueue(slow, quiet=1e6)
    for text in "abcde":
        queue.later(HERE, lambda text=text: ran.append(text) or [], lambda vectors: None)
    assert queue.counts["dropped"] == 2
    queue._quiet = 0.0
    with queue._changed:
        queue._changed.notify_all()
    assert queue.settle(20)
    assert ran == ["c", "d", "e"]


def test_of_late_texts_the_newest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts may come faster than they are embedded, for hours."""
    monkeypatch.setattr("kvweave.paraphrase.embedding_queue._MOST_URGENT", 3)
    slow = Slow()
    queue = EmbeddingQueue(slow, quiet=0.01)
    queue.vectors(HERE, ["at work"], 0.0)
    while not queue._working:
        time.sleep(0.005)
    for text in "abcde":
        assert queue.vectors(HERE, [text], 0.0) == [None]
    assert queue.counts["dropped"] == 2
    slow.let.release(2)
    assert queue.settle(20)
    assert slow.texts == ["at work", "c", "d", "e"]
    assert not queue._coming
    [found] = queue.vectors(HERE, ["e"], 0.0)
    assert found is not None


def test_an_embedder_that_fails_too_often_is_not_asked_again() -> None:
    asked: list[list[str]] = []

    class Short(Slow):
        def encode(self, texts: Sequence[str]) -> np.ndarray:
            asked.append(list(texts))
            return super().encode(texts)[:-1]  # a vector too few

    short = Short()
    queue = EmbeddingQueue(short, quiet=1e6)
    queue.later(HERE, lambda: ["whenever"], lambda vectors: None)
    queue.vectors(HERE, [str(at) for at in range(80)], 0.0)
    short.let.release(80)
    assert queue.settle(20)
    deadline = time.monotonic() + 20
    while (queue._urgent or queue._working) and time.monotonic() < deadline:
        time.sleep(0.005)
    assert queue.dead
    assert len(asked) == 3
    assert not any((queue._urgent, queue._coming, queue._tasks))


def test_a_panic_in_the_embedder_is_a_failure_like_others() -> None:
    class Panicking(Meaning):
        def encode(self, texts: Sequence[str]) -> np.ndarray:
            if not self.texts:
                self.texts.append("panicked")
                raise SystemExit
            return super().encode(texts)  # type: ignore[no-any-return]

    queue = EmbeddingQueue(Panicking(), quiet=0.01)
    assert queue.vectors(HERE, ["a"], 20) == [None]
    assert queue.vectors(HERE, ["a"], 20)[0] is not None
    assert queue.counts["failed"] == 1


def test_a_task_that_raises_costs_only_itself(caplog: pytest.LogCaptureFixture) -> None:
    queue, delivered = EmbeddingQueue(Meaning(), quiet=0.01), []

    def broken() -> list[str]:
        raise KeyError("page")

    queue.later(HERE, broken, delivered.append)
    queue.later(HERE, lambda: ["a"], delivered.append)
    assert queue.settle(20)
    assert len(delivered) == 1
    assert "could not be prepared" in caplog.text


def test_a_closed_queue_ends_its_thread() -> None:
    queue = EmbeddingQueue(Meaning(), quiet=0.01)
    queue.vectors(HERE, ["a"], 20)
    before = [each for each in threading.enumerate() if each.name == "kvweave-embedder"]
    queue.close()
    assert queue.vectors(HERE, ["b"], 0.1) == [None]
    deadline = time.monotonic() + 20
    while all(each.is_alive() for each in before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not all(each.is_alive() for each in before)


def test_an_embedder_that_ends_at_exit_is_no_failure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Ending(Slow):
        def encode(self, texts: Sequence[str]) -> np.ndarray:
            super().encode(texts)
            raise RuntimeError("the embedder has died")

    ending = Ending()
    queue = EmbeddingQueue(ending, quiet=0.01)
    asked = threading.Thread(target=queue.vectors, args=(HERE, ["a"], 20))
    asked.start()
    while not queue._working:
        time.sleep(0.005)
    queue.close()
    ending.let.release()
    asked.join()
    assert queue.settle(20)
    assert (queue.counts["failed"], caplog.text) == (0, "")


# The process.


@pytest.mark.parametrize("name", EMBEDDERS.names())
def test_real_embedders_know_what_is_alike(name: str) -> None:
    process = EmbedderProcess(name)
    alike = [
        "What paperwork does a kid need to travel?",
        "Which documents does a child need for a trip?",
        "The boiler is making a loud noise.",
    ]
    vectors = process.encode(alike)
    assert vectors.dtype == np.float32
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-3)
    cosine = vectors @ vectors[0]
    assert cosine[1] > 0.6 > 0.4 > cosine[2]
    assert np.allclose(process.encode(alike[1:2]), vectors[1:2], atol=1e-3)
    process.close()
