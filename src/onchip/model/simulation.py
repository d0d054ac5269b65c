"""Running the loop nests of the IO model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from onchip.model import arrays
from onchip.model.cost import Cost
from onchip.model.io import Algorithm
from onchip.model.memory import TwoLevelMemory
from onchip.model.shape import Blocks, Shape


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a run of a forward and a backward moved and computed, and with values what it gave.

    Attributes:
        results: out, d_query, d_key and d_value, (batch * heads, rows, columns); empty without values.
    """

    forward: Cost
    backward: Cost
    results: Mapping[str, Tensor]


def simulate(
    algorithm: Algorithm,
    shape: Shape,
    blocks: Blocks,
    *,
    backward_blocks: Blocks | None = None,
    values: Mapping[str, Tensor] | None = None,
    capacity: int | None = None,
) -> Simulation:
    """Run an algorithm's forward and backward in a memory of two levels.

    Args:
        backward_blocks: those of the backward, if others than the forward's.
        values: query, key, value and d_out, (batch * heads, rows, columns), of one dtype; without them only shapes are
            run.
        capacity: elements that the chip holds; without it only the peak is recorded.

    Raises:
        ValueError: values are missing or do not have the sizes of `shape`.
        ChipFull: the chip is too small for these blocks.
    """
    dtype = None if values is None else values["query"].dtype
    memory = TwoLevelMemory(shape.copies, capacity=capacity, dtype=dtype)
    for name in arrays.INPUTS:
        size = arrays.rows(shape, name), arrays.columns(shape, name)
        value = None if values is None else values.get(name)
        if values is not None and (value is None or value.shape != (shape.copies, *size)):
            got = "none" if value is None else tuple(value.shape)
            raise ValueError(f"{name} must be a tensor of shape {(shape.copies, *size)}, got {got}")
        memory.declare(name, *size, arrays.element_bytes(shape, name), value)
    algorithm.forward.run(memory, shape, blocks)
    forward = memory.take_cost()
    algorithm.backward.run(memory, shape, backward_blocks or blocks)
    backward = memory.take_cost()
    results = {name: memory.arrays[name].value for name in ("out", "d_query", "d_key", "d_value")}
    return Simulation(forward, backward, {name: value for name, value in results.items() if value is not None})


def random_values(shape: Shape, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Normally distributed inputs of a run with values."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(
            shape.copies, arrays.rows(shape, name), arrays.columns(shape, name), generator=generator, dtype=dtype
        )
        for name in arrays.INPUTS
    }
