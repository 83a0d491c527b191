"""An agent's conversation of ten steps, by the openai package against the real server.

The model is a random one, so whatever has the right form has it because schemas and calls are
enforced.
"""

from __future__ import annotations

import json

import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from kvweave.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
from kvweave.engine.async_engine import AsyncEngine
from kvweave.engine.engine import Engine
from kvweave.models import load_model
from kvweave.server.model_card import card_of
from support.serverkit import RunningServer
from support.tinymodels import TINY, save

STEPS = 10


class Place(BaseModel):
    """A place to look at."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=12, pattern="^[a-z]+$")
    distance: int = Field(ge=0, le=99)


PLACE = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at a place.",
        "parameters": Place.model_json_schema(),
        "strict": True,
    },
}


TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A random model that writes bytes: only what is enforced has a form."""
    config = TINY["llama"]()
    config.max_position_embeddings = 16_384
    folder = save(config, tmp_path_factory.mktemp("model"))
    loaded = load_model(ModelConfig(model=str(folder), device="cpu"))
    loaded.tokenizer.chat_template = TEMPLATE
    config = EngineConfig(
        cache=CacheConfig(prefix_cache_backend="radix", max_total_tokens=16_384),
        scheduler=SchedulerConfig(random_seed=0),
    )
    engine = AsyncEngine(Engine(config, loaded))
    with RunningServer(engine, ServerConfig(port=0), card_of(loaded)) as server:
        yield server


def check(arguments):
    Place.model_validate(json.loads(arguments) if isinstance(arguments, str) else arguments)


def conversation(create):
    """Ten steps: calls by choice, schemas, and streams, with all that was said as history.

    `create(messages, **more)` returns a message, or with `stream` a list of deltas.
    """
    messages = [{"role": "user", "content": "Look around."}]
    named = {"type": "function", "function": {"name": "look"}}
    for step in range(STEPS):
        if step % 3 == 2:
            form = {"name": "place", "schema": Place.model_json_schema(), "strict": True}
            more = {"response_format": {"type": "json_schema", "json_schema": form}}
            message = create(messages, **more)
            check(message.content)
            messages += [
                {"role": "assistant", "content": message.content},
                {"role": "user", "content": "And now?"},
            ]
            continue
        choice = named if step % 3 else "required"
        more = {"tools": [PLACE], "tool_choice": choice, "parallel_tool_calls": False}
        message = create(messages, seed=step, **more)
        (call,) = message.tool_calls
        assert call.function.name == "look"
        check(call.function.arguments)
        name, arguments = "", ""
        for delta in create(messages, seed=step, stream=True, **more):
            for part in delta.tool_calls or ():
                name += part.function.name or ""
                arguments += part.function.arguments or ""
        assert (name, arguments) == ("look", call.function.arguments)
        function = {"name": name, "arguments": arguments}
        said = {"id": call.id, "type": "function", "function": function}
        messages += [
            {"role": "assistant", "content": None, "tool_calls": [said]},
            {"role": "tool", "tool_call_id": call.id, "content": "A tree."},
        ]


def test_openai(server):
    ai = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    def create(messages, **more):
        answer = ai.chat.completions.create(
            model=server.card.name, messages=messages, max_tokens=600, **more
        )
        if more.get("stream"):
            return [chunk.choices[0].delta for chunk in answer]
        return answer.choices[0].message

    conversation(create)
    parsed = ai.chat.completions.parse(
        model=server.card.name,
        messages=[{"role": "user", "content": "Where?"}],
        response_format=Place,
        max_tokens=600,
    )
    assert isinstance(parsed.choices[0].message.parsed, Place)
