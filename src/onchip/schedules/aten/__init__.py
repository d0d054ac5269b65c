"""torch's own flash kernel for the CPU, which is kept well and is the fastest there is for what it covers.

    for each sequence of a packed or padded batch, or the whole of a dense one
      for each block of rows and the columns that its rows can see             (tiles.py; one block without a mask)
        out, lse = kernel(q, k, v, an additive mask or top-left causality)

It takes one head dim for all three inputs, which zeros fill up. It multiplies hidden values by 0 rather than leaving
them out. So when a result is not finite, the call runs again with 0 in place of what is not, and rows that saw such a
thing go to another schedule.

The forward computes in float32: in low precision the kernel takes as long or longer, and its LSE is less exact. Only a
processor with tiles for bfloat16 (AMX) is far faster in that, and computes in it where the LSE is no result.
"""

from __future__ import annotations

import torch

from onchip.problem import Problem
from onchip.schedules.aten.backward import backward as backward
from onchip.schedules.aten.forward import forward as forward
from onchip.schedules.aten.tiles import workspace_bytes as workspace_bytes
from onchip.schedules.aten.traffic import kernels as kernels
from onchip.scores import Bias

NAME = "aten"
SUMMARY = "torch's CPU flash kernel: any mask and a bias; no dropout and no other scores"


def unsupported(problem: Problem) -> list[str]:
    """Reasons why the forward cannot run here."""
    if problem.device.type != "cpu":
        return ["it is a kernel for the CPU"]
    reasons = []
    if problem.dtype == torch.float64:
        reasons.append("in float64 its bits depend on strides")
    if problem.seed is not None:
        reasons.append("it has no dropout")
    if not all(isinstance(score, Bias) for score in problem.scores):
        reasons.append("it changes scores by a bias only")
    return reasons


def unsupported_backward(problem: Problem) -> list[str]:
    """Reasons why the backward cannot run here."""
    reasons = unsupported(problem)
    if problem.scores:
        reasons.append("it has no gradient of a bias")
    if problem.dtype == torch.float16:
        reasons.append("in float16 its products round the scores")
    return reasons
