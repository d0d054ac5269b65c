"""Which pairs of query and key are visible, as values that combine with & | ~.

Every mask is a function of (sequence b, query head h, query i, key j) and says three things about itself: `keep` on a
tile of indices, `states` of many tiles at once (empty, partial, full), and how it is lowered. Functions of this module
build the values; schedules read them through `normal_form.py` and never by class.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, ClassVar, TypeVar

import torch
from torch import Tensor

from onchip.checks import (
    check_bool,
    check_diagonal,
    check_diagonal_value,
    check_pairs,
    check_side,
    check_vector,
    describe,
)
from onchip.functions import Traced, Untraced, by_name, trace
from onchip.lowering import Node, Reader, Writer, kind
from onchip.states import FULL, Grid, extremes, pool, pooled_states, state_of, whole_states
from onchip.tile import Diagonal, RectGeometry, Tile, rank4

if TYPE_CHECKING:
    from onchip.problem import Problem


Parts = TypeVar("Parts", bound="Combined")


class Mask(ABC):
    """A set of visible pairs. Combine with `&` (both), `|` (either) and `~` (the others)."""

    def __and__(self, other: Mask) -> Mask:
        return And((*_flat(And, self), *_flat(And, _mask("&", other))))

    def __or__(self, other: Mask) -> Mask:
        return Or((*_flat(Or, self), *_flat(Or, _mask("|", other))))

    def __invert__(self) -> Mask:
        return self.part if isinstance(self, Not) else Not(self)

    def __bool__(self) -> bool:
        raise TypeError("a mask has no truth value: combine masks with & | ~ instead of and, or, not")

    @abstractmethod
    def keep(self, tile: Tile) -> Tensor:
        """Bool, broadcasts to the tile: True where the pair is visible."""

    @abstractmethod
    def states(self, grid: Grid) -> Tensor:
        """EMPTY, PARTIAL or FULL for each tile, uint8 (batch or 1, heads or 1, blocks_q, blocks_k).

        A tile that is not partial may be called PARTIAL; EMPTY and FULL are certain.
        """

    @abstractmethod
    def lower(self, writer: Writer) -> str: ...

    @classmethod
    @abstractmethod
    def read(cls, reader: Reader, *node: Node) -> Mask: ...

    def band(self, geometry: RectGeometry) -> tuple[int | None, int | None] | None:
        """The mask as low <= column - row <= high, None unbounded; None if it is more than a band of ints."""
        return None

    def check(self, problem: Problem) -> None:
        """Raise if the mask's tensors do not fit the problem's shapes."""
        return

    def diagonals(self) -> Iterator[Diagonal]:
        """The diagonals that the mask aligns to."""
        return iter(())

    def __str__(self) -> str:
        return type(self).__name__.lower()

    def pair_tensors(self) -> Iterator[tuple[str, Tensor, int, int]]:
        """Tensors over pairs, as (name, tensor, rows and columns of pairs that one entry covers)."""
        return iter(())


def causality(band: tuple[int | None, int | None] | None, rows: int) -> bool | None:
    """Whether a band over so many rows is column <= row: False if it hides nothing, None if another, or no band."""
    if band is None or (band[0] is not None and band[0] > 1 - rows):
        return None
    return False if band[1] is None else True if band[1] == 0 else None


def _mask(sign: str, value: object) -> Mask:
    if isinstance(value, Tensor):
        return tensor(value)
    if not isinstance(value, Mask):
        raise TypeError(f"{sign} combines a mask with a mask or a bool tensor, got {type(value).__name__}")
    return value


def _flat(cls: type, value: Mask) -> tuple[Mask, ...]:
    return value.parts if isinstance(value, cls) else (value,)  # type: ignore[attr-defined]


@dataclass(frozen=True, eq=False)
class Combined(Mask):
    """What `&` and `|` share."""

    parts: tuple[Mask, ...]

    sign: ClassVar[str]

    def __str__(self) -> str:
        return "(" + f" {self.sign} ".join(map(str, self.parts)) + ")"

    def lower(self, writer: Writer) -> str:
        return f"('{type(self).__name__.lower()}'," + "".join(f"{part.lower(writer)}," for part in self.parts) + ")"

    @classmethod
    def read(cls: type[Parts], reader: Reader, *node: Node) -> Parts:
        return cls(tuple(reader.value(part) for part in node))

    def check(self, problem: Problem) -> None:
        for part in self.parts:
            part.check(problem)

    def diagonals(self) -> Iterator[Diagonal]:
        for part in self.parts:
            yield from part.diagonals()

    def pair_tensors(self) -> Iterator[tuple[str, Tensor, int, int]]:
        for part in self.parts:
            yield from part.pair_tensors()


@kind("and")
@dataclass(frozen=True, eq=False)
class And(Combined):
    sign: ClassVar[str] = "&"

    def band(self, geometry: RectGeometry) -> tuple[int | None, int | None] | None:
        lows: list[int] = []
        highs: list[int] = []
        for part in self.parts:
            if (band := part.band(geometry)) is None:
                return None
            lows += [] if band[0] is None else [band[0]]
            highs += [] if band[1] is None else [band[1]]
        return max(lows, default=None), min(highs, default=None)

    def keep(self, tile: Tile) -> Tensor:
        return reduce(operator.and_, (part.keep(tile) for part in self.parts))

    def states(self, grid: Grid) -> Tensor:
        return reduce(torch.minimum, (part.states(grid) for part in self.parts))


@kind("or")
@dataclass(frozen=True, eq=False)
class Or(Combined):
    sign: ClassVar[str] = "|"

    def keep(self, tile: Tile) -> Tensor:
        return reduce(operator.or_, (part.keep(tile) for part in self.parts))

    def states(self, grid: Grid) -> Tensor:
        return reduce(torch.maximum, (part.states(grid) for part in self.parts))


@kind("not")
@dataclass(frozen=True, eq=False)
class Not(Mask):
    part: Mask

    def __str__(self) -> str:
        return f"~{self.part}"

    def keep(self, tile: Tile) -> Tensor:
        return ~self.part.keep(tile)

    def states(self, grid: Grid) -> Tensor:
        return FULL - self.part.states(grid)

    def lower(self, writer: Writer) -> str:
        return f"('not',{self.part.lower(writer)})"

    @classmethod
    def read(cls, reader: Reader, *node: Node) -> Not:
        return cls(reader.value(node[0]))

    def check(self, problem: Problem) -> None:
        self.part.check(problem)

    def diagonals(self) -> Iterator[Diagonal]:
        return self.part.diagonals()

    def pair_tensors(self) -> Iterator[tuple[str, Tensor, int, int]]:
        return self.part.pair_tensors()


@kind("band")
@dataclass(frozen=True, eq=False)
class Band(Mask):
    """-left <= j - i - offset <= right; None is unbounded."""

    left: int | None
    right: int | None
    diagonal: Diagonal = "bottom-right"

    def band(self, geometry: RectGeometry) -> tuple[int | None, int | None] | None:
        offset = geometry.offset(self.diagonal)
        if isinstance(offset, Tensor):
            return None
        return None if self.left is None else offset - self.left, None if self.right is None else offset + self.right

    def __str__(self) -> str:
        if (self.left, self.right, self.diagonal) == (None, 0, "bottom-right"):
            return "causal"
        diagonal = "per sequence" if isinstance(self.diagonal, Tensor) else self.diagonal
        return f"window({self.left}, {self.right}) around {diagonal}"

    def keep(self, tile: Tile) -> Tensor:
        distance = tile.column - tile.row - tile.offset(self.diagonal)
        if self.left is None and self.right is None:
            return torch.ones_like(distance, dtype=torch.bool)
        if self.left is None:
            return distance <= self.right  # type: ignore[operator]
        keep = distance >= -self.left
        return keep if self.right is None else keep & (distance <= self.right)

    def states(self, grid: Grid) -> Tensor:
        offset = grid.geometry.offset(self.diagonal)
        if isinstance(offset, Tensor):
            offset = offset.reshape(-1, 1, 1)
        (row_first, row_last), (column_first, column_last) = grid.rows(), grid.columns()
        nearest = column_first[None, None, :] - row_last[None, :, None] - offset
        farthest = column_last[None, None, :] - row_first[None, :, None] - offset
        full = torch.ones_like(nearest, dtype=torch.bool)
        empty = ~full
        if self.left is not None:
            full &= nearest >= -self.left
            empty |= farthest < -self.left
        if self.right is not None:
            full &= farthest <= self.right
            empty |= nearest > self.right
        return state_of(any_kept=~empty, all_kept=full)[:, None]

    def lower(self, writer: Writer) -> str:
        return f"('band',{writer.integer(self.left)},{writer.integer(self.right)},{writer.diagonal(self.diagonal)})"

    @classmethod
    def read(cls, reader: Reader, *node: Node) -> Band:
        return cls(reader.maybe_integer(node[0]), reader.maybe_integer(node[1]), reader.diagonal(node[2]))

    def check(self, problem: Problem) -> None:
        check_diagonal(self.diagonal, problem)

    def diagonals(self) -> Iterator[Diagonal]:
        yield self.diagonal


@kind("keys")
@dataclass(frozen=True, eq=False)
class Keys(Mask):
    kept: Tensor

    def keep(self, tile: Tile) -> Tensor:
        return tile.take_columns(self.kept)

    def states(self, grid: Grid) -> Tensor:
        kept = grid.geometry.whole().take_columns(self.kept)
        any_kept, all_kept = pool(kept, grid.block_k)
        return state_of(any_kept, all_kept)

    def lower(self, writer: Writer) -> str:
        return f"('keys',{writer.tensor(self.kept)})"

    @classmethod
    def read(cls, reader: Reader, *node: Node) -> Keys:
        return cls(reader.tensor(node[0]))

    def check(self, problem: Problem) -> None:
        check_vector("masks.keys: keep", self.kept, problem, "key")


@kind("documents")
@dataclass(frozen=True, eq=False)
class Documents(Mask):
    query_ids: Tensor
    key_ids: Tensor

    def keep(self, tile: Tile) -> Tensor:
        return tile.take_rows(self.query_ids) == tile.take_columns(self.key_ids)

    def states(self, grid: Grid) -> Tensor:
        whole = grid.geometry.whole()
        q_low, q_high = extremes(whole.take_rows(self.query_ids)[:, 0, :, 0], grid.block_q)
        k_low, k_high = extremes(whole.take_columns(self.key_ids)[:, 0, 0, :], grid.block_k)
        q_low, q_high, k_low, k_high = q_low[..., None], q_high[..., None], k_low[:, None], k_high[:, None]
        meet = (q_low <= k_high) & (k_low <= q_high)
        same = (q_low == q_high) & (k_low == k_high) & (q_low == k_low)
        return state_of(meet, same)[:, None]

    def lower(self, writer: Writer) -> str:
        return f"('documents',{writer.tensor(self.query_ids)},{writer.tensor(self.key_ids)})"

    @classmethod
    def read(cls, reader: Reader, *node: Node) -> Documents:
        return cls(reader.tensor(node[0]), reader.tensor(node[1]))

    def check(self, problem: Problem) -> None:
        check_vector("masks.documents: query_ids", self.query_ids, problem, "query")
        check_vector("masks.documents: key_ids", self.key_ids, problem, "key")


@kind("blocks")
@dataclass(frozen=True, eq=False)
class Blocks(Mask):
    kept: Tensor
    size_q: int
    size_k: int

    def keep(self, tile: Tile) -> Tensor:
        return tile.take_blocks(self.kept, self.size_q, self.size_k)

    def states(self, grid: Grid) -> Tensor:
        g = grid.geometry
        kept = rank4(self.kept)
        if kept.shape[0] > 1:
            kept = kept[g.sequence : g.sequence + g.batch]
        # a table of sums answers "how many kept blocks does this tile touch" for tiles of any size
        sums = torch.nn.functional.pad(kept.to(torch.int64).cumsum(-1).cumsum(-2), (1, 0, 1, 0))
        ranges = []
        for (first, last), size, extent in (
            (grid.rows(), self.size_q, kept.shape[-2]),
            (grid.columns(), self.size_k, kept.shape[-1]),
        ):
            if extent == 1:
                ranges.append((torch.zeros_like(first), torch.ones_like(first)))
            else:
                ranges.append((first // size, last // size + 1))
        (top, bottom), (left, right) = ranges
        top, bottom = top[:, None], bottom[:, None]
        count = sums[..., bottom, right] - sums[..., top, right] - sums[..., bottom, left] + sums[..., top, left]
        return state_of(count > 0, count == (bottom - top) * (right - left))

    def lower(self, writer: Writer) -> str:
        return f"('blocks',{writer.tensor(self.kept)},{writer.integer(self.size_q)},{writer.integer(self.size_k)})"

    @classmethod
    def read(cls, reader: Reader, *node: Node) -> Blocks:
        return cls(reader.tensor(node[0]), reader.integer(node[1]), reader.integer(node[2]))

    def check(self, problem: Problem) -> None:
        if problem.layout == "packed":
            # the longest sequence is known on the device only: leading and head extents are what can be checked
            check_pairs("masks.blocks: keep", self.kept, problem, None, None)
            return
        rows = -(-problem.length_q // self.size_q)
        columns = -(-problem.length_k // self.size_k)
        check_pairs("masks.blocks: keep", self.kept, problem, rows, columns, "blocks_q", "blocks_k")

    def pair_tensors(self) -> Iterator[tuple[str, Tensor, int, int]]:
        yield "masks.blocks: keep", self.kept, self.size_q, self.size_k


@kind("tensor")
@dataclass(frozen=True, eq=False)
class Pairs(Mask):
    kept: Tensor

    def keep(self, tile: Tile) -> Tensor:
        return tile.take(self.kept, "pair")

    def states(self, grid: Grid) -> Tensor:
        return pooled_states(self.keep, grid) if self.kept.device.type == "cpu" else whole_states(self.keep, grid)

    def lower(self, writer: Writer) -> str:
        return f"('tensor',{writer.tensor(self.kept)})"

    @classmethod
    def read(cls, reader: Reader, *node: Node) -> Pairs:
        return cls(reader.tensor(node[0]))

    def check(self, problem: Problem) -> None:
        check_pairs("masks.tensor: keep", self.kept, problem, *problem.pair_extents())

    def pair_tensors(self) -> Iterator[tuple[str, Tensor, int, int]]:
        yield "masks.tensor: keep", self.kept, 1, 1


@kind("predicate")
@dataclass(frozen=True, eq=False)
class Predicate(Mask):
    function: Traced | Untraced

    def keep(self, tile: Tile) -> Tensor:
        return self.function(tile.batch, tile.head, tile.row, tile.column)

    def states(self, grid: Grid) -> Tensor:
        return pooled_states(self.keep, grid)

    def lower(self, writer: Writer) -> str:
        captured = "".join(f"{writer.tensor(value)}," for value in self.function.tensors)
        return f"('predicate','{self.function.name}',({captured}))"

    @classmethod
    def read(cls, reader: Reader, *node: Node) -> Predicate:
        return cls(by_name(node[0], tuple(reader.tensor(place) for place in node[1])))


# Building values


def causal(diagonal: Diagonal = "bottom-right") -> Mask:
    """A query sees the keys up to its diagonal: `j <= i + offset`.

    Args:
        diagonal: "bottom-right" (offset length_k - length_q: the last query sees the last key), "top-left" (offset 0,
            what `F.scaled_dot_product_attention(is_causal=True)` means), an int offset, or an int tensor (batch,).
    """
    return Band(None, 0, check_diagonal_value(diagonal))


def window(left: int | None, right: int | None, diagonal: Diagonal = "bottom-right") -> Mask:
    """A query sees `left` keys before its diagonal, the diagonal, and `right` keys after it, both inclusive.

    `window(w - 1, 0)` lets every query see w keys. None is unbounded.

    Raises:
        TypeError: a side is not an int.
        ValueError: a side is negative.
    """
    return Band(check_side("left", left), check_side("right", right), check_diagonal_value(diagonal))


def keys(keep: Tensor) -> Mask:
    """Hide keys from every query of their sequence: padding.

    Args:
        keep: bool, (batch, length_k) or (length_k,); packed: (tokens_k,). True is visible.
    """
    check_bool("masks.keys: keep", keep)
    return Keys(keep)


def documents(query_ids: Tensor, key_ids: Tensor | None = None) -> Mask:
    """A query sees the keys of its own document.

    Args:
        query_ids: int, (batch, length_q) or (length_q,); packed: (tokens_q,).
        key_ids: the same for keys; None means query_ids.
    """
    key_ids = query_ids if key_ids is None else key_ids
    for name, ids in (("query_ids", query_ids), ("key_ids", key_ids)):
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"masks.documents: {name} must be an int32 or int64 tensor, got {describe(ids)}")
    return Documents(query_ids, key_ids)


def blocks(keep: Tensor, size: int | tuple[int, int] = 128) -> Mask:
    """Block-sparse attention: keep or hide whole blocks of pairs.

    Args:
        keep: bool, rank 2 to 4, broadcastable to (batch, heads_q, ceil(length_q / size_q), ceil(length_k / size_k)).
        size: rows and columns of a block, one int or (size_q, size_k).
    """
    check_bool("masks.blocks: keep", keep)
    if not 2 <= keep.dim() <= 4:
        raise ValueError(f"masks.blocks: keep must have rank 2 to 4, got shape {tuple(keep.shape)}")
    size_q, size_k = (size, size) if isinstance(size, int) else size
    if size_q < 1 or size_k < 1:
        raise ValueError(f"masks.blocks: size must be positive, got {size}")
    return Blocks(keep, size_q, size_k)


def tensor(keep: Tensor) -> Mask:
    """Any mask, pair by pair.

    Args:
        keep: bool, broadcastable to (batch, heads_q, length_q, length_k). True is visible. Additive masks are
            `scores.bias`.
    """
    check_bool("masks.tensor: keep", keep)
    if keep.dim() > 4:
        raise ValueError(f"masks.tensor: keep must have at most rank 4, got shape {tuple(keep.shape)}")
    return Pairs(keep)


def predicate(fn: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> Mask:
    """A mask by formula: `fn(b, h, i, j)` says whether query i of sequence b and head h sees key j.

    Args:
        fn: plain torch on four int64 index tensors that broadcast against each other; returns bool. It may close over
            tensors. It is traced once; build the value outside of compiled regions.

    Raises:
        TypeError, ValueError: fn is not elementwise torch, or returns something else.
        RuntimeError: built inside a region that torch.compile traces.
    """
    return Predicate(trace(fn, takes_score=False))


def every(parts: Sequence[Mask]) -> Mask:
    """The intersection of one or more masks."""
    return reduce(operator.and_, parts)


def leaves(mask: Mask) -> Iterator[Mask]:
    """What a mask is combined of."""
    if isinstance(mask, Combined):
        for part in mask.parts:
            yield from leaves(part)
    elif isinstance(mask, Not):
        yield from leaves(mask.part)
    else:
        yield mask
