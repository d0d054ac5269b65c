"""What onchip's GPU schedules are to reach, as data: three tables of goals."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from gpu_cases import WIDTH, Case
from gpu_contenders import PLAIN, PREPARATION
from gpu_goals import Bound, Goals, Row

LONG = (2048, 8192, 16384)
SHORT = (512, 1024)
ALL = (512, 1024, 2048, 4096, 8192, 16384)
FLEX = (512, 2048, 8192, 16384)
"""Lengths at which FlexAttention is timed: it compiles each case for longer than the case takes."""
WIDE = (256, (192, 128))
"""Head dims; a pair is that of query and key, and that of value."""
RAGGED = (2638, 3890, 2767, 3581, 1368, 1124, 2178, 516, 3513, 3836, 1369, 1444, 2159, 2597, 3378, 2974)
"""Lengths of the packed sequences, 39332 tokens in all."""


def _grid(
    direction: str,
    dims: Sequence[int | tuple[int, int]],
    lengths: Sequence[int],
    masks: Sequence[bool] = (False, True),
    **options: Any,
) -> tuple[Case, ...]:
    """Every combination; a pair of dims, of query and of value, has as many heads as value's dim would have."""
    found = []
    for pair, length, causal in itertools.product(dims, lengths, masks):
        dim, dim_value = pair if isinstance(pair, tuple) else (pair, None)
        sizes = {"width": WIDTH // dim_value * dim, "dim_value": dim_value} if dim_value else {}
        found.append(Case(direction=direction, dim=dim, length=length, causal=causal, **(sizes | options)))
    return tuple(found)


def _portable(direction: str, lengths: Sequence[int]) -> tuple[Case, ...]:
    """The grid of the portable kernels; in a short forward a launch would count as much as the work."""
    if direction == "backward":
        return _grid(direction, (64, 128), lengths)
    dims = (64, 128, 256)
    short, longer = ([length for length in lengths if (length in SHORT) == asked] for asked in (True, False))
    return _grid(direction, dims, short, timing="graph") + _grid(direction, dims, longer)


def _window(direction: str) -> Case:
    return Case(direction=direction, dim=128, length=16384, causal=True, window=1023)


def _packed(direction: str) -> Case:
    return Case(direction=direction, dim=128, length=max(RAGGED), causal=True, sequences=RAGGED)


def _documents(count: int, tokens: int) -> Case:
    """Documents whose lengths rise evenly from a quarter of their mean to seven quarters, as launched by a graph:
    what prepares the mask is a dozen small kernels."""
    mean = tokens // count
    lengths = [mean // 4 + round(step * 1.5 * mean / (count - 1)) for step in range(count)]
    lengths[-1] += tokens - sum(lengths)
    return Case(
        direction="forward",
        dim=128,
        length=tokens,
        causal=True,
        tokens=tokens,
        documents=tuple(lengths),
        timing="graph",
    )


def _host(direction: str, *, recorded: bool = False) -> Case:
    return Case(
        direction=direction, dim=64, length=128, causal=False, tokens=128, width=64, recorded=recorded, timing="host"
    )


def _dropout(*dims: int) -> tuple[Case, ...]:
    return _grid("forward+backward", dims, (4096,), (False,), dropout=0.1)


FIGURE_2 = Case(
    direction="forward+backward",
    dim=64,
    length=1024,
    causal=False,
    dtype="float16",
    tokens=64 * 1024,
    width=16 * 64,
    contiguous=True,
)
"""The shape under Figure 2 of Dao et al. 2022, FlashAttention: batch 64, 16 heads."""
BIAS = Case(direction="forward+backward", dim=64, length=4096, causal=False, tokens=2 * 4096, width=16 * 64, bias=True)
FLOAT32 = Case(direction="forward+backward", dim=64, length=4096, causal=False, dtype="float32", width=16 * 64)
GROUPED = tuple(
    case for heads_kv in (8, 1) for case in _grid("forward", (128,), (8192,), width=32 * 128, heads_kv=heads_kv)
)
CUDNN = Bound(against=("sdpa_cudnn",), over="each", goal=1.0, floor=1.0)


def _over(*against: str, goal: float, floor: float | None = None) -> Bound:
    return Bound(against=against, goal=goal, floor=floor)


def _each_over(*against: str, goal: float | None, floor: float) -> Bound:
    return Bound(against=against, over="each", goal=goal, floor=floor)


HOPPER_FORWARD = Goals(
    name="hopper-forward",
    schedule="hopper",
    rows=(
        Row(
            key="forward",
            what="forward d64, d128",
            cases=_grid("forward", (64, 128), LONG),
            bounds=(
                _over("fa3", "fa4", goal=1.08, floor=1.0),
                _each_over("fa3", "fa4", goal=1.03, floor=1.0),
            ),
        ),
        Row(
            key="wide",
            what="forward d256, d192/128",
            cases=_grid("forward", WIDE, LONG),
            bounds=(_over("fa3", "fa4", goal=1.0, floor=0.92),),
        ),
        Row(
            key="short",
            what="forward n512, n1024, graph",
            cases=_grid("forward", (64, 128), SHORT, timing="graph"),
            bounds=(_over("sdpa_cudnn", "fa3", goal=1.1, floor=1.0),),
        ),
        Row(
            key="packed",
            what="forward, 16 sequences",
            cases=(_packed("forward"),),
            bounds=(_over("fa3", goal=1.05, floor=0.97),),
            beside=("fa4", "sdpa_flash"),
        ),
        Row(
            key="window",
            what="forward, window 1023",
            cases=(_window("forward"),),
            bounds=(_over("fa3ts", "fa4", goal=1.05, floor=0.95),),
            beside=("flex",),
        ),
        Row(
            key="grouped",
            what="forward h32/8, h32/1",
            cases=GROUPED,
            bounds=(_over(PLAIN, goal=1.0, floor=0.97),),
            beside=("sdpa_flash",),
        ),
        Row(
            key="softcap",
            what="forward, softcap 50",
            cases=_grid("forward", (128,), LONG, (True,), softcap=50.0),
            bounds=(_over("fa3", goal=1.05, floor=0.95),),
        ),
        Row(
            key="flagged",
            what="forward, every row flagged",
            cases=_grid("forward", (64, 128), (8192,), flagged=True),
            bounds=(_over(PLAIN, goal=0.5, floor=0.4),),
            beside=("sdpa_flash",),
        ),
        Row(
            key="host",
            what="host time, n128",
            cases=(_host("forward"),),
            bounds=(Bound(quantity="microseconds", goal=40, floor=45),),
            beside=("sdpa_flash",),
        ),
    ),
)

HOPPER_BACKWARD = Goals(
    name="hopper-backward",
    schedule="hopper",
    rows=(
        Row(
            key="backward",
            what="backward d128",
            cases=_grid("backward", (128,), LONG),
            bounds=(_over("fa4", goal=1.02, floor=0.96), CUDNN),
        ),
        Row(
            key="backward",
            what="backward d64",
            cases=_grid("backward", (64,), LONG),
            bounds=(_over("fa4", goal=1.05, floor=0.98), CUDNN),
        ),
        Row(
            key="both",
            what="fwd+bwd d64, d128",
            cases=_grid("forward+backward", (64, 128), LONG),
            bounds=(_over("fa4", goal=1.05, floor=0.98),),
        ),
        Row(
            key="wide",
            what="backward d256, d192/128",
            cases=_grid("backward", WIDE, LONG),
            bounds=(_over("sdpa_cudnn", "fa4", goal=1.0, floor=0.85),),
        ),
        Row(
            key="deterministic",
            what="backward, deterministic",
            cases=_grid("backward", (64, 128), (8192,), deterministic=True),
            bounds=(_over(PLAIN, goal=0.94, floor=0.85), _over("fa4", goal=1.05, floor=0.95)),
        ),
        Row(
            key="packed",
            what="fwd+bwd, 16 sequences",
            cases=(_packed("forward+backward"),),
            bounds=(_over("fa4", goal=1.0, floor=0.9),),
        ),
        Row(
            key="figure2",
            what="fwd+bwd, Figure 2",
            cases=(FIGURE_2,),
            bounds=(_over("sdpa_cudnn", goal=1.0, floor=0.9),),
        ),
        Row(
            key="figure2",
            what="DRAM bytes, Figure 2",
            cases=(),
            bounds=(Bound(quantity="bytes", against=("sdpa_cudnn",), goal=1.0, floor=1.1),),
        ),
        Row(
            key="memory",
            what="peak memory, Table 21",
            cases=(),
            bounds=(Bound(quantity="memory", against=("sdpa_cudnn",), over="each", goal=1.03, floor=1.03),),
        ),
        Row(
            key="dropout",
            what="fwd+bwd, dropout 0.1",
            cases=_dropout(64, 128),
            bounds=(_over(PLAIN, goal=0.8, floor=0.65),),
            beside=("sdpa_flash",),
        ),
    ),
)

TRITON = Goals(
    name="triton",
    schedule="triton",
    rows=(
        Row(
            key="forward",
            what="forward d64, d128, d256",
            cases=_portable("forward", FLEX),
            bounds=(
                _over("flex", goal=1.05, floor=0.95),
                _each_over("flex", goal=1.0, floor=0.95),
            ),
        ),
        Row(
            key="forward",
            what="the same, every length",
            cases=_portable("forward", ALL),
            bounds=(
                _over("sdpa_flash", goal=1.4),
                _each_over("sdpa_flash", goal=None, floor=1.2),
            ),
        ),
        Row(
            key="fa3",
            what="forward d128 n8192",
            cases=_grid("forward", (128,), (8192,)),
            bounds=(_over("fa3", goal=0.74, floor=0.70),),
        ),
        Row(
            key="backward",
            what="backward d64, d128",
            cases=_portable("backward", FLEX),
            bounds=(_over("flex", goal=1.05, floor=1.0),),
        ),
        Row(
            key="backward",
            what="the same, every length",
            cases=_portable("backward", ALL),
            bounds=(
                _over("sdpa_flash", goal=1.2, floor=1.1),
                _over("fastflash", goal=1.1, floor=1.0),
            ),
        ),
        Row(
            key="deterministic",
            what="backward, deterministic",
            cases=_grid("backward", (64, 128), (8192,), deterministic=True),
            bounds=(_over(PLAIN, goal=0.85, floor=0.75),),
        ),
        Row(
            key="window",
            what="window 1023",
            cases=(_window("forward"), _window("forward+backward")),
            bounds=(_each_over("flex", goal=1.3, floor=1.1),),
        ),
        Row(
            key="packed",
            what="forward, 16 sequences",
            cases=(_packed("forward"),),
            bounds=(_over("sdpa_flash", goal=1.8, floor=1.5),),
        ),
        Row(
            key="packed",
            what="fwd+bwd, 16 sequences",
            cases=(_packed("forward+backward"),),
            bounds=(_over("sdpa_flash", goal=1.3, floor=1.1),),
        ),
        Row(
            key="documents",
            what="forward, 32 documents",
            cases=(_documents(32, 65536),),
            bounds=(
                _over("flex", goal=1.1, floor=1.0),
                Bound(quantity="share", against=(PREPARATION,), goal=0.05, floor=0.1),
            ),
        ),
        Row(
            key="bias",
            what="fwd+bwd, bias with gradient",
            cases=(BIAS,),
            bounds=(_over("sdpa_efficient", goal=1.2, floor=1.0),),
        ),
        Row(
            key="float32",
            what="fwd+bwd, float32",
            cases=(FLOAT32,),
            bounds=(_over("sdpa_efficient", goal=1.0, floor=0.85),),
        ),
        Row(
            key="dropout",
            what="fwd+bwd, dropout 0.1",
            cases=_dropout(64),
            bounds=(_over("sdpa_flash", goal=1.2, floor=1.0),),
            beside=(PLAIN,),
        ),
        Row(
            key="figure2",
            what="fwd+bwd, Figure 2",
            cases=(FIGURE_2,),
            bounds=(_over("sdpa_flash", goal=1.35, floor=1.2),),
        ),
        Row(
            key="figure2",
            what="DRAM GB, Figure 2",
            cases=(),
            bounds=(Bound(quantity="gigabytes", goal=2.6, floor=3.0),),
        ),
        Row(
            key="host",
            what="host time, n128, forward",
            cases=(_host("forward"),),
            bounds=(Bound(quantity="microseconds", goal=40, floor=45),),
            beside=("sdpa_flash",),
        ),
        Row(
            key="host",
            what="host time, n128, recorded",
            cases=(_host("forward", recorded=True),),
            bounds=(Bound(quantity="microseconds", goal=80, floor=100),),
            beside=("sdpa_flash",),
        ),
        Row(
            key="host",
            what="host time, n128, fwd+bwd",
            cases=(_host("forward+backward"),),
            bounds=(Bound(quantity="microseconds", goal=80, floor=100),),
            beside=("sdpa_flash",),
        ),
    ),
)

TABLES = {goals.name: goals for goals in (HOPPER_FORWARD, HOPPER_BACKWARD, TRITON)}
