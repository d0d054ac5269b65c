"""Which of two kernels heeds what is hidden: where a tensor holds NaN or infinities, one that takes its time.

A pair that a mask or a bias hides has the weight 0, and 0 times infinity is NaN: keys that no row of a tile sees must
not reach products then. A kernel that looks for them in every tile has up to twice as many instructions in its loops.
So there are two of each kind, and one of them returns at once. Of the forward it is the second one, unless the first
one met a NaN in its sums; of the backward one more read of the tensors says which.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from onchip.gpu.call import power_of_two
from onchip.gpu.launcher import Launcher
from onchip.gpu.parts import load_tile, offsets_of, start_of
from onchip.schedules.triton.launch import Call

ROWS = 64
"""Of a program."""


@triton.jit(do_not_specialize=["s_b", "s_h", "s_n", "s_d", "heads", "length", "tiles"])
def finite_kernel(
    tensor, unusual,
    s_b: tl.int64, s_h: tl.int64, s_n: tl.int64, s_d: tl.int64, heads: tl.int32, length: tl.int32, tiles: tl.int32,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Puts 1 at `unusual` if anything in the tensor is NaN or infinite."""
    program = tl.program_id(0)
    first = program % tiles * BLOCK
    h = (program // tiles) % heads
    b = program // tiles // heads
    r = tl.arange(0, BLOCK)
    offsets = offsets_of(r, 0, s_h, s_n, s_d, BLOCK_D, 1, WIDE, VECTOR)
    start = start_of(tensor, b, h, first, s_b, s_h, s_n, VECTOR)
    x = load_tile(start, offsets, first + r < length, True, D, BLOCK_D).to(tl.float32)
    is_finite = tl.abs(x) < float("inf")
    if tl.min(tl.min(is_finite.to(tl.int32), 1), 0) == 0:
        tl.store(unusual, 1)


def unusual_of(careful: bool, device: torch.device) -> Tensor | None:
    """Where kernels find whether anything is not finite, if that matters; nothing is found yet."""
    return torch.zeros(1, dtype=torch.int32, device=device) if careful else None


def look_through(call: Call, tensor: Tensor) -> Launcher:
    """The launch for tensors like this one, query, key, value or a gradient: over (tensor, unusual)."""
    vector, dim = call.vector(tensor), tensor.shape[-1]
    length, sequences = (tensor.shape[0], 1) if call.packed else (tensor.shape[2], tensor.shape[0])
    heads, tiles = tensor.shape[1], -(-length // ROWS)
    constants = {
        "D": dim, "BLOCK_D": power_of_two(dim), "BLOCK": ROWS, "WIDE": call.wide(tensor), "VECTOR": vector,
        "num_warps": 4,
    }  # fmt: skip
    rest = (*call.strides(tensor, vector), heads, length, tiles)
    return Launcher(finite_kernel, tiles * heads * sequences, rest, constants)
