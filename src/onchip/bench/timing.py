"""The timer that every speed in this project comes from.

Clocks move while a machine works: a GPU meets its power limit, a processor is shared. So contenders are timed in
rounds, one sample of each in every round, the order rotated, and compared within the round.
"""

from __future__ import annotations

import math
import re
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from onchip.bench.machine import read_gpu_state
from onchip.bench.memory import PeakMemory as PeakMemory
from onchip.bench.memory import measure_peak_memory as measure_peak_memory
from onchip.bench.protocol import Comparison, Failure, Method, Ratio, Result

Contender = Callable[[], object]
Progress = Callable[[int, int, str], None]
"""Called after every sample with the samples done, the samples in all, and the contender's name."""

_ORDER = "rotated by one every round, reversed every other turn"


def compare(
    contenders: Mapping[str, Contender],
    *,
    reference: str | None = None,
    rounds: int = 20,
    warmup: int = 3,
    device: torch.device | str = "cpu",
    minimum_sample_ms: float = 20.0,
    flush_l2: bool = False,
    progress: Progress | None = None,
) -> Comparison:
    """Time callables against each other in interleaved rounds.

    On the CPU a sample is read from `time.perf_counter`; on CUDA from events in the current stream, and the device is
    synchronised once at the end of each round. A call whose work on the GPU is shorter than its launch is timed as its
    launch: pass the replay of a CUDA graph to leave launches out.

    Args:
        contenders: a name and a call for each; what a call returns is dropped at once.
        reference: the contender that ratios are taken against; the first one unless given.
        rounds: samples of each contender, at least 1.
        warmup: calls of each contender before the first round.
        device: "cpu" or a CUDA device.
        minimum_sample_ms: a sample repeats the call until it lasts about this long; 0 takes single calls.
        flush_l2: on CUDA, write four times the L2 cache before every call, outside the timed part.
        progress: called after every sample.
    Returns:
        Comparison: medians and quartiles in milliseconds a call, paired ratios to the reference, and for each contender
        that raised its error by name. A contender that raises once is left out from then on.
    Raises:
        ValueError: no contender, an unknown reference, no rounds, a negative warm-up or sample, or another device.
    """
    device = torch.device(device)
    reference = _check(contenders, reference, rounds, warmup, device, minimum_sample_ms, flush_l2)
    clock: _Clock = _CudaClock(device, flush_l2) if device.type == "cuda" else _CpuClock()
    names = tuple(contenders)
    failures: dict[str, Failure] = {}
    repetitions: dict[str, int] = {}
    gpu_before = read_gpu_state(device)

    for name in names:
        with _Caught(name, failures, device):
            for _ in range(warmup):
                clock.sample(contenders[name], 1)()
            repetitions[name] = _repetitions(clock, contenders[name], minimum_sample_ms)

    samples: dict[str, list[float]] = {name: [] for name in names}
    for round_index in range(rounds):
        pending: dict[str, Callable[[], float]] = {}
        for turn, name in enumerate(_order(names, round_index), start=1):
            if name not in failures:
                with _Caught(name, failures, device):
                    pending[name] = clock.sample(contenders[name], repetitions[name])
            if progress is not None:
                progress(round_index * len(names) + turn, rounds * len(names), name)
        for name, read in pending.items():
            with _Caught(name, failures, device):
                samples[name].append(read())

    times = {name: samples[name] for name in names if name not in failures}
    return Comparison(
        method=Method(
            rounds=rounds,
            warmup_calls=warmup,
            order=_ORDER,
            timer=clock.name,
            minimum_sample_ms=float(minimum_sample_ms),
            flush_bytes=clock.flush_bytes,
        ),
        reference=reference,
        results=tuple(Result.of(name, times[name], repetitions[name]) for name in times),
        ratios=tuple(
            Ratio.of(name, reference, _quotients(times[name], times[reference]))
            for name in times
            if reference in times and name != reference
        ),
        failures=tuple(failures[name] for name in names if name in failures),
        gpu_before=gpu_before,
        gpu_after=read_gpu_state(device),
    )


class _Clock(Protocol):
    name: str
    flush_bytes: int

    def sample(self, call: Contender, repetitions: int) -> Callable[[], float]:
        """Run `call` and return a function that gives the mean milliseconds of one call, waiting if it must."""


