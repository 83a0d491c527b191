"""Types of request fields, and fields of other servers that this one refuses or ignores.

Values of several spellings are brought to one, and bounded. The fields that are served are those of
the bodies in `protocol`. A field that would change the answer is refused with a reason, unless its
value asks for nothing. A field of neither kind is unknown and ignored, unless it is nearly the name
of one that keeps tenants apart or answers exact. docs/serving.md shows the
table; a test holds the two together.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Mapping
from functools import partial
from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, WithJsonSchema

from kvweave.errors import RequestError

MAX_PROMPTS = 1024
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = MAX_BIASES = 1024
MAX_BAD_WORDS = 256
MAX_ALLOWED_IDS = 2**18
MAX_NAME = 256
MAX_MOVABLE = 64
Prompt = str | tuple[int, ...]
_NAME = rf"[!-~]{{1,{MAX_NAME}}}"


def _number(value: Any) -> Any:
    """Numbers as other servers take them: 5.0 for 5, and "0.5" for 0.5. No true for 1."""
    if isinstance(value, str) and len(value) <= 32:
        if re.fullmatch("[-+]?[0-9]+", value):
            return int(value)
        try:
            value = float(value)
        except ValueError:
            return value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _printable(text: str) -> str:
    # A rid goes into a header and into the log.
    if not re.fullmatch(_NAME, text):
        raise ValueError(f"a rid has 1 to {MAX_NAME} printable ASCII characters, without spaces")
    return text


def _short(text: str) -> str:
    if len(text) > MAX_NAME:
        raise ValueError(f"a cache_salt has at most {MAX_NAME} characters")
    return _whole(text)


def _whole(text: str) -> str:
    """Refuse half a surrogate pair, which JSON can write and no text holds."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("it holds half a surrogate pair") from None
    return text


def _texts(value: Any, name: str, most: int) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name} is a string or a list of strings")
    if len(texts) > most:
        raise ValueError(f"at most {most} strings, not {len(texts)}")
    if any(not text for text in texts):
        raise ValueError("strings must not be empty")
    if any(len(text) > MAX_STOP_CHARS for text in texts):
        raise ValueError(f"a string has at most {MAX_STOP_CHARS} characters")
    return tuple(map(_whole, texts))


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """The four shapes of `prompt` as one: a tuple of texts or of token ids, one per prompt."""
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value:
        if _all_ids(value):
            return (tuple(value),)
        if len(value) > MAX_PROMPTS:
            raise ValueError(f"at most {MAX_PROMPTS} prompts, not {len(value)}")
        if all(isinstance(item, str) for item in value):
            return tuple(value)
        if all(isinstance(item, list) and _all_ids(item) for item in value):
            return tuple(tuple(item) for item in value)
    raise ValueError("a string, a list of strings, a list of token ids or a list of such lists")


