"""`generate` and `chat` over a scripted engine."""

import contextlib
import io
import json

import pytest

from kvweave.cli import chat as chat_module
from kvweave.cli import generate as generate_module
from kvweave.cli.main import main
from kvweave.cli.session import Session
from kvweave.engine.types import Usage
from kvweave.prefix.plan import Reuse
from kvweave.server.prompts import PromptReader
from support.serverkit import TEXT, FakeEngine, toy_card


@pytest.fixture
def engine(monkeypatch):
    engine = FakeEngine()

    @contextlib.contextmanager
    def open_session(config):
        card = toy_card(engine.tokenizer)
        yield Session(engine, PromptReader(engine.tokenizer, card), "toy")

    monkeypatch.setattr(generate_module, "open_session", open_session)
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
