"""From a problem and its tensors to launches: what the kernels get, and with which tiles.

Everything here is known without reading a value of a tensor on the device: no launch waits, and a captured graph serves
other lengths, offsets, ids and seeds.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from onchip import philox
from onchip.lowering import Node, parse
from onchip.normal_form import Tiles
from onchip.problem import Problem
from onchip.schedules.triton.source import Reads, Semantics, coded, semantics
from onchip.schedules.triton.tiles import FEW, FORWARD, KEYS, QUERIES, Tile, tile_of
from onchip.scores import sink_of
from onchip.softmax import LOG2E
from onchip.states import EMPTY, PARTIAL
from onchip.tile import RectGeometry, rank4

FARTHEST = 0x3FFFFFFF
"""Bounds of a band beyond this are unbounded: differences of indices are int32."""
BLOCK = 128


@lru_cache(maxsize=64)
def architecture(device: torch.device) -> str:
    """ "sm_90", "gfx942", or "interpreter" for a tensor of the CPU."""
    if device.type == "cpu":
        return "interpreter"
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def precision_of(dtype: torch.dtype, target: str) -> str:
    """How float32 products are made: of three products in TF32, or as IEEE says where torch's own are set to that."""
    if dtype != torch.float32:
        return "tf32"
    if not target.startswith("sm_") or torch.backends.cuda.matmul.fp32_precision == "ieee":
        return "ieee"
    return "tf32x3"


def power_of_two(size: int) -> int:
    """The width of a tile that holds so many elements; products take at least 16."""
    return max(16, triton.next_power_of_2(size))


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    if device.type == "cpu" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


@dataclass(frozen=True)
class Band:
    """The band of a mask as a kernel takes it: ints, ints around the last diagonal, tensors with one per sequence."""

    low: int | None
    high: int | None
    low_aligned: int | None
    high_aligned: int | None
    lows: Tensor | None
    highs: Tensor | None

    @property
    def has_low(self) -> bool:
        return any(bound is not None for bound in (self.low, self.low_aligned, self.lows))

    @property
    def has_high(self) -> bool:
        return any(bound is not None for bound in (self.high, self.high_aligned, self.highs))

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.low, self.high, self.low_aligned, self.high_aligned, self.lows, self.highs


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


