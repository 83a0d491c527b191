"""Settings of KV reuse beyond the prefix: moved text, paraphrases, self-check and healing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvweave.config.base import flag, flag_name, positive, share


@dataclass(frozen=True, slots=True, kw_only=True)
class FuzzyConfig:
    """Settings of the backends that reuse KV beyond the prefix."""

    PREFIX: ClassVar[str] = "fuzzy_"

    provider: str = flag(
        "spans", "The provider that proposes text to reuse.", choices="fuzzy-providers"
    )
    min_span: int = flag(32, "Shortest run of tokens worth moving.")
    min_suffix: int = flag(8, "Tokens at the end of every prompt that are always computed.")
    min_reuse_ratio: float = flag(
        0.1, "Least share of a prompt that moved spans must serve; below it, none is moved."
    )
    sink_tokens: int = flag(4, "First tokens of prompts that are never moved.")
    stride: int = flag(16, "Tokens between two anchors of the span index.")
    max_share: float = flag(
        1.0, "Most of a prompt that moved spans may serve; 0: exact reuse only."
    )
    refresh: float | None = flag(
        None,
        "Share of moved tokens that is computed again: 0 none, 1 all; without it, some where a "
        "prompt holds three moved spans or more, and none elsewhere.",
    )
    refresh_strategy: str = flag(
        "mix", "How the tokens to compute again are chosen.", choices="fuzzy-refresh-strategies"
    )
    time_budget_ms: float = flag(
        50.0, "Time limit of a provider; a request whose provider is late reuses the prefix only."
    )
    refresh_tokens: int = flag(
        16,
        "First tokens of every moved span that are computed again where the text before them "
        "changed; 0: none.",
    )
    session_donors: bool = flag(
        True,
        "Requests with one prompt_cache_key lend each other what they computed behind moved text.",
    )
    session_seconds: float = flag(
        3600.0, "Time after which a session that sends nothing is forgotten."
    )
    session_generations: int = flag(
        0, "Most times that KV may be computed behind KV of the session's own; 0: no bound."
    )
    self_check: str = flag(
        "on",
        "Measure once per model whether moved text changes its answers; if it does, reuse exactly "
        "(on) or do not start (require).",
        choices=("on", "off", "require"),
    )
    self_check_max_kl: float = flag(
        0.1, "Largest difference of the self-check's next tokens from cold ones: mean KL, in nats."
    )
    self_check_max_decoys: int = flag(
        0, "Most answers of the self-check that may state the fact of a nearly equal text."
    )
    semantic_embedder: str = flag(
        "minilm",
        "The semantic provider's embedding model; each needs its package.",
        choices="embedders",
    )
    semantic_threshold: float = flag(0.8, "Least cosine similarity, up to 1, of a paraphrase.")
    semantic_min_span: int = flag(4, "Shortest run of tokens that is served as a paraphrase.")
    semantic_max_share: float = flag(
        0.25, "Most of a prompt that may be served as paraphrases; 0: none."
    )
    semantic_budget_ms: float = flag(
        25.0,
        "Time that a prompt may wait for its embedding, if a paraphrase is possible; a verifier "
        "gets the same time again.",
    )
    verifier: str = flag(
        "none", "A second check of paraphrases, which may refuse them.", choices="verifiers"
    )
    verifier_model: str | None = flag(
        None, "Folder or Hugging Face name of the model of the verifier nli."
    )
    semantic_index_tokens: int = flag(
        131_072, "Tokens whose embeddings are kept; the oldest are dropped first."
    )
    share_span: int = flag(
        32,
        "Moved text of at least so many tokens is read where the donor has it; shorter text, or "
        "with 0 all of it, is copied.",
    )
    heal: bool = flag(
        False, "When idle, compute approximately served prompts exactly, for later requests."
    )
    heal_queue: int = flag(256, "Prompts that may wait for that; the oldest are dropped first.")

    def problems(self) -> list[str]:
        found = positive(
            self,
            "min_span",
            "min_suffix",
            "stride",
            "time_budget_ms",
            "heal_queue",
        )
        found += positive(self, "semantic_budget_ms", "semantic_index_tokens")
        found += positive(self, "semantic_min_span", "session_seconds")
        found += share(self, "min_reuse_ratio", "max_share", "refresh")
        found += share(self, "semantic_threshold", "semantic_max_share")
        for name in (
            "self_check_max_kl",
            "self_check_max_decoys",
            "refresh_tokens",
            "session_generations",
            "share_span",
        ):
            if not getattr(self, name) >= 0:
                found.append(
                    f"{flag_name(self, name)} must be 0 or more, not {getattr(self, name)}"
                )
        if self.sink_tokens < 0:
            found.append(f"--fuzzy-sink-tokens counts tokens, so not {self.sink_tokens}")
        if self.min_span < 2 * self.stride - 1:
            found.append(
                f"--fuzzy-min-span {self.min_span} is below 2 x --fuzzy-stride - 1 = "
                f"{2 * self.stride - 1}, the shortest run that is sure to be found: "
                "raise the one or lower the other"
            )
        return found
