"""How long kernels take at least: for each unit of a device the work over its rate, as if all units overlapped.

Source: Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance model for multicore
architectures"; with exponentials as a unit of their own, for which Shah et al. 2024, FlashAttention-3, section 3.1,
say that an H100 has 256 times fewer than floating-point operations of products.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onchip.model.hardware import Hardware
from onchip.model.kernels import Kernel, least_device_bytes

PRODUCTS, EXPONENTIALS = "matrix products", "exponentials"
DEVICE_MEMORY, ON_CHIP = "device memory", "on-chip memory"
LAUNCH = "launch"


@dataclass(frozen=True, slots=True)
class Roofline:
    """Bounds from below, in microseconds.

    Attributes:
        times_us: by unit, what it alone needs for its work; a unit without a known rate is left out.
        launch_us: what starting the kernels takes; 0 if nobody knows.
    """

    hardware: Hardware
    times_us: Mapping[str, float]
    launch_us: float

    @property
    def bound_us(self) -> float:
        """The time at least: units may work at the same time, launches come on top."""
        return max(self.times_us.values(), default=0.0) + self.launch_us

    @property
    def binding(self) -> str:
        """The unit that needs the most time, which no overlap hides."""
        times = {**self.times_us, LAUNCH: self.launch_us}
        return max(times, key=lambda unit: times[unit])

    def __str__(self) -> str:
        others = {**self.times_us, LAUNCH: self.launch_us}
        binding = self.binding
        del others[binding]
        rest = [
            f"{unit} {_microseconds(time)}" for unit, time in sorted(others.items(), key=lambda item: -item[1]) if time
        ]
        return f"{_microseconds(self.bound_us)} us at least, bound by {binding}" + (
            f" ({', '.join(rest)})" if rest else ""
        )


def _microseconds(time: float) -> str:
    return f"{time:,.2f}" if time < 100 else f"{time:,.0f}"


def roofline(kernels: Sequence[Kernel], hardware: Hardware) -> Roofline:
    """The bound of kernels that run one after the other.

    matrix products   operations that are executed, also in the parts of tiles beyond edges, over the rate
    exponentials      evaluations over the rate
    device memory     least_device_bytes over its bandwidth
    on-chip memory    bytes that tiles load and store over the bandwidth between the last cache and the processors
    """
    seconds: dict[str, float] = {}
    rates = [(kernel.requested.flops, hardware.product_rate(kernel.precision)) for kernel in kernels]
    if all(rate is not None for flops, rate in rates if flops):
        seconds[PRODUCTS] = sum(flops / rate for flops, rate in rates if rate is not None)
    seconds[EXPONENTIALS] = sum(kernel.requested.exponentials for kernel in kernels) / hardware.exponentials.value
    seconds[DEVICE_MEMORY] = least_device_bytes(kernels, hardware.cache_size.value) / hardware.device_memory.value
    seconds[ON_CHIP] = sum(kernel.requested.total_bytes for kernel in kernels) / hardware.exchange.value
    launches = sum(kernel.launches for kernel in kernels)
    launch_us = 0.0 if hardware.launch is None else launches * hardware.launch.value * 1e6
    return Roofline(hardware, {unit: time * 1e6 for unit, time in seconds.items()}, launch_us)
