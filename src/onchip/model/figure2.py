"""Figure 2 (left) of Dao et al. 2022, FlashAttention: its shape, what it prints, and what its shape needs.

The bytes that it prints follow from the shape that it states; the operations do not. `heads_of` says how many heads
the printed operations would take.
"""

from __future__ import annotations

from dataclasses import dataclass

from onchip.model.shape import Shape

SHAPE = Shape(batch=64, heads=16, length_q=1024, length_k=1024, dim=64, dim_v=64, element_bytes=2, statistic_bytes=4)
"""GPT-2 medium: length 1024, head dim 64, 16 heads, batch 64, on an A100, forward and backward; 16-bit elements."""

CHIP_BYTES = 192 * 1024
"""On-chip memory of each of an A100's multiprocessors. (Section 2.1 of the paper.)"""


@dataclass(frozen=True, slots=True)
class Printed:
    """A column of the figure's table: 10^9 operations, 10^9 bytes moved, milliseconds; all rounded to a tenth."""

    gflops: float
    gigabytes: float
    milliseconds: float


STANDARD = Printed(gflops=66.6, gigabytes=40.3, milliseconds=41.7)
FLASH = Printed(gflops=75.2, gigabytes=4.4, milliseconds=7.3)


def heads_of(printed: Printed, products: int) -> tuple[float, float]:
    """Between how many heads of the figure's length and head dim the printed operations lie, rounding included.

    Args:
        products: matrix products of a forward and a backward: 6 where the weights are kept, 7 where the scores are
            computed again. Each is 2 * length^2 * dim operations.
    """
    each = products * 2 * SHAPE.length_q * SHAPE.length_k * SHAPE.dim
    return (printed.gflops - 0.05) * 1e9 / each, (printed.gflops + 0.05) * 1e9 / each
