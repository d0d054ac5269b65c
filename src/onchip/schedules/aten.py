"""torch's own flash kernel for the CPU, which is kept well and is the fastest there is for what it covers.

It takes one head dim for all three inputs, an additive mask and top-left causality, and gives the LSE. Everything else
is brought to that: packed and padded batches go sequence by sequence, bands and masks in blocks of rows against the
columns that the block can see. The kernel multiplies hidden values by 0 rather than leaving them out, so a result that
is not finite is not returned: the call then goes to another schedule.

The forward computes in float32: in low precision the kernel takes as long or longer, and its LSE is less exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from onchip.normal_form import NormalForm
from onchip.problem import Problem
from onchip.scores import Bias
from onchip.segments import Hidden, Segment, segments
from onchip.strides import empty_ordered, is_ordered, laid_out
from onchip.tile import RectGeometry

NAME = "aten"
SUMMARY = "torch's CPU flash kernel: plain attention, causality, bands, masks, bias; no dropout, one head dim"

ROWS = 256
"""Rows of a block where the columns that rows can see vary."""
FEW = 2**14
"""Numbers up to which a copy takes less time than the views that would save it."""
SMALL = 2**18
"""Scores up to which a segment with a mask is one block: looking for what could be left out would take longer."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def unsupported(problem: Problem) -> list[str]:
    """Reasons why the forward cannot run here."""
    if problem.device.type != "cpu":
        return ["it is a kernel for the CPU"]
    reasons = []
    if problem.dtype == torch.float64:
        reasons.append("in float64 its bits depend on strides")
    if problem.seed is not None:
        reasons.append("it has no dropout")
    if not all(isinstance(score, Bias) for score in problem.scores):
        reasons.append("it changes scores by a bias only")
    return reasons


def unsupported_backward(problem: Problem) -> list[str]:
    """Reasons why the backward cannot run here."""
    reasons = unsupported(problem)
    if problem.scores:
        reasons.append("it has no gradient of a bias")
    if problem.dtype == torch.float16:
        reasons.append("in float16 its products round the scores")
    return reasons


def tiles(problem: Problem) -> tuple[int, int]:
    """Rows and columns of the kernel's own tiles."""
    rows = 256 if problem.length_q >= 768 else 64 if problem.length_q >= 192 else 32
    return min(rows, problem.length_q), min(512, problem.length_k)


def workspace_bytes(problem: Problem) -> int:
    """The kernel's tile of each thread, and the mask that is added to a block of rows."""
    rows, columns = tiles(problem)
    tile = torch.get_num_threads() * rows * (columns + problem.dim_v) * problem.score_dtype.itemsize
    masked = problem.mask is not None or bool(problem.scores)
    return tile + (min(ROWS, problem.length_q) * problem.length_k * problem.score_dtype.itemsize if masked else 0)


def pairs(problem: Problem) -> int:
    """Pairs of (query, key) whose score is computed, over all sequences and query heads. Reads lengths."""
    height, count = tiles(problem)[0], 0
    for segment in segments(problem):
        for rows, columns, causal, _, _ in _blocks(problem, segment):
            sequences = 1 if segment.packed else segment.batch.stop - segment.batch.start
            if causal:
                starts = range(rows.start, rows.stop, height)
                area = sum(min(height, rows.stop - start) * min(start + height, columns.stop) for start in starts)
            else:
                area = (rows.stop - rows.start) * (columns.stop - columns.start)
            count += sequences * problem.heads_q * area
    return count


class _Block(NamedTuple):
    """Rows against columns (none if the rows see nothing), with what masks them."""

    rows: slice
    columns: slice
    causal: bool = False
    added: Tensor | None = None
    """Added to the scores, broadcastable to (sequences, heads, rows, columns)."""
    empty: Tensor | None = None
    """Rows that see nothing, bool, broadcastable to (sequences, heads, rows)."""


