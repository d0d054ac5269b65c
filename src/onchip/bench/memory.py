"""Peak memory of a call.

On the CPU the call runs in a child process whose allocator gives every freed block above 64 KiB back to the system at
once, so that the process's peak resident set shows what the call itself needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """Bytes that a call needed above the level at its start, and how they were read."""

    peak_bytes: int
    method: str


def measure_peak_memory(
    call: Callable[..., object],
    *,
    setup: Callable[[], tuple[object, ...]] | None = None,
    warmup: int = 1,
    device: torch.device | str = "cpu",
) -> PeakMemory:
    """Measure the most memory that `call(*setup())` holds at once, above what `setup` left.

    On CUDA: the bytes of tensors in torch's caching allocator at their peak, in this process.

    On the CPU: the growth of the resident set of a child process from the start of the call to its peak, read from
    VmHWM of /proc/self/status after a reset through /proc/self/clear_refs. It counts every page that was written:
    tensors, what operators allocate inside, libraries' buffers; not memory that was allocated and never touched. It is
    exact to pages and to the kernel's batched counters, about a MiB. Where Linux's /proc is missing it is the growth of
    `ru_maxrss`, which misses whatever stayed below the peak of the setup; `method` says which one it was.

    Args:
        call: on the CPU it is sent to the child, so it must be a function of a module, or a partial of one.
        setup: makes the arguments of `call` before the level is read; the same holds for it.
        warmup: calls before the measured one; they keep one-time costs, such as thread pools, out of the figure.
        device: "cpu" or a CUDA device.
    Raises:
        TypeError: `call` or `setup` cannot be sent to another process.
        RuntimeError: it raised in the child, or the child was killed, as Linux does when memory runs out.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return _measure_cuda(call, setup, warmup, device)
    try:
        payload = pickle.dumps((call, setup, warmup, torch.get_num_threads()))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"call and setup run in a child process and must be functions of a module, or partials of such: {error}"
        ) from None
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    program = f"import sys; sys.path[:] = {sys.path!r}; import {__name__} as memory; memory._child()"
    child = subprocess.run([sys.executable, "-c", program], input=payload, capture_output=True, env=environment)
    if child.returncode < 0:
        raise RuntimeError(f"the child process was killed by signal {-child.returncode}; memory may have run out")
    if child.returncode:
        raise RuntimeError(f"the call failed in the child process: {child.stderr.decode(errors='replace').strip()}")
    return PeakMemory(**json.loads(child.stdout))


def _measure_cuda(
    call: Callable[..., object], setup: Callable[[], tuple[object, ...]] | None, warmup: int, device: torch.device
) -> PeakMemory:
    arguments = setup() if setup is not None else ()
    for _ in range(warmup):
        call(*arguments)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    level = torch.cuda.memory_allocated(device)
    result = call(*arguments)
    torch.cuda.synchronize(device)
    del result
    peak = torch.cuda.max_memory_allocated(device)
    return PeakMemory(peak_bytes=peak - level, method="torch.cuda.max_memory_allocated")


def _child() -> None:
    """Measure the call that arrives on standard input and print the result as JSON; runs in the child process."""
    # What the call prints must not mix with the result.
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    call, setup, warmup, threads = pickle.load(sys.stdin.buffer)
    torch.set_num_threads(threads)
    arguments = setup() if setup is not None else ()
    for _ in range(warmup):
        call(*arguments)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    read, method = _resident_peak()
    level = read()
    result = call(*arguments)
    peak = read()
    del result
    results.write(json.dumps({"peak_bytes": max(0, peak - level), "method": method}))
    results.close()


def _resident_peak() -> tuple[Callable[[], int], str]:
    """Reset the peak of the resident set if the system can; a function that reads it in bytes, and its name."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        _read_high_water_mark()
    except (OSError, ValueError):
        return _read_maximum_resident_set, "ru_maxrss"
    return _read_high_water_mark, "VmHWM"


def _read_high_water_mark() -> int:
    match = re.search(r"^VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if match is None:
        raise ValueError("/proc/self/status has no VmHWM")
    return int(match.group(1)) * 1024


def _read_maximum_resident_set() -> int:
    import resource  # Not on every system, and only needed where /proc is missing.

    # macOS counts in bytes, the others in KiB.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
