"""Which schedule runs a problem, and why not the others.

A call that names no schedule takes the first that has no reason against it, in the order of the measured table
(choices.py) and then of the list below; a named one runs or raises `Unsupported` and never falls back. Forward and
backward are chosen separately: what is saved between them (inputs, out, lse, seed) is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from onchip.choices import preferred
from onchip.errors import Unsupported
from onchip.model.hardware import Hardware, planned
from onchip.model.kernels import Kernel
from onchip.model.presets import hardware_of
from onchip.model.roofline import Roofline, roofline
from onchip.problem import Problem
from onchip.schedules import aten, dense, hopper, tiled, triton

ScheduleName = Literal["aten", "hopper", "triton", "tiled", "dense"]
Launch = Callable[..., tuple[Tensor, Tensor]]
LaunchBackward = Callable[..., list[Tensor | None]]


@dataclass(frozen=True)
class Schedule:
    """One way to compute a problem.

    Attributes:
        unsupported, unsupported_backward: reasons, one sentence each, why the problem cannot run here; empty if it can.
        forward, backward: run inside the operators; both None for a composite schedule, which torch differentiates
            itself, and backward None where there is none.
            Where they meet values that they cannot treat, forward gives a third result, the rows (shaped like the LSE)
            that the next schedule must compute, and backward gives None.
            `forward(..., saves=False)` says that no backward follows.
        kernels: what each kernel of a direction moves and computes, `kernels(problem, backward, target)`, as on the
            architecture `target`, or on the problem's device if that is None.
        workspace_bytes: memory beyond inputs, outputs and gradients, `workspace_bytes(problem, backward)`.
        launches: for a schedule of kernels, what gives the functions behind forward and backward, once what they need
            is imported. Where a problem holds no tensors their results are always there, in memory that is new: neither
            autograd nor autocast has to be kept from them.
    """

    name: str
    summary: str
    unsupported: Callable[[Problem], list[str]]
    unsupported_backward: Callable[[Problem], list[str]]
    kernels: Callable[[Problem, bool, str | None], list[Kernel]]
    workspace_bytes: Callable[[Problem, bool], int]
    forward: Callable[..., tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]] | None = None
    backward: Callable[..., list[Tensor | None] | None] | None = None
    launches: tuple[Callable[[], Launch], Callable[[], LaunchBackward]] | None = None

    @property
    def composite(self) -> bool:
        """Whether torch's autograd and transforms go through it; such a schedule never runs inside an operator."""
        return self.forward is None


_SCHEDULES = (
    Schedule(
        aten.NAME,
        aten.SUMMARY,
        aten.unsupported,
        aten.unsupported_backward,
        aten.kernels,
        aten.workspace_bytes,
        aten.forward,
        aten.backward,
    ),
    Schedule(
        hopper.NAME,
        hopper.SUMMARY,
        hopper.unsupported,
        hopper.unsupported,
        hopper.kernels,
        hopper.workspace_bytes,
        hopper.forward,
        hopper.backward,
        (hopper.forward_launch, hopper.backward_launch),
    ),
    Schedule(
        triton.NAME,
        triton.SUMMARY,
        triton.unsupported,
        triton.unsupported,
        triton.kernels,
        triton.workspace_bytes,
        triton.forward,
        triton.backward,
        (triton.forward_launch, triton.backward_launch),
    ),
    Schedule(
        tiled.NAME,
        tiled.SUMMARY,
        tiled.unsupported,
        tiled.unsupported,
        tiled.kernels,
        tiled.workspace_bytes,
        tiled.forward,
        tiled.backward,
    ),
    Schedule(
        dense.NAME,
        dense.SUMMARY,
        dense.unsupported,
        dense.unsupported,
        dense.kernels,
        dense.workspace_bytes,
    ),
)
_BY_NAME = {schedule.name: schedule for schedule in _SCHEDULES}
COMPOSITE = frozenset(schedule.name for schedule in _SCHEDULES if schedule.composite)
"""Names of schedules that never run inside an operator."""

