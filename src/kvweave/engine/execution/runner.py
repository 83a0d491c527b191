"""Runs a model over one packed batch, its attention reading and writing the paged pool."""

from __future__ import annotations

import numpy as np
import torch

from kvweave import kernels
from kvweave.engine.attention.base import (
    AttentionBackend,
    AttentionBatch,
    ForwardBatch,
    LayerCall,
    RecomputeRequest,
    SharedSegments,
)
from kvweave.engine.execution.selective_recompute import (
    QuestionAttention,
    RecomputeSelector,
    TokenPruning,
    question_rows,
)
from kvweave.kv.tensors import KVTensors
from kvweave.models import hooks
from kvweave.models.load import LoadedModel


class ModelRunner:
    """One model, one pool, one attention backend. For one thread at a time.

    Several runners may share a model, each with a pool of its own.
    """

    def __init__(self, loaded: LoadedModel, kv: KVTensors, backend: AttentionBackend) -> None:
        self.loaded = loaded
        self.kv = kv
        self.backend = backend
        self._calls: dict[int, LayerCall] = {}
        self._attention: AttentionBatch
        self._question: QuestionAttention | None = None
        self._pruning: TokenPruning | None = None

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Compute the tokens, keep their KV; logits float32 (len(logits_at), vocabulary)."""
        with torch.inference_mode(), hooks.attention(self._attend):
            if batch.recompute is None:
                return self._run(batch)
            return self._run_selecting(batch, batch.recompute)

    def _run_selecting(self, batch: ForwardBatch, recompute: RecomputeRequest) -> torch.Tensor:
        """Measure the attention of the question first where a strategy needs it, then select."""
        rows = question_rows(batch, recompute)
        if rows:
            self._question = QuestionAttention(batch, recompute, rows, self.kv)
        try:
            if self._question is not None:
                self._run(self._question.batch)
            selector = RecomputeSelector(batch, recompute, self._question, len(self.kv.layouts))
        finally:
            self._question = None
        return self._run(batch, selector)

    def _run(self, batch: ForwardBatch, selector: RecomputeSelector | None = None) -> torch.Tensor:
        if selector is not None and len(selector.kept) < batch.tokens:
            batch = batch.only(selector.kept.numpy())
        if not batch.tokens:  # a chunk inside a span, of which nothing is recomputed
            return torch.zeros((0, self.loaded.vocab_size), device=self.loaded.device)
        self._begin(self._on_device(batch))
        logits_at = self._tensor(batch.logits_at)
        if selector is not None and selector.stops:
            self._pruning = TokenPruning(selector, self._attention, logits_at, self._begin)
        ids, decoder = self._tensor(batch.token_ids), self.loaded.decoder
        try:
            if decoder is not None:
                longest = self._attention.longest
                return decoder.run(ids, longest, logits_at, self, self._pruning)
            with hooks.token_pruning(self._pruning):
                output = self.loaded.model(
                    input_ids=ids[None],
                    position_ids=self._attention.positions[None],
                    use_cache=False,
                    logits_to_keep=logits_at,
                )
        finally:
            self._pruning = None
        logits: torch.Tensor = output.logits[0]
        return logits.float()

    @property
    def positions(self) -> torch.Tensor:
        """See models.decoder.DecoderAttention."""
        return self._attention.positions

    def targets(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """See models.decoder.DecoderAttention."""
        if self._pruning is not None or self.kv.dtype not in kernels.FLOATS:
            return None
        return self.kv.keys[layer], self.kv.values[layer], self._attention.slots

    def _begin(self, attention: AttentionBatch) -> None:
        self._attention = attention
        self.backend.begin(attention)

    def _on_device(self, batch: ForwardBatch) -> AttentionBatch:
        return AttentionBatch(
            positions=self._tensor(batch.positions),
            slots=self._tensor(batch.slots),
            query_start=self._tensor(batch.query_start),
            pages=self._tensor(batch.pages),
            page_start=self._tensor(batch.page_start),
            page_size=batch.page_size,
            rows=batch.rows,
            tokens=batch.tokens,
            longest=int(batch.positions.max()) + 1,
            shared=None if batch.shared is None else SharedSegments.make(batch.shared),
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.loaded.device, non_blocking=True)

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """The attention function of every layer, as transformers calls it (see models.hooks)."""
        layer: int = module.layer_idx  # type: ignore[assignment]
        scale = query.shape[3] ** -0.5 if scaling is None else float(scaling)
        fresh = (key[0].transpose(0, 1), value[0].transpose(0, 1))
        # Models compute rotated queries in the memory order (tokens, heads, dim): no copy here.
        queries = query[0].transpose(0, 1).contiguous()
        return self.attend(layer, queries, fresh, scale, softcap, s_aux)[None], None

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        fresh: tuple[torch.Tensor, torch.Tensor] | None,
        scale: float,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See models.decoder.DecoderAttention."""
        call = self._calls.get(layer)
        if call is None:
            # A layer's scale, softcap and sinks are the model's constants: noted once.
            if sinks is not None:
                sinks = sinks.detach().float().contiguous()
            call = LayerCall(layer, scale, self.kv.layouts[layer].window, softcap, sinks)
            self._calls[layer] = call
        if fresh is not None:
            slots = self._attention.slots
            if self._pruning is not None:
                self._pruning.observe(layer, *fresh, slots, self.kv)
            self.kv.write(layer, slots, *fresh)
        if self._question is not None:
            self._question.see(query, self.kv, call)
        return self.backend.attend(query, self.kv, call)
