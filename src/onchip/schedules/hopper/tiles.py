"""Tile sizes of the Hopper kernels as data, by head dim and length.

Unlike those of the portable kernels they depend on a length: below 1025 keys the ends of a walk weigh more than its
middle, and narrow blocks waste less there. So a kind of problem may compile two kernels, and no more.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tile:
    """Warpgroups of 64 rows, columns of a block, stages of the ring, registers of a consumer's thread."""

    groups: int
    columns: int
    stages: int
    registers: int

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return 64 * self.groups


@dataclass(frozen=True)
class Row:
    """The first row that fits names the tile: up to this head dim, the larger of the two, and so many keys in all."""

    dim: int
    length: int | None
    tile: Tile


FORWARD = (
    Row(64, None, Tile(3, 64, 4, 160)),
    Row(128, 1024, Tile(2, 64, 4, 240)),
    Row(128, None, Tile(2, 128, 2, 240)),
)


def tile_of(dim: int, length: int) -> Tile:
    """The forward's tile for a head dim and a number of keys (of all sequences, if packed)."""
    return next(row.tile for row in FORWARD if dim <= row.dim and (row.length is None or length <= row.length))
