"""Count what attention moves on this GPU, beside what the model says: `python benchmarks/traffic.py count`.

Nsight Compute reads the counters (ncu.py). What the programs of a kernel ask for passes between the multiprocessors and
the L2 cache; device memory sees what the cache does not hold. The model (onchip.model) knows the first exactly and of
the second the least: every tensor once.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from common import application, make_console, say
from ncu import OPTIONS, Counted, count, measured
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from traffic_cases import PEERS, Case, calls, cases, directions, prepare, runs, sweep, tiled_as
from traffic_model import Expected, expected

from onchip.bench.machine import read_machine
from onchip.bench.memory import measure_peak_memory
from onchip.bench.protocol import default_directory, read_commit
from onchip.bench.timing import compare
from onchip.dispatch import schedules

RECORDS = Path("benchmarks/results/nvidia-h200")
"""Whose records `show` prints on a machine without a GPU."""
COUNTS, SWEEP, MEMORY = "traffic.json", "traffic-blocks.json", "memory-table-21.json"
LENGTHS = (1024, 2048, 4096)
"""Of Table 21 of Dao et al. 2022, FlashAttention."""
TABLE_21: dict[str, Any] = {"batch": 16, "heads": 8, "dim": 64, "dtype": "float16"}
ROUNDS = 10
WIDTH = 118

app = application()
Out = Annotated[Path | None, typer.Option(help="Folder of the records (default: benchmarks/results/<device>)")]
Only = Annotated[str, typer.Option(metavar="TEXT", help="Only cases whose name contains this.")]
Ours = Annotated[list[str] | None, typer.Option("--schedule", help="A GPU schedule; repeatable (default: triton).")]


@app.command(name="count")
def count_command(schedule: Ours = None, only: Only = "", out: Out = None) -> None:
    """Count the bytes of every case, kernel by kernel, and write them beside the model's.

    Cases of the record that are not counted this time stay in it.
    """
    chosen = _chosen(cases(_known(schedule)), only)
    device = _device()
    chosen = [case for case in chosen if runs(case, device)]
    counted = count([__file__, "run", *_options("--schedule", _known(schedule)), "--only", only])
    entries = [_entry(case, direction, counted) for case, direction in _parts(chosen)]
    path = _folder(out) / COUNTS
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    _write(out, COUNTS, _record({"cases": entries + _kept(before, entries)}))
    show(out)


@app.command(name="sweep")
def sweep_command(out: Out = None) -> None:
    """Count the bytes of the forward at Figure 2's shape with other tiles, and time it (the figure's right side)."""
    device, chosen = _device(), sweep()
    counted = count([__file__, "run", "--blocks"])
    inputs = prepare(chosen[0], device)

    def forward(case: Case) -> object:
        with tiled_as(case):
            return inputs.attend(*inputs.inputs)

    comparison = compare(
        {case.name: partial(forward, case) for case in chosen}, rounds=ROUNDS, device=device, flush_l2=True
    )
    timed = {result.name: result.median_ms for result in comparison.results}
    entries = [{**_entry(case, "forward", counted), "median_ms": timed[case.name]} for case in chosen]
    _write(out, SWEEP, _record({"cases": entries, "comparison": asdict(comparison)}))
    show(out)


@app.command(name="memory")
def memory_command(schedule: Ours = None, out: Out = None) -> None:
    """Peak memory of forward and backward at the lengths of Table 21, standard attention beside ours."""
    device, entries = _device(), []
    for length in LENGTHS:
        for name in (*_known(schedule), *PEERS):
            case = Case(contender=name, length=length, **TABLE_21)
            prepared = prepare(case, device)

            def step(prepared: Any = prepared) -> object:
                return torch.autograd.grad(prepared.attend(*prepared.inputs), prepared.leaves, prepared.gradient)

            entries.append({"name": case.name, **asdict(case), **asdict(measure_peak_memory(step, device=device))})
            say(f"{case.name}: {entries[-1]['peak_bytes'] / 2**20:.0f} MiB")
    _write(out, MEMORY, _record({"cases": entries}))
    show(out)


@app.command()
def show(
    out: Out = None,
    picture: Annotated[Path | None, typer.Option(help="Draw the sweep over tiles into this file.")] = None,
) -> None:
    """Print what was recorded; count nothing."""
    folder = out or (default_directory(read_machine("cuda")) if torch.cuda.is_available() else RECORDS)
    console, printed = make_console(WIDTH), False
    for name, print_record in ((COUNTS, print_counts), (SWEEP, print_sweep), (MEMORY, print_memory)):
        if (folder / name).exists():
            print_record(console, json.loads((folder / name).read_text(encoding="utf-8")))
            printed = True
    if not printed:
        raise typer.BadParameter(f"no records of traffic in {folder}")
    if picture is not None:
        if not (folder / SWEEP).exists():
            raise typer.BadParameter(f"--picture: there is no {SWEEP} in {folder}")
        draw_sweep(json.loads((folder / SWEEP).read_text(encoding="utf-8")), picture)


@app.command(hidden=True)
def run(schedule: Ours = None, only: Only = "", blocks: bool = False) -> None:
    """What `count` and `sweep` run under ncu."""
    device = _device()
    for case in sweep() if blocks else _chosen(cases(_known(schedule)), only):
        if not runs(case, device):
            continue
        with tiled_as(case):
            for direction, call in calls(case, prepare(case, device)).items():
                call()
                with measured(f"{case.name}: {direction}"):
                    result = call()
                del result


# Records


def _parts(chosen: Sequence[Case]) -> list[tuple[Case, str]]:
    return [(case, direction) for case in chosen for direction in directions(case)]


def _entry(case: Case, direction: str, counted: Sequence[Counted]) -> dict[str, Any]:
    """A case's counters by kernel, several launches of one summed, beside what the model expects."""
    part = f"{case.name}: {direction}"
    sums: dict[str, Counter[str]] = {}
    for launch in counted:
        if launch.part == part:
            values = asdict(launch)
            del values["part"], values["kernel"]
            sums.setdefault(launch.kernel, Counter()).update({"launches": 1, **values})
    if not sums:
        raise RuntimeError(f"ncu saw no kernel of {part}")
    return {
        "name": case.name,
        "direction": direction,
        **asdict(case),
        "kernels": [{"kernel": kernel, **values} for kernel, values in sums.items()],
        "expected": [asdict(item) for item in _expected(case, direction)],
    }


