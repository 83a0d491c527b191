"""The `cpu` backend."""

from __future__ import annotations

from typing import ClassVar

from kvweave.engine.attention.gathered import GatheredAttention


class CpuAttention(GatheredAttention):
    """Plain torch."""

    name: ClassVar[str] = "cpu"
