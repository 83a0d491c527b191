"""`generate` and `chat` over a scripted engine."""

import contextlib
import io
import json
import os
import sys

import pytest

from kvweave.cli import chat as chat_module
from kvweave.cli.chat import Session
from kvweave.cli.main import main
from kvweave.engine.types import Usage
from kvweave.prefix.lease import Reuse
from kvweave.server.prompts import PromptReader
from support.serverkit import TEXT, FakeEngine, toy_card


@pytest.fixture
def engine(monkeypatch):
    engine = FakeEngine()

    @contextlib.contextmanager
    def open_session(config):
        card = toy_card(engine.tokenizer)
        yield Session(engine, PromptReader(engine.tokenizer, card), "toy")

    monkeypatch.setattr(chat_module, "open_session", open_session)
    return engine


def run(*arguments):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    return left.value.code


def test_one_prompt(engine, capsys):
    assert run("generate", "Once", "--max-tokens", "9", "--seed", "3") == 0
    assert capsys.readouterr().out == TEXT[:9] + "\n"
    [request] = engine.requests
    assert request.sampling.seed == 3
    assert engine.tokenizer.decode(request.prompt_ids) == "Once"


def test_many_prompts_are_answered_together_and_printed_in_order(engine, capsys):
    engine.answer = lambda request, index: "x" * len(request.prompt_ids)
    assert run("generate", "abc", "a", "ab", "--json") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.split("\n") if line]
    assert [(line["prompt"], line["text"]) for line in lines] == [
        ("abc", "xxx"),
        ("a", "x"),
        ("ab", "xx"),
    ]
    assert lines[0]["finish_reason"] == "stop"
    assert lines[0]["usage"]["prompt_tokens"] == 3


def test_the_prompt_is_read_from_standard_input(engine, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert run("generate", "--max-tokens", "3") == 0
    assert engine.tokenizer.decode(engine.requests[0].prompt_ids) == "from a pipe"


def test_a_failed_prompt_is_reported_in_one_sentence(engine, capfd):
    engine.error_after = 1
    assert run("generate", "x") == 2
    assert capfd.readouterr().err == "kvweave: prompt 1 failed: step broke\n"
    assert run("generate", "x" * 3000) == 2
    assert "tokens" in capfd.readouterr().err


def chat_with(monkeypatch, *lines):
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
    assert run("chat", "--max-tokens", "9") == 0


def test_a_conversation_keeps_its_messages_and_reports_cache_hits(engine, capsys, monkeypatch):
    engine.usage = Usage(reuse=Reuse(exact=16, moved=5))
    chat_with(monkeypatch, "first", "", "second", "/new", "third", "/quit")
    out = capsys.readouterr().out
    assert out.count(TEXT[:9]) == 3
    assert "16 cached, 5 moved" in out.replace("\n", " ")
    prompts = [engine.tokenizer.decode(request.prompt_ids) for request in engine.requests]
    assert "first" in prompts[1]
    assert f"assistant\n{TEXT[:9]}" in prompts[1]
    assert "first" not in prompts[2]


def test_a_failed_turn_leaves_no_message(engine, capsys, monkeypatch):
    chat_with(monkeypatch, "x" * 3000, "short")
    assert "tokens" in capsys.readouterr().out
    [request] = engine.requests
    assert "xxx" not in engine.tokenizer.decode(request.prompt_ids)


def test_an_answer_can_be_stopped(engine, capsys, monkeypatch):
    answers = iter([KeyboardInterrupt, None])
    real = chat_module.asyncio.run

    def interrupted_once(work):
        failure = next(answers)
        if failure:
            work.close()
            raise failure
        return real(work)

    monkeypatch.setattr(chat_module.asyncio, "run", interrupted_once)
    chat_with(monkeypatch, "long", "short")
    assert "(stopped)" in capsys.readouterr().out
    assert "long" not in engine.tokenizer.decode(engine.requests[-1].prompt_ids)


def test_commands_are_helped_with_and_unknown_ones_are_no_question(engine, capsys, monkeypatch):
    chat_with(monkeypatch, "/help", "/nwe", "/etc/hosts is a file", "/quit")
    out = capsys.readouterr().out
    assert out.count("/new starts over") == 3  # at the start, for /help, for the unknown one
    assert "There is no /nwe." in out
    [request] = engine.requests
    assert "/etc/hosts is a file" in engine.tokenizer.decode(request.prompt_ids)


TERMINAL = """
import contextlib, sys
from kvweave.cli import chat as module
from kvweave.cli.main import main
from kvweave.cli.chat import Session
from kvweave.server.prompts import PromptReader
from support.serverkit import FakeEngine, toy_card

class Slow(FakeEngine):
    async def _run(self, request):
        print("ANSWERING", flush=True)
        import asyncio
        await asyncio.sleep(1.0)
        async for delta in super()._run(request):
            yield delta

@contextlib.contextmanager
def open_session(config):
    engine = Slow()
    yield Session(engine, PromptReader(engine.tokenizer, toy_card(engine.tokenizer)), "toy")
    print([engine.tokenizer.decode(r.prompt_ids)[-60:] for r in engine.requests])

module.open_session = open_session
main(["chat", "--max-tokens", "9"])
"""


def test_a_terminal_edits_lines_remembers_them_and_keeps_answers_clean(tmp_path):
    pexpect = pytest.importorskip("pexpect", reason="pexpect is not installed")
    environment = {**os.environ, "KVWEAVE_CACHE": str(tmp_path), "TERM": "xterm"}
    command = ["-c", TERMINAL]
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    child = pexpect.spawn(sys.executable, command, env=environment, encoding="utf-8", timeout=60)
    child.expect("> ")
    child.send("hallo\x1b[D\x1b[D\x1b[D\x08e\r")  # three to the left, a becomes e
    child.expect("ANSWERING")
    child.send("typed early")
    child.expect("tokens/s|answer: ")
    assert "typed early" not in child.before
    child.expect("typed early")  # readline shows it in the next line
    child.sendline("")
    child.expect("answer: ")
    child.expect("> ")
    child.sendline("/quit")
    child.expect(pexpect.EOF)
    assert "hello" in child.before
    history = tmp_path / "chat_history"
    assert "hello" in history.read_text()
    assert history.stat().st_mode & 0o777 == 0o600
