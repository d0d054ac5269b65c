"""Kernels for Hopper GPUs in Gluon: one warp brings tiles by TMA, two or three warpgroups multiply and weigh them.

    forward.py   out and LSE              launch.py           what it is given       tiles.py    tile sizes, as data
    backward.py  dQ, dK and dV            launch_backward.py  what it is given       traffic.py  what they move
    widest.py    ... of wide heads        workspace.py        between its kernels    dropout.py  what drops
    special.py   exponentials, softcap    names.py            Gluon's names

Triton costs a second to import, so it is imported by the first call.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from onchip.masks import And, Band, Mask
from onchip.model.hardware import capability_of
from onchip.model.kernels import Kernel
from onchip.problem import Problem
from onchip.scores import Bias, Modify

NAME = "hopper"
SUMMARY = (
    "warp-specialised TMA and WGMMA kernels for Hopper GPUs: bands, grouped heads, softcap, ALiBi, sinks, dropout, any "
    "layout, forward and backward"
)
WIDEST = 256
"""The largest head dim."""
CAPABILITY = (9, 0)

_IS_PRESENT = importlib.util.find_spec("triton") is not None


def unsupported(problem: Problem) -> list[str]:
    """Reasons why this schedule cannot run the problem."""
    if not _IS_PRESENT:
        return ["Triton is not installed"]
    if problem.device.type != "cuda" or torch.version.hip is not None:
        return [f"it runs on Hopper GPUs, got {problem.device.type}"]
    if (found := capability_of(problem.device)) != CAPABILITY:
        return [f"it runs on GPUs of compute capability 9.0, got {found[0]}.{found[1]}"]
    reasons = []
    if problem.dtype not in (torch.float16, torch.bfloat16):
        reasons.append("it has float16 and bfloat16 only")
    if max(problem.dim_qk, problem.dim_v) > WIDEST:
        reasons.append(f"its tiles hold head dims up to {WIDEST}, got {problem.dim_qk} and {problem.dim_v}")
    if problem.dim_qk % 8 or problem.dim_v % 8:
        reasons.append(
            f"TMA steps by 16 bytes, so head dims must be multiples of 8, got {problem.dim_qk} and {problem.dim_v}"
        )
    if not _is_band(problem.mask):
        reasons.append("it has bands only (causal and windows, each with any diagonal)")
    if any(isinstance(score, Bias | Modify) for score in problem.scores):
        reasons.append("it has no bias and compiles no scores.modify")
    return reasons


def _is_band(mask: Mask | None) -> bool:
    """Whether a mask is an intersection of bands."""
    if mask is None:
        return True
    return all(isinstance(part, Band) for part in (mask.parts if isinstance(mask, And) else (mask,)))


def forward(problem: Problem, query: Tensor, key: Tensor, value: Tensor, *, saves: bool) -> tuple[Tensor, Tensor]:
    """Out and LSE."""
    return forward_launch()(problem, query, key, value, saves=saves)


@cache
def forward_launch() -> Callable[..., tuple[Tensor, Tensor]]:
    """The function that launches, once Triton is imported."""
    from onchip.schedules.hopper.forward import forward

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
    """The function that launches them. A process that never differentiates does not import them."""
    from onchip.schedules.hopper.launch_backward import backward

    return backward


def kernels(problem: Problem, backward: bool, target: str | None) -> list[Kernel]:
    """What each kernel of a direction moves and computes."""
    from onchip.schedules.hopper.traffic import kernels

    return kernels(problem, backward, target)


def workspace_bytes(problem: Problem, backward: bool) -> int:
    """A counter and two numbers for each tile of rows; in the backward dQ in float32, and two numbers for each row."""
    from onchip.schedules.hopper.launch import Call, Order
    from onchip.schedules.hopper.workspace import Workspace

    call = Call(problem)
    return 4 * sum(Workspace(call).sizes) if backward else 4 * (1 + Order(call).marks)
