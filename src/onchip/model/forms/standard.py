"""Standard attention. Sources, and what each step reads and writes: `onchip.model.loops.standard`.

A move is one reading or writing of a whole array. Of matrices (n, m) and of arrays as large as an input there are

    textbook   4 and 4 moves forward,  7 and 8 backward
    eager      6 and 4 moves forward, 12 and 8 backward
"""

from __future__ import annotations

from onchip.model.arrays import traffic
from onchip.model.cost import Cost
from onchip.model.shape import Blocks, Shape


def forward(shape: Shape, blocks: Blocks) -> Cost:
    """Q, K, V read, O written; S and P written and read."""
    n, m = shape.length_q, shape.length_k
    moved = traffic(
        shape,
        loads={"query": n, "key": m, "scores": n, "weights": n, "value": m},
        stores={"scores": n, "weights": n, "out": n},
        flops=2 * n * m * (shape.dim + shape.dim_v),
        exponentials=n * m,
    )
    return Cost(moved, _peak_of_a_product(shape, blocks))


def backward(shape: Shape, blocks: Blocks) -> Cost:
    """Q, K, V read once, dO twice; P read twice, dP written and read, dS written and read twice."""
    n, m = shape.length_q, shape.length_k
    moved = traffic(
        shape,
        loads={"weights": 2 * n, "d_out": 2 * n, "value": m, "d_weights": n, "d_scores": 2 * n, "key": m, "query": n},
        stores={"d_value": m, "d_weights": n, "d_scores": n, "d_query": n, "d_key": m},
        flops=4 * n * m * (shape.dim + shape.dim_v),
    )
    return Cost(moved, _peak_of_a_backward(shape, blocks))


def eager_forward(shape: Shape, blocks: Blocks) -> Cost:
    """As `forward`, and the scaled scores written and read."""
    n, m = shape.length_q, shape.length_k
    moved = traffic(
        shape,
        loads={"query": n, "key": m, "scores": n, "scaled_scores": n, "weights": n, "value": m},
        stores={"scores": n, "scaled_scores": n, "weights": n, "out": n},
        flops=2 * n * m * (shape.dim + shape.dim_v),
        exponentials=n * m,
    )
    return Cost(moved, _peak_of_a_product(shape, blocks))


def eager_backward(shape: Shape, blocks: Blocks) -> Cost:
    """As `backward`, P once more, and the weighted gradient and that of the scaled scores written and read."""
    n, m = shape.length_q, shape.length_k
    moved = traffic(
        shape,
        loads={
            "d_out": 2 * n,
            "value": m,
            "weights": 3 * n,
            "d_weights": n,
            "weighted": n,
            "d_scaled_scores": n,
            "d_scores": 2 * n,
            "key": m,
            "query": n,
        },
        stores={
            "d_weights": n,
            "d_value": m,
            "weighted": n,
            "d_scaled_scores": n,
            "d_scores": n,
            "d_query": n,
            "d_key": m,
        },
        flops=4 * n * m * (shape.dim + shape.dim_v),
    )
    return Cost(moved, _peak_of_a_backward(shape, blocks))


def _peak_of_a_product(shape: Shape, blocks: Blocks) -> int:
    """One operand of all keys, one block of rows of the other, one of the matrix."""
    r, wide = min(blocks.rows, shape.length_q), max(shape.dim, shape.dim_v)
    return shape.length_k * wide + r * (shape.length_k + wide)


def _peak_of_a_backward(shape: Shape, blocks: Blocks) -> int:
    """The softmax's gradient holds two blocks of rows of matrices."""
    return max(_peak_of_a_product(shape, blocks), 2 * min(blocks.rows, shape.length_q) * shape.length_k)
