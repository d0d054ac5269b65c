"""Tiled attention in plain torch: the online-softmax loop, with memory linear in the length.

    for each group of heads that fits a score tile of TILE_ELEMENTS
      for each tile of rows
        for each piece of columns that its rows can see            (normal_form.py: empty pieces are never visited)
          s = scale * q k^T ; scores change it ; hidden pairs become -inf, in partial pieces only
          the running state (softmax.py) takes (s, v)
        out, lse = finish(state)

Backward walks the same pieces, recomputes p = exp(s - lse), and needs nothing but (q, k, v, out, lse):

    dv += p^T do      dp = do v^T      ds = p * (dp - delta)      dq += ds k      dk += ds^T q
    with delta = sum(do * out) - dlse                 (FlashAttention-2, algorithm 2; dlse enters like a negative delta)

Inputs in low precision are widened for a group at a time: on most CPUs float32 products are several times faster, and
they are more exact.

Legend: P pairs of (sequence, key head), G query heads of a pair, R rows, C columns, D and DV head dims.
Tiles of scores are (sequences, heads, R, C) for masks and scores and (P, G * R, C) for products: a pair's query heads
stand in the rows, so K and V are never repeated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from onchip import philox, softmax
from onchip.normal_form import NormalForm, Visit
from onchip.problem import Problem
from onchip.products import tame, weighted_sum
from onchip.scores import hidden, sink_of, steps, taken
from onchip.strides import empty_ordered
from onchip.tile import PackedGeometry, RectGeometry, Tile

NAME = "tiled"
SUMMARY = "the online-softmax loop in plain torch: linear memory, every feature, any device, training included"

ROWS, COLUMNS = 256, 512
TILE_ELEMENTS = 8 * ROWS * COLUMNS
"""Scores in one tile: 4 MiB of float32, which with its operands stays in a core's share of the cache."""


def unsupported(problem: Problem) -> list[str]:
    """Reasons why this schedule cannot run the problem."""
    return []


def workspace_bytes(problem: Problem) -> int:
    """A few score tiles, and the widened K, V and their gradients of one group of heads."""
    width = problem.score_dtype.itemsize
    tile = min(
        TILE_ELEMENTS, max(1, problem.length_q) * max(1, problem.length_k) * max(1, problem.batch * problem.heads_q)
    )
    return 3 * tile * width + 2 * problem.length_k * (problem.dim_qk + problem.dim_v) * 8 * width


def tiles(problem: Problem) -> tuple[int, int]:
    """Rows and columns of a tile of scores."""
    group = next(_groups(problem, 1, problem.length_q, problem.length_k), None)
    return (group.rows, group.columns) if group is not None else (ROWS, COLUMNS)


def pairs(problem: Problem) -> int:
    """Pairs of (query, key) in the pieces that are visited, over all sequences and query heads. Reads lengths."""
    count = 0
    for segment in _segments(problem):
        pieces = Pieces(problem, segment, False)
        sequences = 1 if segment.packed else segment.batch.stop - segment.batch.start
        length_q, length_k = segment.rows.stop - segment.rows.start, segment.columns.stop - segment.columns.start
        groups = list(_groups(problem, sequences, length_q, length_k))
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


# Walking over the problem


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


def _segments(problem: Problem) -> Iterator[Segment]:
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
        return part.to(dtype).reshape(part.shape[0] * part.shape[1], *part.shape[2:])


