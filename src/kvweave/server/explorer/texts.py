"""Token ids to the pieces of text that a page shows, or to nothing at all."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from kvweave.server.token_texts import TokenTexts


def pieces(texts: TokenTexts, ids: Iterable[int]) -> list[str]:
    """One text per token, together the whole text: a character belongs to the token that ends it.

    Bytes that make no character become replacement characters.
    """
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    found = [decoder.decode(texts.of(token)[1]) for token in ids]
    if found:
        found[-1] += decoder.decode(b"", final=True)
    return found
