"""Blocks that one call of the kernel computes, and what the kernel wants of its inputs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from onchip.masks import causality
from onchip.normal_form import NormalForm
from onchip.problem import Problem
from onchip.segments import Hidden, Segment
from onchip.tile import RectGeometry

ROWS = 256
"""Rows of a block where the columns that rows can see vary."""
FEW = 2**14
"""Numbers up to which a copy takes less time than the views that would save it."""
SMALL = 2**18
"""Scores up to which a mask is one block: looking for what could be left out would take longer."""


def tiles(problem: Problem) -> tuple[int, int]:
    """Rows and columns of the kernel's own tiles."""
    rows = 256 if problem.length_q >= 768 else 64 if problem.length_q >= 192 else 32
    return min(rows, problem.length_q), min(512, problem.length_k)


def workspace_bytes(problem: Problem, backward: bool) -> int:
    """The kernel's tile of each thread, and the mask that is added to a block of rows, in either direction."""
    rows, columns = tiles(problem)
    tile = torch.get_num_threads() * rows * (columns + problem.dim_v) * problem.score_dtype.itemsize
    masked = problem.mask is not None or bool(problem.scores)
    return tile + (min(ROWS, problem.length_q) * problem.length_k * problem.score_dtype.itemsize if masked else 0)


class Block(NamedTuple):
    """Rows of some sequences against columns (none if the rows see nothing), with what masks them."""

    batch: slice
    rows: slice
    columns: slice
    causal: bool = False
    added: Tensor | None = None
    """Added to the scores, broadcastable to (sequences, heads, rows, columns)."""
    empty: Tensor | None = None
    """Rows that see nothing, bool, broadcastable to (sequences, heads, rows)."""


def blocks(problem: Problem, segment: Segment) -> Iterator[Block]:
    """The blocks of a segment, each row in one of them."""
    geometry = segment.geometry
    assert isinstance(geometry, RectGeometry), "a CPU reads lengths"
    batch, rows, columns = (slice(0, size) for size in (geometry.batch, geometry.rows, geometry.columns))
    scores = geometry.batch * geometry.heads * geometry.rows * geometry.columns
    if not (geometry.batch and geometry.heads and geometry.rows):
        return
    band = (None, None) if problem.mask is None else problem.mask.band(geometry)
    causal = None if problem.scores else causality(band, geometry.rows)
    if not geometry.columns or causal is not None:
        yield Block(batch, rows, columns, bool(causal))
    elif problem.mask is None or scores <= SMALL:
        keep = None if problem.mask is None else problem.mask.keep(geometry.whole())
        yield _masked(problem, geometry, batch, rows, columns, keep)
    elif geometry.rows <= ROWS and geometry.batch > 1 and band is None:
        yield from _by_sequence(problem, geometry)
    else:
        yield from _by_rows(problem, geometry)


def _by_sequence(problem: Problem, geometry: RectGeometry) -> Iterator[Block]:
    """Each sequence against the columns from the first to the last that its rows see."""
    keep = _collapsed(problem.mask.keep(geometry.whole()))
    rows, size = slice(0, geometry.rows), geometry.columns
    if keep.shape[0] == 1 or keep.shape[3] == 1:
        yield _masked(problem, geometry, slice(0, geometry.batch), rows, slice(0, size), keep)
        return
    seen, column = keep.flatten(1, 2).any(1), torch.arange(size)
    starts = torch.where(seen, column, size).amin(1)
    stops = torch.where(seen, column + 1, 0).amax(1)
    whole = keep.sum((1, 2, 3)) == (stops - starts) * keep.shape[1] * keep.shape[2]
    for number, (start, stop, everything) in enumerate(
        zip(starts.tolist(), stops.tolist(), whole.tolist(), strict=True)
    ):
        sequence, columns = slice(number, number + 1), slice(min(start, stop), stop)
        part = None if everything or start >= stop else keep[sequence, :, :, columns]
        yield _masked(problem, geometry, sequence, rows, columns, part)


def _by_rows(problem: Problem, geometry: RectGeometry) -> Iterator[Block]:
    """Blocks of rows against the columns from the first to the last that one of them sees."""
    form = NormalForm(problem.mask, geometry)
    heads, everything = slice(0, geometry.heads), slice(0, geometry.batch)
    apart = not form.uniform and geometry.heads * geometry.rows * geometry.columns > SMALL
    repeats: dict[tuple[int, int, int], Block] = {}
    for batch in [slice(number, number + 1) for number in range(geometry.batch)] if apart else [everything]:
        for start in range(0, geometry.rows, ROWS):
            rows = slice(start, min(start + ROWS, geometry.rows))
            visits = form.visits(batch, heads, rows, geometry.columns)
            columns = slice(visits[0].start, visits[-1].stop) if visits else slice(0, 0)
            place = (columns.start - rows.start, rows.stop - rows.start, columns.stop - columns.start)
            if place in repeats:
                yield repeats[place]._replace(rows=rows, columns=columns)
                continue
            keep = None
            if len(visits) > 1 or (visits and visits[0].partial):
                keep = form.keep(geometry.tile(batch, heads, rows, columns), batch, rows)
            block = _masked(problem, geometry, batch, rows, columns, keep)
            if form.is_band and not problem.scores:
                repeats[place] = block
            yield block


def _masked(
    problem: Problem, geometry: RectGeometry, batch: slice, rows: slice, columns: slice, keep: Tensor | None
) -> Block:
    empty = added = None
    if keep is not None:
        keep = _collapsed(keep)
        added, empty = Hidden(keep).added(problem.score_dtype, False), ~keep.any(-1)
    tile = geometry.tile(batch, slice(0, geometry.heads), rows, columns)
    for score in problem.scores:
        bias = tile.take(score.tensor, "pair").to(problem.score_dtype)
        added = bias if added is None else added + bias
    return Block(batch, rows, columns, False, None if added is None else dense_rows(added), empty)


def _collapsed(tensor: Tensor) -> Tensor:
    """The tensor with an extent of 1 where it repeats itself along a dimension."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


# What the kernel wants


def folds(query: Tensor, key: Tensor) -> bool:
    """Whether heads should stand for batches.

    The kernel writes (batch, length, heads, dim). With one head each, what it writes has the query's order.
    """
    return query.numel() > FEW and query.shape[1] == key.shape[1] and query.stride(1) > query.stride(2)


def scales_exactly(scale: float) -> bool:
    """Whether the scale is a power of two.

    With another one the kernel rounds each score once more, and not alike in forward and backward: weights of large
    scores then do not fit the LSE. So the query is scaled before.
    """
    return abs(math.frexp(scale)[0]) == 0.5


def widened(*parts: Tensor) -> Sequence[Tensor]:
    """The tensors with one head dim, filled up with zeros, which change nothing, and neighbours in memory along it."""
    dim = parts[0].shape[-1]
    for part in parts:
        if part.shape[-1] != dim or part.stride(-1) != 1:
            break
    else:
        return parts
    dim = max(part.shape[-1] for part in parts)
    return [pad(part, (0, dim - part.shape[-1])) if part.shape[-1] < dim else dense_rows(part) for part in parts]


def dense_rows(part: Tensor) -> Tensor:
    """The tensor with its last dimension's entries side by side."""
    return part if part.stride(-1) == 1 else part.contiguous()
