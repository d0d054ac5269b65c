"""What the Hopper kernels are given: descriptors, the walk over tiles, workspace."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from onchip.gpu import KEYS, parts
from onchip.gpu import call as gpu
from onchip.gpu.call import power_of_two
from onchip.gpu.descriptors import is_expressible, moved
from onchip.gpu.launcher import Launcher
from onchip.model.hardware import multiprocessors
from onchip.problem import Problem
from onchip.schedules.hopper.special import capped_slope_to_11_bits, capped_to_11_bits
from onchip.schedules.hopper.tiles import BACKWARD, Block, Tile, tile_of

CACHED_BYTES, SECTION_BYTES, SECTION_HEADS = 8 * 2**20, 16 * 2**20, 32
"""Keys and values of the heads that are worked on at one time. The first much stays in the L2 cache until all programs
are through; under a band that ends at the diagonal the second much, and so many heads at least: more heads have more
long tiles to begin with, which weighs more there."""
VECTOR = 8
"""Elements in 16 bytes, the least that TMA steps by."""
PANEL = 64
"""Elements of a row that the swizzle holds together."""
NARROW = 128
"""Up to these head dims q is held in registers."""
ROWS = 64
"""Of a warpgroup."""
FEW_MARKS = 4096
"""So many ints of workspace are kept for each stream: small calls spend no time on an allocation."""
LAYOUT = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)


class Call(gpu.Call):
    """One problem on its way to the kernels."""

    def __init__(self, problem: Problem, target: str | None = None) -> None:
        super().__init__(problem, target)
        few = problem.length_q <= ROWS * (max(1, problem.batch) if self.packed else 1)
        # a tile holds the same number of rows for each, and TMA counts no further than 64 of them
        self.pack = math.gcd(problem.group, ROWS) if few else 1

    def tile(self, kernel: str) -> Tile | Block:
        return BACKWARD if kernel == KEYS else self.forward_tile

    @property
    def forward_tile(self) -> Tile:
        return tile_of(self.problem.dim_qk, self.problem.dim_v)

    @property
    def capped(self) -> Any:
        """The softcap: in bfloat16 scores need not be exact to more than 11 bits."""
        return capped_to_11_bits if self.problem.dtype == torch.bfloat16 else parts.capped

    @property
    def capped_slope(self) -> Any:
        return capped_slope_to_11_bits if self.problem.dtype == torch.bfloat16 else parts.capped_slope

    @property
    def again(self) -> bool:
        """Whether tiles may be computed twice, see forward.py.

        Under ALiBi all scores of a long walk rise, and by more than any range: there the maximum had better run.
        """
        return self.problem.dtype == torch.bfloat16 and not any(node[0] == "alibi" for node in self.score_nodes)


class Order:
    """How many tiles of rows there are, and the order in which programs take them.

    Attributes:
        tiles: of each head of a sequence; slots for all sequences, if packed.
        section: heads in a row whose tiles are taken before those of others.
        marks: ints of workspace, where tiles may be computed twice: a mark of each program, and for each tile its mark
            and the one that its program took before.
    """

    def __init__(self, call: Call) -> None:
        problem = call.problem
        self.tiles = call.count(problem.length_q, call.pack, call.forward_tile.rows)
        heads = problem.heads_q // call.pack * (1 if call.packed else problem.batch)
        self.total = self.tiles * heads
        self.programs = min(multiprocessors(problem.device), self.total)
        of_a_head = problem.length_k * (problem.dim_qk + problem.dim_v) * problem.dtype.itemsize
        size, least = (SECTION_BYTES, SECTION_HEADS) if call.band.has_high else (CACHED_BYTES, 1)
        self.section = min(heads, max(least, size * problem.group // call.pack // max(1, of_a_head)))
        self.marks = self.programs + 2 * self.total if call.again else 0


def width(dim: int) -> int:
    """The width of a tile in shared memory, whose rows the swizzle cuts into 64 elements."""
    return max(PANEL, power_of_two(dim))


def pieces(problem: Problem) -> int:
    """Into how many panels the head dim of q and k is cut; narrow ones are one piece, which registers can hold."""
    wide = max(problem.dim_qk, problem.dim_v) > NARROW
    return max(2, -(-problem.dim_qk // PANEL)) if wide else 1


def described(tensor: Tensor, packed: bool, rows: int, columns: int, pack: int = 1) -> TensorDescriptor:
    """Tensors like this one as TMA sees them, (sequence, head, row, element), in tiles of rows x columns; or, where so
    many heads stand in a tile, (sequence, row, head, element)."""
    shape, strides = list(tensor.shape), list(tensor.stride())
    if packed:
        shape, strides = [1, shape[1], shape[0], shape[2]], [0, strides[1], strides[0], strides[2]]
    box = [1, 1, rows, columns]
    if pack > 1:
        shape[1:3], strides[1:3] = shape[2:0:-1], strides[2:0:-1]
        box = [1, rows // pack, pack, columns]
    # along an extent of 1 a stride is never used, but has to be one that TMA takes
    strides = [stride if size > 1 else VECTOR for size, stride in zip(shape[:-1], strides[:-1], strict=True)] + [1]
    descriptor = TensorDescriptor(tensor, shape, strides, box, LAYOUT)
    # it is kept, and the tensor should not be
    descriptor.base = None
    return descriptor


def expressible(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if TMA cannot read it: rows of one piece, everything else at multiples of 16 bytes."""
    if is_expressible(tensor):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A launch but for the addresses.

    Attributes:
        query, key, value, out: descriptors of tensors like those that come.
        marks: ints of workspace.
    """

    launcher: Launcher
    query: TensorDescriptor
    key: TensorDescriptor
    value: TensorDescriptor
    out: TensorDescriptor
    marks: int

    def run(self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor) -> None:
        """Launch the kernel on tensors with the shapes and strides of those that it was prepared for."""
        device = query.device
        counter, work = workspace_of(device)
        if self.marks > FEW_MARKS:
            work = torch.empty(self.marks, dtype=torch.int32, device=device)
        descriptors = moved(self.query, query), moved(self.key, key), moved(self.value, value), moved(self.out, out)
        self.launcher(value, out, lse, counter, work, descriptors=descriptors)


def workspace_of(device: torch.device) -> tuple[Tensor, Tensor]:
    """The number of the next tile, 0, and room for FEW_MARKS marks, of the current stream.

    A kernel leaves 0 behind and writes marks before it reads them, so kernels of one stream share both. A captured
    graph may run beside anything, so it gets its own.
    """
    if torch.cuda.is_current_stream_capturing():
        return _workspace(device)
    key = device, torch._C._cuda_getCurrentRawStream(device.index)
    found = _WORKSPACES.get(key)
    if found is None:
        found = _WORKSPACES[key] = _kept_workspace(device)
    return found


def _workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    # addresses of marks are multiples of 16 bytes, as those of tensors are
    whole = torch.zeros(4 + FEW_MARKS, dtype=torch.int32, device=device)
    return whole[:1], whole[4:]


def _kept_workspace(device: torch.device) -> tuple[Tensor, Tensor]:
    """One that outlives the call.

    A thread of its own allocates it, on the default stream: what the calling thread or its stream allocates may belong
    to the memory of a graph that somebody is about to capture.
    """
    with ThreadPoolExecutor(1) as other:
        found, written = other.submit(_written_workspace, device).result()
    torch.cuda.current_stream(device).wait_event(written)
    return found


def _written_workspace(device: torch.device) -> tuple[tuple[Tensor, Tensor], torch.cuda.Event]:
    with torch.cuda.device(device):
        found, written = _workspace(device), torch.cuda.Event()
        written.record()
    return found, written


_WORKSPACES: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}


def prepare(kernel: Any, problem: Problem, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> Prepared:
    """The launch of the forward kernel for tensors that TMA can read."""
    call = Call(problem)
    tile, order = call.forward_tile, Order(call)
    panels = pieces(problem)
    block_d, block_dv = width(problem.dim_qk) if panels == 1 else PANEL, width(problem.dim_v)
    change = call.semantics.change
    constants = {
        "change": change, "SCALED": change is not None or problem.scale <= 0, "AGAIN": call.again,
        "LOW": call.band.has_low, "HIGH": call.band.has_high,
        "ALONE": not call.packed and problem.key_lengths is None, "GROUP": problem.group // call.pack,
        "PACK": call.pack, "DV": problem.dim_v, "BLOCK_D": block_d, "BLOCK_DV": block_dv, "PIECES": panels,
        "BK": tile.columns, "GROUPS": tile.groups,
        "STAGES": tile.stages, "REGISTERS": tile.registers, "num_warps": 4,
    }  # fmt: skip
    rest = (
        *call.strides(value, VECTOR)[:3], *call.strides(out, VECTOR)[:3], *call.lse_strides,
        problem.batch, problem.heads_q // call.pack, problem.length_q, problem.length_k,
        order.tiles, order.section, order.total,
        *call.layout, *call.band.arguments, call.scale, call.sink, call.given(call.semantics.reads),
        *call.dropout,
    )  # fmt: skip
    return Prepared(
        Launcher(kernel, order.programs, rest, constants),
        described(query, call.packed, ROWS, block_d, call.pack), described(key, call.packed, tile.columns, block_d),
        described(value, call.packed, tile.columns, block_dv), described(out, call.packed, ROWS, block_dv, call.pack),
        order.marks,
    )  # fmt: skip
