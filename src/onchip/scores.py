"""How a score changes before the softmax, as values.

Every score value says once, in differentiable torch, what it does to a tile of scores. Schedules that work tile by tile
differentiate that same definition tile by tile; so a value has no second, hand-written backward that could disagree.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from onchip.checks import check_diagonal, check_diagonal_value, check_pairs, describe
from onchip.functions import Traced, Untraced, by_name, trace
from onchip.lowering import Node, Reader, Writer, kind
from onchip.tile import Diagonal, Per, Tile

if TYPE_CHECKING:
    from onchip.problem import Problem


class Score(ABC):
    """One step of clause 1 of the contract."""

    order: ClassVar[int]
    """Place among the steps: softcap, ALiBi, bias, modify, sink."""
    single: ClassVar[bool] = True
    additive: ClassVar[bool] = False
    """The step adds a term that does not depend on the score."""
    adds: ClassVar[bool] = False
    """The term that an additive step adds is its only parameter, as it is."""
    may_hide: ClassVar[bool] = False
    """The step may give minus infinity, which masks."""

    @property
    def parameters(self) -> tuple[tuple[Tensor, Per], ...]:
        """Tensors that may need a gradient, and how each is spread over the scores."""
        return ()

    @abstractmethod
    def apply(self, score: Tensor, tile: Tile, parameters: Sequence[Tensor]) -> Tensor:
        """The changed score; `parameters` are what the tile took of the tensors."""

    def hides(self, parameters: Sequence[Tensor]) -> Tensor | None:
        """Where the step masks (adds minus infinity), bool, broadcastable to the tile."""
        return None

    @abstractmethod
    def lower(self, writer: Writer) -> str: ...

    @classmethod
    @abstractmethod
    def read(cls, reader: Reader, *node: Node) -> Score: ...

    def check(self, problem: Problem) -> None:
        """Raise if the step's tensors do not fit the problem's shapes."""
        return

    def diagonals(self) -> tuple[Diagonal, ...]:
        return ()


@kind("softcap")
@dataclass(frozen=True, eq=False)
class Softcap(Score):
    cap: float
    order: ClassVar[int] = 0

    def apply(self, score: Tensor, tile: Tile, parameters: Sequence[Tensor]) -> Tensor:
        return torch.tanh(score / self.cap) * self.cap

    def lower(self, writer: Writer) -> str:
        return f"('softcap',{writer.real(self.cap)})"

    @classmethod
    def read(cls, reader: Reader, *node: Node) -> Softcap:
        return cls(reader.real(node[0]))


@kind("alibi")
@dataclass(frozen=True, eq=False)
class Alibi(Score):
    slopes: Tensor
    diagonal: Diagonal = "bottom-right"
    order: ClassVar[int] = 1
    additive: ClassVar[bool] = True

    @property
    def parameters(self) -> tuple[tuple[Tensor, Per], ...]:
        return ((self.slopes, "head"),)

    def apply(self, score: Tensor, tile: Tile, parameters: Sequence[Tensor]) -> Tensor:
        distance = (tile.row + tile.offset(self.diagonal) - tile.column).abs()
        return score - parameters[0].to(score.dtype) * distance.to(score.dtype)

    def lower(self, writer: Writer) -> str:
        return f"('alibi',{writer.tensor(self.slopes)},{writer.diagonal(self.diagonal)})"

    @classmethod
    def read(cls, reader: Reader, *node: Node) -> Alibi:
        return cls(reader.tensor(node[0]), reader.diagonal(node[1]))

    def check(self, problem: Problem) -> None:
        problem.check_device("scores.alibi: slopes", self.slopes)
        shape = tuple(self.slopes.shape)
        if shape not in ((problem.heads_q,), (problem.batch, problem.heads_q)):
            raise ValueError(
                f"scores.alibi: slopes must be (heads_q,) = ({problem.heads_q},) or (batch, heads_q) = "
                f"({problem.batch}, {problem.heads_q}), got {shape}"
            )
        check_diagonal(self.diagonal, problem)

    def diagonals(self) -> tuple[Diagonal, ...]:
        return (self.diagonal,)


@kind("bias")
@dataclass(frozen=True, eq=False)
class Bias(Score):
    tensor: Tensor
    order: ClassVar[int] = 2
    single: ClassVar[bool] = False
    additive: ClassVar[bool] = True
    adds: ClassVar[bool] = True
    may_hide: ClassVar[bool] = True

    @property
    def parameters(self) -> tuple[tuple[Tensor, Per], ...]:
        return ((self.tensor, "pair"),)

    def apply(self, score: Tensor, tile: Tile, parameters: Sequence[Tensor]) -> Tensor:
        return score + parameters[0].to(score.dtype)

    def hides(self, parameters: Sequence[Tensor]) -> Tensor | None:
        return parameters[0] == -math.inf

    def lower(self, writer: Writer) -> str:
        return f"('bias',{writer.tensor(self.tensor)})"

    @classmethod
    def read(cls, reader: Reader, *node: Node) -> Bias:
        return cls(reader.tensor(node[0]))

    def check(self, problem: Problem) -> None:
        check_pairs("scores.bias: tensor", self.tensor, problem, *problem.pair_extents())


@kind("modify")
@dataclass(frozen=True, eq=False)
class Modify(Score):
    function: Traced | Untraced
    function64: Traced | Untraced
    """The same function traced over float64 scores: casts to the score's dtype are part of a graph."""
    order: ClassVar[int] = 3
    single: ClassVar[bool] = False
    may_hide: ClassVar[bool] = True

    @property
    def parameters(self) -> tuple[tuple[Tensor, Per], ...]:
        return tuple((tensor, "whole") for tensor in self.function.tensors)

    def apply(self, score: Tensor, tile: Tile, parameters: Sequence[Tensor]) -> Tensor:
        function = self.function64 if score.dtype == torch.float64 else self.function
        return function.over(parameters)(score, tile.batch, tile.head, tile.row, tile.column).to(score.dtype)

    def lower(self, writer: Writer) -> str:
        function = self.function64 if writer.dtype == torch.float64 else self.function
        captured = "".join(f"{writer.tensor(value)}," for value in function.tensors)
        return f"('modify','{function.name}',({captured}))"

    @classmethod
    def read(cls, reader: Reader, *node: Node) -> Modify:
        function = by_name(node[0], tuple(reader.tensor(place) for place in node[1]))
        return cls(function, function)


