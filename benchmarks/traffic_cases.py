"""What `benchmarks/traffic.py` counts: the cases, and how one is run."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import onchip
from onchip import scores
from onchip.dispatch import schedules

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
PEERS = ("standard", "sdpa_flash", "sdpa_cudnn")
DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Self-attention without dropout; its backward is the backward alone.

    Attributes:
        contender: a GPU schedule of onchip, or one of PEERS. "standard" is matmul, softmax, matmul in the dtype.
        window: keys to the left of the diagonal that a causal row sees beside its own; None is all.
        sequences: packed sequences of `length` tokens instead of a batch; None is dense.
        alibi: with slopes that take gradients.
        tile: rows, columns, warps and stages of the forward kernel instead of the table's.
    """

    contender: str
    batch: int
    heads: int
    length: int
    dim: int
    dtype: str = "bfloat16"
    heads_kv: int | None = None
    causal: bool = False
    window: int | None = None
    sequences: int | None = None
    alibi: bool = False
    tile: tuple[int, int, int, int] | None = None

    @property
    def name(self) -> str:
        heads = f"h{self.heads}" + (f"/{self.heads_kv}" if self.heads_kv else "")
        words = [self.contender, f"b{self.batch} {heads} n{self.length} d{self.dim}", self.dtype]
        words += ["causal"] * self.causal + ([f"window {self.window}"] if self.window is not None else [])
        words += ["packed"] * (self.sequences is not None) + ["alibi"] * self.alibi
        words += ["tile " + "x".join(map(str, self.tile[:2]))] if self.tile else []
        return ", ".join(words)


