"""Every request field of OpenAI, vLLM and SGLang is served, refused in words or harmless."""

import re
from pathlib import Path

import openai
import pytest
from anthropic.types import message_count_tokens_params as anthropic_counts
from anthropic.types import message_create_params as anthropic_messages
from openai.types import completion_create_params as openai_completions
from openai.types import embedding_create_params as openai_embeddings
from openai.types.chat import completion_create_params as openai_chat
from openai.types.responses import response_create_params as openai_responses

from kvweave.server.fields import IGNORED, REFUSED
from kvweave.server.protocol import ChatBody, CompletionBody
from kvweave.server.routes.completions import EmbeddingsBody
from kvweave.server.routes.generate import GenerateBody
from kvweave.server.routes.messages import CountTokensBody, MessagesBody
from kvweave.server.routes.responses import ResponsesBody
from support.serverkit import CHAT, complete, prompt_text, say

AGENTS = Path(__file__).parents[2] / "docs" / "agents.md"
DOCS = Path(__file__).parents[2] / "docs" / "serving.md"
COMPLETIONS = "/v1/completions"
BODIES = {CHAT: ChatBody, COMPLETIONS: CompletionBody}
TEXT_OR_MESSAGES = {
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
    COMPLETIONS: {"prompt": "x"},
}

# Request fields of the two servers as of autumn 2026, without those that OpenAI has too.
VLLM_BOTH = """
    use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids
    include_stop_str_in_output ignore_eos min_tokens skip_special_tokens
    spaces_between_special_tokens truncate_prompt_tokens truncation_side allowed_token_ids
    prompt_logprobs logprob_token_ids bad_words add_special_tokens response_format
    structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
    routed_experts_prompt_start return_token_offsets return_mm_kwargs cache_salt
    kv_transfer_params ec_transfer_params vllm_xargs repetition_detection thinking_token_budget
    stream_interval guided_json guided_regex guided_choice guided_grammar
    guided_decoding_backend guided_whitespace_pattern
"""
VLLM_COMPLETIONS = "prompt_embeds"
VLLM_CHAT = """
    include_reasoning echo add_generation_prompt continue_final_message documents chat_template
    chat_template_kwargs media_io_kwargs mm_processor_kwargs return_prompt_text
"""
SGLANG_BOTH = """
    return_hidden_states return_routed_experts routed_experts_start_len
    return_cached_tokens_details return_token_ids top_k min_p min_tokens json_schema regex ebnf
    repetition_penalty stop_token_ids stop_regex no_stop_trim ignore_eos skip_special_tokens
    lora_path session_id session_params response_format custom_params custom_logit_processor
    watermark return_spec_tokens_details
    images_config bootstrap_host bootstrap_port bootstrap_room routed_dp_rank
    disagg_prefill_dp_rank data_parallel_rank rid extra_key cache_salt ngram_corpus_id priority
"""
SGLANG_COMPLETIONS = "custom_labels best_of"
SGLANG_CHAT = """
    return_prompt_token_ids return_meta_info task continue_final_message separate_reasoning
    stream_reasoning chat_template_kwargs max_dynamic_patch min_dynamic_patch use_audio_in_video
    input_ids reasoning thinking video_config sampling_logprobs_mode return_sampling_mask
    return_flat_raw_output_top_logprobs return_flat_raw_top_logprobs_b64
    return_input_ids_in_sglext return_output_ids_in_sglext
"""


def known(path):
    """Names that this endpoint serves, refuses or ignores on purpose."""
    body = BODIES[path]
    refused = {name for refusal in REFUSED for name in refusal.names}
    ignored = {name for names in IGNORED for name in names.split()}
    served = body.model_fields.keys()
    assert not served & refused
    assert not served & ignored
    assert not refused & ignored
    return served | body.ELSEWHERE.keys() | refused | ignored


@pytest.mark.parametrize(
    ("path", "server", "names"),
    [
        (CHAT, "OpenAI", openai_chat.CompletionCreateParamsBase.__annotations__),
        (COMPLETIONS, "OpenAI", openai_completions.CompletionCreateParamsBase.__annotations__),
        (CHAT, "vLLM", (VLLM_BOTH + VLLM_CHAT).split()),
        (COMPLETIONS, "vLLM", (VLLM_BOTH + VLLM_COMPLETIONS).split()),
        (CHAT, "SGLang", (SGLANG_BOTH + SGLANG_CHAT).split()),
        (COMPLETIONS, "SGLang", (SGLANG_BOTH + SGLANG_COMPLETIONS).split()),
    ],
)
def test_no_field_of_another_server_is_unknown(path, server, names):
    assert set(names) - known(path) == set()


