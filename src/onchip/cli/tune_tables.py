"""The tables that `onchip tune` prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from onchip.bench.tune.candidates import Candidates
    from onchip.bench.tune.cases import Case
    from onchip.bench.tune.session import Measured
    from onchip.schedules.triton.tiles import Tile
    from onchip.schedules.triton.tuned import Entry, Key

COLUMNS = ("kernel", "kind", "dim", "bits")


def tile_text(tile: Tile) -> str:
    """Rows and columns, warps, stages, registers if they are bounded, and whether TMA is used."""
    bound = "" if tile.registers is None else f", {tile.registers}"
    return f"{tile.rows} x {tile.columns}, {tile.warps}, {tile.stages}{bound}{', TMA' if tile.tma else ''}"


def cached_table(entries: Sequence[Entry], key: Key) -> Table:
    """What is cached, beside the tile that is shipped and was compared with."""
    title = f"{key.device}: rows x columns, warps, stages, registers at most"
    table = _table(title, "shipped", "ms", "tuned", "ms", "speed-up", "on")
    for entry in entries:
        table.add_row(
            entry.kernel, entry.kind, str(entry.dim), str(entry.bits), tile_text(entry.shipped),
            f"{entry.shipped_ms:.4g}", tile_text(entry.tile), f"{entry.ms:.4g}", f"{1 / entry.ratio:.3f}",
            entry.tuned_on,
        )  # fmt: skip
    return table


def candidate_table(rows: Sequence[tuple[Case, Tile, Candidates]]) -> Table:
    """How many candidates each case has, how many were left out by what, and the first ones."""
    table = _table("rows x columns, warps, stages", "shipped", "candidates", "left out", "nearest")
    for case, shipped, found in rows:
        left = ", ".join(f"{reason} {count}" for reason, count in found.pruned.items() if count)
        nearest = "; ".join(tile_text(tile) for tile in found.tiles[:2])
        table.add_row(
            case.kernel,
            case.kind,
            str(case.dim),
            str(case.bits),
            tile_text(shipped),
            str(len(found.tiles)),
            left,
            nearest,
        )
    return table


def measured_table(measured: Sequence[Measured], name: str) -> Table:
    """What came out of each case."""
    table = _table(f"{name}: rows x columns, warps, stages", "fastest", "ms", "speed-up", "raced", "out", "left")
    for each in measured:
        case, found = each.case, each.found
        cells = (case.kernel, case.kind, str(case.dim), str(case.bits))
        if found is None:
            table.add_row(*cells, f"not run: {each.reason}")
            continue
        table.add_row(
            *cells, tile_text(found.tile), f"{found.ms:.4g}", f"{1 / found.ratio:.3f}", str(found.raced),
            str(sum(found.dropped.values())), str(found.left),
        )  # fmt: skip
    return table


def summary(measured: Sequence[Measured], asked: int) -> str:
    """How much faster it became, and why candidates were out, in one line."""
    found = [each.found for each in measured if each.found is not None]
    faster = sum(each.ratio < 1 for each in found)
    dropped: Counter[str] = Counter()
    for each in found:
        dropped.update(each.dropped)
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common())
    return (
        f"{len(found)} of {asked} rows measured, {faster} faster than shipped; candidates out: {reasons or 'none'}; "
        f"not reached in time: {sum(each.left for each in found)}"
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for column in (*COLUMNS, *columns):
        table.add_column(column)
    return table
