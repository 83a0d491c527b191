"""Renders conversations through the chat template and tokenises prompts off the event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jinja2
from jinja2 import meta

from kvweave.errors import RequestError, UnsupportedModelError
from kvweave.reorder import tokens_within
from kvweave.server.fields import Prompt
from kvweave.server.model_card import ModelCard
from kvweave.server.tools import described as described_tools
from kvweave.server.tools import without_calls

PART_END = "\n"
"""Joins the parts of a message's content for templates that take text."""

# Tokenising so much takes a few milliseconds; more would delay other requests.
_OFF_LOOP_CHARS = 8192
_OFF_LOOP_IDS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """A conversation to render, whatever protocol it came by.

    A message is a mapping as chat templates read it: `role`, `content` (a text, or a tuple with the
    texts of its parts) and more, such as `tool_calls` whose arguments are objects.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[dict[str, Any]] | None = None
    documents: Sequence[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    """The template's other variables, as the client sets them."""
    add_generation_prompt: bool = True
    """Open the assistant's turn."""
    continue_final_message: bool = False
    """Leave the last message open, for the model to go on with it."""
    add_special_tokens: bool = False
    """Add the tokenizer's special tokens to those that the template writes."""


class Conversation(NamedTuple):
    """A conversation's token ids; from `last_turn` on they are the user's last message or later."""

    ids: tuple[int, ...]
    last_turn: int


