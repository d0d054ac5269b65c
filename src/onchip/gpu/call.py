"""A problem on its way to the kernels of a GPU.

Everything here is known without reading a value of a tensor on the device: no launch waits, and a captured graph serves
other lengths, offsets, ids and seeds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Protocol

import torch
import triton
from torch import Tensor

from onchip import philox
from onchip.gpu import FORWARD, KEYS, QUERIES, parts
from onchip.gpu.source import Reads, Semantics, coded, over_columns, semantics
from onchip.gpu.walk import Axis, BandVisits, Visits, Walk
from onchip.lowering import Node, parse
from onchip.problem import Problem
from onchip.scores import sink_of
from onchip.softmax import LOG2E
from onchip.strides import empty_ordered
from onchip.tile import rank4

FARTHEST = 0x3FFFFFFF
"""Bounds of a band beyond this are unbounded: differences of indices are int32."""


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


_HERE = nullcontext()


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    # a device of the CPU has no index; a tensor on another one says that CUDA runs, which torch.cuda would ask again
    if device.index is None or device.index == torch._C._cuda_getDevice():
        return _HERE
    return torch.cuda.device(device)


@dataclass(frozen=True, slots=True)
class Results:
    """Shape and strides of out, in the stride order of the query, and of the LSE."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    rows: tuple[int, ...]
    row_strides: tuple[int, ...]

    @staticmethod
    def of(problem: Problem, query: Tensor) -> Results:
        """Those of a problem, for queries with the strides of this one."""
        return _results(query.shape, query.stride(), problem.dim_v, problem.layout == "packed")

    def empty(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Out in the query's dtype, and LSE, both on its device and yet to be written."""
        device = query.device
        out = torch.empty_strided(self.shape, self.strides, dtype=query.dtype, device=device)
        return out, torch.empty_strided(self.rows, self.row_strides, dtype=torch.float32, device=device)


def empty_results(problem: Problem, query: Tensor) -> tuple[Tensor, Tensor]:
    """Out and LSE, yet to be written."""
    return Results.of(problem, query).empty(query)


@lru_cache(maxsize=1024)
def _results(shape: tuple[int, ...], strides: tuple[int, ...], dim_v: int, packed: bool) -> Results:
    query = torch.empty_strided(shape, strides, device="meta")
    out = empty_ordered((*shape[:-1], dim_v), query, query.dtype)
    rows = (shape[1], shape[0]) if packed else shape[:-1]
    return Results(tuple(out.shape), out.stride(), tuple(rows), torch.empty(rows, device="meta").stride())


class Tile(Protocol):
    """Rows and columns of a tile of scores."""

    @property
    def rows(self) -> int: ...

    @property
    def columns(self) -> int: ...


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


class Call:
    """One problem on its way to the kernels; a schedule adds its tiles.

    Args:
        target: the architecture to count for, such as "sm_90", where the device need not be here.

    Attributes:
        residual: what a mask says beyond a band, a node of its spec, or None.
        lists: whether kernels walk over lists of blocks. pack: how many query heads of a group stand in one tile.
        capped, capped_slope: the softcap that the kernels call, and its derivative.
        in_eights: whether the kernels name columns in eights, so that biases and masks are read in vectors.
    """

    lists = False
    pack = 1
    in_eights = False
    capped: Any = parts.capped
    capped_slope: Any = parts.capped_slope

    def __init__(self, problem: Problem, target: str | None = None) -> None:
        self.problem, self._target = problem, target
        self.packed = problem.layout == "packed"
        self.tensors, spec, self.ints, self.floats = problem.lower()
        _, _, mask, scores, *_ = parse(spec)
        bands, self.residual = _split(mask)
        self.band = self._band(bands)
        self.score_nodes: tuple[Node, ...] = scores
        steps = tuple(node for node in scores if node[0] != "sink")
        dense = (place for place, tensor in enumerate(self.tensors) if tensor.dim() and tensor.stride(-1) == 1)
        wide = frozenset(place for place in dense if self.tensors[place].shape[-1] > 1)
        pairs, columns = self._in_vectors(wide, steps)
        self.semantics: Semantics = semantics(
            self.residual, steps, self.packed, wide, pairs, columns, self.capped, self.capped_slope
        )
        sink = sink_of(problem.scores)
        self.sink = None if sink is None else sink.contiguous()

    def _in_vectors(self, dense: frozenset[int], steps: tuple[Node, ...]) -> tuple[frozenset[int], frozenset[int]]:
        """Places of tensors with an entry for each pair, and for each column, that are read in vectors.

        Vectors are brought ahead, like keys, and the tiles in shared memory have room beside them for a bias of the
        inputs' width and one mask, and for what has a single row.
        """
        if not self.in_eights:
            return frozenset(), frozenset()
        pairs, columns = (dense & places for places in over_columns(self.residual, steps))
        found, room = set(), self.problem.dtype.itemsize + 1
        sizes = {place: self.tensors[place].element_size() for place in sorted(pairs)}
        for place, size in sorted(sizes.items(), key=lambda item: -item[1]):
            if size <= room and self._lies_in_eights(self.tensors[place]):
                found.add(place)
                room -= size
        lying = (place for place in columns if self._lies_in_eights(self.tensors[place]))
        return frozenset(found), frozenset(lying)

    def _lies_in_eights(self, tensor: Tensor) -> bool:
        """Whether eight columns of a tensor lie in a row from every multiple of 8 on, and none is missing."""
        if self.packed or self.problem.length_k % 8 or tensor.shape[-1] != self.problem.length_k:
            return False
        strides = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
        return all(size == 1 or stride % 8 == 0 for size, stride in strides)

    def tile(self, kernel: str) -> Tile:
        """The tile of a kernel."""
        raise NotImplementedError

    def tile_source(self, kernel: str) -> str:
        """Where the tile of a kernel comes from, in words."""
        return "shipped"

    @cached_property
    def target(self) -> str:
        return self._target or architecture(self.problem.device)

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

    # What a plan tells

    def pairs(self) -> int:
        """Pairs of (query, key) whose score the forward computes. Reads lengths, offsets and lists from the device."""
        heads = self.problem.heads_q // self.pack
        return sum(
            walk.sequences * walk.visits.weigh(walk.own.exists, walk.other.exists) * self.repeats(walk.visits, heads)
            for walk in self.walks(FORWARD)
        )

    @staticmethod
    def repeats(visits: Visits, heads: int) -> int:
        """How often a sum over patterns counts, where so many heads visit."""
        return heads if visits.patterns == 1 else 1

    def walks(self, kernel: str) -> list[Walk]:
        """What the programs of a kernel visit. Reads lengths and offsets from the device."""
        tile, turned = self.tile(kernel), kernel == KEYS
        pack = self.pack if kernel in (FORWARD, QUERIES) else 1
        walks = []
        for (length_q, length_k, low, high), alike in Counter(self._bands()).items():
            rows, columns = Axis.of(length_q, tile.rows, pack), Axis.of(length_k, tile.columns)
            axes = (columns, rows) if turned else (rows, columns)
            bounds = (-high, -low) if turned else (low, high)
            walks.append(Walk(*axes, BandVisits(*axes, *bounds), alike))
        return walks

    def _lengths(self, turned: bool) -> tuple[list[int], list[int]]:
        """Lengths of every sequence along the axis that programs own, and along the other one."""
        queries, keys = ([lengths[side] for lengths in self.extents()] for side in (0, 1))
        return (keys, queries) if turned else (queries, keys)

    def _bands(self) -> Iterator[tuple[int, int, int, int]]:
        """Lengths of query and key of every sequence, and its band."""
        band = self.band
        for number, (length_q, length_k) in enumerate(self.extents()):
            shift = length_k - length_q
            lows = (_value(band.low), _value(band.low_aligned, shift), _value(band.lows, number=number))
            highs = (_value(band.high), _value(band.high_aligned, shift), _value(band.highs, number=number))
            low = max((bound for bound in lows if bound is not None), default=-FARTHEST)
            high = min((bound for bound in highs if bound is not None), default=FARTHEST)
            yield length_q, length_k, low, high

    def extents(self) -> list[tuple[int, int]]:
        """Lengths of query and key of every sequence."""
        problem = self.problem
        sides = [
            rooms if used is None else used.tolist()
            for rooms, used in zip(self.rooms(), (problem.query_lengths, problem.key_lengths), strict=True)
        ]
        return list(zip(*sides, strict=True))

    def rooms(self) -> tuple[list[int], list[int]]:
        """How many rows of query and of key each sequence has room for."""
        problem = self.problem
        sides = (problem.cu_seqlens_query, problem.length_q), (problem.cu_seqlens_key, problem.length_k)
        rows, columns = ([full] * problem.batch if cu is None else (cu[1:] - cu[:-1]).tolist() for cu, full in sides)
        return rows, columns

    # What kernels take

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

    def count(self, length: int, pack: int, rows: int) -> int:
        """Tiles of rows for each head of a sequence; slots for all sequences, if packed (parts.find_slot)."""
        if self.packed:
            return length * pack // rows + self.problem.batch + 1
        return -(-length * pack // rows)


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
    if role in ("pair", "pair in eights"):
        tensor = rank4(tensor)
        strides = [stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
        if role == "pair in eights":
            return [tensor, *(coded(stride // 8) for stride in strides[:3])]
        return [tensor, *map(coded, (*strides, max(1, tensor.shape[2]), max(1, tensor.shape[3])))]
    last = tensor.stride(-1) if tensor.shape[-1] > 1 else 0
    first = tensor.stride(0) if tensor.dim() == 2 and tensor.shape[0] > 1 else 0
    if role == "column in eights":
        return [tensor, coded(first // 8)]
    return [tensor, coded(first), coded(last)]
