"""What a tile takes of a processor at least, as far as it is known without compiling."""

from __future__ import annotations

from onchip.gpu import FORWARD, KEYS, QUERIES
from onchip.schedules.triton.tiles import Tile

SIZES = (16, 32, 64, 128)
"""Rows and columns of tiles: products take 16 at least, and every one divides a block of 128 of the lists."""
WARPS = (1, 2, 4, 8, 16)
STAGES = (1, 2, 3, 4, 5)
BOUNDS = {4: (168, 128), 8: (128,)}
"""Registers of a thread, by warps, with which 3 or 4 programs of 4 warps, or 2 of 8, share NVIDIA's multiprocessors."""


def is_tile(tile: Tile) -> bool:
    """Whether the kernels can be compiled with these sizes and are right with them, if they launch."""
    sizes = (tile.rows, tile.columns, tile.warps, tile.stages)
    choices = (SIZES, SIZES, WARPS, STAGES)
    if not all(type(size) is int and size in allowed for size, allowed in zip(sizes, choices, strict=True)):
        return False
    if type(tile.tma) is not bool:
        return False
    return tile.registers is None or (type(tile.registers) is int and tile.registers in BOUNDS.get(tile.warps, ()))


def padded(dim: int) -> int:
    """The width of a tile that holds a head dim: a power of two, at least 16."""
    return max(16, 1 << (dim - 1).bit_length())


def least_shared(tile: Tile, kernel: str, dim: int, bits: int) -> int:
    """Bytes of shared memory that a pipeline takes at least: what the loop loads, once for each stage but the last.

    Of the gradient nothing is known, and heads of 16 on AMD take less; they come near no limit.
    """
    if kernel not in (FORWARD, KEYS, QUERIES):
        return 0
    walked = tile.rows if kernel == KEYS else tile.columns
    return (tile.stages - 1) * walked * 2 * padded(dim) * bits // 8


def least_registers(tile: Tile, kernel: str, dim: int, lanes: int) -> float:
    """Registers of a thread that hold sums and one tile of scores, in float32.

    Args:
        lanes: threads of a warp.
    """
    held = {FORWARD: tile.rows * padded(dim), KEYS: 2 * tile.columns * padded(dim), QUERIES: tile.rows * padded(dim)}
    return (held.get(kernel, 0) + tile.rows * tile.columns) / (tile.warps * lanes)
