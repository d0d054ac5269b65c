"""The inputs of the audit: laws that random queries, keys and values follow, from harmless to hard."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

LOGIT = 1e4
"""Size of the scores of the law "logits". There numbers are 2^-10 apart in float32, 8 in float16 and 64 in bfloat16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Sizes of a problem of self-attention."""

    batch: int
    heads: int
    length: int
    dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """One problem and the gradients that come back to it.

    Attributes:
        query, key, value, d_out: (batch, heads, length, dim), all of one dtype.
        d_lse: (batch, heads, length), float32 (float64 for float64), or None if no gradient reaches the LSE.
        scale: factor of the products of queries and keys. causal: a row sees the keys up to its own index.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    d_out: Tensor
    d_lse: Tensor | None
    scale: float
    causal: bool

    def to(self, device: str, dtype: torch.dtype) -> Inputs:
        """The same problem on a device, rounded to a dtype."""
        query, key, value, d_out = (part.to(device, dtype) for part in (self.query, self.key, self.value, self.d_out))
        exact = torch.promote_types(dtype, torch.float32)
        d_lse = None if self.d_lse is None else self.d_lse.to(device, exact)
        return replace(self, query=query, key=key, value=value, d_out=d_out, d_lse=d_lse)

    def sequence(self, number: int) -> Inputs:
        """One sequence of the batch as a batch of one."""
        only = slice(number, number + 1)
        query, key, value, d_out = (part[only] for part in (self.query, self.key, self.value, self.d_out))
        d_lse = None if self.d_lse is None else self.d_lse[only]
        return replace(self, query=query, key=key, value=value, d_out=d_out, d_lse=d_lse)


Drawn = tuple[Tensor, Tensor, Tensor, float]


@dataclass(frozen=True, slots=True)
class Law:
    """How queries, keys and values are drawn, and the scale of the scores: a draw gives (query, key, value, scale)."""

    summary: str
    draw: Callable[[Size, Generator], Drawn]


def _normal(size: Size, generator: Generator) -> Tensor:
    return torch.randn(size.batch, size.heads, size.length, size.dim, generator=generator)


def _draw_normal(size: Size, generator: Generator) -> Drawn:
    query, key, value = (_normal(size, generator) for _ in range(3))
    return query, key, value, size.dim**-0.5


def _draw_outliers(size: Size, generator: Generator) -> Drawn:
    def entries() -> Tensor:
        rare = torch.rand(size.batch, size.heads, size.length, size.dim, generator=generator) < 0.001
        return _normal(size, generator) + 10 * _normal(size, generator) * rare

    return entries(), entries(), entries(), size.dim**-0.5


def _draw_logits(size: Size, generator: Generator) -> Drawn:
    """The first entries of a query and a key make +-1e4, exactly in every dtype; the others add about N(0, 1)."""
    query, key, value = (_normal(size, generator) for _ in range(3))
    query *= size.dim**-0.5
    for part in (query, key):
        part[..., 0] = torch.where(part[..., 0] < 0, -math.sqrt(LOGIT), math.sqrt(LOGIT))
    return query, key, value, 1.0


def _draw_one_hot(size: Size, generator: Generator) -> Drawn:
    """A query is twice one of the keys up to its own index, so that one score stands far above the others."""
    key, value = _normal(size, generator), _normal(size, generator)
    chosen = torch.rand(size.batch, size.heads, size.length, generator=generator)
    chosen = (chosen * torch.arange(1, size.length + 1)).long()
    query = 2 * key.gather(2, chosen[..., None].expand_as(key))
    return query, key, value, size.dim**-0.5


LAWS = {
    "normal": Law("every entry N(0, 1)", _draw_normal),
    "outliers": Law(
        "N(0, 1) + N(0, 100) * Bernoulli(0.001), variances: one entry of a thousand has ten times the size "
        "(Shah et al. 2024, FlashAttention-3, section 4.3)",
        _draw_outliers,
    ),
    "logits": Law("every score near +1e4 or -1e4, differing among themselves by about N(0, 1); scale 1", _draw_logits),
    "one-hot": Law("every query is twice a key that its row sees: nearly all weight is on one key", _draw_one_hot),
}


def draw(law: str, size: Size, *, causal: bool, lse_gradient: bool, seed: int) -> Inputs:
    """Float32 inputs of a law on the CPU, the same on every machine; incoming gradients are N(0, 1).

    Args:
        law: a name in LAWS.
        lse_gradient: let a gradient reach the LSE as well.
    """
    generator = torch.Generator().manual_seed(seed)
    query, key, value, scale = LAWS[law].draw(size, generator)
    d_out = _normal(size, generator)
    d_lse = torch.randn(size.batch, size.heads, size.length, generator=generator) if lse_gradient else None
    return Inputs(query=query, key=key, value=value, d_out=d_out, d_lse=d_lse, scale=scale, causal=causal)
