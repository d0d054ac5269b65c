"""What a row of cases of `benchmarks/gpu.py` is to reach. The rows themselves are in gpu_rows.py, and gpu_verdicts.py
judges them."""

from __future__ import annotations

from dataclasses import dataclass

from gpu_cases import Case
from gpu_contenders import OTHERS, PLAIN, PREPARATION


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A number that is wanted of a row.

    Attributes:
        quantity: one of QUANTITIES.
        against: names of contenders (`gpu_contenders.word`); the fastest of them in each case counts.
        over: "mean", the geometric mean over the cases, or "each", the worst of them.
        goal, floor: what is wanted, and what is the least; one may be None.
    """

    goal: float | None = None
    floor: float | None = None
    against: tuple[str, ...] = ()
    over: str = "mean"
    quantity: str = "ratio"


QUANTITIES = ("ratio", "microseconds", "share", "gigabytes", "bytes", "memory")
"""Of ratio more is better, of the others less. ratio: time of `against` over ours, and over ours without preparation
where that is timed. microseconds: ours. share: our preparation over the rest of our time. Of what benchmarks/traffic.py
recorded: gigabytes in device memory at Figure 2's shape, those (bytes) over the peer's, and peak memory over the
peer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a table of goals.

    Attributes:
        key: what `--rows` calls it; rows may share it.
        cases: what is timed; none if the numbers are those that benchmarks/traffic.py records.
        beside: contenders that are timed, so that results are held against theirs, and count for no bound.
    """

    key: str
    what: str
    cases: tuple[Case, ...]
    bounds: tuple[Bound, ...]
    beside: tuple[str, ...] = ()

    @property
    def names(self) -> frozenset[str]:
        """Every contender beside our schedule, by its word."""
        asked = {name for bound in self.bounds for name in bound.against}
        return frozenset({*asked, *self.beside}) if self.cases else frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Goals:
    """A table of goals, and the schedule that is to reach them."""

    name: str
    schedule: str
    rows: tuple[Row, ...]

    def names(self, case: Case) -> frozenset[str]:
        """Who is timed in a case, whichever of the rows that have it asks: a record is written whole or not at all."""
        return frozenset().union(*(row.names for row in self.rows if case in row.cases))


def peers(names: frozenset[str]) -> list[str]:
    """Those that are other people's, in the usual order."""
    return [name for name in OTHERS if name in names]


def parts(names: frozenset[str]) -> list[str]:
    """Those that are ours: variants and parts."""
    return [name for name in (PLAIN, PREPARATION) if name in names]
