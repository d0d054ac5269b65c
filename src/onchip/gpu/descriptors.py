"""What TMA is told of tensors: shapes, strides and boxes. A descriptor is kept without the tensor it was made for."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

Descriptor = TypeVar("Descriptor")
UNUSED = 8
"""A stride that TMA takes, for an extent of 1: elements of 16 bits in 16 bytes."""


def moved(descriptor: Descriptor, tensor: Tensor | None) -> Descriptor:
    """The descriptor, Triton's or Gluon's, of another tensor, whose shape and strides need no second look."""
    made: Any = object.__new__(type(descriptor))
    made.__dict__.update(descriptor.__dict__)
    made.base = tensor
    return made


def is_expressible(tensor: Tensor) -> bool:
    """Whether TMA can read a tensor of 16 bits: rows of one piece, everything else at multiples of 16 bytes."""
    strides = [stride for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size > 1]
    dense = tensor.shape[-1] == 1 or tensor.stride(-1) == 1
    return dense and tensor.data_ptr() % 16 == 0 and all(stride > 0 and stride % UNUSED == 0 for stride in strides)


def rows_of(tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Tensors like this one, (sequence, head, row, element), in tiles of rows x columns of one head."""
    pairs = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    strides = [*(stride if size > 1 else UNUSED for size, stride in pairs), 1]
    descriptor = TensorDescriptor(tensor, list(tensor.shape), strides, [1, 1, rows, columns])
    descriptor.base = None
    return descriptor
