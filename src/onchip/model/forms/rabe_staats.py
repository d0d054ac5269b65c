"""Partial results of chunks of keys, merged at the end. Source: `onchip.model.loops.rabe_staats`.

With T chunks of keys a partial result is as large as the output and is written and read T times; keys and values are
read once for every block of rows.
"""

from __future__ import annotations

from onchip.model.arrays import traffic
from onchip.model.cost import Cost
from onchip.model.shape import Blocks, Shape, count


def forward(shape: Shape, blocks: Blocks) -> Cost:
    """Partial outputs, maxima and sums are written and read."""
    n, m, d, dv = shape.length_q, shape.length_k, shape.dim, shape.dim_v
    passes, chunks = count(n, blocks.rows), count(m, blocks.columns)
    partials = {"partial_out": n * chunks, "partial_maximum": n * chunks, "partial_total": n * chunks}
    moved = traffic(
        shape,
        loads={"query": n, "key": m * passes, "value": m * passes, **partials},
        stores={"out": n, "lse": n, **partials},
        flops=2 * n * m * (d + dv),
        exponentials=n * m + 2 * n * chunks,
    )
    r, c = min(blocks.rows, n), min(blocks.columns, m)
    summary = r * d + max(c * d + r * c, r * c + c * dv + r * dv + 2 * r)
    return Cost(moved, max(summary, 2 * r * (dv + 2)))


def backward(shape: Shape, blocks: Blocks) -> Cost:
    """Gradients of the partial results are written and read; dK and dV are read and written for every block of rows."""
    n, m, d, dv = shape.length_q, shape.length_k, shape.dim, shape.dim_v
    passes, chunks = count(n, blocks.rows), count(m, blocks.columns)
    partials = {"d_partial_out": n * chunks, "d_partial_total": n * chunks}
    keys = {"d_key": m * passes, "d_value": m * passes}
    moved = traffic(
        shape,
        loads={
            "query": n,
            "key": m * passes,
            "value": m * passes,
            "out": n,
            "d_out": n,
            "lse": n,
            "partial_maximum": n * chunks,
            **partials,
            **keys,
        },
        stores={"d_query": n, "d_key": m * (passes + 1), "d_value": m * (passes + 1), **partials},
        flops=2 * n * m * (3 * d + 2 * dv),
        exponentials=n * m + n * chunks,
    )
    r, c = min(blocks.rows, n), min(blocks.columns, m)
    merge = r * (2 * dv + 3)
    chunk = 2 * r * d + c * (d + dv) + 2 * r * c + r * (dv + 1)
    return Cost(moved, max(merge, chunk))
