"""From what clients send to token ids: chat templates, and tokenising off the event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jinja2
from jinja2 import meta

from kvweave.errors import RequestError
from kvweave.server.fields import Prompt
from kvweave.server.model_card import ModelCard
from kvweave.server.protocol import ChatMessage

# So many take a few milliseconds; beyond, other requests would notice.
_OFF_LOOP_CHARS = 8192
_OFF_LOOP_IDS = 2048


class Conversation(NamedTuple):
    """A conversation's token ids; from `last_turn` on they are the user's last message or later."""

    ids: tuple[int, ...]
    last_turn: int


class PromptReader:
    """Turns prompts of every kind into token ids that the engine may take.

    `tokenizer` is a transformers tokenizer.
    """

    def __init__(self, tokenizer: Any, card: ModelCard) -> None:
        self.tokenizer = tokenizer
        self.card = card
        self._longest_token = max((len(token) for token in tokenizer.get_vocab()), default=1)
        # What apply_chat_template takes itself is not the client's to set; what is left over goes
        # to the template.
        self._ours = inspect.signature(tokenizer.apply_chat_template).parameters.keys()
        self.takes_tools = _mentions(tokenizer.chat_template, "tools")
        # The first call sets up truncation and padding (both off) in the tokenizer; after it, calls
        # from several threads only read.
        tokenizer("", add_special_tokens=False)

    async def read(self, prompt: Prompt, *, param: str = "prompt") -> tuple[int, ...]:
        """Token ids of a text, with the special tokens that the tokenizer adds, or of ids."""
        if isinstance(prompt, str):
            return await self.encode(prompt, param=param)
        return self.known(prompt, param=param)

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[dict[str, Any]] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a conversation, ready for the assistant's turn."""
        return (await self.conversation(messages, tools, options)).ids

    async def conversation(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[dict[str, Any]] | None = None,
        options: dict[str, Any] | None = None,
    ) -> Conversation:
        """As `chat`, and where the last turn of the user begins."""
        if tools and not self.takes_tools:
            raise RequestError("this model's chat template knows no tools", param="tools")
        text = self.render(messages, tools, options or {})
        # The template has written the special tokens already.
        ids = await self.encode(text, param="messages", add_special_tokens=False)
        begin = self._last_turn(messages, tools, options or {}, text)
        if begin == 0:
            return Conversation(ids, 0)
        turn = await self.encode(text[begin:], param="messages", add_special_tokens=False)
        at = len(ids) - len(turn)
        # Where the turn's first characters share a token with what precedes, nobody can tell.
        return Conversation(ids, at if ids[at:] == turn else 0)

    def _last_turn(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[dict[str, Any]] | None,
        options: dict[str, Any],
        text: str,
    ) -> int:
        """Where the last message of the user begins in `text`, or before; 0 if none can tell."""
        last = max((at for at, each in enumerate(messages) if each.role == "user"), default=0)
        if last == 0:
            return 0
        try:
            before = self.render(messages[:last], tools, options, answering=False)
        except RequestError:  # not every template takes every beginning
            return 0
        return _common(text, before)

    async def encode(
        self, text: str, *, param: str, add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        """Tokenise `text`, in a thread when that takes long."""
        if len(text) > self.card.context_length * self._longest_token:
            raise RequestError(
                f"{param} is far longer than this model's context, which holds "
                f"{self.card.context_length} tokens",
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

    def encode_plain(self, text: str) -> tuple[int, ...]:
        """Tokenise part of a text that `encode` took, without special tokens, on this thread."""
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, add_special_tokens: bool) -> tuple[int, ...]:
        # verbose would warn of texts beyond the context, which are refused here anyway.
        encoded = self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
        return tuple(encoded["input_ids"])

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

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[dict[str, Any]] | None,
        options: dict[str, Any],
        answering: bool = True,
    ) -> str:
        """A conversation as the model reads it, special tokens and all."""
        if self.tokenizer.chat_template is None:
            raise RequestError(
                "this model has no chat template: use /v1/completions, or serve it with "
                "--chat-template",
                param="messages",
            )
        if wrong := sorted(self._ours & options.keys()):
            raise RequestError(
                f"chat_template_kwargs may not set {', '.join(wrong)}",
                param="chat_template_kwargs",
            )
        try:
            text: str = self.tokenizer.apply_chat_template(
                [message.as_said() for message in messages],
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=answering,
                **options,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, RecursionError) as failure:
            reason = str(failure) or type(failure).__name__
            raise RequestError(
                f"the model's chat template refuses these messages: {reason}", param="messages"
            ) from failure
        return text


def _common(text: str, other: str) -> int:
    """The length of the common beginning: halves are compared whole, since texts may be long."""
    same, different = 0, min(len(text), len(other)) + 1
    while different - same > 1:
        half = (same + different) // 2
        if text[same:half] == other[same:half]:
            same = half
        else:
            different = half
    return same


def _mentions(template: Any, name: str) -> bool:
    """Whether a Jinja chat template reads the variable `name`."""
    if not isinstance(template, str):
        return False
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    try:
        return name in meta.find_undeclared_variables(environment.parse(template))
    except jinja2.TemplateSyntaxError:
        # transformers has tags of its own ({% generation %}), which plain Jinja cannot parse.
        return name in template
