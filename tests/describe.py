"""Masks and scores as small descriptions with two meanings.

`value` builds the onchip value that a user would pass. `keep` and `apply` say in plain torch, for one sequence at a
time, what the contract promises; they share no code with onchip.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

import onchip


@dataclass(frozen=True)
class Sequence:
    """One sequence of a batch or of a packed call: where it stands and how many rows of it exist."""

    number: int
    batch: int
    heads: int
    length_q: int
    length_k: int
    start_q: int = 0
    start_k: int = 0
    packed: bool = False
    indices: tuple = field(init=False)

    def __post_init__(self):
        b = torch.tensor(self.number)
        h = torch.arange(self.heads)[:, None, None]
        i = torch.arange(self.length_q)[:, None]
        j = torch.arange(self.length_k)
        object.__setattr__(self, "indices", (b, h, i, j))

    def offset(self, diagonal):
        if isinstance(diagonal, torch.Tensor):
            return int(diagonal[self.number])
        return {"bottom-right": self.length_k - self.length_q, "top-left": 0}.get(diagonal, diagonal)

    def pairs(self, tensor):
        """The part of a tensor broadcastable to (batch, heads, rows, columns) that belongs to this sequence."""
        tensor = tensor.reshape((1,) * (4 - tensor.ndim) + tuple(tensor.shape))
        tensor = tensor[self.number if tensor.shape[0] > 1 else 0]
        rows = self.length_q if tensor.shape[1] > 1 else 1
        columns = self.length_k if tensor.shape[2] > 1 else 1
        return tensor[:, :rows, :columns]

    def tokens(self, tensor, start, length):
        """The entries of a per-token tensor: (batch, length), (length,), or packed (tokens,)."""
        if self.packed:
            return tensor[start : start + length]
        return tensor[self.number, :length] if tensor.ndim == 2 else tensor[:length]


class Mask:
    def __and__(self, other):
        return And(self, other)

    def __or__(self, other):
        return Or(self, other)

    def __invert__(self):
        return Not(self)


@dataclass(frozen=True)
class And(Mask):
    left: Mask
    right: Mask

    def value(self):
        return self.left.value() & self.right.value()

    def keep(self, sequence):
        return self.left.keep(sequence) & self.right.keep(sequence)


@dataclass(frozen=True)
class Or(Mask):
    left: Mask
    right: Mask

    def value(self):
        return self.left.value() | self.right.value()

    def keep(self, sequence):
        return self.left.keep(sequence) | self.right.keep(sequence)


@dataclass(frozen=True)
class Not(Mask):
    inner: Mask

    def value(self):
        return ~self.inner.value()

    def keep(self, sequence):
        return ~self.inner.keep(sequence)


@dataclass(frozen=True)
class Causal(Mask):
    diagonal: str | int | torch.Tensor = "bottom-right"

    def value(self):
        return onchip.masks.causal(self.diagonal)

    def keep(self, sequence):
        _, _, i, j = sequence.indices
        return j <= i + sequence.offset(self.diagonal)


@dataclass(frozen=True)
class Window(Mask):
    left: int | None
    right: int | None
    diagonal: str | int | torch.Tensor = "bottom-right"

    def value(self):
        return onchip.masks.window(self.left, self.right, self.diagonal)

    def keep(self, sequence):
        _, _, i, j = sequence.indices
        distance = j - i - sequence.offset(self.diagonal)
        keep = torch.ones_like(distance, dtype=torch.bool)
        if self.left is not None:
            keep &= distance >= -self.left
        if self.right is not None:
            keep &= distance <= self.right
        return keep


@dataclass(frozen=True)
class Keys(Mask):
    tensor: torch.Tensor

    def value(self):
        return onchip.masks.keys(self.tensor)

    def keep(self, sequence):
        keep = sequence.tokens(self.tensor, sequence.start_k, sequence.length_k)
        return keep.expand(sequence.length_q, -1)


@dataclass(frozen=True)
class Documents(Mask):
    query_ids: torch.Tensor
    key_ids: torch.Tensor | None = None

    def value(self):
        return onchip.masks.documents(self.query_ids, self.key_ids)

    def keep(self, sequence):
        key_ids = self.query_ids if self.key_ids is None else self.key_ids
        rows = sequence.tokens(self.query_ids, sequence.start_q, sequence.length_q)
        columns = sequence.tokens(key_ids, sequence.start_k, sequence.length_k)
        return rows[:, None] == columns[None, :]


@dataclass(frozen=True)
class Blocks(Mask):
    tensor: torch.Tensor
    size: int | tuple[int, int] = 128

    def value(self):
        return onchip.masks.blocks(self.tensor, self.size)

    def keep(self, sequence):
        rows, columns = self.size if isinstance(self.size, tuple) else (self.size, self.size)
        _, _, i, j = sequence.indices
        tensor = self.tensor.reshape((1,) * (4 - self.tensor.ndim) + tuple(self.tensor.shape))
        tensor = tensor[sequence.number if tensor.shape[0] > 1 else 0]
        rows_index = i // rows if tensor.shape[1] > 1 else torch.zeros_like(i)
        columns_index = j // columns if tensor.shape[2] > 1 else torch.zeros_like(j)
        return tensor[:, rows_index, columns_index]


@dataclass(frozen=True)
class TensorMask(Mask):
    tensor: torch.Tensor
    bare: bool = False  # pass the tensor itself as mask=

    def value(self):
        return self.tensor if self.bare else onchip.masks.tensor(self.tensor)

    def keep(self, sequence):
        return sequence.pairs(self.tensor)


@dataclass(frozen=True)
class Predicate(Mask):
    function: Callable

    def value(self):
        return onchip.masks.predicate(self.function)

    def keep(self, sequence):
        shape = (sequence.heads, sequence.length_q, sequence.length_k)
        return self.function(*sequence.indices).expand(shape)


@dataclass(frozen=True)
class Softcap:
    cap: float
    rank = 0
    leaves = ()

    def value(self):
        return onchip.scores.softcap(self.cap)

    def apply(self, s, sequence):
        return self.cap * torch.tanh(s / self.cap)


@dataclass(frozen=True)
class Alibi:
    diagonal: str | int | torch.Tensor = "bottom-right"
    leaves: tuple = ("slopes",)
    rank = 1

    def value(self, slopes):
        return onchip.scores.alibi(slopes, self.diagonal)

    def apply(self, s, sequence, slopes):
        _, _, i, j = sequence.indices
        slope = slopes[sequence.number] if slopes.ndim == 2 else slopes
        return s - slope[:, None, None] * (i + sequence.offset(self.diagonal) - j).abs().to(s.dtype)


@dataclass(frozen=True)
class Bias:
    leaves: tuple = ("bias",)
    rank = 2

    def value(self, bias):
        return onchip.scores.bias(bias)

    def apply(self, s, sequence, bias):
        return s + sequence.pairs(bias)


@dataclass(frozen=True)
class Modify:
    """`function(s, b, h, i, j, *captured)`, where the captured tensors are the named leaves."""

    function: Callable
    leaves: tuple = ()
    rank = 3

    def value(self, *captured):
        function = self.function
        if not captured:
            return onchip.scores.modify(function)
        return onchip.scores.modify(lambda s, b, h, i, j: function(s, b, h, i, j, *captured))

    def apply(self, s, sequence, *captured):
        return self.function(s, *sequence.indices, *captured)


@dataclass(frozen=True)
class Sink:
    leaves: tuple = ("sink",)
    rank = 4

    def value(self, sink):
        return onchip.scores.sink(sink)