TRANSFORMED = (
    "inside torch.func.grad, jvp and forward-mode AD only a composite schedule runs; schedule=None takes dense there"
)
NOT_FINITE = "a row sees something that is not finite, which this kernel does not treat as the contract says"


def schedules() -> dict[str, Schedule]:
    """Every schedule that is present, by name, in the order of preference."""
    return dict(_BY_NAME)


def check_name(name: Any) -> None:
    """Raise unless `name` is None or names a schedule that is present."""
    if name is not None and name not in _BY_NAME:
        raise ValueError(f"schedule must be None or one of {', '.join(map(repr, _BY_NAME))}, got {name!r}")


def _order(problem: Problem, backward: bool) -> tuple[Schedule, ...]:
    """Schedules in the order of preference for a problem."""
    first = preferred(problem, backward)
    return (*(_BY_NAME[name] for name in first), *(schedule for schedule in _SCHEDULES if schedule.name not in first))


def _reasons(schedule: Schedule, problem: Problem, backward: bool) -> list[str]:
    return schedule.unsupported_backward(problem) if backward else schedule.unsupported(problem)


def choose(
    problem: Problem, *, backward: bool = False, transformed: bool = False, measured: bool = True
) -> tuple[Schedule, dict[str, list[str]]]:
    """The schedule that runs the problem, and the reasons against each that does not.

    Args:
        backward: choose for the backward instead of the forward.
        transformed: the call stands under a torch.func transform that differentiates, or in forward mode.
        measured: order by the measured table, which asks for sizes; a compiler must not see that.

    Raises:
        Unsupported: the named schedule, or every one, refuses.
    """
    chosen, reasons = None, {}
    order = _order(problem, backward) if measured else _SCHEDULES
    for schedule in order:
        why = _reasons(schedule, problem, backward)
        if transformed and not schedule.composite:
            why = [*why, TRANSFORMED]
        if not why and problem.schedule not in (None, schedule.name):
            why = [f"it could run, but schedule={problem.schedule!r} was asked for"]
        elif not why and chosen is not None:
            why = [f"{chosen.name} comes first"]
        if why:
            reasons[schedule.name] = why
        else:
            chosen = schedule
    if chosen is None:
        works = [s.name for s in order if not _reasons(s, problem, backward) and (s.composite or not transformed)]
        raise Unsupported(problem.describe(), reasons, _nearest(works))
    return chosen, reasons


def backward_of(problem: Problem, forward: Schedule) -> str | None:
    """Name of the schedule of the backward; None where the named one has none, and only calls without gradients run.

    Raises:
        Unsupported: none was named, and every one refuses.
    """
    if forward.composite:
        return forward.name
    try:
        return choose(problem, backward=True)[0].name
    except Unsupported:
        if problem.schedule is None:
            raise
        return None


def goes_composite(problem: Problem) -> bool:
    """Whether the first schedule that runs the forward is composite, which torch then differentiates as well."""
    if problem.schedule is not None:
        return problem.schedule in COMPOSITE
    return next((s.composite for s in _order(problem, False) if not s.unsupported(problem)), False)


def _nearest(works: list[str]) -> str:
    return f"schedule={works[0]!r} or schedule=None" if works else "a smaller set of features"


def candidates(problem: Problem, backward: bool) -> tuple[Schedule, ...]:
    """Schedules to run inside an operator, one after the other until one gives a result.

    Raises:
        Unsupported: there is none.
    """
    found = tuple(
        schedule
        for schedule in _order(problem, backward)
        if not schedule.composite
        and problem.schedule in (None, schedule.name)
        and not _reasons(schedule, problem, backward)
    )
    if not found:
        choose(problem, backward=backward)
    return found


def exhausted(problem: Problem) -> Unsupported:
    """What to raise when no candidate is left and some values were not treated."""
    return Unsupported(problem.describe(), {str(problem.schedule): [NOT_FINITE]}, _nearest([tiled.NAME]))


