"""Tiles that are worth compiling for a case."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from onchip.bench.tune.cases import Case
from onchip.gpu import GRADIENT
from onchip.schedules.triton.limits import BOUNDS, SIZES, least_registers, least_shared
from onchip.schedules.triton.tiles import Tile

WARPS, STAGES = (4, 8), (1, 2, 3, 4)
"""Warps below 4 hold no tile that feeds a tensor core well; above 8 the register file has no room for their sums."""
OTHERS = 32
"""Registers beside sums and scores: a bound that leaves fewer is not tried, for the kernel would spill."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a processor has: bytes of shared memory for a program, registers of a thread, threads of a warp, and TMA as
    Hopper's kernels use it."""

    shared: int
    registers: int
    lanes: int
    tma: bool = False


@dataclass(frozen=True, slots=True)
class Candidates:
    """Tiles to try, the nearest to the shipped one first, and how many were left out by what, without compiling."""

    tiles: tuple[Tile, ...]
    pruned: dict[str, int]


def candidates(case: Case, shipped: Tile, limits: Limits) -> Candidates:
    """All powers of two within bounds but the shipped tile, less those that cannot launch or must spill."""
    kept: list[Tile] = []
    pruned = {"shared memory": 0, "registers": 0, "idle warps": 0}
    rows = SIZES[:2] if case.kind == "few" else SIZES
    for tile in (Tile(*sizes) for sizes in product(rows, SIZES, WARPS, STAGES)):
        held = least_registers(tile, case.kernel, case.dim, limits.lanes)
        if least_shared(tile, case.kernel, case.dim, case.bits) > limits.shared:
            pruned["shared memory"] += 1
        elif held > limits.registers:
            pruned["registers"] += 1
        elif tile.rows * tile.columns < tile.warps * 64:
            # the smallest product of a warp makes 16 x 8 scores; with half a product a warp waits
            pruned["idle warps"] += 1
        else:
            bounds = BOUNDS[tile.warps] if limits.lanes == 32 else ()
            bounded = (replace(tile, registers=bound) for bound in bounds if bound / 2 < held + OTHERS <= bound)
            every = [tile, *bounded]
            if limits.tma and case.kernel != GRADIENT and case.bits == 16:
                every += [replace(one, tma=True) for one in every]
            kept += (one for one in every if one != shipped)
    order = lambda tile: (_steps(tile, shipped), tile.rows, tile.columns, tile.registers or 0, tile.tma)  # noqa: E731
    return Candidates(tuple(sorted(kept, key=order)), pruned)


def _steps(tile: Tile, other: Tile) -> int:
    """How many doublings, and stages, lie between two tiles, and whether registers and TMA differ."""
    sizes = (tile.rows, other.rows), (tile.columns, other.columns), (tile.warps, other.warps)
    doublings = sum(abs(one.bit_length() - two.bit_length()) for one, two in sizes)
    others = (tile.registers != other.registers) + (tile.tma != other.tma)
    return doublings + abs(tile.stages - other.stages) + others
