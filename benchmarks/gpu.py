"""Time onchip against other attention on this GPU: `python benchmarks/gpu.py`.

Every case is timed in interleaved rounds, all contenders in one process. Its record goes into one JSON file, from
which `--show` prints the table again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated

import torch
import typer
from common import application, make_console, read_records, say
from gpu_cases import OTHERS, OURS, Case, Make, cases, contenders, prepare
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from onchip.bench.machine import Machine, read_machine
from onchip.bench.protocol import DIRECTIONS, Record, default_directory
from onchip.bench.timing import compare
from onchip.dispatch import schedules

SUITE = "gpu"
# So many that four contenders have had every place equally often, in both directions.
ROUNDS = 16
WARMUP = 3
WIDTH = 98
DTYPES = {"bfloat16": "", "float16": " fp16", "float32": " fp32"}
FAILURES_SHOWN = 4
RECORDS = Path("benchmarks/results/nvidia-h200")
"""Whose records `--show` prints on a machine without a GPU."""

app = application()


@app.command()
def gpu(
    schedule: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A schedule of onchip; repeatable (default: triton).")
    ] = None,
    directions: Annotated[str, typer.Option(help=f"Of {', '.join(DIRECTIONS)}.")] = "forward,backward",
    dims: Annotated[str, typer.Option(help="Head dims.")] = "64,128",
    lengths: Annotated[str, typer.Option(help="Lengths; the batch makes them 16384 tokens.")] = "2048,8192",
    dtypes: Annotated[str, typer.Option(help=f"Of {', '.join(DTYPES)}.")] = "bfloat16",
    only: Annotated[
        str, typer.Option(metavar="TEXT", help="Only cases whose name, as the progress shows it, contains this.")
    ] = "",
    peers: Annotated[bool, typer.Option("--peers", help="Also FlashAttention 3 and 4, where installed.")] = False,
    without: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Leave out, as flex, which compiles long; repeatable.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each.")] = ROUNDS,
    show: Annotated[bool, typer.Option("--show", help="Print what was recorded; time nothing.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the records (default: benchmarks/results/<device>)")
    ] = None,
) -> None:
    """Time onchip against other attention on this GPU. Lists are separated by commas."""
    chosen = cases(
        _words("--directions", directions, DIRECTIONS),
        _numbers("--dims", dims),
        _numbers("--lengths", lengths),
        _words("--dtypes", dtypes, DTYPES),
    )
    chosen = [case for case in chosen if only in case.name]
    if not chosen:
        raise typer.BadParameter(f"--only: no case has {only!r} in its name")
    console = make_console(WIDTH)
    machine = _machine()
    if show:
        _show(console, chosen, out or (default_directory(machine) if machine else RECORDS))
        return
    if machine is None:
        raise typer.BadParameter("no CUDA device is here; --show prints records")
    ours = _words("--schedule", ",".join(schedule or ["triton"]), schedules())
    makers = contenders(ours, peers, _words("--without", ",".join(without), OTHERS) if without else ())
    records, broken = _measure_all(chosen, makers, machine, rounds, out or default_directory(machine))
    if records:
        print_cases(console, records)
    failures = [failure for record in records.values() for failure in record.comparison.failures]
    if broken or any(failure.name.startswith(OURS) for failure in failures):
        raise typer.Exit(1)


def _machine() -> Machine | None:
    return read_machine("cuda") if torch.cuda.is_available() else None


def _measure_all(
    chosen: list[Case], makers: dict[str, Make], machine: Machine, rounds: int, out: Path
) -> tuple[dict[Case, Record], bool]:
    """The records, written one by one, and whether the device broke down on the way."""
    records: dict[Case, Record] = {}
    for number, case in enumerate(chosen, start=1):
        say(f"[{number}/{len(chosen)}] {case.name}")
        try:
            record = measure(case, makers, machine, rounds)
        except RuntimeError as error:
            # What one contender raises is in the record. After an illegal access nothing runs in this process.
            say(f"stopped: {type(error).__name__}: {str(error).strip()}")
            return records, True
        record.write(out)
        records[case] = record
    return records, False


def _show(console: Console, chosen: list[Case], out: Path) -> None:
    found = {record.what: record for record in read_records(out, f"{SUITE}-*.json")}
    records = {case: found[case.what] for case in chosen if case.what in found}
    if not records:
        raise typer.BadParameter(f"no records of these cases in {out}")
    print_cases(console, records)


def measure(case: Case, makers: dict[str, Make], machine: Machine, rounds: int) -> Record:
    """Time a case on the machine's device; the first contender is the reference."""
    device = torch.device(machine.device_type)
    calls = prepare(case, makers, device)
    comparison = compare(calls, rounds=rounds, warmup=WARMUP, device=device, flush_l2=device.type == "cuda")
    return Record.of(SUITE, case.what, machine, comparison)


