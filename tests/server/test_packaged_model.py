"""The whole server on a real language model, through the `openai` client."""

import concurrent.futures

import anthropic
import openai
import pytest

from kvweave.config import CacheConfig, EngineConfig, SchedulerConfig, ServerConfig
from kvweave.engine.async_engine import AsyncEngine
from kvweave.engine.engine import Engine
from kvweave.server.model_card import card_of
from kvweave.server.prompts import ChatPrompt
from support.serverkit import RunningServer, eventually

pytestmark = pytest.mark.model

PAGE = 16
FACTS = " ".join(
    f"Item {number} of the list is kept in drawer {number * 7 % 50} of room {number % 9}."
    for number in range(60)
)


@pytest.fixture(scope="module")
def server(packaged):
    config = EngineConfig(
        cache=CacheConfig(
            prefix_cache_backend="radix", page_size=PAGE, max_total_tokens=PAGE * 1000
        ),
        scheduler=SchedulerConfig(chunked_prefill_size=256, max_running_requests=8),
    )
    engine = AsyncEngine(Engine(config, packaged))
    with RunningServer(engine, ServerConfig(port=0), card_of(packaged)) as server:
        yield server


@pytest.fixture
def ai(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture
def model(server):
    return server.card.name


def ask(ai, model, question, **more):
    more.setdefault("max_tokens", 12)
    messages = [{"role": "user", "content": question}]
    return ai.chat.completions.create(model=model, messages=messages, temperature=0, **more)


def test_a_model_that_knows_something(ai, model):
    answer = ask(ai, model, "What is the capital of France?")
    assert "Paris" in answer.choices[0].message.content


def test_streams_equal_plain_answers(ai, model):
    plain = ask(ai, model, "Name three rivers.", max_tokens=24)
    chunks = list(ask(ai, model, "Name three rivers.", max_tokens=24, stream=True))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == plain.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == plain.choices[0].finish_reason


def test_a_seed_gives_the_same_answers_and_n_gives_different_ones(ai, model):
    def several():
        answer = ai.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "Tell me about a planet."}],
            n=3,
            seed=11,
            temperature=1.0,
            max_tokens=12,
        )
        assert answer.usage.completion_tokens <= 36
        return [choice.message.content for choice in answer.choices]

    first = several()
    assert len(set(first)) > 1
    assert several() == first


def test_logprobs_agree_with_the_choice(ai, model):
    answer = ask(ai, model, "What is 2 + 2?", logprobs=True, top_logprobs=3, max_tokens=6)
    tokens = answer.choices[0].logprobs.content
    assert all(token.token == token.top_logprobs[0].token for token in tokens)  # greedy
    assert all(token.logprob == token.top_logprobs[0].logprob <= 0 for token in tokens)
    text = "".join(bytes(token.bytes).decode() for token in tokens)
    assert answer.choices[0].message.content.startswith(text.removesuffix("<|im_end|>"))


def test_a_stop_string_ends_the_answer_before_itself(ai, model):
    whole = ask(ai, model, "Count from one to five.", max_tokens=30).choices[0].message.content
    stop = whole.split()[2]
    choice = ask(ai, model, "Count from one to five.", max_tokens=30, stop=stop).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.message.content == whole[: whole.index(stop)]


def test_a_special_token_ends_the_answer_as_a_stop_string(ai, model):
    question = "What is the capital of France?"
    plain = ask(ai, model, question, max_tokens=40).choices[0]
    assert plain.finish_reason == "stop"
    extra = {"ignore_eos": True}
    ended = ask(ai, model, question, max_tokens=40, stop="<|im_end|>", extra_body=extra).choices[0]
    assert (ended.finish_reason, ended.matched_stop) == ("stop", "<|im_end|>")
    assert ended.message.content == plain.message.content


