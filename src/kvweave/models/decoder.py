"""Decoders of the Llama family, run layer by layer by the kernels instead of by transformers.

A model's own code starts some forty torch operations per layer. For one token that takes longer
than the arithmetic. `find_decoder` recognises models whose layers are, by their parts, those of
Llama, Mistral, Qwen2 or Qwen3; `models.compatibility` proves that the logits are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from kvweave import kernels
from kvweave.kernels.linear import DecoderCall, DecoderLayer, LinearCall
from kvweave.kv.layout import LayerLayout
from kvweave.models import hooks
from kvweave.models.quantized import QuantizedEmbedding, QuantizedLinear, QuantizedWeight

_FIRST_TABLE = 4096
"""Positions that the first table of rotary angles holds."""


class DecoderAttention(Protocol):
    """What a pass does in each layer between queries, keys and values and the output layer."""

    @property
    def positions(self) -> torch.Tensor:
        """int64 (T): of the tokens that the pass now holds."""

    def targets(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Keys and values of the pool (by slot), float32 or bfloat16, and the tokens' slots.

        They are to be written there. None: `attend` takes them.
        """

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        fresh: tuple[torch.Tensor, torch.Tensor] | None,
        scale: float,
    ) -> torch.Tensor:
        """Output (T, heads, dim) for query (T, heads, dim); `fresh` keys and values of kv heads.

        Without `fresh` they are where `targets` said.
        """