def _expected(case: Case, direction: str) -> list[Expected]:
    with tiled_as(case):
        return expected(case, direction, _device())


def _record(measured: dict[str, Any]) -> dict[str, Any]:
    commit = read_commit()
    return {
        "commit": asdict(commit) if commit else None,
        "where": asdict(read_machine("cuda")),
        "protocol": {
            "counters": "ncu " + " ".join(OPTIONS),
            "memory": "one forward and backward after one, torch's caching allocator, above the inputs",
            "calls": "one call after one warm-up, one sample",
        },
        **measured,
    }


def _kept(before: dict[str, Any] | None, entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The cases of an earlier record that were not counted again, each with the commit that it was counted at."""
    counted = {(entry["name"], entry["direction"]) for entry in entries}
    if before is None:
        return []
    kept = (case for case in before["cases"] if (case["name"], case["direction"]) not in counted)
    return [{"commit": before["commit"], **case} for case in kept]


def _folder(out: Path | None) -> Path:
    return out or default_directory(read_machine("cuda"))


def _write(out: Path | None, name: str, record: dict[str, Any]) -> None:
    folder = _folder(out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


# Tables


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    return table


def print_counts(console: Console, record: dict[str, Any]) -> None:
    """A row for every kernel that the model knows, and one for the sum of those that it does not."""
    table = _table("GB", "asked", "L2", "ratio", "once", "device", "ratio", "us")
    for case in record["cases"]:
        table.add_row(f"[bold]{case['name']}, {case['direction']}[/bold]")
        for row in _rows(case):
            table.add_row(*row)
    console.print(table)
    console.print(
        "asked: what the kernel's programs load and store, by the model; L2: what passed between multiprocessors and "
        "the L2 cache; once: every tensor once, by the model; device: what device memory read and wrote.",
        markup=False,
    )


def _rows(case: dict[str, Any]) -> list[tuple[str, ...]]:
    rows, left = [], list(case["kernels"])
    for item in case["expected"]:
        matched = [kernel for kernel in left if item["kernel"] in ("*", kernel["kernel"])]
        left = [kernel for kernel in left if kernel not in matched]
        if matched:
            l2, device = sum(map(_l2, matched)), sum(map(_device_bytes, matched))
            microseconds = sum(kernel["microseconds"] for kernel in matched)
            rows.append(
                (
                    f"  {item['kernel'] if item['kernel'] != '*' else 'all kernels'}",
                    *_against(l2, item["asked_bytes"]),
                    *_against(device, item["once_bytes"]),
                    f"{microseconds:.0f}",
                )
            )
    if left:
        l2, device = sum(map(_l2, left)), sum(map(_device_bytes, left))
        microseconds = sum(kernel["microseconds"] for kernel in left)
        rows.append((f"  {len(left)} other", *_against(l2, None), *_against(device, None), f"{microseconds:.0f}"))
    return rows


def _l2(kernel: dict[str, Any]) -> int:
    return kernel["l2_read_bytes"] + kernel["l2_written_bytes"]


def _device_bytes(kernel: dict[str, Any]) -> int:
    return kernel["device_read_bytes"] + kernel["device_written_bytes"]


def _against(found: int, model: int | None) -> tuple[str, str, str]:
    if model is None:
        return "", f"{found / 1e9:.3f}", ""
    return f"{model / 1e9:.3f}", f"{found / 1e9:.3f}", f"{found / model:.2f}"


def print_sweep(console: Console, record: dict[str, Any]) -> None:
    """A row for every tile."""
    table = _table("rows x columns", "asked GB", "L2 GB", "once GB", "device GB", "ms")
    for case in record["cases"]:
        (kernel,), (model,) = case["kernels"], case["expected"]
        table.add_row(
            f"{case['tile'][0]} x {case['tile'][1]}",
            f"{model['asked_bytes'] / 1e9:.3f}",
            f"{_l2(kernel) / 1e9:.3f}",
            f"{model['once_bytes'] / 1e9:.3f}",
            f"{_device_bytes(kernel) / 1e9:.3f}",
            f"{case['median_ms']:.3f}",
        )
    console.print(table)


def draw_sweep(record: dict[str, Any], path: Path) -> None:
    """Bytes and time over the rows of a tile, as on the right of Figure 2 of Dao et al. 2022, FlashAttention."""
    from matplotlib.figure import Figure

    cases = record["cases"]
    rows = [str(case["tile"][0]) for case in cases]
    kernels = [case["kernels"][0] for case in cases]
    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    lines = (
        ("asked for, by the model", [case["expected"][0]["asked_bytes"] for case in cases], "#8a5b1d", "--"),
        ("through the L2 cache", [_l2(kernel) for kernel in kernels], "#b0413e", "-"),
        ("device memory", [_device_bytes(kernel) for kernel in kernels], "#3b6ea8", "-"),
    )
    for label, values, color, style in lines:
        axes.plot(rows, [value / 1e9 for value in values], style, marker="o", color=color, label=label)
    axes.set_yscale("log")
    axes.set_xlabel("rows of a tile (64 columns)")
    axes.set_ylabel("GB")
    times = axes.twinx()
    times.plot(rows, [case["median_ms"] for case in cases], marker="s", color="#1d8a5b", label="time")
    times.set_ylabel("ms")
    times.set_ylim(bottom=0)
    handles, labels = (
        sum(both, []) for both in zip(*(a.get_legend_handles_labels() for a in (axes, times)), strict=True)
    )
    axes.legend(handles, labels, frameon=False)
    first = cases[0]
    axes.set_title(
        f"forward, batch {first['batch']}, {first['heads']} heads of {first['dim']}, {first['length']} tokens, "
        f"{first['dtype']}, {record['where']['device_name']}",
        fontsize=10,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def print_memory(console: Console, record: dict[str, Any]) -> None:
    """Peak memory above the inputs by length and contender."""
    names = list(dict.fromkeys(case["contender"] for case in record["cases"]))
    table = _table("MiB, forward + backward", *names)
    peaks = {(case["length"], case["contender"]): case["peak_bytes"] for case in record["cases"]}
    for length in dict.fromkeys(case["length"] for case in record["cases"]):
        table.add_row(f"n{length}", *(f"{peaks[length, name] / 2**20:.0f}" for name in names))
    console.print(table)


# Options


def _device() -> torch.device:
    if not torch.cuda.is_available():
        raise typer.BadParameter("no CUDA device is here; `show` prints records")
    return torch.device("cuda")


def _known(names: list[str] | None) -> tuple[str, ...]:
    for name in names or ():
        if name not in schedules():
            raise typer.BadParameter(f"--schedule: {name!r} is not one of {', '.join(schedules())}")
    return tuple(names or ["triton"])


def _options(option: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


def _chosen(found: list[Case], only: str) -> list[Case]:
    chosen = [case for case in found if only in case.name]
    if not chosen:
        raise typer.BadParameter(f"--only: no case has {only!r} in its name")
    return chosen


if __name__ == "__main__":
    sys.exit(app())
