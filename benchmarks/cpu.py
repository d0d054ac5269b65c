"""Time onchip against PyTorch on this processor: `python benchmarks/cpu.py`.

Every case is timed in interleaved rounds and has a goal and a floor. Its record goes into one JSON file, from which
`--show` prints the table again. `--choices` times every schedule over a grid of problems as well.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import typer
from common import application, make_console, read_records, say
from cpu_cases import Case, Point, cases, points
from rich.console import Console
from rich.table import Table

from onchip.bench.demo.sentences import ModelMissing
from onchip.bench.machine import Machine, read_machine
from onchip.bench.protocol import FORMAT, Comparison, Record, default_directory, quartiles, read_commit, slug
from onchip.bench.timing import compare

# So many that every order of two contenders, or of three, has had the same number of turns.
CASE_ROUNDS = 12
POINT_ROUNDS = 6
QUICK_ROUNDS = 2
WIDTH = 150
CHOICES = "choices.json"

app = application()


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The median time of every schedule that runs a problem, in milliseconds a call."""

    point: Point
    times_ms: dict[str, float]


@app.command()
def cpu(
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help=f"Samples of each (default: {CASE_ROUNDS}, and {POINT_ROUNDS} for --choices)"),
    ] = None,
    only: Annotated[str, typer.Option(metavar="TEXT", help="Only cases whose name contains this.")] = "",
    choices: Annotated[
        bool, typer.Option("--choices", help="Also time every schedule; with --only choices, nothing else.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="See that it runs: an eighth of each length, 2 rounds, nothing written.")
    ] = False,
    show: Annotated[bool, typer.Option("--show", help="Print what was recorded; time nothing.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the records (default: benchmarks/results/<processor>)")
    ] = None,
) -> None:
    """Time onchip against PyTorch on this processor, and every schedule against the others."""
    if show and quick:
        raise typer.BadParameter("--show prints records, and --quick writes none")
    chosen = [case for case in cases(quick) if only in case.name]
    if not chosen and not choices:
        raise typer.BadParameter(f"--only: no case has {only!r} in its name")
    console = make_console(WIDTH)
    machine = read_machine()
    out = out or default_directory(machine)
    if show:
        _show(console, chosen, out, choices)
        return
    records: dict[Case, Record] = {}
    for number, case in enumerate(chosen, start=1):
        say(f"[{number}/{len(chosen)}] {case.name}, {case.direction}")
        try:
            record = measure(case, rounds or (QUICK_ROUNDS if quick else CASE_ROUNDS))
        except ModelMissing as missing:
            console.print(f"{case.name} left out: {missing}", markup=False)
            continue
        if not quick:
            record.write(out)
        records[case] = record
    if records:
        print_cases(console, records)
    if choices:
        measured = measure_choices(
            points(quick), rounds or (QUICK_ROUNDS if quick else POINT_ROUNDS), machine, None if quick else out
        )
        print_choices(console, measured)
    before, after = _load(machine), _load(read_machine())
    console.print(f"Load average: {before} before, {after} after, on {machine.cores} cores.")
    if any(record.comparison.failures for record in records.values()):
        raise typer.Exit(1)


def _show(console: Console, chosen: list[Case], out: Path, choices: bool) -> None:
    found = {(record.suite, record.what.direction): record for record in read_records(out, "cpu-*.json")}
    records = {case: found[key] for case in chosen if (key := (suite(case), case.direction)) in found}
    if not records and not (choices and (out / CHOICES).exists()):
        raise typer.BadParameter(f"no records of these cases in {out}")
    if records:
        print_cases(console, records)
        loads = [record.where.load_average[0] for record in records.values() if record.where.load_average]
        if loads:
            console.print(f"Load average as the cases began: {min(loads):g} to {max(loads):g}.")
    if choices and (out / CHOICES).exists():
        print_choices(console, read_choices(out))


# Cases


def suite(case: Case) -> str:
    """The suite of a case's record; with the direction it names the case."""
    return slug(f"cpu {case.name}")


def measure(case: Case, rounds: int) -> Record:
    """Time a case.

    Raises:
        ModelMissing: its model is not installed.
    """
    machine = read_machine()
    prepared = case.prepare()
    # The search for the length of a sample warms up as well, and the longest calls take seconds.
    calls = {"onchip": prepared.ours, "torch": prepared.theirs}
    return Record.of(suite(case), prepared.what, machine, compare(calls, reference="onchip", rounds=rounds, warmup=1))


def gain(case: Case, comparison: Comparison) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of the case's number, over the rounds."""
    if case.difference:
        ours, theirs = (comparison.result(name).samples_ms for name in ("onchip", "torch"))
        return quartiles([(our - their) * 1e3 for our, their in zip(ours, theirs, strict=True)])
    (ratio,) = comparison.ratios
    return ratio.lower_quartile, ratio.median, ratio.upper_quartile


