"""What the Hopper kernels move and compute."""

from __future__ import annotations

from onchip.gpu.counts import forward_kernel
from onchip.model.kernels import Kernel
from onchip.problem import Problem
from onchip.schedules.hopper.launch import Call


def kernels(problem: Problem, target: str | None) -> list[Kernel]:
    """The kernel of the forward. Reads lengths and offsets."""
    rows = (1 if problem.layout == "packed" else problem.batch) * problem.heads_q * problem.length_q
    return [forward_kernel(Call(problem, target), rows)] if rows * problem.dim_v else []
