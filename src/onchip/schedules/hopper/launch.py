"""What the Hopper kernels are given: descriptors, the walk over tiles, workspace."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from onchip.gpu import FORWARD
from onchip.gpu import call as gpu
from onchip.gpu.call import power_of_two
from onchip.model.hardware import multiprocessors
from onchip.problem import Problem
from onchip.schedules.hopper.tiles import Tile, tile_of

SECTION_BYTES = 32 * 2**20
"""Keys and values of the heads that are worked on at one time: they should stay in the L2 cache."""
VECTOR = 8
"""Elements in 16 bytes, the least that TMA steps by."""
ROWS = 64
"""Of a warpgroup."""
LAYOUT = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)


class Call(gpu.Call):
    """One problem on its way to the kernels."""

    def tile(self, kernel: str) -> Tile:
        problem = self.problem
        return tile_of(max(problem.dim_qk, problem.dim_v), problem.length_k)

    @property
    def again(self) -> bool:
        """Whether tiles may be computed twice, see forward.py."""
        return self.problem.dtype == torch.bfloat16


class Order:
    """How many tiles of rows there are, and the order in which programs take them.

    Attributes:
        tiles: of each head of a sequence; slots for all sequences, if packed.
        section: heads in a row whose tiles are taken before those of others.
        counters: ints of workspace: the next tile, and, where tiles may be computed twice, a mark of each program and
            for each tile its mark and the one that its program took before.
    """

    def __init__(self, call: Call) -> None:
        problem = call.problem
        self.tiles = call.count(problem.length_q, 1, call.tile(FORWARD).rows)
        heads = problem.heads_q * (1 if call.packed else problem.batch)
        self.total = self.tiles * heads
        self.programs = min(multiprocessors(problem.device), self.total)
        of_a_head = problem.length_k * (problem.dim_qk + problem.dim_v) * problem.dtype.itemsize
        self.section = max(1, min(heads, SECTION_BYTES * problem.group // max(1, of_a_head)))
        self.counters = 1 + (self.programs + 2 * self.total if call.again else 0)


def width(dim: int) -> int:
    """The width of a tile in shared memory, whose rows the swizzle cuts into 64 elements."""
    return max(64, power_of_two(dim))


def described(tensor: Tensor, packed: bool, rows: int, columns: int) -> TensorDescriptor:
    """A tensor as TMA sees it, (sequence, head, row, element), in tiles of rows x columns."""
    shape, strides = list(tensor.shape), list(tensor.stride())
    if packed:
        shape, strides = [1, shape[1], shape[0], shape[2]], [0, strides[1], strides[0], strides[2]]
    # along an extent of 1 a stride is never used, but has to be one that TMA takes
    strides = [stride if size > 1 else VECTOR for size, stride in zip(shape[:-1], strides[:-1], strict=True)] + [1]
    return TensorDescriptor(tensor, shape, strides, [1, 1, rows, columns], LAYOUT)


def expressible(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if TMA cannot read it: rows of one piece, everything else at multiples of 16 bytes."""
    strides = [stride for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size > 1]
    dense = tensor.shape[-1] == 1 or tensor.stride(-1) == 1
    if dense and tensor.data_ptr() % 16 == 0 and all(stride > 0 and stride % VECTOR == 0 for stride in strides):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def launch(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
) -> tuple[int, tuple[Any, ...], dict[str, Any]]:
    """Programs, arguments and constants of the forward kernel."""
    call = Call(problem)
    tile, order = call.tile(FORWARD), Order(call)
    block_d, block_dv = width(problem.dim_qk), width(problem.dim_v)
    work = torch.zeros(order.counters, dtype=torch.int32, device=query.device)
    change = call.semantics.change
    if key.numel() == 0:
        # nothing of them is read, but a descriptor stands on memory
        key, value = query, out
    values = (
        described(query, call.packed, ROWS, block_d), described(key, call.packed, tile.columns, block_d),
        described(value, call.packed, tile.columns, block_dv), described(out, call.packed, ROWS, block_dv),
        value, out, lse, work, *call.strides(value, VECTOR)[:3], *call.strides(out, VECTOR)[:3], *call.lse_strides,
        problem.batch, problem.heads_q, problem.length_q, problem.length_k, order.tiles, order.section, order.total,
        *call.layout, *call.band.arguments, call.scale, call.sink, call.given(call.semantics.reads),
    )  # fmt: skip
    constants = {
        "change": change, "SCALED": change is not None or problem.scale <= 0, "AGAIN": call.again,
        "LOW": call.band.has_low, "HIGH": call.band.has_high,
        "ALONE": not call.packed and problem.key_lengths is None, "GROUP": problem.group, "DV": problem.dim_v,
        "BLOCK_D": block_d, "BLOCK_DV": block_dv, "BK": tile.columns, "GROUPS": tile.groups, "STAGES": tile.stages,
        "REGISTERS": tile.registers, "num_warps": 4,
    }  # fmt: skip
    return order.programs, values, constants
