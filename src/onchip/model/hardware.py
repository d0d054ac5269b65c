"""What a device can do at most: figures with their sources, known (presets.py) or measured (`onchip doctor --measure`).

Measured figures lie in the user's cache folder, one JSON file for each device, and win over a preset.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from onchip.model.cache import cache_path, write_whole

FORMAT = 1
"""Of the stored file. A file of another format is ignored."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number, its unit, and the document that gives it, or "derived: ..." and how, or "measured: ..." and how."""

    value: float
    unit: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The ceilings of one device.

    Attributes:
        name: of the device, and what kind of figures these are.
        device_type: "cuda" (ROCm as well) or "cpu", as torch says.
        architecture: "sm_90", "gfx942" and the like, which tables of tiles ask for; None for a CPU.
        processors: multiprocessors, compute units or cores.
        clock: the clock that rates hold at.
        products: matrix products by precision ("bfloat16", "float16", "tf32", "float32", "float64"), dense.
        exponentials: of all processors together.
        device_memory: bandwidth of device memory, or of main memory for a CPU.
        cache_size: bytes that the last cache before device memory holds.
        cache: bandwidth between that cache and all processors; None where nobody knows it.
        on_chip: bandwidth of shared memory, or of the first cache of a CPU, of all processors together.
        on_chip_size: bytes of it in one processor.
        launch: what starting one kernel takes at least; None where nobody knows it.
        measured: whether the rates come from this device.
    """

    name: str
    device_type: str
    architecture: str | None
    processors: Figure
    clock: Figure
    products: Mapping[str, Figure]
    exponentials: Figure
    device_memory: Figure
    cache_size: Figure
    cache: Figure | None
    on_chip: Figure
    on_chip_size: Figure
    launch: Figure | None
    measured: bool = False

    def product_rate(self, precision: str) -> float | None:
        """Floating-point operations a second of matrix products; None if there is no figure.

        "tf32x3" makes one product of float32 out of three in TF32, at a third of their rate.
        """
        figure = self.products.get(precision.removesuffix("x3"))
        if figure is None:
            return None
        return figure.value / 3 if precision.endswith("x3") else figure.value

    @property
    def exchange(self) -> Figure:
        """The narrowest bandwidth that is known between the last cache and the processors."""
        return self.on_chip if self.cache is None else self.cache

    def scaled(self, processors: int) -> Hardware:
        """The same with another number of processors: what belongs to a processor grows, what all share does not.

        Raises:
            ValueError: there is no processor.
        """
        if processors < 1:
            raise ValueError(f"hardware has at least one processor, got {processors}")
        share = processors / self.processors.value

        def of(figure: Figure) -> Figure:
            source = f"derived: {processors} of {self.processors.value:.0f} processors; {figure.source}"
            return Figure(figure.value * share, figure.unit, source)

        return replace(
            self,
            name=f"{self.name}, {processors} of {self.processors.value:.0f} cores",
            processors=Figure(processors, self.processors.unit, "derived: as many as are used"),
            products={name: of(figure) for name, figure in self.products.items()},
            exponentials=of(self.exponentials),
            cache=None if self.cache is None else of(self.cache),
            on_chip=of(self.on_chip),
        )


# A device that is not here

_PLANNED: ContextVar[Hardware | None] = ContextVar("planned", default=None)


@contextmanager
def planned(hardware: Hardware | None) -> Iterator[None]:
    """Inside, what is asked of a device is answered by this hardware, if it is not None."""
    token = _PLANNED.set(hardware)
    try:
        yield
    finally:
        _PLANNED.reset(token)


def capability_of(device: torch.device) -> tuple[int, int]:
    """CUDA's compute capability of a device, or of the hardware that is planned for; (0, 0) of another maker's."""
    # a compiler cannot read the variable; it folds what follows into its graph
    hardware = None if torch.compiler.is_compiling() else _PLANNED.get()
    if hardware is None:
        properties = torch.cuda.get_device_properties(device)
        return properties.major, properties.minor
    number = (hardware.architecture or "").removeprefix("sm_")
    return divmod(int(number), 10) if number.isdigit() else (0, 0)


def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors a device has, or the hardware that is planned for."""
    hardware = _PLANNED.get()
    return _told_multiprocessors(device) if hardware is None else int(hardware.processors.value)


@lru_cache(maxsize=16)
def _told_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


# Measured figures


def device_name(device: torch.device) -> str:
    """The name of a CUDA device, or the model of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


@cache
def processor_name() -> str:
    """The processor's model, such as "AMD EPYC 9654"; the machine type where the system does not tell."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else platform.machine()


def measured_path(device: torch.device) -> Path:
    """Where measured figures of a device are kept, see `cache_path`."""
    return cache_path("hardware", device_name(device))


def write_measured(path: Path, hardware: Hardware, record: Mapping[str, Any]) -> None:
    """Store figures, with what is said of the machine that they were measured on.

    Raises:
        OSError: the folder cannot be written.
    """
    text = json.dumps({"format": FORMAT, "hardware": dataclasses.asdict(hardware), "measured_on": record}, indent=1)
    write_whole(path, text + "\n")


def read_measured(path: Path) -> Hardware | None:
    """What `write_measured` stored; None if there is no such file, or it is broken or of another format."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["format"] != FORMAT:
            return None
        return _decoded(stored["hardware"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _decoded(fields: dict[str, Any]) -> Hardware:
    """Raises ValueError, KeyError, TypeError or AttributeError for anything that is not a Hardware."""
    if set(fields) != {field.name for field in dataclasses.fields(Hardware)}:
        raise ValueError("stored figures have exactly the fields of Hardware")
    decoded: dict[str, Any] = {}
    for name, value in fields.items():
        if name == "products":
            decoded[name] = {precision: _figure(figure) for precision, figure in value.items()}
        elif name in ("name", "device_type") or (name == "architecture" and value is not None):
            decoded[name] = str(value)
        elif name in ("architecture", "measured") or (name in ("cache", "launch") and value is None):
            decoded[name] = value
        else:
            decoded[name] = _figure(value)
    return Hardware(**decoded)


def _figure(fields: dict[str, Any]) -> Figure:
    """Raises ValueError unless the value is positive and finite."""
    figure = Figure(float(fields["value"]), str(fields["unit"]), str(fields["source"]))
    if not 0 < figure.value < float("inf"):
        raise ValueError(f"a figure is positive and finite, got {figure.value}")
    return figure
