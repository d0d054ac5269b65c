"""Nsight Compute's counters of a script's kernels, by the part of the script that launched them.

The script marks the parts with `measured(name)`. Only these are profiled, and ncu runs every kernel of theirs several
times, so a part should be short, and what it allocates small beside the memory of the device.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

SECTOR_BYTES = 32
METRICS = {
    "dram__bytes_read.sum": "device_read_bytes",
    "dram__bytes_write.sum": "device_written_bytes",
    "lts__t_sectors_srcunit_tex_op_read.sum": "l2_read_bytes",
    "lts__t_sectors_srcunit_tex_op_write.sum": "l2_written_bytes",
    "gpu__time_duration.sum": "microseconds",
}
OPTIONS = (
    # clocks stay as they are, as in every measurement of this project, and so do the caches: a call follows another
    "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off", "--nvtx",
    "--csv", "--page", "raw", "--print-units", "base",
)  # fmt: skip
_MARK = re.compile(r"part=<(.*?)>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """The counters of one launch.

    Attributes:
        part: in which it was launched. kernel: its name.
        device_read_bytes, device_written_bytes: between the L2 cache and device memory.
        l2_read_bytes, l2_written_bytes: between multiprocessors and the L2 cache, in whole sectors of 32 bytes.
        microseconds: under the profiler, one sample.
    """

    part: str
    kernel: str
    device_read_bytes: int
    device_written_bytes: int
    l2_read_bytes: int
    l2_written_bytes: int
    microseconds: float


@contextmanager
def measured(name: str) -> Iterator[None]:
    """Mark a part of the script. Its kernels have ended when it ends."""
    torch.cuda.synchronize()
    # a range of the process, for autograd launches from a thread of its own
    mark = torch.cuda.nvtx.range_start(f"part=<{name}>")
    torch.cuda.profiler.start()
    yield
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()
    torch.cuda.nvtx.range_end(mark)


def find() -> str:
    """Where ncu is.

    Raises:
        FileNotFoundError: there is none.
    """
    program = shutil.which("ncu") or shutil.which("ncu", path="/usr/local/cuda/bin")
    if program is None:
        raise FileNotFoundError("ncu (Nsight Compute) is not on the path")
    return program


def part_of(row: dict[str, str]) -> str:
    """The part in which a launch stands.

    Raises:
        ValueError: it stands in none.
    """
    mark = _MARK.search(" ".join(row.values()))
    if mark is None:
        raise ValueError(f"{row['Kernel Name']} was launched in no part")
    return mark[1]


def count(script: Sequence[str]) -> list[Counted]:
    """Run a Python script with its arguments under ncu and read the counters of the parts that it marks.

    Raises:
        FileNotFoundError: there is no ncu.
        RuntimeError: ncu or the script failed; the message holds the end of what they printed.
    """
    program = find()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "counters.csv"
        command = [program, *OPTIONS, "--metrics", ",".join(METRICS), "--log-file", str(log), sys.executable, *script]
        run = subprocess.run(command, capture_output=True, text=True)
        text = log.read_text() if log.exists() else ""
    if run.returncode:
        ends = (part.strip()[-1500:] for part in (run.stdout, run.stderr, text))
        raise RuntimeError(f"ncu ended with status {run.returncode}: {' | '.join(end for end in ends if end)}")
    return parse(text)


def parse(text: str) -> list[Counted]:
    """The launches in what ncu prints with OPTIONS: a row of names, one of units, one for each launch.

    Raises:
        ValueError: there is no table, a counter is missing, or a launch stands in no part.
    """
    rows = list(csv.reader(line for line in text.splitlines() if line.startswith('"')))
    if len(rows) < 2:
        raise ValueError(f"ncu printed no table of launches: {text.strip()[-500:] or 'nothing'}")
    names, _, *launches = rows
    missing = [name for name in ("Kernel Name", *METRICS) if name not in names]
    if missing:
        raise ValueError(f"ncu's table has no {', '.join(missing)}")
    return [_launch(dict(zip(names, launch, strict=True))) for launch in launches]


def _launch(row: dict[str, str]) -> Counted:
    values = {ours: float(row[theirs].replace(",", "")) for theirs, ours in METRICS.items()}
    return Counted(
        part=part_of(row),
        kernel=row["Kernel Name"],
        device_read_bytes=int(values["device_read_bytes"]),
        device_written_bytes=int(values["device_written_bytes"]),
        l2_read_bytes=int(values["l2_read_bytes"]) * SECTOR_BYTES,
        l2_written_bytes=int(values["l2_written_bytes"]) * SECTOR_BYTES,
        microseconds=values["microseconds"] / 1e3,
    )
