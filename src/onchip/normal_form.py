"""What a schedule knows of a mask: four things, whatever values the user combined.

    (a) band       low <= j - i <= high, ints
    (b) range      per row, columns [start, stop)
    (c) states     per tile of BLOCK x BLOCK pairs: empty, partial, full
    (d) residual   a mask that is evaluated in partial tiles only

`&` of bands and of sorted documents stays in (a) and (b). Everything else is a residual with its states, which follow
from the parts by three-valued logic (states.py), so no (query, key) tensor is built where structure allows it. Empty
tiles are never visited and full ones never masked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.masks import And, Documents, Mask
from onchip.states import EMPTY, FULL, PARTIAL
from onchip.tile import WHOLE, RectGeometry, RectTile, Tile

BLOCK = 128


class Visit(NamedTuple):
    """Columns [start, stop) that a tile of rows walks over; `partial` if some pairs may be hidden."""

    start: int
    stop: int
    partial: bool


@dataclass(frozen=True)
class Tiles:
    """The grid of BLOCK x BLOCK tiles over a geometry (see `states.Grid`)."""

    geometry: RectGeometry
    block_q: int = BLOCK
    block_k: int = BLOCK

    def _firsts(self, size: int, block: int) -> tuple[Tensor, Tensor]:
        first = torch.arange(0, size, block, device=self.geometry.device)
        return first, (first + (block - 1)).clamp(max=size - 1)

    def rows(self) -> tuple[Tensor, Tensor]:
        return self._firsts(self.geometry.rows, self.block_q)

    def columns(self) -> tuple[Tensor, Tensor]:
        return self._firsts(self.geometry.columns, self.block_k)

    def strips(self) -> Iterator[RectTile]:
        for start in range(0, self.geometry.rows, self.block_q):
            stop = min(start + self.block_q, self.geometry.rows)
            yield self.geometry.tile(WHOLE, WHOLE, slice(start, stop), WHOLE)


def _parts(mask: Mask | None) -> tuple[Mask, ...]:
    return () if mask is None else mask.parts if isinstance(mask, And) else (mask,)


def only_bands(mask: Mask | None, geometry: RectGeometry) -> bool:
    """Whether the mask's normal form is a band of ints, known without reading a tensor."""
    return mask is None or mask.band(geometry) is not None


