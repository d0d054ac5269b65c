"""Portable kernels in Triton: every mask and score but functions of the user, any layout, forward and backward.

    forward.py   out and LSE: a tile of rows walks over the columns that it sees
    backward.py  dK and dV: a tile of columns walks over rows; dQ: the walk of the forward; both bit for bit repeatable
    finite.py    where something is not finite, kernels run that heed what is hidden
    launch.py    what they are given    tiles.py   their tile sizes, as data    traffic.py   what they move and compute

Triton costs a second to import, so it is imported by the first call.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from onchip.masks import Predicate, leaves
from onchip.model.kernels import Kernel
from onchip.problem import Problem
from onchip.scores import Modify

NAME = "triton"
SUMMARY = "portable Triton kernels: masks, scores, dropout and every layout, forward and backward, linear memory"
WIDEST = 256
"""The largest head dim."""


_IS_PRESENT = importlib.util.find_spec("triton") is not None


def _interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def unsupported(problem: Problem) -> list[str]:
    """Reasons why this schedule cannot run the problem."""
    reasons = []
    if not _IS_PRESENT:
        return ["Triton is not installed"]
    if problem.device.type == "cpu":
        if not _interprets():
            return ["it runs on GPUs; on a CPU only for tests, interpreted, where TRITON_INTERPRET=1 is set"]
        if problem.schedule != NAME:
            return ["interpreted on a CPU it serves tests: name it to run it"]
        if problem.dtype == torch.bfloat16:
            reasons.append("Triton's interpreter multiplies bfloat16 wrongly")
    elif problem.device.type != "cuda":
        return [f"it runs on CUDA and ROCm devices, got {problem.device.type}"]
    if problem.dtype == torch.float64:
        reasons.append("it has no float64")
    if max(problem.dim_qk, problem.dim_v) > WIDEST:
        reasons.append(f"its tiles hold head dims up to {WIDEST}, got {problem.dim_qk} and {problem.dim_v}")
    if problem.mask is not None and any(isinstance(mask, Predicate) for mask in leaves(problem.mask)):
        reasons.append("it does not compile masks.predicate yet")
    if any(isinstance(score, Modify) for score in problem.scores):
        reasons.append("it does not compile scores.modify yet")
    return reasons


def forward(problem: Problem, query: Tensor, key: Tensor, value: Tensor, *, saves: bool) -> tuple[Tensor, Tensor]:
    """Out and LSE."""
    return forward_launch()(problem, query, key, value, saves=saves)


@cache
def forward_launch() -> Callable[..., tuple[Tensor, Tensor]]:
    """The function that launches, once Triton is imported."""
    from onchip.schedules.triton.forward import forward

    return forward


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
    """Gradients of query, key, value and of each of `tensors`, None where not needed."""
    return backward_launch()(problem, grad_out, grad_lse, query, key, value, out, lse, tensors, needs)


@cache
def backward_launch() -> Callable[..., list[Tensor | None]]:
    """The function that launches the backward."""
    from onchip.schedules.triton.backward import backward

    return backward


def kernels(problem: Problem, backward: bool, target: str | None) -> list[Kernel]:
    """What each kernel of a direction moves and computes, as on `target` ("sm_90" and the like), or here if None."""
    from onchip.schedules.triton.traffic import kernels

    return kernels(problem, backward, target)


def workspace_bytes(problem: Problem, backward: bool) -> int:
    """The lists of blocks, where a mask is more than a band, and in the backward LSE and delta of each row."""
    from onchip.schedules.triton.launch import Call

    call = Call(problem)
    rows = (1 if call.packed else problem.batch) * problem.heads_q * call.padded_rows
    return call.workspace_bytes + 8 * rows * backward
