"""Names and options of all benches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvweave.config.base import flag
from kvweave.errors import KvweaveError

BENCHES = {
    "cold-groups": "16 prompts of 392 tokens that share 384 nobody has computed, arriving together",
    "engine": "Prefill, decoding, appending against transformers; decoding together against alone",
    "peers": "Against llama.cpp and transformers with the same weights, in their best settings",
    "repeats": "Decoding with drafts from text that is there, against decoding without",
    "moved": "One document behind other wrappers, against the same prompts computed cold",
    "shapes": "Earlier text in other shapes, against an oracle of all shared runs of 32 tokens",
    "lookup": "Looking up prompts of 16,384 tokens among 8 million cached ones, on one core",
    "unrelated": "Short unrelated prompts: the throughput of fuzzy_match against radix",
    "salts": "What the clock tells one tenant of another's cache",
    "heal": "One client that pauses between moved prompts: first token with healing and without",
    "restart": "Prompts of a stored document after a restart, exact and moved, against cold ones",
    "grammar": "Answers under JSON schemas (SchemaStore's) against answers without",
    "kv-dtype": "Number types of KV: divergence from float32, exact and moved; memory; decoding",
    "shared": "Many askers of one moved document: pages and answers, read in place or copied",
    "paraphrase-gate": "Questions that mean the same, and hard negatives: which would be served",
    "semantic": "Unrelated prompts with pauses: first token with the provider semantic and without",
    "quality": "Answers from moved KV against the same model's cold answers",
    "agents": "What an agent's calls reuse of each other",
}
"""What each bench measures, by name, in the order in which all of them are run."""


def check_name(name: str) -> None:
    """KvweaveError naming the known benches if `name` is none."""
    if name not in BENCHES:
        raise KvweaveError(f"benches are {', '.join(BENCHES)}, not {name!r}")


def chosen_cells(bench: str, known: tuple[str, ...], cells: str | None) -> tuple[str, ...]:
    """What --cells names, or all of `known`; KvweaveError if it names anything else."""
    wanted = known if cells is None else tuple(cells.split(","))
    for name in wanted:
        if name not in known:
            raise KvweaveError(f"--cells of bench {bench} are {', '.join(known)}, not {name!r}")
    return wanted


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What every bench can be told; the command line is derived from it, like all flags."""

    model: str | None = flag(None, "Model to measure with; the packaged one without it.")
    quantization: str = flag(
        "auto",
        "What becomes of its weights, as in kvweave serve.",
        choices=("auto", "none", "int8", "int4"),
    )
    n: int | None = flag(None, "How many cases or rounds; the bench's own number without it.")
    seed: int = flag(0, "Chooses texts and orders; the same seed gives the same prompts.")
    quick: bool = flag(False, "A smoke test in seconds: small, few, and no figures to quote.")

    html: str | None = flag(None, "File for a page with plots (bench quality).")
    cells: str | None = flag(
        None,
        "Kinds of prompts, or figures, by commas; all without it (bench quality, peers, grammar).",
    )
    arms: str | None = flag(
        None, "What is compared, as in copy/0,zero-mask/0; all without it (bench quality)."
    )
    neighbour: bool | None = flag(
        None, "Measure beside a process that keeps one core busy (bench engine)."
    )

    SPECIAL: ClassVar[tuple[str, ...]] = ("html", "cells", "arms", "neighbour")
    """Options that only some benches take."""

    def problems(self) -> list[str]:
        found = []
        if self.n is not None and self.n < 1:
            found.append(f"--n must be above 0, not {self.n}")
        if self.seed < 0:
            found.append(f"--seed must not be negative, but is {self.seed}")
        return found