@kind("sink")
@dataclass(frozen=True, eq=False)
class Sink(Score):
    logits: Tensor
    order: ClassVar[int] = 4

    @property
    def parameters(self) -> tuple[tuple[Tensor, Per], ...]:
        return ((self.logits, "head"),)

    def apply(self, score: Tensor, tile: Tile, parameters: Sequence[Tensor]) -> Tensor:
        return score  # a sink is no score of a pair: `softmax.finish` adds it to the denominator

    def lower(self, writer: Writer) -> str:
        return f"('sink',{writer.tensor(self.logits)})"

    @classmethod
    def read(cls, reader: Reader, *node: Node) -> Sink:
        return cls(reader.tensor(node[0]))

    def check(self, problem: Problem) -> None:
        problem.check_device("scores.sink: logits", self.logits)
        if tuple(self.logits.shape) != (problem.heads_q,):
            raise ValueError(
                f"scores.sink: logits must be (heads_q,) = ({problem.heads_q},), got {tuple(self.logits.shape)}"
            )


# Building values


def softcap(cap: float) -> Score:
    """Bound the scores smoothly: `cap * tanh(s / cap)` (Gemma 2).

    Raises:
        ValueError: cap is not a positive finite number.
    """
    if isinstance(cap, bool | Tensor) or not isinstance(cap, int | float | torch.SymFloat):
        raise TypeError(f"scores.softcap: cap must be a number, got {describe(cap)}")
    if not 0 < cap < math.inf:
        raise ValueError(f"scores.softcap: cap must be positive and finite, got {cap}")
    return Softcap(float(cap))


