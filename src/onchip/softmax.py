"""The mergeable online-softmax state: the one algebra of tiles, split keys, prefixes and rings.

For a set of keys, a row's state is (accumulator, maximum, total) with

    maximum = max_j s_j     total = sum_j exp(s_j - maximum)     accumulator = sum_j exp(s_j - maximum) v_j

States of disjoint sets of keys merge to the state of their union; merging is associative and commutative, and the empty
state (0, -inf, 0) is its neutral element exactly, whatever lies in an empty state's accumulator. `finish` divides once:

    out = accumulator / total     lse = maximum + log(total)

Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", section 3; Dao 2023,
FlashAttention-2, section 3.1.

Everything here is plain differentiable torch, twice if need be, except `Running`, which works in place for speed.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from onchip.products import weighted_sum

LOG2E = 1 / math.log(2)


class State(NamedTuple):
    """A partial result. `accumulator` is (..., rows, dim_v); `maximum` and `total` are (..., rows, 1), natural base."""

    accumulator: Tensor
    maximum: Tensor
    total: Tensor


def empty(shape_rows: tuple[int, ...], dim_v: int, dtype: torch.dtype, device: torch.device | str) -> State:
    """The state of no keys, for rows of shape `shape_rows`."""
    return State(
        torch.zeros(*shape_rows, dim_v, dtype=dtype, device=device),
        torch.full((*shape_rows, 1), -math.inf, dtype=dtype, device=device),
        torch.zeros(*shape_rows, 1, dtype=dtype, device=device),
    )


def _finite(maximum: Tensor) -> Tensor:
    """The maximum as something to subtract: 0 for a row that has seen no key, so that -inf - 0 stays -inf."""
    return torch.where(maximum == -math.inf, 0.0, maximum)


def update(state: State, scores: Tensor, values: Tensor) -> State:
    """The state after more keys.

    Args:
        scores: (..., rows, keys); minus infinity hides a key from a row.
        values: (..., keys, dim_v).
    """
    if scores.shape[-1] == 0:
        return state
    maximum = torch.maximum(state.maximum, scores.amax(-1, keepdim=True).detach())
    shift = _finite(maximum)
    weights = torch.exp(scores - shift)
    kept = torch.exp(state.maximum - shift)
    return State(
        state.accumulator * kept + weights @ values, maximum, state.total * kept + weights.sum(-1, keepdim=True)
    )


def merge(a: State, b: State) -> State:
    """The state of the keys of both, which must be disjoint."""
    maximum = torch.maximum(a.maximum, b.maximum)
    shift = _finite(maximum)
    scale_a, scale_b = torch.exp(a.maximum - shift), torch.exp(b.maximum - shift)
    empty_a, empty_b = a.maximum == -math.inf, b.maximum == -math.inf
    # an empty side may hold NaN, which must reach neither values nor gradients
    accumulator_a, total_a = torch.where(empty_a, 0.0, a.accumulator), torch.where(empty_a, 0.0, a.total)
    accumulator_b, total_b = torch.where(empty_b, 0.0, b.accumulator), torch.where(empty_b, 0.0, b.total)

    def choose(part_a: Tensor, part_b: Tensor) -> Tensor:
        # select, do not add: 0 + -0 would lose a sign
        return torch.where(empty_b, part_a, torch.where(empty_a, part_b, part_a * scale_a + part_b * scale_b))

    return State(choose(accumulator_a, accumulator_b), maximum, choose(total_a, total_b))


def from_output(out: Tensor, lse: Tensor) -> State:
    """The state of a partial result of another call (without a sink).

    Args:
        out: (..., rows, dim_v). lse: (..., rows), natural logarithm, minus infinity where no key was seen.
    """
    lse = lse[..., None]
    return State(out.to(lse.dtype), lse, torch.where(lse == -math.inf, 0.0, 1.0).to(lse.dtype))


def finish(state: State, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output and natural log-sum-exp.

    Args:
        sink: a logit for each row that adds exp(sink) to the denominator, broadcastable to (..., rows).

    Returns:
        out (..., rows, dim_v): 0 where no key was seen. lse (..., rows): minus infinity there, or the sink's logit.
    """
    seen = state.maximum != -math.inf
    if sink is None:
        total = torch.where(seen, state.total, 1.0)
        lse = torch.where(seen, state.maximum + torch.log(total), -math.inf)
        return torch.where(seen, state.accumulator / total, 0.0), lse.squeeze(-1)
    sink = sink[..., None].to(state.total.dtype)
    maximum = torch.maximum(state.maximum, sink.detach())
    shift = _finite(maximum)
    kept = torch.exp(state.maximum - shift)
    total = state.total * kept + torch.exp(sink - shift)
    alive = maximum != -math.inf
    total = torch.where(alive, total, 1.0)
    lse = torch.where(alive, shift + torch.log(total), -math.inf)
    return torch.where(seen, state.accumulator * kept / total, 0.0), lse.squeeze(-1)


def exp_(scores: Tensor) -> Tensor:
    """exp in place, by way of exp2: on a CPU that takes two thirds of the time.

    Scores must be differences to a maximum or an LSE: scaling scores themselves to base 2 would round at their size.
    """
    return scores.mul_(LOG2E).exp2_()


def weights_(scores: Tensor, sink: Tensor | None) -> Tensor:
    """Softmax over the last dimension in place; rows of minus infinity become 0. `sink` is (..., 1, 1) or None."""
    maximum = scores.amax(-1, keepdim=True)
    if sink is not None:
        maximum = torch.maximum(maximum, sink)
    shift = _finite(maximum)
    weights = exp_(scores.sub_(shift))
    total = weights.sum(-1, keepdim=True)
    if sink is not None:
        total += torch.exp(sink - shift)
    return weights.div_(total.masked_fill_(total == 0, 1.0))


class Running:
    """The state of one tile of rows while it walks over its keys, updated in place."""

    def __init__(self) -> None:
        self.state: State | None = None
        """None before the first keys."""

    def update_(self, scores: Tensor, values: Tensor, keep: Tensor | None, seen: Tensor | None) -> None:
        """Add keys.

        Args:
            scores: (pairs, rows, keys), destroyed.
            values: (pairs, keys, dim_v).
            keep: 1 where dropout keeps a weight and 0 elsewhere, like scores, or None.
            seen: visible pairs like scores, if values may hold something non-finite that hides, else None.
        """
        maximum = scores.amax(-1, keepdim=True)
        if self.state is not None:
            torch.maximum(maximum, self.state.maximum, out=maximum)
        # any finite number does for a row that has seen no key, so that minus infinity stays what it is
        shift = maximum.clamp(min=torch.finfo(scores.dtype).min)
        weights = exp_(scores.sub_(shift))
        total = weights.sum(-1, keepdim=True)
        if keep is not None:
            weights.mul_(keep)
        if self.state is None:
            product = torch.bmm(weights, values) if seen is None else weighted_sum(weights, values, seen)
            self.state = State(product, maximum, total)
            return
        kept = exp_(self.state.maximum.sub_(shift))
        total.add_(self.state.total.mul_(kept))
        accumulator = self.state.accumulator.mul_(kept)
        if seen is None:
            accumulator.baddbmm_(weights, values)
        else:
            accumulator.add_(weighted_sum(weights, values, seen))
        self.state = State(accumulator, maximum, total)
