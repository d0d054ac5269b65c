"""From a rotation and its tensors to one launch of the kernel. No value on the device is read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from onchip.gpu.call import on_device
from onchip.model.hardware import multiprocessors
from onchip.rotary.kernel import rotary_kernel
from onchip.rotary.plain import as_batch
from onchip.rotary.rotation import Rotation
from onchip.strides import empty_ordered

PAIRS = 1024
"""A program loads so many numbers of each half at once: 16 bytes for each of its threads in 16 bits."""
WARPS = 4
PROGRAMS = 10
"""With 48 registers a thread, so many stand on a multiprocessor. Short of that, heads are shared out among programs."""


def rotate(inputs: Sequence[Tensor], rotation: Rotation) -> list[Tensor]:
    """The rotated tensors, in the stride order of the inputs."""
    results = [empty_ordered(tuple(tensor.shape), tensor, tensor.dtype) for tensor in inputs]
    seen = [as_batch(tensor) for tensor in inputs]
    batch, _, length, head_dim = seen[0].shape
    heads = [tensor.shape[1] for tensor in seen]
    if batch * length * sum(heads) == 0:
        return results

    dim, device = rotation.dim, inputs[0].device
    block_p = _power_of_two(dim // 2)
    block_rest = _power_of_two(max(1, head_dim - dim))
    block_t = max(1, PAIRS // max(block_p, block_rest // 4))
    blocks = -(-length // block_t)
    splits = min(max(heads), max(1, -(-PROGRAMS * _processors(device) // (blocks * batch))))
    each = [-(-count // splits) for count in heads]
    sides = [
        (tensor, as_batch(result), vector, *_strides(tensor, vector), *_strides(as_batch(result), vector))
        for tensor, result in zip(seen, results, strict=True)
        for vector in [_vector(tensor, as_batch(result))]
    ]
    query, out_query, vector_q, *strides_q = sides[0]
    key, out_key, vector_k, *strides_k = sides[1] if len(sides) > 1 else (None, None, 1, *[0] * 8)
    with on_device(device):
        rotary_kernel[(blocks * splits * batch,)](
            *(query, out_query, key, out_key),
            *(*strides_q, *strides_k),
            *(heads[0], heads[-1], each[0], each[-1]),
            *(length, blocks, splits),
            *_places(rotation, batch),
            *_angles(rotation),
            rotation.scale,
            DIM=dim,
            BLOCK_P=block_p,
            REST=head_dim - dim,
            BLOCK_REST=block_rest,
            BT=block_t,
            INTERLEAVED=rotation.interleaved,
            INVERSE=rotation.inverse,
            VECTOR_Q=vector_q,
            VECTOR_K=vector_k,
            num_warps=WARPS,
        )
    return results


def _places(rotation: Rotation, batch: int) -> tuple[Any, ...]:
    """Where tokens stand, from `positions` to `step` of the kernel."""
    positions, offsets, cu_seqlens = rotation.positions, rotation.offsets, rotation.cu_seqlens
    position_b = 0 if positions is None or positions.shape[0] == 1 else positions.stride(0)
    position_n = 0 if positions is None else positions.stride(1)
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return (
        *(positions, position_b, position_n),
        *(None if cu_seqlens is None else cu_seqlens.contiguous(), sequences, sequences.bit_length()),
        *(offsets, 0 if offsets is None else offsets.stride(0), rotation.offset, rotation.step),
    )


def _angles(rotation: Rotation) -> tuple[Any, ...]:
    """Frequencies and tables, from `frequencies` to `rows` of the kernel."""
    frequencies, cos, sin = rotation.frequencies, rotation.cos, rotation.sin
    rate = -2 / rotation.dim * math.log2(rotation.base)
    tables = (None, 0, 0, None, 0, 0, 0) if cos is None or sin is None else (
        cos, *cos.stride(), sin, *sin.stride(), cos.shape[0]
    )  # fmt: skip
    return frequencies, 0 if frequencies is None else frequencies.stride(0), rate, *tables


def _vector(*tensors: Tensor) -> int:
    """How many numbers 16 bytes hold if every row starts at such an address and is dense, else 1."""
    width = 16 // tensors[0].dtype.itemsize
    for tensor in tensors:
        *others, last = _strides(tensor, 1)
        if tensor.stride(-1) != 1 or last > 1 or tensor.data_ptr() % 16 or any(stride % width for stride in others):
            return 1
    return width


def _strides(tensor: Tensor, vector: int) -> list[int]:
    """Strides in vectors; a dimension with one index has none."""
    strides = [0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return [stride // vector for stride in strides[:-1]] + strides[-1:]


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _processors(device: torch.device) -> int:
    return 1 if device.type == "cpu" else multiprocessors(device)
