"""Matrix products that honour what a row may see.

In a plain product a weight of exactly 0 times NaN is NaN, so a hidden key that holds NaN would poison rows that must
not know it. These products select instead. They cost about three times a plain product, so schedules use them only
where inputs are not known to be finite (see `tame`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def tame(query: Tensor, key: Tensor, scale: float, *others: Tensor | None) -> bool:
    """Whether hidden pairs cannot give anything non-finite: inputs are finite, no score overflows. Reads values."""
    bound = abs(scale) * query.shape[-1]
    for tensor in (query, key):
        bound *= _largest(tensor)
    if not bound < 1e37:
        return False
    return all(_largest(tensor) < float("inf") for tensor in others if tensor is not None)


def _largest(tensor: Tensor) -> float:
    """Largest magnitude; NaN if there is one; 0 for an empty tensor."""
    if tensor.numel() == 0:
        return 0.0
    low, high = torch.aminmax(tensor)
    return float(torch.maximum(-low, high))


def weighted_sum(weights: Tensor, values: Tensor, seen: Tensor) -> Tensor:
    """`weights @ values`, where a non-finite value reaches only the rows that see it.

    Args:
        weights: (..., rows, keys), 0 where hidden. values: (..., keys, dim). seen: bool, broadcasts to weights.
    """
    finite = torch.isfinite(values)
    clean = weights @ torch.where(finite, values, 0.0)
    shows = seen.expand(weights.shape).to(weights.dtype) @ (~finite).to(weights.dtype) > 0
    return torch.where(shows, weights @ values, clean)


class WeightedSum(torch.autograd.Function):
    """`weighted_sum` for autograd, vmap and its second derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weights: Tensor, values: Tensor, seen: Tensor) -> Tensor:
        return weighted_sum(torch.where(seen, weights, 0.0), values, seen)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        weights, values, seen = ctx.saved_tensors
        return (
            PairProduct.apply(gradient, values, seen),
            WeightedSum.apply(weights.mT, gradient, seen.mT),
            None,
        )


class PairProduct(torch.autograd.Function):
    """`left @ right.mT` where seen, 0 elsewhere; (..., rows, dim) and (..., keys, dim) give (..., rows, keys)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(left: Tensor, right: Tensor, seen: Tensor) -> Tensor:
        return torch.where(seen, left @ right.mT, 0.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        left, right, seen = ctx.saved_tensors
        return WeightedSum.apply(gradient, right, seen), WeightedSum.apply(gradient.mT, left, seen.mT), None


class WeightedSumTangent(WeightedSum):
    """`WeightedSum` with forward mode, which torch.compile does not accept in a Function."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        weights, values, seen = ctx.saved_tensors
        return (
            PairProductTangent.apply(gradient, values, seen),
            WeightedSumTangent.apply(weights.mT, gradient, seen.mT),
            None,
        )

    @staticmethod
    def jvp(ctx: Any, weights_tangent: Tensor, values_tangent: Tensor, _: None) -> Tensor:
        weights, values, seen = ctx.saved_tensors
        return WeightedSumTangent.apply(weights_tangent, values, seen) + WeightedSumTangent.apply(
            weights, values_tangent, seen
        )


class PairProductTangent(PairProduct):
    """`PairProduct` with forward mode, which torch.compile does not accept in a Function."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        left, right, seen = ctx.saved_tensors
        return (
            WeightedSumTangent.apply(gradient, right, seen),
            WeightedSumTangent.apply(gradient.mT, left, seen.mT),
            None,
        )

    @staticmethod
    def jvp(ctx: Any, left_tangent: Tensor, right_tangent: Tensor, _: None) -> Tensor:
        left, right, seen = ctx.saved_tensors
        return PairProductTangent.apply(left_tangent, right, seen) + PairProductTangent.apply(left, right_tangent, seen)