def _groups(problem: Problem, sequences: int, length_q: int, length_k: int) -> Iterator[Group]:
    columns = max(1, min(COLUMNS, length_k))
    rows = max(1, min(ROWS, length_q))
    # a pair brings all its query heads: with many of them, tiles are lower instead
    while rows > 16 and problem.group * rows * columns > TILE_ELEMENTS:
        rows //= 2
    pairs = max(1, TILE_ELEMENTS // (problem.group * rows * columns))
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
        # on the CPU every segment has lengths that are known ints; elsewhere nothing is read and every piece is partial
        self._form = NormalForm(problem.mask, segment.geometry) if _on_host(segment.geometry) else None
        masked = problem.layout != "dense" or problem.mask is not None
        self._may_hide = masked

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


def _on_host(geometry: RectGeometry | PackedGeometry) -> TypeGuard[RectGeometry]:
    return isinstance(geometry, RectGeometry) and geometry.device.type == "cpu"


def _hide(score: Tensor, keep: Tensor | None, careful: bool) -> Tensor:
    """Minus infinity where hidden, in place."""
    if keep is None:
        return score
    if not careful and keep.shape[0] == 1 and keep.shape[1] == 1:
        # scores are known to be finite, and adding one small tile to all heads is far cheaper than a select
        hiding = torch.zeros(keep.shape, dtype=score.dtype, device=score.device).masked_fill_(~keep, -math.inf)
        return score.add_(hiding)
    return score.masked_fill_(~keep, -math.inf)


def _careful(problem: Problem, *tensors: Tensor | None) -> bool:
    """Whether hidden values may be non-finite. A GPU is not asked."""
    on_host = problem.device.type == "cpu"
    hides = problem.mask is not None or any(step.may_hide for step in problem.scores)
    if not on_host or not hides:
        return hides or (not on_host and problem.layout != "dense")
    query, key, *others = tensors
    assert query is not None and key is not None
    return not tame(query, key, problem.scale, *others)


# Forward


def forward(problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output in the query's stride order and dtype, LSE in float32 (float64 for float64)."""
    dtype = problem.score_dtype
    out = empty_ordered((*query.shape[:-1], problem.dim_v), query, query.dtype)
    lse_shape = query.shape[:2][::-1] if problem.layout == "packed" else query.shape[:-1]
    lse = torch.empty(lse_shape, dtype=dtype, device=query.device)
    if problem.layout != "dense":
        out.zero_()
        lse.fill_(-math.inf)
    careful = _careful(problem, query, key, value)
    for segment in _segments(problem):
        q, k, v = segment.of_rows(query), segment.of_columns(key), segment.of_columns(value)
        pieces = Pieces(problem, segment, careful)
        for group in _groups(problem, q.shape[0], q.shape[2], k.shape[2]):
            _forward_group(
                problem, pieces, group, careful, q, k, v, group.of_queries(segment.of_rows(out)),
                group.of_queries(segment.of_lse(lse)),
            )  # fmt: skip
    return out, lse


def _forward_group(
    problem: Problem,
    pieces: Pieces,
    group: Group,
    careful: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
) -> None:
    dtype = problem.score_dtype
    k = group.of_keys(key, dtype).mT  # (P, D, C)
    v = group.of_keys(value, dtype)  # (P, C, DV)
    q_all = group.of_queries(query)
    changes = steps(problem.scores)
    scratch = torch.empty(
        q_all.shape[0] * q_all.shape[1] * group.rows * group.columns, dtype=dtype, device=query.device
    )
    sink = sink_of(problem.scores)
    for start in range(0, q_all.shape[2], group.rows):
        rows = slice(start, min(start + group.rows, q_all.shape[2]))
        q = _scaled(q_all[:, :, rows], problem.scale, dtype, k.shape[0])
        running = softmax.Running()
        tile = None
        for visit in pieces.visits(group, rows):
            tile = pieces.tile(group, rows, visit)
            keep = pieces.keep(group, rows, visit, tile)
            s = _product(q, k[:, :, visit.start : visit.stop], scratch)  # (P, G * R, C)
            shape = (q_all.shape[0], q_all.shape[1], rows.stop - rows.start, visit.stop - visit.start)
            score = s.view(shape)
            for step in changes:
                score = step.apply(score, tile, taken(step, tile))
            score = _hide(score, keep, careful)
            seen = (score != -math.inf).view(s.shape) if careful and (keep is not None or changes) else None
            dropout = problem.dropout_keep(tile)
            running.update_(
                score.reshape(s.shape),
                v[:, visit.start : visit.stop],
                None if dropout is None else dropout.view(s.shape),
                seen,
            )
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
    if sink is not None:
        tile = pieces.tile(group, rows, Visit(0, 0, False))
        sink = tile.take(sink, "head")[..., 0]
    finished, finished_lse = softmax.finish(state, sink)
    if problem.seed is not None:
        finished *= philox.kept_scale(problem.dropout_p)
    out[:, :, rows] = finished
    lse[:, :, rows] = finished_lse


def _scaled(part: Tensor, factor: float, dtype: torch.dtype, pairs: int) -> Tensor:
    """(sequences, heads, R, D) times a factor as (P, G * R, D)."""
    scaled = part.to(dtype) * factor
    return scaled.reshape(pairs, -1, part.shape[-1])


def _product(left: Tensor, right: Tensor, scratch: Tensor) -> Tensor:
    """left @ right in scratch memory."""
    shape = (left.shape[0], left.shape[1], right.shape[2])
    return torch.bmm(left, right, out=scratch[: math.prod(shape)].view(shape))


# Backward


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
) -> list[Tensor | None]:
    """Gradients of query, key, value and of each of `tensors`, None where not needed.

    `tensors` are the operator's; `needs` says which of (query, key, value, *tensors) want a gradient.
    """
    dtype = problem.score_dtype
    if grad_out is None:
        grad_out = torch.zeros((), dtype=query.dtype, device=query.device).expand(out.shape)
    # tokens outside every sequence keep a gradient of 0
    fresh = torch.empty_like if problem.layout == "dense" else torch.zeros_like
    grad_query = fresh(query) if needs[0] else None
    grad_key = torch.zeros_like(key) if needs[1] else None
    grad_value = torch.zeros_like(value) if needs[2] else None
    totals: list[Tensor | None] = [
        torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32)) if need else None
        for tensor, need in zip(tensors, needs[3:], strict=True)
    ]
    careful = _careful(problem, query, key, value, grad_out, grad_lse)
    for segment in _segments(problem):
        inputs = (segment.of_rows(query), segment.of_columns(key), segment.of_columns(value))
        rowwise = (segment.of_rows(grad_out), segment.of_rows(out), segment.of_lse(lse))
        of_lse = None if grad_lse is None else segment.of_lse(grad_lse)
        grads = (
            None if grad_query is None else segment.of_rows(grad_query),
            None if grad_key is None else segment.of_columns(grad_key),
            None if grad_value is None else segment.of_columns(grad_value),
        )
        walk = _Backward(problem, Pieces(problem, segment, careful), careful, dtype, tensors, totals)
        for group in _groups(problem, inputs[0].shape[0], inputs[0].shape[2], inputs[1].shape[2]):
            walk.group(group, *inputs, *rowwise, of_lse, *grads)
    return [
        grad_query,
        grad_key,
        grad_value,
        *(None if total is None else total.to(tensor.dtype) for total, tensor in zip(totals, tensors, strict=True)),
    ]