class NormalForm:
    """A mask over one rectangle of sequences whose lengths are known on the host."""

    def __init__(self, mask: Mask | None, geometry: RectGeometry) -> None:
        self._rows, self._columns = geometry.rows, geometry.columns
        self._start: Tensor | None = None
        self._stop: Tensor | None = None
        self._residual: Mask | None = None
        bands, residual = [], []
        for part in _parts(mask):
            if part.band(geometry) is not None:
                bands.append(part)
            elif isinstance(part, Documents) and (ranges := _document_ranges(part, geometry)) is not None:
                self._add_range(*ranges)
            else:
                residual.append(part)
        band = And(tuple(bands)).band(geometry)
        assert band is not None
        self._low, self._high = band
        if residual:
            self._residual = residual[0] if len(residual) == 1 else And(tuple(residual))
        self._states: Tensor | None = None
        if self._residual is not None and geometry.rows and geometry.columns:
            self._states = self._residual.states(Tiles(geometry))

    def _add_range(self, start: Tensor, stop: Tensor) -> None:
        self._start = start if self._start is None else torch.maximum(self._start, start)
        self._stop = stop if self._stop is None else torch.minimum(self._stop, stop)

    @property
    def uniform(self) -> bool:
        """Whether every sequence and head sees the same pieces."""
        varying = [bound.shape[0] for bound in (self._start, self._stop) if bound is not None]
        if self._states is not None:
            varying += self._states.shape[:2]
        return all(size == 1 for size in varying)

    @property
    def is_band(self) -> bool:
        """Whether visibility depends on column minus row alone."""
        return self._start is None and self._stop is None and self._residual is None

    @property
    def reach(self) -> int | None:
        """How many columns a row can see at most, by the band; None if only the columns bound it."""
        return None if self._low is None or self._high is None else max(0, self._high - self._low + 1)

    @property
    def slants(self) -> bool:
        """Whether a band cuts the rectangle of pairs."""
        return self._low is not None or self._high is not None

    def visits(self, batch: slice, heads: slice, rows: slice, width: int) -> list[Visit]:
        """Where rows [start, stop) of these sequences and heads must look, in pieces of at most `width` columns."""
        low, full_low, full_high, high = 0, 0, self._columns, self._columns
        if self._low is not None:
            low, full_low = max(low, rows.start + self._low), max(full_low, rows.stop - 1 + self._low)
        if self._high is not None:
            high, full_high = min(high, rows.stop + self._high), min(full_high, rows.start + self._high + 1)
        if self._start is not None and self._stop is not None:
            start, stop = (_select(bound, batch)[:, rows] for bound in (self._start, self._stop))
            low, full_low = max(low, int(start.min())), max(full_low, int(start.max()))
            high, full_high = min(high, int(stop.max())), min(full_high, int(stop.min()))
        if low >= high:
            return []
        full_low, full_high = min(full_low, high), max(full_high, low)
        # cut on tile boundaries: a piece of a few columns costs almost as much as a whole one
        if full_low > low:
            full_low = min(-(-full_low // BLOCK) * BLOCK, high)
        if full_high < high:
            full_high = max(full_high // BLOCK * BLOCK, low)
        if full_high - full_low >= BLOCK or (full_low == low and full_high == high):
            pieces = [Visit(low, full_low, True), Visit(full_low, full_high, False), Visit(full_high, high, True)]
        else:
            pieces = [Visit(low, high, True)]
        if self._states is not None:
            pieces = [run for piece in pieces for run in self._runs(piece, batch, heads, rows)]
        return [
            Visit(start, min(start + width, piece.stop), piece.partial)
            for piece in pieces
            for start in range(piece.start, piece.stop, width)
        ]

    def _runs(self, piece: Visit, batch: slice, heads: slice, rows: slice) -> Iterator[Visit]:
        """The piece cut where the states of its tiles change, without the empty ones."""
        assert self._states is not None
        if piece.start >= piece.stop:
            return
        blocks_q = slice(rows.start // BLOCK, (rows.stop - 1) // BLOCK + 1)
        blocks_k = slice(piece.start // BLOCK, (piece.stop - 1) // BLOCK + 1)
        parts = [batch, heads, blocks_q]
        varying = [part if size > 1 else WHOLE for part, size in zip(parts, self._states.shape, strict=False)]
        index = (*varying, blocks_k)
        states = self._states[index].flatten(0, 2)
        lowest, highest = states.amin(0).tolist(), states.amax(0).tolist()
        kinds = [
            EMPTY if most == EMPTY else FULL if least == FULL else PARTIAL
            for least, most in zip(lowest, highest, strict=True)
        ]
        first = piece.start // BLOCK
        begin = 0
        for place in range(1, len(kinds) + 1):
            if place < len(kinds) and kinds[place] == kinds[begin]:
                continue
            start, stop = max(piece.start, (first + begin) * BLOCK), min(piece.stop, (first + place) * BLOCK)
            if kinds[begin] != EMPTY:
                yield Visit(start, stop, piece.partial or kinds[begin] == PARTIAL)
            begin = place

    def keep(self, tile: Tile, batch: slice, rows: slice) -> Tensor:
        """Visible pairs of a partial tile, bool, broadcastable to it."""
        keep: Tensor | None = None

        def both(more: Tensor) -> Tensor:
            return more if keep is None else keep & more

        if self._low is not None or self._high is not None:
            distance = tile.column - tile.row
            if self._low is not None:
                keep = both(distance >= self._low)
            if self._high is not None:
                keep = both(distance <= self._high)
        if self._start is not None and self._stop is not None:
            start, stop = (_select(bound, batch)[:, None, rows, None] for bound in (self._start, self._stop))
            keep = both((tile.column >= start) & (tile.column < stop))
        if self._residual is not None:
            keep = both(self._residual.keep(tile))
        assert keep is not None, "a partial tile has a reason"
        return keep


def _select(bound: Tensor, batch: slice) -> Tensor:
    return bound if bound.shape[0] == 1 else bound[batch]


def _document_ranges(documents: Documents, geometry: RectGeometry) -> tuple[Tensor, Tensor] | None:
    """Columns of each row's document, if the keys' ids do not decrease (read on the CPU only)."""
    if geometry.device.type != "cpu":
        return None
    whole = geometry.whole()
    rows = whole.take_rows(documents.query_ids)[:, 0, :, 0].to(torch.int64)
    columns = whole.take_columns(documents.key_ids)[:, 0, 0, :].to(torch.int64)
    if bool((columns[:, 1:] < columns[:, :-1]).any()):
        return None
    if columns.shape[0] != rows.shape[0]:
        batch = max(columns.shape[0], rows.shape[0])
        rows, columns = rows.expand(batch, -1), columns.expand(batch, -1)
    rows, columns = rows.contiguous(), columns.contiguous()
    return torch.searchsorted(columns, rows), torch.searchsorted(columns, rows, right=True)