def forward(problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor] | None:
    """Output in the query's stride order and dtype, LSE; None if something hidden may have got in."""
    causal = _causality(problem.band, problem.length_q) if problem.band is not None else None
    if causal is not None and query.numel() and key.numel():
        out, lse = _attend(query, key, value, problem.scale, None, causal)
        if out.dtype != query.dtype or not is_ordered(out, query):
            out = empty_ordered(tuple(out.shape), query, query.dtype).copy_(out)
        lse = lse.contiguous()
        # the kernel gives 0 for a row whose scores are all minus infinity
        if int(torch.count_nonzero(lse)) < lse.numel() or (causal and not math.isfinite(out.sum())):
            return None
        return out, lse
    out = empty_ordered((*query.shape[:-1], problem.dim_v), query, query.dtype)
    lse = torch.empty(
        query.shape[:2][::-1] if problem.layout == "packed" else query.shape[:-1], dtype=problem.score_dtype
    )
    if problem.layout != "dense":
        out.zero_()
        lse.fill_(-math.inf)
    for segment in segments(problem):
        q, k, v = segment.of_rows(query), segment.of_columns(key), segment.of_columns(value)
        segment_out, segment_lse = segment.of_rows(out), segment.of_lse(lse)
        for rows, columns, is_causal, added, empty in _blocks(problem, segment):
            if columns.start == columns.stop:
                segment_out[:, :, rows] = 0.0
                segment_lse[:, :, rows] = -math.inf
                continue
            part, part_lse = _attend(q[:, :, rows], k[:, :, columns], v[:, :, columns], problem.scale, added, is_causal)
            segment_out[:, :, rows] = part
            segment_lse[:, :, rows] = part_lse if empty is None else part_lse.masked_fill(empty, -math.inf)
    return (out, lse) if math.isfinite(out.sum()) and torch.count_nonzero(lse) == lse.numel() else None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, added: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    if not _scales_exactly(scale):
        query, scale = query.to(torch.float32) * scale, 1.0
    dim_v = value.shape[-1]
    query, key, value = _widened(query.float(), key.float(), value.float())
    if added is None and _folds(query, key):
        batch, heads, rows, dim = query.shape
        inputs = (part.reshape(batch * heads, 1, *part.shape[2:]) for part in (query, key, value))
        out, lse = _flash(*inputs, 0.0, causal, attn_mask=None, scale=scale)
        out, lse = out.view(batch, heads, rows, dim), lse.view(batch, heads, rows)
    else:
        out, lse = _flash(query, key, value, 0.0, causal, attn_mask=added, scale=scale)
    return (out if dim_v == out.shape[-1] else out[..., :dim_v]), lse


def _folds(query: Tensor, key: Tensor) -> bool:
    """Whether heads should stand for batches.

    The kernel writes (batch, length, heads, dim). With one head each, what it writes has the query's order.
    """
    return query.numel() > FEW and query.shape[1] == key.shape[1] and query.stride(1) > query.stride(2)


def _scales_exactly(scale: float) -> bool:
    """Whether the scale is a power of two.

    With another one the kernel rounds each score once more, and not alike in forward and backward: weights of large
    scores then do not fit the LSE. So the query is scaled before.
    """
    return abs(math.frexp(scale)[0]) == 0.5


def _widened(*parts: Tensor) -> Sequence[Tensor]:
    """The tensors with one head dim, filled up with zeros, which change nothing, and neighbours in memory along it."""
    dim = parts[0].shape[-1]
    for part in parts:
        if part.shape[-1] != dim or part.stride(-1) != 1:
            break
    else:
        return parts
    dim = max(part.shape[-1] for part in parts)
    return [pad(part, (0, dim - part.shape[-1])) if part.shape[-1] < dim else _dense_rows(part) for part in parts]


def _dense_rows(part: Tensor) -> Tensor:
    return part if part.stride(-1) == 1 else part.contiguous()


def _causality(band: tuple[int | None, int | None], rows: int) -> bool | None:
    """False if the band hides nothing, True if it is the kernel's causality (column <= row), None if it is another."""
    low, high = band
    if low is not None and low > 1 - rows:
        return None
    return False if high is None else True if high == 0 else None


def _blocks(problem: Problem, segment: Segment) -> Iterator[_Block]:
    geometry = segment.geometry
    assert isinstance(geometry, RectGeometry), "a CPU reads lengths"
    rows, columns = slice(0, geometry.rows), slice(0, geometry.columns)
    scores = geometry.batch * geometry.heads * geometry.rows * geometry.columns
    if not (geometry.batch and geometry.heads and geometry.rows):
        return
    band = (None, None) if problem.mask is None else problem.mask.band(geometry)
    causal = None if band is None or problem.scores else _causality(band, geometry.rows)
    if not geometry.columns or causal is not None:
        yield _Block(rows, columns, bool(causal))
    elif scores <= SMALL:
        keep = None if problem.mask is None else problem.mask.keep(geometry.whole())
        yield _masked(problem, geometry, rows, columns, keep)
    else:
        yield from _varying(problem, geometry)


def _varying(problem: Problem, geometry: RectGeometry) -> Iterator[_Block]:
    """Blocks of rows against the columns from the first to the last that one of them sees."""
    form = NormalForm(problem.mask, geometry)
    repeats: dict[tuple[int, int, int], _Block] = {}
    for start in range(0, geometry.rows, ROWS):
        rows = slice(start, min(start + ROWS, geometry.rows))
        visits = form.visits(slice(0, geometry.batch), slice(0, geometry.heads), rows, geometry.columns)
        columns = slice(visits[0].start, visits[-1].stop) if visits else slice(0, 0)
        place = (columns.start - rows.start, rows.stop - rows.start, columns.stop - columns.start)
        if form.is_band and not problem.scores and place in repeats:
            yield repeats[place]._replace(rows=rows, columns=columns)
            continue
        keep = None
        if len(visits) > 1 or (visits and visits[0].partial):
            keep = form.keep(
                geometry.tile(slice(0, geometry.batch), slice(0, geometry.heads), rows, columns),
                slice(0, geometry.batch),
                rows,
            )
        repeats[place] = block = _masked(problem, geometry, rows, columns, keep)
        yield block