SGLANG_GENERATE = """
    text input_ids input_embeds image_data video_data audio_data sampling_params rid return_logprob
    logprob_start_len top_logprobs_num token_ids_logprob return_text_in_logprobs stream
    log_metrics return_hidden_states return_routed_experts routed_experts_start_len modalities
    session_params lora_path custom_logit_processor bootstrap_host bootstrap_port bootstrap_room
    data_parallel_rank background priority extra_key no_logs custom_labels return_bytes
    require_reasoning
"""


@pytest.mark.parametrize(
    ("body", "names"),
    [
        (ResponsesBody, openai_responses.ResponseCreateParamsBase.__annotations__),
        (EmbeddingsBody, openai_embeddings.EmbeddingCreateParams.__annotations__),
        (MessagesBody, anthropic_messages.MessageCreateParamsBase.__annotations__),
        (CountTokensBody, anthropic_counts.MessageCountTokensParams.__annotations__),
        (GenerateBody, SGLANG_GENERATE.split()),
    ],
)
def test_no_field_of_the_other_protocols_is_unknown(body, names):
    refused = {name for refusal in REFUSED for name in refusal.names}
    ignored = {name for names in IGNORED for name in names.split()}
    served = body.model_fields.keys()
    assert set(names) - (served | body.ELSEWHERE.keys() | refused | ignored) == set()
    words = set(re.findall(r"`([a-z_]+)", AGENTS.read_text() + DOCS.read_text()))
    assert served - words == set()


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("refusal", REFUSED, ids=lambda refusal: refusal.names[0])
def test_refused_fields_say_why_and_empty_ones_pass(client, engine, path, refusal):
    for name in refusal.names:
        error = client.post(path, json={**TEXT_OR_MESSAGES[path], name: "some"}).json()["error"]
        assert error["param"] == name
        assert refusal.reason in error["message"]
    assert not engine.requests
    for value in (None, False, "", [], {}, *refusal.neutral):
        body = {**TEXT_OR_MESSAGES[path], **dict.fromkeys(refusal.names, value)}
        assert client.post(path, json=body).status_code == 200


@pytest.mark.parametrize("path", BODIES)
def test_ignored_fields_pass(client, path):
    names = [name for names in IGNORED for name in names.split()]
    body = {**TEXT_OR_MESSAGES[path], **dict.fromkeys(names, 5), "unheard_of": 1}
    assert client.post(path, json=body).status_code == 200


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (COMPLETIONS, "tools", [{"type": "function", "function": {"name": "f"}}]),
        (COMPLETIONS, "messages", [{"role": "user", "content": "x"}]),
        (COMPLETIONS, "top_logprobs", 2),
        (COMPLETIONS, "continue_final_message", True),
        (COMPLETIONS, "chat_template_kwargs", {"enable_thinking": False}),
        (COMPLETIONS, "documents", [{"text": "x"}]),
        (COMPLETIONS, "tool_choice", "required"),
        (CHAT, "prompt", "x"),
        (CHAT, "echo", True),
        (CHAT, "best_of", 3),
        (CHAT, "documents", [{"text": "x"}]),
        (CHAT, "reasoning_effort", "high"),
    ],
)
def test_a_field_for_elsewhere_is_refused(client, engine, path, field, value):
    reply = client.post(path, json={**TEXT_OR_MESSAGES[path], field: value})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == field
    assert not engine.requests


def test_a_clients_refusal_names_the_field(server):
    ai = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="white space") as refused:
        ai.completions.create(
            model="toy", prompt="x", extra_body={"guided_whitespace_pattern": " "}
        )
    assert refused.value.param == "guided_whitespace_pattern"


