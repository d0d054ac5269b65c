"""States of tiles: whether a mask keeps nothing, something or everything of each tile of a grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from onchip.tile import RectGeometry, RectTile, Tile

EMPTY, PARTIAL, FULL = 0, 1, 2
"""States of a tile, ordered so that `&` is the minimum, `|` the maximum and `~` is 2 - state."""


class Grid(Protocol):
    """Tiles of block_q x block_k that cover the scores of a geometry."""

    @property
    def geometry(self) -> RectGeometry: ...

    @property
    def block_q(self) -> int: ...

    @property
    def block_k(self) -> int: ...

    def rows(self) -> tuple[Tensor, Tensor]:
        """First and last row of each block of rows, int64 (blocks_q,)."""

    def columns(self) -> tuple[Tensor, Tensor]: ...

    def strips(self) -> Iterator[RectTile]:
        """A tile of all columns for each block of rows."""


def state_of(any_kept: Tensor, all_kept: Tensor) -> Tensor:
    return any_kept.to(torch.uint8) + (any_kept & all_kept).to(torch.uint8)


def pool(kept: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Any and all over blocks of the last dimension; a short last block counts what it has."""
    count = kept.shape[-1]
    padding = -count % size
    if padding == 0:
        parts = kept.unflatten(-1, (count // size, size))
        return parts.any(-1), parts.all(-1)
    any_kept = torch.nn.functional.pad(kept, (0, padding), value=False)
    all_kept = torch.nn.functional.pad(kept, (0, padding), value=True)
    blocks_count = (count + padding) // size
    return any_kept.unflatten(-1, (blocks_count, size)).any(-1), all_kept.unflatten(-1, (blocks_count, size)).all(-1)


def extremes(ids: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest id of each block, (batch or 1, blocks)."""
    padding = -ids.shape[-1] % size
    if padding:
        ids = torch.cat([ids, ids[:, -1:].expand(-1, padding)], dim=-1)
    parts = ids.unflatten(-1, (ids.shape[-1] // size, size))
    return parts.amin(-1), parts.amax(-1)


def pooled_states(keep: Callable[[Tile], Tensor], grid: Grid) -> Tensor:
    """Evaluate the mask one strip of rows at a time: memory is linear in the length."""
    strips = []
    for tile in grid.strips():
        kept = keep(tile)
        kept = kept.expand(*kept.shape[:3], tile.column.shape[-1])
        any_kept, all_kept = pool(kept.any(-2), grid.block_k)[0], pool(kept.all(-2), grid.block_k)[1]
        strips.append(state_of(any_kept, all_kept))
    return torch.stack(strips, dim=2)


def whole_states(keep: Callable[[Tile], Tensor], grid: Grid) -> Tensor:
    """The same in a few operations, for a mask that is a tensor over pairs: many strips are many launches on a GPU."""
    kept = keep(grid.geometry.whole())
    for dim in (0, 1):
        if kept.stride(dim) == 0:
            kept = kept.narrow(dim, 0, min(1, kept.shape[dim]))
    any_rows, all_rows = (_over_rows(kept, reduce, grid.block_q) for reduce in (torch.any, torch.all))
    blocks = (grid.rows()[0].shape[0], grid.columns()[0].shape[0])
    any_kept, all_kept = pool(any_rows, grid.block_k)[0], pool(all_rows, grid.block_k)[1]
    return state_of(any_kept, all_kept).expand(*kept.shape[:2], *blocks)


def _over_rows(kept: Tensor, reduce: Callable[..., Tensor], size: int) -> Tensor:
    """Any or all over blocks of rows, (batch, heads, blocks, columns), without a copy of the mask."""
    full = kept.shape[2] // size * size
    parts = [reduce(kept[:, :, :full].unflatten(2, (full // size, size)), 3)] if full else []
    if full < kept.shape[2] or not parts:
        parts.append(reduce(kept[:, :, full:], 2, keepdim=True))
    return torch.cat(parts, 2)
