"""Outputs in the stride order of the query, the same for real and fake tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def _order(like: Tensor) -> list[int]:
    """Dimensions from the largest stride to the smallest; ties (expanded or unit extents) keep the natural order."""
    strides = like.stride()
    order: list[int] = []
    # sorted() takes no symbolic keys where torch.compile traces, comparisons it does
    for place in range(like.dim()):
        position = len(order)
        while position > 0 and strides[order[position - 1]] < strides[place]:
            position -= 1
        order.insert(position, place)
    return order


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=lambda place: order[place])


def empty_ordered(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
    """An uninitialised dense tensor whose dimensions lie in memory in the order of `like`'s strides."""
    order = _order(like)
    memory = torch.empty([shape[place] for place in order], dtype=dtype, device=like.device)
    return memory.permute(_inverse(order))


def ordered(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor, differentiably, with its dimensions in memory in the order of `like`'s strides."""
    order = _order(like)
    return tensor.permute(order).contiguous().permute(_inverse(order))


def is_ordered(tensor: Tensor, like: Tensor) -> bool:
    """Whether a tensor already lies in memory as `empty_ordered` would lay it out."""
    if tensor.is_contiguous() and like.is_contiguous():
        return True
    expected = 1
    for place in reversed(_order(like)):
        if tensor.stride(place) != expected:
            return False
        expected *= tensor.shape[place]
    return True


def laid_out(gradient: Tensor, like: Tensor) -> Tensor:
    """The gradient with the dtype of a tensor and the strides that `torch.empty_like` gives it."""
    if gradient.dtype == like.dtype and (
        (gradient.is_contiguous() and like.is_contiguous()) or gradient.stride() == like.stride()
    ):
        return gradient
    return torch.empty_like(like).copy_(gradient)
