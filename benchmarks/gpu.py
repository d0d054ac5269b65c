"""Time onchip against other attention on this GPU: `python benchmarks/gpu.py`.

Every case is timed in interleaved rounds, all contenders in one process. Its record goes into one JSON file, from
which `--show` prints the table again. `--goals NAME` measures what a schedule is to reach instead of the plain table,
and prints the goals beside it (docs/benchmarks.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import torch
import typer
from common import application, make_console, read_records, say
from gpu_calls import time_case
from gpu_cases import DTYPES, Case, cases
from gpu_contenders import INSTALLED, OTHERS, OURS, PEERS
from gpu_goals import Goals
from gpu_rows import TABLES
from gpu_runs import Run, chosen_goals, estimates, file_pattern, goals_run, plain_run

from onchip.bench.machine import Machine, read_machine
from onchip.bench.protocol import DIRECTIONS, Record, default_directory
from onchip.dispatch import schedules

# So many that four contenders have had every place equally often, in both directions.
ROUNDS = 16
GOAL_ROUNDS = 8
WIDTH, GOALS_WIDTH = 98, 112
TIMED_DIRECTIONS, DIMS, LENGTHS, TIMED_DTYPES = "forward,backward", "64,128", "2048,8192", "bfloat16"
RECORDS = Path("benchmarks/results/nvidia-h200")
"""Whose records `--show` prints on a machine without a GPU."""

app = application()


@app.command()
def gpu(
    schedule: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A schedule of onchip; repeatable (default: triton, or that of the goals)."),
    ] = None,
    directions: Annotated[str, typer.Option(help=f"Of {', '.join(DIRECTIONS)}.")] = TIMED_DIRECTIONS,
    dims: Annotated[str, typer.Option(help="Head dims.")] = DIMS,
    lengths: Annotated[str, typer.Option(help="Lengths; the batch makes them 16384 tokens.")] = LENGTHS,
    dtypes: Annotated[str, typer.Option(help=f"Of {', '.join(DTYPES)}.")] = TIMED_DTYPES,
    goals: Annotated[
        str, typer.Option(metavar="NAME", help=f"Measure goals instead of the plain table: {', '.join(TABLES)}.")
    ] = "",
    rows: Annotated[str, typer.Option(help="Rows of the goals, by key; --estimate lists them (default: all).")] = "",
    only: Annotated[
        str, typer.Option(metavar="TEXT", help="Only cases whose name, as the progress shows it, contains this.")
    ] = "",
    peers: Annotated[
        bool, typer.Option("--peers", help="Also FlashAttention 3 and 4, where installed; goals have their own.")
    ] = False,
    without: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Leave out, as flex, which compiles long; repeatable.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option(min=1, help=f"Samples of each (default: {ROUNDS}; goals: {GOAL_ROUNDS}).")
    ] = None,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Say how long each row of the goals would take; time nothing.")
    ] = False,
    speeds: Annotated[bool, typer.Option("--speeds", help="Above the goals, the speeds of each row's cases.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Print what was recorded; time nothing.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the records (default: benchmarks/results/<device>)")
    ] = None,
) -> None:
    """Time onchip against other attention on this GPU. Lists are separated by commas."""
    ours = _words("--schedule", ",".join(schedule), schedules()) if schedule else []
    left_out = _words("--without", ",".join(without), OTHERS) if without else []
    table: Goals | None = None
    if goals:
        if (directions, dims, lengths, dtypes) != (TIMED_DIRECTIONS, DIMS, LENGTHS, TIMED_DTYPES):
            raise typer.BadParameter("--goals has cases of its own: choose among them with --rows and --only")
        if len(ours) > 1:
            raise typer.BadParameter(f"--goals measures one schedule: got {', '.join(ours)}")
        table = _goals(goals, rows, only)
        run = goals_run(table, ours[0] if ours else table.schedule, left_out, speeds)
    else:
        if rows or estimate or speeds:
            raise typer.BadParameter("--rows, --estimate and --speeds belong to --goals")
        chosen = cases(
            _words("--directions", directions, DIRECTIONS),
            _numbers("--dims", dims),
            _numbers("--lengths", lengths),
            _words("--dtypes", dtypes, DTYPES),
        )
        others = [name for name in (*INSTALLED, *PEERS * peers) if name not in left_out]
        run = plain_run([case for case in chosen if only in case.name], ours or ["triton"], others)
    if not run.cases and (only or not table):
        raise typer.BadParameter(f"--only: no case has {only!r} in its name")
    rounds = rounds or (GOAL_ROUNDS if table else ROUNDS)
    if table and not show:
        _tell_estimates(table, run, rounds)
    if not estimate:
        _measure_or_show(run, table, rounds, show, out)


def _measure_or_show(run: Run, table: Goals | None, rounds: int, show: bool, out: Path | None) -> None:
    console = make_console(GOALS_WIDTH if table else WIDTH)
    machine = _machine()
    folder = out or (default_directory(machine) if machine else RECORDS)
    measured: dict[Case, Record] = {}
    broken = False
    if not show:
        if machine is None:
            raise typer.BadParameter("no CUDA device is here; --show prints records")
        measured, broken = _measure_all(run, machine, rounds, folder)
    # Goals count cases that an earlier run measured.
    records = {**_recorded(run, file_pattern(table), folder), **measured} if show or table else measured
    if records or not run.needs_records:
        run.print(console, records, folder)
    elif show:
        raise typer.BadParameter(f"no records of these cases in {folder}")
    failures = [failure for record in measured.values() for failure in record.comparison.failures]
    if broken or any(failure.name.startswith(OURS) for failure in failures):
        raise typer.Exit(1)


def _machine() -> Machine | None:
    return read_machine("cuda") if torch.cuda.is_available() else None


def _measure_all(run: Run, machine: Machine, rounds: int, out: Path) -> tuple[dict[Case, Record], bool]:
    """The records, written one by one, and whether the device broke down on the way."""
    records: dict[Case, Record] = {}
    for number, case in enumerate(run.cases, start=1):
        say(f"[{number}/{len(run.cases)}] {case.name}")
        try:
            record = measure(case, run, machine, rounds)
        except RuntimeError as error:
            # What one contender raises is in the record. After an illegal access nothing runs in this process.
            say(f"stopped: {type(error).__name__}: {str(error).strip()}")
            return records, True
        record.write(out)
        records[case] = record
    return records, False


def measure(case: Case, run: Run, machine: Machine, rounds: int) -> Record:
    """Time a case on the machine's device; the first contender is the reference."""
    comparison = time_case(case, run.enter(case), torch.device(machine.device_type), rounds)
    return Record.of(run.suite(case), case.what, machine, comparison)


def _recorded(run: Run, pattern: str, folder: Path) -> dict[Case, Record]:
    found = {(record.suite, record.what): record for record in read_records(folder, pattern)}
    return {case: found[key] for case in run.cases if (key := (run.suite(case), case.what)) in found}


def _tell_estimates(table: Goals, run: Run, rounds: int) -> None:
    lines = estimates(table, run, rounds)
    for key, what, count, seconds in lines:
        say(f"{key}: {what}, {count} {'case' if count == 1 else 'cases'} more, about {seconds:.0f} s")
    say(f"in all about {sum(seconds for *_, seconds in lines):.0f} s")


# Options


def _goals(name: str, rows: str, only: str) -> Goals:
    _words("--goals", name, TABLES)
    keys = dict.fromkeys(row.key for row in TABLES[name].rows)
    return chosen_goals(name, _words("--rows", rows, keys) if rows else [], only)


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
