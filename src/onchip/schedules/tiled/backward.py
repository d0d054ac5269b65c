"""Backward: the same walk, weights recomputed from scores and LSE.

p = exp(s - lse)     dv += p^T do     dp = do v^T     ds = p * (dp - delta)     dq += ds k     dk += ds^T q
with delta = sum(do * out) - dlse              (FlashAttention-2, algorithm 2; dlse enters like a negative delta)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from onchip import softmax
from onchip.normal_form import Visit
from onchip.problem import Problem
from onchip.products import weighted_sum
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
from onchip.scores import sink_of, steps, taken
from onchip.segments import segments
from onchip.tile import Tile


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
    if grad_out is None:
        grad_out = torch.zeros((), dtype=query.dtype, device=query.device).expand(out.shape)
    *plain, last = carefulness(problem)
    for careful in plain:
        gradients = _backward(problem, grad_out, grad_lse, query, key, value, out, lse, tensors, needs, careful)
        if sound(*gradients):
            return gradients
    return _backward(problem, grad_out, grad_lse, query, key, value, out, lse, tensors, needs, last)


def _backward(
    problem: Problem,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    tensors: Sequence[Tensor],
    needs: Sequence[bool],
    careful: bool,
) -> list[Tensor | None]:
    # tokens outside every sequence keep a gradient of 0
    fresh = torch.empty_like if problem.layout == "dense" else torch.zeros_like
    grad_query = fresh(query) if needs[0] else None
    grad_key = fresh(key) if needs[1] else None
    grad_value = fresh(value) if needs[2] else None
    totals: list[Tensor | None] = [
        torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32)) if need else None
        for tensor, need in zip(tensors, needs[3:], strict=True)
    ]
    # two memories rather than two views of one: autograd of score steps watches for writes to what it saved
    memories = tuple(Scratch(problem.score_dtype, query.device) for _ in range(3))
    for segment in segments(problem):
        inputs = (segment.of_rows(query), segment.of_columns(key), segment.of_columns(value))
        rowwise = (segment.of_rows(grad_out), segment.of_rows(out), segment.of_lse(lse))
        of_lse = None if grad_lse is None else segment.of_lse(grad_lse)
        grads = (
            None if grad_query is None else segment.of_rows(grad_query),
            None if grad_key is None else segment.of_columns(grad_key),
            None if grad_value is None else segment.of_columns(grad_value),
        )
        pieces = Pieces(problem, segment, careful)
        walk = _Backward(problem, pieces, careful, memories, tensors, totals)
        for group in pieces.groups(inputs[0].shape[0], backward=True):
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
        memories: Sequence[Scratch],
        tensors: Sequence[Tensor],
        totals: Sequence[Tensor | None],
    ) -> None:
        self._problem, self._pieces, self._careful, self._memories = problem, pieces, careful, memories
        self._dtype = problem.score_dtype
        self._changes = steps(problem.scores)
        # column by column in memory, three of the four products that read scores take them as they lie, which is faster
        # than reading them transposed; steps, dropout and grouped heads need tiles of rows
        self._across = (
            problem.device.type == "cpu" and problem.group == 1 and not self._changes and problem.seed is None
        )
        by_identity = {id(tensor): total for tensor, total in zip(tensors, totals, strict=True)}
        self._total = by_identity.get
        self._select = must_select(problem, careful)
        # an additive step leaves the gradient of the score as it is, and what adds a tensor itself gives it to that
        self._differentiates = any(
            not step.additive
            or (not step.adds and any(self._total(id(tensor)) is not None for tensor, _ in step.parameters))
            for step in self._changes
        )
        self._added = [
            (total, per)
            for step in self._changes
            for tensor, per in step.parameters
            if not self._differentiates and (total := self._total(id(tensor))) is not None
        ]
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
        width, length_k = group.columns, k.shape[1]
        size = q_all.shape[0] * q_all.shape[1] * group.rows * width
        widest = k.shape[0] * width * max(problem.dim_qk, problem.dim_v)
        memory_s, memory_dp, memory_sum = (
            memory.of(need) for memory, need in zip(self._memories, (size, size, widest), strict=True)
        )
        dk = None if grad_key is None else _Sums(length_k, width, memory_sum)
        dv = None if grad_value is None else _Sums(length_k, width, memory_sum)
        wants_scores = grad_query is not None or dk is not None or self._differentiates or self._added
        across, pairs = self._across, k.shape[0]

        for start in range(0, q_all.shape[2], group.rows):
            rows = slice(start, min(start + group.rows, q_all.shape[2]))
            q = scaled(q_all[:, :, rows], problem.scale, dtype, pairs)  # (P, G * R, D)
            # what dropout keeps it enlarges, the gradient instead of the weights
            kept_scale = 1.0 if problem.seed is None else problem.kept_scale
            do = scaled(do_all[:, :, rows], kept_scale, dtype, pairs)  # (P, G * R, DV)
            row_lse = lse_all[:, :, rows]
            delta = self._delta(do_all[:, :, rows], out_all[:, :, rows])
            if grad_lse is not None:
                delta = delta - group.of_queries(grad_lse)[:, :, rows].to(dtype)
            if self._sink is not None:
                self._add_sink(group, rows, row_lse, delta)
            delta = delta.reshape(pairs, -1, 1)
            # a row that sees nothing weighs nothing: exp(s - inf) is 0
            shift = row_lse.masked_fill(row_lse == -math.inf, math.inf).reshape(pairs, -1, 1)
            dq = None
            visits = self._pieces.visits(group, rows)
            for visit in visits:
                k_part = k[:, visit.start : visit.stop]
                tile = self._pieces.tile(group, rows, visit)
                hidden = self._pieces.hidden(group, rows, visit, tile)
                s = product(q, k_part, memory_s, across)  # (P, G * R, C)
                shape = (*row_lse.shape, visit.stop - visit.start)
                leaves = None
                if hidden is not None or self._changes:
                    score = s.view(shape)
                    if self._changes:
                        changed, leaves = self._change(score, tile)
                        # a step may have saved its own result for its gradient, and strides of a bias must not decide
                        # in which order sums run
                        score = (changed if leaves is None else changed.detach().clone()).contiguous()
                    s = hide(score, hidden, self._select, across).view(s.shape)
                seen = s != -math.inf if self._careful else None
                if len(visits) == 1:
                    # a row that is whole in one piece need not take its LSE, which is rounded, for its sum
                    p = softmax.weights_(s.view(shape), self._sink_logits(tile)).view(s.shape)
                else:
                    p = softmax.exp_(s.sub_(shift))
                if seen is not None:
                    p.masked_fill_(~seen, 0.0)
                dropout = problem.dropout_factor(tile)
                alive = None if dropout is None else dropout.view(s.shape)
                if dv is not None:
                    dv.add(visit, p if alive is None else p * alive, do, seen)
                if not wants_scores:
                    continue
                ds = product(do, v[:, visit.start : visit.stop], memory_dp, across)  # dp until delta is taken off
                if alive is not None:
                    ds.mul_(alive)
                ds.sub_(delta).mul_(p)
                if seen is not None:
                    ds.masked_fill_(~seen, 0.0)
                for total, per in self._added:
                    tile.add(total, ds.view(shape), per)
                if leaves is not None:
                    ds = self._differentiate(changed, leaves, ds.view(shape), tile).reshape(s.shape)
                    if hidden is not None:
                        # a step's derivative may be anything where a pair is hidden
                        ds = ds.view(shape).masked_fill(~hidden.keep, 0.0).view(s.shape)
                if dk is not None:
                    dk.add(visit, ds, q, seen)
                if grad_query is not None:
                    dq = _sum(dq, ds, k_part, seen)
            if grad_query is not None:
                part = grad_query[group.batch, group.query_heads, rows]
                part.copy_(dq.mul_(problem.scale).view(part.shape)) if dq is not None else part.zero_()
        for grad, sums in ((grad_key, dk), (grad_value, dv)):
            if grad is not None and sums is not None:
                sums.write(grad[group.batch, group.key_heads])

    def _delta(self, grad_out: Tensor, out: Tensor) -> Tensor:
        product = grad_out.to(self._dtype) * out.to(self._dtype)
        if self._careful or self._sink is not None:
            # a row that sees nothing has an output of 0 and must not know what gradient arrives there
            product = torch.where(out == 0, 0.0, product)
        return product.contiguous().sum(-1)

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
                score = change(score, step, tile)
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


class _Sums:
    """Sums over rows for each column, (P, C, D) in blocks of `width` columns.

    A batched product into a slice of a larger tensor falls apart into single ones, so each block is a tensor.
    """

    def __init__(self, length: int, width: int, memory: Tensor) -> None:
        self._length, self._width, self._memory = length, width, memory
        self._blocks: dict[int, Tensor] = {}

    def add(self, visit: Visit, weights: Tensor, rows: Tensor, seen: Tensor | None) -> None:
        """Add weights (P, R, C)^T @ rows (P, R, D) to the columns of a visit."""
        weights = weights.mT
        if seen is not None:
            self._spread(visit, weighted_sum(weights, rows, seen.mT))
        elif visit.start % self._width or visit.stop != min(visit.start + self._width, self._length):
            shape = (weights.shape[0], weights.shape[1], rows.shape[2])
            self._spread(visit, torch.bmm(weights, rows, out=self._memory[: math.prod(shape)].view(shape)))
        elif visit.start in self._blocks:
            self._blocks[visit.start].baddbmm_(weights, rows)
        else:
            self._blocks[visit.start] = torch.bmm(weights, rows)

    def _spread(self, visit: Visit, product: Tensor) -> None:
        first = visit.start - visit.start % self._width
        for start in range(first, visit.stop, self._width):
            stop = min(start + self._width, self._length)
            low, high = max(start, visit.start), min(stop, visit.stop)
            if start not in self._blocks:
                self._blocks[start] = product.new_zeros(product.shape[0], stop - start, product.shape[2])
            self._blocks[start][:, low - start : high - start] += product[:, low - visit.start : high - visit.start]

    def write(self, gradient: Tensor) -> None:
        """Write the sums to a gradient (sequences, heads, C, D), 0 where nothing was added."""
        for start in range(0, self._length, self._width):
            part = gradient[:, :, start : min(start + self._width, self._length)]
            block = self._blocks.get(start)
            part.zero_() if block is None else part.copy_(block.view(part.shape))


def _sum(total: Tensor | None, weights: Tensor, columns: Tensor, seen: Tensor | None) -> Tensor:
    """total (P, R, D) + weights (P, R, C) @ columns (P, C, D), in place if there is a total."""
    if seen is not None:
        product = weighted_sum(weights, columns, seen)
        return product if total is None else total.add_(product)
    return torch.bmm(weights, columns) if total is None else total.baddbmm_(weights, columns)


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
