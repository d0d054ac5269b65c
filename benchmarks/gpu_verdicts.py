"""Hold the records of `benchmarks/gpu.py --goals` against what is wanted of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpu_cases import Case
from gpu_contenders import OURS, PREPARATION, word
from gpu_goals import Bound, Row
from gpu_stored import figure_2_bytes, table_21_peaks

from onchip.bench.protocol import Comparison, Failure, Record

NOT_HERE = "not here"
MISSING, WRONG, UNSUPPORTED = "ModuleNotFoundError", "WrongResult", "Unsupported"
"""How the errors of a package that is not installed, of a wrong result and of a schedule without the problem begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """What a case gives for a bound.

    Attributes:
        value: None if there is none. reason: why there is none, or who was missing; empty for a number of all.
    """

    value: float | None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A bound with what was found.

    Attributes:
        value: None if no case gives one. whole: cases whose number lacks nobody, out of `cases`.
        verdict: "met", "over floor" or "under", with "so far" where cases or peers are missing; or why there is none.
    """

    value: float | None
    whole: int
    cases: int
    verdict: str


def judge(row: Row, bound: Bound, records: Mapping[Case, Record], folder: Path, schedule: str) -> Judged:
    """Hold a row's records, or for a row without cases those of benchmarks/traffic.py in `folder`, against a bound."""
    numbers = [_of_case(bound, records.get(case)) for case in row.cases] or _of_traffic(bound, folder, schedule)
    values = [number.value for number in numbers if number.value is not None]
    whole = sum(number.value is not None and not number.reason for number in numbers)
    if not values:
        reasons = [number.reason for number in numbers]
        return Judged(value=None, whole=0, cases=len(numbers), verdict=max(reasons, key=reasons.count))
    if bound.over == "mean":
        value = statistics.geometric_mean(values)
    else:
        value = min(values) if bound.quantity == "ratio" else max(values)
    verdict = _verdict(bound, value) + (" so far" if whole < len(numbers) else "")
    return Judged(value=value, whole=whole, cases=len(numbers), verdict=verdict)


def is_here(row: Row, name: str, records: Mapping[Case, Record]) -> bool:
    """Whether a contender, by its word, is installed as far as the row's records tell."""
    found = [records[case].comparison for case in row.cases if case in records]
    missing = [_failure(comparison, name) for comparison in found]
    return not found or not all(failure is not None and failure.error.startswith(MISSING) for failure in missing)


def _verdict(bound: Bound, value: float) -> str:
    sign = 1 if bound.quantity == "ratio" else -1
    wanted = bound.floor if bound.goal is None else bound.goal
    assert wanted is not None
    if sign * value >= sign * wanted:
        return "met"
    return "over floor" if bound.floor is not None and sign * value >= sign * bound.floor else "under"


# Numbers of cases


def _of_case(bound: Bound, record: Record | None) -> Number:
    if record is None:
        return Number(value=None, reason="not measured")
    comparison = record.comparison
    ours = _samples(comparison, comparison.reference)
    if ours is None:
        failure = _failure(comparison, word(comparison.reference))
        unsupported = failure is not None and failure.error.startswith(UNSUPPORTED)
        return Number(value=None, reason="unsupported" if unsupported else "failed")
    if _contradicted(comparison):
        return Number(value=None, reason="results differ")
    if bound.quantity == "microseconds":
        return Number(value=statistics.median(ours) * 1e3)
    preparing = _samples(comparison, f"{comparison.reference}: {PREPARATION}")
    if bound.quantity == "share" and preparing is None:
        return Number(value=None, reason="failed")
    if preparing is not None:
        ours = [whole - part for whole, part in zip(ours, preparing, strict=True)]
        if min(ours) <= 0:
            return Number(value=None, reason="lost in noise")
    if bound.quantity == "share":
        return Number(value=_median_ratio(preparing or (), ours))
    return _against(bound, comparison, ours)


def _against(bound: Bound, comparison: Comparison, ours: Sequence[float]) -> Number:
    """The time of the fastest of those that a bound names over ours."""
    ratios = [
        _median_ratio(result.samples_ms, ours) for result in comparison.results if word(result.name) in bound.against
    ]
    there = {word(result.name) for result in comparison.results}
    lacking = [name for name in bound.against if name not in there]
    failures = {name: _failure(comparison, name) for name in lacking}
    absent = [name for name, failure in failures.items() if failure is None or failure.error.startswith(MISSING)]
    if ratios:
        return Number(value=min(ratios), reason=f"without {', '.join(absent)}" if absent else "")
    if not absent:
        return Number(value=None, reason=f"{lacking[0]} failed")
    return Number(value=None, reason=NOT_HERE if failures[absent[0]] else "left out")


def _contradicted(comparison: Comparison) -> bool:
    """Whether every contender whose results were held against ours has others."""
    others = [result.name for result in comparison.results if not result.name.startswith(OURS)]
    return not others and any(failure.error.startswith(WRONG) for failure in comparison.failures)


def _samples(comparison: Comparison, name: str) -> Sequence[float] | None:
    return next((result.samples_ms for result in comparison.results if result.name == name), None)


def _failure(comparison: Comparison, name: str) -> Failure | None:
    return next((failure for failure in comparison.failures if word(failure.name) == name), None)


def _median_ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """The median over the rounds, each pair taken in the same round."""
    return statistics.median(their / our for their, our in zip(theirs, ours, strict=True))


# Numbers of benchmarks/traffic.py


def _of_traffic(bound: Bound, folder: Path, schedule: str) -> list[Number]:
    absent = [Number(value=None, reason="not measured")]
    if bound.quantity == "memory":
        ours, theirs = (table_21_peaks(folder, name) for name in (schedule, *bound.against))
        return [Number(value=ours[length] / theirs[length]) for length in ours.keys() & theirs.keys()] or absent
    found = figure_2_bytes(folder, schedule)
    if found is None:
        return absent
    if bound.quantity == "gigabytes":
        return [Number(value=found / 1e9)]
    others = [bytes_ for name in bound.against if (bytes_ := figure_2_bytes(folder, name)) is not None]
    return [Number(value=found / min(others))] if others else absent
