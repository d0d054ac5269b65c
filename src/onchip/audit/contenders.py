"""What is audited: eager attention, and each schedule by the public function."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

import onchip
from onchip.audit.laws import Inputs
from onchip.audit.reference import Results, future

CHOSEN = "chosen"
"""The name of the dispatcher's own choice, which may pair the forward of one schedule with the backward of another."""

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def eager(inputs: Inputs) -> Results:
    """Matrix product, softmax, matrix product in the dtype of the inputs, each step rounded to it; torch's autograd."""
    leaves = _leaves(inputs)
    s = eager_scores(leaves[0], leaves[1], inputs.scale, causal=inputs.causal)
    out, lse = s.softmax(-1) @ leaves[2], s.logsumexp(-1)
    return _results(inputs, leaves, out, lse)


def eager_scores(query: Tensor, key: Tensor, scale: float, *, causal: bool) -> Tensor:
    """Scores (..., length, length) in the dtype of query and key (..., length, dim): a product, then the scale."""
    s = (query @ key.mT) * scale
    length = s.shape[-1]
    return s.masked_fill(future(slice(0, length), length, s.device), -math.inf) if causal else s


def run_schedule(inputs: Inputs, schedule: str, deterministic: bool | None = None) -> Results:
    """Out, LSE and the gradients of one schedule, or of the dispatcher's choice.

    Raises:
        Unsupported: the schedule declines the problem or its gradients.
    """
    leaves = _leaves(inputs)
    out, lse = _call(inputs, leaves, schedule, deterministic)
    return _results(inputs, leaves, out, lse)


def run_forward(inputs: Inputs, schedule: str, deterministic: bool | None = None) -> Results:
    """Out and LSE of one schedule, with no gradient to follow.

    Raises:
        Unsupported: the schedule declines the problem.
    """
    out, lse = _call(inputs, (inputs.query, inputs.key, inputs.value), schedule, deterministic)
    return {"out": out, "lse": lse}


def same_bits(left: Results, right: Results) -> bool:
    """Whether two results hold the same tensors, bit for bit."""
    return left.keys() == right.keys() and all(torch.equal(_bits(left[name]), _bits(right[name])) for name in left)


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(INTEGERS[tensor.dtype.itemsize])


def _leaves(inputs: Inputs) -> Sequence[Tensor]:
    return [part.detach().requires_grad_() for part in (inputs.query, inputs.key, inputs.value)]


def _call(inputs: Inputs, leaves: Sequence[Tensor], schedule: str, deterministic: bool | None) -> onchip.Output:
    query, key, value = leaves
    return onchip.attention_with_lse(
        query,
        key,
        value,
        causal=inputs.causal,
        scale=inputs.scale,
        deterministic=deterministic,
        schedule=None if schedule == CHOSEN else schedule,  # type: ignore[arg-type]
    )


def _results(inputs: Inputs, leaves: Sequence[Tensor], out: Tensor, lse: Tensor) -> Results:
    outputs, incoming = [out], [inputs.d_out]
    if inputs.d_lse is not None:
        outputs, incoming = [out, lse], [inputs.d_out, inputs.d_lse.to(lse.dtype)]
    d_query, d_key, d_value = torch.autograd.grad(outputs, leaves, incoming)
    return {"out": out.detach(), "lse": lse.detach(), "d_query": d_query, "d_key": d_key, "d_value": d_value}
