"""Hooks into transformers models: the attention function and the arguments of decoder layers.

transformers calls any registered attention function. Ours is registered once under one name and
calls the function that the running thread has set with `attention`, so several engines can share
one model, each on its own thread. For a name without a mask function transformers builds no mask,
as a packed batch needs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from kvweave.errors import ForwardInterruptedError, KvweaveError

AttentionFunction: TypeAlias = Callable[..., tuple[torch.Tensor, None]]
"""(module, query, key, value, mask, **options) -> (output, None), as transformers calls it.

query (1, heads, T, key_dim), key and value (1, kv heads, T, dim), output (1, T, heads, value_dim).
"""

SERVING = "kvweave"
INSPECTION = "kvweave-inspection"
"""Like SERVING, but each layer gets a mask: one number, see `described_window`."""

UNKNOWN_MASK = -1
_FAR = 1 << 20
"""A position beyond all windows and chunks of models."""


TokenPruning: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
"""Maps each tensor argument of a decoder layer to its replacement."""


class _Here(threading.local):
    function: AttentionFunction | None = None
    wanted: Callable[[], bool] | None = None
    token_pruning: TokenPruning | None = None


_here = _Here()


@contextmanager
def attention(function: AttentionFunction) -> Iterator[None]:
    """Let `function` compute attention in all of this thread's forward passes within the block."""
    outer, _here.function = _here.function, function
    try:
        yield
    finally:
        _here.function = outer


@contextmanager
def interruptible(wanted: Callable[[], bool]) -> Iterator[None]:
    """Let this thread's forward passes within the block end as soon as `wanted()`.

    They raise ForwardInterruptedError. It is asked before every layer's attention.
    """
    outer, _here.wanted = _here.wanted, wanted
    try:
        yield
    finally:
        _here.wanted = outer


def interrupt_if_wanted() -> None:
    """Raise ForwardInterruptedError if this thread is wanted, see `interruptible`."""
    if _here.wanted is not None and _here.wanted():
        raise ForwardInterruptedError("the thread that runs this forward pass is wanted elsewhere")


@contextmanager
def token_pruning(function: TokenPruning | None) -> Iterator[None]:
    """Let `function` change the arguments of this thread's decoder layers within the block.

    Of models that `prepare` has seen. It is called for every tensor, also for those in tuples,
    lists and dicts.
    """
    outer, _here.token_pruning = _here.token_pruning, function
    try:
        yield
    finally:
        _here.token_pruning = outer


def prepare(model: PreTrainedModel) -> None:
    """Let `token_pruning` reach the model's decoder layers: whatever holds one attention each.

    Hooks stay, since other threads may be running the model when one wants them; a layer that
    prunes nothing pays a microsecond for that.
    """
    for layer in _decoder_layers(model):
        layer.register_forward_pre_hook(_prune, with_kwargs=True)


def _decoder_layers(model: PreTrainedModel) -> Iterator[torch.nn.Module]:
    for stack in model.modules():
        if isinstance(stack, torch.nn.ModuleList):
            for layer in stack:
                if any(hasattr(part, "layer_idx") for part in layer.modules()):
                    yield layer


def _prune(
    _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    function = _here.token_pruning
    if function is None:
        return None
    return _each_tensor(args, function), _each_tensor(kwargs, function)


def _each_tensor(value: Any, function: TokenPruning) -> Any:
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: _each_tensor(item, function) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_each_tensor(item, function) for item in value)
    return value


@contextmanager
def implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Let `model` use another of transformers' attention implementations within the block."""
    outer = model.config.get_text_config()._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(outer)


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Models pass the mask by its place or by its name."""
    if _here.function is None:
        raise KvweaveError("a model that kvweave serves was run outside a forward pass of kvweave")
    interrupt_if_wanted()
    return _here.function(module, query, key, value, attention_mask, **options)


def _describe_mask(*, mask_function: Callable[..., Any], **_: Any) -> torch.Tensor:
    """A mask for INSPECTION: one number that survives whatever slicing a model does to masks."""
    try:
        window = described_window(mask_function)
    except IndexError:  # it looks up something about each token of this one prompt
        window = UNKNOWN_MASK
    return torch.full((1, 1, 1, 1), window)


def described_window(visible: Callable[..., Any]) -> int:
    """The positions that transformers' mask function lets a query see.

    0: all earlier positions. w > 0: the last w, itself included. UNKNOWN_MASK: anything else, such
    as later positions, or chunks.
    """
    span = torch.arange(_FAR + 2)
    zero = torch.zeros((), dtype=torch.long)
    windows = set()
    for at in (_FAR - 1, _FAR):
        seen = torch.as_tensor(visible(zero, zero, torch.tensor(at), span)).expand(len(span))
        window = int(seen.sum())
        if window > at + 1 or not bool(seen[at - window + 1 : at + 1].all()):
            return UNKNOWN_MASK
        windows.add(0 if window == at + 1 else window)
    return windows.pop() if len(windows) == 1 else UNKNOWN_MASK


AttentionInterface.register(SERVING, _attend)
AttentionInterface.register(INSPECTION, _attend)
AttentionMaskInterface.register(INSPECTION, _describe_mask)
