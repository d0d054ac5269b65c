"""What operators of PyTorch move: each reads its operands and writes its results, whole and once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from onchip.model.kernels import Kernel
from onchip.model.traffic import Traffic

PRODUCTS = ("bmm", "baddbmm", "mm", "addmm")
EXPONENTIALS = ("exp", "exp2", "tanh")
"""tanh is made of one."""


def distinct_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor in memory: what is expanded counts once."""
    size = tensor.element_size()
    for extent, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= extent if stride != 0 else min(extent, 1)
    return size


class Recorder(TorchDispatchMode):
    """Records a kernel for every operator that runs inside and is not a view; tensors on "meta" do as well.

    Args:
        names: tensors that have a name; others are named by the operator that made them.

    Attributes:
        kernels: what ran.
    """

    def __init__(self, names: Mapping[str, Tensor], precision: str) -> None:
        super().__init__()
        self.kernels: list[Kernel] = []
        self._precision = precision
        self._names = {_place(tensor): name for name, tensor in names.items()}
        # a place in memory must not be given to another tensor while its name is known
        self._alive: list[Tensor] = list(names.values())

    def name(self, tensor: Tensor, name: str) -> None:
        """Name a tensor that was made inside, for what follows."""
        self._names[_place(tensor)] = name

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        operator = func.overloadpacket.__name__
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self._alive += made
        places = {_place(tensor) for tensor in read}
        mutates = func._schema.is_mutable
        if mutates or not any(_place(tensor) in places for tensor in made):
            self._record(operator, read, made, kwargs or {}, mutates)
        return result

    def _record(
        self, operator: str, read: list[Tensor], made: list[Tensor], kwargs: dict[str, Any], mutates: bool
    ) -> None:
        if operator.startswith(("empty", "new_empty", "set_", "lift")):
            return
        target = kwargs.get("out")
        overwrites = operator in ("copy_", "zero_", "fill_")
        loads: dict[str, int] = {}
        stores: dict[str, int] = {}
        for tensor in made:
            place = _place(tensor)
            self._names.setdefault(place, f"{operator} {len(self.kernels)}")
            stores[self._names[place]] = distinct_bytes(tensor)
        for number, tensor in enumerate(read):
            if tensor is target or (overwrites and number == 0) or tensor.numel() == 0:
                continue
            name = self._names.setdefault(_place(tensor), f"constant {len(self._alive)}")
            loads[name] = loads.get(name, 0) + distinct_bytes(tensor)
        plain = operator.removesuffix("_")
        flops = exponentials = 0
        if plain in PRODUCTS:
            left, right = read[-2:] if target is None else [tensor for tensor in read if tensor is not target][-2:]
            flops = 2 * left.numel() * right.shape[-1]
        elif plain in EXPONENTIALS:
            exponentials = made[0].numel()
        traffic = Traffic(loads, {name: size for name, size in stores.items() if size}, flops, exponentials)
        self.kernels.append(Kernel(name=operator, requested=traffic, compulsory=traffic, precision=self._precision))


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def meta_like(tensor: Tensor) -> Tensor:
    """A tensor without data, of the same shape, strides and dtype; it wants a gradient if this one does."""
    like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return like.requires_grad_(tensor.requires_grad)
