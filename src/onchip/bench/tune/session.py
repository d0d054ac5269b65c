"""Case by case within a budget; what is measured is written at once, so that an interrupt loses one case at most."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from onchip.bench.tune.candidates import Limits, candidates
from onchip.bench.tune.cases import Case
from onchip.bench.tune.search import Bench, CannotRun, Found, search
from onchip.schedules.triton.tiles import tile_of
from onchip.schedules.triton.tuned import Entry, Key, read, write


@dataclass(frozen=True, slots=True)
class Measured:
    """A case and what came out, or the reason why its shipped tile does not run here."""

    case: Case
    found: Found | None
    reason: str | None = None


def tune(
    bench: Bench,
    todo: Sequence[Case],
    *,
    key: Key,
    limits: Limits,
    path: Path,
    budget: float,
    step: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Measured]:
    """Measure cases one after the other, and keep each in the file before the next begins.

    Those that the file lacks come first. None begins when the budget is spent, but one is measured in any case.

    Args:
        key: what the file is for; entries of the same key that are not measured again stay.
        budget: seconds in all, shared evenly by the cases that are left.
        step: called with a description when a case begins.

    Raises:
        OSError: the file cannot be written.
    """
    begun = clock()
    entries = {entry.row: entry for entry in read(path, key, limits.shared).entries}
    waiting = sorted(todo, key=lambda case: (case.kernel, case.bits, case.dim, case.kind) in entries)
    for number, case in enumerate(waiting):
        left = budget - (clock() - begun)
        if number > 0 and left <= 0:
            return
        step(str(case))
        seconds = max(0.0, left) / (len(waiting) - number)
        shipped = tile_of(key.architecture, case.kernel, case.dim, case.bits, case.kind)
        tiles = candidates(case, shipped, limits).tiles
        try:
            found = search(bench, case, shipped, tiles, seconds, clock)
        except CannotRun as error:
            yield Measured(case, None, str(error))
            continue
        entry = Entry(
            kernel=case.kernel, dim=case.dim, bits=case.bits, kind=case.kind, tile=found.tile, shipped=shipped,
            ms=found.ms, shipped_ms=found.shipped_ms, ratio=found.ratio, tuned_on=date.today().isoformat(),
        )  # fmt: skip
        entries[entry.row] = entry
        write(path, key, entries.values())
        yield Measured(case, found)