# The table


def print_cases(console: Console, records: Mapping[Case, Record]) -> None:
    """Print a row for every case: the speed of each contender, and how many times as fast the reference is."""
    names = _names(records.values())
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("TFLOP/s", no_wrap=True)
    for name in names:
        table.add_column(name.replace("_", " ").replace(" ", "\n"), justify="right", no_wrap=True)
    for case, record in records.items():
        table.add_row(label(case), *(cell(record, name) for name in names))
    console.print(table)
    _print_failures(console, records)
    first = next(iter(records.values()))
    where, method = first.where, first.comparison.method
    console.print(f"{where.device_name}, torch {where.torch_version}, triton {where.triton_version}", markup=False)
    spreads = [
        (ratio.upper_quartile - ratio.lower_quartile) / ratio.median
        for record in records.values()
        for ratio in record.comparison.ratios
    ]
    if spreads:
        console.print(
            f"1.20x: {first.comparison.reference} is 1.2 times as fast, median of {method.rounds} rounds; quartiles at "
            f"most {max(spreads):.1%} apart",
            markup=False,
        )


def label(case: Case) -> str:
    """A case in few letters."""
    direction = case.direction.replace("forward", "fwd").replace("backward", "bwd")
    return f"{direction} d{case.dim} n{case.length} {'causal' if case.causal else 'full'}{DTYPES[case.dtype]}"


def cell(record: Record, name: str) -> str:
    """The speed of a contender in a case, and the reference's speed over it."""
    comparison = record.comparison
    if any(failure.name == name for failure in comparison.failures):
        return "failed"
    if all(result.name != name for result in comparison.results):
        return ""
    speed = record.speed_tflops(name)
    text = f"{speed:.0f}" if speed >= 100 else f"{speed:.1f}"
    ratio = next((ratio for ratio in comparison.ratios if ratio.name == name), None)
    # A ratio is one of times, so what takes longer than the reference has more than 1.
    return f"{text} {ratio.median:.2f}x" if ratio else text


def _names(records: Iterable[Record]) -> list[str]:
    """Every contender of any record in the usual order: a record tells it only among those that did not fail."""
    names = dict.fromkeys(
        entry.name for record in records for entry in (*record.comparison.results, *record.comparison.failures)
    )
    # The first word is the name; a version or a schedule follows. What is none of the others is onchip.
    return sorted(names, key=lambda name: OTHERS.index(word) if (word := name.split()[0]) in OTHERS else -1)


def _print_failures(console: Console, records: Mapping[Case, Record]) -> None:
    """A line for every contender and error, cut to the width: the records hold the whole."""
    failed: dict[tuple[str, str], list[str]] = {}
    for case, record in records.items():
        for failure in record.comparison.failures:
            failed.setdefault((failure.name, failure.error), []).append(label(case))
    for (name, error), labels in list(failed.items())[:FAILURES_SHOWN]:
        line = f"{name} failed in {len(labels)} of {len(records)}, first {labels[0]}: {error}"
        console.print(line, markup=False, no_wrap=True, overflow="ellipsis")
    if len(failed) > FAILURES_SHOWN:
        console.print(f"and {len(failed) - FAILURES_SHOWN} other failures", markup=False)


# Options


def _words(option: str, text: str, known: Iterable[str]) -> list[str]:
    """The words of a list, each of them known."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in known:
            raise typer.BadParameter(f"{option}: {word!r} is not one of {', '.join(known)}")
    return words


def _numbers(option: str, text: str) -> list[int]:
    """The numbers of a list, each at least 1."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not word.isdecimal() or int(word) < 1:
            raise typer.BadParameter(f"{option}: {word!r} is not a number of at least 1")
    return [int(word) for word in words]


if __name__ == "__main__":
    app()
