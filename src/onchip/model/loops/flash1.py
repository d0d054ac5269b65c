"""FlashAttention: keys and values in the outer loop, so O, its statistics and dQ are read and written again and again.

Dao et al. 2022, "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness", Algorithm 1 (forward)
and Algorithm 4 (appendix B.4, backward); with `blocks.visited`, Algorithm 5 (appendix D.1), which skips the other
blocks.

Algorithm 4 also clears dK and dV in slow memory, which it overwrites in the end: not done here.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from onchip.model.loops import steps
from onchip.model.loops.arrays import declare
from onchip.model.memory import TwoLevelMemory
from onchip.model.shape import Blocks, Shape, cut


def forward(memory: TwoLevelMemory, shape: Shape, blocks: Blocks) -> None:
    """O with the maximum and the sum of exponentials of each row."""
    declare(memory, shape, "out", "maximum", "total")
    for name, start in (("out", 0.0), ("maximum", -math.inf), ("total", 0.0)):
        memory.store_constant(name, start)
    for j, columns in enumerate(cut(shape.length_k, blocks.columns)):
        key, value = memory.load("key", columns), memory.load("value", columns)
        for i, rows in enumerate(cut(shape.length_q, blocks.rows)):
            if not blocks.visits(i, j):
                continue
            query = memory.load("query", rows)
            state = [memory.load(name, rows) for name in ("out", "maximum", "total")]
            s = memory.product(query, key, transpose_right=True, scale=shape.scale)
            memory.change(
                state,
                _update,
                s,
                value,
                flops=2 * s.elements * value.columns,
                exponentials=s.elements + 2 * len(rows),
            )
            for name, block in zip(("out", "maximum", "total"), state, strict=True):
                memory.store(name, block, rows)
            memory.free(query, *state, s)
        memory.free(key, value)


def _update(out: Tensor, m: Tensor, l: Tensor, s: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Lines 10 to 13 of Algorithm 1: O is normalised after every block."""
    m_block = s.amax(-1, keepdim=True)
    p = torch.exp(s - m_block)
    m_new = torch.maximum(m, m_block)
    before, now = torch.exp(m - m_new), torch.exp(m_block - m_new)
    l_new = before * l + now * p.sum(-1, keepdim=True)
    return (l * before * out + now * (p @ value)) / l_new, m_new, l_new


def backward(memory: TwoLevelMemory, shape: Shape, blocks: Blocks) -> None:
    """dK and dV of a block of keys grow on the chip, dQ in slow memory."""
    declare(memory, shape, "d_query", "d_key", "d_value")
    memory.store_constant("d_query", 0.0)
    for j, columns in enumerate(cut(shape.length_k, blocks.columns)):
        key, value = memory.load("key", columns), memory.load("value", columns)
        d_key = memory.constant(key.rows, key.columns, 0.0)
        d_value = memory.constant(value.rows, value.columns, 0.0)
        for i, rows in enumerate(cut(shape.length_q, blocks.rows)):
            if not blocks.visits(i, j):
                continue
            query, out, d_out, d_query = (memory.load(name, rows) for name in ("query", "out", "d_out", "d_query"))
            maximum, total = memory.load("maximum", rows), memory.load("total", rows)
            p = memory.product(query, key, transpose_right=True, scale=shape.scale)
            memory.change(p, lambda s, m, l: torch.exp(s - m) / l, maximum, total, exponentials=p.elements)
            memory.add_product(d_value, p, d_out, transpose_left=True)
            ds = memory.product(d_out, value, transpose_right=True)
            delta = memory.constant(len(rows), 1, 0.0)
            memory.change(delta, lambda _, out, d_out: steps.delta(out, d_out), out, d_out)
            memory.change(ds, steps.softmax_gradient, p, delta)
            memory.add_product(d_query, ds, key, scale=shape.scale)
            memory.store("d_query", d_query, rows)
            memory.add_product(d_key, ds, query, transpose_left=True, scale=shape.scale)
            memory.free(query, out, d_out, d_query, maximum, total, p, ds, delta)
        memory.store("d_key", d_key, columns)
        memory.store("d_value", d_value, columns)
        memory.free(key, value, d_key, d_value)
