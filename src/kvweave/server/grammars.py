"""Grammars as requests ask for them: the fields of OpenAI, vLLM and SGLang, and enforced calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvweave.engine.sampling.grammar import enforceable
from kvweave.engine.types import GrammarSpec
from kvweave.errors import RequestError
from kvweave.server.tools import MAX_CALLS, JsonCalls, Reasoning

_ANY_OBJECT: dict[str, Any] = {"type": "object"}
FIELDS = (
    "response_format",
    "json_schema",
    "regex",
    "ebnf",
    "grammar",
    "structural_tag",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
)
"""Of request bodies; at most one of them may constrain an answer."""
_TEXT = "TEXT: /(.|\\n)*/"


def requested_grammar(fields: Mapping[str, Any]) -> GrammarSpec | None:
    """The grammar that one of FIELDS asks for. RequestError if two do, or one is malformed."""
    found = {
        name: spec
        for name in FIELDS
        if (value := fields.get(name)) is not None and (spec := _field(name, value)) is not None
    }
    if len(found) > 1:
        first, second, *_ = found
        raise RequestError(
            f"{first} and {second} both say what an answer must look like: send one", param=second
        )
    return next(iter(found.values()), None)


def _field(name: str, value: Any) -> GrammarSpec | None:
    if name == "response_format":
        return _response_format(value)
    if name == "structured_outputs":
        return _structured_outputs(value)
    return _spec(name.removeprefix("guided_"), value, name)


def _response_format(value: Any) -> GrammarSpec | None:
    kind, param = value.get("type"), "response_format"
    if kind == "text":
        return None
    if kind == "json_object":
        return _spec("json", _ANY_OBJECT, param)
    if kind == "json_schema":
        named = value.get("json_schema")
        schema = named.get("schema", _ANY_OBJECT) if isinstance(named, dict) else None
        return _spec("json", schema, param)
    if kind == "structural_tag":
        return _spec("structural_tag", value, param)
    raise RequestError(
        "response_format is of type text, json_object, json_schema or structural_tag, not "
        f"{kind!r:.80}",
        param=param,
    )


def _structured_outputs(value: Any) -> GrammarSpec | None:
    param = "structured_outputs"
    given = {key: each for key, each in value.items() if each not in (None, False)}
    options = [key for key in given if key.startswith(("disable_", "whitespace_", "_"))]
    kinds = [key for key in given if key not in options]
    if options or len(kinds) != 1:
        raise RequestError(
            "structured_outputs has one of json, json_object, regex, choice, grammar and "
            f"structural_tag, and no options, not {', '.join(sorted(given)) or 'nothing'}",
            param=param,
        )
    kind = kinds[0]
    return _spec(kind, _ANY_OBJECT if kind == "json_object" else given[kind], param)


def _spec(kind: str, value: Any, param: str) -> GrammarSpec:
    if kind in ("json", "json_object", "json_schema"):
        return GrammarSpec("json_schema", _schema_text(value, param), param)
    if kind == "choice":
        return GrammarSpec("lark", _choice(value, param), param)
    if kind == "structural_tag":
        return GrammarSpec("lark", _structural_tag(value, param), param)
    if not isinstance(value, str):
        raise RequestError(f"{param} is a text, not {value!r:.80}", param=param)
    if kind == "regex":
        return GrammarSpec("regex", value, param)
    if kind in ("ebnf", "grammar"):
        return GrammarSpec("lark", _lark(value, param), param)
    raise RequestError(f"{param} knows no {kind!r:.80}", param=param)


def _schema_text(value: Any, param: str) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, dict | bool):
        raise RequestError(f"{param} holds no JSON schema: that is an object", param=param)
    try:
        return json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        raise RequestError(f"{param} is no JSON schema that can be read", param=param) from None


def _choice(value: Any, param: str) -> str:
    if not isinstance(value, list) or not value or not all(isinstance(x, str) for x in value):
        raise RequestError(f"{param} is a list of texts to choose from", param=param)
    return "start: " + " | ".join(map(_quoted, value))


def _lark(text: str, param: str) -> str:
    """A grammar as it is, or translated from GBNF, which SGLang's `ebnf` is a dialect of."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(any_to_lark(text))
    except Exception as failure:
        raise RequestError(
            f"{param} is neither GBNF nor Lark: {failure!s:.300}", param=param
        ) from None


def _structural_tag(value: Any, param: str) -> str:
    """Free text in which a trigger must go on to a begin, JSON of its schema, and an end."""
    from llguidance import StructTag

    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    wrong = RequestError(
        f"{param} is {{structures: [{{begin, schema, end}}], triggers: [...]}}; each begin starts "
        "with a trigger",
        param=param,
    )
    if not isinstance(value, dict):
        raise wrong
    triggers, tags = value.get("triggers"), []
    for each in value.get("structures") or ():
        begin, end = (each.get("begin"), each.get("end")) if isinstance(each, dict) else (0, 0)
        if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(triggers, list):
            raise wrong
        trigger = next((t for t in triggers if isinstance(t, str) and begin.startswith(t)), "")
        if not trigger:
            raise wrong
        schema = json.loads(_schema_text(each.get("schema", True), param))
        tags.append(StructTag(trigger=trigger, begin=begin, grammar=enforceable(schema), end=end))
    if not tags:
        raise wrong
    return str(StructTag.to_grammar(tags, assume_special=False))


