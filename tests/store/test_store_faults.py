"""What can go wrong with a store costs its pages, and never an answer."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import typer

from kvweave.cli.model import Action, store
from kvweave.errors import ConfigError
from kvweave.store.pages import folders_in, look_at
from support.enginekit import FAMILIES, World, oracle_answer, prompt, request
from support.storekit import settle, stored_world


def serve(world: World, seed: int, count: int, label: str = "") -> int:
    """Answer random prompts, some of them with moved text; returns the tokens not computed."""
    rng, reused = np.random.default_rng(seed), 0
    for at in range(count):
        family = FAMILIES[rng.integers(len(FAMILIES))]
        head = prompt(int(rng.integers(1, 20)), seed=int(rng.integers(1000)))
        text = family[: int(rng.integers(40, 90))] + prompt(3, seed=int(rng.integers(1000)))
        text = head + text if rng.random() < 0.4 else text
        rid = f"{label}{seed}-{at}"
        world.run(request(rid, text, 4), check=False)
        assert world.ids(rid) == oracle_answer(text, 4)
        usage = world.answers[rid, 0].usage
        reused += usage.cached_tokens + usage.moved_tokens
    return reused


def flip(folder: Path, rng: np.random.Generator) -> None:
    """Turn over one bit in one of the files."""
    files = [at for at in sorted(folder.glob("*/*")) if at.stat().st_size]
    path = files[rng.integers(len(files))]
    with path.open("r+b") as file:
        place = int(rng.integers(path.stat().st_size))
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << int(rng.integers(8))]))


def flip_and_serve(folder: Path, scratch: Path, seed: int) -> int:
    """Damage a copy of the folder, start an engine on it and ask for what is stored."""
    shutil.copytree(folder, scratch)
    rng = np.random.default_rng(seed)
    flip(scratch, rng)
    backend = ("fuzzy_match", "radix", "hash")[seed % 3]
    world = stored_world(scratch, backend, most_bytes=1 << 16)
    reused = serve(world, seed, 3)
    world.engine.close()
    shutil.rmtree(scratch)
    return reused


def filled(folder: Path) -> None:
    world = stored_world(folder, "fuzzy_match", most_bytes=1 << 16)
    for at, family in enumerate(FAMILIES):
        world.run(request(f"fill{at}", family, 2))
    world.engine.close()


def test_a_flipped_bit_is_a_miss(tmp_path: Path):
    filled(tmp_path / "store")
    assert sum(flip_and_serve(tmp_path / "store", tmp_path / "s", seed) for seed in range(24)) > 0


def test_every_page_with_a_flipped_bit_is_found(tmp_path: Path):
    filled(tmp_path)
    (folder,) = folders_in(tmp_path)
    whole = look_at(folder, verify=True)
    assert whole.damaged == 0
    assert whole.pages > 50
    with (folder / "pages").open("r+b") as file:
        file.write(bytes([file.read(1)[0] ^ 4]))
    damaged = look_at(folder, verify=True).damaged
    assert damaged == 1
    assert look_at(folder, verify=True).damaged == 0
    assert look_at(folder, verify=False).pages < whole.pages
    world = stored_world(tmp_path, "radix", most_bytes=1 << 16)
    serve(world, 1, 5)
    world.engine.close()


def kill_and_restart(folder: Path, seed: int) -> int:
    """Kill a process that serves and saves, at a random moment; then start another."""
    child = os.fork()
    if not child:
        try:
            world = stored_world(folder, "fuzzy_match", pool_tokens=256, most_bytes=8000)
            for at in range(10_000):
                serve(world, 1000 * seed + at, 2)
                settle(world)
        finally:
            os._exit(1)  # an error; else it is killed before
    time.sleep(np.random.default_rng(seed).uniform(0.0, 0.25))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "it ended by itself"
    world = stored_world(folder, ("fuzzy_match", "radix")[seed % 2], most_bytes=8000)
    reused = serve(world, seed, 4, "after")
    world.engine.close()
    return reused


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks a process to kill it")
def test_a_process_may_be_killed_at_any_moment(tmp_path: Path):
    assert sum(kill_and_restart(tmp_path, seed) for seed in range(12)) > 0
    (folder,) = folders_in(tmp_path)
    assert look_at(folder, verify=True).damaged == 0


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


@pytest.mark.parametrize("kind", ["full", "vanished"])
def test_a_folder_that_fails_costs_one_warning(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    world = stored_world(tmp_path / "store", "radix")
    serve(world, 1, 2)
    if kind == "full":

        def no_room(*_: object) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwrite", no_room)
    else:
        settle(world)
        shutil.rmtree(tmp_path / "store")
    for seed in range(2, 6):
        serve(world, seed, 2)
        settle(world)
    world.assert_idle()
    world.engine.close()
    assert len([each for each in warnings_of(caplog) if "cannot be used" in each]) == 1
    assert len(warnings_of(caplog)) == 1


def test_a_folder_that_cannot_be_made_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    from types import SimpleNamespace

    from kvweave.config import CacheConfig, EngineConfig
    from kvweave.engine.factory import open_store

    (tmp_path / "file").write_text("")
    config = EngineConfig(cache=CacheConfig(kv_store=str(tmp_path / "file" / "store")))
    cache = SimpleNamespace(page_size=4)
    kv = SimpleNamespace(page_bytes=64, dtype="float32")
    assert open_store(config, "model", cache, kv) is None  # type: ignore[arg-type]
    assert len(warnings_of(caplog)) == 1


def test_folders_and_files_are_private_and_hold_no_salt(tmp_path: Path):
    salt = "a-very-secret-salt"
    world = stored_world(tmp_path / "store")
    world.run(request("a", FAMILIES[0], salt=salt))
    world.engine.close()
    files = list((tmp_path / "store").glob("*/*"))
    assert {at.name for at in files} >= {"lock", "catalog.sqlite", "pages"}
    assert all(at.stat().st_mode & 0o777 == 0o600 for at in files)
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700
    assert not any(salt.encode() in at.read_bytes() for at in files)


@pytest.mark.parametrize("other", ["salt", "model", "page", "dtype"])
def test_nothing_of_another_namespace_or_model_is_found(tmp_path: Path, other: str):
    world = stored_world(tmp_path, "fuzzy_match")
    world.run(request("a", FAMILIES[0]))
    world.engine.close()
    world = stored_world(
        tmp_path, "fuzzy_match", identity="another" if other == "model" else "oracle"
    )
    store = world.engine.components.store
    assert store is not None
    salt = "theirs" if other == "salt" else None
    if other in ("page", "dtype"):
        change = {"page_size": 8} if other == "page" else {"dtype": "int8"}
        kept = store.page_format
        assert type(kept)(**{**_fields(kept), **change}).name != kept.name
    else:
        moved = prompt(11, seed=5) + FAMILIES[0]
        world.run(request("b", FAMILIES[0], salt=salt), request("c", moved, salt="third"))
        assert store.counters.loads == 0
        assert world.answers["b", 0].usage.cached_tokens == 0
        assert world.answers["c", 0].usage.moved_tokens == 0
    world.engine.close()


def _fields(page_format: object) -> dict[str, object]:
    return {name: getattr(page_format, name) for name in page_format.__slots__}  # type: ignore[attr-defined]


def test_the_oldest_pages_leave_a_full_store(tmp_path: Path):
    world = stored_world(tmp_path, most_bytes=64 * 30)
    for at, family in enumerate(FAMILIES):
        world.run(request(f"r{at}", family, 2))
        settle(world)
    world.engine.close()
    (folder,) = folders_in(tmp_path)
    assert (folder / "pages").stat().st_size <= 64 * 30
    world = stored_world(tmp_path, most_bytes=64 * 30)
    world.run(request("new", FAMILIES[-1], 2), request("old", FAMILIES[0], 2))
    assert world.answers["new", 0].usage.cached_tokens == 88
    assert world.answers["old", 0].usage.cached_tokens < 40
    world.engine.close()


def test_two_processes_of_one_model_use_two_folders(tmp_path: Path):
    first, second = stored_world(tmp_path), stored_world(tmp_path)
    assert len(folders_in(tmp_path)) == 2
    for world in (first, second):
        world.run(request("a", FAMILIES[0]))
        world.engine.close()


def test_the_folders_of_other_models_make_room(tmp_path: Path):
    for identity in ("old", "newer", "newest"):
        world = stored_world(tmp_path, identity=identity, most_bytes=40_000)
        for at, family in enumerate(FAMILIES):
            world.run(request(f"r{at}", family, 2))
        world.engine.close()
    names = [at.name for at in folders_in(tmp_path)]
    assert 1 <= len(names) < 3


def test_the_command_shows_checks_and_deletes(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    filled(tmp_path)
    (folder,) = folders_in(tmp_path)
    store(Action.INFO, tmp_path)
    store(Action.VERIFY, tmp_path)
    assert "0 damaged" in capsys.readouterr().out
    with (folder / "pages").open("r+b") as file:
        file.write(b"\xff" * 10)
    with pytest.raises(typer.Exit):
        store(Action.VERIFY, tmp_path)
    world = stored_world(tmp_path)
    store(Action.PURGE, tmp_path)
    assert "kept" in capsys.readouterr().out
    world.engine.close()
    store(Action.PURGE, tmp_path)
    assert not folders_in(tmp_path)
    store(Action.INFO, tmp_path)
    assert "nothing is stored" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="cannot be read"):
        store(Action.INFO, tmp_path / "nowhere")
