"""Where a measurement ran: the machine, its software and the state of its GPU."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from onchip.model.hardware import device_name, processor_name

_QUERY = {
    "name": "name",
    "driver_version": "driver_version",
    "power_limit_w": "power.limit",
    "maximum_sm_clock_mhz": "clocks.max.sm",
    "sm_clock_mhz": "clocks.sm",
    "memory_clock_mhz": "clocks.mem",
    "power_draw_w": "power.draw",
    "temperature_celsius": "temperature.gpu",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """What moves while a GPU works; None where the driver does not tell."""

    sm_clock_mhz: float | None
    memory_clock_mhz: float | None
    power_draw_w: float | None
    temperature_celsius: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What stays: the limits of a GPU; None where the driver does not tell."""

    multiprocessors: int
    memory_bytes: int
    l2_bytes: int | None
    compute_capability: str
    driver_version: str | None
    power_limit_w: float | None
    maximum_sm_clock_mhz: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Device, processor and versions. `device_name` is the GPU's name, or the processor's for "cpu".

    `thread_waiting` is what the environment says of how OpenMP's threads wait. Threads that spin for long make small
    operators many times slower when other processes use the same cores, and threads that never spin make them half as
    slow again on an idle machine, so a time on the CPU depends on it.
    """

    device_type: str
    device_name: str
    processor: str
    cores: int
    threads: int
    thread_waiting: str | None
    load_average: tuple[float, ...]
    memory_bytes: int | None
    platform: str
    python_version: str
    torch_version: str
    triton_version: str | None
    cuda_version: str | None
    cudnn_version: int | None
    gpu: Gpu | None


def _thread_waiting() -> str | None:
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    return ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ) or None


def read_machine(device: torch.device | str = "cpu") -> Machine:
    """Describe the machine that `device` belongs to, as it is now (the load average is that of this moment)."""
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    return Machine(
        device_type=device.type,
        device_name=device_name(device),
        processor=processor_name(),
        cores=available_cores(),
        threads=torch.get_num_threads(),
        thread_waiting=_thread_waiting(),
        load_average=tuple(round(load, 2) for load in os.getloadavg()) if hasattr(os, "getloadavg") else (),
        memory_bytes=total_memory_bytes(),
        platform=platform.platform(),
        python_version=platform.python_version(),
        torch_version=torch.__version__,
        triton_version=installed_version("triton"),
        cuda_version=torch.version.cuda,
        cudnn_version=torch.backends.cudnn.version() if on_gpu else None,
        gpu=_read_gpu(device) if on_gpu else None,
    )


def read_gpu_state(device: torch.device | str) -> GpuState | None:
    """Clocks, power and temperature of a CUDA device now, from nvidia-smi; None for other devices or without it."""
    device = torch.device(device)
    if device.type != "cuda":
        return None
    facts = _nvidia_smi(device)
    if not facts:
        return None
    return GpuState(
        sm_clock_mhz=_number(facts["sm_clock_mhz"]),
        memory_clock_mhz=_number(facts["memory_clock_mhz"]),
        power_draw_w=_number(facts["power_draw_w"]),
        temperature_celsius=_number(facts["temperature_celsius"]),
    )


def installed_version(package: str) -> str | None:
    """The version of an installed package, without importing it; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def available_cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def total_memory_bytes() -> int | None:
    """Bytes of main memory; None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):
        return None


def available_memory_bytes(device: torch.device | str = "cpu") -> int | None:
    """Bytes that can be allocated on `device` now without swapping; None where the system does not tell.

    On the CPU the limit of a control group (a container) counts as well as the memory of the machine.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        match = re.search(r"^MemAvailable:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    except OSError:
        return total_memory_bytes()
    free = int(match.group(1)) * 1024 if match else total_memory_bytes()
    limit = _control_group_free_bytes()
    return free if limit is None else limit if free is None else min(free, limit)


def _control_group_free_bytes() -> int | None:
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            return max(0, int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):
            continue
    return None


def _read_gpu(device: torch.device) -> Gpu:
    properties = torch.cuda.get_device_properties(device)
    facts = _nvidia_smi(device)
    return Gpu(
        multiprocessors=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        l2_bytes=getattr(properties, "L2_cache_size", None),
        compute_capability=f"{properties.major}.{properties.minor}",
        driver_version=facts.get("driver_version"),
        power_limit_w=_number(facts.get("power_limit_w", "")),
        maximum_sm_clock_mhz=_number(facts.get("maximum_sm_clock_mhz", "")),
    )


def _nvidia_smi(device: torch.device) -> dict[str, str]:
    # CUDA_VISIBLE_DEVICES renumbers the devices that torch sees, so the device is named by its UUID.
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if uuid is None:
        return {}
    command = ["nvidia-smi", f"--id=GPU-{uuid}", f"--query-gpu={','.join(_QUERY.values())}"]
    try:
        text = subprocess.run(
            [*command, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in text.strip().split(",")]
    return dict(zip(_QUERY, values, strict=True)) if len(values) == len(_QUERY) else {}


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
