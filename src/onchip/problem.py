"""What is computed: a Problem holds shapes, visibility, scores, dropout and layout, and nothing of how.

A Problem is built from the arguments of a call (attention.py), lowered to what an operator can carry (`lower`), and
lifted again inside the operator (`lift`). In between only tensors, a spec string, ints and floats travel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from onchip import philox
from onchip.lowering import Reader, Writer, parse
from onchip.tile import PackedGeometry, RectGeometry, Tile

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

Lowered = tuple[list[Tensor], str, list[int], list[float]]


@dataclass(frozen=True, eq=False)
class Problem:
    """One attention problem. `length_q` and `length_k` are token counts when packed.

    `gives_lse` says that the LSE is a result; without it the LSE serves a backward only and may be less exact.
    `mask` is a value of `onchip.masks` or None, `scores` the ordered values of `onchip.scores`.
    """

    layout: str
    batch: int
    heads_q: int
    heads_kv: int
    length_q: int
    length_k: int
    dim_qk: int
    dim_v: int
    dtype: torch.dtype
    device: torch.device
    mask: Any
    scores: tuple[Any, ...]
    scale: float
    dropout_p: float
    seed: Tensor | None
    cu_seqlens_query: Tensor | None
    cu_seqlens_key: Tensor | None
    query_lengths: Tensor | None
    key_lengths: Tensor | None
    deterministic: bool
    schedule: str | None
    gives_lse: bool

    # Between a call and an operator

    def lower(self) -> Lowered:
        writer = Writer(self.score_dtype)
        mask = "None" if self.mask is None else self.mask.lower(writer)
        scores = "(" + "".join(f"{score.lower(writer)}," for score in self.scores) + ")"
        layout = ",".join(
            writer.tensor(tensor)
            for tensor in (self.cu_seqlens_query, self.cu_seqlens_key, self.query_lengths, self.key_lengths)
        )
        writer.real(self.scale)
        scale = len(writer.floats) - 1
        dropout = "None" if self.seed is None else f"({writer.real(self.dropout_p)},{writer.tensor(self.seed)})"
        schedule = "None" if self.schedule is None else f"'{self.schedule}'"
        flags = f"{self.deterministic},{schedule},{self.gives_lse}"
        spec = f"('{self.layout}',({layout}),{mask},{scores},{scale},{dropout},{flags})"
        return writer.tensors, spec, writer.ints, writer.floats

    @staticmethod
    def lift(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        tensors: Sequence[Tensor],
        spec: str,
        ints: Sequence[int],
        floats: Sequence[float],
    ) -> Problem:
        layout, layout_tensors, mask, scores, scale, dropout, deterministic, schedule, gives_lse = parse(spec)
        reader = Reader(tensors, ints, floats)
        cu_q, cu_k, lengths_q, lengths_k = (reader.maybe_tensor(place) for place in layout_tensors)
        return Problem(
            **layout_shape(layout, query, key, value, cu_q),
            mask=None if mask is None else reader.value(mask),
            scores=tuple(reader.value(score) for score in scores),
            scale=reader.real(scale),
            dropout_p=0.0 if dropout is None else reader.real(dropout[0]),
            seed=None if dropout is None else reader.tensor(dropout[1]),
            cu_seqlens_query=cu_q,
            cu_seqlens_key=cu_k,
            query_lengths=lengths_q,
            key_lengths=lengths_k,
            deterministic=deterministic,
            schedule=schedule,
            gives_lse=gives_lse,
        )

    # What schedules ask

    @cached_property
    def band(self) -> tuple[int | None, int | None] | None:
        """Of a dense problem without scores and dropout: visible is low <= column - row <= high, None unbounded.

        None for any other problem. Such a problem holds no tensors and no functions.
        """
        if self.layout != "dense" or self.scores or self.seed is not None:
            return None
        if self.mask is None:
            return None, None
        geometry = self.geometry()
        assert isinstance(geometry, RectGeometry)
        return self.mask.band(geometry)

    @property
    def score_dtype(self) -> torch.dtype:
        """The dtype of scores, sums and LSE."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def group(self) -> int:
        """Query heads for each key head."""
        return self.heads_q // self.heads_kv if self.heads_kv else 1

    @property
    def kept_scale(self) -> float:
        """What dropout multiplies the weights with that it keeps."""
        return philox.kept_scale(self.dropout_p)

    def pair_extents(self) -> tuple[int | None, int | None]:
        """Rows and columns of a tensor over pairs; None if only the values of cu_seqlens know them."""
        return (None, None) if self.layout == "packed" else (self.length_q, self.length_k)

    def geometry(self) -> RectGeometry | PackedGeometry:
        """Indices of all pairs at once, without reading values of tensors."""
        if self.layout == "packed":
            assert self.cu_seqlens_query is not None and self.cu_seqlens_key is not None
            return PackedGeometry(
                self.device,
                self.heads_q,
                self.length_q,
                self.length_k,
                self.cu_seqlens_query,
                self.cu_seqlens_key,
                self.query_lengths,
                self.key_lengths,
            )
        lengths = (self.query_lengths, self.length_q), (self.key_lengths, self.length_k)
        length_q, length_k = (full if given is None else given.to(torch.int64) for given, full in lengths)
        return RectGeometry(self.device, self.batch, self.heads_q, self.length_q, self.length_k, length_q, length_k)

    def keep(self, tile: Tile) -> Tensor | None:
        """Visible pairs of a tile, bool, broadcastable to it, or None if all are."""
        keep = tile.inside()
        if self.mask is not None:
            masked = self.mask.keep(tile)
            keep = masked if keep is None else keep & masked
        return keep

    def dropout_keep(self, tile: Tile) -> Tensor | None:
        """Weights that live, bool, the tile's shape, or None without dropout."""
        if self.seed is None:
            return None
        limit = philox.threshold(self.dropout_p)
        return philox.keep(self.seed, tile.batch, tile.head, tile.row, tile.column, limit, tile.column_start)

    def dropout_factor(self, tile: Tile) -> Tensor | None:
        """`dropout_keep` as 1 and 0 in the dtype of scores."""
        if self.seed is None:
            return None
        if self.device.type != "cpu" or tile.column_start is None:
            keep = self.dropout_keep(tile)
            return None if keep is None else keep.to(self.score_dtype)
        limit, count = philox.threshold(self.dropout_p), tile.column.shape[-1]
        where = (tile.batch, tile.head, tile.row, tile.column_start, count)
        return philox.keep_as(self.score_dtype, int(self.seed), *where, limit)

    def diagonals(self) -> list[Any]:
        """Every diagonal that a mask or a score aligns to."""
        found = [] if self.mask is None else list(self.mask.diagonals())
        return found + [diagonal for score in self.scores for diagonal in score.diagonals()]

    def describe(self) -> str:
        """The problem in one line."""
        size = (
            f"{self.batch} sequences, {self.length_q} and {self.length_k} tokens"
            if self.layout == "packed"
            else f"batch {self.batch}, lengths {self.length_q} and {self.length_k}"
        )
        extras = [str(self.mask)] if self.mask is not None else []
        extras += [type(score).__name__.lower() for score in self.scores]
        if self.seed is not None:
            extras.append(f"dropout {self.dropout_p}")
        return (
            f"{self.layout}, {size}, heads {self.heads_q} and {self.heads_kv}, dims {self.dim_qk} and {self.dim_v}, "
            f"{str(self.dtype).removeprefix('torch.')}, {self.device.type}" + "".join(f", {extra}" for extra in extras)
        )

    # Checks

    def check_device(self, name: str, tensor: Tensor) -> None:
        if tensor.device != self.device:
            raise ValueError(f"{name} must be on the query's device {self.device}, got {tensor.device}")

    def check_static(self) -> None:
        """Shapes of everything that hangs on the problem.

        Raises:
            ValueError: naming the argument, its shape and what it must be.
        """
        if self.mask is not None:
            self.mask.check(self)
        for score in self.scores:
            score.check(self)

    def check_values(self) -> None:
        """Values of lengths and offsets. Reads them: on a GPU this waits for the device.

        Raises:
            ValueError: naming the argument, the values and what they must be.
        """
        for name, cu, tokens in (
            ("cu_seqlens_query", self.cu_seqlens_query, self.length_q),
            ("cu_seqlens_key", self.cu_seqlens_key, self.length_k),
        ):
            if cu is None:
                continue
            offsets = cu.tolist()
            if offsets[0] != 0:
                raise ValueError(f"{name} must start at 0, got {_shorten(offsets)}")
            if any(later < earlier for earlier, later in zip(offsets, offsets[1:], strict=False)):
                raise ValueError(f"{name} must not decrease, got {_shorten(offsets)}")
            if offsets[-1] > tokens:
                raise ValueError(f"{name} must end at or before the {tokens} tokens of its tensor, got {offsets[-1]}")
        for name, lengths, cu, longest in (
            ("query lengths", self.query_lengths, self.cu_seqlens_query, self.length_q),
            ("key lengths", self.key_lengths, self.cu_seqlens_key, self.length_k),
        ):
            if lengths is None:
                continue
            values = lengths.tolist()
            limits = [longest] * len(values) if cu is None else (cu[1:] - cu[:-1]).tolist()
            if any(not 0 <= length <= limit for length, limit in zip(values, limits, strict=True)):
                raise ValueError(
                    f"lengths: {name} must lie between 0 and the room of their sequence, {_shorten(limits)}, "
                    f"got {_shorten(values)}"
                )
        if self.layout == "packed":
            self._check_packed_extents()

    def _check_packed_extents(self) -> None:
        """Tensors over pairs reach as far as the longest sequence."""
        assert self.cu_seqlens_query is not None and self.cu_seqlens_key is not None
        rows, columns = (
            max((cu[1:] - cu[:-1]).tolist(), default=0) for cu in (self.cu_seqlens_query, self.cu_seqlens_key)
        )
        for name, tensor, size_q, size_k in self._pair_tensors():
            wanted = (-(-rows // size_q), -(-columns // size_k))
            extents = (1, 1, *tensor.shape)[-2:]
            if any(have != 1 and have < want for have, want in zip(extents, wanted, strict=True)):
                raise ValueError(
                    f"{name} must reach over the longest sequence, {wanted[0]} x {wanted[1]}, got {tuple(tensor.shape)}"
                )

    def _pair_tensors(self) -> list[tuple[str, Tensor, int, int]]:
        found = [] if self.mask is None else list(self.mask.pair_tensors())
        for score in self.scores:
            found += [("scores.bias: tensor", tensor, 1, 1) for tensor, per in score.parameters if per == "pair"]
        return found


def _shorten(values: list[int]) -> str:
    return str(values) if len(values) <= 12 else f"[{', '.join(map(str, values[:10]))}, ...]"


def layout_shape(layout: str, query: Tensor, key: Tensor, value: Tensor, cu: Tensor | None) -> dict[str, Any]:
    """The fields of a Problem that the three inputs give."""
    packed = layout == "packed"
    return {
        "layout": layout,
        "batch": cu.shape[0] - 1 if cu is not None else query.shape[0],
        "heads_q": query.shape[1],
        "heads_kv": key.shape[1],
        "length_q": query.shape[0] if packed else query.shape[2],
        "length_k": key.shape[0] if packed else key.shape[2],
        "dim_qk": query.shape[-1],
        "dim_v": value.shape[-1],
        "dtype": query.dtype,
        "device": query.device,
    }


def check_inputs(query: Any, key: Any, value: Any, packed: bool) -> None:
    """Ranks, dtypes, devices and shapes of the three inputs.

    Raises:
        TypeError: not tensors, or dtypes that are not floating or differ.
        ValueError: ranks or shapes that do not fit.
    """
    names = ("query", "key", "value")
    tensors = (query, key, value)
    for name, tensor in zip(names, tensors, strict=True):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}")
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(f"query, key and value must have one dtype, got {query.dtype}, {key.dtype} and {value.dtype}")
    if not query.device == key.device == value.device:
        raise ValueError(
            f"query, key and value must be on one device, got {query.device}, {key.device} and {value.device}"
        )
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    rank, axes = (3, "(tokens, heads, dim)") if packed else (4, "(batch, heads, length, dim)")
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.dim() != rank:
            raise ValueError(f"{name} must be {axes}, rank {rank}, got {shapes}")
    length = 0 if packed else 2
    if not packed and not query.shape[0] == key.shape[0] == value.shape[0]:
        raise ValueError(f"query, key and value must have one batch size, got {shapes}")
    if key.shape[length] != value.shape[length]:
        raise ValueError(f"key and value must have one length, got {shapes}")
    if key.shape[1] != value.shape[1]:
        raise ValueError(f"key and value must have the same heads, got {shapes}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must have one head dim, got {shapes}")
    if query.shape[-1] == 0 or value.shape[-1] == 0:
        raise ValueError(f"head dims must be at least 1, got {shapes}")
    heads_q, heads_kv = query.shape[1], key.shape[1]
    if (heads_kv == 0 and heads_q != 0) or (heads_kv != 0 and heads_q % heads_kv != 0):
        raise ValueError(f"query heads must be a multiple of key heads, got {heads_q} and {heads_kv} ({shapes})")


def check_number(name: str, value: Any, low: float, high: float, accepted: str) -> float:
    """A finite number in [low, high).

    Raises:
        TypeError, ValueError: naming the argument, the value and what is accepted.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | torch.SymFloat | torch.SymInt):
        raise TypeError(f"{name} must be {accepted}, got {type(value).__name__}")
    if not (low <= value < high and -math.inf < value < math.inf):
        raise ValueError(f"{name} must be {accepted}, got {value}")
    return value  # type: ignore[return-value]


def check_lengths(name: str, value: Any, count: int, device: torch.device) -> None:
    """An int tensor with `count` entries on the device."""
    if not isinstance(value, Tensor) or value.dtype not in (torch.int32, torch.int64):
        came = f"a {value.dtype} tensor" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} must be an int32 or int64 tensor, got {came}")
    if value.dim() != 1 or value.shape[0] != count:
        raise ValueError(f"{name} must have shape ({count},), got {tuple(value.shape)}")
    if value.device != device:
        raise ValueError(f"{name} must be on the query's device {device}, got {value.device}")
