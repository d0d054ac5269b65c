"""FlashAttention-2: queries in the outer loop of the forward, so that O is written once; keys in that of the backward.

Dao 2023, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", Algorithms 1 and 2.
Algorithm 2 also lists O among what the inner loop of the backward loads; nothing there uses it, and it is not loaded
here.
"""

from __future__ import annotations

import math

from torch import Tensor

from onchip import softmax
from onchip.model.loops import steps
from onchip.model.loops.arrays import declare
from onchip.model.memory import TwoLevelMemory
from onchip.model.shape import Blocks, Shape, cut


def forward(memory: TwoLevelMemory, shape: Shape, blocks: Blocks) -> None:
    """O and the log-sum-exp; the state of a block of rows stays on the chip."""
    declare(memory, shape, "out", "lse")
    for rows in cut(shape.length_q, blocks.rows):
        query = memory.load("query", rows)
        state = [memory.constant(len(rows), size, start) for size, start in _empty(shape)]
        for columns in cut(shape.length_k, blocks.columns):
            key, value = memory.load("key", columns), memory.load("value", columns)
            s = memory.product(query, key, transpose_right=True, scale=shape.scale)
            memory.change(
                state, _update, s, value, flops=2 * s.elements * value.columns, exponentials=s.elements + len(rows)
            )
            memory.free(key, value, s)
        out, lse, total = state
        memory.change((out, lse), _finish, total)
        memory.store("out", out, rows)
        memory.store("lse", lse, rows)
        memory.free(query, *state)


def _empty(shape: Shape) -> tuple[tuple[int, float], ...]:
    """Columns and first value of accumulator, maximum and total."""
    return (shape.dim_v, 0.0), (1, -math.inf), (1, 0.0)


def _update(accumulator: Tensor, m: Tensor, l: Tensor, s: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return softmax.update(softmax.State(accumulator, m, l), s, value)


def _finish(accumulator: Tensor, m: Tensor, l: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = softmax.finish(softmax.State(accumulator, m, l))
    return out, lse[..., None]


def backward(memory: TwoLevelMemory, shape: Shape, blocks: Blocks) -> None:
    """D first; then dK and dV of a block of keys grow on the chip, dQ in slow memory."""
    declare(memory, shape, "delta", "d_query", "d_key", "d_value")
    memory.store_constant("d_query", 0.0)
    for rows in cut(shape.length_q, blocks.rows):
        out, d_out = memory.load("out", rows), memory.load("d_out", rows)
        delta = memory.constant(len(rows), 1, 0.0)
        memory.change(delta, lambda _, out, d_out: steps.delta(out, d_out), out, d_out)
        memory.store("delta", delta, rows)
        memory.free(out, d_out, delta)
    for columns in cut(shape.length_k, blocks.columns):
        key, value = memory.load("key", columns), memory.load("value", columns)
        d_key = memory.constant(key.rows, key.columns, 0.0)
        d_value = memory.constant(value.rows, value.columns, 0.0)
        for rows in cut(shape.length_q, blocks.rows):
            query, d_out, d_query = (memory.load(name, rows) for name in ("query", "d_out", "d_query"))
            lse, delta = memory.load("lse", rows), memory.load("delta", rows)
            p = memory.product(query, key, transpose_right=True, scale=shape.scale)
            memory.change(p, steps.weights, lse, exponentials=p.elements)
            memory.add_product(d_value, p, d_out, transpose_left=True)
            ds = memory.product(d_out, value, transpose_right=True)
            memory.change(ds, steps.softmax_gradient, p, delta)
            memory.add_product(d_query, ds, key, scale=shape.scale)
            memory.store("d_query", d_query, rows)
            memory.add_product(d_key, ds, query, transpose_left=True, scale=shape.scale)
            memory.free(query, d_out, d_query, lse, delta, p, ds)
        memory.store("d_key", d_key, columns)
        memory.store("d_value", d_value, columns)
        memory.free(key, value, d_key, d_value)