FIGURE_2: dict[str, Any] = {"batch": 64, "heads": 16, "length": 1024, "dim": 64, "dtype": "float16"}
"""The shape under Figure 2 of Dao et al. 2022, FlashAttention."""
BLOCKS = tuple((rows, 64, max(4, min(8, rows // 16)), 2) for rows in (16, 32, 64, 128, 256))
"""Tiles of the sweep after the right side of that figure: in our kernel the rows decide how often K and V are read."""
SHAPES = ({"batch": 2, "heads": 32, "length": 8192, "dim": 64}, {"batch": 2, "heads": 16, "length": 8192, "dim": 128})
"""The long shapes of `benchmarks/gpu.py`."""


def cases(ours: tuple[str, ...]) -> list[Case]:
    """Figure 2's shape for all, and what changes the walk of a schedule's kernels: masks, grouped heads, packing."""
    found = [Case(contender=name, **FIGURE_2) for name in (*ours, *PEERS)]
    for name in ours:
        for shape in SHAPES:
            found += [Case(contender=name, causal=causal, **shape) for causal in (False, True)]
        found += [
            Case(contender=name, batch=8, heads=16, length=2048, dim=128, causal=True),
            Case(contender=name, batch=2, heads=16, length=8192, dim=128, causal=True, window=1023),
            Case(contender=name, batch=2, heads=32, heads_kv=8, length=8192, dim=64, causal=True),
            Case(contender=name, batch=1, heads=16, length=2048, dim=128, causal=True, sequences=8),
            Case(contender=name, batch=4, heads=16, length=2048, dim=64, causal=True, alibi=True),
            Case(contender=name, batch=2, heads=16, length=4096, dim=64, dtype="float32"),
        ]
    return found


def sweep() -> list[Case]:
    """The forward at Figure 2's shape with other tiles."""
    return [Case(contender="triton", tile=tile, **FIGURE_2) for tile in BLOCKS]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A case with its tensors.

    Attributes:
        inputs: query, key and value. arguments: what else onchip's functions take; no schedule.
        gradient: of the output.
    """

    inputs: tuple[Tensor, ...]
    arguments: dict[str, Any]
    gradient: Tensor
    attend: Attend

    @property
    def leaves(self) -> tuple[Tensor, ...]:
        """Everything that takes a gradient."""
        slopes = [tensor for score in self.arguments.get("score", ()) for tensor, _ in score.parameters]
        return (*self.inputs, *slopes)


def prepare(case: Case, device: torch.device) -> Prepared:
    """Random tensors, contiguous in the layout of their function, and the attention of a case."""
    heads_kv = case.heads_kv or case.heads
    dtype = getattr(torch, case.dtype)

    def tensor(heads: int) -> Tensor:
        if case.sequences is not None:
            shape: tuple[int, ...] = (case.sequences * case.length, heads, case.dim)
        else:
            shape = (case.batch, heads, case.length, case.dim)
        return torch.randn(shape, device=device).to(dtype)

    differentiable = len(directions(case)) > 1
    inputs = tuple(tensor(heads).requires_grad_(differentiable) for heads in (case.heads, heads_kv, heads_kv))
    arguments: dict[str, Any] = {"causal": case.causal}
    if case.window is not None:
        arguments["window"] = (case.window, 0)
    if case.alibi:
        slopes = torch.rand(case.heads, device=device).requires_grad_(differentiable)
        arguments["score"] = (scores.alibi(slopes),)
    offsets = None
    if case.sequences is not None:
        offsets = torch.arange(case.sequences + 1, device=device, dtype=torch.int32) * case.length
        arguments["cu_seqlens_query"] = offsets
    return Prepared(inputs, arguments, tensor(case.heads), _attention(case, arguments))


def _attention(case: Case, arguments: dict[str, Any]) -> Attend:
    if case.contender == "standard":
        return _standard
    if case.contender in PEERS:
        backend = SDPBackend.FLASH_ATTENTION if case.contender == "sdpa_flash" else SDPBackend.CUDNN_ATTENTION

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(query, key, value, is_causal=case.causal)

        return attend
    function: Any = onchip.attention if case.sequences is None else onchip.attention_varlen
    return lambda query, key, value: function(query, key, value, **arguments, schedule=case.contender)


def _standard(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scale = query.shape[-1] ** -0.5
    return torch.softmax((query @ key.mT) * scale, -1) @ value


@contextmanager
def tiled_as(case: Case) -> Iterator[None]:
    """Inside, the forward kernel takes the tile of the case."""
    if case.tile is None:
        yield
        return
    tiles = importlib.import_module("onchip.schedules.triton.tiles")
    row = tiles.Row(tiles.ANY, tiles.FORWARD, case.dim, 16, tiles.ANY, tiles.Tile(*case.tile))
    tuned = importlib.import_module("onchip.schedules.triton.tuned")
    shipped = {tuned.SWITCH: "0"}
    try:
        with mock.patch.object(tiles, "TABLE", (row, *tiles.TABLE)), mock.patch.dict(os.environ, shipped):
            tuned.forget()
            yield
    finally:
        tuned.forget()


def directions(case: Case) -> tuple[str, ...]:
    """Forward and backward, or the forward alone: of a tile of its own, and of a schedule without gradients."""
    ours = schedules().get(case.contender)
    alone = case.tile is not None or (ours is not None and ours.backward is None and not ours.composite)
    return ("forward",) if alone else DIRECTIONS


def runs(case: Case, device: torch.device) -> bool:
    """Whether the contender takes the case; peers take all."""
    if case.contender in PEERS:
        return True
    prepared = prepare(case, device)
    function: Any = onchip.plan if case.sequences is None else onchip.plan_varlen
    try:
        function(*prepared.inputs, **prepared.arguments, schedule=case.contender)
    except onchip.Unsupported:
        return False
    return True


def calls(case: Case, prepared: Prepared) -> dict[str, Callable[[], object]]:
    """A call for each direction; the forward as in training, unless its schedule has no gradients."""
    out = prepared.attend(*prepared.inputs)
    both: dict[str, Callable[[], object]] = {
        "forward": lambda: prepared.attend(*prepared.inputs),
        "backward": lambda: torch.autograd.grad(out, prepared.leaves, prepared.gradient, retain_graph=True),
    }
    return {direction: both[direction] for direction in directions(case)}
