"""The arrays in slow memory: their names, and how large they are.

With n queries, m keys, head dims d and dv, and P = softmax(S):

    query, d_query                  (n, d)       key, d_key        (m, d)
    out, d_out                      (n, dv)      value, d_value    (m, dv)
    scores, weights                 (n, m)       S and P
    scaled_scores                   (n, m)       S times the scale where scaling is a step of its own
    d_weights, d_scores             (n, m)       gradients of P and S
    weighted, d_scaled_scores       (n, m)       steps of their own in PyTorch's eager backward
    maximum, total, lse, delta      (n, 1)       statistics of rows: max, sum of exponentials, log-sum-exp, sum of dO *
    O partial_..., d_partial_...      as out, maximum and total, once for each chunk of keys
"""

from __future__ import annotations

from collections.abc import Mapping

from onchip.model.shape import Shape
from onchip.model.traffic import Traffic

_LIKE_QUERY = ("query", "d_query")
_LIKE_KEY = ("key", "d_key")
_LIKE_VALUE = ("value", "d_value")
_LIKE_OUT = ("out", "d_out", "partial_out", "d_partial_out")
_MATRICES = ("scores", "scaled_scores", "weights", "d_weights", "weighted", "d_scaled_scores", "d_scores")
_STATISTICS = ("maximum", "total", "lse", "delta", "partial_maximum", "partial_total", "d_partial_total")

INPUTS = ("query", "key", "value", "d_out")
"""What lies in slow memory before anything runs; the last one before the backward."""


def rows(shape: Shape, name: str) -> int:
    """Rows of an array; of a partial one, those of one chunk."""
    return shape.length_k if name in (*_LIKE_KEY, *_LIKE_VALUE) else shape.length_q


def columns(shape: Shape, name: str) -> int:
    """Columns of an array."""
    if name in (*_LIKE_QUERY, *_LIKE_KEY):
        return shape.dim
    if name in (*_LIKE_VALUE, *_LIKE_OUT):
        return shape.dim_v
    if name in _MATRICES:
        return shape.length_k
    assert name in _STATISTICS, f"no array is called {name}"
    return 1


def element_bytes(shape: Shape, name: str) -> int:
    """Bytes of an element of an array."""
    return shape.statistic_bytes if name in _STATISTICS else shape.element_bytes


def traffic(
    shape: Shape, *, loads: Mapping[str, int], stores: Mapping[str, int], flops: int = 0, exponentials: int = 0
) -> Traffic:
    """The traffic of all heads, given what one head moves and computes.

    Args:
        loads, stores: how many rows of each array are moved.
    """

    def moved(counts: Mapping[str, int]) -> dict[str, int]:
        sizes = {
            name: shape.copies * moved_rows * columns(shape, name) * element_bytes(shape, name)
            for name, moved_rows in counts.items()
        }
        return {name: size for name, size in sizes.items() if size}

    return Traffic(moved(loads), moved(stores), shape.copies * flops, shape.copies * exponentials)