def _quoted(text: str) -> str:
    return json.dumps(text)


def call_grammar(
    form: JsonCalls,
    tools: Sequence[Mapping[str, Any]],
    *,
    enforced: bool,
    parallel: bool,
    special: Mapping[str, int],
) -> str:
    """Lark rules, from `answer` down, of an answer that calls `tools`.

    Without `enforced` it may also be, or hold, other text. `special`: ids of the special tokens.
    """
    items = [tool["function"] for tool in tools]
    begin, end = _mark(form.begin, special), _mark(form.end, special)
    gap = "\\n" if form.end else ""

    def several(rule: str) -> str:
        more = f" ({_quoted(form.between)} {rule}){{0,{MAX_CALLS - 1}}}"
        return rule + more if parallel else rule

    rules = [
        "item: " + " | ".join(f"item_{at}" for at in range(len(items))),
        *(
            f'item_{at}: {_quoted(_head(each, form))} args_{at} "}}"'
            for at, each in enumerate(items)
        ),
        *(
            f"args_{at}: %json {json.dumps(enforceable(parameters(each)))}"
            for at, each in enumerate(items)
        ),
    ]
    if form.listed:
        rules.append(f'calls: {begin} "[" {several("item")} "]"')
    elif form.begin:
        whole = f'{begin} "{gap}" item "{gap}" {end}' if gap else f"{begin} item {end}"
        rules += [f"call: {whole}", f"calls: {several('call')}"]
    else:
        rules.append(f"calls: {several('item')}")
    if enforced:
        return "\n".join(["answer: calls", *rules])
    if not form.begin:
        other = "[^\\[]" if form.listed else "[^{]"
        return "\n".join(["answer: calls | OTHER", f"OTHER: /({other}(.|\\n)*)?/", *rules])
    rest = f'"{gap}" item "{gap}" {end}' if gap else f"item {end}"
    if form.listed:
        rest = f'"[" {several("item")} "]"'
    if form.begin in special:
        head = [f"tagged: TEXT {begin} {rest}"]
    else:
        head = [f"head[lazy]: TEXT {begin}", f"tagged: head {rest}"]
    answer = "answer: tagged* TEXT" if parallel else "answer: tagged | TEXT"
    return "\n".join([answer, *head, _TEXT, *rules])


def _head(function: Mapping[str, Any], form: JsonCalls) -> str:
    name = json.dumps(function["name"])
    return f'{{"name": {name}, "{form.arguments}": '


def parameters(function: Mapping[str, Any]) -> Any:
    """The schema of a function's arguments; none given means that it takes none."""
    given = function.get("parameters")
    if not given:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return given


def _mark(text: str, special: Mapping[str, int]) -> str:
    if not text:
        return ""
    return f"<[{special[text]}]>" if text in special else _quoted(text)


def behind_reasoning(
    spec: GrammarSpec, reasoning: Reasoning, *, opened: bool, special: Mapping[str, int]
) -> GrammarSpec:
    """`spec`, for what stands behind the reasoning that an answer begins with."""
    begin, end = _mark(reasoning.begin, special), _mark(reasoning.end, special)
    body, named = _as_rule(spec)
    if reasoning.end in special:
        think = [f"think: TEXT {end}"]
    else:
        think = [f"think[lazy]: TEXT {end}"]
    start = "start: think gap body" if opened else f"start: ({begin} think gap)? body"
    rules = [start, *think, "gap: /[ \\n]{0,4}/", _TEXT, f"body: {body}"]
    return _with_named("\n".join(rules), named, spec.param)


def _as_rule(spec: GrammarSpec) -> tuple[str, dict[str, str]]:
    if spec.kind == "json_schema":
        return f"%json {json.dumps(enforceable(json.loads(spec.text)))}", {}
    if spec.kind == "regex":
        return "/" + re.sub(r"(?<!\\)/", r"\/", spec.text) + "/", {}
    return "@inner", {"inner": spec.text}


def _with_named(lark: str, named: Mapping[str, str], param: str) -> GrammarSpec:
    if not named:
        return GrammarSpec("lark", lark, param)
    grammars = [{"name": "outer", "lark_grammar": lark}]
    grammars += [{"name": name, "lark_grammar": text} for name, text in named.items()]
    return GrammarSpec("llguidance", json.dumps({"grammars": grammars}), param)


def call_spec(rules: str, spec: GrammarSpec | None) -> GrammarSpec:
    """The grammar of an answer whose calls follow `rules`, or else, without calls, `spec`."""
    if spec is None:
        return GrammarSpec("lark", f"start: answer\n{rules}", "tools")
    body, named = _as_rule(spec)
    return _with_named(f"start: calls | plain\n{rules}\nplain: {body}", named, "tools")