class Decoder:
    """A decoder whose linear layers are all quantised. Threads may share it."""

    def __init__(self, model: PreTrainedModel, layers: Sequence[_Layer]) -> None:
        base: Any = model.base_model
        library = kernels.load()
        assert library is not None
        self._kernels, self._level = library.linear, library.level
        self._embedding = base.embed_tokens
        self._rotary = base.rotary_emb
        self._layers = tuple(layers)
        self._norm, self._eps = _norm(base.norm)
        self._head: QuantizedLinear = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._tables = self._angles(_FIRST_TABLE)

    def run(
        self,
        ids: torch.Tensor,
        longest: int,
        logits_at: torch.Tensor,
        attention: DecoderAttention,
        pruning: hooks.TokenPruning | None = None,
    ) -> torch.Tensor:
        """Logits float32 (len(logits_at), vocabulary) of the tokens `ids` (T).

        All positions are below `longest`. `pruning` may drop tokens before any layer.
        """
        hidden: torch.Tensor = self._embedding(ids)
        cosines, sines = self._table(longest)
        call = DecoderCall(
            cosines=cosines.data_ptr(),
            sines=sines.data_ptr(),
            threads=torch.get_num_threads(),
            level=self._level,
        )
        rows = -1
        query = hidden
        for index, layer in enumerate(self._layers):
            hooks.interrupt_if_wanted()
            if pruning is not None:
                hidden = pruning(hidden[None])[0]
            if len(hidden) != rows:  # in the first layer, and where tokens drop out
                rows = call.rows = len(hidden)
                positions = attention.positions
                call.hidden, call.positions = hidden.data_ptr(), positions.data_ptr()
                query = torch.empty(rows, layer.heads, layer.dim)
                call.query = query.data_ptr()
            targets = attention.targets(index)
            fresh: tuple[torch.Tensor, torch.Tensor] | None = None
            if targets is None:
                both = torch.empty(2, rows, layer.kv_heads, layer.dim)
                keys, values = fresh = both[0], both[1]
                call.slots, call.type = None, kernels.NUMBER_TYPES[torch.float32]
            else:
                keys, values, slots = targets
                call.slots, call.type = slots.data_ptr(), kernels.NUMBER_TYPES[keys.dtype]
            call.keys, call.values = keys.data_ptr(), values.data_ptr()
            self._kernels.before_attention(layer.struct, call)
            found = attention.attend(index, query, fresh, layer.scale)
            call.attention = found.data_ptr()
            self._kernels.after_attention(layer.struct, call)
        return self._logits(hidden[logits_at])

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(hidden), self._head.out_features)
        self._kernels.multiply(
            LinearCall(
                self._head.quantized.struct(self._head.bias),
                self._norm.data_ptr(),
                hidden.data_ptr(),
                out.data_ptr(),
                len(hidden),
                self._eps,
                torch.get_num_threads(),
                self._level,
            )
        )
        return out

    def _table(self, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        tables = self._tables
        if longest > len(tables[0]):
            tables = self._tables = self._angles(1 << (longest - 1).bit_length())
        return tables

    @torch.inference_mode()
    def _angles(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines (count, turned / 2) of the model's own rotary module."""
        angles = self._rotary(torch.empty(0), torch.arange(count)[None])
        cosines, sines = (each[0, :, : each.shape[2] // 2].contiguous() for each in angles)
        return cosines, sines


class _Layer:
    """One layer: a struct for the kernels, and the tensors that it points to."""

    def __init__(self, layer: Any, layout: LayerLayout) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self._kept: list[Any] = []
        self.dim, self.kv_heads = layout.key_dim, layout.num_kv_heads
        self.heads = attention.q_proj.out_features // self.dim
        self.scale = float(attention.scaling)
        assert layout.rotary is not None
        self.turned = 2 * len(layout.rotary.inv_freq)
        input_norm, eps = _norm(layer.input_layernorm)
        norms = [input_norm, _norm(layer.post_attention_layernorm)[0]]
        norms += [
            _norm(getattr(attention, name))[0]
            for name in _HEAD_NORMS
            if name in _children(attention)
        ]
        self._kept += norms
        addresses = [norm.data_ptr() for norm in norms] + [None, None]
        self.struct = DecoderLayer(
            self._joined(attention, _QKV),
            self._joined(attention, ("o_proj",)),
            self._joined(mlp, ("gate_proj", "up_proj")),
            self._joined(mlp, ("down_proj",)),
            *addresses[:4],
            self.heads,
            self.kv_heads,
            self.dim,
            self.turned,
            eps,
        )

    def _joined(self, owner: Any, names: Sequence[str]) -> Any:
        """The struct of one weight for several linear layers, which become views of it."""
        parts: list[QuantizedLinear] = [getattr(owner, name) for name in names]
        whole = QuantizedWeight.join([part.quantized for part in parts])
        assert whole is not None
        if len(parts) > 1:
            outputs = [part.out_features for part in parts]
            for part, view in zip(parts, whole.split(outputs), strict=True):
                part.quantized = view
        biases = [
            torch.zeros(part.out_features) if part.bias is None else part.bias for part in parts
        ]
        bias = None if all(part.bias is None for part in parts) else torch.cat(biases)
        self._kept += [whole, bias]
        return whole.struct(bias)


_QKV = ("q_proj", "k_proj", "v_proj")
_HEAD_NORMS = ("q_norm", "k_norm")
_LAYER = {"input_layernorm", "post_attention_layernorm", "self_attn", "mlp"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def find_decoder(model: PreTrainedModel, layouts: Sequence[LayerLayout]) -> Decoder | None:
    """A Decoder for `model`, or None if it has other parts. Whether it is right is not checked."""
    base: Any = model.base_model
    parts = {"embed_tokens", "layers", "norm", "rotary_emb"}
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if kernels.load() is None or _children(base) != parts or type(head) is not QuantizedLinear:
        return None
    if not isinstance(base.embed_tokens, (nn.Embedding, QuantizedEmbedding)):
        return None
    if len(layouts) != len(base.layers) or not _is_norm(base.norm):
        return None
    if model.dtype != torch.float32 or not all(map(_is_llama, base.layers, layouts)):
        return None
    return Decoder(model, [_Layer(*pair) for pair in zip(base.layers, layouts, strict=True)])


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _is_llama(layer: nn.Module, layout: LayerLayout) -> bool:
    if _children(layer) != _LAYER or _children(layer.mlp) != _MLP:  # type: ignore[arg-type]
        return False
    attention, mlp = layer.self_attn, layer.mlp
    norms = _children(attention) - {*_QKV, "o_proj"}  # type: ignore[arg-type]
    if norms not in (set(), set(_HEAD_NORMS)) or not hasattr(attention, "scaling"):
        return False
    named: list[tuple[Any, tuple[str, ...]]] = [
        (attention, _QKV),
        (attention, ("o_proj",)),
        (mlp, ("gate_proj", "up_proj")),
        (mlp, ("down_proj",)),
    ]
    linears = [[getattr(owner, name) for name in names] for owner, names in named]
    rotary = layout.rotary
    return (
        all(type(one) is QuantizedLinear for some in linears for one in some)
        and all(_joins(some) for some in linears)
        and all(_is_norm(getattr(attention, name)) for name in norms)
        and _is_norm(layer.input_layernorm)  # type: ignore[arg-type]
        and _is_norm(layer.post_attention_layernorm)  # type: ignore[arg-type]
        and type(mlp.act_fn).__name__  # type: ignore[union-attr]
        in ("SiLU", "SiLUActivation")
        and linears[0][0].out_features % layout.key_dim == 0
        and layout.key_dim == layout.value_dim
        and rotary is not None
        and not rotary.interleaved
        and rotary.offset == 0
    )


def _joins(parts: Sequence[QuantizedLinear]) -> bool:
    weights = [part.quantized for part in parts]
    alike = {(weight.bits, weight.inputs) for weight in weights}
    return len(parts) == 1 or (len(alike) == 1 and not any(one.outputs % 16 for one in weights))


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RMSNorm") and _children(module) == set()


def _norm(module: Any) -> tuple[torch.Tensor, float]:
    eps = getattr(module, "variance_epsilon", None)
    return module.weight.detach().float().contiguous(), float(module.eps if eps is None else eps)