class _CpuClock:
    name = "time.perf_counter"
    flush_bytes = 0

    def sample(self, call: Contender, repetitions: int) -> Callable[[], float]:
        start = time.perf_counter()
        for _ in range(repetitions):
            call()
        elapsed_ms = (time.perf_counter() - start) * 1e3 / repetitions
        return lambda: elapsed_ms


class _CudaClock:
    name = "torch.cuda.Event"

    def __init__(self, device: torch.device, flush_l2: bool) -> None:
        self._device = device
        l2_bytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or 64 * 2**20
        self.flush_bytes = 4 * l2_bytes if flush_l2 else 0
        self._flush = torch.empty(self.flush_bytes, dtype=torch.int8, device=device) if flush_l2 else None

    def sample(self, call: Contender, repetitions: int) -> Callable[[], float]:
        if self._flush is None:
            spans = [self._span(call, repetitions)]
        else:
            spans = []
            for _ in range(repetitions):
                self._flush.zero_()
                spans.append(self._span(call, 1))

        def read() -> float:
            # Read after the round, so that the device has all of it queued and is waited for only once.
            spans[-1][1].synchronize()
            return sum(start.elapsed_time(end) for start, end in spans) / repetitions

        return read

    def _span(self, call: Contender, repetitions: int) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        stream = torch.cuda.current_stream(self._device)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record(stream)
        for _ in range(repetitions):
            call()
        end.record(stream)
        return start, end


class _Caught:
    """Turn an exception of a contender into its `Failure`. An interrupt passes."""

    def __init__(self, name: str, failures: dict[str, Failure], device: torch.device) -> None:
        self._name, self._failures, self._device = name, failures, device

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        first_line = (str(error).strip() or "no message").splitlines()[0]
        self._failures[self._name] = Failure(
            name=self._name,
            error=f"{type(error).__name__}: {first_line}",
            traceback=_told(error),
        )
        if isinstance(error, torch.cuda.OutOfMemoryError):
            torch.cuda.empty_cache()
        return True


def _told(error: BaseException) -> str:
    """Its traceback as text, with files by their names alone: a record says nothing of where a checkout lies."""
    return re.sub(r'(File ")[^"]*[/\\]', r"\1", "".join(traceback.format_exception(error)))


def _order(names: tuple[str, ...], round_index: int) -> tuple[str, ...]:
    turn, shift = divmod(round_index, len(names))
    rotated = names[shift:] + names[:shift]
    # With rotation alone every contender would always run behind the same one.
    return rotated[::-1] if turn % 2 else rotated


def _quotients(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [our / their for our, their in zip(ours, theirs, strict=True)]


def _repetitions(clock: _Clock, call: Contender, minimum_sample_ms: float) -> int:
    """Calls that make one sample last at least `minimum_sample_ms`."""
    repetitions = 1
    while minimum_sample_ms > 0:
        lasted_ms = clock.sample(call, repetitions)() * repetitions
        if lasted_ms >= minimum_sample_ms:
            break
        # A tenth more than needed, and no more than tenfold at once: the first samples are the least certain.
        wanted = math.ceil(repetitions * 1.1 * minimum_sample_ms / max(lasted_ms, 1e-6))
        repetitions = max(repetitions + 1, min(10 * repetitions, wanted))
    return repetitions


def _check(
    contenders: Mapping[str, Contender],
    reference: str | None,
    rounds: int,
    warmup: int,
    device: torch.device,
    minimum_sample_ms: float,
    flush_l2: bool,
) -> str:
    """Check the arguments of `compare` and return the name of the reference."""
    if not contenders:
        raise ValueError("compare needs at least one contender: got none")
    if reference is not None and reference not in contenders:
        raise ValueError(f"reference must be one of {', '.join(contenders)}: got {reference!r}")
    if rounds < 1:
        raise ValueError(f"rounds must be at least 1: got {rounds}")
    if warmup < 0:
        raise ValueError(f"warmup must be at least 0: got {warmup}")
    if not 0 <= minimum_sample_ms < math.inf:
        raise ValueError(f"minimum_sample_ms must be at least 0 and finite: got {minimum_sample_ms}")
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda: got {device}")
    if flush_l2 and device.type != "cuda":
        raise ValueError(f"flush_l2 needs a CUDA device: got {device}")
    return next(iter(contenders)) if reference is None else reference