class Call:
    """One problem on its way to the kernels."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.packed = problem.layout == "packed"
        self.tensors, spec, self.ints, self.floats = problem.lower()
        _, _, mask, scores, *_ = parse(spec)
        bands, residual = _split(mask)
        self.band = self._band(bands)
        self.score_nodes: tuple[Node, ...] = scores
        steps = tuple(node for node in scores if node[0] != "sink")
        dense = (place for place, tensor in enumerate(self.tensors) if tensor.dim() and tensor.stride(-1) == 1)
        wide = frozenset(place for place in dense if self.tensors[place].shape[-1] > 1)
        self.semantics: Semantics = semantics(residual, steps, self.packed, wide)
        sink = sink_of(problem.scores)
        self.sink = None if sink is None else sink.contiguous()
        self.target = architecture(problem.device)
        self.lists = residual is not None and not self.packed
        few = problem.length_q <= FEW * (max(1, problem.batch) if self.packed else 1)
        self.pack = problem.group if few and problem.group > 1 and not self.lists else 1

    # What a mask lowers to

    def _band(self, nodes: tuple[Node, ...]) -> Band:
        """The intersection of bands (nodes of a spec)."""
        problem = self.problem
        static = problem.layout == "dense"
        sides: dict[str, tuple[list[int], list[int], list[Tensor]]] = {"low": ([], [], []), "high": ([], [], [])}
        for _, left, right, diagonal in nodes:
            for side, place, sign in (("low", left, -1), ("high", right, 1)):
                if place is None:
                    continue
                bound = sign * self.ints[place]
                fixed, aligned, given = sides[side]
                if diagonal == "bottom-right":
                    (fixed if static else aligned).append(bound + (problem.length_k - problem.length_q) * static)
                elif diagonal == "top-left":
                    fixed.append(bound)
                elif diagonal[0] == "int":
                    fixed.append(bound + self.ints[diagonal[1]])
                else:
                    given.append(self.tensors[diagonal[1]].to(torch.int64) + bound)
        (low, low_aligned, lows), (high, high_aligned, highs) = sides["low"], sides["high"]
        return Band(
            _tightest(low, max), _tightest(high, min), _tightest(low_aligned, max), _tightest(high_aligned, min),
            _tightest_given(lows, torch.maximum), _tightest_given(highs, torch.minimum),
        )  # fmt: skip

    @cached_property
    def _states(self) -> Tensor:
        """States of blocks of 128 x 128, where a block that sticks out over an edge is at most partial."""
        geometry = self.problem.geometry()
        assert isinstance(geometry, RectGeometry) and self.problem.mask is not None
        states = self.problem.mask.states(Tiles(geometry))
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

    # What a plan tells

    def pairs(self) -> int:
        """Pairs of (query, key) whose score the forward computes. Reads lengths, offsets and lists from the device."""
        problem, tile = self.problem, self.tile(FORWARD)
        if self.lists:
            batch, heads, *_ = self._states.shape
            visited = int((self._states != EMPTY).sum()) * problem.batch * problem.heads_q // max(1, batch * heads)
            return min(visited * BLOCK * BLOCK, problem.batch * problem.heads_q * problem.length_q * problem.length_k)
        total = 0
        for number, (length_q, length_k) in enumerate(self._extents()):
            shift = length_k - length_q
            lows = [_value(self.band.low), _value(self.band.low_aligned, shift), _value(self.band.lows, number=number)]
            highs = [
                _value(self.band.high),
                _value(self.band.high_aligned, shift),
                _value(self.band.highs, number=number),
            ]
            low = max((bound for bound in lows if bound is not None), default=-FARTHEST)
            high = min((bound for bound in highs if bound is not None), default=FARTHEST)
            first = torch.arange(0, length_q, tile.rows)
            last = (first + tile.rows).clamp(max=length_q) - 1
            start = (first + low).clamp(min=0) // tile.columns * tile.columns
            width = ((last + high + 1).clamp(max=length_k) - start).clamp(min=0)
            total += int((width * (last - first + 1)).sum())
        return total * problem.heads_q

    def _extents(self) -> list[tuple[int, int]]:
        """Lengths of query and key of every sequence."""
        problem = self.problem
        sides = []
        for cu, used, full in (
            (problem.cu_seqlens_query, problem.query_lengths, problem.length_q),
            (problem.cu_seqlens_key, problem.key_lengths, problem.length_k),
        ):
            rooms = [full] * problem.batch if cu is None else (cu[1:] - cu[:-1]).tolist()
            sides.append(rooms if used is None else used.tolist())
        return list(zip(*sides, strict=True))

    @property
    def workspace_bytes(self) -> int:
        """States, lists and what sorting them takes; nothing where the mask is a band."""
        return self._states.numel() * (1 + 1 + 8 + 8 + 4) if self.lists else 0

    # What kernels take

    @property
    def careful(self) -> bool:
        """Whether keys that no row sees may stand inside a tile: not under a band alone, whose edges tiles show."""
        return self.semantics.keep is not None or self.semantics.hides

    def kind(self, kernel: str) -> str:
        if self.pack > 1 and kernel in (FORWARD, QUERIES):
            return "few"
        if self.semantics.keep is not None or self.semantics.change is not None or self.problem.seed is not None:
            return "changed"
        if self.problem.group > 1 and kernel == KEYS:
            return "grouped"
        return "band" if self.band.has_low or self.band.has_high else "plain"

    def tile(self, kernel: str) -> Tile:
        problem = self.problem
        dim = max(problem.dim_qk, problem.dim_v)
        return tile_of(self.target, kernel, dim, problem.dtype.itemsize * 8, self.kind(kernel))

    def given(self, reads: Reads) -> tuple[Any, ...]:
        """What functions read, in their order."""
        values: list[Any] = []
        for what, place, *role in reads:
            if what == "integer":
                values.append(coded(max(-FARTHEST, min(FARTHEST, self.ints[place]))))
            elif what == "real":
                values.append(self.floats[place])
            else:
                values += _spread(self.tensors[place], role[0])
        return tuple(values)

    @property
    def scale(self) -> float:
        """The factor of the scores, in base 2 if nothing changes them."""
        return self.problem.scale * (1.0 if self.semantics.change is not None else LOG2E)

    @property
    def dropout(self) -> tuple[Any, int, float]:
        problem = self.problem
        if problem.seed is None:
            return None, 0, 1.0
        return problem.seed, philox.threshold(problem.dropout_p), problem.kept_scale

    @property
    def layout(self) -> tuple[Any, ...]:
        problem = self.problem
        lengths = (None, None) if problem.batch == 0 else (problem.query_lengths, problem.key_lengths)
        return problem.cu_seqlens_query, problem.cu_seqlens_key, *lengths

    def strides(self, tensor: Tensor | None, vector: int = 1) -> tuple[int, int, int, int]:
        """Of sequence, head, row and element, in vectors of so many elements; 0 along extents of 1."""
        if tensor is None:
            return 0, 0, 0, 0
        strides = [
            stride // vector if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        ]
        return (0, strides[1], strides[0], strides[2]) if self.packed else tuple(strides)  # type: ignore[return-value]

    def all_strides(self, vector: int, *tensors: Tensor | None) -> tuple[int, ...]:
        return tuple(stride for tensor in tensors for stride in self.strides(tensor, vector))

    @property
    def lse_strides(self) -> tuple[int, int]:
        """Of sequence and head, in a tensor like the LSE."""
        length = self.problem.length_q
        return (0, length) if self.packed else (length * self.problem.heads_q, length)

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

    def count(self, length: int, pack: int, rows: int) -> int:
        """Tiles of rows for each head of a sequence; slots for all sequences, if packed (parts.find_slot)."""
        if self.packed:
            return length * pack // rows + self.problem.batch + 1
        return -(-length * pack // rows)

    @property
    def block_dv(self) -> int:
        return power_of_two(self.problem.dim_v)

    def constants(self, tile: Tile) -> dict[str, Any]:
        problem = self.problem
        return {
            "GROUP": problem.group, "D": problem.dim_qk, "DV": problem.dim_v,
            "BLOCK_D": power_of_two(problem.dim_qk), "BLOCK_DV": self.block_dv,
            "BQ": tile.rows, "BK": tile.columns, "LOW": self.band.has_low, "HIGH": self.band.has_high,
            "LISTS": self.lists, "CAREFUL": self.careful, "PRECISION": precision_of(problem.dtype, self.target),
            "num_warps": tile.warps, "num_stages": tile.stages,
        }  # fmt: skip


def _aligned(tensor: Tensor) -> Tensor:
    """A dense copy, unless the tensor is one that starts at an aligned address."""
    if tensor.is_contiguous() and tensor.data_ptr() % 16 == 0:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _split(mask: Node) -> tuple[tuple[Node, ...], Node]:
    """Bands of a mask's node, and what else must hold."""
    nodes = () if mask is None else mask[1:] if mask[0] == "and" else (mask,)
    bands = tuple(node for node in nodes if node[0] == "band")
    others = tuple(node for node in nodes if node[0] != "band")
    return bands, None if not others else others[0] if len(others) == 1 else ("and", *others)