class _Backward:
    """The backward of one segment."""

    def __init__(
        self,
        problem: Problem,
        pieces: Pieces,
        careful: bool,
        dtype: torch.dtype,
        tensors: Sequence[Tensor],
        totals: Sequence[Tensor | None],
    ) -> None:
        self._problem, self._pieces, self._careful, self._dtype = problem, pieces, careful, dtype
        self._changes = steps(problem.scores)
        by_identity = {id(tensor): total for tensor, total in zip(tensors, totals, strict=True)}
        self._total = by_identity.get
        # an additive step that wants no gradient leaves the gradient of the score as it is
        self._differentiates = any(
            not step.additive or any(self._total(id(tensor)) is not None for tensor, _ in step.parameters)
            for step in self._changes
        )
        self._sink = sink_of(problem.scores)

    def group(
        self,
        group: Group,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        grad_out: Tensor,
        out: Tensor,
        lse: Tensor,
        grad_lse: Tensor | None,
        grad_query: Tensor | None,
        grad_key: Tensor | None,
        grad_value: Tensor | None,
    ) -> None:
        problem, dtype = self._problem, self._dtype
        k, v = group.of_keys(key, dtype), group.of_keys(value, dtype)  # (P, C, D), (P, C, DV)
        q_all, do_all, out_all = (group.of_queries(tensor) for tensor in (query, grad_out, out))
        lse_all = group.of_queries(lse)
        dk = None if grad_key is None else _accumulator(grad_key[group.batch, group.key_heads], k)
        dv = None if grad_value is None else _accumulator(grad_value[group.batch, group.key_heads], v)
        wants_scores = grad_query is not None or dk is not None or self._differentiates
        size = q_all.shape[0] * q_all.shape[1] * group.rows * group.columns
        scratch = torch.empty((2, size), dtype=dtype, device=query.device)

        for start in range(0, q_all.shape[2], group.rows):
            rows = slice(start, min(start + group.rows, q_all.shape[2]))
            q = _scaled(q_all[:, :, rows], problem.scale, dtype, k.shape[0])  # (P, G * R, D)
            do = do_all[:, :, rows].to(dtype).reshape(k.shape[0], -1, problem.dim_v)  # (P, G * R, DV)
            row_lse = lse_all[:, :, rows]
            delta = self._delta(do_all[:, :, rows], out_all[:, :, rows])
            if grad_lse is not None:
                delta = delta - group.of_queries(grad_lse)[:, :, rows].to(dtype)
            if self._sink is not None:
                self._add_sink(group, rows, row_lse, delta)
            delta = delta.reshape(k.shape[0], -1, 1)
            # a row that sees nothing weighs nothing: exp(s - inf) is 0
            shift = row_lse.masked_fill(row_lse == -math.inf, math.inf).reshape(k.shape[0], -1, 1)
            dq = torch.zeros_like(q) if grad_query is not None else None
            visits = self._pieces.visits(group, rows)
            for visit in visits:
                columns = slice(visit.start, visit.stop)
                tile = self._pieces.tile(group, rows, visit)
                keep = self._pieces.keep(group, rows, visit, tile)
                s = _product(q, k[:, columns].mT, scratch[0])  # (P, G * R, C)
                shape = (*row_lse.shape, visit.stop - visit.start)
                changed, leaves = self._change(s.view(shape), tile)
                # a step may have saved its own result for its gradient
                score = _hide(changed if leaves is None else changed.detach().clone(), keep, self._careful)
                seen = (score != -math.inf).view(s.shape) if self._careful else None
                if len(visits) == 1:
                    # a row that is whole in one piece need not take its LSE, which is rounded, for its sum
                    p = softmax.weights_(score, self._sink_logits(tile)).reshape(s.shape)
                else:
                    p = softmax.exp_(score.reshape(s.shape).sub_(shift))
                if seen is not None:
                    p.masked_fill_(~seen, 0.0)
                dropout = problem.dropout_keep(tile)
                alive = None if dropout is None else dropout.view(s.shape) * philox.kept_scale(problem.dropout_p)
                if dv is not None:
                    _add_product(dv[:, columns], p if alive is None else p * alive, do, seen)
                if not wants_scores:
                    continue
                ds = _product(do, v[:, columns].mT, scratch[1])  # (P, G * R, C), dp until delta is taken off
                if alive is not None:
                    ds.mul_(alive)
                ds.sub_(delta).mul_(p)
                if seen is not None:
                    ds.masked_fill_(~seen, 0.0)
                if leaves is not None:
                    ds = self._differentiate(changed, leaves, ds.view(shape), tile).reshape(s.shape)
                    if seen is not None:
                        ds = ds.masked_fill(~seen, 0.0)
                if dk is not None:
                    _add_product(dk[:, columns], ds, q, seen)
                if dq is not None:
                    _add_sum(dq, ds, k[:, columns], seen)
            if grad_query is not None and dq is not None:
                grad_query[group.batch, group.query_heads, rows] = (dq * problem.scale).view(q_all[:, :, rows].shape)
        for grad, total in ((grad_key, dk), (grad_value, dv)):
            if grad is not None and total is not None:
                part = grad[group.batch, group.key_heads]
                if part.data_ptr() != total.data_ptr():
                    part.copy_(total.view(part.shape))

    def _delta(self, grad_out: Tensor, out: Tensor) -> Tensor:
        product = grad_out.to(self._dtype) * out.to(self._dtype)
        if self._careful or self._sink is not None:
            # a row that sees nothing has an output of 0 and must not know what gradient arrives there
            product = torch.where(out == 0, 0.0, product)
        return product.sum(-1)

    def _add_sink(self, group: Group, rows: slice, lse: Tensor, delta: Tensor) -> None:
        """A sink is one more key whose value is 0: its weight is exp(sink - lse), its gradient -weight * delta."""
        total = self._total(id(self._sink))
        if total is None:
            return
        tile = self._pieces.tile(group, rows, Visit(0, 0, False))
        logits = self._sink_logits(tile)
        assert logits is not None
        weight = torch.exp(logits - lse.masked_fill(lse == -math.inf, math.inf)[..., None])
        with self._repeatable():
            tile.add(total, -(weight * delta[..., None]).to(total.dtype), "head")

    def _sink_logits(self, tile: Tile) -> Tensor | None:
        """(1, heads, 1, 1) or None."""
        return None if self._sink is None else tile.take(self._sink, "head").to(self._dtype)

    def _repeatable(self) -> AbstractContextManager[None]:
        """Gathers are differentiated by additions whose order a GPU leaves open, unless it is told not to."""
        if self._problem.deterministic and self._problem.device.type != "cpu":
            return _deterministic_algorithms()
        return nullcontext()

    def _change(self, score: Tensor, tile: Tile) -> tuple[Tensor, list[Tensor] | None]:
        """The score after every step; with leaves (score first) if the steps must be differentiated."""
        if not self._differentiates:
            for step in self._changes:
                score = step.apply(score, tile, taken(step, tile))
            return score, None
        with _autograd():
            leaves = [score.detach().requires_grad_()]
            changed = leaves[0]
            for step in self._changes:
                parameters = []
                for (tensor, _), part in zip(step.parameters, taken(step, tile), strict=True):
                    part = part.detach()
                    if self._total(id(tensor)) is not None:
                        part.requires_grad_()
                        leaves.append(part)
                    parameters.append(part)
                changed = step.apply(changed, tile, parameters)
        return changed, leaves

    def _differentiate(self, changed: Tensor, leaves: list[Tensor], gradient: Tensor, tile: Tile) -> Tensor:
        """The gradient of the unchanged score; gradients of the steps' tensors are added to their totals."""
        with _autograd(), self._repeatable():
            grads: Sequence[Any] = torch.autograd.grad(changed, leaves, gradient, allow_unused=True)
        wanted = [
            (total, per)
            for step in self._changes
            for tensor, per in step.parameters
            if (total := self._total(id(tensor))) is not None
        ]
        with self._repeatable():
            for (total, per), grad in zip(wanted, grads[1:], strict=True):
                if grad is not None:
                    tile.add(total, grad.to(total.dtype), per)
        return grads[0] if grads[0] is not None else torch.zeros_like(gradient)


