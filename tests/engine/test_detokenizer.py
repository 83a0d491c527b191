"""Text that grows token by token: the same as decoded at once, and never broken on the way."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from kvweave.engine.output import BROKEN, Detokenizer

TEXTS = [
    "The quick brown fox, isn't it? It's 3.14 o'clock.\n\n\tTabs  and   spaces.",
    "Größe, naïve café, señor. Zażółć gęślą jaźń.",
    "日本語のテキストと漢字。中文字符也在這裡。한국어 문장입니다.",
    "Emoji: 😀👩‍👩‍👧‍👦🏳️‍🌈🇩🇪 and math ∑∫√∞ ≠ ≤ 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",  # noqa: RUF001
    "עברית العربية ไทย हिन्दी",
]


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS[:2], trainer)
    return tokenizer


@pytest.fixture(scope="module")
def sentence_piece() -> Tokenizer:
    """Spaces at the beginning of words, unknown characters as bytes, as Llama 2 has it."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted({"▁" if c == " " else c for c in TEXTS[0] + TEXTS[1] if c not in "\n\t"})
    words = ["▁The", "▁quick", "▁brown", "▁fox", "▁isn", "▁and", "▁▁", "▁▁▁"]
    vocabulary = {piece: i for i, piece in enumerate([*pieces, *letters])}
    merges = []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                vocabulary[word[:end]] = len(vocabulary)
                merges.append((word[: end - 1], word[end - 1 : end]))
    model = models.BPE(
        vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def stream(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(lambda window: tokenizer.decode(window), prompt)
    return [*(detokenizer.add(token) for token in ids), detokenizer.finish()]


@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_make_the_whole_and_none_is_broken(kind, text, request):
    tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode(text).ids
    for cut in range(0, len(ids), 5):
        pieces = stream(tokenizer, ids[:cut], ids[cut:])
        # The prompt may end within a character, which then belongs to the answer.
        ends = range(cut, max(-1, cut - 4), -1)
        before = next(t for t in (tokenizer.decode(ids[:end]) for end in ends) if BROKEN not in t)
        assert before + "".join(pieces) == tokenizer.decode(ids)
        assert BROKEN not in "".join(pieces)


@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])
def test_a_character_appears_with_its_last_token_and_not_later(kind, request):
    tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode("日").ids
    pieces = stream(tokenizer, tokenizer.encode("a").ids, ids)
    assert len(ids) >= 3
    assert "".join(pieces[: len(ids) - 1]).strip() == ""
    assert pieces[len(ids) - 1] == "日"


@pytest.mark.parametrize("seed", range(30))
def test_incremental_decoding_equals_decoding_at_once(byte_level, seed):
    """Models that talk nonsense produce bytes that are no characters, too."""
    rng = random.Random(seed)
    size = byte_level.get_vocab_size()
    nonsense = [rng.randrange(size) for _ in range(60)]
    bytes_only = [rng.randrange(256) for _ in range(60)]
    for ids in (nonsense, bytes_only):
        assert "".join(stream(byte_level, [], ids)) == byte_level.decode(ids)


def test_invalid_bytes_are_emitted_eventually(byte_level):
    """And their window stays short, though nothing ever completes."""
    (first, *_) = byte_level.encode("日").ids
    windows = []

    def decode(window):
        windows.append(len(window))
        return byte_level.decode(window)

    detokenizer = Detokenizer(decode, [])
    pieces = [detokenizer.add(first) for _ in range(300)]
    assert len("".join(pieces)) > 280
    assert "".join(pieces) + detokenizer.finish() == byte_level.decode([first] * 300)
    assert max(windows) < 25


@pytest.mark.parametrize("kind", ["byte_level", "sentence_piece"])
def test_the_work_per_token_does_not_grow(kind, request):
    tokenizer = request.getfixturevalue(kind)
    decoded = []

    def decode(window):
        decoded.append(len(window))
        return tokenizer.decode(window)

    ids = tokenizer.encode(" ".join(TEXTS * 6)).ids
    detokenizer = Detokenizer(decode, ids[:50])
    text = "".join(detokenizer.add(token) for token in ids[50:]) + detokenizer.finish()
    assert tokenizer.decode(ids).endswith(text)
    assert max(decoded) < 40
    assert sum(decoded) < 8 * len(ids)


def test_skipped_tokens_do_not_break_their_neighbours(sentence_piece):
    tokenizer = Tokenizer.from_str(sentence_piece.to_str())
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    end = tokenizer.token_to_id("<end>")
    words = tokenizer.encode(" The quick brown").ids
    ids = [words[0], end, *words[1:], end]
    shown = Detokenizer(lambda w: tokenizer.decode(w, skip_special_tokens=False), words)
    hidden = Detokenizer(lambda w: tokenizer.decode(w, skip_special_tokens=False), words, {end})
    assert "".join(map(shown.add, ids)).count("<end>") == 2
    assert "".join(map(hidden.add, ids)) == " The quick brown"


def test_a_model_that_says_the_replacement_character_may(byte_level):
    ids = byte_level.encode(f"a{BROKEN}b{BROKEN}").ids
    assert "".join(stream(byte_level, [], ids)) == f"a{BROKEN}b{BROKEN}"
