"""Which schedule runs a problem, and why not the others.

A call that names no schedule takes the first that has no reason against it, in the order of the measured table
(choices.py) and then of the list below; a named one runs or raises `Unsupported` and never falls back. Forward and
backward are chosen separately: what is saved between them (inputs, out, lse, seed) is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from torch import Tensor

from onchip.choices import preferred
from onchip.errors import Unsupported
from onchip.problem import Problem
from onchip.schedules import aten, dense, tiled, triton

ScheduleName = Literal["aten", "triton", "tiled", "dense"]


@dataclass(frozen=True)
class Schedule:
    """One way to compute a problem.

    Attributes:
        unsupported, unsupported_backward: reasons, one sentence each, why the problem cannot run here; empty if it can.
        forward, backward: run inside the operators; None for a composite schedule, which torch differentiates itself.
            Where they meet values that they cannot treat, forward gives a third result, the rows (shaped like the LSE)
            that the next schedule must compute, and backward gives None.
            `forward(..., saves=False)` says that no backward follows.
        pairs: pairs of (query, key) that are computed. workspace_bytes: memory beyond inputs, outputs and gradients.
        tiles: rows and columns of a tile of scores.
    """

    name: str
    summary: str
    unsupported: Callable[[Problem], list[str]]
    unsupported_backward: Callable[[Problem], list[str]]
    pairs: Callable[[Problem], int]
    workspace_bytes: Callable[[Problem], int]
    tiles: Callable[[Problem], tuple[int, int]]
    forward: Callable[..., tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]] | None = None
    backward: Callable[..., list[Tensor | None] | None] | None = None

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
        aten.pairs,
        aten.workspace_bytes,
        aten.tiles,
        aten.forward,
        aten.backward,
    ),
    Schedule(
        triton.NAME,
        triton.SUMMARY,
        triton.unsupported,
        triton.unsupported,
        triton.pairs,
        triton.workspace_bytes,
        triton.tiles,
        triton.forward,
        triton.backward,
    ),
    Schedule(
        tiled.NAME,
        tiled.SUMMARY,
        tiled.unsupported,
        tiled.unsupported,
        tiled.pairs,
        tiled.workspace_bytes,
        tiled.tiles,
        tiled.forward,
        tiled.backward,
    ),
    Schedule(
        dense.NAME,
        dense.SUMMARY,
        dense.unsupported,
        dense.unsupported,
        dense.pairs,
        dense.workspace_bytes,
        dense.tiles,
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
        self._backward: tuple[Schedule, ...] | None = None

    @property
    def backward(self) -> tuple[Schedule, ...]:
        """Raises Unsupported if there is none."""
        if self._backward is None:
            self._backward = candidates(self.problem, backward=True)
        return self._backward


@dataclass(frozen=True)
class Plan:
    """What a call would do; `print(plan)` explains it. Figures are computed when they are read.

    Attributes:
        forward, backward: names of the schedules. second_derivative: what differentiates a gradient.
        reasons: schedule name -> why it was not chosen.
    """

    problem: Problem
    forward: str
    backward: str
    second_derivative: str
    reasons: dict[str, list[str]]
    notes: tuple[str, ...] = ()

    @property
    def tiles(self) -> tuple[int, int]:
        """Rows and columns of a tile of scores."""
        return schedules()[self.forward].tiles(self.problem)

    @cached_property
    def pairs(self) -> int:
        """Pairs of (query, key) whose score the forward computes, over all sequences and query heads."""
        return schedules()[self.forward].pairs(self.problem)

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward's two products, a multiplication and an addition counted as two."""
        return 2 * self.pairs * (self.problem.dim_qk + self.problem.dim_v)

    @property
    def backward_flops(self) -> int:
        """Floating-point operations of the backward's five products."""
        return 2 * self.pairs * (3 * self.problem.dim_qk + 2 * self.problem.dim_v)

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
    def workspace_bytes(self) -> int:
        """Memory that the schedule takes beyond inputs, outputs and gradients."""
        return schedules()[self.forward].workspace_bytes(self.problem)

    def __str__(self) -> str:
        lines = [
            f"problem            {self.problem.describe()}",
            f"forward            {self.forward}: {schedules()[self.forward].summary}",
            f"backward           {self.backward}",
            f"second derivative  {self.second_derivative}",
        ]
        lines += [f"not {name:<14} {sentence}" for name, why in self.reasons.items() for sentence in why]
        lines += [
            f"operations         {self.flops:.3e} forward, {self.backward_flops:.3e} backward, on {self.pairs} pairs",
            f"tiles              {self.tiles[0]} rows, {self.tiles[1]} columns",
            f"bytes              {self.minimum_bytes:.3e} at least, workspace {self.workspace_bytes:.3e}",
        ]
        return "\n".join(lines + [f"note               {note}" for note in self.notes])
