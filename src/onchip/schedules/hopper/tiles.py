"""Tile sizes of the Hopper kernels as data, by head dim."""

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
    """The first row that fits names the tile: up to these head dims of keys and of values."""

    dim_qk: int
    dim_v: int
    tile: Tile


@dataclass(frozen=True)
class Block:
    """Rows and columns of a tile of scores in the backward."""

    rows: int
    columns: int


BACKWARD = Block(64, 128)
"""A program's columns, half of them for each of two warpgroups, and the rows that pass by at a time."""
FORWARD = (
    Row(64, 64, Tile(3, 64, 4, 160)),
    Row(192, 128, Tile(2, 64, 4, 240)),
    Row(256, 256, Tile(2, 64, 2, 240)),
)


def tile_of(dim_qk: int, dim_v: int) -> Tile:
    """The forward's tile for head dims."""
    return next(row.tile for row in FORWARD if dim_qk <= row.dim_qk and dim_v <= row.dim_v)