def test_bad_words_are_not_written_and_only_allowed_tokens_are(ai, model, server):
    question = "What is the capital of France?"
    assert "Paris" in ask(ai, model, question, max_tokens=20).choices[0].message.content
    without = ask(ai, model, question, max_tokens=20, extra_body={"bad_words": ["Paris"]})
    assert "Paris" not in without.choices[0].message.content
    ids = server.app.state.service.reader.encode_plain(" yes no")
    allowed = ask(ai, model, question, extra_body={"allowed_token_ids": list(ids)})
    assert set(allowed.choices[0].message.content.split()) <= {"yes", "no"}


def test_the_model_goes_on_with_its_last_message(ai, model):
    messages = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is"},
    ]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    answer = ai.chat.completions.create(
        model=model, messages=messages, max_tokens=3, temperature=0, extra_body=extra
    )
    assert answer.choices[0].message.content.startswith(" Paris")


def test_a_client_that_renders_a_conversation_itself_hits_its_prefix(ai, model, server):
    messages = [{"role": "user", "content": f"{FACTS} Where are items kept?"}]
    salt = {"cache_salt": "rendered"}
    ai.chat.completions.create(model=model, messages=messages, max_tokens=1, extra_body=salt)
    reader = server.app.state.service.reader
    prompt = reader.render(ChatPrompt(messages=messages))
    usage = ai.completions.create(model=model, prompt=prompt, max_tokens=1, extra_body=salt).usage
    full_pages = (usage.prompt_tokens - 1) // PAGE * PAGE
    assert usage.prompt_tokens_details.cached_tokens == full_pages


def test_a_long_document_asked_twice_is_computed_once(ai, model):
    first = ask(ai, model, f"{FACTS}\n\nWhere is item 3?")
    again = ask(ai, model, f"{FACTS}\n\nWhere is item 3?")
    assert first.usage.prompt_tokens > 1000
    full_pages = (again.usage.prompt_tokens - 1) // PAGE * PAGE
    assert again.usage.prompt_tokens_details.cached_tokens == full_pages
    assert again.choices[0].message.content == first.choices[0].message.content


def test_salts_share_within_and_never_across(ai, model):
    def cached(salt):
        question = "Who wrote the play about the prince of Denmark, and what is it called?"
        answer = ask(ai, model, question, max_tokens=1, extra_body={"cache_salt": salt})
        return answer.usage.prompt_tokens_details.cached_tokens

    assert cached("") == 0
    assert cached("a") == 0
    assert cached("b") == 0
    assert cached("a") > 0
    assert cached("") > 0


def test_an_echoed_prompt_scores_the_same_from_a_warm_cache(ai, model):
    def scores(salt):
        answer = ai.completions.create(
            model=model,
            prompt=FACTS[:600],
            echo=True,
            logprobs=1,
            max_tokens=1,
            temperature=0,
            extra_body={"cache_salt": salt},
        )
        return answer.choices[0].logprobs.token_logprobs

    cold = scores("echo")
    ai.completions.create(
        model=model, prompt=FACTS[:600], max_tokens=1, extra_body={"cache_salt": "echo"}
    )
    warm = scores("echo")
    assert cold[0] is None
    assert warm[1:] == pytest.approx(cold[1:], abs=1e-4)


def test_together_as_alone(ai, model):
    questions = [f"What is {number} plus one?" for number in range(4)]
    alone = [ask(ai, model, question).choices[0].message.content for question in questions]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        salted = {"extra_body": {"cache_salt": "together"}}
        answers = pool.map(lambda question: ask(ai, model, question, **salted), questions)
        assert [answer.choices[0].message.content for answer in answers] == alone


