"""What the kernels of a schedule move and compute: one record for each, which the schedule counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onchip.model.traffic import Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """One kernel, or operators that work on the same tiles.

    Attributes:
        requested: what its programs load and store, tile by tile, and what they compute, with what tiles hold beyond
            the edges of tensors. On a GPU this passes between the L2 cache and the multiprocessors.
        compulsory: each tensor that it touches, once: what it moves from and to device memory at least, where caches
            absorb the rest; and the products of pairs and head dims that exist.
        precision: how products are made: a dtype, "tf32", or "tf32x3" for float32 as three products in TF32.
        pairs: pairs of (query, key) whose score it computes, over all sequences and query heads.
        tile: rows and columns of a tile of scores; None for a kernel without scores.
        tile_source: where a GPU kernel's tile comes from: "shipped", or "tuned here on" and the date.
        launches: kernels or operators that are started.
    """

    name: str
    requested: Traffic
    compulsory: Traffic
    precision: str
    pairs: int = 0
    tile: tuple[int, int] | None = None
    tile_source: str = ""
    launches: int = 1


def least_device_bytes(kernels: Sequence[Kernel], cache_bytes: float) -> float:
    """Bytes that kernels which run one after the other move from and to device memory, at least.

    Two bounds hold, and the larger one is given. A cache of any size leaves every tensor from outside to be read once
    and every result that no later kernel reads to be written once. And from one kernel to the next a cache keeps no
    more than it holds: it saves reading that much again, and writing that much of what is never read again.
    The cache is empty at the start, and results are in device memory at the end.
    """
    outside: dict[str, int] = {}
    made: dict[str, int] = {}
    for kernel in kernels:
        for name, size in kernel.compulsory.loads.items():
            if name in made:
                made[name] = 0
            else:
                outside[name] = max(size, outside.get(name, 0))
        made |= kernel.compulsory.stores
    once = sum(outside.values()) + sum(made.values())
    every = sum(kernel.compulsory.total_bytes for kernel in kernels)
    return max(once, every - 2 * cache_bytes * max(0, len(kernels) - 1))
