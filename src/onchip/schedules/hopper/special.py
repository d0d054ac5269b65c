"""Exponentials and what is made of them, by the special function unit."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def tanh(x):
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def capped_to_11_bits(s, cap):
    """cap * tanh(s / cap), to 2**-11 of itself, in a single instruction (PTX: tanh.approx).

    A score loses eight times that when it is stored in bfloat16. An exact one (parts.capped) leaves a forward about
    three quarters of its speed: a multiprocessor has too few special functions, and every weight takes one already.
    """
    return tanh(s * (1.0 / cap)) * cap


@gluon.jit
def capped_slope_to_11_bits(s, cap):
    """The derivative of that: 1 - tanh(s / cap) ** 2."""
    t = tanh(s * (1.0 / cap))
    return 1.0 - t * t
