"""Compile every kernel for every head dim, dtype, target and kind of problem: `python -m tests.compile.everything`.

Prints a table of the worst and writes one record. Triton caches what it compiled, so that a second run, or one that was
stopped, only reads again.
"""

import json
import subprocess
import sys
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Annotated

import torch
import triton
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.compile import aot
from tests.compile.rows import Row, product

OUT = Path("benchmarks/results/compile/triton.json")
FIELDS = ("kernel", "head_dim", "dtype", "target", "kind")


def main(
    only: Annotated[str, typer.Option(metavar="TEXT", help="Only rows in whose name this stands; no record.")] = "",
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
    out: Annotated[Path, typer.Option(help="File of the record.")] = OUT,
) -> None:
    """Compile the whole product of what a tile is chosen by."""
    rows = [row for row in product() if only in str(row)]
    if not rows:
        raise typer.BadParameter(f"--only: no row has {only!r} in its name")
    started = perf_counter()
    with ProcessPoolExecutor(jobs, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        made = list(track(pool.map(measure, rows), "compiling", total=len(rows)))
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    console.print(table(made))
    faults = [f"{'-'.join(row[name] for name in FIELDS)}: {row['fault']}" for row in made if row["fault"]]
    for fault in faults:
        console.print(fault, markup=False)
    console.print(f"{len(made)} compiled in {perf_counter() - started:.0f} s, {len(faults)} with a fault")
    if not only:
        record = {"triton": triton.__version__, "ptxas": ptxas_version(), "rows": made}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    raise typer.Exit(bool(faults))


def measure(row: Row) -> dict:
    """A row of the record. `fault` says what does not fit the target, or None; a spill is no fault."""
    named = dict(zip(FIELDS, row.fields, strict=True))
    launch = row.launch()
    named["tile"] = launch.tile
    try:
        made = aot.compile_launch(launch, row.target)
    except Exception as error:
        return named | {"fault": f"does not compile: {str(error).strip().splitlines()[-1]}"}
    fault = None
    if made.shared > aot.SHARED_LIMITS[row.target]:
        fault = f"{made.shared} bytes of shared memory, the limit is {aot.SHARED_LIMITS[row.target]}"
    return named | asdict(made) | {"fault": fault}


def table(made: list[dict]) -> Table:
    """The largest numbers of each kernel, target and width of tile."""
    groups = defaultdict(list)
    for row in made:
        if "registers" in row:
            dim = max(map(int, row["head_dim"].split("x")))
            width = next(width for width in (64, 128, 256) if dim <= width)
            groups[row["kernel"], row["target"], width, "float32" if row["dtype"] == "float32" else "16 bits"].append(
                row
            )
    result = Table("kernel", "target", "head dim up to", "elements", "rows", "registers", "spilling", "in loops", "KiB")
    for (kernel, target, width, elements), rows in sorted(groups.items()):
        spilling = sum(row["spills_in_loops"] > 0 for row in rows)
        most = {name: max(row[name] for row in rows) for name in ("registers", "spills_in_loops", "shared")}
        cells = (kernel, target, width, elements, len(rows), most["registers"], spilling, most["spills_in_loops"])
        result.add_row(*map(str, cells), f"{most['shared'] / 1024:.0f}")
    return result


def ptxas_version() -> str:
    text = subprocess.run([aot.TOOLS / "ptxas", "--version"], capture_output=True, text=True, check=True).stdout
    return text.strip().splitlines()[-1]


if __name__ == "__main__":
    typer.run(main)
