"""Who else has a say about other words: a verifier chosen by name, and asked with a time limit.

Facts are compared before. A verifier reads the two texts once more and may only object; whatever
else it does (raise, come late, never come back) counts as an objection, and costs nothing but that
paraphrase.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeAlias, cast

from kvweave.config import FuzzyConfig
from kvweave.fuzzy.facts import Verifier
from kvweave.fuzzy.guard import LateError, Worker
from kvweave.plugins import NO_VERIFIER, VERIFIERS

_log = logging.getLogger(__name__)

VerifierFactory: TypeAlias = Callable[[FuzzyConfig], Verifier]
"""What packages offer under a name in the entry point group `kvweave.verifiers`."""

_REMEMBERED = 2048
_MOST_FAILURES = 3


def create_verifier(config: FuzzyConfig) -> Verifier | None:
    """The chosen verifier, if any; ConfigError if there is none of the name, or it fails."""
    name = config.verifier
    return None if name == NO_VERIFIER else cast(Verifier, VERIFIERS.make(name, config))


class VerifierWorker:
    """A verifier on a thread of its own. What it said is remembered, even if it came too late.

    One that fails several times in a row is not asked again, and nothing passes any more.
    """

    def __init__(self, verifier: Verifier) -> None:
        self._verifier = verifier
        self._worker = Worker("kvweave verifier")
        self._known: dict[tuple[str, str], str | None] = {}
        self._failures = 0

    def objection(self, donor: str, recipient: str, until: float) -> tuple[str, str] | None:
        """Its objection, as a kind and a sentence; waits till `until` (time.perf_counter)."""
        try:
            reason = self._said(donor, recipient, until)
        except LateError:
            return "late", "the verifier had not answered in time"
        except Exception as error:
            return "failed", f"the verifier failed: {error!r}"
        return None if reason is None else ("vetoed", str(reason))

    def _said(self, donor: str, recipient: str, until: float) -> str | None:
        if (donor, recipient) in self._known:
            return self._known[donor, recipient]
        if self._failures >= _MOST_FAILURES:
            raise RuntimeError("it is not asked any more")
        left = max(0.0, until - time.perf_counter())
        return self._worker.run(lambda: self._ask(donor, recipient), left)

    def _ask(self, donor: str, recipient: str) -> str | None:
        """On the worker's thread, the only one that writes."""
        try:
            reason = self._verifier(donor, recipient)
        except Exception:
            self._failures += 1
            if self._failures == _MOST_FAILURES:
                what = "failed so often that it is not asked again: nothing passes it any more"
                _log.warning("the verifier of paraphrases %s", what, exc_info=True)
            raise
        self._failures = 0
        self._known[donor, recipient] = reason
        if len(self._known) > _REMEMBERED:
            del self._known[next(iter(self._known))]
        return reason
