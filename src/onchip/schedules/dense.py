"""Dense attention: the definition, with every score in memory. The reference, and the source of second derivatives.

    s = scale * query @ key^T, changed by the score values, minus infinity where hidden
    out = softmax(s) @ value        lse = log(sum(exp(s)))

It is composite torch: autograd, torch.func transforms and forward mode go through it, twice if need be. Scores are
float32 (float64 for float64). Memory is (batch, heads, length_q, length_k); a packed batch counts as one square of all
its tokens.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from onchip.model.eager import Recorder, meta_like
from onchip.model.kernels import Kernel
from onchip.problem import Problem
from onchip.products import PairProduct, PairProductTangent, WeightedSum, WeightedSumTangent, tame
from onchip.scores import hidden, sink_of, steps, taken
from onchip.strides import ordered
from onchip.tile import per_head

NAME = "dense"
SUMMARY = "the definition: every score in memory, any device, differentiable any number of times"


def unsupported(problem: Problem) -> list[str]:
    """Reasons why this schedule cannot run the problem."""
    gathers = problem.layout == "packed" or any(not step.additive and step.parameters for step in problem.scores)
    if problem.deterministic and problem.device.type != "cpu" and gathers:
        return ["on a GPU the gradient of a gather adds in an order that varies, and deterministic=True forbids it"]
    return []


def workspace_bytes(problem: Problem, backward: bool) -> int:
    """Scores and weights of all pairs, and one byte a pair for the mask; the backward takes as much."""
    return pairs(problem) * (2 * problem.score_dtype.itemsize + 1)


def pairs(problem: Problem) -> int:
    """Pairs of (query, key) whose score is computed, over all sequences and query heads: every one."""
    batch = 1 if problem.layout == "packed" else problem.batch
    return batch * problem.heads_q * problem.length_q * problem.length_k


def kernels(problem: Problem, backward: bool, target: str | None) -> list[Kernel]:
    """Every operator of a direction, as with gradients on: `attend` on tensors without data tells.

    Tensors are taken for contiguous. The products that never mix hidden values in stand wherever pairs are hidden.
    """
    sizes = (
        (problem.heads_q, problem.length_q),
        (problem.heads_kv, problem.length_k),
        (problem.heads_kv, problem.length_k),
    )
    inputs: list[Tensor] = []
    for (heads, length), dim in zip(sizes, (problem.dim_qk, problem.dim_qk, problem.dim_v), strict=True):
        shape = (length, heads, dim) if problem.layout == "packed" else (problem.batch, heads, length, dim)
        inputs.append(torch.empty(shape, dtype=problem.dtype, device="meta", requires_grad=True))
    tensors, spec, ints, floats = problem.lower()
    lowered = [meta_like(tensor) for tensor in tensors]
    precision = str(problem.score_dtype).removeprefix("torch.")
    names = dict(zip(("query", "key", "value"), inputs, strict=True))
    with torch.enable_grad(), Recorder(names, precision) as recorder:
        query, key, value = inputs
        likeness = Problem.lift(query, key, value, lowered, spec, ints, floats)
        out, lse = attend(likeness, query, key, value, reads=False)
        for name, tensor in (("out", out), ("lse", lse)):
            recorder.name(tensor, name)
    forward = recorder.kernels
    if not backward:
        scores = next((place for place, kernel in enumerate(forward) if kernel.requested.flops), None)
        if scores is not None:
            tile = problem.length_q, problem.length_k
            forward[scores] = replace(forward[scores], pairs=pairs(problem), tile=tile)
        return forward
    leaves = [*inputs, *(tensor for tensor in lowered if tensor.requires_grad)]
    d_out = torch.empty_like(out)
    with Recorder(names | {"out": out, "lse": lse, "d_out": d_out}, precision) as recorder:
        torch.autograd.grad(out, leaves, d_out, allow_unused=True)
    return recorder.kernels


def attend(problem: Problem, query: Tensor, key: Tensor, value: Tensor, *, reads: bool) -> tuple[Tensor, Tensor]:
    """Output and LSE in the problem's layout, differentiable.

    Args:
        reads: whether values may be read on the host; if not, the products that never mix hidden values in are used
            without asking whether they are needed.
    """
    tile = problem.geometry().whole()
    keep = problem.keep(tile)
    q, k, v = (_square(tensor, problem).to(problem.score_dtype) for tensor in (query, key, value))
    k, v = _repeat(k, problem.group), _repeat(v, problem.group)
    masks = hidden(problem.scores, tile)
    if masks is not None:
        keep = ~masks if keep is None else keep & ~masks
    # with gradients on, a gradient that comes later may hold NaN where nothing is seen
    careful = keep is not None and (torch.is_grad_enabled() or not reads or not tame(q, k, problem.scale, v))

    compiling = torch.compiler.is_compiling()

    q = q * problem.scale
    if keep is not None and careful:
        pair_product = PairProduct if compiling else PairProductTangent
        score = pair_product.apply(q, k, keep.expand(*q.shape[:-1], k.shape[-2]))
    else:
        score = q @ k.mT
    for step in steps(problem.scores):
        score = step.apply(score, tile, taken(step, tile))
    if keep is not None:
        score = torch.where(keep, score, -math.inf)
    # strides of a bias or a mask must not decide in which order sums run
    score = score.contiguous()

    seen = score != -math.inf
    alive = seen.any(-1, keepdim=True)
    sink = sink_of(problem.scores)
    sink = None if sink is None else per_head(sink).to(score.dtype)
    maximum = _maximum(score, sink)
    weight = torch.exp(score - maximum)
    total = weight.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - maximum)
    counted = alive
    if sink is not None:
        exists = tile.exists()
        counted = alive | (sink != -math.inf if exists is None else exists & (sink != -math.inf))
    total = torch.where(counted, total, 1.0)
    lse = torch.where(counted, maximum + torch.log(total), -math.inf).squeeze(-1)
    weight = weight / total

    dropout = problem.dropout_keep(tile)
    if dropout is not None:
        weight = weight * dropout.to(weight.dtype) * problem.kept_scale
    weighted_sum = WeightedSum if compiling else WeightedSumTangent
    out = weighted_sum.apply(weight, v, seen) if careful else weight @ v
    out = torch.where(alive, out, 0.0).to(query.dtype)
    if problem.layout == "packed":
        out, lse = out[0].transpose(0, 1), lse[0]
    return ordered(out, query), lse


def _square(tensor: Tensor, problem: Problem) -> Tensor:
    """(batch, heads, length, dim); a packed tensor as one sequence."""
    square = tensor.transpose(0, 1)[None] if problem.layout == "packed" else tensor
    # a product's bits may depend on strides, and the contract says they do not
    return square.contiguous()


def _repeat(tensor: Tensor, group: int) -> Tensor:
    return tensor if group == 1 else tensor.repeat_interleave(group, dim=1)


def _maximum(score: Tensor, sink: Tensor | None) -> Tensor:
    """What to subtract from each row: any number gives the same result, the largest score the best one."""
    score = score.detach()
    if score.shape[-1] == 0:
        maximum = torch.full_like(score.sum(-1, keepdim=True), -math.inf)
    else:
        maximum = score.amax(-1, keepdim=True)
    if sink is not None:
        maximum = torch.maximum(maximum, sink.detach())
    return torch.where(maximum == -math.inf, 0.0, maximum)
