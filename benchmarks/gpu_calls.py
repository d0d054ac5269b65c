"""From a case of `benchmarks/gpu.py` to calls that agree, and to their times.

A call is made only if its results agree with those of the first one, so no time of a wrong result gets into a table.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from common import backward, inference
from gpu_cases import TIMINGS, Case
from gpu_contenders import Attend, Contestant
from gpu_inputs import Inputs, draw
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from onchip.bench.protocol import Comparison
from onchip.bench.timing import Contender, compare

WARMUP = 3
TOLERANCE = 0.05
"""The largest `difference` of results that counts as rounding, with room to spare."""
BLOCK = 128


class WrongResult(Exception):
    """A contender's results differ from those of the first one."""


def time_case(case: Case, entered: Sequence[Contestant], device: torch.device, rounds: int) -> Comparison:
    """Time a case; the first contestant is the reference.

    "eager" flushes the L2 cache before every call. "graph" times replays back to back, and so leaves launches and the
    flush out. "host" times Python until it has queued the launches, many calls in a row: the device, which has less to
    do than the host, is not waited for.
    """
    calls = prepare(case, entered, device)
    if case.timing == "host":
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            comparison = compare(calls, rounds=rounds, warmup=WARMUP)
    else:
        flush = device.type == "cuda" and case.timing == "eager"
        comparison = compare(calls, rounds=rounds, warmup=WARMUP, device=device, flush_l2=flush)
    if device.type != "cuda":
        return comparison
    return dataclasses.replace(comparison, method=dataclasses.replace(comparison.method, timer=TIMINGS[case.timing]))


def prepare(case: Case, entered: Sequence[Contestant], device: torch.device) -> dict[str, Contender]:
    """A call for every contestant. Each has run once, and so is compiled, and its results have been compared.

    The call of a contestant that failed raises its error again, so that the timer records it.
    """
    inputs = draw(case, device)
    others = draw(case.plain, device) if any(contestant.plain for contestant in entered) else inputs
    calls: dict[str, Contender] = {}
    expected: tuple[str, tuple[Tensor, ...]] | None = None
    for contestant in entered:
        try:
            problem, tensors = (case.plain, others) if contestant.plain else (case, inputs)
            call = _call(problem, tensors, contestant.make(problem, tensors))
            found: Any = call()
            results: tuple[Tensor, ...] = found if isinstance(found, tuple) else (found,)
            if problem.sequences:
                # `difference` wants rows of a head side by side.
                results = tuple(result.transpose(0, 1) for result in results)
            if not contestant.compared or expected is None:
                _check_finite(results)
            else:
                _check(results, *expected, same=not case.dropout)
            if contestant.compared and expected is None:
                expected = contestant.name, results
            if case.timing == "graph":
                call = replayed(call, device)
        except Exception as error:
            # What the frames of the failed call hold is memory that the others may need.
            traceback.clear_frames(error.__traceback__)
            call = partial(fail, error)
        calls[contestant.name] = call
    return calls


def _call(case: Case, inputs: Inputs, attend: Attend) -> Contender:
    if case.direction == "forward":
        # Nothing takes a gradient here; entering a context is time that a host counts.
        return attend if case.timing == "host" else inference(attend)
    if case.direction == "backward":
        return backward(attend, inputs.leaves, inputs.gradient)
    return partial(_step, attend, inputs.leaves, inputs.gradient)


def _step(attend: Attend, leaves: tuple[Tensor, ...], gradient: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(attend(), leaves, gradient)


def replayed(call: Contender, device: torch.device) -> Contender:
    """The replay of a CUDA graph of the call; on another device, which has no graphs, the call."""
    if device.type != "cuda":
        return call
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return partial(_replay, graph, call)


def _replay(graph: torch.cuda.CUDAGraph, call: Contender) -> None:
    """Replay a graph of the call, which holds the tensors that the graph reads."""
    graph.replay()


def fail(error: Exception) -> NoReturn:
    """What stands in the place of a call that could not be made: the timer records the error."""
    raise error


# Comparison of results


def _check_finite(results: Sequence[Tensor]) -> None:
    if not all(bool(result.isfinite().all()) for result in results):
        raise WrongResult("a result is not finite")


def _check(results: Sequence[Tensor], reference: str, expected: Sequence[Tensor], same: bool) -> None:
    """Hold results against those of the reference: their values if they must be the `same`, or their shapes."""
    if not same:
        _check_finite(results)
        for result, wanted in zip(results, expected, strict=True):
            _check_shape(result, wanted)
        return
    for result, wanted in zip(results, expected, strict=True):
        found = difference(result, wanted)
        # Not a number is not less, either.
        if not found < TOLERANCE:
            raise WrongResult(f"differs from {reference} by {found:.2g} of the result; at most {TOLERANCE:g} is right")


def _check_shape(result: Tensor, expected: Tensor) -> None:
    if result.shape != expected.shape:
        raise WrongResult(f"the shape is {tuple(result.shape)} and not {tuple(expected.shape)}")


def difference(result: Tensor, expected: Tensor) -> float:
    """The largest difference in any BLOCK rows of a head, relative to those rows; nan if a value is nan.

    Rows are grouped, for single rows of a gradient are all but zero, and not taken together, for under a causal mask
    the late rows are so small that an error there would not show.
    """
    _check_shape(result, expected)

    def norms(tensor: Tensor) -> Tensor:
        squares = tensor.float().square().sum(-1)
        return F.pad(squares, (0, -squares.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK)).sum(-1).sqrt()

    with torch.no_grad():
        return float((norms(result - expected) / norms(expected).clamp_min(1e-30)).max())
