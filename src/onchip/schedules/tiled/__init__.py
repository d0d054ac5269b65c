"""Tiled attention in plain torch: the online-softmax loop, with memory linear in the length.

    for each group of heads that fits a score tile
      for each tile of rows
        for each piece of columns that its rows can see            (normal_form.py: empty pieces are never visited)
          s = scale * q k^T ; scores change it ; hidden pairs become -inf, in partial pieces only
          the running state (softmax.py) takes (s, v)
        out, lse = finish(state)

Backward walks the same pieces and needs nothing but (q, k, v, out, lse). Inputs in low precision are widened for a
group at a time: on most CPUs float32 products are several times faster, and they are more exact.
"""

from __future__ import annotations

from onchip.problem import Problem
from onchip.schedules.tiled.backward import backward as backward
from onchip.schedules.tiled.forward import forward as forward
from onchip.schedules.tiled.tiles import workspace_bytes as workspace_bytes
from onchip.schedules.tiled.traffic import kernels as kernels

NAME = "tiled"
SUMMARY = "the online-softmax loop in plain torch: linear memory, every feature, any device, training included"


def unsupported(problem: Problem) -> list[str]:
    """Reasons why this schedule cannot run the problem."""
    return []
