"""Prompts and conversations as token ids, without HTTP."""

import asyncio
import threading
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from kvweave.errors import RequestError
from kvweave.server.prompts import ChatPrompt, PromptReader, _common, _mentions
from kvweave.server.responses import TokenTexts
from support.serverkit import CONTEXT, TEMPLATE, toy_card, toy_tokenizer


@pytest.fixture
def reader():
    tokenizer = toy_tokenizer()
    return PromptReader(tokenizer, toy_card(tokenizer))


@pytest.fixture
def tokenized(reader, monkeypatch):
    """Which thread tokenised how many characters."""
    seen = []
    encode = reader._encode

    def watched(text, add_special_tokens):
        seen.append((len(text), threading.current_thread()))
        return encode(text, add_special_tokens)

    monkeypatch.setattr(reader, "_encode", watched)
    return seen


def read(reader, prompt):
    return asyncio.run(reader.read(prompt))


def test_long_texts_are_tokenised_off_the_loop_and_short_ones_on_it(reader, tokenized):
    assert len(read(reader, "x" * 9000)) == 9000
    assert len(read(reader, "x" * 90)) == 90
    (_, far), (_, near) = tokenized
    assert far is not threading.main_thread()
    assert near is threading.main_thread()


def test_a_text_that_cannot_fit_is_not_tokenised(reader, tokenized):
    with pytest.raises(RequestError, match="far longer"):
        read(reader, "x" * CONTEXT * 100)
    assert not tokenized


@pytest.mark.parametrize(
    ("template", "reads"),
    [
        (TEMPLATE, True),
        ("{% for message in messages %}{{ message.tools }}{% endfor %}", False),
        ("{% set tools = [] %}{{ tools }}", False),
        ("{% for m in messages %}{% if tools %}{% break %}{% endif %}{% endfor %}", True),
        ("{% generation %}{{ tools }}{% endgeneration %}", True),
    ],
)
def test_whether_a_template_knows_tools(template, reads):
    assert _mentions(template, "tools") is reads


def test_tokens_of_sentencepiece_keep_their_spaces_and_bytes():
    class Pieces:
        all_special_ids = [0]
        tokens = ["<s>", "\u2581Paris", "<0xE2>", "s", None]

        def get_vocab(self):
            return {token: at for at, token in enumerate(self.tokens[:4])}

        def convert_ids_to_tokens(self, token_id):
            return self.tokens[token_id]

    texts = TokenTexts(Pieces())
    assert [texts.of(token) for token in range(5)] == [
        ("<s>", b"<s>"),
        (" Paris", b" Paris"),
        ("bytes:\\xe2", b"\xe2"),
        ("s", b"s"),
        ("", b""),
    ]
    assert texts.width(0, shows_special=False) == 0
    assert texts.width(0, shows_special=True) == 3


@given(st.text("ab", max_size=9), st.text("ab", max_size=9), st.text("ab", max_size=9))
def test_the_common_beginning_of_two_texts(both, one, other):
    first, second = both + one, both + other
    same = _common(first, second)
    assert first[:same] == second[:same]
    assert first[same : same + 1] != second[same : same + 1] or first == second


@pytest.fixture
def beginning():
    """A reader whose tokenizer puts a token before every text, as Llama's and Mistral's do."""
    template = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    tokenizer = toy_tokenizer(template)
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    begin = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", begin)]
    )
    return PromptReader(tokenizer, toy_card(tokenizer)), begin


def test_a_prompt_never_begins_twice(beginning):
    reader, begin = beginning
    chat = ChatPrompt(messages=[{"role": "user", "content": "Hi"}])
    ids = asyncio.run(reader.conversation(chat)).ids
    assert ids.count(begin) == 1
    # A client that renders the conversation itself hits the same prefix.
    assert read(reader, reader.render(chat)) == ids
    assert asyncio.run(reader.conversation(replace(chat, add_special_tokens=True))).ids == ids
    plain = read(reader, "Hi")
    assert plain == (begin, *reader.encode_plain("Hi"))
    assert asyncio.run(reader.read("Hi", add_special_tokens=False)) == plain[1:]
    # Token ids, and a second one that the text spells out, stay as they are.
    assert read(reader, (begin, begin)) == (begin, begin)
    assert read(reader, "<|begin|><|begin|>x").count(begin) == 2


def test_a_conversation_tells_where_the_users_last_turn_begins(reader):
    def read(*turns):
        messages = [{"role": role, "content": text} for role, text in turns]
        return asyncio.run(reader.conversation(ChatPrompt(messages=messages)))

    opening = [("system", "Be brief."), ("user", "One?"), ("assistant", "Two.")]
    long = read(*opening, ("user", "Three?"))
    other = read(*opening, ("user", "Something else altogether?"))
    assert long.last_turn == other.last_turn > 20
    assert long.ids[: long.last_turn] == other.ids[: long.last_turn]
    assert reader.tokenizer.decode(long.ids[long.last_turn :]).count("Three?") == 1
    assert "Two." not in reader.tokenizer.decode(long.ids[long.last_turn :])
    # Whatever comes behind it is protected too; a first message is the whole prompt.
    assert read(*opening, ("user", "Three?"), ("tool", "4")).last_turn == long.last_turn
    assert read(("user", "One?")).last_turn == 0
