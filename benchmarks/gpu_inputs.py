"""The tensors of a case of `benchmarks/gpu.py`."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from gpu_cases import Case
from torch import Tensor

FLAGGED_KEYS = slice(128, 192)
FLAGGED_SCORE = 100.0
"""How far these keys of a flagged case score above the others, in natural logarithm units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Query, key, value and the gradient of the output, and what some cases have beside them.

    Attributes:
        query, key, value, gradient: (batch, heads, length, dim), or (tokens, heads, dim) if packed.
        offsets: int32 (batch + 1,) of packed sequences.
        ids: int32 (length,), the document of each token.
        bias: (1, heads, length, length) in the dtype of the query.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    gradient: Tensor
    offsets: Tensor | None = None
    ids: Tensor | None = None
    bias: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """Everything that takes a gradient."""
        return self.tensors if self.bias is None else (*self.tensors, self.bias)


def draw(case: Case, device: torch.device) -> Inputs:
    """Random normal tensors in the memory layout of the case.

    In a flagged case every query scores FLAGGED_SCORE more with the keys FLAGGED_KEYS than with any other, give or take
    the random part: an attention sink that lies behind the first block of columns of any kernel here.
    """
    dtype, differentiable = getattr(torch, case.dtype), case.recorded or case.direction != "forward"
    heads_kv, dim_value = case.heads_kv or case.heads, case.dim_value or case.dim

    def tensor(heads: int, dim: int) -> Tensor:
        if case.sequences:
            shape: tuple[int, ...] = (sum(case.sequences), heads, dim)
        elif case.contiguous:
            shape = (case.batch, heads, case.length, dim)
        else:
            shape = (case.batch, case.length, heads, dim)
        drawn = torch.randn(shape, device=device).to(dtype)
        return drawn if case.sequences or case.contiguous else drawn.transpose(1, 2)

    query, key, value = tensor(case.heads, case.dim), tensor(heads_kv, case.dim), tensor(heads_kv, dim_value)
    if case.flagged:
        # One element of the head dim carries it: a product of two such elements is the score.
        element = (FLAGGED_SCORE * case.dim**0.5) ** 0.5
        query[..., 0] = element
        key[..., 0] = 0
        key[..., FLAGGED_KEYS, 0] = element
    bias = None
    if case.bias:
        bias = torch.randn(1, case.heads, case.length, case.length, device=device, dtype=dtype)
        bias.requires_grad_(differentiable)
    for leaf in (query, key, value):
        leaf.requires_grad_(differentiable)
    offsets = ids = None
    if case.sequences:
        offsets = torch.tensor([0, *accumulate(case.sequences)], dtype=torch.int32, device=device)
    if case.documents:
        numbers = torch.arange(len(case.documents), dtype=torch.int32, device=device)
        ids = numbers.repeat_interleave(torch.tensor(case.documents, device=device))
    return Inputs(
        query=query,
        key=key,
        value=value,
        gradient=tensor(case.heads, dim_value),
        offsets=offsets,
        ids=ids,
        bias=bias,
    )
