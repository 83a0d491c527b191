"""Bindings of the kernels of quantised linear layers and of decoder layers built on them."""

from __future__ import annotations

import ctypes
import threading
import weakref
from typing import Any

_Pointer, _Int64, _Int32, _Float = (
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_int32,
    ctypes.c_float,
)


class Weight(ctypes.Structure):
    """A quantised weight; mirrors `quantized_weight` in linear.h."""

    _fields_ = [
        ("values", _Pointer),
        ("scales", _Pointer),
        ("bias", _Pointer),
        ("inputs", _Int64),
        ("outputs", _Int64),
        ("bits", _Int64),
    ]


class LinearCall(ctypes.Structure):
    """Products of one weight with rows; mirrors `linear_call` in linear.h."""

    _fields_ = [
        ("weight", Weight),
        ("norm", _Pointer),
        ("x", _Pointer),
        ("out", _Pointer),
        ("rows", _Int64),
        ("eps", _Float),
        ("threads", _Int32),
        ("level", _Int32),
    ]


class DecoderLayer(ctypes.Structure):
    """A decoder layer's weights; mirrors `decoder_layer` in linear.h."""

    _fields_ = [
        ("qkv", Weight),
        ("o", Weight),
        ("gate_up", Weight),
        ("down", Weight),
        ("input_norm", _Pointer),
        ("post_norm", _Pointer),
        ("q_norm", _Pointer),
        ("k_norm", _Pointer),
        ("heads", _Int64),
        ("kv_heads", _Int64),
        ("dim", _Int64),
        ("turned", _Int64),
        ("eps", _Float),
    ]


class DecoderCall(ctypes.Structure):
    """One pass's rows in one layer; mirrors `decoder_call` in linear.h."""

    _fields_ = [
        ("rows", _Int64),
        ("hidden", _Pointer),
        ("positions", _Pointer),
        ("cosines", _Pointer),
        ("sines", _Pointer),
        ("query", _Pointer),
        ("keys", _Pointer),
        ("values", _Pointer),
        ("slots", _Pointer),
        ("attention", _Pointer),
        ("threads", _Int32),
        ("level", _Int32),
        ("type", _Int32),
    ]


class LinearKernels:
    """The functions, each with the calling thread's own workspace."""

    def __init__(self, functions: ctypes.CDLL) -> None:
        functions.kvweave_linear_sizes.restype = _Int64
        sizeof = ctypes.sizeof
        expected = sizeof(LinearCall) << 40 | sizeof(DecoderLayer) << 20 | sizeof(DecoderCall)
        if functions.kvweave_linear_sizes() != expected:
            raise OSError("it was built from other sources than these; install kvweave again")
        functions.kvweave_linear_open.restype = _Pointer
        functions.kvweave_linear_close.argtypes = [_Pointer]
        functions.kvweave_linear_close.restype = None
        functions.kvweave_linear.argtypes = [ctypes.POINTER(LinearCall), _Pointer]
        for function in (
            functions.kvweave_before_attention,
            functions.kvweave_after_attention,
        ):
            function.argtypes = [
                ctypes.POINTER(DecoderLayer),
                ctypes.POINTER(DecoderCall),
                _Pointer,
            ]
        self._functions = functions
        self._here = threading.local()

    def multiply(self, call: LinearCall) -> None:
        """Raises MemoryError if there is no room for intermediate results, as do the others."""
        self._check(self._functions.kvweave_linear(call, self._workspace()))

    def before_attention(self, layer: DecoderLayer, call: DecoderCall) -> None:
        """Compute the rows' queries, keys and values."""
        self._check(self._functions.kvweave_before_attention(layer, call, self._workspace()))

    def after_attention(self, layer: DecoderLayer, call: DecoderCall) -> None:
        """Compute the rest of the layer, in place in `hidden`."""
        self._check(self._functions.kvweave_after_attention(layer, call, self._workspace()))

    def _workspace(self) -> Any:
        try:
            return self._here.workspace.address
        except AttributeError:
            self._here.workspace = _Workspace(self._functions)
            return self._here.workspace.address

    @staticmethod
    def _check(result: int) -> None:
        if result:
            raise MemoryError("no memory for a linear layer's intermediate results")


class _Workspace:
    def __init__(self, functions: ctypes.CDLL) -> None:
        self.address = functions.kvweave_linear_open()
        weakref.finalize(self, functions.kvweave_linear_close, self.address)
