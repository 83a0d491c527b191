"""What README and docs tell people to type: flags and targets exist, requests and scripts run.

Commands of other programs, and those that need a GPU, a cluster or an hour, are named in ELSEWHERE.
"""

import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.main import get_command

from kvweave.cli.main import build_cli
from kvweave.config import CacheConfig, EngineConfig, FuzzyConfig, ServerConfig
from kvweave.engine.async_engine import AsyncEngine
from kvweave.engine.engine import Engine
from kvweave.server.model_card import card_of
from kvweave_bench.options import BENCHES
from support.serverkit import RunningServer

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SOURCE = re.compile(r"`([\w.-]+/[\w./-]+\.(?:py|c|h))`(?:, `(?:[A-Za-z]\w*\.)?(\w+)`)?")
NAMED_IN = re.compile(r"`(?:[A-Za-z]\w*\.)?(\w+)` (?:in |\()`([\w.-]+/[\w./-]+\.(?:py|c|h))`")
INLINE = re.compile(r"`((?:kvweave|make) [^`\n]+)`")
SERVED = "http://127.0.0.1:8000"

ELSEWHERE = {
    "pip": "installs",
    "docker": "needs Docker",
    "serve": "needs Ray (make test-ray runs it)",
    "aiperf": "needs aiperf, a load generator",
    "lm-eval": "needs lm-eval",
    "export": "sets a variable",
    "git": "needs what a reader changed",
    "bash": "needs a GPU (deploy/sglang-gpu.sh)",
}
MODULES_ELSEWHERE = {
    "sglang": "needs SGLang (make test-sglang runs it)",
    "sglang_router": "needs SGLang's router (make test-router runs it)",
}


def blocks(*kinds):
    """(page, text) of every code block of these kinds."""
    return [
        (page, text)
        for page in PAGES
        for kind, text in BLOCK.findall(page.read_text("utf-8"))
        if kind in kinds
    ]


def commands():
    """(page, words) of every command in a block or between backquotes."""
    found = []
    for page, text in blocks("sh", "bash"):
        for line in text.replace("\\\n", " ").splitlines():
            found.append((page, line))
    for page in PAGES:
        found += [(page, line) for line in INLINE.findall(page.read_text("utf-8"))]
    for page, line in found:
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue  # a line of a request's body
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)  # a variable for this command only
        if words:
            yield page, [word for word in words if word != "&"]


@pytest.fixture(scope="module")
def cli():
    return get_command(build_cli()).commands


def test_every_command_names_flags_benches_and_targets_that_exist(cli):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    problems, seen = [], 0
    for page, (program, *words) in commands():
        name = Path(program).name
        seen += name in ("kvweave", "make")
        if name == "make":
            wrong = [word for word in words if "=" not in word and word not in targets]
        elif name == "kvweave":
            wrong = unknown_words(cli, words)
        elif name.startswith("python") and words[:1] == ["-m"]:
            package = words[1].split(".")[0]
            wrong = [] if package in MODULES_ELSEWHERE or find_spec(words[1]) else words[1:2]
        else:
            continue
        if wrong:
            problems.append(f"{page.name}: {' '.join([program, *words])}: {wrong}")
    assert not problems, "\n".join(problems)
    assert seen > 40, "the pages are read"


def test_source_files_and_the_names_said_to_be_in_them_exist():
    """Decisions tell of the past: files that they name may have moved."""
    wrong = []
    for page in PAGES:
        if page.parent.name == "decisions":
            continue
        text = page.read_text("utf-8")
        named = [(path, name) for name, path in NAMED_IN.findall(text)]
        for path, name in [*SOURCE.findall(text), *named]:
            if "NAME" in path:  # a placeholder
                continue
            places = (ROOT / "src/kvweave" / path, ROOT / "src" / path, ROOT / path)
            file = next((each for each in places if each.is_file()), None)
            if file is None or (name and not re.search(rf"\b{name}\b", file.read_text("utf-8"))):
                wrong.append(f"{page.name}: {path} {name}".rstrip())
    assert wrong == []


def unknown_words(cli, words):
    """What `kvweave WORDS` would refuse: the subcommand, a flag, or a benchmark's name."""
    if not words or words[0].startswith("-"):
        return []
    if words[0] not in cli:
        return words[:1]
    flags = {
        flag for option in cli[words[0]].params for flag in option.opts + option.secondary_opts
    }
    given = [word.split("=", 1)[0] for word in words if word.startswith("--")]
    wrong = [flag for flag in given if flag not in {*flags, "--debug", "--help"}]
    if words[0] == "bench" and words[1:] and words[1] not in (*BENCHES, "--list", "NAME"):
        wrong += words[1:2]
    return wrong


def test_commands_in_blocks_are_known_or_said_to_be_tried_elsewhere():
    known = {"make", "kvweave", "curl", "python", *ELSEWHERE}
    strange = set()
    for page, text in blocks("sh", "bash"):
        for line in re.sub(
            r"-d '.*?'", "", text.replace("\\\n", " "), flags=re.DOTALL
        ).splitlines():
            words = shlex.split(line, comments=True)
            words = [word for word in words if not re.fullmatch(r"[A-Z_]+=.*", word)]
            if words and Path(words[0]).name not in known:
                strange.add(f"{page.name}: {line}")
    assert not strange


@pytest.fixture(scope="module")
def server(packaged):
    """What `make serve` runs, but for the self-check and the port."""
    config = EngineConfig(
        cache=CacheConfig(prefix_cache_backend="fuzzy_match", max_total_tokens=16_384),
        fuzzy=FuzzyConfig(self_check="off", heal=True),
    )
    engine = AsyncEngine(Engine(config, packaged))
    with RunningServer(engine, ServerConfig(port=0), card_of(packaged)) as server:
        yield server


@pytest.mark.model
def test_every_request_by_curl_is_answered(server):
    sent = 0
    for page, text in blocks("sh", "bash"):
        for request in re.findall(r"^curl .*?'$", text, re.DOTALL | re.MULTILINE):
            if SERVED not in request:
                continue
            command = shlex.split(request.replace("\\\n", " ").replace(SERVED, server.url))
            reply = subprocess.run([*command, "--fail"], capture_output=True, text=True)
            assert reply.returncode == 0, f"{page.name}: {request}\n{reply.stderr}"
            sent += 1
    assert sent >= 3


@pytest.mark.model
def test_the_first_script_shows_its_own_gain(server):
    [script] = [
        text for page, text in blocks("python") if page.name == "README.md" and "ttft" in text
    ]
    shown = subprocess.run(
        [sys.executable, "-c", script.replace(SERVED, server.url)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    first, second = shown.stdout.splitlines()
    assert re.search(r"TTFT \d+ ms", first)
    assert int(re.search(r"moved: (\d+)", second)[1]) > 1000


@pytest.mark.model
def test_whole_scripts_of_the_other_pages_run(server):
    scripts = [
        (page, text)
        for page, text in blocks("python")
        if re.search(r"^(from|import) ", text, re.MULTILINE) and "ttft" not in text
    ]
    assert len(scripts) >= 2
    for page, script in scripts:
        shown = subprocess.run(
            [sys.executable, "-c", script.replace(SERVED, server.url)],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert shown.returncode == 0, f"{page.name}: {shown.stderr}"
        assert shown.stdout.strip()
