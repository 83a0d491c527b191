"""An agent's conversation of ten steps, by the openai package against the real server.

The model is a random one, so whatever has the right form has it because schemas and calls are
enforced.
"""

from __future__ import annotations

import openai
import pytest

from kvweave.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, ServerConfig
from kvweave.engine.async_engine import AsyncEngine
from kvweave.engine.engine import Engine
from kvweave.models import load_model
from kvweave.server.model_card import card_of
from support.agents import Place, conversation
from support.serverkit import RunningServer
from support.tinymodels import TINY, save

TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant: {% endif %}"
)
MAX_TOKENS = 600
"""A token is a byte."""


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


def test_openai(server):
    ai = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    asked = {"model": server.card.name, "max_tokens": MAX_TOKENS}

    def create(messages, **more):
        answer = ai.chat.completions.create(messages=messages, **asked, **more)
        return answer.choices[0].message

    def stream(messages, **more):
        with ai.chat.completions.stream(messages=messages, **asked, **more) as events:
            for _ in events:
                pass
            return events.get_final_completion().choices[0].message

    conversation(create, stream)
    parsed = ai.chat.completions.parse(
        messages=[{"role": "user", "content": "Where?"}], response_format=Place, **asked
    )
    assert isinstance(parsed.choices[0].message.parsed, Place)
