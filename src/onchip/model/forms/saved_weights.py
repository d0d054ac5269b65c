"""One fused kernel a pass that still writes P. Source: `onchip.model.loops.saved_weights`."""

from __future__ import annotations

from onchip.model.arrays import traffic
from onchip.model.cost import Cost
from onchip.model.shape import Blocks, Shape


def forward(shape: Shape, blocks: Blocks) -> Cost:
    """Q, K, V read, O and P written."""
    n, m, d, dv = shape.length_q, shape.length_k, shape.dim, shape.dim_v
    r = min(blocks.rows, n)
    moved = traffic(
        shape,
        loads={"query": n, "key": m, "value": m},
        stores={"weights": n, "out": n},
        flops=2 * n * m * (d + dv),
        exponentials=n * m,
    )
    return Cost(moved, m * (d + dv) + r * (m + max(d, dv)))


def backward(shape: Shape, blocks: Blocks) -> Cost:
    """Q, K, V, dO and P read, the gradients written."""
    n, m, d, dv = shape.length_q, shape.length_k, shape.dim, shape.dim_v
    r = min(blocks.rows, n)
    moved = traffic(
        shape,
        loads={"query": n, "key": m, "value": m, "weights": n, "d_out": n},
        stores={"d_query": n, "d_key": m, "d_value": m},
        flops=4 * n * m * (d + dv),
    )
    return Cost(moved, 2 * m * (d + dv) + r * (m + max(m + dv, d)))
