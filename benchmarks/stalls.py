"""What the warps of Hopper's forward wait for on this GPU: `python benchmarks/stalls.py measure`.

Nsight Compute samples why warps issue nothing. Warps without a role, which wait at a barrier, are counted in.
"""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from common import application, make_console
from ncu import OPTIONS, find, measured, part_of
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

import onchip
from onchip.bench.machine import read_machine
from onchip.bench.protocol import default_directory, read_commit

RECORD = "forward-stalls.json"
RECORDS = Path("benchmarks/results/nvidia-h200")
SECTIONS = ("--section", "WarpStateStats", "--section", "SpeedOfLight", "-k", "regex:forward_kernel")
STALL = re.compile(r"smsp__average_warps_issue_stalled_((?:(?!_not_issued)\w)+)_per_issue_active\.ratio")
SHOWN = 5
"""Reasons that are printed, the most frequent ones."""

app = application()
Out = Annotated[Path | None, typer.Option(help="Folder of the record (default: benchmarks/results/<device>)")]


@app.command()
def measure(out: Out = None) -> None:
    """Sample every case under ncu and write what its warps wait for."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("no CUDA device is here; `show` prints the record")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "stalls.csv"
        command = [find(), *OPTIONS, *SECTIONS, "--log-file", str(log), sys.executable, __file__, "run"]
        subprocess.run(command, check=True)
        found = parse(log.read_text())
    machine, commit = read_machine("cuda"), read_commit()
    folder_of_records = out or default_directory(machine)
    folder_of_records.mkdir(parents=True, exist_ok=True)
    protocol = {"samples": "ncu " + " ".join((*OPTIONS, *SECTIONS)), "calls": "one after one warm-up"}
    record = {"commit": commit and asdict(commit), "where": asdict(machine), "protocol": protocol, "cases": found}
    (folder_of_records / RECORD).write_text(json.dumps(record, indent=1) + "\n")
    show(out)


@app.command()
def show(out: Out = None) -> None:
    """Print the record: microseconds of the kernel, and the share of warp samples of the most frequent reasons."""
    path = (out or RECORDS) / RECORD
    if not path.exists():
        raise typer.BadParameter(f"there is no {path}")
    table = Table("forward", "us", "warps wait for", box=SIMPLE_HEAD)
    for name, case in json.loads(path.read_text())["cases"].items():
        most = sorted(case["shares"].items(), key=lambda item: -item[1])[:SHOWN]
        reasons = ", ".join(f"{reason} {share:.0%}" for reason, share in most)
        table.add_row(name, f"{case['microseconds']:.0f}", reasons)
    make_console(118).print(table)


@app.command(hidden=True)
def run() -> None:
    """What `measure` runs under ncu."""
    for name, tensors, causal in cases():
        with torch.no_grad():
            onchip.attention(*tensors, causal=causal, schedule="hopper")
            with measured(name):
                onchip.attention(*tensors, causal=causal, schedule="hopper")


def cases() -> Iterator[tuple[str, list[Tensor], bool]]:
    """Name, (query, key, value), causal; 16384 tokens, 2048 / dim heads, bfloat16."""
    for dim, length, causal in ((128, 8192, False), (128, 2048, True), (64, 512, True), (64, 16384, True)):
        shape = (16384 // length, length, 2048 // dim, dim)
        tensors = [torch.randn(shape, device="cuda").bfloat16().transpose(1, 2) for _ in range(3)]
        yield f"d{dim} n{length}{' causal' if causal else ''}", tensors, causal
        if (dim, length) == (128, 8192):
            query, key, value = tensors
            query, key = query * 60, key.clone()
            key[:, :, length // 2] *= 30
            yield f"d{dim} n{length} flagged", [query, key, value], causal


def parse(text: str) -> dict[str, Any]:
    """By part: microseconds, and the share of each reason, of what ncu prints with OPTIONS and SECTIONS."""
    names, _, *launches = csv.reader(line for line in text.splitlines() if line.startswith('"'))
    found = {}
    for launch in launches:
        row = dict(zip(names, launch, strict=True))
        stalls = {made[1]: float(row[name]) for name in names if (made := STALL.fullmatch(name)) and row[name]}
        total = sum(stalls.values())
        found[part_of(row)] = {
            "microseconds": float(row["gpu__time_duration.sum"].replace(",", "")) / 1e3,
            "shares": {reason: value / total for reason, value in stalls.items()},
        }
    return found


if __name__ == "__main__":
    sys.exit(app())
