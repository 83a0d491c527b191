"""The `openai` package against the real server."""

import openai
import pytest

from kvweave.engine.types import Usage
from kvweave.prefix.lease import Reuse
from support.serverkit import CONTEXT, TEXT


@pytest.fixture
def ai(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_chat(ai, engine):
    engine.usage = Usage(reuse=Reuse(exact=5))
    answer = ai.chat.completions.create(
        model="toy",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=4,
        n=2,
        logprobs=True,
        top_logprobs=2,
        extra_body={"cache_salt": "me", "fuzzy": False},
    )
    assert [choice.message.content for choice in answer.choices] == [TEXT[:4]] * 2
    assert len(answer.choices[1].logprobs.content) == 4
    assert answer.usage.completion_tokens == 8
    assert answer.usage.prompt_tokens_details.cached_tokens == 5
    assert engine.requests[0].cache_salt == "me"
    answer.model_validate(answer.model_dump(exclude_unset=True), strict=True)


def test_streamed_chat(ai):
    stream = ai.chat.completions.create(
        model="toy",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=9,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == TEXT[:9]
    assert chunks[-1].usage.total_tokens == 20 + 9
    for chunk in chunks:
        chunk.model_validate(chunk.model_dump(exclude_unset=True), strict=True)


def test_completions(ai):
    answer = ai.completions.create(model="toy", prompt=["a", "b"], max_tokens=3, logprobs=1)
    assert [choice.text for choice in answer.choices] == [TEXT[:3]] * 2
    answer.model_validate(answer.model_dump(exclude_unset=True), strict=True)


def test_models(ai):
    assert [model.id for model in ai.models.list()] == ["toy"]
    assert ai.models.retrieve("toy").id == "toy"


def test_errors_arrive_as_the_clients_own(ai, engine):
    with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
        ai.completions.create(model="gpt", prompt="x")
    with pytest.raises(openai.BadRequestError) as refused:
        ai.completions.create(model="toy", prompt="x", temperature=3)
    assert refused.value.param == "temperature"
    engine.capacity = 0
    with pytest.raises(openai.RateLimitError):
        ai.completions.create(model="toy", prompt="x")


@pytest.mark.parametrize("length", [CONTEXT, 40 * CONTEXT])
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_beyond_the_context_fails_as_clients_expect(ai, length, stream):
    """Their fallbacks to other models look for this code, or for these words."""
    long = "x" * length
    messages = [{"role": "user", "content": long}]
    with pytest.raises(openai.BadRequestError) as chat:
        ai.chat.completions.create(model="toy", messages=messages, stream=stream)
    with pytest.raises(openai.BadRequestError) as completion:
        ai.completions.create(model="toy", prompt=long, stream=stream)
    for refused, param in ((chat, "messages"), (completion, "prompt")):
        assert refused.value.code == "context_length_exceeded"
        assert refused.value.param == param
        assert f"This model's maximum context length is {CONTEXT} tokens" in str(refused.value)


def test_a_failure_in_mid_stream_is_raised_by_the_client(ai, engine):
    engine.error_after = 3
    stream = ai.completions.create(model="toy", prompt="x", max_tokens=9, stream=True)
    with pytest.raises(openai.APIError, match="step broke"):
        list(stream)


def test_closing_a_stream_early_ends_the_request(ai, engine):
    engine.step_seconds = 0.01
    stream = ai.completions.create(model="toy", prompt="x", max_tokens=900, stream=True)
    next(iter(stream))
    stream.close()
