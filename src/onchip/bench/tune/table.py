"""What was tuned, as rows of the shipped table."""

from __future__ import annotations

from collections.abc import Sequence

from onchip.schedules.triton.tiles import ANY, DIMS, KINDS, TABLE, Row, Tile, row_dim, row_of
from onchip.schedules.triton.tuned import Entry, Key, Table, entry_for, table_of


def rows_of(entries: Sequence[Entry], key: Key) -> list[Row]:
    """Rows that, in front of the table, choose for the card's architecture as the entries do.

    A row reaches down to any smaller head dim. So where a kind or a head dim between was not measured, the shipped row
    stands again between the others, with its own source.
    """
    rows = []
    table = table_of(entries)
    for kernel, bits in sorted({(entry.kernel, entry.bits) for entry in entries}):
        measured = {entry.dim for entry in entries if (entry.kernel, entry.bits) == (kernel, bits)}
        bounds = {row.dim for row in TABLE if (row.kernel, row.bits) == (kernel, bits)}.union(DIMS)
        for dim in sorted(measured | {bound for bound in bounds if bound <= row_dim(max(measured))}):
            kinds: dict[tuple[Tile, str], list[str]] = {}
            for kind in KINDS[kernel]:
                kinds.setdefault(_chosen(table, key, kernel, dim, bits, kind), []).append(kind)
            for (tile, source), names in kinds.items():
                those = ANY if len(kinds) == 1 else tuple(names)
                rows.append(Row((key.architecture,), kernel, dim, bits, those, tile, source))
    return rows


def _chosen(table: Table, key: Key, kernel: str, dim: int, bits: int, kind: str) -> tuple[Tile, str]:
    entry = entry_for(table, kernel, dim, bits, kind)
    if entry is not None:
        return entry.tile, f"measured on {key.device}"
    row = row_of(key.architecture, kernel, dim, bits, kind)
    return row.tile, row.source


def text_of(row: Row) -> str:
    """A row as tiles.py writes it."""
    kinds = "ANY" if row.kinds == ANY else repr(row.kinds).replace("'", '"')
    sizes = [row.tile.rows, row.tile.columns, row.tile.warps, row.tile.stages]
    sizes += [row.tile.registers] if row.tile.registers is not None else []
    tile = f"Tile({', '.join(map(str, sizes))}{', tma=True' if row.tile.tma else ''})"
    architectures = repr(row.architectures).replace("'", '"')
    return f'Row({architectures}, {row.kernel.upper()}, {row.dim}, {row.bits}, {kinds}, {tile}, "{row.source}"),'
