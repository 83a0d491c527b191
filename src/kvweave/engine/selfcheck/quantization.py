"""Compares a model's logits with those of the same model without quantised weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn import functional

from kvweave.config import ModelConfig
from kvweave.engine.attention import get_backend
from kvweave.engine.execution.batch import ForwardBatch
from kvweave.engine.execution.runner import ModelRunner
from kvweave.engine.selfcheck.cases import build_cases
from kvweave.engine.selfcheck.measure import kl_divergence
from kvweave.kv.pool import IntArray
from kvweave.kv.tensors import KVTensors
from kvweave.models.cache import Progress
from kvweave.models.load import LoadedModel, load_model

_TEXTS, _LENGTH = 6, 384


@dataclass(frozen=True, slots=True)
class QuantizationCost:
    """Over `tokens` next tokens: KL(float || quantised) in nats, perplexities, equal top tokens."""

    tokens: int
    kl_mean: float
    kl_worst: float
    perplexity: float
    float_perplexity: float
    same_top: float

    def __str__(self) -> str:
        return (
            f"Quantised weights, against float ones over {self.tokens:,} tokens: KL mean "
            f"{self.kl_mean:.5f}, worst {self.kl_worst:.4f}; perplexity {self.perplexity:.3f} "
            f"(float {self.float_perplexity:.3f}); same top token {self.same_top:.1%}"
        )


def quantization_cost(
    config: ModelConfig, loaded: LoadedModel, progress: Progress
) -> QuantizationCost | None:
    """None for a model without quantised weights. Loads the model a second time."""
    if not loaded.bits:
        return None
    plain = load_model(replace(config, quantization="none", dtype="float32"), progress)
    texts = [case.recipient[:_LENGTH] for case in build_cases(loaded.tokenizer)[:_TEXTS]]
    divergences, losses = [], []
    same = total = 0
    for text in texts:
        exact, found = _logits(plain, text), _logits(loaded, text)
        divergences.append(kl_divergence(exact, found))
        following = torch.from_numpy(text[1:].astype(np.int64))
        pair = (functional.cross_entropy(each[:-1], following) for each in (exact, found))
        losses.append(torch.stack(list(pair)))
        same += int((exact.argmax(-1) == found.argmax(-1)).sum())
        total += len(text)
    kl = torch.cat(divergences)
    float_perplexity, perplexity = torch.stack(losses).mean(0).exp().tolist()
    return QuantizationCost(
        total, float(kl.mean()), float(kl.max()), perplexity, float_perplexity, same / total
    )


def _logits(loaded: LoadedModel, text: IntArray) -> torch.Tensor:
    count = len(text)
    kv = KVTensors(loaded.layouts, count, 1, dtype=loaded.dtype, device=loaded.device)
    runner = ModelRunner(loaded, kv, get_backend("auto", loaded.device))
    at, pages = np.arange(count), np.arange(count, dtype=np.int32)
    ends = np.array([0, count], np.int32)
    batch = ForwardBatch(
        token_ids=text.astype(np.int64),
        positions=at,
        slots=at,
        query_start=ends,
        pages=pages,
        page_start=ends,
        page_size=1,
        logits_at=at,
    )
    return runner.forward(batch)
