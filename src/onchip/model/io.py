"""The IO model: the attention algorithms that it knows, as loop nests and in closed form, and blocks for a chip.

    cost = ALGORITHMS["flash2"].forward.cost(shape, blocks)         # a Cost: bytes by tensor, operations, room on the
    chip simulation = simulate(ALGORITHMS["flash2"], shape, blocks)      # in simulation.py: the same by running the
    loop nest

The model has two levels (`onchip.model.memory`) and counts what a program asks of slow memory. Caches between the two
serve part of that on a real device; `docs/io.md` says what follows from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from onchip.model import forms, loops
from onchip.model.cost import Cost
from onchip.model.memory import TwoLevelMemory
from onchip.model.shape import Blocks, Shape, count
from onchip.model.traffic import total

Direction = Literal["forward", "backward", "both"]


@dataclass(frozen=True, slots=True)
class Pass:
    """The forward or the backward of an algorithm.

    Attributes:
        run: the loop nest. cost: its closed form.
        sized: blocks that grow with a size, in the proportions of the algorithm; arguments are the size and the head
            dim.
    """

    run: Callable[[TwoLevelMemory, Shape, Blocks], None]
    cost: Callable[[Shape, Blocks], Cost]
    sized: Callable[[int, int], Blocks]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One way to compute attention.

    Attributes:
        shares_blocks: the backward reads partial results that belong to the forward's blocks.
    """

    name: str
    summary: str
    source: str
    forward: Pass
    backward: Pass
    shares_blocks: bool = False


def _rows_only(size: int, dim: int) -> Blocks:
    return Blocks(size, 1)


def _square(size: int, dim: int) -> Blocks:
    return Blocks(size, size)


def _long_rows(size: int, dim: int) -> Blocks:
    return Blocks(size, min(size, dim))


def _long_columns(size: int, dim: int) -> Blocks:
    return Blocks(min(size, dim), size)


_ALGORITHMS = (
    Algorithm(
        "textbook",
        "every step a kernel; S, P, dP and dS in slow memory",
        "Dao et al. 2022, Algorithms 0 and 3",
        Pass(loops.standard.forward, forms.standard.forward, _rows_only),
        Pass(loops.standard.backward, forms.standard.backward, _rows_only),
    ),
    Algorithm(
        "eager",
        "the kernels that PyTorch runs eagerly on a GPU, scaling apart",
        "PyTorch, aten/native/cuda/SoftMax.cu",
        Pass(loops.standard.eager_forward, forms.standard.eager_forward, _rows_only),
        Pass(loops.standard.eager_backward, forms.standard.eager_backward, _rows_only),
    ),
    Algorithm(
        "saved-weights",
        "one kernel a pass; P in slow memory, keys and values on the chip",
        "Apex FMHA, after Dao et al. 2022, appendix E.4",
        Pass(loops.saved_weights.forward, forms.saved_weights.forward, _rows_only),
        Pass(loops.saved_weights.backward, forms.saved_weights.backward, _rows_only),
    ),
    Algorithm(
        "rabe-staats",
        "partial results of chunks of keys, merged at the end",
        "Rabe and Staats 2021, figure 1",
        Pass(loops.rabe_staats.forward, forms.rabe_staats.forward, _square),
        Pass(loops.rabe_staats.backward, forms.rabe_staats.backward, _square),
        shares_blocks=True,
    ),
    Algorithm(
        "flash1",
        "keys outside: O and dQ are read and written for every block of keys",
        "Dao et al. 2022, Algorithms 1, 4 and 5",
        Pass(loops.flash1.forward, forms.flash1.forward, _long_columns),
        Pass(loops.flash1.backward, forms.flash1.backward, _long_columns),
    ),
    Algorithm(
        "flash2",
        "queries outside in the forward, keys in the backward",
        "Dao 2023, Algorithms 1 and 2",
        Pass(loops.flash2.forward, forms.flash2.forward, _long_rows),
        Pass(loops.flash2.backward, forms.flash2.backward, _long_columns),
    ),
)
ALGORITHMS = {algorithm.name: algorithm for algorithm in _ALGORITHMS}
"""By name, in the order of their history."""

