"""How values of masks and scores travel through an operator: tensors, a spec string, ints and floats.

The spec is a Python literal that holds structure only; every run-time value stands in one of the three lists and the
spec names its place. Two calls with the same structure have the same spec, so compiled graphs and kernels are shared.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from onchip.tile import Diagonal

Node = Any
"""A parsed spec: nested tuples of names and places."""

_KINDS: dict[str, type] = {}
_Value = TypeVar("_Value", bound=type)


class Writer:
    """Collects the run-time values of a problem while its structure is written.

    `dtype` is that of the scores: float32, or float64 for float64 inputs.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.tensors: list[Tensor] = []
        self.ints: list[int] = []
        self.floats: list[float] = []

    def tensor(self, value: Tensor | None) -> str:
        if value is None:
            return "None"
        self.tensors.append(value)
        return str(len(self.tensors) - 1)

    def integer(self, value: int | None) -> str:
        if value is None:
            return "None"
        self.ints.append(value)
        return str(len(self.ints) - 1)

    def real(self, value: float) -> str:
        self.floats.append(value)
        return str(len(self.floats) - 1)

    def diagonal(self, value: Diagonal) -> str:
        if isinstance(value, str):
            return f"'{value}'"
        if isinstance(value, Tensor):
            return f"('tensor',{self.tensor(value)})"
        return f"('int',{self.integer(value)})"


class Reader:
    """Gives back the run-time values that a spec names."""

    def __init__(self, tensors: Sequence[Tensor], ints: Sequence[int], floats: Sequence[float]) -> None:
        self._tensors, self._ints, self._floats = tensors, ints, floats

    def tensor(self, place: int) -> Tensor:
        return self._tensors[place]

    def maybe_tensor(self, place: int | None) -> Tensor | None:
        return None if place is None else self._tensors[place]

    def maybe_integer(self, place: int | None) -> int | None:
        return None if place is None else self._ints[place]

    def integer(self, place: int) -> int:
        return self._ints[place]

    def real(self, place: int) -> float:
        return self._floats[place]

    def diagonal(self, node: Node) -> Diagonal:
        if isinstance(node, str):
            return node
        kind, place = node
        return self._tensors[place] if kind == "tensor" else self._ints[place]

    def value(self, node: Node) -> Any:
        """The mask or score value of a node: its class reads the rest of the tuple."""
        return _KINDS[node[0]].read(self, *node[1:])  # type: ignore[attr-defined]


def kind(name: str) -> Callable[[_Value], _Value]:
    """Register a mask or score class under the name that its `lower` writes."""

    def register(cls: _Value) -> _Value:
        _KINDS[name] = cls
        return cls

    return register


@lru_cache(maxsize=4096)
def parse(spec: str) -> Node:
    return ast.literal_eval(spec)
