"""Bodies of any values are answered: never 5xx, errors always in one shape."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvweave.server.fields import _REFUSALS
from kvweave.server.protocol import (
    AbortBody,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)
from kvweave.server.routes.generate import GenerateBody
from kvweave.server.routes.messages import CountTokensBody, MessagesBody
from kvweave.server.routes.responses import ResponsesBody

BODIES = {
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
    "/v1/messages/count_tokens": CountTokensBody,
    "/generate": GenerateBody,
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
    "/abort_request": AbortBody,
}
PLAUSIBLE = {
    "input": "x",
    "text": "x",
    "max_tokens": 3,
    "prompt": "x",
    "messages": [{"role": "user", "content": "x"}],
    "tokens": [1],
    "rid": "r",
}

plain = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([0, 1, -1, 2**31, 2**63, 10**30])
    | st.floats()
    | st.text(st.characters(codec=None), max_size=8)
)
values = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)


@st.composite
def bodies(draw, model):
    fields = [*model.model_fields, *_REFUSALS]
    body = {name: value for name, value in PLAUSIBLE.items() if name in fields}
    if model is ResponsesBody:
        del body["text"]  # there, it is no text
    for name in draw(st.lists(st.sampled_from(fields), max_size=4, unique=True)):
        body[name] = draw(values)
    return body


@pytest.mark.parametrize("path", BODIES)
def test_any_values_in_known_fields(running, path):
    running.engine.reset()
    with running.client() as client:

        @settings(
            max_examples=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(bodies(BODIES[path]))
        def check(body):
            reply = client.post(
                path,
                content=json.dumps(body).encode(),
                headers={"content-type": "application/json"},
            )
            assert reply.status_code in (200, 400, 404), reply.text
            if reply.status_code != 200:
                assert set(reply.json()["error"]) == {"message", "type", "param", "code"}

        check()
    assert not running.engine.phases