def _content(value: Any) -> str | tuple[str, ...] | None:
    """A message's text, or the texts of its parts."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("content is a string or a list of parts")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f"parts are of type text, with their text, not {kind!r:.80}")
        texts.append(part["text"])
    return tuple(texts)


def _tool_calls(value: Any) -> list[dict[str, Any]]:
    """Calls with their arguments as objects, which is how chat templates read them.

    OpenAI's clients send arguments as JSON text.
    """
    if not isinstance(value, list):
        raise ValueError("tool_calls is a list of calls")
    calls = []
    for call in value:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise ValueError('a call is {"function": {"name": ..., "arguments": ...}}')
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments.strip() or "{}") or {}
            except (ValueError, RecursionError):
                arguments = None
        if not isinstance(arguments, dict):
            raise ValueError(f"the arguments of {function.get('name')!r:.80} are no JSON object")
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return calls


def _bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise ValueError("a map from token ids to numbers")
    if len(value) > MAX_BIASES:
        raise ValueError(f"at most {MAX_BIASES} tokens, not {len(value)}")
    biases = {}
    for token, bias in value.items():
        if not re.fullmatch("[0-9]{1,9}", str(token)):
            raise ValueError(f"a map from token ids to numbers, and {token!r} is no id")
        if type(bias) not in (int, float):
            raise ValueError(f"a map from token ids to numbers, and {bias!r} is no number")
        biases[int(token)] = bias  # an integer may be too large for a float
    return biases


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _all_ids(values: list[Any]) -> bool:
    return set(map(type, values)) <= {int}  # not isinstance: True is no token


_id_schema: dict[str, Any] = {"type": "integer", "minimum": 0}
_ids_schema: dict[str, Any] = {"type": "array", "items": _id_schema, "minItems": 1}
_text_schema: dict[str, Any] = {"type": "string"}
_stop_schema = _text_schema | {"minLength": 1, "maxLength": MAX_STOP_CHARS}
_part_schema: dict[str, Any] = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": _text_schema},
    "required": ["type", "text"],
}
Whole = Annotated[int, BeforeValidator(_number)]
Number = Annotated[float, BeforeValidator(_number)]
Rid = Annotated[
    str,
    AfterValidator(_printable),
    WithJsonSchema({"type": "string", "pattern": f"^{_NAME}$"}),
]
CacheSalt = Annotated[
    str, AfterValidator(_short), WithJsonSchema({"type": "string", "maxLength": MAX_NAME})
]
Stops = Annotated[
    tuple[str, ...],
    PlainValidator(partial(_texts, name="stop", most=MAX_STOPS)),
    WithJsonSchema(
        {"anyOf": [_stop_schema, {"type": "array", "items": _stop_schema, "maxItems": MAX_STOPS}]}
    ),
]
BadWords = Annotated[
    tuple[str, ...],
    PlainValidator(partial(_texts, name="bad_words", most=MAX_BAD_WORDS)),
    WithJsonSchema({"type": "array", "items": _stop_schema, "maxItems": MAX_BAD_WORDS}),
]
Content = Annotated[
    str | tuple[str, ...] | None,
    PlainValidator(_content),
    WithJsonSchema({"anyOf": [_text_schema, {"type": "array", "items": _part_schema}]}),
]
ToolCalls = Annotated[
    list[dict[str, Any]],
    PlainValidator(_tool_calls),
    WithJsonSchema({"type": "array", "items": {"type": "object"}}),
]
LogitBias = Annotated[
    dict[int, float],
    PlainValidator(_bias),
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
            "maxProperties": MAX_BIASES,
        }
    ),
]
StopIds = Annotated[
    tuple[int, ...],
    BeforeValidator(_frozen),
    Field(max_length=MAX_STOP_IDS, json_schema_extra={"items": _id_schema}),
]
AllowedIds = Annotated[
    tuple[int, ...],
    BeforeValidator(_frozen),
    Field(min_length=1, max_length=MAX_ALLOWED_IDS, json_schema_extra={"items": _id_schema}),
]
Prompts = Annotated[
    tuple[Prompt, ...],
    PlainValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                _text_schema | {"minLength": 1},
                {"type": "array", "items": _text_schema | {"minLength": 1}, "minItems": 1},
                _ids_schema,
                {"type": "array", "items": _ids_schema, "minItems": 1},
            ]
        }
    ),
]


class Refusal(NamedTuple):
    """Why some fields are refused. `neutral`: values that ask for nothing, beside the usual."""

    names: tuple[str, ...]
    reason: str
    neutral: tuple[Any, ...] = ()


def _refuse(names: str, reason: str, *neutral: Any) -> Refusal:
    return Refusal(tuple(names.split()), reason, neutral)


REFUSED: tuple[Refusal, ...] = (
    _refuse("guided_decoding_backend", "grammars are enforced by llguidance", "auto", "guidance"),
    _refuse("guided_whitespace_pattern", "a schema's white space is up to 32 blanks"),
    _refuse("format", "it is called response_format here"),
    _refuse("stop_regex", "an answer ends at strings (stop) or tokens (stop_token_ids)"),
    _refuse("repetition_detection", "an answer ends at stop strings, tokens or its limit"),
    _refuse("use_beam_search", "answers are sampled, not searched"),
    _refuse("custom_logit_processor custom_params vllm_xargs", "this server takes no extensions"),
    _refuse("watermarking watermark", "answers carry no watermark"),
    _refuse("thinking_token_budget", "reasoning has no limit of its own: set max_tokens", -1),
    _refuse("typical_p tfs_z", "tokens are filtered by top_k, top_p and min_p", 1),
    _refuse(
        "mirostat top_a dynatemp_range dry_multiplier xtc_probability samplers",
        "tokens are chosen by temperature, top_k, top_p, min_p and penalties",
        0,
    ),
    _refuse("repeat_penalty", "it is called repetition_penalty here", 1),
    _refuse("repeat_last_n", "repetition_penalty counts the whole prompt and answer"),
    _refuse("max_new_tokens n_predict num_predict", "it is called max_tokens here"),
    _refuse("min_new_tokens", "it is called min_tokens here", 0),
    _refuse("sampling_seed", "it is called seed here"),
    _refuse("no_stop_trim", "it is called include_stop_str_in_output here"),
    _refuse("extra_key", "it is called cache_salt here"),
    _refuse("reasoning thinking", "it is called reasoning_effort here", {"type": "adaptive"}),
    _refuse("sampling_params extra_body options", "its fields belong at the top of the body"),
    _refuse(
        "truncate_prompt_tokens n_keep num_ctx context_management",
        "a prompt is served whole or not at all",
    ),
    _refuse("container mcp_servers", "tools are run by the client"),
    _refuse("background conversation", "an answer is sent to the request that asked for it"),
    _refuse("suffix", "the model continues a prompt, it does not fill gaps"),
    _refuse("input_ids", "token ids are the prompt of /v1/completions"),
    _refuse("prompt_embeds input_embeds", "prompts are text or token ids"),
    _refuse("image_data audio_data video_data audio", "prompts and answers are text"),
    _refuse("chat_template", "templates are the server's: start it with --chat-template"),
    _refuse("task", "no chat template here knows tasks"),
    _refuse("session_params", "a session is the conversation that each request brings"),
    _refuse("functions", "describe them in tools"),
    _refuse("function_call", "describe functions in tools", "none", "auto"),
    _refuse("lora_path lora_name lora_request", "this server serves one model, without adapters"),
    _refuse("web_search_options", "this server searches nothing"),
    _refuse("moderation", "this server holds no text against a policy"),
    _refuse("verbosity", "say in the prompt how long the answer should be", "medium"),
    _refuse("prompt_logprobs", "ask /v1/completions for echo with logprobs"),
    _refuse("logprob_token_ids token_ids_logprob n_probs", "logprobs shows the likeliest tokens"),
    _refuse(
        "return_token_ids return_prompt_token_ids return_tokens_as_token_ids return_prompt_text "
        "return_meta_info return_hidden_states return_routed_experts return_logprob "
        "return_input_ids_in_sglext return_output_ids_in_sglext return_sampling_mask "
        "return_flat_raw_output_top_logprobs sampling_logprobs_mode return_spec_tokens_details",
        "answers do not carry it",
    ),
    _refuse(
        "kv_transfer_params ec_transfer_params bootstrap_host bootstrap_port bootstrap_room",
        "this server takes no KV from other servers",
    ),
)

IGNORED: Mapping[str, str] = {
    "user safety_identifier metadata store service_tier custom_labels request_id inference_geo "
    "user_profile_id workspace_id access_programs log_metrics no_logs": (
        "bookkeeping (rid names a request here)"
    ),
    "prompt_cache_options cache_prompt id_slot keep_alive prediction ngram_corpus_id speed": (
        "they may only change how fast the answer comes"
    ),
    "stream_interval stream_reasoning timings_per_token": "they only cut a stream differently",
    "length_penalty truncation_side mirostat_tau mirostat_eta dynatemp_exponent xtc_threshold "
    "dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers "
    "background_options": "they only qualify a field that is refused",
    "spaces_between_special_tokens": "text is decoded without spaces added",
    "return_cached_tokens_details diagnostics": "usage always says what was cached",
    "routed_experts_prompt_start routed_experts_start_len return_token_offsets return_mm_kwargs "
    "return_bytes return_flat_raw_top_logprobs_b64": (
        "they only qualify what answers do not carry"
    ),
    "require_reasoning": "reasoning comes before what a grammar describes",
    "max_tool_calls": "it limits tools that a server runs; here the client runs them",
    "routed_dp_rank disagg_prefill_dp_rank data_parallel_rank": "for routers",
    "media_io_kwargs mm_processor_kwargs max_dynamic_patch min_dynamic_patch use_audio_in_video "
    "images_config image video_config": "they only qualify images and sound, which are refused",
}

_REFUSALS = {name: refusal for refusal in REFUSED for name in refusal.names}
_NEUTRAL_ELSEWHERE: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True,),
    "separate_reasoning": (True,),
    "include_reasoning": (True,),
    "modalities": (["text"],),
    "add_generation_prompt": (True,),
    "top_logprobs": (0,),
}
"""Values that ask for nothing, of fields that only another endpoint serves."""
_GUARDS = ("cache_salt", "fuzzy")
"""Served fields that keep tenants apart and answers exact: a misspelt one is not ignored."""
_NEARLY = 0.8
"""How much alike two names are, of 1, where one may be the other misspelt."""


def refuse_unserved(
    body: Mapping[Any, Any], served: Collection[str], elsewhere: Mapping[str, str]
) -> None:
    """RequestError for the first field of `body` that would change the answer and is not served.

    `elsewhere`: fields that another endpoint serves, with its path.
    """
    for name, value in body.items():
        if name in served:
            continue
        if name in elsewhere:
            reason, neutral = f"it is for {elsewhere[name]}", _NEUTRAL_ELSEWHERE.get(name, ())
        elif name in _REFUSALS:
            reason, neutral = _REFUSALS[name].reason, _REFUSALS[name].neutral
        elif close := difflib.get_close_matches(str(name), _GUARDS, 1, _NEARLY):
            raise RequestError(f"there is no field {name}: did you mean {close[0]}?", param=name)
        else:
            continue
        if not _asks_for_nothing(value, neutral):
            raise RequestError(f"{name} is not offered: {reason}", param=name)


def _asks_for_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    if value is None or value is False or value in ("", [], {}):
        return True
    # True equals 1, but not as the answer to a question for a number.
    return any(value == each and (value is True) == (each is True) for each in neutral)
