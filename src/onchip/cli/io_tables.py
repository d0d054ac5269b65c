"""`onchip io` and `onchip io sweep` on the terminal."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from onchip.bench.io_plots import plot_sweep
from onchip.model import figure2
from onchip.model.comparison import Row, compare
from onchip.model.cost import Cost
from onchip.model.io import TILED, Direction, unavoidable
from onchip.model.shape import Blocks, Shape
from onchip.model.sweeps import Sweep, over_block, over_length, over_memory

PASSES = {"forward": "forward", "backward": "backward", "both": "forward and backward"}


def run_compare(
    *,
    shape: Shape,
    chip_elements: int,
    blocks: Blocks | None,
    fraction: float | None,
    direction: Direction,
    as_json: bool,
) -> int:
    """Print what every algorithm moves on a shape."""
    rows = compare(shape, chip_elements, direction, blocks=blocks, fraction=fraction)
    notes = _notes_on_figure_2(shape, chip_elements, direction, rows) if blocks is None else []
    if as_json:
        facts = {
            "shape": dataclasses.asdict(shape),
            "chip_elements": chip_elements,
            "direction": direction,
            "least_bytes": unavoidable(shape, direction),
            "rows": [_facts(row, direction) for row in rows],
            "notes": notes,
        }
        print(json.dumps(facts, indent=1))
        return 0
    console = Console()
    console.print(f"{_words(shape, direction)}, a chip of {chip_elements} elements:", highlight=False)
    console.print(_table(rows, direction))
    for note in [_legend(shape, direction), *notes]:
        console.print(note, highlight=False, markup=False)
    return 0


def _facts(row: Row, direction: Direction) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "name": row.name,
        "summary": row.algorithm.summary,
        "source": row.algorithm.source,
        "forward_blocks": _block_facts(row.sizes.forward),
        "backward_blocks": _block_facts(row.sizes.backward),
        "fits": row.fits,
    }
    return facts | (cost_facts(row.cost) if row.cost is not None else {})


def cost_facts(cost: Cost) -> dict[str, Any]:
    """A cost as plain values."""
    return {
        "read_bytes": cost.traffic.read_bytes,
        "written_bytes": cost.traffic.written_bytes,
        "total_bytes": cost.traffic.total_bytes,
        "flops": cost.traffic.flops,
        "exponentials": cost.traffic.exponentials,
        "peak_elements": cost.peak_elements,
        "loads": dict(cost.traffic.loads),
        "stores": dict(cost.traffic.stores),
    }


def _block_facts(blocks: Blocks | None) -> list[int] | None:
    return None if blocks is None else [blocks.rows, blocks.columns]


def _words(shape: Shape, direction: Direction) -> str:
    length = str(shape.length_q) if shape.length_q == shape.length_k else f"{shape.length_q} x {shape.length_k}"
    dim = str(shape.dim) if shape.dim == shape.dim_v else f"{shape.dim} and {shape.dim_v}"
    words = f"{PASSES[direction]}, batch {shape.batch}, {shape.heads} heads of {dim}, {length} tokens"
    return f"{words[0].upper()}{words[1:]}, {shape.element_bytes} bytes an element"


def _table(rows: list[Row], direction: Direction) -> Table:
    table = Table()
    table.add_column("algorithm")
    sides = [side for side in ("forward", "backward") if direction in (side, "both")]
    for side in sides:
        table.add_column(f"blocks {side}", justify="right")
    for name in ("read GB", "written GB", "moved GB", "TFLOP", "exp (10^9)", "on chip"):
        table.add_column(name, justify="right")
    for row in rows:
        cells = [_block_words(row, getattr(row.sizes, side)) for side in sides]
        if row.cost is None:
            table.add_row(row.name, *cells, *["-"] * 5, "no block fits")
            continue
        traffic = row.cost.traffic
        table.add_row(
            row.name,
            *cells,
            f"{traffic.read_bytes / 1e9:.2f}",
            f"{traffic.written_bytes / 1e9:.2f}",
            f"{traffic.total_bytes / 1e9:.2f}",
            f"{traffic.flops / 1e12:.3f}",
            f"{traffic.exponentials / 1e9:.2f}",
            f"{row.cost.peak_elements}{'' if row.fits else ' (too much)'}",
        )
    return table


def _block_words(row: Row, blocks: Blocks | None) -> str:
    if blocks is None:
        return "-"
    tiled = row.algorithm.name in TILED
    return f"{blocks.rows} x {blocks.columns}" if tiled else f"{blocks.rows} rows"


def _legend(shape: Shape, direction: Direction) -> str:
    return (
        "Moved is what the algorithm asks of slow memory when nothing is cached in between. Inputs read once and "
        f"results written once are {unavoidable(shape, direction) / 1e9:.2f} GB; one matrix of scores is "
        f"{shape.matrix_bytes / 1e9:.3f} GB. On chip is the most that one head holds, in elements. Where blocks are "
        "given in rows only, each step is taken to move each operand once, which needs that much on the chip or in a "
        "cache."
    )


def _notes_on_figure_2(shape: Shape, chip_elements: int, direction: Direction, rows: list[Row]) -> list[str]:
    chip = figure2.CHIP_BYTES // shape.element_bytes
    if (shape, chip_elements, direction) != (figure2.SHAPE, chip, "both"):
        return []
    costs = {row.name: row.cost.traffic for row in rows if row.cost is not None}
    kept, again = costs["eager"].flops, costs["flash1"].flops
    standard, flash = figure2.heads_of(figure2.STANDARD, 6), figure2.heads_of(figure2.FLASH, 7)
    return [
        "This is the shape of Figure 2 in Dao et al. 2022. Its bytes follow from it: it prints "
        f"{figure2.STANDARD.gigabytes} GB for standard attention and {figure2.FLASH.gigabytes} GB for FlashAttention, "
        'which are "eager" and "flash1, the paper\'s blocks" above. (In the backward these blocks hold more than the '
        "chip has.)",
        f"Its operations do not: it prints {figure2.STANDARD.gflops} and {figure2.FLASH.gflops} GFLOP, and the shape "
        f"needs {kept / 1e9:.1f} and {again / 1e9:.1f}. At this length and head dim the printed counts are those of "
        f"{standard[0]:.1f} to {standard[1]:.1f} and of {flash[0]:.1f} to {flash[1]:.1f} heads, so no number of heads "
        "fits both.",
    ]


def run_sweeps(
    *,
    shape: Shape,
    chip_elements: int,
    direction: Direction,
    over: list[str],
    output: Path | None,
    as_json: bool,
) -> int:
    """Print each sweep and draw it if there is an output; the exit status is 1 if a picture could not be drawn."""
    sweeps: dict[str, Callable[[], Sweep]] = {
        "memory": lambda: over_memory(shape, direction),
        "block": lambda: over_block(shape, chip_elements, direction),
        "length": lambda: over_length(shape, chip_elements, direction),
    }
    made = {name: sweeps[name]() for name in over}
    console = Console()
    if as_json:
        facts = {name: dataclasses.asdict(sweep) for name, sweep in made.items()}
        print(json.dumps({"shape": dataclasses.asdict(shape), "direction": direction, "sweeps": facts}, indent=1))
    for name, sweep in made.items():
        words = _sweep_words(name, shape, chip_elements, direction)
        if not as_json:
            console.print(f"{words}; moved GB:", highlight=False)
            console.print(_sweep_table(sweep))
            console.print(SWEEP_NOTES[name], highlight=False, markup=False)
        if output is not None:
            path = output if output.suffix else output / f"{name}.png"
            if not _draw(sweep, words, path):
                return 1
            Console(stderr=as_json).print(f"Picture: {path}", highlight=False, markup=False)
    return 0


SWEEP_NOTES = {
    "memory": (
        "( ): the nest holds more than the chip has. -: not even blocks of one row and one column fit. Proposition 3 "
        "of Dao et al. 2022: no exact algorithm moves o(N^2 d^2 / M) elements for all M from d to N d. It says nothing "
        "of one given M, nor of constants, and where M is N d it asks for no more than inputs and results."
    ),
    "block": (
        "x is the rows of rabe-staats and of flash2's forward, and the columns of flash1 and of flash2's backward; the "
        "other side is as long for rabe-staats and at most the head dim elsewhere. ( ): the chip does not hold them."
    ),
    "length": "( ): the algorithm holds more than the chip has. -: no block fits.",
}


def _sweep_words(name: str, shape: Shape, chip_elements: int, direction: Direction) -> str:
    if name == "memory":
        return _words(shape, direction)
    if name == "block":
        return f"{_words(shape, direction)}, a chip of {chip_elements} elements"
    dim = str(shape.dim) if shape.dim == shape.dim_v else f"{shape.dim} and {shape.dim_v}"
    words = (
        f"{PASSES[direction]}, batch {shape.batch}, {shape.heads} heads of {dim}, a chip of {chip_elements} elements"
    )
    return f"{words[0].upper()}{words[1:]}, {shape.element_bytes} bytes an element"


def _sweep_table(sweep: Sweep) -> Table:
    table = Table()
    table.add_column(sweep.over, justify="right")
    for name in sweep.lines:
        table.add_column(name, justify="right")
    for place, points in enumerate(zip(*sweep.lines.values(), strict=True)):
        cells = []
        for point in points:
            full = (point.peak_elements or 0) > sweep.chips[place]
            text = "-" if point.moved_bytes is None else f"{point.moved_bytes / 1e9:,.2f}"
            cells.append(f"({text})" if full else text)
        table.add_row(str(points[0].x), *cells)
    return table


def _draw(sweep: Sweep, words: str, path: Path) -> bool:
    try:
        plot_sweep(sweep, f"onchip io sweep: {words[0].lower()}{words[1:]}", path)
    except ModuleNotFoundError:
        Console(stderr=True).print("No picture: it needs matplotlib: pip install 'onchip[bench]'", markup=False)
        return False
    except OSError as error:
        raise typer.BadParameter(f"--output: {error}") from None
    return True
