"""Weights of 4 or 8 bits: their layout, how they are made, and the modules that hold them.

A weight is `scale * q + offset`, with a scale and an offset for each 32 inputs of an output, as in
llama.cpp's formats. Rows are quantised to 16 bits when they are multiplied, 32 numbers at a time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from kvweave import kernels
from kvweave.kernels.linear import LinearCall, Weight

GROUP = 32
"""Inputs that share a scale."""
TILE = 16
"""Outputs that are stored together."""
_OFFSET_8 = 128
"""An 8-bit q is unsigned; its offset is always -128 scales, and is not stored."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A weight (outputs, inputs) in the layout of kernels/linear.h."""

    values: torch.Tensor
    """uint8 (tiles, groups, 64 * bits)"""
    scales: torch.Tensor
    """float16 (tiles, groups, 16), with 4 bits (tiles, groups, 32): scales, then offsets."""
    outputs: int

    @property
    def bits(self) -> int:
        return self.values.shape[2] // 64

    @property
    def inputs(self) -> int:
        return self.values.shape[1] * GROUP

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    @classmethod
    def of(cls, weight: torch.Tensor, bits: int) -> QuantizedWeight:
        """Quantise `weight` (outputs, inputs); inputs are a multiple of 32.

        With 8 bits the largest number of a group becomes 127 or -127. With 4 bits the smallest and
        the largest become 0 and 15, or the largest by size 0 and zero 8, whichever is nearer.
        """
        outputs, inputs = weight.shape
        groups = weight.detach().float().reshape(outputs, inputs // GROUP, GROUP)
        if bits == 8:
            scale = _float16(groups.abs().amax(2) / 127)
            q = (_divide(groups, scale).round().clamp(-127, 127) + _OFFSET_8).to(torch.uint8)
            return cls._packed(q, scale[:, :, None])
        candidates = []
        low, high = groups.aminmax(dim=2)
        candidates.append((_float16((high - low) / 15), _float16(low)))
        extreme = torch.where(high > -low, high, low)
        candidates.append((_float16(extreme / -8), _float16(extreme)))
        best: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        for scale, offset in candidates:
            q = _divide(groups - offset[:, :, None], scale).round().clamp(0, 15)
            error = (q * scale[:, :, None] + offset[:, :, None] - groups).abs().sum(2)
            numbers = torch.stack((scale, offset), dim=2)
            if best is not None:
                nearer = best[2] <= error
                q = torch.where(nearer[:, :, None], best[0], q)
                numbers = torch.where(nearer[:, :, None], best[1], numbers)
                error = torch.minimum(best[2], error)
            best = q, numbers, error
        assert best is not None
        return cls._packed(best[0].to(torch.uint8), best[1])

    @classmethod
    def _packed(cls, q: torch.Tensor, numbers: torch.Tensor) -> QuantizedWeight:
        """From q uint8 (outputs, groups, 32), and (outputs, groups, 1 or 2): scale, offset."""
        outputs, groups, _ = q.shape
        missing = -outputs % TILE
        q = functional.pad(q, (0, 0, 0, 0, 0, missing))
        numbers = functional.pad(numbers, (0, 0, 0, 0, 0, missing))
        tiles = q.view(-1, TILE, groups, 8, 4).permute(0, 2, 3, 1, 4)
        if numbers.shape[2] == 2:
            tiles = tiles[:, :, :4] | tiles[:, :, 4:] << 4
        values = tiles.reshape(len(tiles), groups, -1).contiguous()
        scales = numbers.view(-1, TILE, groups, numbers.shape[2]).permute(0, 2, 3, 1)
        return cls(values, scales.reshape(len(tiles), groups, -1).half().contiguous(), outputs)

    def dequantize(self) -> torch.Tensor:
        """float32 (outputs, inputs)"""
        return self._rows(self.values, self.scales)[: self.outputs]

    def rows(self, at: torch.Tensor) -> torch.Tensor:
        """float32 (len(at), inputs): some outputs' weights."""
        tile, lane = at // TILE, at % TILE
        bits, groups = self.bits, self.values.shape[1]
        values = self.values.view(-1, groups, bits, TILE, 4)[tile, :, :, lane]
        numbers = self.scales.view(len(self.scales), groups, -1, TILE)[tile, :, :, lane]
        return self._numbers(values, numbers.float())

    def _rows(self, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        tiles, groups, _ = values.shape
        q = values.view(tiles, groups, self.bits, TILE, 4).permute(0, 3, 1, 2, 4)
        numbers = scales.view(tiles, groups, -1, TILE).permute(0, 3, 1, 2).float()
        return self._numbers(q.flatten(0, 1), numbers.flatten(0, 1))

    def _numbers(self, q: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """From q (outputs, groups, bits, 4) and numbers (outputs, groups, 1 or 2)."""
        scale = numbers[:, :, :1]
        if self.bits == 4:
            q = torch.cat((q & 15, q >> 4), dim=2)
            found = q.flatten(2).float() * scale + numbers[:, :, 1:]
        else:
            found = (q.flatten(2).float() - _OFFSET_8) * scale
        return found.flatten(1)

    def split(self, outputs: Sequence[int]) -> list[QuantizedWeight]:
        """Views of consecutive outputs, all but the last a multiple of 16."""
        parts, first = [], 0
        for count in outputs:
            tiles = slice(first // TILE, -(-(first + count) // TILE))
            parts.append(QuantizedWeight(self.values[tiles], self.scales[tiles], count))
            first += count
        return parts

    @staticmethod
    def join(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
        """One weight with all outputs; None where the parts do not go together."""
        alike = {(part.bits, part.inputs) for part in parts}
        if len(alike) > 1 or any(part.outputs % TILE for part in parts):
            return None
        return QuantizedWeight(
            torch.cat([part.values for part in parts]),
            torch.cat([part.scales for part in parts]),
            sum(part.outputs for part in parts),
        )

    def struct(self, bias: torch.Tensor | None = None) -> Weight:
        """For the kernels; valid as long as this object and `bias` (float32) live."""
        return Weight(
            self.values.data_ptr(),
            self.scales.data_ptr(),
            None if bias is None else bias.data_ptr(),
            self.inputs,
            self.outputs,
            self.bits,
        )


def _float16(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.half().float()


def _divide(groups: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """groups / scale, and 0 where the scale is."""
    return groups * torch.where(scale == 0, 0, 1 / scale)[:, :, None]


def quantize_rows(x: torch.Tensor) -> torch.Tensor:
    """What the kernels make of rows before they multiply: 16 bits for each 32 numbers."""
    groups = x.reshape(*x.shape[:-1], -1, GROUP)
    top = groups.abs().amax(-1, keepdim=True)
    factor = torch.where(top > _SMALLEST, _LARGEST / top, 0)
    return ((groups * factor).round() * (top / _LARGEST)).flatten(-2)


_LARGEST, _SMALLEST = 32767, 1e-34
"""The largest integer of a row; numbers below the other count as zero (see `quantize_short`)."""


class QuantizedLinear(nn.Module):
    """`nn.Linear` with a quantised weight. Rows of other types are computed as float32."""

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.quantized = weight
        self.bias = None if bias is None else bias.detach().float().contiguous()
        self.in_features, self.out_features = weight.inputs, weight.outputs

    @property
    def weight(self) -> torch.Tensor:
        """The float32 weight, for model code that asks for it."""
        return self.quantized.dequantize()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return multiply(x, self.quantized, self.bias).to(x.dtype)


class QuantizedEmbedding(nn.Module):
    """`nn.Embedding` over a quantised weight, often the output layer's own."""

    def __init__(self, weight: QuantizedWeight, dtype: torch.dtype) -> None:
        super().__init__()
        self.quantized, self.dtype = weight, dtype
        self.num_embeddings, self.embedding_dim = weight.outputs, weight.inputs

    @property
    def weight(self) -> torch.Tensor:
        """The whole table, for model code that asks for it."""
        return self.quantized.dequantize().to(self.dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.quantized.rows(ids.flatten()).to(self.dtype)
        return found.view(*ids.shape, self.embedding_dim)


def multiply(
    x: torch.Tensor,
    weight: QuantizedWeight,
    bias: torch.Tensor | None = None,
    *,
    level: int | None = None,
) -> torch.Tensor:
    """x (.., inputs) times the weight: float32 (.., outputs).

    `level` chooses an instruction set of the kernels; -1 is plain torch.
    """
    library = kernels.load()
    rows = x.reshape(-1, weight.inputs).float().contiguous()
    if library is None or level == -1:
        product = functional.linear(quantize_rows(rows), weight.dequantize(), bias)
        return product.view(*x.shape[:-1], weight.outputs)
    out = torch.empty(len(rows), weight.outputs)
    library.linear.multiply(
        LinearCall(
            weight.struct(bias),
            None,
            rows.data_ptr(),
            out.data_ptr(),
            len(rows),
            0,
            torch.get_num_threads(),
            library.level if level is None else level,
        )
    )
    return out.view(*x.shape[:-1], weight.outputs)


def quantize_model(model: nn.Module, bits: int | None) -> int:
    """Quantise the linear layers of a decoder on a CPU in place; returns how many.

    `bits` None: only weights that 4 or 8 bits hold without loss, as dequantised ones are. Otherwise
    all whose inputs are a multiple of 32, the output layer to 8 bits. A tied embedding follows.
    """
    head = model.get_output_embeddings()  # type: ignore[operator]
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    tied = head is not None and getattr(embedding, "weight", None) is head.weight
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear or child.in_features % GROUP:
                continue
            if bits is None:
                weight = _without_loss(child.weight)
            else:
                weight = QuantizedWeight.of(child.weight, 8 if child is head else bits)
            if weight is not None:
                # One at a time: a model is never there twice.
                setattr(parent, name, QuantizedLinear(weight, child.bias))
                count += 1
    new_head = model.get_output_embeddings()  # type: ignore[operator]
    if tied and type(embedding) is nn.Embedding and isinstance(new_head, QuantizedLinear):
        shared = QuantizedEmbedding(new_head.quantized, embedding.weight.dtype)
        model.set_input_embeddings(shared)  # type: ignore[operator]
    return count


def _without_loss(weight: torch.Tensor) -> QuantizedWeight | None:
    """The weight in 4 or 8 bits if these hold its very numbers."""
    for bits in (4, 8):
        for some in (weight[:TILE], weight):
            found = QuantizedWeight.of(some, bits)
            if not torch.equal(found.dequantize(), some.float()):
                break
        else:
            return found
    return None


def bits_of(model: nn.Module) -> tuple[int, ...]:
    """The numbers of bits of the model's quantised weights, ascending; empty without any."""
    linears = (each for each in model.modules() if isinstance(each, QuantizedLinear))
    return tuple(sorted({each.quantized.bits for each in linears}))


_FILE, _OUTPUTS = "weights.safetensors", "outputs"


def save_quantized(model: nn.Module, folder: Path) -> None:
    """Write the tensors of a model that `quantize_model` changed into `folder`."""
    tensors, outputs = {}, {}
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            outputs[name] = module.out_features
            tensors[f"{name}.values"] = module.quantized.values
            tensors[f"{name}.scales"] = module.quantized.scales
            if module.bias is not None:
                tensors[f"{name}.bias"] = module.bias
    # Buffers that a model computes when it is built are among them: here it is built without data.
    tensors |= dict(model.named_parameters()) | dict(model.named_buffers())
    save_file(tensors, folder / _FILE, {_OUTPUTS: json.dumps(outputs)})


def load_quantized(model: nn.Module, folder: Path) -> None:
    """Fill a model that was built on the meta device with what `save_quantized` wrote.

    Raises KeyError or ValueError if it has other parts.
    """
    with safe_open(folder / _FILE, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        outputs: dict[str, int] = json.loads(file.metadata()[_OUTPUTS])
    for name, count in outputs.items():
        values, scales = (tensors.pop(f"{name}.{kind}") for kind in ("values", "scales"))
        linear = QuantizedLinear(
            QuantizedWeight(values, scales, count), tensors.pop(f"{name}.bias", None)
        )
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, linear)
    for name, tensor in tensors.items():
        owner, _, leaf = name.rpartition(".")
        place = model.get_submodule(owner)
        if leaf in place._parameters:
            place._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        else:
            place._buffers[leaf] = tensor
    head = model.get_output_embeddings()  # type: ignore[operator]
    embedding = model.get_input_embeddings()  # type: ignore[operator]
    if embedding.weight.is_meta:
        shared = QuantizedEmbedding(head.quantized, embedding.weight.dtype)
        model.set_input_embeddings(shared)  # type: ignore[operator]
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ValueError(f"{name} is missing")
