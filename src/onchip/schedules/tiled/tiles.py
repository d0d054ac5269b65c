"""Walking over a problem: segments of sequences, groups of heads, pieces of columns.

Legend of this package: P pairs of (sequence, key head), G query heads of a pair, R rows, C columns, D and DV head dims.
Tiles of scores are (sequences, heads, R, C) for masks and scores and (P, G * R, C) for products: a pair's query heads
stand in the rows, so K and V are never repeated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from onchip.normal_form import NormalForm, Visit, only_bands
from onchip.problem import Problem
from onchip.scores import Score, hidden, taken
from onchip.segments import Hidden, Segment, form_of, segments
from onchip.tile import RectGeometry, Tile


@dataclass(frozen=True)
class TileSize:
    """Rows and columns of a tile for one head, and the scores of all heads that are computed together."""

    rows: int
    columns: int
    elements: int


FORWARD = TileSize(512, 512, 4 * 512 * 512)
"""4 MiB of float32 scores: products at full speed, and few enough small operations beside them."""
BACKWARD = TileSize(256, 512, 4 * 256 * 512)
"""Two tensors of 2 MiB, which stay in the caches of two cores."""
SLANTED = {False: TileSize(256, 256, 8 * 256 * 256), True: TileSize(256, 256, 8 * 256 * 256)}
"""Under a band, by direction (True is backward): smaller tiles stick out over its edges less."""
NARROW = {False: TileSize(128, 512, 8 * 128 * 512), True: TileSize(128, 512, 8 * 128 * 512)}
"""Under a band of fewer columns than `NARROW_REACH`."""
NARROW_REACH = 1024
OTHER = TileSize(1024, 4096, 16 * 1024 * 4096)
"""256 MiB of float32 scores: enough work for a GPU to hide its launches."""


def size_of(problem: Problem, form: NormalForm | None, backward: bool) -> TileSize:
    """The tile for a problem whose mask has this normal form (see `benchmarks/cpu.py`)."""
    if problem.device.type != "cpu":
        return OTHER
    if form is None or not form.slants:
        return BACKWARD if backward else FORWARD
    return (NARROW if form.reach is not None and form.reach < NARROW_REACH else SLANTED)[backward]


@dataclass(frozen=True)
class Group:
    """Sequences and key heads whose score tiles are computed together."""

    batch: slice
    key_heads: slice
    query_heads: slice
    rows: int
    columns: int

    def of_queries(self, tensor: Tensor) -> Tensor:
        return tensor[self.batch, self.query_heads]

    def of_keys(self, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        """(P, C, D) in the dtype of scores; a view where strides and dtype allow."""
        part = tensor[self.batch, self.key_heads]
        if part.stride(-1) != 1:
            # a product would copy it each time, and its bits would depend on how
            part = part.contiguous()
        return part.to(dtype).reshape(part.shape[0] * part.shape[1], *part.shape[2:])


def groups_of(problem: Problem, size: TileSize, sequences: int, length_q: int, length_k: int) -> Iterator[Group]:
    columns = max(1, min(size.columns, length_k))
    rows = max(1, min(size.rows, length_q))
    # a pair brings all its query heads: with many of them, tiles are lower instead
    while rows > 16 and problem.group * rows * columns > size.elements:
        rows //= 2
    pairs = max(1, size.elements // (problem.group * rows * columns))
    if pairs >= problem.heads_kv:
        step, heads = max(1, pairs // max(1, problem.heads_kv)), max(1, problem.heads_kv)
    else:
        step, heads = 1, pairs
    for first in range(0, sequences, step):
        for head in range(0, problem.heads_kv, heads):
            last = min(head + heads, problem.heads_kv)
            yield Group(
                slice(first, min(first + step, sequences)),
                slice(head, last),
                slice(head * problem.group, last * problem.group),
                rows,
                columns,
            )


class Pieces:
    """The pieces of a segment that a group walks over, with their masks."""

    def __init__(self, problem: Problem, segment: Segment, careful: bool) -> None:
        self._problem, self._geometry, self._careful = problem, segment.geometry, careful
        self._form = form_of(problem, segment.geometry)
        # without a form every piece may hide something
        self._may_hide = problem.layout != "dense" or problem.mask is not None
        self._bands: dict[tuple[int, int, int], Hidden] = {}

    @property
    def uniform(self) -> bool:
        """Whether every sequence and head walks over the same pieces."""
        return self._form is None or self._form.uniform

    def visits(self, group: Group, rows: slice, whole: bool = False) -> list[Visit]:
        """What the rows walk over, in pieces as wide as a tile, or as they come if `whole`."""
        size = self._geometry.columns
        width = max(1, size) if whole else group.columns
        if self._form is not None:
            return self._form.visits(group.batch, group.query_heads, rows, width)
        return [Visit(start, min(start + width, size), self._may_hide) for start in range(0, size, width)]

    def tile(self, group: Group, rows: slice, visit: Visit) -> Tile:
        return self._geometry.tile(group.batch, group.query_heads, rows, slice(visit.start, visit.stop))

    def groups(self, sequences: int, backward: bool) -> Iterator[Group]:
        """The groups of the segment's heads for one direction."""
        size = size_of(self._problem, self._form, backward)
        return groups_of(self._problem, size, sequences, self._geometry.rows, self._geometry.columns)

    def hidden(self, group: Group, rows: slice, visit: Visit, tile: Tile) -> Hidden | None:
        """What is hidden in a piece, or None if nothing is."""
        if not self._careful and visit.partial and self._form is not None and self._form.is_band:
            place = (visit.start - rows.start, rows.stop - rows.start, visit.stop - visit.start)
            if place not in self._bands:
                self._bands[place] = Hidden(self._form.keep(tile, group.batch, rows))
            return self._bands[place]
        keep = None
        if visit.partial:
            keep = self._form.keep(tile, group.batch, rows) if self._form else self._problem.keep(tile)
        if self._careful:
            masks = hidden(self._problem.scores, tile)
            if masks is not None:
                keep = ~masks if keep is None else keep & ~masks
        return None if keep is None else Hidden(keep)


