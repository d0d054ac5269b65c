"""What the backward for Hopper keeps between its kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from onchip.schedules.hopper.launch import ROWS, Call, width

SUM_COLUMNS = 32
"""Of the matrix that TMA sees the sums as."""
NARROW, WIDE = 64, 128
"""Up to these head dims dQ has a warpgroup of its own; and one pass over the rows makes both gradients of columns."""


class Workspace:
    """What is kept between the kernels of a backward, for blocks of 64 rows of every query head.

    Attributes:
        width: elements of a row of dQ.
        slots: blocks of each head of a sequence, or of all sequences if packed.
        blocks: of all heads.
        order: ints that hold who has added to each block, and how many programs have started; none where blocks are
            filled with zeros.
    """

    def __init__(self, call: Call) -> None:
        problem = call.problem
        self.width = max(width(problem.dim_qk), width(problem.dim_v))
        self.slots = call.count(problem.length_q, 1, ROWS)
        self.blocks = self.slots * problem.heads_q * (1 if call.packed else problem.batch)
        # The first program with a tile for a block stores it between those head dims. Against zeros for all this spares
        # a write and a read of every sum; of narrow heads, and of the widest, programs wait for each other longer.
        claims = NARROW < self.width <= WIDE
        self.order = self.blocks + 1 if problem.deterministic or claims else 0

    @property
    def main(self) -> str:
        """Which of the kernels makes the gradients."""
        return "narrow" if self.width <= NARROW else "wide" if self.width <= WIDE else "widest"

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """4-byte elements: LSE, delta, sums of dQ, and who has added to each block."""
        rows = self.blocks * ROWS
        return rows, rows, rows * self.width, self.order

    def allocate(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Those, in one piece of memory."""
        whole = torch.empty(sum(self.sizes), dtype=torch.float32, device=device)
        rows, delta, sums, order = whole.split(self.sizes)
        return rows, delta, sums.view(-1, SUM_COLUMNS), order.view(torch.int32) if self.order else None
