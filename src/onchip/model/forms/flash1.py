"""FlashAttention, dense and block-sparse. Source: `onchip.model.loops.flash1`.

For every block of keys, Q, O, the statistics and in the backward dO and dQ of the visited blocks of rows are moved
again. With
T_c blocks of keys and all blocks visited that is T_c times n rows of each: Theta(n m d / c), which with c = M / 4d is
Theta(n m d^2 / M) (Dao et al. 2022, Theorem 2; backward: Theorem 5; block-sparse, a fraction s of it: Proposition 4).
"""

from __future__ import annotations

from onchip.model.arrays import traffic
from onchip.model.cost import Cost
from onchip.model.shape import Blocks, Shape, count


def forward(shape: Shape, blocks: Blocks) -> Cost:
    """K and V read once; Q, O and the statistics of each visited block read, O and the statistics written."""
    n, m, d, dv = shape.length_q, shape.length_k, shape.dim, shape.dim_v
    moved_rows, pairs = _visits(shape, blocks)
    moved = traffic(
        shape,
        loads={
            "key": m,
            "value": m,
            "query": moved_rows,
            "out": moved_rows,
            "maximum": moved_rows,
            "total": moved_rows,
        },
        stores={"out": n + moved_rows, "maximum": n + moved_rows, "total": n + moved_rows},
        flops=2 * pairs * (d + dv),
        exponentials=pairs + 2 * moved_rows,
    )
    r, c = min(blocks.rows, n), min(blocks.columns, m)
    return Cost(moved, c * (d + dv) + r * (d + dv + 2) + r * c)


def backward(shape: Shape, blocks: Blocks) -> Cost:
    """K and V read, dK and dV written once; Q, O, dO, dQ and the statistics of visited blocks read, dQ written."""
    n, m, d, dv = shape.length_q, shape.length_k, shape.dim, shape.dim_v
    moved_rows, pairs = _visits(shape, blocks)
    rows = dict.fromkeys(("query", "out", "d_out", "d_query", "maximum", "total"), moved_rows)
    moved = traffic(
        shape,
        loads={"key": m, "value": m, **rows},
        stores={"d_query": n + moved_rows, "d_key": m, "d_value": m},
        flops=2 * pairs * (3 * d + 2 * dv),
        exponentials=pairs,
    )
    r, c = min(blocks.rows, n), min(blocks.columns, m)
    return Cost(moved, 2 * c * (d + dv) + r * (2 * d + 2 * dv + 3) + 2 * r * c)


def _visits(shape: Shape, blocks: Blocks) -> tuple[int, int]:
    """Rows over all visited blocks, and pairs of (query, key) in them."""
    n, m = shape.length_q, shape.length_k
    if blocks.visited is None:
        return n * count(m, blocks.columns), n * m
    heights = [
        (min(blocks.rows, n - i * blocks.rows), min(blocks.columns, m - j * blocks.columns)) for i, j in blocks.visited
    ]
    return sum(height for height, _ in heights), sum(height * width for height, width in heights)
