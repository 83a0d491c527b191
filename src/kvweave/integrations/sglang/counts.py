"""What the plug-in lent, and what it could not lend, counted and shown among SGLang's metrics."""

from __future__ import annotations

from typing import Any

NAMES = {
    "lent_requests": "Requests that were lent moved text; again if they were retracted meanwhile.",
    "lent_runs": "Runs of tokens that were lent.",
    "lent_tokens": "Tokens that were lent.",
    "gone": "Donors that SGLang had evicted when they were to be used.",
    "no_room": "Runs that were computed because the pool had no room for them.",
    "failed": "Runs that were computed because copying them failed.",
}


class Counts:
    """By the names of `NAMES`, since the start."""

    def __init__(self) -> None:
        self._values = dict.fromkeys(NAMES, 0)
        self._exported: dict[str, Any] = {}

    def __getitem__(self, name: str) -> int:
        return self._values[name]

    def add(self, name: str, by: int = 1) -> None:
        """Count `by` more."""
        self._values[name] += by
        if name in self._exported:
            self._exported[name].inc(by)

    def as_dict(self) -> dict[str, int]:
        """A copy."""
        return dict(self._values)

    def export(self, model_name: str) -> None:
        """From now on, SGLang's /metrics shows them: `kvweave:fuzzy_lent_tokens_total` and so on.

        SGLang gathers the metrics of its processes through files that prometheus_client writes.
        """
        from prometheus_client import Counter

        for name, meaning in NAMES.items():
            counter = Counter(f"kvweave:fuzzy_{name}", meaning, ["model_name"])
            self._exported[name] = counter.labels(model_name)
