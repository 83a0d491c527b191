"""Texts come from their packages, once; a text that cannot be fetched is named."""

from __future__ import annotations

import gzip
import subprocess
from pathlib import Path

import pytest

from kvweave.errors import KvweaveError
from kvweave_bench import fetch, texts


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVWEAVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_prose_keeps_sentences_and_drops_tables_and_contents() -> None:
    sentence = (
        "The package management system knows which files belong to which package\n"
        "    and removes them when the package goes away."
    )
    contents = (
        "1. Where to begin reading 2. What to read before that 3. Whom to ask 4. When to stop."
    )
    table = "| a | b | c | d | e | f | g | h | i | j | k | l | m | n | o | p | q | r |."
    text = "\n\n".join([sentence, contents, "A heading", table, sentence])
    assert texts.prose(text) == " ".join(sentence.split())


def test_a_kept_collection_needs_no_package_manager(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def wheel_files(*_: str) -> dict[str, bytes]:
        nonlocal calls
        calls += 1
        data = b'{"name": "Utopia", "capital": "Amaurot", "population": 6000, "borders": ["NUL"]}'
        return {"countryinfo/data/utopia.json": data, "countryinfo/data/sea.json": b'{"name": "S"}'}

    monkeypatch.setattr(texts, "wheel_files", wheel_files)
    first = texts.load("countries")
    assert texts.load("countries") == first
    assert calls == 1
    (utopia,) = first.texts  # what has no capital is no country to ask about
    assert utopia.facts == {"capital": "Amaurot", "population": "6000", "borders": "NUL"}
    assert "The capital of Utopia is Amaurot." in utopia.body


def test_an_unknown_source_lists_the_known() -> None:
    with pytest.raises(KvweaveError, match=r"debian-faq.*not 'debian-fax'"):
        texts.load("debian-fax")


def test_an_installed_debian_package_is_read_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = "usr/share/doc/x/x.txt.gz"
    (tmp_path / member).parent.mkdir(parents=True)
    (tmp_path / member).write_bytes(gzip.compress(b"Text."))
    asked: list[tuple[str, ...]] = []

    def output(package: str, *command: str, **_: object) -> str:
        asked.append(command)
        return "1.2-3"

    monkeypatch.setattr(fetch, "_output", output)
    assert fetch.debian_text("x", member, root=tmp_path) == ("Text.", "1.2-3")
    assert [command[0] for command in asked] == ["dpkg-query"]


def test_without_the_systems_package_lists_private_ones_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    member = "usr/share/doc/x/x.txt.gz"

    def output(package: str, *command: str, cwd: Path | None = None) -> str:
        if command[:2] == ("apt-get", "download"):
            raise fetch.FetchError("x could not be fetched: apt-get: no lists")
        if "download" in command:
            assert cwd is not None
            assert f"Dir::State::Lists={cwd}/lists" in command
            (cwd / "x_1_all.deb").write_bytes(b"")
        if "-x" in command:
            (Path(command[-1]) / member).parent.mkdir(parents=True)
            (Path(command[-1]) / member).write_bytes(gzip.compress(b"Text."))
        return "1"

    monkeypatch.setattr(fetch, "_output", output)
    assert fetch.debian_text("x", member, root=tmp_path / "nothing-here") == ("Text.", "1")


def test_what_cannot_be_fetched_is_named_with_the_reason(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "warning\nno route to the archive\n")

    monkeypatch.setattr(fetch.subprocess, "run", run)
    with pytest.raises(fetch.FetchError, match=r"countryinfo could not .* no route to the archive"):
        texts.load("countries")
    assert not (cache / "texts").exists()


def test_a_missing_package_manager_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(fetch.FetchError, match="no-such-package could not be fetched: apt-get"):
        fetch.debian_text("no-such-package", "usr/share/no-such-file")


def test_fetch_all_reports_each_failure_and_exits_2(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(name: str) -> texts.Collection:
        if name == "debian-faq":
            raise fetch.FetchError("debian-faq could not be fetched: apt-get: gone")
        return texts.Collection(name, f"{name} 1", "MIT", (texts.Text("T", "two words"),))

    monkeypatch.setattr(texts, "load", load)
    assert texts.main() == 2
    printed = capsys.readouterr()
    assert printed.err == "debian-faq could not be fetched: apt-get: gone\n"
    assert "banking: 1 texts, 2 words, banking 1, MIT" in printed.out


def test_a_real_wheel_is_fetched_and_checked(cache: Path) -> None:
    try:
        found = texts.load("countries")
    except fetch.FetchError as error:
        if "SHA-256" in str(error):
            raise
        pytest.skip(f"the package registry does not answer: {error}")
    assert found.origin == "countryinfo 1.0.1"
    assert len(found.texts) > 200
    assert {text.title: text for text in found.texts}["Finland"].facts["capital"] == "Helsinki"


def test_another_file_than_the_pinned_one_is_refused(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        folder = Path(command[command.index("--dest") + 1])
        (folder / "countryinfo-1.0.1-py3-none-any.whl").write_bytes(b"something else")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(fetch.subprocess, "run", run)
    with pytest.raises(fetch.FetchError, match="is not the file that was pinned"):
        texts.load("countries")


def test_a_real_debian_package_is_opened(cache: Path) -> None:
    try:
        found = texts.load("debian-faq")
    except fetch.FetchError as error:
        pytest.skip(f"this system cannot fetch Debian packages: {error}")
    assert found.origin.startswith("debian-faq ")
    assert len(found.texts[0].body.split()) > 10_000
