"""Which tiles the kernels visit, computed on the host: what parts.visits and the lists of blocks make programs do.

A program owns one tile along an axis (rows; columns in the kernel of dK and dV) and walks over tiles of the other
axis. Every count of a plan is a sum over visited tiles of something that the own tile has times something that the
other one has, so `weigh` gives them all; and what all programs together touch is a union, which `covered` gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from onchip.states import EMPTY, PARTIAL

BLOCK = 128
"""Rows and columns of a block of a list."""


@dataclass(frozen=True)
class Axis:
    """Rows or columns of one sequence in tiles of `block`; `pack` rows stand for one position (packed query heads)."""

    length: int
    block: int
    pack: int = 1
    tiles: int = 0

    @staticmethod
    def of(length: int, block: int, pack: int = 1) -> Axis:
        """Tiles that hold something."""
        return Axis(length, block, pack, -(-length * pack // block))

    @staticmethod
    def in_blocks(length: int, block: int, blocks: int) -> Axis:
        """Tiles that fill so many blocks of a list, also those beyond the end."""
        return Axis(length, block, tiles=blocks * BLOCK // block)

    @property
    def ones(self) -> Tensor:
        return torch.ones(self.tiles, dtype=torch.int64)

    @property
    def whole(self) -> Tensor:
        """How many rows each tile has room for."""
        return self.block * self.ones

    @property
    def exists(self) -> Tensor:
        """How many rows of each tile exist."""
        first = self.block * torch.arange(self.tiles)
        return (self.length * self.pack - first).clamp(0, self.block)

    def begins(self, size: int) -> Tensor:
        """How many runs of `size` positions have their first row in each tile."""
        edges = (self.block * torch.arange(self.tiles + 1)).clamp(max=self.length * self.pack)
        return torch.diff(-(-edges // (self.pack * size)))

    def bounds(self) -> tuple[Tensor, Tensor]:
        """First and last position of each tile that holds something."""
        first = self.block * torch.arange(self.tiles)
        return first // self.pack, ((first + self.block - 1) // self.pack).clamp(max=self.length - 1)

    def distinct(self, per_position: bool, per_head: bool, size: int = 1, eights: bool = False) -> Tensor:
        """How many entries the rows of each tile read of a tensor with one for `size` positions and for each head.

        Rows beyond the end read what the last one reads, or if `eights` what the last eight read.
        """
        row = (self.block * torch.arange(self.tiles))[:, None] + torch.arange(self.block)
        last = max(self.length - 1, 0)
        if eights:
            near = (row // 8).clamp(max=last // 8) * 8 + row % 8
        else:
            near = (row // self.pack).clamp(max=last)
        position = near // size if per_position else 0 * row
        entry = position * self.pack + (row % self.pack if per_head else 0)
        return (torch.diff(entry.sort(-1).values, dim=-1) != 0).sum(-1) + 1


class Visits(Protocol):
    """Pairs (own tile, other tile) that are visited. `patterns` counts the heads that differ, which sums run over."""

    patterns: int

    def weigh(self, own: Tensor, other: Tensor, partial: bool = False) -> int:
        """The sum of own * other over visited tiles; only where something may be hidden, if `partial`."""

    def covered(self, own: Tensor | None, other: Tensor | None, group: int, partial: bool = False) -> int:
        """The sum over what any of `group` heads in a row visits, for each group once.

        None for an axis stands for one entry that all its tiles share. `group` divides `patterns`, or that is 1.
        """


class BandVisits:
    """Each own tile visits the other tiles [begin, end)."""

    patterns = 1

    def __init__(self, own: Axis, other: Axis, low: int, high: int) -> None:
        first, last = own.bounds()
        self._begin = (first + low).clamp(min=0) // other.block
        stop = (last + high + 1).clamp(max=other.length)
        self._end = torch.maximum(-(-stop // other.block), self._begin)
        self._end = torch.where(stop > self._begin * other.block, self._end, self._begin)

    def weigh(self, own: Tensor, other: Tensor, partial: bool = False) -> int:
        before = torch.cat([other.new_zeros(1), other.cumsum(0)])
        begin, end = (place.clamp(max=len(other)) for place in (self._begin, self._end))
        return int((own * (before[end] - before[begin])).sum())

    def covered(self, own: Tensor | None, other: Tensor | None, group: int, partial: bool = False) -> int:
        walks = self._end > self._begin
        if own is not None and other is not None:
            return self.weigh(own, other)
        if own is not None:
            return int(own[walks].sum())
        if other is None:
            return int(walks.any())
        change = other.new_zeros(len(other) + 1)
        change.index_add_(0, self._begin[walks], torch.ones_like(self._begin[walks]))
        change.index_add_(0, self._end[walks], -torch.ones_like(self._end[walks]))
        return int(other[change.cumsum(0)[:-1] > 0].sum())


class ListVisits:
    """Each own tile visits the tiles of the blocks that a list names; `states` is (patterns, own, other blocks)."""

    def __init__(self, own: Axis, states: Tensor) -> None:
        self._states, self._walks = states, own.exists > 0
        self.patterns = states.shape[0]

    @property
    def entries(self) -> int:
        """Numbers that the lists hold and programs read: two counts for each own block, and the blocks to visit."""
        return 2 * self._states.shape[0] * self._states.shape[1] + int((self._states != EMPTY).sum())

    def _visited(self, partial: bool) -> Tensor:
        return self._states == PARTIAL if partial else self._states != EMPTY

    def _by_block(self, tiles: Tensor, dim: int) -> Tensor:
        blocks = self._states.shape[dim]
        return tiles.reshape(blocks, len(tiles) // max(1, blocks)).sum(-1)

    def weigh(self, own: Tensor, other: Tensor, partial: bool = False) -> int:
        seen = torch.where(self._visited(partial), self._by_block(other, -1), 0).sum((0, -1))
        return int((self._by_block(own * self._walks, -2) * seen).sum())

    def covered(self, own: Tensor | None, other: Tensor | None, group: int, partial: bool = False) -> int:
        visited = self._visited(partial)
        if self.patterns > 1:
            visited = visited.unflatten(0, (-1, group)).any(1)
        if own is None:
            visited = visited.any(-2, keepdim=True)
        if other is None:
            visited = visited.any(-1, keepdim=True)
        rows = torch.ones(1, dtype=torch.int64) if own is None else self._by_block(own, -2)
        columns = torch.ones(1, dtype=torch.int64) if other is None else self._by_block(other, -1)
        return int((rows[:, None] * torch.where(visited, columns, 0)).sum())


@dataclass(frozen=True)
class Walk:
    """What the programs of one kernel do in a sequence, and how many sequences are alike."""

    own: Axis
    other: Axis
    visits: Visits
    sequences: int
