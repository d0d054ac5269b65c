"""Read a mask function of transformers by calling it with symbols for its indices.

Such a function says by formula whether query q of sequence b sees key k: `k <= q`, `k > q - 4`,
`ids[b, q] == ids[b, k]` and what `&` and `|` make of these. Called with the symbols below it gives back a value of
`onchip.masks`: comparisons of q with k are bands, equalities of ids are documents, conditions on keys alone are
`masks.keys`. So any function made of these is understood, whoever wrote it, at a cost that is linear in the lengths.
What is not raises `Unread`.

transformers numbers the tokens of the whole text, onchip the rows and columns of one call: `Axes` holds where these
start.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from onchip import masks
from onchip.integrations.transformers.visible import Axes, Distance, Unread, Visible

Operation = Callable[[Any, Any], Any]


def read(function: Callable[..., Any], axes: Axes) -> Visible:
    """What the mask function keeps.

    Args:
        function: `function(b, h, q, k)`, elementwise in its indices.
    Raises:
        Unread: it cannot be said with bands, documents and conditions on keys or on queries.
    """
    with _Gathering(axes):
        try:
            visible = function(SequenceIndex(), HeadIndex(), Place(axes, 0), Place(axes, 1))
        except (TypeError, AttributeError) as error:
            raise Unread(str(error)) from None
    if not isinstance(visible, Visible):
        raise Unread(f"a result of type {type(visible).__name__}")
    if visible.remapped and not visible.documents:
        raise Unread("an order of position ids outside of documents")
    return visible


class SequenceIndex:
    """The index b."""


class HeadIndex:
    """The index h, on which no pattern depends."""


class OfSequence:
    """What has one value for each sequence; `tensor` is (batch,)."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Symbol:
    """What has one value for each query (side 0), or for each key (side 1)."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, axes: Axes, side: int) -> None:
        self.axes, self.side = axes, side

    def values(self) -> Tensor:
        """(batch or 1, length of the side)"""
        raise NotImplementedError

    def new_ones(self, *size: Any, **options: Any) -> Visible:
        return Visible(True)

    def new_zeros(self, *size: Any, **options: Any) -> Visible:
        return Visible(False)

    def __bool__(self) -> bool:
        raise Unread("a truth value of an index")

    def _within(self, other: Any, operation: Operation) -> Any:
        """An operation that does not leave this side: a Symbol, or for a comparison the pairs that it keeps."""
        if isinstance(other, Symbol):
            if other.side != self.side:
                raise Unread("arithmetic of a query with a key")
            operand: Any = other.values()
        elif isinstance(other, OfSequence):
            operand = other.tensor[:, None]
        elif isinstance(other, (int, torch.SymInt)):
            operand = other
        else:
            raise Unread(f"arithmetic with {type(other).__name__}")
        return made_of(self.axes, self.side, operation(self.values(), operand))

    def __add__(self, other: Any) -> Any:
        return self._within(other, operator.add)

    def __sub__(self, other: Any) -> Any:
        return self._within(other, operator.sub)

    def __floordiv__(self, other: Any) -> Any:
        return self._within(other, operator.floordiv)

    def __mod__(self, other: Any) -> Any:
        return self._within(other, operator.mod)

    def __eq__(self, other: object) -> Any:
        if not isinstance(other, Symbol) or other.side == self.side:
            return self._within(other, operator.eq)
        query, key = (self, other) if self.side == 0 else (other, self)
        kept = masks.documents(_ids(query.values()), _ids(key.values()))
        return Visible(kept, documents=True, tidy=self._is_packing(other))

    def __ne__(self, other: object) -> Any:
        return ~(self == other)

    def _is_packing(self, other: Symbol) -> bool:
        """Whether equality with the other is how transformers keeps packed documents apart."""
        return False

    def _compare(self, other: Any, operation: Operation) -> Any:
        if isinstance(other, Symbol) and other.side != self.side:
            return operation(self - other, 0)
        return self._within(other, operation)

    def __le__(self, other: Any) -> Any:
        return self._compare(other, operator.le)

    def __lt__(self, other: Any) -> Any:
        return self._compare(other, operator.lt)

    def __ge__(self, other: Any) -> Any:
        return self._compare(other, operator.ge)

    def __gt__(self, other: Any) -> Any:
        return self._compare(other, operator.gt)


class Place(Symbol):
    """The index of a token, or a position that is read from `source` at that index; plus `shift`."""

    def __init__(self, axes: Axes, side: int, source: Tensor | None = None, shift: int = 0) -> None:
        super().__init__(axes, side)
        self.source, self.shift = source, shift

    def values(self) -> Tensor:
        start, length = self.axes.starts[self.side], self.axes.lengths[self.side]
        if self.source is None:
            return (torch.arange(length, device=self.axes.device) + start + self.shift)[None]
        if isinstance(start, Tensor):
            taken = self.source.index_select(1, torch.arange(length, device=self.axes.device) + start)
        else:
            taken = self.source[:, start : start + length]
        if taken.shape[0] not in (1, self.axes.batch) or taken.shape[1] != length:
            raise Unread("a tensor that does not hold every token")
        return taken + self.shift if self.shift else taken

    def __add__(self, other: Any) -> Any:
        if isinstance(other, (int, torch.SymInt)):
            return Place(self.axes, self.side, self.source, self.shift + other)  # type: ignore[arg-type]
        return super().__add__(other)

    def __sub__(self, other: Any) -> Any:
        if isinstance(other, (int, torch.SymInt)):
            return self + -other
        if isinstance(other, Place) and other.side != self.side:
            sign = 1 if self.side == 1 else -1
            if self.source is None and other.source is None:
                constant = (self.axes.starts[self.side] + self.shift) - (self.axes.starts[other.side] + other.shift)
                return Distance(self.axes, sign, constant, remapped=False)
            if self.source is other.source and self.axes.packed:
                return Distance(self.axes, sign, self.shift - other.shift, remapped=True)
        return super().__sub__(other)

    def _is_packing(self, other: Symbol) -> bool:
        return isinstance(other, Place) and self.source is not None and self.source is other.source

    def _compare(self, other: Any, operation: Operation) -> Any:
        # No token has a negative index: `q >= 0` is how transformers says "all".
        if self.source is None and operation is operator.ge and isinstance(other, int) and other <= self.shift:
            return Visible(True)
        return super()._compare(other, operation)


class Values(Symbol):
    """Anything else with one value for each query or key; `tensor` is (batch or 1, length)."""

    def __init__(self, axes: Axes, side: int, tensor: Tensor) -> None:
        super().__init__(axes, side)
        self.tensor = tensor

    def values(self) -> Tensor:
        return self.tensor


def made_of(axes: Axes, side: int, tensor: Tensor) -> Values | Visible:
    """Numbers as a symbol; a condition (bool) as the pairs whose query, or key, fulfils it."""
    if tensor.dtype != torch.bool:
        return Values(axes, side, tensor)
    if side == 1:
        return Visible(masks.keys(tensor), tidy=False)
    nothing = torch.zeros(1, axes.lengths[1], dtype=torch.int64, device=axes.device)
    return Visible(masks.documents((~tensor).to(torch.int64), nothing), tidy=False)


def _ids(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() or tensor.is_complex():
        raise Unread(f"an equality of values of {tensor.dtype}")
    return tensor.to(torch.int64)


class _Gathering(TorchFunctionMode):
    """Inside, a tensor that is indexed by symbols gives a symbol."""

    def __init__(self, axes: Axes) -> None:
        super().__init__()
        self._axes = axes

    def __torch_function__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        if function is Tensor.__getitem__:
            tensor, index = arguments
            index = index if isinstance(index, tuple) else (index,)
            if any(isinstance(part, (SequenceIndex, HeadIndex, Symbol)) for part in index):
                return self._gather(tensor, index)
        if any(isinstance(value, (Symbol, OfSequence, Distance, Visible)) for value in arguments):
            raise Unread("a function of torch on an index")
        return function(*arguments, **(options or {}))

    def _gather(self, tensor: Tensor, index: tuple[Any, ...]) -> Any:
        if len(index) == 1 and isinstance(index[0], SequenceIndex) and tensor.dim() == 1:
            return OfSequence(tensor)
        place = index[-1]
        if isinstance(place, Place) and place.source is None and place.shift == 0:
            if len(index) == 1 and tensor.dim() == 1:
                return self._read(tensor[None], place.side)
            if len(index) == 2 and isinstance(index[0], SequenceIndex) and tensor.dim() == 2:
                return self._read(tensor, place.side)
        raise Unread("an index of another kind")

    def _read(self, tensor: Tensor, side: int) -> Place | Visible:
        place = Place(self._axes, side, tensor)
        if tensor.dtype != torch.bool:
            return place
        kept = made_of(self._axes, side, place.values())
        assert isinstance(kept, Visible)
        return kept
