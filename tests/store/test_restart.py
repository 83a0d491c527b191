"""KV on disk: what an engine computed serves the next process, and never wrongly."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvweave.prefix.lease import RequestView
from kvweave.store import loads
from kvweave.store.loads import Loads
from kvweave.store.pages import PageStore
from support.enginekit import SHARING_BACKENDS, oracle_answer, prompt, request
from support.storekit import PAGE_BYTES, PAGE_SIZE, OracleContent, settle, stored_world

BACKENDS = (*SHARING_BACKENDS, "fuzzy_match")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_prefix_is_served_after_a_restart(tmp_path: Path, backend: str):
    text = prompt(90, seed=1)
    first = stored_world(tmp_path, backend)
    first.run(request("a", text))
    first.engine.close()

    second = stored_world(tmp_path, backend)
    second.run(request("b", text[:80] + prompt(20, seed=2)))
    answer = second.answers["b", 0]
    assert answer.usage.cached_tokens == 80
    assert answer.token_ids == oracle_answer(text[:80] + prompt(20, seed=2), 8)
    assert second.runner.prefilled <= 20
    second.assert_idle()
    second.engine.close()


def test_moved_text_is_served_after_a_restart(tmp_path: Path):
    document = prompt(64, seed=1)
    first = stored_world(tmp_path, "fuzzy_match")
    first.run(request("a", prompt(9, seed=2) + document + prompt(5, seed=3)))
    first.engine.close()

    second = stored_world(tmp_path, "fuzzy_match")
    moved = prompt(17, seed=4) + document + prompt(6, seed=5)
    second.run(request("b", moved))
    assert second.answers["b", 0].usage.moved_tokens >= 60
    assert second.ids("b") == oracle_answer(moved, 8)
    second.assert_idle()
    second.engine.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_was_evicted_is_read_back(tmp_path: Path, backend: str):
    world = stored_world(tmp_path, backend, pool_tokens=256)
    text = prompt(90, seed=1)
    world.run(request("a", text))
    settle(world)
    for seed in range(2, 6):
        world.run(request(f"other{seed}", prompt(100, seed=seed)))
        settle(world)
    assert world.engine.cache.match(world_view(world, text)) == 0
    world.run(request("again", text))
    assert world.answers["again", 0].usage.cached_tokens == 88
    assert world.ids("again") == world.ids("a")
    world.assert_idle()
    world.engine.close()


def world_view(world, tokens):
    return RequestView("look", np.array(tokens, np.int32), world.engine.namespace(None))


def test_what_waits_at_shutdown_is_written_the_newest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    order: list[int] = []
    world = stored_world(tmp_path, least_tokens=32)
    store = world.engine.components.store
    assert store is not None
    monkeypatch.setattr(store, "pump", lambda seconds: False)  # nothing is written before the end
    for seed in (1, 2, 3):
        world.run(request(f"r{seed}", prompt(60, seed=seed), 2))
    world.run(request("short", prompt(24, seed=4), 2))
    world.engine.add(request("running", prompt(60, seed=5), 50))
    for _ in range(8):
        world.engine.step()
    world.engine.abort("running")
    monkeypatch.undo()
    write = PageStore.write

    def noting(self, catalog, root, tokens, first, content):
        order.append(int(tokens[0]))
        write(self, catalog, root, tokens, first, content)

    monkeypatch.setattr(PageStore, "write", noting)
    world.engine.close()
    assert list(dict.fromkeys(order)) == [prompt(60, seed=seed)[0] for seed in (5, 3, 2, 1)]

    again = stored_world(tmp_path, least_tokens=32)
    for seed in (1, 2, 3, 5):
        again.run(request(f"r{seed}", prompt(60, seed=seed), 2))
        assert again.answers[f"r{seed}", 0].usage.cached_tokens == 56
    again.run(request("short", prompt(24, seed=4), 2))
    assert again.answers["short", 0].usage.cached_tokens == 0
    again.assert_idle()
    again.engine.close()


@pytest.mark.parametrize("pages", [1, 3, 100])
def test_what_is_stored_is_read_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: int
):
    text = prompt(90, seed=1)
    first = stored_world(tmp_path)
    first.run(request("a", text))
    first.engine.close()

    monkeypatch.setattr(loads, "BUFFER_BYTES", pages * PAGE_BYTES)
    copied = copies(monkeypatch)
    second = stored_world(tmp_path)
    second.engine.add(request("other", prompt(50, seed=2), 20))
    second.run(request("b", text))
    assert second.answers["b", 0].usage.cached_tokens == 88
    assert second.ids("b") == oracle_answer(text, 8)
    assert sum(copied) == 22
    assert max(copied) == min(pages, 22)
    second.assert_idle()
    second.engine.close()


@pytest.mark.parametrize("count", [13, 22])
def test_pages_that_came_otherwise_meanwhile_stay_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
):
    text = prompt(90, seed=1)
    first = stored_world(tmp_path)
    first.run(request("a", text))
    first.engine.close()

    monkeypatch.setattr(loads, "BUFFER_BYTES", 5 * PAGE_BYTES)
    second = stored_world(tmp_path)
    arrived, taken = Loads._arrived, []

    def after_another(self, reading, end):
        if not taken:  # its first pages are computed before any of it has been published
            tokens = np.array(text[: count * PAGE_SIZE + 1], np.int32)
            view = RequestView("x", tokens, second.engine.namespace(None), fuzzy=False)
            lease = self._of.cache.lease(view)
            assert self._of.cache.grow(lease, count * PAGE_SIZE)
            self._of.content.copy_in(lease.pages.copy(), stored_bytes(text[: count * PAGE_SIZE]))
            self._of.cache.publish(lease, tokens, computed=count * PAGE_SIZE)
            taken.append(lease.pages.copy())
            self._of.give_back(lease)
        arrived(self, reading, end)

    monkeypatch.setattr(Loads, "_arrived", after_another)
    second.run(request("b", text))
    lease = second.engine.cache.lease(world_view(second, np.array(text, np.int32)))
    assert lease.pages[:count].tolist() == taken[0].tolist()
    second.engine.cache.release(lease)
    assert second.answers["b", 0].usage.cached_tokens == 88
    assert second.ids("b") == oracle_answer(text, 8)
    second.assert_idle()
    second.engine.close()


def hanging(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """From now on reads hang until the event is set."""
    read, go = PageStore.read, threading.Event()

    def late(self, pages, out):
        assert go.wait(60)
        return read(self, pages, out)

    monkeypatch.setattr(PageStore, "read", late)
    return go


@pytest.mark.parametrize("how", ["aborted", "late", "closed"])
def test_pages_are_given_back_while_the_disk_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
):
    text = prompt(90, seed=1)
    first = stored_world(tmp_path)
    first.run(request("a", text))
    first.engine.close()

    go = hanging(monkeypatch)
    second = stored_world(tmp_path)
    engine, store = second.engine, second.engine.components.store
    assert store is not None
    engine.add(request("b", text))
    steps_until(second, lambda: store.leases)
    engine.check()
    copied = copies(monkeypatch)
    if how == "aborted":
        engine.abort("b")
    elif how == "late":
        (load,) = store._loads._loads.values()
        load.deadline = 0.0
        second.run()
        assert second.ids("b") == oracle_answer(text, 8)
    else:
        store._loads.close()
    assert not store.leases
    engine.check()
    go.set()
    second.run(request("c", prompt(60, seed=2)))
    assert second.ids("c") == oracle_answer(prompt(60, seed=2), 8)
    assert not copied  # what came late was written nowhere
    engine.abort("b")
    second.assert_idle()
    engine.close()


def steps_until(world, done) -> None:
    for _ in range(2000):
        if done():
            return
        world.step()
    raise AssertionError("it does not come to that")


def test_a_running_request_comes_before_what_is_read_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    text, other = prompt(90, seed=1), prompt(60, seed=2)
    first = stored_world(tmp_path)
    first.run(request("a", text))
    first.engine.close()

    go = hanging(monkeypatch)
    second = stored_world(tmp_path, pool_tokens=160)
    store = second.engine.components.store
    assert store is not None
    second.engine.add(request("running", other, 60))
    second.engine.add(request("b", text))
    steps_until(second, lambda: store.leases)
    steps_until(second, lambda: not store.leases)
    go.set()
    second.run()
    assert second.ids("running") == oracle_answer(other, 60)
    assert second.ids("b") == oracle_answer(text, 8)
    second.assert_idle()
    second.engine.close()


def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pages each copy into the pool has, as they happen."""
    copied: list[int] = []
    copy_in = OracleContent.copy_in

    def noting(self, to, data):
        copied.append(len(to))
        copy_in(self, to, data)

    monkeypatch.setattr(OracleContent, "copy_in", noting)
    return copied


def stored_bytes(tokens: list[int]) -> npt.NDArray[np.uint8]:
    """The pages of a text's beginning, as OracleContent has them."""
    parts = [np.array(tokens, np.int64), np.arange(len(tokens), dtype=np.int64)]
    return np.concatenate([part.reshape(-1, PAGE_SIZE).view(np.uint8) for part in parts], axis=1)
