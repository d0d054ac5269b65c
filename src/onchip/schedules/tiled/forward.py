"""Forward: each tile of rows walks over its pieces of columns with a running softmax state."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onchip import softmax
from onchip.normal_form import Visit
from onchip.problem import Problem
from onchip.schedules.tiled.tiles import (
    Group,
    Pieces,
    Scratch,
    carefulness,
    change,
    hide,
    must_select,
    product,
    scaled,
    sound,
)
from onchip.scores import sink_of, steps
from onchip.segments import segments
from onchip.strides import empty_ordered


def forward(problem: Problem, query: Tensor, key: Tensor, value: Tensor, *, saves: bool) -> tuple[Tensor, Tensor]:
    """Output in the query's stride order and dtype, LSE in float32 (float64 for float64), whatever follows."""
    *plain, last = carefulness(problem)
    for careful in plain:
        out, lse = _forward(problem, query, key, value, careful)
        if sound(out):
            return out, lse
    return _forward(problem, query, key, value, last)


def _forward(problem: Problem, query: Tensor, key: Tensor, value: Tensor, careful: bool) -> tuple[Tensor, Tensor]:
    dtype = problem.score_dtype
    out = empty_ordered((*query.shape[:-1], problem.dim_v), query, query.dtype)
    lse_shape = query.shape[:2][::-1] if problem.layout == "packed" else query.shape[:-1]
    lse = torch.empty(lse_shape, dtype=dtype, device=query.device)
    if problem.layout != "dense":
        out.zero_()
        lse.fill_(-math.inf)
    scratch = Scratch(dtype, query.device)
    for segment in segments(problem):
        q, k, v = segment.of_rows(query), segment.of_columns(key), segment.of_columns(value)
        pieces = Pieces(problem, segment, careful)
        for group in pieces.groups(q.shape[0], backward=False):
            _forward_group(
                problem, pieces, group, scratch, careful, q, k, v, group.of_queries(segment.of_rows(out)),
                group.of_queries(segment.of_lse(lse)),
            )  # fmt: skip
    return out, lse


def _forward_group(
    problem: Problem,
    pieces: Pieces,
    group: Group,
    scratch: Scratch,
    careful: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
) -> None:
    dtype = problem.score_dtype
    k, v = group.of_keys(key, dtype), group.of_keys(value, dtype)  # (P, C, D), (P, C, DV)
    q_all = group.of_queries(query)
    changes = steps(problem.scores)
    select = must_select(problem, careful)
    memory = scratch.of(q_all.shape[0] * q_all.shape[1] * group.rows * group.columns)
    sink = sink_of(problem.scores)
    for start in range(0, q_all.shape[2], group.rows):
        rows = slice(start, min(start + group.rows, q_all.shape[2]))
        q = scaled(q_all[:, :, rows], problem.scale, dtype, k.shape[0])
        running = softmax.Running()
        for visit in pieces.visits(group, rows):
            tile = pieces.tile(group, rows, visit)
            hidden = pieces.hidden(group, rows, visit, tile)
            s = product(q, k[:, visit.start : visit.stop], memory)  # (P, G * R, C)
            if hidden is not None or changes:
                score = s.view(q_all.shape[0], q_all.shape[1], rows.stop - rows.start, visit.stop - visit.start)
                for step in changes:
                    score = change(score, step, tile)
                # strides of a bias must not decide in which order sums run
                s = hide(score.contiguous(), hidden, select).view(s.shape)
            seen = s != -math.inf if careful and (hidden is not None or changes) else None
            dropout = problem.dropout_factor(tile)
            running.update_(s, v[:, visit.start : visit.stop], None if dropout is None else dropout.view(s.shape), seen)
        _write(problem, pieces, group, rows, running.state, sink, out, lse)


def _write(
    problem: Problem,
    pieces: Pieces,
    group: Group,
    rows: slice,
    state: softmax.State | None,
    sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Finish the rows of a tile."""
    shape = lse[:, :, rows].shape
    if state is None:
        state = softmax.empty(tuple(shape), problem.dim_v, lse.dtype, lse.device)
    else:
        state = softmax.State(*(part.view(*shape, part.shape[-1]) for part in state))
    if sink is None:
        finished, finished_lse = softmax.finish(state)
    else:
        tile = pieces.tile(group, rows, Visit(0, 0, False))
        finished, finished_lse = softmax.finish(state, tile.take(sink, "head")[..., 0])
        exists = tile.exists()
        if exists is not None:
            finished_lse.masked_fill_(~exists[..., 0], -math.inf)
    if problem.seed is not None:
        finished *= problem.kept_scale
    out[:, :, rows] = finished
    lse[:, :, rows] = finished_lse
