"""A memory of two levels: slow memory holds arrays by name, the chip holds a limited number of elements.

A loop nest is a Python function that moves blocks of rows between the two and computes on the chip. It runs in two
ways:

- with values: arrays are tensors, and the nest really computes;
- with shapes only: nothing is computed, and the same nest is counted in a fraction of the time.

Either way the memory counts what is moved, by name, and what is computed, and knows how much the chip held at most.
The model is that of Dao et al. 2022, FlashAttention, section 2.1: the chip's memory is explicitly managed and there is
no cache between it and slow memory.

Every block on the chip counts with its elements, whatever its type. What an operation needs while it runs (a row
maximum, a product before it is added) is thought to live in registers and does not count.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from onchip.model.cost import Cost
from onchip.model.traffic import Traffic


class ChipFull(MemoryError):
    """A loop nest wants more of the chip than there is."""


@dataclass(slots=True, eq=False)
class Block:
    """A matrix on the chip: (copies, rows, columns) when there are values."""

    rows: int
    columns: int
    value: Tensor | None = None

    @property
    def elements(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True, slots=True)
class Array:
    """A matrix in slow memory."""

    rows: int
    columns: int
    element_bytes: int
    value: Tensor | None


class TwoLevelMemory:
    """Slow memory, one chip, and the counters between them.

    `copies` heads run the same nest on data of their own, each on a chip of its own: bytes and operations count for all
    of them, the occupancy of the chip for one.

    Args:
        capacity: elements that the chip holds, or None to only record the peak.
        dtype: what arrays hold, or None to count shapes only.
    """

    def __init__(self, copies: int, *, capacity: int | None = None, dtype: torch.dtype | None = None) -> None:
        self.copies = copies
        self.capacity = capacity
        self.dtype = dtype
        self.arrays: dict[str, Array] = {}
        self.occupied = 0
        self.peak = 0
        self._loads: Counter[str] = Counter()
        self._stores: Counter[str] = Counter()
        self._flops = self._exponentials = 0

    def declare(self, name: str, rows: int, columns: int, element_bytes: int, value: Tensor | None = None) -> None:
        """Make room for an array in slow memory, which moves nothing.

        Without a value an array holds NaN, so that a nest which reads what nobody wrote gives itself away.
        """
        if self.dtype is not None and value is None:
            value = torch.full((self.copies, rows, columns), math.nan, dtype=self.dtype)
        self.arrays[name] = Array(rows, columns, element_bytes, value)

    def load(self, name: str, rows: range | None = None) -> Block:
        """Read rows of an array (all of them by default) into a new block."""
        array = self.arrays[name]
        rows = range(array.rows) if rows is None else rows
        block = self._occupy(len(rows), array.columns)
        self._loads[name] += self._size(array, rows)
        if array.value is not None:
            block.value = array.value[:, rows.start : rows.stop].clone()
        return block

    def store(self, name: str, block: Block, rows: range | None = None) -> None:
        """Write a block to rows of an array (all of them by default); the block stays on the chip."""
        array = self.arrays[name]
        rows = range(array.rows) if rows is None else rows
        assert (len(rows), array.columns) == (block.rows, block.columns), f"{name}: the block has another shape"
        self._stores[name] += self._size(array, rows)
        if array.value is not None:
            assert block.value is not None
            array.value[:, rows.start : rows.stop] = block.value

    def store_constant(self, name: str, value: float) -> None:
        """Write one number to every element of an array, which takes no room on the chip."""
        array = self.arrays[name]
        self._stores[name] += self._size(array, range(array.rows))
        if array.value is not None:
            array.value.fill_(value)

    def constant(self, rows: int, columns: int, value: float) -> Block:
        """A new block that holds one number everywhere."""
        block = self._occupy(rows, columns)
        if self.dtype is not None:
            block.value = torch.full((self.copies, rows, columns), value, dtype=self.dtype)
        return block

    def product(
        self,
        left: Block,
        right: Block,
        *,
        transpose_left: bool = False,
        transpose_right: bool = False,
        scale: float = 1.0,
    ) -> Block:
        """The scaled matrix product as a new block."""
        rows = left.columns if transpose_left else left.rows
        columns = right.rows if transpose_right else right.columns
        result = self.constant(rows, columns, 0.0)
        self.add_product(
            result, left, right, transpose_left=transpose_left, transpose_right=transpose_right, scale=scale
        )
        return result

    def add_product(
        self,
        target: Block,
        left: Block,
        right: Block,
        *,
        transpose_left: bool = False,
        transpose_right: bool = False,
        scale: float = 1.0,
    ) -> None:
        """Add a scaled matrix product to a block: 2 * rows * columns * inner operations."""
        inner = left.rows if transpose_left else left.columns
        assert inner == (right.columns if transpose_right else right.rows), "the inner extents differ"

        def add(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
            return total + scale * ((a.mT if transpose_left else a) @ (b.mT if transpose_right else b))

        self.change(target, add, left, right)
        self._flops += 2 * self.copies * target.elements * inner

    def change(
        self,
        targets: Block | Sequence[Block],
        function: Callable[..., Tensor | Sequence[Tensor]],
        *inputs: Block,
        flops: int = 0,
        exponentials: int = 0,
    ) -> None:
        """Give blocks new values in place.

        Args:
            function: takes the values of targets and inputs, in this order, and returns the new ones of the targets.
            flops, exponentials: what it computes, for one head; elementwise operations do not count as flops.
        """
        self._flops += self.copies * flops
        self._exponentials += self.copies * exponentials
        if self.dtype is None:
            return
        changed = [targets] if isinstance(targets, Block) else list(targets)
        result = function(*(block.value for block in (*changed, *inputs)))
        for block, value in zip(changed, [result] if isinstance(result, Tensor) else result, strict=True):
            assert value.shape == (self.copies, block.rows, block.columns), "a block keeps its shape"
            block.value = value

    def free(self, *blocks: Block) -> None:
        """Give the room of blocks back."""
        for block in blocks:
            self.occupied -= block.elements

    def take_cost(self) -> Cost:
        """What a pass cost: everything since the last call, or since the beginning. Nothing may be left on the chip."""
        assert self.occupied == 0, f"{self.occupied} elements were not freed"
        cost = Cost(Traffic(_moved(self._loads), _moved(self._stores), self._flops, self._exponentials), self.peak)
        self._loads, self._stores = Counter(), Counter()
        self._flops = self._exponentials = self.peak = 0
        return cost

    def _size(self, array: Array, rows: range) -> int:
        assert 0 <= rows.start <= rows.stop <= array.rows, f"rows {rows} of {array.rows}"
        return self.copies * len(rows) * array.columns * array.element_bytes

    def _occupy(self, rows: int, columns: int) -> Block:
        block = Block(rows, columns)
        self.occupied += block.elements
        if self.capacity is not None and self.occupied > self.capacity:
            raise ChipFull(f"the loop nest needs {self.occupied} elements on a chip of {self.capacity}")
        self.peak = max(self.peak, self.occupied)
        return block


def _moved(counter: Mapping[str, int]) -> dict[str, int]:
    """Without the tensors of which nothing was moved."""
    return {name: size for name, size in counter.items() if size}
