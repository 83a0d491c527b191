"""Made-up countries, solved problems and pairs of questions where benches look for real ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvweave_bench.quality import control


class Letters:
    """Directions by how often each letter occurs."""

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        counts = np.array(
            [[text.lower().count(chr(97 + at)) for at in range(26)] for text in texts], np.float32
        )
        return counts / np.linalg.norm(counts, axis=1, keepdims=True)


def keep_texts(cache: Path) -> None:
    """Put them into a cache folder, beside the manuals that are there."""
    rng = np.random.default_rng(5)

    def keep(name: str, texts: list[dict[str, object]]) -> None:
        kept = {"source": name, "origin": name, "licence": "test", "texts": texts}
        (cache / "texts" / f"{name}.json").write_text(json.dumps(kept))

    countries = []
    for number in range(40):
        name = f"Land{number}"
        facts = {
            "capital": f"Town{number}",
            "population": str(rng.integers(10**5, 10**8)),
            "area": str(rng.integers(10**3, 10**6)),
            "currencies": f"C{number:02}",
        }
        body = (
            f"The capital of {name} is {facts['capital']}. {name} has {facts['population']} "
            f"inhabitants. The area of {name} is {facts['area']} square kilometres. In {name} one "
            f"pays in {facts['currencies']}. The provinces of {name} are many."
        )
        countries.append({"title": name, "body": body, "facts": facts})
    keep("countries", countries)
    examples = [
        {"title": "e", "body": f"Example {answer} asks for a sum?", "facts": {"solution": answer}}
        for answer in ("6", "5", "39")
    ]
    keep(control.EXAMPLES, examples)
