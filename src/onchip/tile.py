"""Where a rectangle of scores lies: the indices that masks, scores and dropout are functions of.

A tile is a rectangle of the score tensor, shaped (batch, heads, rows, columns), each extent possibly 1 where it does
not matter. Masks and scores are written once against `Tile` and so mean the same on every schedule. There are two
kinds:

    RectTile     sequences lie side by side in the batch dimension (dense, padded, or one packed sequence at a time)
    PackedTile   the rows and columns are tokens of a packed batch; each token knows its sequence and its index in it
"""

from __future__ import annotations

from typing import Literal, Protocol

import torch
from torch import Tensor

Diagonal = str | int | Tensor
Per = Literal["pair", "head", "whole"]
"""How a tensor of a score value is spread over the scores: one entry per (batch, head, row, column) with broadcasting,
one per (batch, head) or per head, or read by a user function as a whole."""

WHOLE = slice(None)


class Tile(Protocol):
    """Indices are int64 tensors that broadcast to (batch, heads, rows, columns)."""

    @property
    def batch(self) -> Tensor: ...

    @property
    def head(self) -> Tensor: ...

    @property
    def row(self) -> Tensor: ...

    @property
    def column(self) -> Tensor: ...

    @property
    def column_start(self) -> int | None:
        """The first column, if the columns run on from there."""

    def offset(self, diagonal: Diagonal) -> int | Tensor:
        """Column minus row on the diagonal, an int or a tensor that broadcasts to the tile."""

    def inside(self) -> Tensor | None:
        """Which pairs exist at all (bool, broadcastable), or None if all do."""

    def exists(self) -> Tensor | None:
        """Which rows exist, bool, broadcastable to (batch, heads, rows, 1), or None if all do."""

    def take(self, tensor: Tensor, per: Per) -> Tensor: ...

    def take_rows(self, tensor: Tensor) -> Tensor: ...

    def take_columns(self, tensor: Tensor) -> Tensor: ...

    def take_blocks(self, tensor: Tensor, size_q: int, size_k: int) -> Tensor: ...

    def add(self, total: Tensor, gradient: Tensor, per: Per) -> None:
        """Add the gradient of `take(total, per)` to `total` in place, summed over broadcast extents."""


def rank4(tensor: Tensor) -> Tensor:
    """The tensor with leading extents of 1 up to rank 4."""
    return tensor.reshape((1,) * (4 - tensor.dim()) + tuple(tensor.shape))


def per_head(tensor: Tensor) -> Tensor:
    """(heads,) or (batch, heads) as (batch or 1, heads, 1, 1)."""
    return tensor.reshape(-1, tensor.shape[-1], 1, 1)


class RectGeometry:
    """Sequences side by side.

    Args:
        batch, heads, rows, columns: extents of the score tensor.
        length_q, length_k: lengths that alignment uses: ints, or int64 tensors (batch,) that also bound what exists.
        sequence: number of the first sequence (packed batches are walked one sequence at a time).
        token_q, token_k: where the first row and column lie among the tokens of a packed tensor.
    """

    def __init__(
        self,
        device: torch.device,
        batch: int,
        heads: int,
        rows: int,
        columns: int,
        length_q: int | Tensor,
        length_k: int | Tensor,
        sequence: int = 0,
        token_q: int = 0,
        token_k: int = 0,
    ) -> None:
        self.device = device
        self.batch, self.heads, self.rows, self.columns = batch, heads, rows, columns
        self.length_q, self.length_k = length_q, length_k
        self.sequence, self.token_q, self.token_k = sequence, token_q, token_k

    def offset(self, diagonal: Diagonal) -> int | Tensor:
        """An int, or an int64 tensor (batch,)."""
        if isinstance(diagonal, Tensor):
            own = diagonal[self.sequence : self.sequence + self.batch].to(torch.int64)
            if self.batch == 1 and self.device.type == "cpu" and not isinstance(self.length_q, Tensor):
                return int(own)
            return own
        if diagonal == "bottom-right":
            return self.length_k - self.length_q
        return 0 if diagonal == "top-left" else diagonal  # type: ignore[return-value]

    def whole(self) -> RectTile:
        return RectTile(self, WHOLE, WHOLE, WHOLE, WHOLE)

    def tile(self, batch: slice, heads: slice, rows: slice, columns: slice) -> RectTile:
        return RectTile(self, batch, heads, rows, columns)


def _span(part: slice, size: int, device: torch.device) -> Tensor:
    start, stop = (0, size) if part.stop is None else (part.start, part.stop)
    return torch.arange(start, stop, device=device)


