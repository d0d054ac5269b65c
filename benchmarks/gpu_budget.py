"""How long `benchmarks/gpu.py` will take, roughly: a card is lent by the minute."""

from __future__ import annotations

from collections.abc import Sequence

from gpu_calls import WARMUP
from gpu_cases import Case
from gpu_contenders import word

FLEX_SECONDS = 10.0
"""What FlexAttention compiles for, in each direction of each case."""
SETUP_SECONDS = 1.5
"""Compilation, comparison and the search for the length of a sample, for each contender of a case."""
SAMPLE_MS = 20.0
SPEED_TFLOPS = {"bfloat16": 250.0, "float16": 250.0, "float32": 40.0}
"""A slow contender's speed on an H200, so that the estimate is not too short."""


def seconds(case: Case, names: Sequence[str], rounds: int) -> float:
    """An estimate of a case's wall time with these contenders."""
    call_ms = case.what.operations_flops / SPEED_TFLOPS[case.dtype] / 1e9
    sample_ms = max(SAMPLE_MS * 1.1, call_ms)
    each = SETUP_SECONDS + (WARMUP * call_ms + (rounds + 2) * sample_ms) / 1e3
    directions = 1 if case.direction == "forward" else 2
    return len(names) * each + FLEX_SECONDS * directions * ("flex" in map(word, names))
