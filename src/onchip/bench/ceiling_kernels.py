"""Triton kernels that use one unit of a GPU each; they need a GPU, unlike the rest of this package."""

# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def empty_kernel(unused):
    """Nothing."""


@triton.jit
def exponentials_kernel(out, steps, BLOCK: tl.constexpr):
    """16 * steps exponentials, one after the other, in each of BLOCK elements of a program."""
    elements = tl.arange(0, BLOCK)
    x = elements.to(tl.float32) / BLOCK
    for _ in range(steps):
        for _ in tl.static_range(16):
            # exp2(-x) has a fixed point, so that values stay ordinary
            x = tl.exp2(-x)
    tl.store(out + tl.program_id(0) * BLOCK + elements, x)


@triton.jit
def read_kernel(source, out, blocks, steps, BLOCK: tl.constexpr):
    """Each program reads `steps` of the blocks of `source`, past the first cache."""
    elements = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for step in range(steps):
        block = (tl.program_id(0) + step) % blocks
        total += tl.load(source + block * BLOCK + elements, cache_modifier=".cg")
    tl.store(out + tl.program_id(0) * BLOCK + elements, total)