class RectTile:
    def __init__(self, geometry: RectGeometry, batch: slice, heads: slice, rows: slice, columns: slice) -> None:
        self._geometry = geometry
        self._batch, self._heads, self._rows, self._columns = batch, heads, rows, columns
        self.column_start = 0 if columns.stop is None else columns.start

    @property
    def batch(self) -> Tensor:
        g = self._geometry
        return (_span(self._batch, g.batch, g.device) + g.sequence).reshape(-1, 1, 1, 1)

    @property
    def head(self) -> Tensor:
        return _span(self._heads, self._geometry.heads, self._geometry.device).reshape(1, -1, 1, 1)

    @property
    def row(self) -> Tensor:
        return _span(self._rows, self._geometry.rows, self._geometry.device).reshape(1, 1, -1, 1)

    @property
    def column(self) -> Tensor:
        return _span(self._columns, self._geometry.columns, self._geometry.device).reshape(1, 1, 1, -1)

    def offset(self, diagonal: Diagonal) -> int | Tensor:
        offset = self._geometry.offset(diagonal)
        return offset[self._batch].reshape(-1, 1, 1, 1) if isinstance(offset, Tensor) else offset

    def inside(self) -> Tensor | None:
        g, keep = self._geometry, self.exists()
        if isinstance(g.length_k, Tensor):
            columns = self.column < g.length_k[self._batch].reshape(-1, 1, 1, 1)
            keep = columns if keep is None else keep & columns
        return keep

    def exists(self) -> Tensor | None:
        length = self._geometry.length_q
        return self.row < length[self._batch].reshape(-1, 1, 1, 1) if isinstance(length, Tensor) else None

    def _sequences(self) -> slice:
        first = self._geometry.sequence
        if self._batch.stop is None:
            return slice(first, first + self._geometry.batch)
        return slice(self._batch.start + first, self._batch.stop + first)

    def _pair(self, tensor: Tensor, rows: slice, columns: slice) -> Tensor:
        tensor = rank4(tensor)
        parts = (self._sequences(), self._heads, rows, columns)
        return tensor[tuple(WHOLE if size == 1 else part for size, part in zip(tensor.shape, parts, strict=True))]

    def take(self, tensor: Tensor, per: Per) -> Tensor:
        if per == "whole":
            return tensor
        tensor = self._pair(per_head(tensor) if per == "head" else tensor, self._clip_rows(), self._clip_columns())
        return tensor

    def _clip_rows(self) -> slice:
        # a tensor of a packed batch is as long as its longest sequence: the whole tile of a shorter one is a part of it
        return self._rows if self._rows.stop is not None else slice(0, self._geometry.rows)

    def _clip_columns(self) -> slice:
        return self._columns if self._columns.stop is not None else slice(0, self._geometry.columns)

    def take_rows(self, tensor: Tensor) -> Tensor:
        return self._vector(tensor, self._clip_rows(), self._geometry.token_q)[:, None, :, None]

    def take_columns(self, tensor: Tensor) -> Tensor:
        return self._vector(tensor, self._clip_columns(), self._geometry.token_k)[:, None, None, :]

    def _vector(self, tensor: Tensor, part: slice, token: int) -> Tensor:
        tensor = tensor if tensor.dim() == 2 else tensor[None]
        batch = WHOLE if tensor.shape[0] == 1 else self._sequences()
        return tensor[batch, part.start + token : part.stop + token]

    def take_blocks(self, tensor: Tensor, size_q: int, size_k: int) -> Tensor:
        tensor = rank4(tensor)
        batch = self.batch if tensor.shape[0] > 1 else torch.zeros_like(self.batch[:1])
        head = self.head if tensor.shape[1] > 1 else torch.zeros_like(self.head[:, :1])
        row = self.row // size_q if tensor.shape[2] > 1 else torch.zeros_like(self.row[:, :, :1])
        column = self.column // size_k if tensor.shape[3] > 1 else torch.zeros_like(self.column[..., :1])
        return tensor[batch, head, row, column]

    def add(self, total: Tensor, gradient: Tensor, per: Per) -> None:
        view = self.take(total, per)
        view.add_(gradient.sum_to_size(view.shape))


