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
    groups_of,
    hide,
    is_careful,
    must_select,
    product,
    scaled,
    segments,
)
from onchip.scores import sink_of, steps, taken
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
    careful = is_careful(problem, query, key, value, grad_out, grad_lse)
    for segment in segments(problem):
        inputs = (segment.of_rows(query), segment.of_columns(key), segment.of_columns(value))
        rowwise = (segment.of_rows(grad_out), segment.of_rows(out), segment.of_lse(lse))
        of_lse = None if grad_lse is None else segment.of_lse(grad_lse)
        grads = (
            None if grad_query is None else segment.of_rows(grad_query),
            None if grad_key is None else segment.of_columns(grad_key),
            None if grad_value is None else segment.of_columns(grad_value),
        )
        walk = _Backward(problem, Pieces(problem, segment, careful), careful, dtype, tensors, totals)
        for group in groups_of(problem, inputs[0].shape[0], inputs[0].shape[2], inputs[1].shape[2]):
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
        self._select = must_select(problem, careful)
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
        # two tensors rather than two views of one: autograd of score steps watches for writes to what it saved
        scratch_s, scratch_dp = (torch.empty(size, dtype=dtype, device=query.device) for _ in range(2))

        for start in range(0, q_all.shape[2], group.rows):
            rows = slice(start, min(start + group.rows, q_all.shape[2]))
            q = scaled(q_all[:, :, rows], problem.scale, dtype, k.shape[0])  # (P, G * R, D)
            do = scaled(do_all[:, :, rows], 1.0, dtype, k.shape[0])  # (P, G * R, DV)
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
                s = product(q, k[:, columns].mT, scratch_s)  # (P, G * R, C)
                shape = (*row_lse.shape, visit.stop - visit.start)
                changed, leaves = self._change(s.view(shape), tile)
                # a step may have saved its own result for its gradient
                score = changed.contiguous() if leaves is None else changed.detach().clone().contiguous()
                hide(score, keep, self._select)
                seen = (score != -math.inf).view(s.shape) if self._careful else None
                if len(visits) == 1:
                    # a row that is whole in one piece need not take its LSE, which is rounded, for its sum
                    p = softmax.weights_(score, self._sink_logits(tile)).reshape(s.shape)
                else:
                    p = softmax.exp_(score.reshape(s.shape).sub_(shift))
                if seen is not None:
                    p.masked_fill_(~seen, 0.0)
                dropout = problem.dropout_keep(tile)
                alive = None if dropout is None else dropout.view(s.shape).to(dtype) * problem.kept_scale
                if dv is not None:
                    _add_product(dv[:, columns], p if alive is None else p * alive, do, seen)
                if not wants_scores:
                    continue
                ds = product(do, v[:, columns].mT, scratch_dp)  # (P, G * R, C), dp until delta is taken off
                if alive is not None:
                    ds.mul_(alive)
                ds.sub_(delta).mul_(p)
                if seen is not None:
                    ds.masked_fill_(~seen, 0.0)
                if leaves is not None:
                    ds = self._differentiate(changed, leaves, ds.view(shape), tile).reshape(s.shape)
                    if keep is not None:
                        # a step's derivative may be anything where a pair is hidden
                        ds = ds.view(shape).masked_fill(~keep, 0.0).view(s.shape)
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
