"""FlashAttention-2. Source: `onchip.model.loops.flash2`.

Forward: with T_r blocks of queries, K and V are read T_r times and everything else is moved once, so the rows of a
block count where FlashAttention's columns did, and no output is moved twice. Backward: as FlashAttention's, without O.
"""

from __future__ import annotations

from onchip.model.arrays import traffic
from onchip.model.cost import Cost
from onchip.model.shape import Blocks, Shape, count


def forward(shape: Shape, blocks: Blocks) -> Cost:
    """Q read, O and the LSE written once; K and V read for every block of rows."""
    n, m, d, dv = shape.length_q, shape.length_k, shape.dim, shape.dim_v
    passes = count(n, blocks.rows)
    moved = traffic(
        shape,
        loads={"query": n, "key": m * passes, "value": m * passes},
        stores={"out": n, "lse": n},
        flops=2 * n * m * (d + dv),
        exponentials=n * m + n * count(m, blocks.columns),
    )
    r, c = min(blocks.rows, n), min(blocks.columns, m)
    return Cost(moved, r * (d + dv + 2) + c * (d + dv) + r * c)


def backward(shape: Shape, blocks: Blocks) -> Cost:
    """K and V read and dK and dV written once; Q, dO, dQ, LSE and D read and dQ written for every block of keys."""
    n, m, d, dv = shape.length_q, shape.length_k, shape.dim, shape.dim_v
    passes = count(m, blocks.columns)
    rows = dict.fromkeys(("query", "d_query", "lse", "delta"), n * passes)
    moved = traffic(
        shape,
        loads={"key": m, "value": m, "out": n, "d_out": n * (passes + 1), **rows},
        stores={"delta": n, "d_query": n * (passes + 1), "d_key": m, "d_value": m},
        flops=2 * n * m * (3 * d + 2 * dv),
        exponentials=n * m,
    )
    r, c = min(blocks.rows, n), min(blocks.columns, m)
    return Cost(moved, max(2 * c * (d + dv) + r * (2 * d + dv + 2) + 2 * r * c, r * (2 * dv + 1)))
