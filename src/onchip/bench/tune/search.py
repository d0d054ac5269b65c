"""The search for a case: compile, check, and race by successive halving.

Source: Jamieson and Talwalkar 2016, Non-stochastic Best Arm Identification and Hyperparameter Optimization, section 3;
Li et al. 2018, Hyperband, section 3, keep a third of the arms instead of a half.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from onchip.bench.tune.cases import Case
from onchip.schedules.triton.tiles import Tile

KEPT = 3
"""Of so many candidates the fastest goes on."""
FINALISTS = 2
FIRST_ROUNDS, LAST_ROUNDS = 2, 21
GAIN = 0.01
"""A tile must be faster than the shipped one by this part at least."""
COMPILING = 0.6
"""The part of a case's time after which no more candidates are compiled."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Median milliseconds of a call, and its time over the shipped tile's: median and upper quartile of the rounds."""

    ms: float
    ratio: float
    upper_quartile: float


class CannotRun(Exception):
    """A case does not run here with its shipped tile; the message says why."""


class Bench(Protocol):
    """What a search asks of a device, for the case that was opened last."""

    batch: int
    """How many candidates are compiled at a time."""

    def open(self, case: Case, shipped: Tile) -> None:
        """Make the problem, and the shipped tile's result; raises CannotRun if that fails."""

    def compile(self, tiles: Sequence[Tile]) -> Mapping[Tile, str]:
        """Compile for the case, and say why, in a word or two, of those that do not or spill."""

    def check(self, tile: Tile) -> str | None:
        """Launch it, and compare its result with the shipped tile's: the reason if it is out."""

    def race(self, shipped: Tile, tiles: Sequence[Tile], rounds: int) -> Mapping[Tile, Timing]:
        """Times in interleaved rounds, of the shipped tile as well; one that fails is left out."""

    def serves(self, tile: Tile) -> str | None:
        """Compile for the heaviest problems of the case's row: the reason if it cannot launch there."""

    def close(self) -> None:
        """Let go of the problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What came out of a search.

    Attributes:
        tile: the fastest that is right, which may be the shipped one.
        ms, shipped_ms, ratio: see tuned.Entry.
        raced: how many candidates ran. dropped: how many did not, by reason. left: how many were not compiled in time.
    """

    tile: Tile
    ms: float
    shipped_ms: float
    ratio: float
    raced: int
    dropped: Mapping[str, int]
    left: int


def search(
    bench: Bench,
    case: Case,
    shipped: Tile,
    tiles: Sequence[Tile],
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> Found:
    """The fastest tile for a case.

    Args:
        tiles: candidates, the likeliest first: those that the time does not reach are left.
        seconds: about how long it may take; at least one batch is compiled and raced.

    Raises:
        CannotRun: the shipped tile does not.
    """
    begun = clock()
    dropped: Counter[str] = Counter()
    running: list[Tile] = []
    tried = 0
    try:
        bench.open(case, shipped)
        while tried < len(tiles) and (tried == 0 or clock() - begun < COMPILING * seconds):
            batch = tiles[tried : tried + bench.batch]
            tried += len(batch)
            refused = bench.compile(batch)
            for tile in batch:
                reason = refused[tile] if tile in refused else bench.check(tile)
                if reason is None:
                    running.append(tile)
                else:
                    dropped[reason] += 1
        raced = len(running)
        final = _halve(bench, shipped, running)
        if shipped not in final:
            raise CannotRun("it cannot be timed")
        best = shipped
        for tile in sorted(final, key=lambda tile: final[tile].ratio):
            if final[tile].ratio > 1 - GAIN or final[tile].upper_quartile >= 1:
                break
            reason = bench.serves(tile)
            if reason is None:
                best = tile
                break
            dropped[reason] += 1
    finally:
        bench.close()
    return Found(
        tile=best, ms=final[best].ms, shipped_ms=final[shipped].ms, ratio=final[best].ratio,
        raced=raced, dropped=dict(dropped), left=len(tiles) - tried,
    )  # fmt: skip


def _halve(bench: Bench, shipped: Tile, running: Sequence[Tile]) -> Mapping[Tile, Timing]:
    """Times of the last round's candidates and of the shipped tile, which is timed in every round."""
    rounds = FIRST_ROUNDS
    while len(running) > FINALISTS:
        timings = bench.race(shipped, running, rounds)
        fastest = sorted((tile for tile in running if tile in timings), key=lambda tile: timings[tile].ratio)
        running = fastest[: max(FINALISTS, len(running) // KEPT)]
        rounds = min(2 * rounds, LAST_ROUNDS)
    return bench.race(shipped, running, LAST_ROUNDS)