def _tightest(bounds: list[int], choose: Any) -> int | None:
    return max(-FARTHEST, min(FARTHEST, choose(bounds))) if bounds else None


def _tightest_given(bounds: list[Tensor], choose: Any) -> Tensor | None:
    if not bounds:
        return None
    bound = bounds[0]
    for other in bounds[1:]:
        bound = choose(bound, other)
    return bound.clamp(-FARTHEST, FARTHEST).to(torch.int32).contiguous()


def _value(bound: int | Tensor | None, shift: int = 0, number: int = 0) -> int | None:
    if bound is None:
        return None
    return int(bound[number]) if isinstance(bound, Tensor) else bound + shift


def _spread(tensor: Tensor, role: str) -> list[Any]:
    """A tensor as a pointer and the strides that its role needs, 0 where it broadcasts."""
    if tensor.dtype == torch.bool:
        tensor = tensor.view(torch.uint8)
    if role == "pair":
        tensor = rank4(tensor)
        strides = [stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        return [tensor, *map(coded, (*strides, max(1, tensor.shape[2]), max(1, tensor.shape[3])))]
    last = tensor.stride(-1) if tensor.shape[-1] > 1 else 0
    first = tensor.stride(0) if tensor.dim() == 2 and tensor.shape[0] > 1 else 0
    return [tensor, coded(first), coded(last)]
