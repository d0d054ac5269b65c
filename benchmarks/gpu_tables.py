"""The tables that `benchmarks/gpu.py` prints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from gpu_cases import TIMINGS, Case, label
from gpu_contenders import OTHERS, PREPARATION, word
from gpu_goals import Bound, Goals, Row
from gpu_verdicts import MISSING, NOT_HERE, is_here, judge
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from onchip.bench.protocol import Record

FAILURES_SHOWN = 4
UNITS = {"microseconds": "{:.1f} us", "share": "{:.1%}", "gigabytes": "{:.2f} GB"}
"""How a quantity is written; the others are factors."""


# Speeds of cases


def print_cases(console: Console, records: Mapping[Case, Record]) -> None:
    """Print a row for every case: the speed of each contender, and how many times as fast the reference is."""
    print_speeds(console, records)
    _print_failures(console, records)
    _print_protocol(console, records)


def print_speeds(console: Console, records: Mapping[Case, Record]) -> None:
    """The same without what stands below it."""
    names = _names(records.values())
    table = _table()
    table.add_column("TFLOP/s", no_wrap=True)
    for name in names:
        table.add_column(name.replace("_", " ").replace(" ", "\n"), justify="right", no_wrap=True)
    for case, record in records.items():
        table.add_row(label(case), *(cell(record, name) for name in names))
    console.print(table)


def cell(record: Record, name: str) -> str:
    """The speed of a contender in a case, and the reference's speed over it; a time where operations say nothing."""
    comparison = record.comparison
    failure = next((failure for failure in comparison.failures if failure.name == name), None)
    if failure is not None:
        return NOT_HERE if failure.error.startswith(MISSING) else "failed"
    result = next((result for result in comparison.results if result.name == name), None)
    if result is None:
        return ""
    if word(name) == PREPARATION or comparison.method.timer == TIMINGS["host"]:
        text = f"{result.median_ms * 1e3:.1f}us"
    else:
        speed = record.speed_tflops(name)
        text = f"{speed:.0f}" if speed >= 100 else f"{speed:.1f}"
    ratio = next((ratio for ratio in comparison.ratios if ratio.name == name), None)
    # A ratio is one of times, so what takes longer than the reference has more than 1.
    return f"{text} {ratio.median:.2f}x" if ratio else text


def _names(records: Iterable[Record]) -> list[str]:
    """Every contender of any record in the usual order: a record tells it only among those that did not fail."""
    entries = (
        [*(result.name for result in record.comparison.results), *(lost.name for lost in record.comparison.failures)]
        for record in records
    )
    names = dict.fromkeys(name for each in entries for name in each)
    # What is none of the others is onchip.
    return sorted(names, key=lambda name: OTHERS.index(word(name)) if word(name) in OTHERS else -1)


# Goals


def print_goals(
    console: Console, goals: Goals, records: Mapping[Case, Record], folder: Path, schedule: str, speeds: bool
) -> None:
    """Print a line for every bound of every row; if `speeds`, also what print_cases would print of each row."""
    if speeds:
        for row in goals.rows:
            if found := {case: records[case] for case in row.cases if case in records}:
                console.print(f"\n{row.what}", markup=False)
                print_speeds(console, found)
    table = _table()
    table.add_column(f"{goals.name} ({schedule})", no_wrap=True)
    table.add_column("against", no_wrap=True)
    for name in ("found", "over", "goal", "floor"):
        table.add_column(name, justify="left" if name == "over" else "right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for row in goals.rows:
        for number, bound in enumerate(row.bounds):
            table.add_row("" if number else row.what, *_judged(row, bound, records, folder, schedule))
    console.print(table)
    console.print(
        "found: their time over ours unless a unit stands there; of several peers the fastest in each case. so far: "
        "cases or peers are missing.",
        markup=False,
    )
    if records:
        _print_failures(console, records)
        _print_protocol(console, records)


def _judged(row: Row, bound: Bound, records: Mapping[Case, Record], folder: Path, schedule: str) -> tuple[str, ...]:
    judged = judge(row, bound, records, folder, schedule)
    names = [name if is_here(row, name, records) else f"{name} ({NOT_HERE})" for name in bound.against]
    found, goal, floor = (_written(bound, number) for number in (judged.value, bound.goal, bound.floor))
    cases = f"{judged.whole} of {judged.cases}" if judged.whole < judged.cases else f"{judged.cases}"
    over = cases if judged.cases == 1 else f"{'mean' if bound.over == 'mean' else 'worst'}, {cases}"
    return ", ".join(names), found, over, goal, floor, judged.verdict


def _written(bound: Bound, number: float | None) -> str:
    return "" if number is None else UNITS.get(bound.quantity, "{:.2f}x").format(number)


# Below a table


def _table() -> Table:
    return Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))


def _print_failures(console: Console, records: Mapping[Case, Record]) -> None:
    """A line for every contender and error, cut to the width: the records hold the whole. Who is not installed is
    told in the table."""
    failed: dict[tuple[str, str], list[str]] = {}
    for case, record in records.items():
        for failure in record.comparison.failures:
            if not failure.error.startswith(MISSING):
                failed.setdefault((failure.name, failure.error), []).append(label(case))
    for (name, error), labels in list(failed.items())[:FAILURES_SHOWN]:
        line = f"{name} failed in {len(labels)} of {len(records)}, first {labels[0]}: {error}"
        console.print(line, markup=False, no_wrap=True, overflow="ellipsis")
    if len(failed) > FAILURES_SHOWN:
        console.print(f"and {len(failed) - FAILURES_SHOWN} other failures", markup=False)


def _print_protocol(console: Console, records: Mapping[Case, Record]) -> None:
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
