"""Measure what a device can do at most: products, exponentials, memories, launches.

Each figure is the median of several samples of one loop that asks for nothing else. Rates of products are of tensors of
ones, which draw less power than random ones: where a device lowers its clock at its power limit, products of random
numbers reach less, and a kernel that waits now and then may reach more than those.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from onchip.bench.machine import available_memory_bytes
from onchip.bench.timing import Contender, compare
from onchip.model.hardware import Figure, Hardware, device_name, multiprocessors
from onchip.model.presets import preset_of

Step = Callable[[str], None]
"""Called before each measurement with what comes next."""

ROUNDS = 7
WARMUP = 2
LONGEST_SIDE = 8192
PRECISIONS = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "tf32": torch.float32,
    "float32": torch.float32,
    "float64": torch.float64,
}
GRAPH = 100
"""Empty kernels in the graph that is replayed."""
EXPONENTIALS_EACH = 2**17
"""Exponentials of each thread of a CPU: operands and results fit its second cache."""


class NotMeasured(RuntimeError):
    """A figure without which there is no roofline could not be measured, and no preset gives it."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What was measured of a device.

    Attributes:
        hardware: the figures; one that could not be measured is the preset's.
        failures: name of a figure -> why it could not be measured.
        spreads: name of a figure -> the distance between the quartiles of its samples over their median.
    """

    hardware: Hardware
    failures: dict[str, str]
    spreads: dict[str, float]


def steps(device: torch.device) -> int:
    """How many measurements `measure` makes."""
    return len(_precisions(device)) + (4 if device.type == "cuda" else 3)


def _precisions(device: torch.device) -> list[str]:
    return [precision for precision in PRECISIONS if device.type == "cuda" or precision != "tf32"]


def measure(device: torch.device, step: Step) -> Ceilings:
    """The ceilings of a device.

    Takes less than a minute. Other programs on the device make every figure too low.

    Raises:
        NotMeasured: a figure is missing and there is no preset.
    """
    gauge = _GpuGauge(device) if device.type == "cuda" else _CpuGauge(device)
    found: dict[str, Figure] = {}
    failures: dict[str, str] = {}
    spreads: dict[str, float] = {}
    for name, take in gauge.figures():
        step(name)
        try:
            found[name] = take()
            spreads[name] = gauge.spread
        except Exception as error:  # one unit that cannot be measured must not hide the others
            failures[name] = f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
    return Ceilings(gauge.hardware(found), failures, spreads)


class _Gauge:
    """What measuring a CPU and a GPU share."""

    least_call_s: float
    """Products are made so large that one takes at least this long."""
    spread = 0.0
    """Of the samples of the last call that was timed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def figures(self) -> Iterator[tuple[str, Callable[[], Figure]]]:
        """Names, in the order of measuring, with what measures each."""
        for precision in _precisions(self.device):
            yield precision, partial(self._products, precision)
        yield "device memory", self._device_memory

    def median_s(self, call: Contender) -> float:
        """Seconds of one call.

        Raises:
            RuntimeError: it failed.
        """
        comparison = compare({"call": call}, rounds=ROUNDS, warmup=WARMUP, device=self.device)
        for failure in comparison.failures:
            raise RuntimeError(failure.error)
        result = comparison.result("call")
        self.spread = (result.upper_quartile_ms - result.lower_quartile_ms) / result.median_ms
        return result.median_ms / 1e3

    def _products(self, precision: str) -> Figure:
        with _fp32_precision(precision):
            side = 256
            while side < LONGEST_SIDE and self._once_s(self._product(precision, side)) < self.least_call_s:
                side *= 2
            rate = 2 * side**3 / self.median_s(self._product(precision, side))
        return Figure(rate, "FLOP/s", f"measured: torch.matmul of ones, {side} x {side} x {side}")

    def _product(self, precision: str, side: int) -> Contender:
        left, right, out = torch.ones(3, side, side, dtype=PRECISIONS[precision], device=self.device)
        return partial(torch.matmul, left, right, out=out)

    def _once_s(self, call: Contender) -> float:
        call()
        self.wait()
        start = time.perf_counter()
        call()
        self.wait()
        return time.perf_counter() - start

    def wait(self) -> None:
        """Until the device has done what it was given."""

    def _device_memory(self) -> Figure:
        count = min(2**29, (available_memory_bytes(self.device) or 2**32) // 4 // 4)
        if self.device.type == "cpu":
            count = min(count, 2**26)
        source = torch.ones(count, dtype=torch.float32, device=self.device)
        target = torch.empty_like(source)
        rate = 8 * count / self.median_s(partial(target.copy_, source))
        return Figure(rate, "B/s", f"measured: a copy of {4 * count / 2**20:.0f} MiB, bytes read and bytes written")

    def merged(self, base: Hardware, found: dict[str, Figure]) -> Hardware:
        """A preset with what was measured in its place."""
        products = {**base.products, **{name: found[name] for name in _precisions(self.device) if name in found}}
        return replace(
            base,
            name=f"{device_name(self.device)}, measured",
            products=products,
            exponentials=found.get("exponentials", base.exponentials),
            device_memory=found.get("device memory", base.device_memory),
            cache=found.get("cache", base.cache),
            launch=found.get("launch", base.launch),
            measured=True,
        )


class _CpuGauge(_Gauge):
    least_call_s = 0.02

    def figures(self) -> Iterator[tuple[str, Callable[[], Figure]]]:
        yield from super().figures()
        yield "exponentials", self._exponentials
        yield "launch", self._launch

    def _exponentials(self) -> Figure:
        count = EXPONENTIALS_EACH * torch.get_num_threads()
        values = torch.linspace(-8, 0, count)
        out = torch.empty_like(values)
        rate = count / self.median_s(partial(torch.exp2, values, out=out))
        return Figure(rate, "1/s", f"measured: torch.exp2 of {count} numbers in float32, which caches hold")

    def _launch(self) -> Figure:
        number = torch.zeros(1)
        return Figure(self.median_s(partial(number.add_, 1.0)), "s", "measured: an addition to one number")

    def hardware(self, found: dict[str, Figure]) -> Hardware:
        """Caches are those of the preset: an operator of torch has no loop that stays inside one."""
        base = preset_of(self.device)
        assert base is not None, "a CPU is a part of the preset's"
        return self.merged(base, found)


class _GpuGauge(_Gauge):
    least_call_s = 0.001

    def figures(self) -> Iterator[tuple[str, Callable[[], Figure]]]:
        yield from super().figures()
        yield "exponentials", self._exponentials
        yield "cache", self._cache
        yield "launch", self._launch

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def _exponentials(self) -> Figure:
        from onchip.bench.ceiling_kernels import exponentials_kernel

        programs, block, repeats = 16 * multiprocessors(self.device), 1024, 512
        out = torch.empty(programs * block, device=self.device)

        def call() -> None:
            with torch.cuda.device(self.device):
                exponentials_kernel[(programs,)](out, repeats, BLOCK=block, num_warps=4)

        rate = programs * block * 16 * repeats / self.median_s(call)
        return Figure(rate, "1/s", "measured: a kernel that takes exp2 of registers over and over")

    def _cache(self) -> Figure:
        from onchip.bench.ceiling_kernels import read_kernel

        size = getattr(torch.cuda.get_device_properties(self.device), "L2_cache_size", 0) or 4 * 2**20
        programs, block, repeats = 16 * multiprocessors(self.device), 4096, 256
        blocks = max(1, size // 8 // (4 * block))
        source = torch.ones(blocks * block, device=self.device)
        out = torch.empty(programs * block, device=self.device)

        def call() -> None:
            with torch.cuda.device(self.device):
                read_kernel[(programs,)](source, out, blocks, repeats, BLOCK=block, num_warps=8)

        rate = 4 * programs * block * repeats / self.median_s(call)
        what = f"reads of {blocks * block * 4 / 2**20:.1f} MiB over and over, past the first cache"
        return Figure(rate, "B/s", f"measured: {what}")

    def _launch(self) -> Figure:
        from onchip.bench.ceiling_kernels import empty_kernel

        number = torch.zeros(1, device=self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device):
            empty_kernel[(1,)](number)
            self.wait()
            with torch.cuda.graph(graph):
                for _ in range(GRAPH):
                    empty_kernel[(1,)](number)
        each = self.median_s(graph.replay) / GRAPH
        return Figure(each, "s", f"measured: a graph of {GRAPH} empty kernels; eager launches take longer")

    def hardware(self, found: dict[str, Figure]) -> Hardware:
        """The preset, or what CUDA tells, with measured figures in their place.

        Raises:
            NotMeasured: there is no preset, and not everything was measured.
        """
        return self.merged(preset_of(self.device) or self._told(found), found)

    def _told(self, found: dict[str, Figure]) -> Hardware:
        missing = [name for name in ("bfloat16", "device memory", "exponentials", "cache") if name not in found]
        if missing:
            raise NotMeasured(
                f"{', '.join(missing)} could not be measured, and {device_name(self.device)} has no preset"
            )
        properties = torch.cuda.get_device_properties(self.device)
        cycles = found["exponentials"].value / 16
        told = "what CUDA reports"
        architecture = f"sm_{properties.major}{properties.minor}"
        if torch.version.hip is not None:
            architecture = properties.gcnArchName.split(":")[0]
        return Hardware(
            name=device_name(self.device),
            device_type="cuda",
            architecture=architecture,
            processors=Figure(properties.multi_processor_count, "multiprocessors", told),
            clock=Figure(
                cycles / properties.multi_processor_count, "Hz", "derived: 16 exponentials a clock on each, as measured"
            ),
            products={},
            exponentials=found["exponentials"],
            device_memory=found["device memory"],
            cache_size=Figure(getattr(properties, "L2_cache_size", 0) or 2**20, "B", told),
            cache=found["cache"],
            on_chip=Figure(128 * cycles, "B/s", "derived: 32 banks of 4 bytes a clock on each"),
            on_chip_size=Figure(getattr(properties, "shared_memory_per_multiprocessor", 64 * 2**10), "B", told),
            launch=found.get("launch"),
        )


@contextmanager
def _fp32_precision(precision: str) -> Iterator[None]:
    """Products of float32 on tensor cores for "tf32", and as IEEE says otherwise."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if precision == "tf32" else "ieee"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
