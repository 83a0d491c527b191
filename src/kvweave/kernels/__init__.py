"""Bindings of the compiled CPU kernels: attention over the paged pool, KV moved and copied, int8.

`load()` returns the library that setup.py builds, or None; callers then use plain torch.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import logging
from functools import cache
from pathlib import Path

import torch

from kvweave.kernels.linear import LinearKernels

logger = logging.getLogger(__name__)

LIBRARY = Path(__file__).with_name("_native.so")
"""What setup.py builds."""


class AttentionCall(ctypes.Structure):
    """One layer's attention for one batch; mirrors `attention_call` in attention.h."""

    _fields_ = [
        ("rows", ctypes.c_int64),
        ("page_size", ctypes.c_int64),
        ("positions", ctypes.c_void_p),
        ("query_start", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("page_start", ctypes.c_void_p),
        ("segment_start", ctypes.c_void_p),
        ("segments", ctypes.c_void_p),
        ("shared_pages", ctypes.c_void_p),
        ("turns", ctypes.c_void_p),
        ("offset", ctypes.c_int64),
        ("turned", ctypes.c_int64),
        ("interleaved", ctypes.c_int32),
        ("query", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("key_scales", ctypes.c_void_p),
        ("value_scales", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("key_dim", ctypes.c_int64),
        ("value_dim", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("query_type", ctypes.c_int32),
        ("type", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("level", ctypes.c_int32),
    ]


class MoveLayer(ctypes.Structure):
    """One layer's pool and rotation; mirrors `move_layer` in move.h."""

    _fields_ = [
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("key_scales", ctypes.c_void_p),
        ("value_scales", ctypes.c_void_p),
        ("heads", ctypes.c_int64),
        ("key_dim", ctypes.c_int64),
        ("value_dim", ctypes.c_int64),
        ("offset", ctypes.c_int64),
        ("turned", ctypes.c_int64),
        ("turns", ctypes.c_void_p),
        ("interleaved", ctypes.c_int32),
        ("zeroed", ctypes.c_int32),
    ]


class MoveCall(ctypes.Structure):
    """Runs of tokens to move in all layers; mirrors `move_call` in move.h."""

    _fields_ = [
        ("layers", ctypes.c_int64),
        ("runs", ctypes.c_int64),
        ("layer", ctypes.c_void_p),
        ("run_start", ctypes.c_void_p),
        ("sources", ctypes.c_void_p),
        ("targets", ctypes.c_void_p),
        ("type", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("level", ctypes.c_int32),
    ]


class PageCopy(ctypes.Structure):
    """Whole pages to copy out of a pool or into it; mirrors `page_copy` in move.h."""

    _fields_ = [
        ("tensors", ctypes.c_int64),
        ("pages", ctypes.c_int64),
        ("tensor", ctypes.c_void_p),
        ("bytes", ctypes.c_void_p),
        ("page", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("into_pool", ctypes.c_int32),
    ]


class QuantizeCall(ctypes.Structure):
    """Fresh keys or values that become int8; mirrors `quantize_call` in numbers.h."""

    _fields_ = [
        ("tokens", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
        ("numbers", ctypes.c_void_p),
        ("pool", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("type", ctypes.c_int32),
        ("level", ctypes.c_int32),
    ]


NUMBER_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""The kernels' names of number types, see numbers.h."""
FLOATS = (torch.float32, torch.bfloat16)
KEY_GROUP = 32
"""Numbers of an int8 key that share a scale, see numbers.h."""


class Library:
    """The library's functions, typed. `level` is the best instruction set here (see level.c)."""

    def __init__(self, path: Path) -> None:
        _share_openmp()
        self.path = path
        functions = ctypes.CDLL(str(path))
        functions.kvweave_sizes.restype = ctypes.c_int64
        sizes = functions.kvweave_sizes()
        sizeof = ctypes.sizeof
        expected = 0
        for each in (AttentionCall, QuantizeCall, PageCopy, MoveCall, MoveLayer):
            expected = expected << 12 | sizeof(each)
        if sizes != expected:
            raise OSError("it was built from other sources than these; install kvweave again")
        self.level: int = functions.kvweave_level()
        self.open_attention = functions.kvweave_attention_open
        self.open_attention.restype = ctypes.c_void_p
        self.close_attention = functions.kvweave_attention_close
        self.close_attention.argtypes = [ctypes.c_void_p]
        self.close_attention.restype = None
        self.attend = functions.kvweave_attention
        self.attend.argtypes = [ctypes.POINTER(AttentionCall), ctypes.c_void_p]
        self.move = functions.kvweave_move
        self.move.argtypes = [ctypes.POINTER(MoveCall)]
        self.move.restype = None
        self.quantize = functions.kvweave_quantize
        self.quantize.argtypes = [ctypes.POINTER(QuantizeCall)]
        self.quantize.restype = None
        self.copy_pages = functions.kvweave_copy_pages
        self.copy_pages.argtypes = [ctypes.POINTER(PageCopy)]
        self.copy_pages.restype = None
        self.linear = LinearKernels(functions)


@cache
def load() -> Library | None:
    """The kernels, or None; the reason is logged once."""
    reason = "they were not built: no C compiler was found"
    if LIBRARY.exists():
        try:
            return Library(LIBRARY)
        except (OSError, AttributeError) as error:
            reason = str(error)
    logger.warning(
        "The compiled CPU kernels cannot be used (%s): attention on CPUs and moving KV run in "
        "plain torch, several times slower.",
        reason,
    )
    return None


def _share_openmp() -> None:
    """Make the kernels use torch's OpenMP threads, or the system's where torch brings none.

    A second OpenMP runtime would start its own threads, which compete with torch's for the cores:
    torch's threads spin for a while after each operation. The kernels name no runtime: they
    resolve their symbols in the first one that is global.
    """
    folder = Path(torch.__file__).parent
    runtimes = [
        str(path)
        for places in (folder / "lib", folder.parent / "torch.libs")
        for path in places.glob("lib*omp*.so*")
        if path.name.startswith(("libgomp", "libomp", "libiomp"))
    ]
    system = ctypes.util.find_library("gomp")
    if not runtimes and system is not None:
        runtimes = [system]
    for runtime in runtimes:
        ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