class PackedGeometry:
    """Tokens of a packed batch, without reading its offsets on the host.

    Args:
        cu_q, cu_k: int tensors (batch + 1,), offsets of the sequences.
        rows, columns: token counts.
        used_q, used_k: optional int tensors (batch,), how many leading tokens of each sequence exist.
    """

    def __init__(
        self,
        device: torch.device,
        heads: int,
        rows: int,
        columns: int,
        cu_q: Tensor,
        cu_k: Tensor,
        used_q: Tensor | None = None,
        used_k: Tensor | None = None,
    ) -> None:
        self.device, self.heads, self.rows, self.columns = device, heads, rows, columns
        self.row_token = torch.arange(rows, device=device)
        self.column_token = torch.arange(columns, device=device)
        self.row_batch, self.row_index, self.row_lives, self.length_q = self._locate(cu_q, self.row_token, used_q)
        self.column_batch, self.column_index, self.column_lives, self.length_k = self._locate(
            cu_k, self.column_token, used_k
        )

    @staticmethod
    def _locate(cu: Tensor, token: Tensor, used: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        cu = cu.to(torch.int64)
        length = cu[1:] - cu[:-1]
        if used is not None:
            length = torch.minimum(length, used.to(torch.int64))
        # a token behind the last offset belongs to no sequence; it borrows the last one's number and does not live
        batch = (torch.searchsorted(cu, token, right=True) - 1).clamp(0, max(cu.shape[0] - 2, 0))
        index = token - cu[batch]
        return batch, index, (index < length[batch]) & (index >= 0), length

    def whole(self) -> PackedTile:
        return PackedTile(self, WHOLE, WHOLE, WHOLE)

    def tile(self, batch: slice, heads: slice, rows: slice, columns: slice) -> PackedTile:
        return PackedTile(self, heads, rows, columns)


class PackedTile:
    column_start = None

    def __init__(self, geometry: PackedGeometry, heads: slice, rows: slice, columns: slice) -> None:
        self._geometry, self._heads, self._rows, self._columns = geometry, heads, rows, columns
        self.batch = geometry.row_batch[rows].reshape(1, 1, -1, 1)
        self.head = _span(heads, geometry.heads, geometry.device).reshape(1, -1, 1, 1)
        self.row = geometry.row_index[rows].reshape(1, 1, -1, 1)
        self.column = geometry.column_index[columns].reshape(1, 1, 1, -1)

    def offset(self, diagonal: Diagonal) -> int | Tensor:
        g = self._geometry
        if isinstance(diagonal, Tensor):
            return diagonal.to(torch.int64)[self.batch]
        if diagonal == "bottom-right":
            return (g.length_k - g.length_q)[self.batch]
        return 0 if diagonal == "top-left" else diagonal  # type: ignore[return-value]

    def inside(self) -> Tensor:
        g = self._geometry
        same = self.batch == g.column_batch[self._columns].reshape(1, 1, 1, -1)
        return same & self.exists() & g.column_lives[self._columns].reshape(1, 1, 1, -1)

    def exists(self) -> Tensor:
        return self._geometry.row_lives[self._rows].reshape(1, 1, -1, 1)

    def _pair_index(self, tensor: Tensor, row: Tensor, column: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        indices = (self.batch, self.head, row, column)
        # pairs of different sequences are never inside: what is read for them does not matter, but must exist
        return tuple(  # type: ignore[return-value]
            index.clamp(0, size - 1) if size > 1 else index.new_zeros((1, 1, 1, 1))
            for index, size in zip(indices, tensor.shape, strict=True)
        )

    def take(self, tensor: Tensor, per: Per) -> Tensor:
        if per == "whole":
            return tensor
        return self._gather(per_head(tensor) if per == "head" else rank4(tensor), self.row, self.column)

    def take_rows(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(-1)[self._rows].reshape(1, 1, -1, 1)

    def take_columns(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(-1)[self._columns].reshape(1, 1, 1, -1)

    def take_blocks(self, tensor: Tensor, size_q: int, size_k: int) -> Tensor:
        return self._gather(rank4(tensor), self.row // size_q, self.column // size_k)

    def _gather(self, tensor: Tensor, row: Tensor, column: Tensor) -> Tensor:
        if tensor.numel() == 0:
            # no sequence has a token, so whatever stands for the pairs is never inside; a sum keeps the gradient
            return (tensor.any() if tensor.dtype == torch.bool else tensor.sum()).reshape(1, 1, 1, 1)
        return tensor[self._pair_index(tensor, row, column)]

    def add(self, total: Tensor, gradient: Tensor, per: Per) -> None:
        if per == "whole":
            total.add_(gradient)
            return
        if total.numel() == 0:
            return
        total = per_head(total) if per == "head" else rank4(total)
        indices = self._pair_index(total, self.row, self.column)
        shape = torch.broadcast_shapes(*(index.shape for index in indices))
        total.index_put_(indices, gradient.sum_to_size(shape), accumulate=True)