def test_the_docs_show_the_table():
    """What follows here is the text that docs/serving.md must hold, for pasting."""
    rows = [(refusal.names, refusal.reason) for refusal in REFUSED]
    rows += [(names.split(), f"ignored: {reason}") for names, reason in IGNORED.items()]
    lines = [f"| {', '.join(f'`{name}`' for name in names)} | {why} |" for names, why in rows]
    table = "\n".join(["| field | why it is refused, or ignored |", "|---|---|", *lines])
    assert table in DOCS.read_text(), table
    words = set(re.findall(r"`([a-z_]+)`", DOCS.read_text()))
    for body in BODIES.values():
        assert body.model_fields.keys() - words == set()


# Served, though other servers' clients alone send them.


def test_the_newer_limit_holds_for_completions_too(client, engine):
    answer = complete(client, max_tokens=None, max_completion_tokens=3)
    assert answer["usage"]["completion_tokens"] == 3
    complete(client, max_tokens=9, max_completion_tokens=2)
    assert engine.requests[-1].sampling.max_tokens == 2
    error = say(client, max_completion_tokens=-1).json()["error"]
    assert error["param"] == "max_completion_tokens"


def test_allowed_tokens_and_bad_words_reach_the_engine(client, engine):
    for ask in (complete, say):
        ask(client, allowed_token_ids=[3, 1], bad_words=["ab", "c"])
        sampling = engine.requests[-1].sampling
        assert sampling.allowed_token_ids == (3, 1)
        spelled = {engine.tokenizer.decode(word) for word in sampling.bad_words_ids}
        assert spelled == {"ab", " ab", "c", " c"}
    for field, value, words in (
        ("allowed_token_ids", [], "at least 1"),
        ("allowed_token_ids", [10**6], "allowed_token_ids"),
        ("bad_words", [""], "must not be empty"),
        ("bad_words", 5, "list of strings"),
    ):
        reply = client.post(COMPLETIONS, json={"prompt": "x", field: value})
        assert reply.status_code == 400
        assert words in reply.json()["error"]["message"]


def test_the_last_message_can_be_continued(client, engine):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]
    for more in ({}, {"add_generation_prompt": False}):
        assert say(client, messages=messages, continue_final_message=True, **more).json()["choices"]
        assert prompt_text(engine).endswith("<|start|>assistant\nWell, ")
    say(client, messages=messages, add_generation_prompt=False)
    assert prompt_text(engine).endswith("assistant\nWell, <|end|>")
    both = say(client, messages=messages, continue_final_message=True, add_generation_prompt=True)
    assert "exclude each other" in both.json()["error"]["message"]
    silent = [*messages, {"role": "assistant", "content": ""}]
    reply = say(client, messages=silent, continue_final_message=True)
    assert reply.json()["error"]["param"] == "continue_final_message"


@pytest.mark.parametrize(
    ("field", "value", "reaches"),
    [
        ("max_tokens", 5.0, 5),
        ("max_tokens", "5", 5),
        ("temperature", "0.5", 0.5),
        ("top_p", "1", 1),
        ("seed", "12345678901234567", 12345678901234567),
    ],
)
def test_numbers_are_read_as_other_servers_read_them(client, engine, field, value, reaches):
    complete(client, **{field: value})
    assert getattr(engine.requests[-1].sampling, field) == reaches


@pytest.mark.parametrize("field", ["prompt_cache_key", "session_id"])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_session_reaches_the_engine_by_either_name(client, engine, path, field):
    text = TEXT_OR_MESSAGES[path]
    assert client.post(path, json={**text, field: "my session"}).status_code == 200
    assert engine.requests[-1].session == "my session"
    assert client.post(path, json=text).status_code == 200
    assert engine.requests[-1].session is None


def test_two_sessions_at_once_are_refused(client):
    both = {"prompt": "x", "prompt_cache_key": "a", "session_id": "b"}
    reply = client.post("/v1/completions", json=both)
    assert reply.status_code == 400
    assert "two sessions" in reply.json()["error"]["message"]
    both["session_id"] = "a"
    assert client.post("/v1/completions", json=both).status_code == 200


def test_a_session_is_closed_by_name_and_salt(client, engine):
    reply = client.post("/close_session", json={"session_id": "a", "cache_salt": "b"})
    assert reply.json() == {"success": True, "tokens": 7}
    assert engine.closed[-1] == ("a", "b")
    assert client.post("/close_session", json={}).status_code == 400