def alibi(slopes: Tensor, diagonal: Diagonal = "bottom-right") -> Score:
    """Linear distance penalty `-slope * abs(i + offset - j)` (Press et al. 2022, "Train short, test long", section 3).

    Args:
        slopes: floating, (heads_q,) or (batch, heads_q); differentiable.
        diagonal: where the distance is 0, as in `masks.causal`.
    """
    _floating("scores.alibi: slopes", slopes)
    return Alibi(slopes, check_diagonal_value(diagonal))


def bias(tensor: Tensor) -> Score:
    """Add a tensor to the scores; minus infinity hides the pair.

    Args:
        tensor: floating, broadcastable to (batch, heads_q, length_q, length_k); differentiable, its gradient is summed
            over broadcast extents in memory linear in the tensor.
    """
    _floating("scores.bias: tensor", tensor)
    if tensor.dim() > 4:
        raise ValueError(f"scores.bias: tensor must have at most rank 4, got shape {tuple(tensor.shape)}")
    return Bias(tensor)


def modify(fn: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]) -> Score:
    """Any elementwise change: `fn(s, b, h, i, j)` gives the new score of query i of sequence b and head h with key j.

    Args:
        fn: plain torch on the score and four int64 index tensors that broadcast against it. Tensors that it closes over
            are differentiable. It is traced once; build the value outside of compiled regions.

    Raises:
        TypeError, ValueError: fn is not elementwise torch, or returns something else.
        RuntimeError: built inside a region that torch.compile traces.
    """
    return Modify(trace(fn, takes_score=True), trace(fn, takes_score=True, dtype=torch.float64))


def sink(logits: Tensor) -> Score:
    """One more logit for each head in the softmax's denominator, with no value (attention sinks, GPT-OSS).

    Args:
        logits: floating, (heads_q,); differentiable.
    """
    _floating("scores.sink: logits", logits)
    return Sink(logits)


def _floating(name: str, value: Any) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        hint = "; a bool mask is masks.tensor(keep)" if isinstance(value, Tensor) and value.dtype == torch.bool else ""
        raise TypeError(f"{name} must be a floating tensor, got {describe(value)}{hint}")


# What schedules use


def ordered(score: Score | Sequence[Score] | None) -> tuple[Score, ...]:
    """One value or a tuple as the steps of clause 1, in order.

    Raises:
        TypeError: something that is no score value.
        ValueError: two of a step that may stand once.
    """
    if score is None:
        return ()
    values = (score,) if isinstance(score, Score) else tuple(score) if isinstance(score, tuple | list) else None
    if values is None or not all(isinstance(value, Score) for value in values):
        raise TypeError(
            f"score must be a value of onchip.scores or a tuple of them, got {describe(score)}; "
            "a bias tensor is scores.bias(tensor), a function scores.modify(fn)"
        )
    seen: list[type] = []
    for value in values:
        if value.single and type(value) in seen:
            raise ValueError(f"score holds two {type(value).__name__.lower()} values; at most one is accepted")
        seen.append(type(value))
    return tuple(sorted(values, key=lambda value: value.order))


def steps(values: Sequence[Score]) -> tuple[Score, ...]:
    """The values that change the scores of pairs."""
    return tuple(value for value in values if not isinstance(value, Sink))


def sink_of(values: Sequence[Score]) -> Tensor | None:
    """The logits of the sink, if there is one."""
    return next((value.logits for value in values if isinstance(value, Sink)), None)


def taken(value: Score, tile: Tile) -> list[Tensor]:
    """What a tile reads of the value's tensors."""
    return [tile.take(tensor, per) for tensor, per in value.parameters]


def hidden(values: Sequence[Score], tile: Tile) -> Tensor | None:
    """Where steps mask by minus infinity, or None."""
    keep = None
    for value in steps(values):
        hides = value.hides(taken(value, tile))
        if hides is not None:
            keep = hides if keep is None else keep | hides
    return keep