class PromptReader:
    """Turns prompts of every kind into token ids that the engine may take.

    `tokenizer` is a transformers tokenizer. Raises UnsupportedModelError if its chat template drops
    what users write.
    """

    def __init__(self, tokenizer: Any, card: ModelCard, *, describe_tools: bool = True) -> None:
        self.tokenizer = tokenizer
        self.card = card
        self._describe_tools = describe_tools
        self._longest_token = max((len(token) for token in tokenizer.get_vocab()), default=1)
        # Arguments of apply_chat_template are not the client's to set; others reach the template.
        self._ours = inspect.signature(tokenizer.apply_chat_template).parameters.keys()
        self.templates = _template_texts(tokenizer)
        self._part_roles = frozenset(_roles_in_parts(tokenizer) if self.templates else ())
        """Roles whose content the template reads as a list of parts."""
        # The first call sets up truncation and padding (both off); later calls only read, from any
        # thread.
        tokenizer("", add_special_tokens=False)

    def reads(self, name: str) -> bool:
        """Whether the chat template reads the variable `name`."""
        return any(_mentions(text, name) for text in self.templates)

    async def read(
        self, prompt: Prompt, *, param: str = "prompt", add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        """Token ids of a text, with the special tokens that the tokenizer adds, or of ids."""
        if isinstance(prompt, str):
            return await self.encode(prompt, param=param, add_special_tokens=add_special_tokens)
        return self.known(prompt, param=param)

    async def conversation(self, chat: ChatPrompt) -> Conversation:
        """Token ids of a conversation, and where the last turn of the user begins."""
        text = self.render(chat)
        ids = await self.encode(text, param="messages", add_special_tokens=chat.add_special_tokens)
        begin = self._last_turn(chat, text)
        if begin == 0:
            return Conversation(ids, 0)
        turn = await self.encode(text[begin:], param="messages", add_special_tokens=False)
        at = len(ids) - len(turn)
        # If the turn's first characters share a token with the text before, the place is unknown.
        return Conversation(ids, at if ids[at:] == turn else 0)

    def _last_turn(self, chat: ChatPrompt, text: str) -> int:
        """Where the last message of the user begins in `text`, or before; 0 if unknown."""
        roles = [message["role"] for message in chat.messages]
        last = max((at for at, role in enumerate(roles) if role == "user"), default=0)
        if last == 0:
            return 0
        earlier = replace(
            chat,
            messages=chat.messages[:last],
            add_generation_prompt=False,
            continue_final_message=False,
        )
        try:
            before = self.render(earlier)
        except RequestError:  # not every template takes every beginning
            return 0
        return _common(text, before)

    async def encode(
        self, text: str, *, param: str, add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        """Tokenise `text`, in a thread when that takes long."""
        if len(text) > self.card.context_length * self._longest_token:
            raise RequestError(
                f"This model's maximum context length is {self.card.context_length} tokens. "
                f"However, {param} is far longer: it has {len(text)} characters",
                param=param,
                code="context_length_exceeded",
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RequestError(f"{param} holds half a surrogate pair", param=param) from None
        if len(text) > _OFF_LOOP_CHARS:
            return await asyncio.to_thread(self._encode, text, add_special_tokens)
        return self._encode(text, add_special_tokens)

    def spellings(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """How each word is usually tokenised: at a text's start, within it, and after a space."""
        found = dict.fromkeys(
            ids
            for word in words
            for ids in (
                self.encode_plain(word),
                tuple(tokens_within(self.encode_plain, word).tolist()),
                tuple(tokens_within(self.encode_plain, f" {word}").tolist()),
            )
        )
        return tuple(ids for ids in found if ids)

    def encode_plain(self, text: str) -> tuple[int, ...]:
        """Tokenise part of a text that `encode` took, without special tokens, on this thread."""
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        # verbose would warn of texts beyond the context, which are refused anyway.
        encoded = self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        ids = tuple(encoded["input_ids"])
        begin = self.tokenizer.bos_token_id
        # A text that a chat template wrote may begin with this token already.
        twice = add_special_tokens and begin is not None and ids[:2] == (begin, begin)
        return ids[1:] if twice else ids

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of known ids, in a thread when that takes long."""
        decode = partial(self.tokenizer.decode, ids, skip_special_tokens=skip_special_tokens)
        text: str = decode() if len(ids) < _OFF_LOOP_IDS else await asyncio.to_thread(decode)
        return text

    def known(self, ids: Iterable[int], *, param: str) -> tuple[int, ...]:
        """The same ids, once all of them are tokens of this model."""
        ids = tuple(ids)
        if ids and not (min(ids) >= 0 and max(ids) < self.card.vocab_size):
            raise RequestError(
                f"{param} holds token ids outside 0 to {self.card.vocab_size - 1}", param=param
            )
        return ids

    def render(self, chat: ChatPrompt) -> str:
        """A conversation as the model reads it, with its special tokens."""
        if self.tokenizer.chat_template is None:
            raise RequestError(
                "this model has no chat template: use /v1/completions, or serve it with "
                "--chat-template",
                param="messages",
            )
        if wrong := sorted(self._ours & chat.variables.keys()):
            raise RequestError(
                f"chat_template_kwargs may not set {', '.join(wrong)}",
                param="chat_template_kwargs",
            )
        described = bool(chat.tools) and self._describe_tools and not self.reads("tools")
        for name, value in (("tools", chat.tools), ("documents", chat.documents)):
            if value and not self.reads(name) and not (described and name == "tools"):
                raise RequestError(f"this model's chat template knows no {name}", param=name)
        if chat.continue_final_message and not chat.messages[-1].get("content"):
            raise RequestError(
                "the last message has no text to go on with", param="continue_final_message"
            )
        try:
            text: str = self.tokenizer.apply_chat_template(
                [self._for_template(message) for message in self._messages(chat, described)],
                tools=list(chat.tools) if chat.tools and not described else None,
                documents=list(chat.documents) if chat.documents else None,
                tokenize=False,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                **{**self._effort(chat.reasoning_effort), **chat.variables},
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, RecursionError) as failure:
            reason = str(failure) or type(failure).__name__
            raise RequestError(
                f"the model's chat template refuses these messages: {reason:.500}",
                param="messages",
            ) from failure
        return text

    def _messages(self, chat: ChatPrompt, described: bool) -> Sequence[Mapping[str, Any]]:
        """The messages, with tools, calls and results as text where the template knows none."""
        messages = chat.messages
        uses_tools = any(each.get("tool_calls") or each["role"] == "tool" for each in messages)
        if uses_tools and not any("tool_calls" in text for text in self.templates):
            messages = without_calls({**each, "content": _joined(each)} for each in messages)
        if described and chat.tools:
            text = described_tools(chat.tools)
            if messages[0]["role"] in ("system", "developer"):
                text = f"{_joined(messages[0])}\n\n{text}"
                return [{**messages[0], "content": text}, *messages[1:]]
            return [{"role": "system", "content": text}, *messages]
        return messages

    def _for_template(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message with its content as text or as parts, as the template reads this role's."""
        content, role = message.get("content") or "", message["role"]
        # Older templates would print or drop this role, the newer name of `system`.
        if role == "developer" and not any("developer" in text for text in self.templates):
            role = "system"
        if role in self._part_roles:
            parts = (content,) if isinstance(content, str) and content else content
            content = [{"type": "text", "text": text} for text in parts]
        else:
            content = _joined(message)
        return {**message, "role": role, "content": content}

    def _effort(self, effort: str | None) -> dict[str, Any]:
        """The template variables that say how much the model should reason."""
        if effort is None:
            return {}
        thinks = effort != "none"
        values = {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}
        known = {name: value for name, value in values.items() if self.reads(name)}
        if thinks and not known:
            raise RequestError(
                "this model's chat template knows no reasoning_effort", param="reasoning_effort"
            )
        return known


def _joined(message: Mapping[str, Any]) -> str:
    """The content of a message as one text."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else PART_END.join(content)


def _roles_in_parts(tokenizer: Any) -> Iterator[str]:
    """Roles whose content the chat template reads only as a list of parts, found by rendering.

    UnsupportedModelError if it drops what users write in either form.
    """
    mark = "Mark0of0content"
    forms: dict[str, Any] = {}
    """By role, a content in the form that is read."""
    for role, before in (
        ("user", ()),
        ("system", ()),
        ("assistant", ("user",)),
        ("tool", ("user", "assistant")),
    ):
        found = {}
        for kind, content in (("text", mark), ("parts", [{"type": "text", "text": mark}])):
            messages = [{"role": each, "content": forms[each]} for each in before]
            messages.append({"role": role, "content": content})
            if role == "system":
                messages.append({"role": "user", "content": forms["user"]})
            try:
                text = tokenizer.apply_chat_template(messages, tokenize=False)
            except Exception:  # templates may raise anything; a request will show what
                continue
            found[kind] = mark in text
        if role == "user" and found and not any(found.values()):
            raise UnsupportedModelError(
                "the chat template writes nothing of what a user says, neither as text nor as "
                "parts: serve the model with another one (--chat-template FILE)"
            )
        forms[role] = "x"
        if found.get("parts") and not found.get("text"):
            forms[role] = [{"type": "text", "text": "x"}]
            yield role


def _template_texts(tokenizer: Any) -> list[str]:
    """The chat template, or all of them where a model brings several by name."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        return list(template.values())
    return [template] if isinstance(template, str) else []


def _common(text: str, other: str) -> int:
    """The length of the common prefix, by bisection: texts may be long."""
    same, different = 0, min(len(text), len(other)) + 1
    while different - same > 1:
        half = (same + different) // 2
        if text[same:half] == other[same:half]:
            same = half
        else:
            different = half
    return same


@lru_cache(maxsize=64)
def _mentions(template: str, name: str) -> bool:
    """Whether a Jinja chat template reads the variable `name`."""
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return name in meta.find_undeclared_variables(environment.parse(template))
    except jinja2.TemplateSyntaxError:
        # transformers has tags of its own ({% generation %}), which plain Jinja cannot parse.
        return name in template
