"""Outputs in the stride order of the query, the same for real and fake tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def empty_ordered(shape: tuple[int, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
    """An uninitialised dense tensor whose dimensions lie in memory in the order of `like`'s strides."""
    strides = like.stride()
    # ties (expanded or unit extents) keep the natural order: the sort is stable
    order = sorted(range(like.dim()), key=lambda place: -strides[place])
    if order == list(range(like.dim())):
        return torch.empty(shape, dtype=dtype, device=like.device)
    inverse = sorted(range(like.dim()), key=lambda place: order[place])
    return torch.empty([shape[place] for place in order], dtype=dtype, device=like.device).permute(inverse)
