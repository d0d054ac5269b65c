"""One fused kernel a pass that still leaves P in slow memory: the scheme of NVIDIA's Apex FMHA.

The scores of a block of rows live on the chip; only P is written, and the backward reads it. All keys and values, and
in the backward their gradients, stay on the chip, so that everything else is moved once. (After the description in Dao
et al. 2022, FlashAttention, appendix E.4; the original takes at most 512 keys.)
"""

from __future__ import annotations

from onchip.model.loops import steps
from onchip.model.loops.arrays import declare
from onchip.model.memory import TwoLevelMemory
from onchip.model.shape import Blocks, Shape, cut


def forward(memory: TwoLevelMemory, shape: Shape, blocks: Blocks) -> None:
    """O and P, row block by row block."""
    declare(memory, shape, "weights", "out")
    key, value = memory.load("key"), memory.load("value")
    for rows in cut(shape.length_q, blocks.rows):
        query = memory.load("query", rows)
        s = memory.product(query, key, transpose_right=True, scale=shape.scale)
        memory.free(query)
        memory.change(s, steps.softmax, exponentials=s.elements)
        memory.store("weights", s, rows)
        out = memory.product(s, value)
        memory.store("out", out, rows)
        memory.free(s, out)
    memory.free(key, value)


def backward(memory: TwoLevelMemory, shape: Shape, blocks: Blocks) -> None:
    """dQ row block by row block; dK and dV grow on the chip."""
    declare(memory, shape, "d_query", "d_key", "d_value")
    key, value = memory.load("key"), memory.load("value")
    d_key = memory.constant(key.rows, key.columns, 0.0)
    d_value = memory.constant(value.rows, value.columns, 0.0)
    for rows in cut(shape.length_q, blocks.rows):
        p, d_out = memory.load("weights", rows), memory.load("d_out", rows)
        memory.add_product(d_value, p, d_out, transpose_left=True)
        ds = memory.product(d_out, value, transpose_right=True)
        memory.change(ds, steps.softmax_gradient_of_rows, p)
        memory.free(p, d_out)
        query = memory.load("query", rows)
        memory.add_product(d_key, ds, query, transpose_left=True, scale=shape.scale)
        memory.free(query)
        d_query = memory.product(ds, key, scale=shape.scale)
        memory.store("d_query", d_query, rows)
        memory.free(ds, d_query)
    memory.store("d_key", d_key)
    memory.store("d_value", d_value)
    memory.free(key, value, d_key, d_value)