def test_parts_in_an_order_that_is_cached_need_not_be_computed_again(ai, model):
    passages = [FACTS[at : at + 500] for at in (0, 500, 1000, 1500)]

    def ask_about(question, order, **more):
        texts = ["Read the text.", *(passages[at] for at in order), question]
        content = [{"type": "text", "text": text} for text in texts]
        answer = ai.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": content}],
            temperature=0,
            max_tokens=8,
            extra_body={"cache_salt": "order", **more},
        )
        return answer, answer.usage.prompt_tokens_details.cached_tokens

    ask_about("Where is item 3?", (2, 0, 3, 1))
    _, as_given = ask_about("Where is item 9?", (0, 1, 2, 3))
    answer, cached = ask_about("And item 12?", (0, 3, 1, 2), reorder={"parts": [1, 2, 3, 4]})
    # As sent, the four parts are the passages 0, 3, 1, 2; both cached orders begin otherwise.
    used = [(0, 3, 1, 2)[part - 1] for part in answer.kvweave_order["parts"]]
    assert used in ([2, 0, 3, 1], [0, 1, 2, 3])
    assert answer.kvweave_order["cached_tokens"] == cached
    assert cached > 0.9 * answer.usage.prompt_tokens
    assert as_given < 64
    sent_so, again = ask_about("And item 12?", used)
    assert sent_so.choices[0].message.content == answer.choices[0].message.content
    assert sent_so.usage.prompt_tokens == answer.usage.prompt_tokens
    assert again >= cached


def test_all_protocols_of_conversations_get_the_same_answer(server, ai, model):
    chat = ask(ai, model, "Name three rivers.", max_tokens=16).choices[0].message.content
    asked = {"model": model, "temperature": 0}
    response = ai.responses.create(input="Name three rivers.", max_output_tokens=16, **asked)
    assert response.output_text == chat
    with ai.responses.stream(input="Name three rivers.", **asked) as stream:
        whole = stream.get_final_response()
    assert whole.output_text.startswith(chat)
    claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    said = [{"role": "user", "content": "Name three rivers."}]
    greedy = {"extra_body": {"temperature": 0}}
    message = claude.messages.create(model=model, max_tokens=16, messages=said, **greedy)
    assert message.content[0].text == chat
    with claude.messages.stream(model=model, max_tokens=16, messages=said, **greedy) as stream:
        assert stream.get_final_message().content[0].text == chat
    ids = server.app.state.service.reader.tokenizer.apply_chat_template(
        said, add_generation_prompt=True, return_dict=False
    )
    with server.client() as client:
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 16, "temperature": 0}}
        assert client.post("/generate", json=body).json()["text"] == chat


def test_a_final_assistant_message_is_gone_on_with(server, model):
    claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    said = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "The capital of France is"},
    ]
    message = claude.messages.create(
        model=model, max_tokens=4, messages=said, extra_body={"temperature": 0}
    )
    assert message.content[0].text.startswith(" Paris")


def test_what_was_created_is_read_by_the_next_message(server, model):
    claude = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)

    def usage(question):
        told = [{"role": "user", "content": f"{FACTS}\n{question}"}]
        more = {"extra_body": {"cache_salt": "usage"}}
        found = claude.messages.create(model=model, max_tokens=2, messages=told, **more).usage
        counted = claude.messages.count_tokens(model=model, messages=told).input_tokens
        created, read = found.cache_creation_input_tokens, found.cache_read_input_tokens
        assert found.input_tokens + created + read == counted
        return created, read

    created, read = usage("Where is item 3?")
    assert read == 0
    assert created > 1000
    assert created % PAGE == 0
    again, read = usage("And what of the ninth?")
    assert created - 2 * PAGE <= read <= created
    assert again <= 2 * PAGE
    assert usage("And what of the ninth?")[1] >= read + again - PAGE


def test_at_the_end_no_request_owns_a_page(server):
    with server.client() as client:

        def used():
            return client.get("/server_info").json()["engine"]["used_tokens"]

        assert eventually(lambda: used() == 0)
        assert client.post("/flush_cache?timeout=5").status_code == 200
        now = client.get("/server_info").json()["engine"]
        assert now["free_tokens"] == now["total_tokens"]
