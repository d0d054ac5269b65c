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
from onchip.products import tame
from onchip.scores import hidden
from onchip.tile import PackedGeometry, RectGeometry, Tile


@dataclass(frozen=True)
class TileSize:
    """Rows and columns of a tile for one head, and the scores of all heads that are computed together."""

    rows: int
    columns: int
    elements: int


CPU = TileSize(256, 512, 8 * 256 * 512)
"""4 MiB of float32 scores, which with their operands stay in a core's share of the cache."""
OTHER = TileSize(1024, 4096, 16 * 1024 * 4096)
"""256 MiB of float32 scores: enough work for a GPU to hide its launches."""


@dataclass(frozen=True)
class Segment:
    """Sequences that are walked together: a rectangle of the batch, or one packed sequence."""

    geometry: RectGeometry | PackedGeometry
    batch: slice
    rows: slice
    columns: slice
    packed: bool

    def of_rows(self, tensor: Tensor) -> Tensor:
        """The segment's part of a tensor like query, (sequences, heads, R, D)."""
        return tensor[self.rows].transpose(0, 1)[None] if self.packed else tensor[self.batch, :, self.rows]

    def of_columns(self, tensor: Tensor) -> Tensor:
        """The segment's part of a tensor like key, (sequences, heads, C, D)."""
        return tensor[self.columns].transpose(0, 1)[None] if self.packed else tensor[self.batch, :, self.columns]

    def of_lse(self, tensor: Tensor) -> Tensor:
        """The segment's part of a tensor like LSE, (sequences, heads, R)."""
        return tensor[:, self.rows][None] if self.packed else tensor[self.batch, :, self.rows]


def segments(problem: Problem) -> Iterator[Segment]:
    """The problem as segments. On a GPU lengths are not read: one segment, with masks for what exists."""
    packed, everything = problem.layout == "packed", slice(0, problem.batch)
    if problem.device.type != "cpu":
        yield Segment(problem.geometry(), everything, slice(0, problem.length_q), slice(0, problem.length_k), packed)
        return
    if problem.layout == "dense" and not any(isinstance(diagonal, Tensor) for diagonal in problem.diagonals()):
        geometry = problem.geometry()
        yield Segment(geometry, everything, slice(0, problem.length_q), slice(0, problem.length_k), False)
        return
    starts_q, counts_q = _extents(problem.cu_seqlens_query, problem.query_lengths, problem.batch, problem.length_q)
    starts_k, counts_k = _extents(problem.cu_seqlens_key, problem.key_lengths, problem.batch, problem.length_k)
    for number in range(problem.batch):
        start_q, count_q, start_k, count_k = starts_q[number], counts_q[number], starts_k[number], counts_k[number]
        geometry = RectGeometry(
            problem.device, 1, problem.heads_q, count_q, count_k, count_q, count_k, number, start_q, start_k
        )
        yield Segment(
            geometry,
            slice(number, number + 1),
            slice(start_q, start_q + count_q),
            slice(start_k, start_k + count_k),
            packed,
        )


def _extents(cu: Tensor | None, lengths: Tensor | None, batch: int, full: int) -> tuple[list[int], list[int]]:
    """Where each sequence starts and how many of its rows exist."""
    starts, counts = [0] * batch, [full] * batch
    if cu is not None:
        offsets = cu.tolist()
        starts, counts = offsets[:-1], [stop - start for start, stop in zip(offsets, offsets[1:], strict=False)]
    return starts, counts if lengths is None else lengths.tolist()


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


def groups_of(problem: Problem, sequences: int, length_q: int, length_k: int) -> Iterator[Group]:
    size = CPU if problem.device.type == "cpu" else OTHER
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
        self._form = _form(problem, segment.geometry)
        # without a form every piece may hide something
        self._may_hide = problem.layout != "dense" or problem.mask is not None

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

    def keep(self, group: Group, rows: slice, visit: Visit, tile: Tile) -> Tensor | None:
        """Visible pairs, bool, broadcastable to the tile, or None if all are."""
        keep = None
        if visit.partial:
            keep = self._form.keep(tile, group.batch, rows) if self._form else self._problem.keep(tile)
        if self._careful:
            masks = hidden(self._problem.scores, tile)
            if masks is not None:
                keep = ~masks if keep is None else keep & ~masks
        return keep