def change(score: Tensor, step: Score, tile: Tile) -> Tensor:
    """The score after a step; it may be changed in place."""
    parameters = taken(step, tile)
    return score.add_(parameters[0]) if step.adds else step.apply(score, tile, parameters)


def hide(score: Tensor, hidden: Hidden | None, select: bool, across: bool = False) -> Tensor:
    """Minus infinity where hidden, in place; `select` if a hidden score may be anything."""
    if hidden is None:
        return score
    keep = hidden.keep
    if not select and keep.shape[0] == 1 and keep.shape[1] == 1:
        # scores are known to be finite, and adding one small tile to all heads is far cheaper than a select
        return score.add_(hidden.added(score.dtype, across))
    return score.masked_fill_(~keep, -math.inf)


def carefulness(problem: Problem) -> tuple[bool, ...]:
    """The ways to run, one after the other until a result is `sound`: plainly, and with selects and guarded products.

    Only a problem that hides pairs needs the second, where something hidden is not finite. A CPU looks at the result; a
    GPU is not asked, so it takes the second at once unless nothing but causality or a window hides.
    """
    may_hide = any(step.may_hide for step in problem.scores)
    if problem.device.type == "cpu":
        return (False, True) if problem.mask is not None or may_hide else (False,)
    if may_hide or problem.layout != "dense":
        return (True,)
    geometry = problem.geometry()
    return (not (isinstance(geometry, RectGeometry) and only_bands(problem.mask, geometry)),)


def sound(*results: Tensor | None) -> bool:
    """Whether everything is finite, so that nothing hidden can have got in. Reads values."""
    return all(math.isfinite(result.sum()) for result in results if result is not None)


def must_select(problem: Problem, careful: bool) -> bool:
    """Whether a hidden score may be anything, so that adding minus infinity to it would not do."""
    return careful or problem.device.type != "cpu" or any(step.may_hide for step in problem.scores)


class Scratch:
    """Memory that groups use one after the other."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._memory = torch.empty(0, dtype=dtype, device=device)

    def of(self, size: int) -> Tensor:
        """At least `size` elements, of any value."""
        if self._memory.numel() < size:
            self._memory = self._memory.new_empty(size)
        return self._memory


def scaled(part: Tensor, factor: float, dtype: torch.dtype, pairs: int) -> Tensor:
    """(sequences, heads, R, D) times a factor as (P, G * R, D)."""
    part = part.to(dtype)
    return (part if factor == 1.0 else part * factor).contiguous().view(pairs, -1, part.shape[-1])


def product(left: Tensor, right: Tensor, scratch: Tensor, across: bool = False) -> Tensor:
    """left @ right^T in scratch memory: (P, R, D) and (P, C, D) give (P, R, C), column by column if `across`."""
    rows, columns = left.shape[1], right.shape[1]
    memory = scratch[: left.shape[0] * rows * columns]
    if across:
        return torch.bmm(right, left.mT, out=memory.view(left.shape[0], columns, rows)).mT
    return torch.bmm(left, right.mT, out=memory.view(left.shape[0], rows, columns))


def _first_group(problem: Problem, backward: bool) -> Group | None:
    segment = next(segments(problem), None)
    if segment is None:
        return None
    sequences = 1 if segment.packed else segment.batch.stop - segment.batch.start
    return next(Pieces(problem, segment, False).groups(sequences, backward), None)


def workspace_bytes(problem: Problem, backward: bool) -> int:
    """Tiles of scores, and in low precision K, V and their gradients of a group of heads in float32. Reads lengths."""
    group = _first_group(problem, backward)
    if group is None:
        return 0
    sequences = group.batch.stop - group.batch.start
    tile = sequences * (group.query_heads.stop - group.query_heads.start) * group.rows * group.columns
    pairs = sequences * (group.key_heads.stop - group.key_heads.start)
    widened = 2 * pairs * problem.length_k * (problem.dim_qk + problem.dim_v)
    extra = widened if problem.dtype != problem.score_dtype else 0
    return ((3 if backward else 1) * tile + extra) * problem.score_dtype.itemsize