def _accumulator(grad: Tensor, like: Tensor) -> Tensor:
    """(P, C, D) sums: the gradient's own memory where dtype and strides allow, else new memory."""
    if grad.dtype == like.dtype:
        if grad.shape[0] == 1:
            return grad[0]
        if grad.is_contiguous():
            return grad.view(like.shape)
    return torch.zeros_like(like)


def _add_product(total: Tensor, weights: Tensor, rows: Tensor, seen: Tensor | None) -> None:
    """total (P, C, D) += weights (P, R, C)^T @ rows (P, R, D)."""
    if seen is None:
        total.baddbmm_(weights.mT, rows)
    else:
        total.add_(weighted_sum(weights.mT, rows, seen.mT))


def _add_sum(total: Tensor, weights: Tensor, columns: Tensor, seen: Tensor | None) -> None:
    """total (P, R, D) += weights (P, R, C) @ columns (P, C, D)."""
    if seen is None:
        total.baddbmm_(weights, columns)
    else:
        total.add_(weighted_sum(weights, columns, seen))


@contextmanager
def _deterministic_algorithms() -> Iterator[None]:
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


def _autograd() -> Any:
    """Autograd inside an operator's body, where dispatch excludes it: score steps are differentiated tile by tile."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (
        torch._C.DispatchKey.AutogradFunctionality,
        torch._C.DispatchKey.AutogradOther,
        torch._C.DispatchKey.AutogradNestedTensor,
        torch._C.DispatchKey.ADInplaceOrView,
    ):
        excluded = excluded.remove(key)
    return _Recording(torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded))


class _Recording:
    def __init__(self, guard: Any) -> None:
        self._guard, self._grad = guard, torch.enable_grad()

    def __enter__(self) -> None:
        self._guard.__enter__()
        self._grad.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._grad.__exit__(*error)
        self._guard.__exit__(*error)
