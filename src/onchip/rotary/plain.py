"""Rotation by torch operations: a form that autograd and transforms go through, and one that writes into its result."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from onchip.rotary.rotation import Rotation
from onchip.strides import empty_ordered

PIECE = 2**18
"""About so many numbers are rotated at once: their copies in float32 stay in the caches."""


def width_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype of cosines, sines and products."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def as_batch(tensor: Tensor) -> Tensor:
    """A packed tensor (tokens, heads, dim) seen as (1, heads, tokens, dim); any other one as it is."""
    return tensor.transpose(0, 1)[None] if tensor.dim() == 3 else tensor


def composite(inputs: Sequence[Tensor], rotation: Rotation) -> list[Tensor]:
    """The rotated tensors as a function of the inputs that torch can differentiate and transform."""
    return [_differentiable(tensor, rotation) for tensor in inputs]


def _differentiable(tensor: Tensor, rotation: Rotation) -> Tensor:
    seen = as_batch(tensor)
    batch, _, length, _ = seen.shape
    width = width_of(tensor.dtype)
    cos, sin = (part[:, None] for part in rotation.turns_of(batch, length, tensor.device, width))
    first, second = _pairs(seen[..., : rotation.dim].to(width), rotation.interleaved)
    turned = (first * cos - second * sin, second * cos + first * sin)
    if rotation.interleaved:
        # vmap over gradients knows reshape, but not flatten
        rotated = torch.stack(turned, -1).reshape(*first.shape[:-1], rotation.dim)
    else:
        rotated = torch.cat(turned, -1)
    out = torch.cat([rotated.to(tensor.dtype), seen[..., rotation.dim :]], -1)
    return out[0].transpose(0, 1) if tensor.dim() == 3 else out


def rotate(inputs: Sequence[Tensor], rotation: Rotation) -> list[Tensor]:
    """The rotated tensors, in the stride order of the inputs; memory beyond them is cosines, sines and one piece."""
    seen = as_batch(inputs[0])
    turns: dict[torch.dtype, tuple[Tensor, Tensor]] = {}
    results = []
    for tensor in inputs:
        width = width_of(tensor.dtype)
        if width not in turns:
            turns[width] = rotation.turns_of(seen.shape[0], seen.shape[2], tensor.device, width)
        out = empty_ordered(tuple(tensor.shape), tensor, tensor.dtype)
        _write(as_batch(tensor), as_batch(out), *turns[width], rotation)
        results.append(out)
    return results


def _write(tensor: Tensor, out: Tensor, cos: Tensor, sin: Tensor, rotation: Rotation) -> None:
    batch, heads, length, head_dim = tensor.shape
    dim = rotation.dim
    if dim < head_dim:
        out[..., dim:] = tensor[..., dim:]
    if tensor.numel() <= PIECE or tensor.device.type != "cpu":
        # a GPU has no use for pieces: it would wait for their launches
        _turn(tensor[..., :dim], out[..., :dim], cos[:, None], sin[:, None], rotation.interleaved)
        return
    rows = max(1, PIECE // (heads * dim))
    for number in range(batch):
        turn = number if cos.shape[0] > 1 else 0
        for start in range(0, length, rows):
            piece = slice(start, start + rows)
            source, target = tensor[number, :, piece, :dim], out[number, :, piece, :dim]
            _turn(source, target, cos[turn, piece], sin[turn, piece], rotation.interleaved)


def _turn(source: Tensor, target: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    wide = source.to(cos.dtype)
    if interleaved:
        pairs = torch.view_as_complex(wide.contiguous().unflatten(-1, (-1, 2)))
        target.copy_(torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2))
        return
    first, second = wide.chunk(2, -1)
    # in place where the result needs no rounding
    result = target if target.dtype == cos.dtype else torch.empty_like(wide)
    left, right = result.chunk(2, -1)
    torch.mul(first, cos, out=left).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=right).addcmul_(first, sin)
    if result is not target:
        target.copy_(result)


def _pairs(rows: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return rows[..., 0::2], rows[..., 1::2]
    half = rows.shape[-1] // 2
    return rows[..., :half], rows[..., half:]