TILED = ("rabe-staats", "flash1", "flash2")
"""The algorithms whose traffic depends on the blocks."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Blocks of the forward and of the backward; None where the chip is too small for any."""

    forward: Blocks | None
    backward: Blocks | None


def cost(algorithm: Algorithm, shape: Shape, sizes: Sizes, direction: Direction) -> Cost | None:
    """The cost of one direction or of both together; None where blocks are missing."""
    parts = []
    for name, one, blocks in (
        ("forward", algorithm.forward, sizes.forward),
        ("backward", algorithm.backward, sizes.backward),
    ):
        if direction in (name, "both"):
            if blocks is None:
                return None
            parts.append(one.cost(shape, blocks))
    return Cost(total(part.traffic for part in parts), max(part.peak_elements for part in parts))


def paper_blocks(shape: Shape, chip_elements: int) -> Blocks:
    """FlashAttention's block sizes for a chip of M elements: columns = ceil(M / 4d), rows = min(columns, d).

    With them four input-sized blocks take M elements where 4d divides M, and the block of scores comes on top: the
    forward needs up to 1.25 M and the statistics, the backward, which holds eight such blocks, about twice as much. The
    paper's argument is about orders of growth; `largest_blocks` fits.

    Source: Dao et al. 2022, Algorithm 1, line 1.

    Raises:
        ValueError: the chip has no room at all.
    """
    if chip_elements < 1:
        raise ValueError(f"a chip holds at least one element, got {chip_elements}")
    columns = count(chip_elements, 4 * shape.dim)
    return Blocks(min(columns, shape.dim), columns)


def largest_blocks(algorithm: Algorithm, shape: Shape, chip_elements: int) -> Sizes:
    """The largest blocks, in the algorithm's proportions and not beyond the lengths, whose nest fits on the chip."""
    forward = _largest(algorithm.forward, shape, chip_elements)
    backward = _largest(algorithm.backward, shape, chip_elements)
    if algorithm.shares_blocks:
        if forward is None or backward is None:
            return Sizes(None, None)
        smaller = min(forward, backward, key=lambda blocks: blocks.rows)
        return Sizes(smaller, smaller)
    return Sizes(forward, backward)


def _largest(direction: Pass, shape: Shape, chip_elements: int) -> Blocks | None:
    def fits(size: int) -> bool:
        return direction.cost(shape, direction.sized(size, shape.dim)).peak_elements <= chip_elements

    if not fits(1):
        return None
    low, high = 1, max(shape.length_q, shape.length_k, 1)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return direction.sized(low, shape.dim)


def spread(shape: Shape, blocks: Blocks, fraction: float) -> Blocks:
    """The same blocks with a fraction of them visited, spread evenly over the rows and columns.

    Raises:
        ValueError: `fraction` is not between 0 and 1.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"a fraction lies between 0 and 1, got {fraction}")
    rows, columns = count(shape.length_q, blocks.rows), count(shape.length_k, blocks.columns)
    visited = frozenset(
        divmod(place, columns) for place in range(rows * columns) if int((place + 1) * fraction) > int(place * fraction)
    )
    return Blocks(blocks.rows, blocks.columns, visited)


def unavoidable(shape: Shape, direction: Direction) -> int:
    """Bytes that any algorithm moves: inputs read once and results written once, without statistics.

    The forward reads query, key and value and writes out; the backward reads query, key, value and the gradient of out
    and writes three gradients.
    """
    wide = shape.dim + shape.dim_v
    forward = (shape.length_q + shape.length_k) * wide
    backward = shape.length_q * (wide + shape.dim) + 2 * shape.length_k * wide
    elements = {"forward": forward, "backward": backward, "both": forward + backward}[direction]
    return shape.copies * elements * shape.element_bytes
