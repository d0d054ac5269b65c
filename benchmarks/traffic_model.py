"""What the model says of the cases of `benchmarks/traffic.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from traffic_cases import Case, prepare

import onchip
from onchip.dispatch import Plan
from onchip.model.io import ALGORITHMS, Sizes, cost
from onchip.model.shape import Blocks, Shape

ALL = "*"
"""Stands for every kernel of a case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Bytes of a kernel by the model.

    Attributes:
        kernel: its name as ncu tells it, or ALL.
        asked_bytes: what its programs load and store, which passes between multiprocessors and the L2 cache.
        once_bytes: every tensor once, which device memory moves at least.
    """

    kernel: str
    asked_bytes: int
    once_bytes: int


def expected(case: Case, direction: str, device: torch.device) -> list[Expected]:
    """Kernel by kernel for our schedules, the sum for standard attention, nothing for others."""
    if case.contender == "standard":
        shape = Shape(
            batch=case.batch, heads=case.heads, length_q=case.length, length_k=case.length, dim=case.dim,
            dim_v=case.dim, element_bytes=getattr(torch, case.dtype).itemsize,
        )  # fmt: skip
        rows = Blocks(1, 1)
        found = cost(ALGORITHMS["eager"], shape, Sizes(rows, rows), direction)  # type: ignore[arg-type]
        assert found is not None
        return [Expected(kernel=ALL, asked_bytes=found.traffic.total_bytes, once_bytes=found.traffic.total_bytes)]
    if case.contender not in onchip.dispatch.schedules():
        return []
    plan = plan_of(case, device)
    return [
        Expected(
            # what sums slopes is torch's own
            kernel=f"{kernel.name.split()[0]}_kernel",
            asked_bytes=kernel.requested.total_bytes,
            once_bytes=kernel.compulsory.total_bytes,
        )
        for kernel in (plan.backward_kernels if direction == "backward" else plan.kernels)
        if not kernel.name.startswith("sum of")
    ]


def plan_of(case: Case, device: torch.device) -> Plan:
    """The plan of a case."""
    prepared = prepare(case, device)
    function = onchip.plan if case.sequences is None else onchip.plan_varlen
    return function(*prepared.inputs, **prepared.arguments, schedule=case.contender)
