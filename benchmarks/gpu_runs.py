"""What a command line of `benchmarks/gpu.py` asks for: the plain table, or one of goals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from gpu_budget import seconds
from gpu_cases import Case
from gpu_contenders import Contestant, contestants
from gpu_goals import Goals, parts, peers
from gpu_rows import TABLES
from gpu_tables import print_cases, print_goals
from rich.console import Console

from onchip.bench.protocol import Record, slug

SUITE = "gpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What is timed, by whom, under which name it is recorded, and how it is printed.

    Attributes:
        enter: the contestants of a case. suite: of its record; with the record's Workload it names the case.
        print: takes the console, the records and their folder.
        needs_records: whether there is nothing to print without them.
    """

    cases: Sequence[Case]
    enter: Callable[[Case], list[Contestant]]
    suite: Callable[[Case], str]
    print: Callable[[Console, Mapping[Case, Record], Path], None]
    needs_records: bool = True


def plain_run(chosen: Sequence[Case], ours: Sequence[str], others: Sequence[str]) -> Run:
    """Every schedule of onchip and the others on each case."""
    entered = contestants(ours, others)
    return Run(
        cases=chosen,
        enter=lambda case: entered,
        suite=lambda case: SUITE,
        print=lambda console, records, folder: print_cases(console, records),
    )


def goals_run(goals: Goals, schedule: str, without: Sequence[str], speeds: bool) -> Run:
    """One schedule of onchip and whom the table names for each case."""
    return Run(
        cases=all_cases(goals),
        enter=partial(_entered, goals, schedule, without),
        suite=lambda case: "-".join(filter(None, (SUITE, goals.name, case.suite))),
        print=lambda console, records, folder: print_goals(console, goals, records, folder, schedule, speeds),
        needs_records=False,
    )


def chosen_goals(name: str, keys: Sequence[str], only: str) -> Goals:
    """The rows of a table with these keys (none: all of them), and of their cases those whose name contains `only`."""
    goals = TABLES[name]
    found = []
    for row in goals.rows:
        cases = tuple(case for case in row.cases if only in case.name)
        if (not keys or row.key in keys) and (cases or not (only or row.cases)):
            found.append(replace(row, cases=cases))
    return replace(goals, rows=tuple(found))


def all_cases(goals: Goals) -> list[Case]:
    """Every case once, in the order of the rows."""
    return list(dict.fromkeys(case for row in goals.rows for case in row.cases))


def estimates(goals: Goals, run: Run, rounds: int) -> list[tuple[str, str, int, float]]:
    """Key and words of each row that times something, its cases that no row before has, and their seconds."""
    seen: set[Case] = set()
    found = []
    for row in goals.rows:
        new = [case for case in row.cases if case not in seen]
        seen.update(new)
        if row.cases:
            names = {case: [contestant.name for contestant in run.enter(case)] for case in new}
            found.append((row.key, row.what, len(new), sum(seconds(case, names[case], rounds) for case in new)))
    return found


def _entered(goals: Goals, schedule: str, without: Sequence[str], case: Case) -> list[Contestant]:
    # Of the whole table, whichever rows were chosen: the record of a case that two rows have must serve both.
    names = TABLES[goals.name].names(case) - set(without)
    return contestants([schedule], peers(names), parts(names))


def file_pattern(goals: Goals | None) -> str:
    """What the names of a run's records match; the plain table's match more."""
    return f"{slug(f'{SUITE} {goals.name}')}-*.json" if goals else f"{SUITE}-*.json"
