"""Declaring arrays by name."""

from __future__ import annotations

from onchip.model import arrays
from onchip.model.memory import TwoLevelMemory
from onchip.model.shape import Shape


def declare(memory: TwoLevelMemory, shape: Shape, *names: str, chunks: int = 1) -> None:
    """Declare arrays of the sizes in `onchip.model.arrays`, `chunks` times their rows each."""
    for name in names:
        rows, columns = chunks * arrays.rows(shape, name), arrays.columns(shape, name)
        memory.declare(name, rows, columns, arrays.element_bytes(shape, name))
