"""Word lists are written as running text, which is how one reads and checks them."""

from __future__ import annotations


def words(text: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(text.split())


def lines(text: str) -> list[list[str]]:
    """The words of each line of a text."""
    return [line.split() for line in text.strip().splitlines()]


def table(text: str) -> dict[str, str]:
    """A line `meaning: phrase, phrase` for each meaning; from every phrase to its meaning."""
    found: dict[str, str] = {}
    for line in text.strip().splitlines():
        meaning, phrases = line.split(": ")
        found |= dict.fromkeys(phrases.split(", "), meaning)
    return found
