"""Problems that stand for a row of the table of tiles.

A case is timed on one problem and must be able to run on all of its row. So the winner is also compiled for the
heaviest problems of its kind, which read more beside query, key and value than the one that is timed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onchip import masks, scores
from onchip.attention import plan, plan_varlen
from onchip.problem import Problem
from onchip.schedules.triton.tiles import KINDS, SHORT

TOKENS, LENGTH, WIDTH = 16384, 4096, 2048
"""Tokens in all, tokens of a sequence, and heads times head dim: as FlashAttention's benchmarks have them (Dao 2023,
FlashAttention-2, section 4.1)."""
DECODED = 16
"""Sequences of a decode, one query each: enough programs for a card, as a server's batch has them."""
GROUP = 4
"""Query heads of a key head, of the kinds that have groups."""


@dataclass(frozen=True, slots=True)
class Case:
    """A row to measure: kernel and kind as in tiles.Row, the head dim, and the dtype."""

    kernel: str
    dim: int
    dtype: torch.dtype
    kind: str

    @property
    def banded(self) -> bool:
        """Whether its problems have a band, and not all pairs."""
        return self.kind != "plain"

    @property
    def bits(self) -> int:
        return self.dtype.itemsize * 8

    def __str__(self) -> str:
        return f"{self.kernel} {self.kind}, head dim {self.dim}, {str(self.dtype).removeprefix('torch.')}"


def cases(
    only: Sequence[str] = (), dims: Iterable[int] = (64, 128, 256), dtypes: Iterable[torch.dtype] = (torch.bfloat16,)
) -> list[Case]:
    """Every case of these head dims and dtypes, the plain ones first.

    Args:
        only: kernels ("keys"), kinds ("band") or both ("keys:band") to keep; empty keeps all.

    Raises:
        ValueError: one of `only` names no kernel, kind or pair of them; or two dtypes share a row.
    """
    known = {name for kernel, kinds in KINDS.items() for kind in kinds for name in (kernel, kind, f"{kernel}:{kind}")}
    if unknown := [name for name in only if name not in known]:
        names = sorted(name for name in known if ":" not in name)
        raise ValueError(f"only takes {', '.join(names)} or a pair like keys:band, got {', '.join(unknown)}")
    dtypes = tuple(dtypes)
    if len({dtype.itemsize for dtype in dtypes}) < len(dtypes):
        raise ValueError("dtypes of the same width share their tiles, so name one of them: got float16 and bfloat16")
    found = [
        Case(kernel, dim, dtype, kind)
        for dtype in dtypes
        for dim in dims
        for kernel, kinds in KINDS.items()
        for kind in kinds
        if not only or {kernel, kind, f"{kernel}:{kind}"}.intersection(only)
    ]
    order = ("plain", "band", "short", "grouped", "few", "masked", "changed")
    return sorted(found, key=lambda case: order.index(case.kind))


@dataclass(frozen=True, eq=False)
class Inputs:
    """A problem with its tensors; the gradient of out is there for the kernels of the backward."""

    problem: Problem
    query: Tensor
    key: Tensor
    value: Tensor

    @property
    def tensors(self) -> list[Tensor]:
        """Those of masks and scores, as the backward takes them."""
        return self.problem.lower()[0]


def timed(case: Case, device: torch.device, tokens: int = TOKENS, length: int = LENGTH) -> Inputs:
    """The problem that a case is timed on: normal values, the same every time.

    "plain" has no mask; "band" is causal, and "short" with few keys; "masked" is causal within two documents;
    "changed" is causal with ALiBi; "grouped" causal with four query heads for a key head; "few" is a step of decoding
    with such groups.
    """
    heads = max(GROUP, WIDTH // case.dim // GROUP * GROUP)
    groups = heads // GROUP if case.kind in ("few", "grouped") else heads
    length = min(length, SHORT) if case.kind == "short" else length
    batch, rows = (DECODED, 1) if case.kind == "few" else (max(1, tokens // length), length)
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(case.dtype)

    query = normal(batch, heads, rows, case.dim)
    key, value = normal(batch, groups, length, case.dim), normal(batch, groups, length, case.dim)
    slopes = torch.logspace(-1, -8, heads, base=2.0, device=device).requires_grad_()
    documents = masks.documents(torch.arange(length, device=device) // (length // 2 + 100))
    options: dict[str, Any] = {"changed": {"score": scores.alibi(slopes)}, "masked": {"mask": documents}}
    return Inputs(plan(query, key, value, causal=case.banded, **options.get(case.kind, {})).problem, query, key, value)


def heaviest(case: Case, device: torch.device) -> list[Inputs]:
    """Small problems of a case's row whose kernels hold the most: padded and packed, with all that its kind has."""
    few, grouped = case.kind == "few", case.kind in ("few", "grouped")
    heads, groups = (2 * GROUP, 2) if grouped else (2, 2)
    length = 2 * SHORT if case.kind == "band" else 256
    rows = 4 if few else length

    def strided(*shape: int) -> Tensor:
        # an odd row stride: nothing is read in vectors
        return torch.zeros(*shape[:-1], shape[-1] + 1, dtype=case.dtype, device=device)[..., : shape[-1]]

    lengths = (torch.full((2,), rows - 1, device=device), torch.full((2,), length - 1, device=device))
    offsets = (torch.arange(3, device=device, dtype=torch.int32) * size for size in (rows, length))
    banded = {"causal": True, "window": (length // 2, 0)} if case.banded else {}
    sink = scores.sink(torch.zeros(heads, device=device))
    changes = case.kind in ("changed", "few")
    slopes = torch.ones(heads, device=device, requires_grad=True)
    steps = (scores.softcap(30.0), scores.alibi(slopes)) if changes else ()
    bias = torch.zeros(2, heads, rows, length, dtype=case.dtype, device=device, requires_grad=True)
    shared: dict[str, Any] = {**banded, "dropout_p": 0.1 if changes else 0.0}

    query, key, value = (
        strided(2, count, size, case.dim) for count, size in ((heads, rows), (groups, length), (groups, length))
    )
    padded = {**shared, "lengths": lengths, "score": (*steps, *((scores.bias(bias),) if changes else ()), sink)}
    if case.kind in ("masked", "changed"):
        padded["mask"] = masks.documents(torch.arange(length, device=device) // 100)
    found = [Inputs(plan(query, key, value, **padded).problem, query, key, value)]

    query, key, value = (
        strided(2 * size, count, case.dim) for count, size in ((heads, rows), (groups, length), (groups, length))
    )
    packed = {**shared, "score": (*steps, sink)}
    if changes or case.kind == "masked":
        ids = (torch.arange(2 * size, device=device) // 100 for size in (rows, length))
        packed["mask"] = masks.documents(*ids)
    found.append(Inputs(plan_varlen(query, key, value, *offsets, **packed).problem, query, key, value))
    return found
