"""A problem as rectangles: sequences that are walked together, what their masks hide, and where."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from onchip.normal_form import NormalForm, only_bands
from onchip.problem import Problem
from onchip.tile import PackedGeometry, RectGeometry


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


def form_of(problem: Problem, geometry: RectGeometry | PackedGeometry) -> NormalForm | None:
    """The mask's normal form, if it can be had: one that must read values is built on the CPU only."""
    if not isinstance(geometry, RectGeometry) or isinstance(geometry.length_q, Tensor):
        return None
    if isinstance(geometry.length_k, Tensor):
        return None
    if geometry.device.type != "cpu" and not only_bands(problem.mask, geometry):
        return None
    return NormalForm(problem.mask, geometry)


class Hidden:
    """Which pairs of a piece are hidden.

    Attributes:
        keep: visible pairs, bool, broadcastable to (sequences, heads, R, C).
    """

    def __init__(self, keep: Tensor) -> None:
        self.keep = keep
        self._added: dict[bool, Tensor] = {}

    def added(self, dtype: torch.dtype, across: bool) -> Tensor:
        """0 where visible, minus infinity where hidden; in memory column by column if `across`."""
        if across not in self._added:
            keep = self.keep.mT.contiguous() if across else self.keep
            added = torch.zeros(keep.shape, dtype=dtype, device=keep.device).masked_fill_(~keep, -math.inf)
            self._added[across] = added.mT if across else added
        return self._added[across]
