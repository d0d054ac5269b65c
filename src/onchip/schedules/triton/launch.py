"""From a problem and its tensors to launches: what the portable kernels get, and with which tiles."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from onchip.gpu import FORWARD, GRADIENT, KEYS, QUERIES
from onchip.gpu import call as gpu
from onchip.gpu.call import power_of_two, precision_of
from onchip.gpu.descriptors import is_expressible, rows_of
from onchip.gpu.launcher import ALIGNED, Maps
from onchip.gpu.walk import BLOCK, Axis, ListVisits, Walk
from onchip.normal_form import Tiles
from onchip.problem import Problem
from onchip.schedules.triton.limits import SIZES
from onchip.schedules.triton.tiles import FEW, SHORT, Tile
from onchip.schedules.triton.tuned import Choice, choose, generation
from onchip.states import EMPTY, PARTIAL
from onchip.tile import RectGeometry


class Lists:
    """For each block of 128 rows (or columns, if across) the blocks to visit: partial ones, full ones, then empty ones.

    `order` is int32 (batch or 1, heads or 1, blocks, blocks), `counts` how many are partial and full.
    """

    def __init__(self, states: Tensor) -> None:
        rank = torch.where(states == EMPTY, 3, states)
        self.order = torch.argsort(rank, dim=-1, stable=True).to(torch.int32)
        self.counts = torch.stack([(states == kind).sum(-1) for kind in (1, 2)], dim=-1).to(torch.int32)

    @property
    def arguments(self) -> tuple[Any, ...]:
        batch, heads, rows, columns = self.order.shape
        return self.order, self.counts, rows * heads if batch > 1 else 0, rows if heads > 1 else 0, columns


NO_LISTS = (None, None, 0, 0, 0)
DELTA_ROWS = 64
"""Rows of a program of delta_kernel."""


class Call(gpu.Call):
    """One problem on its way to the kernels, with lists of blocks and tiles."""

    in_eights = True

    def __init__(self, problem: Problem, target: str | None = None) -> None:
        super().__init__(problem, target)
        self.lists = self.residual is not None and not self.packed
        few = problem.length_q <= FEW * (max(1, problem.batch) if self.packed else 1)
        self.pack = problem.group if few and problem.group > 1 and not self.lists else 1

    @cached_property
    def _states(self) -> Tensor:
        """States of blocks of 128 x 128, where a block that sticks out over an edge is at most partial."""
        problem = self.problem
        if self._target is not None:
            # the device need not be here: count where the tensors are
            problem = replace(problem, device=self.tensors[0].device if self.tensors else torch.device("cpu"))
        geometry = problem.geometry()
        assert isinstance(geometry, RectGeometry) and problem.mask is not None
        states = problem.mask.states(Tiles(geometry))
        for dim, length in ((-2, geometry.length_q), (-1, geometry.length_k)):
            last = BLOCK * torch.arange(1, states.shape[dim] + 1, device=states.device)
            limit = length.reshape(-1, 1, 1, 1) if isinstance(length, Tensor) else length
            last = last.reshape(-1, 1) if dim == -2 else last
            states = torch.where(last <= limit, states, states.clamp(max=PARTIAL))
            states = torch.where(last - BLOCK < limit, states, EMPTY)
        return states

    def lists_for(self, kernel: str) -> tuple[Any, ...]:
        if not self.lists:
            return NO_LISTS
        return Lists(self._states.mT.contiguous() if kernel == KEYS else self._states).arguments

    def walks(self, kernel: str) -> list[Walk]:
        """What the programs of a kernel visit. Reads lengths, offsets and lists from the device."""
        if not self.lists or kernel == GRADIENT:
            return super().walks(kernel)
        tile, turned = self.tile(kernel), kernel == KEYS
        own_block, other_block = (tile.columns, tile.rows) if turned else (tile.rows, tile.columns)
        states = self._states.mT if turned else self._states
        alike = self.problem.batch if states.shape[0] == 1 else 1
        walks = []
        for own, other, blocks in zip(*self._lengths(turned), states.cpu(), strict=False):
            axes = (
                Axis.in_blocks(own, own_block, blocks.shape[1]),
                Axis.in_blocks(other, other_block, blocks.shape[2]),
            )
            walks.append(Walk(*axes, ListVisits(axes[0], blocks), alike))
        return walks

    @property
    def workspace_bytes(self) -> int:
        """States, lists and what sorting them takes; nothing where the mask is a band."""
        return self._states.numel() * (1 + 1 + 8 + 8 + 4) if self.lists else 0

    @property
    def padded_rows(self) -> int:
        """Rows of a head as delta_kernel leaves them: whole tiles, wherever the last sequence begins."""
        return -(-self.problem.length_q // max(SIZES)) * max(SIZES) + max(SIZES) * self.packed

    @property
    def row_strides(self) -> tuple[int, int]:
        """Of a sequence and a head, in sixteens of those rows."""
        stride = self.padded_rows // 16
        return (0 if self.packed else self.problem.heads_q * stride), stride

    @property
    def careful(self) -> bool:
        """Whether keys that no row sees may stand inside a tile: not under a band alone, whose edges tiles show."""
        return self.semantics.keep is not None or self.semantics.hides

    @property
    def cares(self) -> tuple[bool, ...]:
        """Of each kind of kernel, which are launched: with care or without, see finite.py."""
        return (True, False) if self.careful else (False,)

    @property
    def alike(self) -> bool:
        """Whether all sequences have the same rows and columns, under the same band."""
        return self.problem.layout == "dense" and self.band.lows is None and self.band.highs is None

    @property
    def sums_in_one_loop(self) -> bool:
        """Whether a tile of a bias' gradient walks over sequences and heads in one loop; those of float32 spill."""
        return self.alike and self.problem.dtype.itemsize < 4

    @property
    def sees_every_row(self) -> bool:
        """Whether shapes alone say that every row sees a key, and so may hold nothing that is not to be read."""
        problem, low, high = self.problem, self.band.low, self.band.high
        if not self.alike or self.careful:
            return False
        last = problem.length_k - 1
        meets = low is None or (low + problem.length_q - 1 <= last and (high is None or low <= high))
        return last >= 0 and meets and (high is None or high >= 0)

    @property
    def reads_every_row(self) -> bool:
        """Whether the kernel of dK and dV without care asks of no row if it sees a key: it does, or all is finite."""
        return self.sees_every_row or (self.careful and self.problem.layout == "dense")

    def kind(self, kernel: str) -> str:
        if self.pack > 1 and kernel in (FORWARD, QUERIES):
            return "few"
        if self.semantics.change is not None or self.problem.seed is not None:
            return "changed"
        if self.semantics.keep is not None:
            return "masked" if kernel == FORWARD else "changed"
        if self.problem.group > 1 and kernel == KEYS:
            return "grouped"
        if not (self.band.has_low or self.band.has_high):
            return "plain"
        return "short" if kernel == FORWARD and self.problem.length_k <= SHORT else "band"

    def _choice(self, kernel: str) -> Choice:
        problem = self.problem
        dim, bits = max(problem.dim_qk, problem.dim_v), problem.dtype.itemsize * 8
        # what was measured here says nothing of a target that need not be here
        device = problem.device if self._target is None else None
        return choose(device, self.target, kernel, dim, bits, self.kind(kernel))

    def tile(self, kernel: str) -> Tile:
        return self._choice(kernel).tile

    def tile_source(self, kernel: str) -> str:
        return self._choice(kernel).source

    def vector(self, *tensors: Tensor) -> int:
        """How many elements every pointer and stride is a multiple of: 16 bytes, or 1 if any is not."""
        width = 16 // self.problem.dtype.itemsize
        for tensor in tensors:
            *others, last = self.strides(tensor)
            if last > 1 or tensor.data_ptr() % 16 or any(stride % width for stride in others):
                return 1
            if last == 0 and tensor.shape[-1] > 1:
                return 1
        return width

    def readable(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The tensors, in float32 as copies if vectors cannot read them.

        How a tile was loaded decides in which order products of float32 are summed, and strides must not change bits.
        Tensors of 16 bits are read as they are.
        """
        if self.problem.dtype.itemsize < 4:
            return tensors
        return tuple(tensor if self.vector(tensor) > 1 else _aligned(tensor) for tensor in tensors)

    def wide(self, *tensors: Tensor) -> bool:
        """Whether offsets inside a tile need 64 bits."""
        return any(256 * (stride_n + stride_d) >= 2**31 for *_, stride_n, stride_d in map(self.strides, tensors))

    @property
    def block_dv(self) -> int:
        return power_of_two(self.problem.dim_v)

    def maps(self, tile: Tile, rows: int, tensors: dict[int, Tensor]) -> Maps:
        """What a kernel is told of tensors by their places, if TMA brings them in tiles of so many rows: those of a
        dense batch, where nothing lies behind a sequence's last row."""
        if not tile.tma or self.problem.layout != "dense" or not all(map(is_expressible, tensors.values())):
            return tuple((None, place) for place in tensors)
        pairs = tensors.items()
        return tuple((rows_of(tensor, rows, power_of_two(tensor.shape[-1])), place) for place, tensor in pairs)

    def constants(self, tile: Tile, vector: int, careful: bool) -> dict[str, Any]:
        """Of every kernel with a tile. With care, and where nothing is read in vectors, registers are not bounded."""
        problem = self.problem
        bounded = tile.registers is not None and vector > 1 and not careful
        return {
            "GROUP": problem.group, "D": problem.dim_qk, "DV": problem.dim_v,
            "BLOCK_D": power_of_two(problem.dim_qk), "BLOCK_DV": self.block_dv,
            "BQ": tile.rows, "BK": tile.columns, "LOW": self.band.has_low, "HIGH": self.band.has_high,
            "LISTS": self.lists, "EIGHTS": self.semantics.eights, "PRECISION": precision_of(problem.dtype, self.target),
            "num_warps": tile.warps, "num_stages": tile.stages,
            "VECTOR": vector, "CAREFUL": careful, **({"maxnreg": tile.registers} if bounded else {}),
        }  # fmt: skip


def conditions(problem: Problem) -> tuple[Any, ...]:
    """What may change between two calls of one problem, and decides which kernels they launch: tiles and precision."""
    precision = torch.backends.cuda.matmul.fp32_precision if problem.dtype == torch.float32 else None
    return generation(), precision


def are_aligned(*tensors: Tensor) -> bool:
    """Whether vectors of 16 bytes may be read from where these tensors start."""
    together = 0
    for tensor in tensors:
        together |= tensor.data_ptr()
    return together % ALIGNED == 0


def _aligned(tensor: Tensor) -> Tensor:
    """A dense copy, unless the tensor is one that starts at an aligned address."""
    if tensor.is_contiguous() and tensor.data_ptr() % 16 == 0:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
