"""Backward: the kernel's own, block by block, with one more head dim for the gradient of the LSE."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from onchip.masks import causality
from onchip.problem import Problem
from onchip.schedules.aten.forward import cleaned
from onchip.schedules.aten.kernel import flash_backward
from onchip.schedules.aten.tiles import blocks, folds, scales_exactly, widened
from onchip.segments import segments
from onchip.strides import laid_out


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
    """Gradients of query, key and value; None if a row sees something that is not finite."""
    if grad_out is None:
        grad_out = torch.zeros((), dtype=query.dtype).expand(out.shape)
    gradients, hides = _backward(problem, grad_out, grad_lse, query, key, value, out, lse)
    if hides and not _finite(gradients):
        query, key, value, lost = cleaned(problem, query, key, value)
        alive = lse != -math.inf
        if (lost & alive).any():
            return None
        # a row that sees nothing must not know what gradient arrives there
        rows = alive.mT if problem.layout == "packed" else alive
        grad_out = grad_out.masked_fill(~rows[..., None], 0.0)
        grad_lse = None if grad_lse is None else grad_lse.masked_fill(~alive, 0.0)
        gradients, _ = _backward(problem, grad_out, grad_lse, query, key, value, out, lse)
        if not _finite(gradients):
            return None
    return [gradient if need else None for gradient, need in zip(gradients, needs, strict=False)]


def _finite(gradients: Sequence[Tensor]) -> bool:
    return all(math.isfinite(gradient.sum()) for gradient in gradients)


def _backward(
    problem: Problem,
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
) -> tuple[Sequence[Tensor], bool]:
    """Gradients of query, key and value, and whether anything is hidden inside a block."""
    causal = causality(problem.band, problem.length_q)
    if causal is not None and query.numel() and key.numel():
        found = _differentiate(problem.scale, query, key, value, grad_out, out, lse, grad_lse, None, causal)
        return [laid_out(part, like) for part, like in zip(found, (query, key, value), strict=True)], causal
    gradients = [torch.zeros_like(tensor) for tensor in (query, key, value)]
    for segment in segments(problem):
        of_rows = [segment.of_rows(part) for part in (query, grad_out, out)]
        of_columns = [segment.of_columns(part) for part in (key, value)]
        of_lse = [segment.of_lse(lse), None if grad_lse is None else segment.of_lse(grad_lse)]
        grad_query = segment.of_rows(gradients[0])
        # columns that several blocks see add up; in low precision their sums need more
        totals = [segment.of_columns(part) for part in gradients[1:]]
        sums = [part if part.dtype == lse.dtype else torch.zeros_like(part, dtype=lse.dtype) for part in totals]
        for batch, rows, columns, is_causal, added, empty in blocks(problem, segment):
            if columns.start == columns.stop:
                continue
            q, do, o = (part[batch, :, rows] for part in of_rows)
            k, v = (part[batch, :, columns] for part in of_columns)
            row_lse, row_grad_lse = (None if part is None else part[batch, :, rows] for part in of_lse)
            assert row_lse is not None
            if empty is not None:
                # as the kernel has it: weights of such a row are then exp(-inf - 0) = 0
                row_lse = row_lse.masked_fill(empty, 0.0)
            found = _differentiate(problem.scale, q, k, v, do, o, row_lse, row_grad_lse, added, is_causal)
            grad_query[batch, :, rows] = found[0]
            sums[0][batch, :, columns] += found[1]
            sums[1][batch, :, columns] += found[2]
        for total, part in zip(totals, sums, strict=True):
            if total is not part:
                total.copy_(part)
    return gradients, True


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
    if not scales_exactly(scale):
        found = _differentiate(1.0, query * scale, key, value, grad_out, out, lse, grad_lse, added, causal)
        return found[0] * scale, *found[1:]
    dims = (query.shape[-1], key.shape[-1], value.shape[-1])
    inputs = widened(grad_out, query, key, value, out)
    if grad_lse is not None:
        # one more dim carries the LSE's gradient: (do, dlse) (v, 1) - sum((do, dlse) (out, 0)) = dp - delta + dlse
        zero, one = lse.new_zeros(1), lse.new_ones(1)
        more = (grad_lse[..., None], zero, zero, one, zero)
        inputs = [
            torch.cat([part.to(lse.dtype), last.expand(*part.shape[:-1], 1)], -1)
            for part, last in zip(inputs, more, strict=True)
        ]
    fold = added is None and folds(query, key)
    if fold:
        batch, heads = query.shape[:2]
        inputs = [part.reshape(batch * heads, 1, *part.shape[2:]) for part in inputs]
        lse = lse.reshape(batch * heads, 1, -1)
    found = flash_backward(*inputs, lse, 0.0, causal, attn_mask=added, scale=scale)
    if fold:
        found = tuple(part.unflatten(0, (batch, heads)).squeeze(2) for part in found)
    if dims[0] == dims[2] == found[0].shape[-1]:
        return found
    return tuple(part[..., :dim] for part, dim in zip(found, dims, strict=True))