def _masked(problem: Problem, geometry: RectGeometry, rows: slice, columns: slice, keep: Tensor | None) -> _Block:
    added = None if keep is None else Hidden(keep).added(problem.score_dtype, False)
    tile = geometry.tile(slice(0, geometry.batch), slice(0, geometry.heads), rows, columns)
    for score in problem.scores:
        bias = tile.take(score.tensor, "pair").to(problem.score_dtype)
        added = bias if added is None else added + bias
    if added is not None and added.stride(-1) != 1:
        added = added.contiguous()
    return _Block(rows, columns, False, added, None if keep is None else ~keep.any(-1))


def backward(
    problem: Problem,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    tensors: Sequence[Tensor],
    needs: Sequence[bool],
) -> list[Tensor | None] | None:
    """Gradients of query, key and value; None if something hidden may have got in."""
    if grad_out is None:
        grad_out = torch.zeros((), dtype=query.dtype).expand(out.shape)
    causal = _causality(problem.band, problem.length_q) if problem.band is not None else None
    if causal is not None and query.numel() and key.numel():
        found = _differentiate(problem.scale, query, key, value, grad_out, out, lse, grad_lse, None, causal)
        gradients = [laid_out(part, like) for part, like in zip(found, (query, key, value), strict=True)]
        if causal and not all(math.isfinite(gradient.sum()) for gradient in gradients):
            return None
        return [gradient if need else None for gradient, need in zip(gradients, needs, strict=False)]
    gradients = [torch.zeros_like(tensor) for tensor in (query, key, value)]
    for segment in segments(problem):
        of_rows = [segment.of_rows(part) for part in (query, grad_out, out)]
        of_columns = [segment.of_columns(part) for part in (key, value)]
        of_lse = [segment.of_lse(lse), None if grad_lse is None else segment.of_lse(grad_lse)]
        grad_query = segment.of_rows(gradients[0])
        grad_key, grad_value = (segment.of_columns(part) for part in gradients[1:])
        # columns that several blocks see add up; in low precision their sums need more
        sums = [grad_key, grad_value]
        blocks = list(_blocks(problem, segment))
        if len(blocks) > 1 and problem.dtype != problem.score_dtype:
            sums = [torch.zeros_like(part, dtype=problem.score_dtype) for part in sums]
        for rows, columns, is_causal, added, empty in blocks:
            if columns.start == columns.stop:
                continue
            q, do, o = (part[:, :, rows] for part in of_rows)
            k, v = (part[:, :, columns] for part in of_columns)
            row_lse, row_grad_lse = (None if part is None else part[:, :, rows] for part in of_lse)
            assert row_lse is not None
            if empty is not None:
                # as the kernel has it: weights of such a row are then exp(-inf - 0) = 0
                row_lse = row_lse.masked_fill(empty, 0.0)
            found = _differentiate(problem.scale, q, k, v, do, o, row_lse, row_grad_lse, added, is_causal)
            grad_query[:, :, rows] = found[0]
            sums[0][:, :, columns] += found[1]
            sums[1][:, :, columns] += found[2]
        if sums[0] is not grad_key:
            grad_key.copy_(sums[0])
            grad_value.copy_(sums[1])
    if not all(math.isfinite(gradient.sum()) for gradient in gradients):
        return None
    return [gradient if need else None for gradient, need in zip(gradients, needs, strict=False)]


def _differentiate(
    scale: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_out: Tensor,
    out: Tensor,
    lse: Tensor,
    grad_lse: Tensor | None,
    added: Tensor | None = None,
    causal: bool = False,
) -> tuple[Tensor, ...]:
    if not _scales_exactly(scale):
        found = _differentiate(1.0, query * scale, key, value, grad_out, out, lse, grad_lse, added, causal)
        return found[0] * scale, *found[1:]
    dims = (query.shape[-1], key.shape[-1], value.shape[-1])
    inputs = _widened(grad_out, query, key, value, out)
    if grad_lse is not None:
        # one more dim carries the LSE's gradient: (do, dlse) (v, 1) - sum((do, dlse) (out, 0)) = dp - delta + dlse
        zero, one = lse.new_zeros(1), lse.new_ones(1)
        more = (grad_lse[..., None], zero, zero, one, zero)
        inputs = [
            torch.cat([part.to(lse.dtype), last.expand(*part.shape[:-1], 1)], -1)
            for part, last in zip(inputs, more, strict=True)
        ]
    folds = added is None and _folds(query, key)
    if folds:
        batch, heads = query.shape[:2]
        inputs = [part.reshape(batch * heads, 1, *part.shape[2:]) for part in inputs]
        lse = lse.reshape(batch * heads, 1, -1)
    found = _flash_backward(*inputs, lse, 0.0, causal, attn_mask=added, scale=scale)
    if folds:
        found = tuple(part.unflatten(0, (batch, heads)).squeeze(2) for part in found)
    if dims[0] == dims[2] == found[0].shape[-1]:
        return found
    return tuple(part[..., :dim] for part, dim in zip(found, dims, strict=True))
