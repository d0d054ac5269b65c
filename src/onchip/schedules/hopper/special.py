"""Exponentials and what is made of them, by the special function unit."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TWICE_LOG2E = gl.constexpr(2.8853900817779268)


@gluon.jit
def exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def tanh(x):
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def capped(s, cap):
    """cap * tanh(s / cap) as cap - 2 cap / (exp(2 s / cap) + 1), to about 2**-22 of the cap.

    Near 0 that is no longer 2**-22 of the score. But weights are exponentials of differences of scores, so an error of
    a score is a relative one of a weight, which is rounded to 16 bits next.
    """
    return cap - 2.0 * cap * reciprocal(exp2(s * (TWICE_LOG2E / cap)) + 1.0)


@gluon.jit
def capped_to_11_bits(s, cap):
    """cap * tanh(s / cap), to 2**-11 of itself, in a single instruction (PTX: tanh.approx).

    A score loses eight times that when it is stored in bfloat16. The exact one takes three quarters of a forward's
    speed: what a multiprocessor has too few of is special functions, of which every weight takes one already.
    """
    return tanh(s * (1.0 / cap)) * cap