def verdict(number: float, goal: float, floor: float, *, less_is_better: bool = False) -> str:
    """Whether a number meets the goal, is at or over the floor, or under it."""
    if less_is_better:
        number, goal, floor = -number, -goal, -floor
    if number >= goal:
        return "met"
    return "over floor" if number >= floor else "under"


def print_cases(console: Console, records: dict[Case, Record]) -> None:
    """Print the table of the cases, and the medians of groups below their last case."""
    table = Table()
    for name in ("case", "direction", "onchip ms", "torch ms", "theirs/ours", "quartiles", "goal", "floor", "verdict"):
        table.add_column(name, justify="left" if name in ("case", "direction", "verdict") else "right", no_wrap=True)
    for group, members in itertools.groupby(records, key=lambda case: case.group):
        medians = []
        for case in members:
            comparison = records[case].comparison
            if comparison.failures:
                table.add_row(case.name, case.direction, *[""] * 6, "failed")
                continue
            times = (f"{comparison.result(name).median_ms:,.3f}" for name in ("onchip", "torch"))
            numbers = gain(case, comparison)
            table.add_row(case.name, case.direction, *times, *_numbers(case, numbers))
            medians.append(numbers[1])
        if group and medians:
            label = f"{group}: median of {len(medians)}"
            table.add_row(label, "", "", "", *_numbers(case, quartiles(medians)), end_section=True)
    console.print(table)
    for case, record in records.items():
        for failure in record.comparison.failures:
            console.print(f"{case.name}, {case.direction}: {failure.name} failed: {failure.error}", markup=False)
    where = next(iter(records.values())).where
    waiting = f", {where.thread_waiting}" if where.thread_waiting else ""
    console.print(
        f"{where.device_name}, {where.threads} threads{waiting}, torch {where.torch_version}. theirs/ours: PyTorch's "
        "time over onchip's, paired within a round; above 1, onchip is faster. µs: onchip's time minus PyTorch's; less "
        "is better.",
        markup=False,
    )


def _numbers(case: Case, numbers: tuple[float, float, float]) -> tuple[str, str, str, str, str]:
    """Median, quartiles, goal, floor and verdict as text."""
    lower, median, upper = (f"{number:+.1f}" if case.difference else f"{number:.3f}" for number in numbers)
    unit = " µs" if case.difference else ""
    return (
        f"{median}{unit}",
        f"{lower} to {upper}",
        f"{case.goal:g}{unit}",
        f"{case.floor:g}{unit}",
        verdict(numbers[1], case.goal, case.floor, less_is_better=case.difference),
    )


# Choices


def measure_choices(grid: list[Point], rounds: int, machine: Machine, out: Path | None) -> list[Choice]:
    """Time every schedule on every point; the file in `out` is written after each, so that an interrupt loses none."""
    commit = read_commit()
    head = {
        "format": FORMAT,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": asdict(commit) if commit else None,
        "where": asdict(machine),
    }
    measured: list[Choice] = []
    for number, point in enumerate(grid, start=1):
        say(f"[{number}/{len(grid)}] {point}")
        calls = point.contenders()
        if not calls:
            continue
        results = compare(calls, rounds=rounds, warmup=0).results
        measured.append(Choice(point=point, times_ms={result.name: result.median_ms for result in results}))
        if out is not None:
            rows = [{**asdict(choice.point), "times_ms": choice.times_ms} for choice in measured]
            out.mkdir(parents=True, exist_ok=True)
            (out / CHOICES).write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return measured


def read_choices(out: Path) -> list[Choice]:
    """What `measure_choices` wrote."""
    rows = json.loads((out / CHOICES).read_text(encoding="utf-8"))["rows"]
    return [Choice(times_ms=row.pop("times_ms"), point=Point(**row)) for row in rows]


def print_choices(console: Console, measured: list[Choice]) -> None:
    """Print the fastest schedule of every point, and how many times as long the next one takes."""
    table = Table()
    for name in ("direction", "dtype", "batch", "heads", "length", "dim", "kind", "fastest", "ms", "next", "margin"):
        left = name in ("direction", "dtype", "kind", "fastest", "next")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for choice in measured:
        point = choice.point
        (name, fastest_ms), *others = sorted(choice.times_ms.items(), key=lambda item: item[1])
        following = (others[0][0], f"{others[0][1] / fastest_ms:.2f}") if others else ("", "")
        table.add_row(
            point.direction,
            point.dtype,
            *(str(size) for size in (point.batch, point.heads, point.length, point.dim)),
            point.kind,
            name,
            f"{fastest_ms:,.3f}",
            *following,
        )
    console.print(table)


def _load(machine: Machine) -> str:
    return f"{machine.load_average[0]:g}" if machine.load_average else "unknown"


if __name__ == "__main__":
    app()
