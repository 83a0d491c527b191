"""Stop strings, found across the borders of tokens and never shown, not even in part."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Watches a text that grows, by the automaton of Knuth, Morris and Pratt: O(1) per character.

    What may turn out to be the beginning of a stop string is held back until it is clear.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        """`include`: the stop string itself belongs to the text."""
        self._stops = [_Automaton(text) for text in stops]
        self._include = include
        self._held = ""
        self.matched: str | None = None
        """The stop string that ended the text."""

    def feed(self, text: str) -> str:
        """What may be shown, given that the text goes on with `text`; after a match, no more."""
        if not self._stops:
            return text
        text, start = self._held + text, len(self._held)
        for at in range(start, len(text)):
            ended = [stop for stop in self._stops if stop.advance(text[at])]
            if ended:
                self.matched = max((stop.text for stop in ended), key=len)
                self._held = ""
                cut = at + 1
                return text[:cut] if self._include else text[: cut - len(self.matched)]
        shown = len(text) - max(stop.progress for stop in self._stops)
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """What was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """`progress`: how many characters of `text` the stream ends with."""

    __slots__ = ("_fallback", "progress", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.progress = 0
        # _fallback[i]: the longest proper prefix of text[:i] that is also its suffix.
        self._fallback = fallback = [0, 0]
        length = 0
        for character in text[1:]:
            while length and text[length] != character:
                length = fallback[length]
            length += text[length] == character
            fallback.append(length)

    def advance(self, character: str) -> bool:
        """Read one character; True once the whole text has just been read."""
        while self.progress and self.text[self.progress] != character:
            self.progress = self._fallback[self.progress]
        self.progress += self.text[self.progress] == character
        return self.progress == len(self.text)
