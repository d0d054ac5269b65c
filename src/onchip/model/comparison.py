"""Every algorithm of the IO model on one shape and one chip."""

from __future__ import annotations

from dataclasses import dataclass

from onchip.model.cost import Cost
from onchip.model.io import (
    ALGORITHMS,
    TILED,
    Algorithm,
    Direction,
    Sizes,
    cost,
    largest_blocks,
    paper_blocks,
    spread,
)
from onchip.model.shape import Blocks, Shape

PAPER = "flash1, the paper's blocks"


@dataclass(frozen=True, slots=True)
class Row:
    """An algorithm on a shape and a chip.

    Attributes:
        sizes: its blocks; rows count only where the traffic depends on blocks.
        cost: None where no block fits.
        fits: whether the chip holds what the algorithm keeps there.
    """

    name: str
    algorithm: Algorithm
    sizes: Sizes
    cost: Cost | None
    fits: bool


def compare(
    shape: Shape,
    chip_elements: int,
    direction: Direction,
    *,
    blocks: Blocks | None = None,
    fraction: float | None = None,
) -> list[Row]:
    """A row for every algorithm, with the largest blocks that fit, and one for FlashAttention with its paper's blocks.

    Args:
        blocks: use these for every algorithm instead.
        fraction: add a block-sparse FlashAttention that visits this fraction of its blocks.
    """
    rows = []
    for name, algorithm in ALGORITHMS.items():
        sizes = largest_blocks(algorithm, shape, chip_elements) if blocks is None else Sizes(blocks, blocks)
        if blocks is None and name not in TILED:
            # what these move does not depend on blocks, so it is known where they do not fit as well
            sizes = Sizes(sizes.forward or Blocks(1, 1), sizes.backward or Blocks(1, 1))
        rows.append(_row(name, algorithm, shape, sizes, chip_elements, direction))
        if name != "flash1":
            continue
        if blocks is None:
            paper = paper_blocks(shape, chip_elements)
            rows.append(_row(PAPER, algorithm, shape, Sizes(paper, paper), chip_elements, direction))
        if fraction is not None:
            sparse = Sizes(*(one and spread(shape, one, fraction) for one in (sizes.forward, sizes.backward)))
            label = f"flash1, {fraction:.0%} of the blocks"
            rows.append(_row(label, algorithm, shape, sparse, chip_elements, direction))
    return rows


def _row(name: str, algorithm: Algorithm, shape: Shape, sizes: Sizes, chip: int, direction: Direction) -> Row:
    found = cost(algorithm, shape, sizes, direction)
    return Row(name, algorithm, sizes, found, found is not None and found.peak_elements <= chip)
