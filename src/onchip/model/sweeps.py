"""How what the algorithms move changes over the chip's memory, the blocks and the length."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from onchip.model.comparison import PAPER, compare
from onchip.model.io import (
    ALGORITHMS,
    TILED,
    Algorithm,
    Direction,
    Sizes,
    cost,
    largest_blocks,
    paper_blocks,
    unavoidable,
)
from onchip.model.shape import Blocks, Shape

BOUND = "inputs and results once"
THEOREM = "N^2 d^2 / M elements"


@dataclass(frozen=True, slots=True)
class Point:
    """One value of a sweep. `peak_elements` is None for a bound, `moved_bytes` where no block fits."""

    x: int
    moved_bytes: int | None
    peak_elements: int | None = None


@dataclass(frozen=True, slots=True)
class Sweep:
    """Bytes moved over one quantity.

    Attributes:
        over: what x is. lines: name -> points with the same x.
        chips: elements that the chip holds at each x.
    """

    over: str
    lines: dict[str, list[Point]]
    chips: list[int]


def over_memory(shape: Shape, direction: Direction, points: int = 25) -> Sweep:
    """M from d to N d elements, the range of FlashAttention's Theorem 2 and Proposition 3, in equal ratios.

    Raises:
        ValueError: a length is 0.
    """
    length = max(shape.length_q, shape.length_k)
    sizes = _ratios(shape.dim, length * shape.dim, points)
    flash1, flash2 = ALGORITHMS["flash1"], ALGORITHMS["flash2"]

    def paper(chip: int) -> Sizes:
        blocks = paper_blocks(shape, chip)
        return Sizes(blocks, blocks)

    squares = shape.copies * shape.length_q * shape.length_k * shape.dim**2 * shape.element_bytes
    return Sweep(
        "elements on the chip",
        {
            "textbook": _line(
                sizes, ALGORITHMS["textbook"], shape, direction, lambda _: Sizes(Blocks(1, 1), Blocks(1, 1))
            ),
            PAPER: _line(sizes, flash1, shape, direction, paper),
            "flash1": _line(sizes, flash1, shape, direction, lambda chip: largest_blocks(flash1, shape, chip)),
            "flash2": _line(sizes, flash2, shape, direction, lambda chip: largest_blocks(flash2, shape, chip)),
            THEOREM: [Point(chip, squares // chip) for chip in sizes],
            BOUND: [Point(chip, unavoidable(shape, direction)) for chip in sizes],
        },
        sizes,
    )


def over_block(shape: Shape, chip_elements: int, direction: Direction) -> Sweep:
    """A side of the blocks from 16 to N in powers of two; the other is at most d, but as long for rabe-staats.

    Raises:
        ValueError: a length is 0.
    """
    length = max(shape.length_q, shape.length_k)
    sizes = _doublings(min(16, length), length)

    def sized(algorithm: Algorithm) -> Callable[[int], Sizes]:
        return lambda size: Sizes(algorithm.forward.sized(size, shape.dim), algorithm.backward.sized(size, shape.dim))

    lines = {name: _line(sizes, ALGORITHMS[name], shape, direction, sized(ALGORITHMS[name])) for name in TILED}
    lines[BOUND] = [Point(size, unavoidable(shape, direction)) for size in sizes]
    return Sweep("rows or columns of a block", lines, [chip_elements] * len(sizes))


def over_length(shape: Shape, chip_elements: int, direction: Direction, *, longest: int = 2**17) -> Sweep:
    """Both lengths from 128 to `longest` in powers of two, with the largest blocks that fit on the chip."""
    lengths = _doublings(128, longest)
    lines: dict[str, list[Point]] = {}
    for length in lengths:
        one = dataclasses.replace(shape, length_q=length, length_k=length)
        for row in compare(one, chip_elements, direction):
            moved = None if row.cost is None else row.cost.traffic.total_bytes
            peak = None if row.cost is None else row.cost.peak_elements
            lines.setdefault(row.name, []).append(Point(length, moved, peak))
        lines.setdefault(BOUND, []).append(Point(length, unavoidable(one, direction)))
    return Sweep("tokens", lines, [chip_elements] * len(lengths))


def _line(
    xs: Iterable[int], algorithm: Algorithm, shape: Shape, direction: Direction, sizes: Callable[[int], Sizes]
) -> list[Point]:
    points = []
    for x in xs:
        found = cost(algorithm, shape, sizes(x), direction)
        points.append(Point(x, None) if found is None else Point(x, found.traffic.total_bytes, found.peak_elements))
    return points


def _ratios(first: int, last: int, points: int) -> list[int]:
    if last < first:
        raise ValueError("a sweep over the chip needs lengths of at least 1")
    return sorted({round(first * (last / first) ** (step / (points - 1))) for step in range(points)})


def _doublings(first: int, last: int) -> list[int]:
    if first < 1:
        raise ValueError("a sweep over blocks needs lengths of at least 1")
    sizes = [first]
    while sizes[-1] * 2 <= last:
        sizes.append(sizes[-1] * 2)
    return sizes if sizes[-1] == last else [*sizes, last]
