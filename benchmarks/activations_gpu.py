"""What flagged rows cost on a Hopper GPU, and whether their results are right."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from activations_sources import Source
from common import inference
from torch import Tensor

import onchip
from onchip.audit.bounds import bound, measure
from onchip.audit.reference import Reference
from onchip.bench.protocol import Comparison
from onchip.bench.timing import compare
from onchip.schedules.hopper import CAPABILITY, NAME

ROWS = 2**18
"""Rows of all heads in a timed call, to which a source is repeated: enough tiles for every multiprocessor."""
SAMPLED = 64
"""Rows of each head that are computed in float64."""
NORMAL = "normal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The largest error of a source's sampled rows against float64, and what clause 12 of the contract allows."""

    error: float
    allowed: float

    @property
    def holds(self) -> bool:
        return self.error <= self.allowed


def is_hopper(device: torch.device) -> bool:
    """Whether the schedule runs there."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == CAPABILITY


def attend(source: Source, schedule: str = NAME) -> Tensor:
    """The attention of a source, by the public function."""
    options = cast(Any, {"causal": source.causal, "schedule": schedule})
    return onchip.attention(source.query, source.key, source.value, **options)


def time_beside_normal(source: Source, rounds: int, schedule: str = NAME, rows: int = ROWS) -> Comparison:
    """Interleaved times of a source, repeated to so many rows, and of normal inputs of one shape with it."""
    device = source.query.device
    batch, heads, length, _ = source.query.shape
    copies = max(1, rows // (batch * heads * length))
    parts = {name: getattr(source, name).repeat(copies, 1, 1, 1).contiguous() for name in ("query", "key", "value")}
    normal = {name: torch.randn_like(part) for name, part in parts.items()}
    contenders = {
        name: inference(partial(attend, replace(source, **tensors), schedule))
        for name, tensors in ((NORMAL, normal), (source.name, parts))
    }
    return compare(
        contenders, rounds=rounds, device=device, minimum_sample_ms=4.0, flush_l2=device.type == "cuda"
    ).without_samples()


def check(source: Source, schedule: str = NAME) -> Checked:
    """Compare rows of every head, spread over the length and dense behind `source.seen_from`, with float64.

    The allowance is that of clause 12 (`onchip.audit.bounds`), with eager attention in bfloat16 on the same rows.
    """
    length = source.query.shape[2]
    half = SAMPLED // 2
    rows = torch.cat([torch.linspace(first, length - 1, half) for first in (0, source.seen_from)]).long().unique()
    rows = rows.to(source.query.device)
    exact, terms = _exact_rows(source, rows)
    reference = Reference({"out": exact}, {"out": terms})
    standard = measure(_weights(source, rows, torch.bfloat16) @ source.value, exact)
    found = measure(attend(source, schedule)[:, :, rows], exact)
    return Checked(error=found.maximum, allowed=bound("out", reference, standard, torch.bfloat16))


def _exact_rows(source: Source, rows: Tensor) -> tuple[Tensor, float]:
    """Rows of the output in float64, and the largest sum of |weight * value|."""
    weights, value = _weights(source, rows, torch.float64), source.value.double()
    return weights @ value, (weights @ value.abs()).max().item()


def _weights(source: Source, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of the softmax, every step in `dtype`: (batch, heads, rows, keys)."""
    query, key = source.query[:, :, rows].to(dtype), source.key.to(dtype)
    scores = (query @ key.mT) * query.shape[-1] ** -0.5
    if source.causal:
        scores.masked_fill_(torch.arange(key.shape[2], device=rows.device) > rows[:, None], -math.inf)
    return scores.softmax(-1)