def _form(problem: Problem, geometry: RectGeometry | PackedGeometry) -> NormalForm | None:
    """The mask's normal form, if it can be had: one that must read values is built on the CPU only."""
    if not isinstance(geometry, RectGeometry) or isinstance(geometry.length_q, Tensor):
        return None
    if isinstance(geometry.length_k, Tensor):
        return None
    if geometry.device.type != "cpu" and not only_bands(problem.mask, geometry):
        return None
    return NormalForm(problem.mask, geometry)


def hide(score: Tensor, keep: Tensor | None, select: bool) -> Tensor:
    """Minus infinity where hidden, in place; `select` if a hidden score may be anything."""
    if keep is None:
        return score
    if not select and keep.shape[0] == 1 and keep.shape[1] == 1:
        # scores are known to be finite, and adding one small tile to all heads is far cheaper than a select
        hiding = torch.zeros(keep.shape, dtype=score.dtype, device=score.device).masked_fill_(~keep, -math.inf)
        return score.add_(hiding)
    return score.masked_fill_(~keep, -math.inf)


def is_careful(problem: Problem, *tensors: Tensor | None) -> bool:
    """Whether values may be non-finite that are hidden by more than causality or a window. A GPU is not asked."""
    may_hide = any(step.may_hide for step in problem.scores)
    if problem.device.type != "cpu":
        if may_hide or problem.layout != "dense":
            return True
        geometry = problem.geometry()
        return not (isinstance(geometry, RectGeometry) and only_bands(problem.mask, geometry))
    if problem.mask is None and not may_hide:
        return False
    query, key, *others = tensors
    assert query is not None and key is not None
    return not tame(query, key, problem.scale, *others)


def must_select(problem: Problem, careful: bool) -> bool:
    """Whether a hidden score may be anything, so that adding minus infinity to it would not do."""
    return careful or problem.device.type != "cpu" or any(step.may_hide for step in problem.scores)


def scaled(part: Tensor, factor: float, dtype: torch.dtype, pairs: int) -> Tensor:
    """(sequences, heads, R, D) times a factor as (P, G * R, D)."""
    return (part.to(dtype) * factor).contiguous().view(pairs, -1, part.shape[-1])


def product(left: Tensor, right: Tensor, scratch: Tensor) -> Tensor:
    """left @ right in scratch memory."""
    shape = (left.shape[0], left.shape[1], right.shape[2])
    return torch.bmm(left, right, out=scratch[: math.prod(shape)].view(shape))


def workspace_bytes(problem: Problem) -> int:
    """Tiles of scores, and in low precision K, V and their gradients of one group of heads in float32."""
    group = next(groups_of(problem, problem.batch, problem.length_q, problem.length_k), None)
    if group is None:
        return 0
    sequences = group.batch.stop - group.batch.start
    tile = sequences * (group.query_heads.stop - group.query_heads.start) * group.rows * group.columns
    pairs = sequences * (group.key_heads.stop - group.key_heads.start)
    widened = 2 * pairs * problem.length_k * (problem.dim_qk + problem.dim_v)
    return (3 * tile + (widened if problem.dtype != problem.score_dtype else 0)) * problem.score_dtype.itemsize


def tiles(problem: Problem) -> tuple[int, int]:
    """Rows and columns of a tile of scores."""
    group = next(groups_of(problem, 1, problem.length_q, problem.length_k), None)
    return (group.rows, group.columns) if group is not None else (0, 0)


def pairs(problem: Problem) -> int:
    """Pairs of (query, key) in the pieces that are visited, over all sequences and query heads. Reads lengths."""
    count = 0
    for segment in segments(problem):
        pieces = Pieces(problem, segment, False)
        sequences = 1 if segment.packed else segment.batch.stop - segment.batch.start
        length_q, length_k = segment.rows.stop - segment.rows.start, segment.columns.stop - segment.columns.start
        groups = list(groups_of(problem, sequences, length_q, length_k))
        heights = [
            (group.batch.stop - group.batch.start) * (group.query_heads.stop - group.query_heads.start)
            for group in groups
        ]
        if pieces.uniform:
            groups, heights = groups[:1], [sum(heights)]
        for group, height in zip(groups, heights, strict=True):
            for start in range(0, length_q, group.rows):
                rows = slice(start, min(start + group.rows, length_q))
                width = sum(visit.stop - visit.start for visit in pieces.visits(group, rows, whole=True))
                count += height * (rows.stop - rows.start) * width
    return count
