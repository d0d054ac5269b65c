"""Forward: block by block."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.choices import has_bfloat16_tiles
from onchip.masks import causality
from onchip.problem import Problem
from onchip.schedules.aten.kernel import flash
from onchip.schedules.aten.tiles import Block, blocks, folds, scales_exactly, widened
from onchip.scores import Bias
from onchip.segments import segments
from onchip.strides import empty_ordered, is_ordered

PIECE = 2**18
"""Numbers of a query that is converted or scaled at a time: what is written for it then stays in the caches."""


def forward(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, *, saves: bool
) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
    """Output in the query's stride order and dtype, LSE, and rows that another schedule must compute, if there are any.

    Args:
        saves: a backward may follow, whose weights must fit the LSE.
    """
    native = problem.dtype == torch.bfloat16 and not problem.gives_lse and has_bfloat16_tiles()
    out, lse, hides = _forward(problem, query, key, value, saves, native)
    # the kernel gives 0 for a row whose scores are all minus infinity
    if int(torch.count_nonzero(lse)) == lse.numel() and not (hides and not math.isfinite(out.sum())):
        return out, lse
    clean_query, clean_key, clean_value, lost = cleaned(problem, query, key, value)
    out, lse, _ = _forward(problem, clean_query, clean_key, clean_value, saves, native)
    return out, lse, lost | (lse == 0) | _by_row(problem, ~torch.isfinite(out).all(-1))


def cleaned(problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs with 0 for what is not finite or large enough to make a score that is not, and the rows that this changes.

    Rows that do not see a changed key have the result that they had, to the bit: hidden keys weigh exactly 0.
    """
    limit = 1e18 / max(1.0, (problem.dim_qk * abs(problem.scale)) ** 0.5)
    bad_rows = ~(query.abs().amax(-1) < limit)
    bad = ~(key.abs().amax(-1) < limit) | ~torch.isfinite(value).all(-1)
    scores = tuple(Bias(torch.where(score.tensor == -math.inf, -math.inf, 0.0)) for score in problem.scores)
    # a row of equal weights sums to more than 0 where it sees a bad key
    marks = bad[..., None].to(torch.float32).expand(*bad.shape, problem.dim_v)
    blank = replace(problem, scores=scores, dtype=torch.float32)
    zero = torch.zeros((), dtype=torch.float32)
    seen, _, _ = _forward(blank, zero.expand(query.shape), zero.expand(key.shape), marks, False, False)
    lost = _by_row(problem, bad_rows | (seen[..., 0] > 0))
    return (
        query.masked_fill(bad_rows[..., None], 0.0),
        key.masked_fill(bad[..., None], 0.0),
        value.masked_fill(bad[..., None], 0.0),
        lost,
    )


def _by_row(problem: Problem, rows: Tensor) -> Tensor:
    """What is said of the query's rows, shaped like the LSE."""
    return rows.mT if problem.layout == "packed" else rows


def _forward(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, saves: bool, native: bool
) -> tuple[Tensor, Tensor, bool]:
    """Output, LSE, and whether anything is hidden inside a block."""
    how = _How(problem.scale, saves and not native and not scales_exactly(problem.scale), native)
    causal = causality(problem.band, problem.length_q)
    if causal is not None and query.numel() and key.numel():
        if query.numel() <= 2 * PIECE or native or (query.dtype == torch.float32 and not how.prescale):
            out, lse = _attend(query, key, value, how, None, causal)
            if out.dtype != query.dtype or not is_ordered(out, query):
                out = empty_ordered(tuple(out.shape), query, query.dtype).copy_(out)
            return out, lse.contiguous(), causal
        out, lse = _empty(problem, query)
        whole = Block(slice(0, problem.batch), slice(0, problem.length_q), slice(0, problem.length_k), causal)
        _write(out, lse, query, key, value, how, whole)
        return out, lse, causal
    out, lse = _empty(problem, query)
    if problem.layout != "dense":
        out.zero_()
        lse.fill_(-math.inf)
    for segment in segments(problem):
        inputs = (segment.of_rows(query), segment.of_columns(key), segment.of_columns(value))
        for block in blocks(problem, segment):
            _write(segment.of_rows(out), segment.of_lse(lse), *inputs, how, block)
    return out, lse, True


class _How(NamedTuple):
    """How a call of the kernel computes: the scale, whether queries are scaled before, and whether in bfloat16."""

    scale: float
    prescale: bool
    native: bool


def _empty(problem: Problem, query: Tensor) -> tuple[Tensor, Tensor]:
    lse_shape = query.shape[:2][::-1] if problem.layout == "packed" else query.shape[:-1]
    out = empty_ordered((*query.shape[:-1], problem.dim_v), query, query.dtype)
    return out, torch.empty(lse_shape, dtype=problem.score_dtype)


def _write(out: Tensor, lse: Tensor, query: Tensor, key: Tensor, value: Tensor, how: _How, block: Block) -> None:
    """Write a block of (sequences, heads, rows, dim) and (sequences, heads, rows)."""
    batch, rows, columns = block.batch, block.rows, block.columns
    out, lse = out[batch, :, rows], lse[batch, :, rows]
    if columns.start == columns.stop:
        out.zero_()
        lse.fill_(-math.inf)
        return
    query, key, value = query[batch, :, rows], key[batch, :, columns], value[batch, :, columns]
    for place, place_k in _pieces(query, key):
        added = block.added
        if added is not None:
            added = added[
                tuple(slice(None) if size == 1 else part for size, part in zip(added.shape, place, strict=False))
            ]
        part, part_lse = _attend(query[place], key[place_k], value[place_k], how, added, block.causal)
        out[place] = part
        lse[place] = part_lse
    if block.empty is not None:
        lse.masked_fill_(block.empty, -math.inf)


def _pieces(query: Tensor, key: Tensor) -> Iterator[tuple[tuple[slice, slice], tuple[slice, slice]]]:
    """Sequences and heads, of query and key, that are converted together; as many as keep the threads busy alike."""
    sequences, heads, rows, dim = query.shape
    group, threads = heads // key.shape[1], torch.get_num_threads()
    step = max(1, PIECE // (heads * rows * dim))
    step_heads = heads
    if sequences == 1:
        step_heads = -(-max(1, PIECE // (rows * dim)) // (group * threads)) * group * threads
    for first in range(0, sequences, step):
        for head in range(0, heads, step_heads):
            last = min(head + step_heads, heads)
            batch = slice(first, min(first + step, sequences))
            yield (batch, slice(head, last)), (batch, slice(head // group, last // group))


def _attend(
    query: Tensor, key: Tensor, value: Tensor, how: _How, added: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor]:
    """Output, in float32 unless native, and LSE, (sequences, heads, rows, dim) and (sequences, heads, rows)."""
    scale, dim_v = how.scale, value.shape[-1]
    if how.prescale:
        query, scale = query.to(torch.float32) * scale, 1.0
    if not how.native:
        query, key, value = query.float(), key.float(), value.float()
    query, key, value = widened(query, key, value)
    if added is None and folds(query, key):
        batch, heads, rows, dim = query.shape
        inputs = (part.reshape(batch * heads, 1, *part.shape[2:]) for part in (query, key, value))
        out, lse = flash(*inputs, 0.0, causal, attn_mask=None, scale=scale)
        out, lse = out.view(batch, heads, rows, dim), lse.view(batch, heads, rows)
    else:
        out, lse = flash(query, key, value, 0.0, causal, attn_mask=added, scale=scale)
    return (out if dim_v == out.shape[-1] else out[..., :dim_v]), lse
