"""Every schedule on every law: its errors beside those of eager attention, its bounds, and whether its bits repeat."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

import onchip
from onchip.audit.bounds import Error, bound, measure_all
from onchip.audit.contenders import eager, run_forward, run_schedule, same_bits
from onchip.audit.laws import Inputs, Size, draw
from onchip.audit.reference import Reference, Results, reference

EAGER = "eager"
SCORE_TENSORS = 8
"""Tensors of all scores that eager or dense attention may hold at once in a backward, rounded up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is audited. `schedules` are names of onchip's, or contenders.CHOSEN; `repeats` counts runs of each case."""

    laws: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    schedules: tuple[str, ...]
    lengths: tuple[int, ...]
    dims: tuple[int, ...]
    batch: int
    heads: int
    causal: bool
    lse_gradient: bool
    repeats: int
    seed: int
    device: str

    @property
    def steps(self) -> int:
        """How often `audit` reports a step."""
        problems = len(self.laws) * len(self.lengths) * len(self.dims) * len(self.dtypes)
        return problems * (1 + len(self.schedules))

    @property
    def peak_bytes(self) -> int:
        """About what the largest problem takes in eager or dense attention."""
        widest = max(torch.promote_types(dtype, torch.float32).itemsize for dtype in self.dtypes)
        return SCORE_TENSORS * widest * self.batch * self.heads * max(self.lengths) ** 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One tensor of one case.

    Attributes:
        name: out, lse, d_query, d_key or d_value.
        times_eager, times_eager_rmse: largest error and RMSE over those of eager attention; None where those are 0.
        allowed: the largest absolute error that clause 12 of the contract allows; None for eager attention itself.
        holds: whether the error is within it.
    """

    name: str
    error: Error
    times_eager: float | None
    times_eager_rmse: float | None
    allowed: float | None
    holds: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One problem: a law of the inputs, their dtype, and what varies of their shape."""

    law: str
    dtype: str
    length: int
    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One schedule, or eager attention, on one problem.

    Attributes:
        declined: why the schedule does not run it. no_gradients: why it has no gradients here.
        repeats_equal, deterministic_equal: whether every run gave the same bits, by default and with
            deterministic=True; None where that was not tried or is declined.
        alone_equal: whether the last sequence gives the same bits alone as in its batch; None in a batch of one.
    """

    point: Point
    contender: str
    declined: tuple[str, ...] = ()
    no_gradients: tuple[str, ...] = ()
    tensors: tuple[Measured, ...] = ()
    repeats_equal: bool | None = None
    deterministic_equal: bool | None = None
    alone_equal: bool | None = None

    @property
    def fails(self) -> bool:
        """Whether the contract is broken: a bound of clause 12, or equal bits with deterministic=True (clause 11)."""
        return self.deterministic_equal is False or not all(tensor.holds for tensor in self.tensors)


def audit(setting: Setting, step: Callable[[str], None]) -> Iterator[Case]:
    """Measure every case; for each problem eager attention comes first.

    Args:
        step: told what comes next, `setting.steps` times.
    """
    for law, length, dim in itertools.product(setting.laws, setting.lengths, setting.dims):
        size = Size(batch=setting.batch, heads=setting.heads, length=length, dim=dim)
        drawn = draw(law, size, causal=setting.causal, lse_gradient=setting.lse_gradient, seed=setting.seed)
        for dtype in setting.dtypes:
            point = Point(law=law, dtype=str(dtype).removeprefix("torch."), length=length, dim=dim)
            problem = f"{law}, {point.dtype}, {length} tokens, dim {dim}"
            step(f"{problem}: reference")
            inputs = drawn.to(setting.device, dtype)
            exact = reference(inputs)
            standard = measure_all(eager(inputs), exact)
            yield Case(point=point, contender=EAGER, tensors=tuple(_measured(standard, standard)))
            for schedule in setting.schedules:
                step(f"{problem}: {schedule}")
                yield _examine(point, schedule, inputs, exact, standard, setting.repeats)


def _examine(
    point: Point, schedule: str, inputs: Inputs, exact: Reference, standard: dict[str, Error], repeats: int
) -> Case:
    run, no_gradients = run_schedule, tuple[str, ...]()
    try:
        got = run(inputs, schedule)
    except onchip.Unsupported as refusal:
        run, no_gradients = run_forward, _reasons(refusal, schedule)
        try:
            got = run(inputs, schedule)
        except onchip.Unsupported as whole:
            return Case(point=point, contender=schedule, declined=_reasons(whole, schedule))
    allowed = {name: bound(name, exact, standard[name], inputs.query.dtype) for name in got}
    last = inputs.query.shape[0] - 1
    return Case(
        point=point,
        contender=schedule,
        no_gradients=no_gradients,
        tensors=tuple(_measured(measure_all(got, exact), standard, allowed)),
        repeats_equal=_repeat(lambda: run(inputs, schedule, None), repeats),
        deterministic_equal=_repeat(lambda: run(inputs, schedule, True), repeats),
        alone_equal=_equal_alone(run(inputs.sequence(last), schedule), got, last) if last else None,
    )


def _measured(
    errors: dict[str, Error], standard: dict[str, Error], allowed: dict[str, float] | None = None
) -> Iterator[Measured]:
    for name, error in errors.items():
        eager_error, most = standard[name], None if allowed is None else allowed[name]
        yield Measured(
            name=name,
            error=error,
            times_eager=error.maximum / eager_error.maximum if eager_error.maximum else None,
            times_eager_rmse=error.rmse / eager_error.rmse if eager_error.rmse else None,
            allowed=most,
            holds=most is None or error.maximum <= most,
        )


def _repeat(run: Callable[[], Results], repeats: int) -> bool | None:
    """Whether so many runs give the same bits; None for fewer than two, or if the schedule declines."""
    if repeats < 2:
        return None
    try:
        first = run()
    except onchip.Unsupported:
        return None
    return all(same_bits(run(), first) for _ in range(repeats - 1))


def _equal_alone(alone: Results, batch: Results, number: int) -> bool:
    return same_bits(alone, {name: tensor[number : number + 1] for name, tensor in batch.items()})


def _reasons(refusal: onchip.Unsupported, schedule: str) -> tuple[str, ...]:
    """The schedule's own; those of every schedule if none was named."""
    own = refusal.reasons.get(schedule)
    return tuple(own) if own else tuple(itertools.chain.from_iterable(refusal.reasons.values()))
