"""Plans answers: the grammar that a request asks for, and the parser of its answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from kvweave.engine.types import GrammarSpec, SamplingParams
from kvweave.plugins import AUTO, NO_PARSER
from kvweave.server.grammars import behind_reasoning, call_grammar, call_spec
from kvweave.server.prompts import PromptReader
from kvweave.server.tool_parsers import make_tool_parser
from kvweave.server.tools import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    AnswerParser,
    AnswerPart,
    AnswerPlan,
    CallsOnly,
    JsonCalls,
    Reasoning,
    ReasoningPart,
    ToolChoice,
    WholeCalls,
    overlap,
)

NO_TOOLS = ToolChoice()
_TAIL = 32
"""Tokens of a prompt's end that say whether reasoning is open there."""
_BY_TEMPLATE = (
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm45"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("['type'] + '<｜tool▁sep｜>'", "deepseekv3"),
    ("<｜tool▁sep｜>", "deepseekv31"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_start|>", "pythonic"),
    ("<|python_tag|>", "llama3"),
    ("ipython", "llama3"),
)
"""What a chat template writes, and the family that does; the first match holds."""


class AnswerPlanner:
    """Chooses parsers for one model, once, and plans the answers of each request."""

    def __init__(
        self, reader: PromptReader, *, tool_call_parser: str = AUTO, reasoning_parser: str = AUTO
    ) -> None:
        """Names are those of `--tool-call-parser` and `--reasoning-parser`."""
        self._tokenizer = reader.tokenizer
        template = "\n".join(reader.templates)
        self._calls = _tool_form(tool_call_parser, template)
        self._reasoning = _reasoning_form(reasoning_parser, template)
        self._special: dict[str, int] = {
            str(token.content): number
            for number, token in reader.tokenizer.added_tokens_decoder.items()
            if token.special
        }

    def plan(
        self,
        prompt_ids: Sequence[int],
        *,
        choice: ToolChoice = NO_TOOLS,
        grammar: GrammarSpec | None = None,
        separate_reasoning: bool = True,
    ) -> AnswerPlan:
        """The plan of the answers to a conversation that ends in `prompt_ids`.

        `grammar` holds for answers that call no tool. Without `separate_reasoning` the reasoning
        stays in the text.
        """
        form = self._form(choice)
        if choice.tools and form is not None:
            grammar = self._with_calls(form, choice, grammar)
        reasoning = self._reasoning
        state = "none" if reasoning is None else self._state(reasoning, prompt_ids)
        if reasoning is not None and state != "none" and grammar is not None:
            opened = state == "opened"
            grammar = behind_reasoning(grammar, reasoning, opened=opened, special=self._special)
        split = reasoning if separate_reasoning and state != "none" else None
        make = partial(_parser, form, choice, split, state == "opened")
        return AnswerPlan(grammar, make, self._shows_special(form, choice, split))

    def _form(self, choice: ToolChoice) -> JsonCalls | WholeCalls | None:
        """How calls are written: where they are enforced, always as JSON."""
        if choice.enforced and not isinstance(self._calls, JsonCalls):
            return TOOL_PARSERS["json"]
        return self._calls

    def _with_calls(
        self, form: JsonCalls | WholeCalls, choice: ToolChoice, grammar: GrammarSpec | None
    ) -> GrammarSpec | None:
        strict = any(tool["function"].get("strict") for tool in choice.tools)
        constrained = choice.enforced or strict or not choice.parallel or grammar is not None
        if not constrained or not isinstance(form, JsonCalls):
            return grammar
        rules = call_grammar(
            form,
            choice.offered,
            enforced=choice.enforced or grammar is not None,
            parallel=choice.parallel and choice.named is None,
            special=self._special,
        )
        return call_spec(rules, None if choice.enforced else grammar)

    def _state(self, reasoning: Reasoning, prompt_ids: Sequence[int]) -> str:
        """Whether the answer begins inside the reasoning, before it, or behind it."""
        tail = self._tokenizer.decode(list(prompt_ids[-_TAIL:]), skip_special_tokens=False).rstrip()
        if tail.endswith(reasoning.end):
            return "none"
        return "opened" if reasoning.opened or tail.endswith(reasoning.begin) else "maybe"

    def _shows_special(
        self, form: JsonCalls | WholeCalls | None, choice: ToolChoice, split: Reasoning | None
    ) -> bool:
        marks = [split.begin, split.end] if split is not None else []
        if choice.tools and form is not None:
            marks += [form.begin, form.end, getattr(form, "optional_begin", "")]
        return any(mark in self._special for mark in marks)


def constrained(plan: AnswerPlan, params: SamplingParams) -> SamplingParams:
    """`params` with what the plan asks of the sampler and of the text."""
    if plan.grammar is None and not plan.shows_special:
        return params
    skip = params.skip_special_tokens and not plan.shows_special
    return replace(params, grammar=plan.grammar, skip_special_tokens=skip)


def _parser(
    form: JsonCalls | WholeCalls | None,
    choice: ToolChoice,
    split: Reasoning | None,
    opened: bool,
) -> AnswerParser:
    parser = AnswerParser()
    if choice.tools and form is not None:
        parser = make_tool_parser(form, {tool["function"]["name"] for tool in choice.offered})
        if choice.enforced:
            parser = CallsOnly(parser)
    return parser if split is None else ReasoningParser(split, opened=opened, then=parser)


def _tool_form(name: str, template: str) -> JsonCalls | WholeCalls | None:
    if name == NO_PARSER:
        return None
    if name == AUTO:
        name = next((family for mark, family in _BY_TEMPLATE if mark in template), "hermes")
    return TOOL_PARSERS[name]


def _reasoning_form(name: str, template: str) -> Reasoning | None:
    if name == NO_PARSER:
        return None
    if name != AUTO:
        return REASONING_PARSERS[name]
    known: Any = REASONING_PARSERS
    return next((known[each] for each in ("qwen3", "kimi") if known[each].end in template), None)


class ReasoningParser(AnswerParser):
    """Splits the reasoning off, and hands what follows to `then`."""

    def __init__(self, form: Reasoning, *, opened: bool, then: AnswerParser) -> None:
        """`opened`: the answer begins inside the reasoning."""
        self._form = form
        self._then = then
        self._held = ""
        self._state = "inside" if opened else "before"

    def feed(self, text: str) -> list[AnswerPart]:
        if self._state == "after":
            return self._then.feed(text)
        self._held += text
        if self._state == "before" and not self._begin():
            return []
        if self._state == "after":
            held, self._held = self._held, ""
            return self._then.feed(held)
        return self._inside()

    def finish(self) -> list[AnswerPart]:
        held, self._held = self._held, ""
        if self._state == "inside":
            return [*_reasoning(held.rstrip()), *self._then.finish()]
        return [*self._then.feed(held), *self._then.finish()]

    def _begin(self) -> bool:
        """Whether it is settled if the answer begins with reasoning."""
        bare, begin = self._held.lstrip(), self._form.begin
        if len(bare) < len(begin) and begin.startswith(bare):
            return False
        self._state = "after"
        if bare.startswith(begin):
            self._state, self._held = "inside", bare[len(begin) :]
        return True

    def _inside(self) -> list[AnswerPart]:
        # A model whose prompt opened its reasoning may open it once more.
        end = self._form.end
        at = self._held.find(end)
        if at < 0:
            keep = overlap(self._held, end)
            certain = self._held[: len(self._held) - keep].rstrip()
            self._held = self._held[len(certain) :]
            return _reasoning(certain)
        reasoning, rest = self._held[:at].rstrip(), self._held[at + len(end) :]
        self._held = ""
        self._then = _WithoutLeadingSpace(self._then)
        self._state = "after"
        return [*_reasoning(reasoning), *self._then.feed(rest)]


def _reasoning(text: str) -> list[AnswerPart]:
    return [ReasoningPart(text)] if text else []


class _WithoutLeadingSpace(AnswerParser):
    """The answer after reasoning: its first line breaks belong to neither."""

    def __init__(self, then: AnswerParser) -> None:
        self._then = then
        self._begun = False

    def feed(self, text: str) -> list[AnswerPart]:
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        return self._then.feed(text)

    def finish(self) -> list[AnswerPart]:
        return self._then.finish()
