"""Lines that change with every call: moved behind the system text where a request asks for it."""

import anthropic
import openai
import pytest

from kvweave.config import ServerConfig, validate
from kvweave.errors import ConfigError
from support.serverkit import FakeEngine, RunningServer, events, prompt_text, say

HEAD = "x-request: 17\nYou help.\nToday is Monday.\nBe brief."
MOVED = "You help.\nBe brief.\nx-request: 17\nToday is Monday."
ASKED = {"role": "user", "content": "Today is what?"}
PATTERNS = (r"x-request: ", r"Today is \w+\.$")


@pytest.fixture(scope="module")
def served():
    with RunningServer(FakeEngine(), ServerConfig(port=0, volatile_head=PATTERNS)) as server:
        yield server


@pytest.fixture
def client(served):
    with served.client() as client:
        yield client


def ask(client, system=HEAD, **body):
    messages = [{"role": "system", "content": system}, ASKED]
    reply = say(client, messages=messages, **body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def system_text(served):
    return prompt_text(served.engine).partition("system\n")[2].partition("<|end|>")[0]


def test_declared_lines_are_moved_and_the_answer_says_which(client, served):
    answer = ask(client, move_volatile_head=True)
    assert system_text(served) == MOVED
    assert answer["kvweave_volatile_head"] == {"message": 0, "lines": [0, 2]}
    assert "user\nToday is what?<|end|>" in prompt_text(served.engine), "system texts only"


def test_nothing_is_moved_silently(client, served):
    answer = ask(client)
    assert system_text(served) == HEAD
    assert "kvweave_volatile_head" not in answer


def test_where_nothing_is_to_be_moved_the_answer_says_so(client, served):
    answer = ask(client, "You help.", move_volatile_head=True)
    assert answer["kvweave_volatile_head"] == {"message": 0, "lines": []}
    assert system_text(served) == "You help."
    answer = say(client, move_volatile_head=True).json()
    assert answer["kvweave_volatile_head"] == {"message": None, "lines": []}


def test_parts_keep_their_places(client, served):
    parts = [{"type": "text", "text": text} for text in ("x-request: 3", "You help.", "Be brief.")]
    answer = ask(client, parts, move_volatile_head=True, reorder={"message": 0, "parts": [1, 2]})
    assert system_text(served) == "\nYou help.\nBe brief.\nx-request: 3"
    assert answer["kvweave_volatile_head"]["lines"] == [0]
    assert answer["kvweave_order"]["parts"] == [1, 2]


def test_a_stream_says_it_once(client):
    messages = [{"role": "system", "content": HEAD}, ASKED]
    chunks = events(client, "/v1/chat/completions", messages=messages, move_volatile_head=True)
    said = [chunk.get("kvweave_volatile_head") for chunk in chunks]
    assert said == [{"message": 0, "lines": [0, 2]}] + [None] * (len(chunks) - 1)


def test_every_protocol_of_conversations_offers_it(served):
    ai = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")
    claude = anthropic.Anthropic(base_url=served.url, api_key="none")
    wish = {"extra_body": {"move_volatile_head": True}}
    response = ai.responses.create(model="toy", instructions=HEAD, input="Hi", **wish)
    assert response.kvweave_volatile_head == {"message": 0, "lines": [0, 2]}
    assert system_text(served) == MOVED
    message = claude.messages.create(
        model="toy", max_tokens=3, system=HEAD, messages=[ASKED], **wish
    )
    assert message.kvweave_volatile_head == {"message": 0, "lines": [0, 2]}
    assert system_text(served) == MOVED


def test_a_server_that_declares_nothing_refuses():
    with RunningServer(FakeEngine(), ServerConfig(port=0)) as server, server.client() as client:
        reply = say(client, move_volatile_head=True)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "move_volatile_head"


def test_a_pattern_must_be_a_regular_expression():
    with pytest.raises(ConfigError, match=r"--volatile-head '\(' is no regular expression"):
        validate(ServerConfig(volatile_head=("(",)))