class Ready:
    """A problem with its schedules, found once and kept by who calls again with the same facts."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.forward = candidates(problem, backward=False)

    @cached_property
    def backward(self) -> tuple[Schedule, ...]:
        """Raises Unsupported if there is none."""
        return candidates(self.problem, backward=True)

    @cached_property
    def launch(self) -> Launch | None:
        """What a problem without tensors comes to where the first schedule is one of kernels; see `Schedule`."""
        launches = self.forward[0].launches
        return None if launches is None else launches[0]()

    @cached_property
    def launch_backward(self) -> LaunchBackward | None:
        """The same for its backward. Raises Unsupported if there is none."""
        launches = self.backward[0].launches
        return None if launches is None else launches[1]()


@dataclass(frozen=True)
class Plan:
    """What a call would do; `print(plan)` explains it. Figures are computed when they are read, never in a call.

    Attributes:
        forward, backward: names of the schedules; backward is None where the one that was asked for has none.
        second_derivative: what differentiates a gradient.
        reasons: schedule name -> why it was not chosen.
        asked: the hardware that the plan is for, if not the device of the problem; see `on`.
    """

    problem: Problem
    forward: str
    backward: str | None
    second_derivative: str
    reasons: dict[str, list[str]]
    notes: tuple[str, ...] = ()
    asked: Hardware | None = None

    def on(self, hardware: Hardware, schedule: str | None = None) -> Plan:
        """The plan of the same problem on other hardware, which need not be here.

        Args:
            schedule: ask for this one there; None asks for the one that was asked for here, if any.

        Raises:
            Unsupported: no schedule that was asked for runs there.
            ValueError: there is no such schedule.
        """
        check_name(schedule)
        device = torch.device(hardware.device_type)
        problem = replace(self.problem, device=device, schedule=schedule or self.problem.schedule)
        with planned(hardware):
            forward, reasons = choose(problem)
            backward = backward_of(problem, forward)
        return replace(self, problem=problem, forward=forward.name, backward=backward, reasons=reasons, asked=hardware)

    # What is computed

    @cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        """What each kernel of the forward moves and computes."""
        return self._kernels(False)

    @cached_property
    def backward_kernels(self) -> tuple[Kernel, ...]:
        """What each kernel of the backward moves and computes, for gradients of query, key and value, and of tensors
        of scores that want one."""
        return self._kernels(True)

    def _kernels(self, backward: bool) -> tuple[Kernel, ...]:
        target = None if self.asked is None else self.asked.architecture
        name = self.backward if backward else self.forward
        if name is None:
            return ()
        schedule = schedules()[name]
        with planned(self.asked):
            return tuple(schedule.kernels(self.problem, backward, target))

    @property
    def tiles(self) -> tuple[int, int]:
        """Rows and columns of a tile of scores in the forward."""
        return next((kernel.tile for kernel in self.kernels if kernel.tile is not None), (0, 0))

    @property
    def backward_tiles(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of a tile of scores in each kernel of the backward that has them."""
        return {kernel.name: kernel.tile for kernel in self.backward_kernels if kernel.tile is not None}

    @property
    def pairs(self) -> int:
        """Pairs of (query, key) whose score the forward computes, over all sequences and query heads."""
        return sum(kernel.pairs for kernel in self.kernels)

    @property
    def backward_pairs(self) -> dict[str, int]:
        """The same for each kernel of the backward that computes scores; tiles differ, so these do."""
        return {kernel.name: kernel.pairs for kernel in self.backward_kernels if kernel.tile is not None}

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward's products, a multiplication and an addition counted as two.

        They are those of pairs and head dims that exist; what tiles compute beyond is in `kernels`.
        """
        return sum(kernel.compulsory.flops for kernel in self.kernels)

    @property
    def backward_flops(self) -> int:
        """The same for the backward as it is computed: products that two kernels both make count twice."""
        return sum(kernel.compulsory.flops for kernel in self.backward_kernels)

    @property
    def minimum_backward_flops(self) -> int:
        """What a backward needs: five products on the forward's pairs (Dao 2023, FlashAttention-2, algorithm 2)."""
        return 2 * self.pairs * (3 * self.problem.dim_qk + 2 * self.problem.dim_v)

    # What is moved

    @property
    def minimum_bytes(self) -> int:
        """Bytes that any forward must move: each of query, key, value, out and LSE once."""
        problem = self.problem
        sequences = 1 if problem.layout == "packed" else problem.batch
        rows = sequences * problem.heads_q * problem.length_q
        columns = sequences * problem.heads_kv * problem.length_k
        width = problem.dtype.itemsize
        return (rows + columns) * (problem.dim_qk + problem.dim_v) * width + rows * problem.score_dtype.itemsize

    @property
    def requested_bytes(self) -> int:
        """Bytes that the forward's tiles load and store, in all."""
        return sum(kernel.requested.total_bytes for kernel in self.kernels)

    @property
    def backward_requested_bytes(self) -> int:
        """Bytes that the backward's tiles load and store, in all."""
        return sum(kernel.requested.total_bytes for kernel in self.backward_kernels)

    @property
    def workspace_bytes(self) -> int:
        """Memory that the forward takes beyond inputs and outputs."""
        with planned(self.asked):
            return schedules()[self.forward].workspace_bytes(self.problem, False)

    @property
    def backward_workspace_bytes(self) -> int:
        """Memory that the backward takes beyond what the forward was given and saved, and the gradients."""
        if self.backward is None:
            return 0
        with planned(self.asked):
            return schedules()[self.backward].workspace_bytes(self.problem, True)

    # How long it takes at least

    @cached_property
    def hardware(self) -> Hardware | None:
        """What is known of the device: measured here, or else a preset; None if there is neither."""
        return self.asked or hardware_of(self.problem.device)

    @cached_property
    def roofline(self) -> Roofline | None:
        """How long the forward takes at least; None if nothing is known of the device. See docs/roofline.md."""
        return None if self.hardware is None else roofline(self.kernels, self.hardware)

    @cached_property
    def backward_roofline(self) -> Roofline | None:
        """How long the backward takes at least."""
        if self.hardware is None or self.backward is None:
            return None
        return roofline(self.backward_kernels, self.hardware)

    def __str__(self) -> str:
        lines = [
            f"problem            {self.problem.describe()}",
            f"forward            {self.forward}: {schedules()[self.forward].summary}",
            f"backward           {self.backward or f'none: {self.forward} has no gradients here'}",
            f"second derivative  {self.second_derivative}",
        ]
        lines += [f"not {name:<14} {sentence}" for name, why in self.reasons.items() for sentence in why]
        tiles = "; ".join(
            f"{kernel.name} {kernel.tile[0]} x {kernel.tile[1]}{_tile_source(kernel)}"
            for kernel in self.backward_kernels
            if kernel.tile is not None
        )
        source = next((_tile_source(kernel) for kernel in self.kernels if kernel.tile is not None), "")
        pairs = ", ".join(f"{name} {count}" for name, count in self.backward_pairs.items())
        lines += [
            f"operations         {self.flops:.3e} forward, {self.backward_flops:.3e} backward, which needs "
            f"{self.minimum_backward_flops:.3e}",
            f"pairs              {self.pairs} forward" + (f"; backward: {pairs}" if pairs else ""),
            f"tiles              {self.tiles[0]} rows, {self.tiles[1]} columns{source}"
            + (f"; backward: {tiles}" if tiles else ""),
            f"bytes              {self.minimum_bytes:.3e} at least, {self.requested_bytes:.3e} asked for by tiles "
            f"({self.backward_requested_bytes:.3e} backward)",
            f"workspace          {self.workspace_bytes:.3e} bytes, {self.backward_workspace_bytes:.3e} in the backward",
            *self._bounds(),
        ]
        return "\n".join(lines + [f"note               {note}" for note in self.notes])

    def _bounds(self) -> list[str]:
        if self.hardware is None:
            return ["roofline           this device has no preset; `onchip doctor --measure` measures it"]
        lines = [f"roofline           {self.hardware.name}: forward {self.roofline}"]
        if self.backward_roofline is not None:
            lines.append(f"                   backward {self.backward_roofline}")
        return lines


def _tile_source(kernel: Kernel) -> str:
    return f" ({kernel.tile_source})" if kernel.tile_source else ""
