"""Which schedule a problem tries first, as data: what `benchmarks/cpu.py --choices` measured.

Its record lies in `benchmarks/results/<processor>/choices.json`; that of `benchmarks/gpu_choices.py`, which the table
for Hopper GPUs follows from, in `benchmarks/results/<device>/forward-choices.json`. Tests hold the tables against
the records. Schedules that a row does not name follow in the order in which they are registered.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from onchip.masks import causality
from onchip.problem import Problem
from onchip.scores import Bias


@dataclass(frozen=True)
class Choice:
    """The first row that fits a problem names the schedules to try first.

    Attributes:
        backward: the direction.
        dtypes: "float32" (and float64), "low" (float16 and bfloat16), or "native" (bfloat16 on a processor that
            multiplies it).
        kinds: of `kind_of`.
        first: schedules, the best one first.
        length, below: fits from so many keys per sequence on, and below so many. heads: fits from so many heads of all
            sequences on.
        scores: fits up to so many scores in all.
    """

    backward: bool
    dtypes: tuple[str, ...]
    kinds: tuple[str, ...]
    first: tuple[str, ...]
    length: int = 0
    below: int | None = None
    heads: int = 0
    scores: int | None = None


CPU = (
    # few scores: dense has fewer operations, and its backward need not compute them again
    Choice(False, ("float32", "low", "native"), ("changed",), ("dense", "tiled"), scores=2**18),
    # a block of aten's holds more of a short band's surroundings than a tile does
    Choice(False, ("float32", "low", "native"), ("band",), ("tiled", "aten"), length=512, below=1024),
    Choice(False, ("float32", "low", "native"), ("plain", "causal", "band", "masked", "ragged", "changed"), ("aten",)),
    # aten's backward masks much of what tiled leaves out
    Choice(True, ("float32",), ("band",), ("tiled", "aten"), length=512),
    Choice(True, ("float32",), ("plain", "causal", "band", "masked", "ragged"), ("aten", "tiled")),
    # it runs a thread for each head, and its products in bfloat16 need some length
    Choice(True, ("native",), ("plain", "causal", "masked", "ragged"), ("aten", "tiled"), length=512, heads=8),
    Choice(True, ("low", "native"), ("plain", "causal", "band", "masked", "ragged"), ("tiled", "aten")),
)


@dataclass(frozen=True)
class GpuChoice:
    """The first row that fits a forward on a GPU names the schedules to try first.

    Attributes:
        first: schedules, the best one first.
        dim: fits up to this head dim. below: fits below so many keys per sequence; of a packed batch the mean counts,
            as for queries.
        queries: fits up to so many queries per sequence. group: fits up to so many query heads for a key head.
        rows: fits up to so many queries per sequence and key head, those of all its query heads.
        tiles: fits below so many tiles of GPU_ROWS such rows, over all sequences and key heads: how many programs there
            is work for.
    """

    first: tuple[str, ...]
    dim: int | None = None
    below: int | None = None
    queries: int | None = None
    group: int | None = None
    rows: int | None = None
    tiles: int | None = None


GPU_ROWS = 64
HOPPER = (
    # what it takes to begin, and to end, weighs more than few blocks of keys
    GpuChoice(("triton",), dim=64, below=1024, queries=64, group=1),
    GpuChoice(("triton",), dim=64, below=1024, rows=16),
    GpuChoice(("triton",), dim=64, below=1024, tiles=64),
)
"""Where `hopper` runs, which is first otherwise. It asks for no device: elsewhere `hopper` refuses every problem, and
the order of the others stays."""


def kind_of(problem: Problem) -> str:
    """What a problem asks for beside plain attention.

    "changed" (scores other than a bias, or dropout), "ragged" (packed, or padded with lengths), "plain", "causal"
    (column <= row), "band" (another one) or "masked" (any other mask, or a bias).
    """
    if problem.seed is not None or not all(isinstance(score, Bias) for score in problem.scores):
        return "changed"
    if problem.layout != "dense":
        return "ragged"
    if problem.band is None:
        return "masked"
    causal = causality(problem.band, problem.length_q)
    return "band" if causal is None else "causal" if causal else "plain"


def preferred(problem: Problem, backward: bool) -> tuple[str, ...]:
    """Names of the schedules to try first; none on a device without a table."""
    if problem.device.type == "cuda":
        return () if backward else _preferred_on_gpu(problem)
    if problem.device.type != "cpu":
        return ()
    kind, dtype = kind_of(problem), _dtype_of(problem.dtype)
    sequences = max(1, problem.batch) if problem.layout == "packed" else 1
    heads = problem.heads_q * problem.batch
    length, scores = problem.length_k // sequences, heads * problem.length_q * problem.length_k // sequences**2
    for row in CPU:
        if (
            row.backward == backward
            and kind in row.kinds
            and dtype in row.dtypes
            and length >= row.length
            and (row.below is None or length < row.below)
            and heads >= row.heads
            and (row.scores is None or scores <= row.scores)
        ):
            return row.first
    return ()


def _preferred_on_gpu(problem: Problem) -> tuple[str, ...]:
    """By sizes alone: nothing is asked of the device."""
    batch = problem.batch
    sequences = max(1, batch) if problem.layout == "packed" else 1
    queries, keys = -(-problem.length_q // sequences), problem.length_k // sequences
    dim, group, rows = max(problem.dim_qk, problem.dim_v), problem.group, queries * problem.group
    tiles = batch * problem.heads_kv * -(-rows // GPU_ROWS)
    for row in HOPPER:
        if (
            (row.dim is None or dim <= row.dim)
            and (row.below is None or keys < row.below)
            and (row.queries is None or queries <= row.queries)
            and (row.group is None or group <= row.group)
            and (row.rows is None or rows <= row.rows)
            and (row.tiles is None or tiles < row.tiles)
        ):
            return row.first
    return ()


def _dtype_of(dtype: torch.dtype) -> str:
    if dtype in (torch.float32, torch.float64):
        return "float32"
    return "native" if dtype == torch.bfloat16 and multiplies_bfloat16() else "low"


@cache
def multiplies_bfloat16() -> bool:
    """Whether this processor has instructions for products in bfloat16 that torch uses."""
    return _has("_is_avx512_bf16_supported") or has_bfloat16_tiles()


@cache
def has_bfloat16_tiles() -> bool:
    """Whether this processor multiplies tiles in bfloat16, many times as fast as in float32."""
    return _has("_is_amx_tile_supported")


def _has(question: str) -> bool:
    ask = getattr(torch.cpu, question, None)
    return ask is not None and bool(ask())
