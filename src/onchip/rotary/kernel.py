"""The rotary kernel: a block of tokens of one sequence, and the heads of query and key one after the other.

    positions           (BT,)          from a tensor, or counted from the start of the sequence
    cos, sin            (BT, BLOCK_P)  once for all heads, in registers
    for each head
        x, y            (BT, BLOCK_P)  the numbers of each pair, 16 bytes a load
        x cos - y sin, y cos + x sin   float32, rounded once and stored

Angles are integers: a frequency is a fraction of a turn times 2**64, so that a product with a position that wraps
around drops whole turns and nothing else. Its upper 32 bits are split into quarters of a turn and a rest of at most an
eighth, of which short polynomials give sine and cosine. The mathematical library's functions would keep a path for
large arguments, with a stack, that is never taken.
"""

import triton
import triton.language as tl

TURN = tl.constexpr(0.15915494309189535)
"""1 / (2 pi)."""

UNSPECIALIZED = [
    "q_b", "q_h", "q_n", "q_d", "oq_b", "oq_h", "oq_n", "oq_d",
    "k_b", "k_h", "k_n", "k_d", "ok_b", "ok_h", "ok_n", "ok_d",
    "heads_q", "heads_k", "each_q", "each_k", "length", "blocks", "splits",
    "position_b", "position_n", "offset_b", "sequences", "steps", "offset", "step",
    "frequency_p", "cos_n", "cos_p", "sin_n", "sin_p", "rows", "rate", "scale",
]  # fmt: skip


@triton.jit
def sine_and_cosine(phase):
    """Of angles in turns times 2**64, int64; float32, within 1e-7."""
    # rounded to 32 bits; carries wrap around as turns do
    turns = ((phase + (1 << 31)) >> 32).to(tl.int32)
    quarter = (turns + (1 << 29)) >> 30
    x = (turns - (quarter << 30)).to(tl.float32) * (1.0 / (1 << 30))
    z = x * x
    # Polynomials of sin(pi / 2 x) / x and cos(pi / 2 x) for |x| <= 1 / 2 at Chebyshev nodes in x**2.
    sine = x * (1.57079637 + z * (-0.64596349 + z * (0.0796802193 + z * -0.00460214913)))
    cosine = 1.0 + z * (-1.23370051 + z * (0.253669411 + z * (-0.0208615288 + z * 0.00090673991)))
    swapped = (quarter & 1) != 0
    s = tl.where(swapped, cosine, sine)
    c = tl.where(swapped, sine, cosine)
    return tl.where((quarter & 2) != 0, -s, s), tl.where(((quarter + 1) & 2) != 0, -c, c)


@triton.jit
def phase_of(frequency):
    """Radians a position, float64, as turns a position times 2**64: int64, modulo whole turns."""
    turns = frequency * TURN
    high = (turns - tl.floor(turns)) * 4294967296.0
    whole = tl.floor(high)
    low = (high - whole) * 4294967296.0
    return (whole.to(tl.int64) << 32) + low.to(tl.int64)


@triton.jit
def sequence_of(token, cu, sequences, steps):
    """The sequence of each token, `sequences` for those behind the last; `steps` halvings find it."""
    low = token * 0
    high = low + sequences
    for _ in range(steps):
        middle = (low + high + 1) // 2
        begun = tl.load(cu + middle).to(tl.int64) <= token
        low = tl.where(begun, middle, low)
        high = tl.where(begun, high, tl.maximum(middle - 1, 0))
    return low


@triton.jit
def turn_heads(
    source, out, s_h, s_n, s_d, o_h, o_n, o_d, first, stop, token, exists, cos, sin,
    DIM: tl.constexpr, BLOCK_P: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Rotate the heads first to stop of one tensor; the pointers stand at the sequence of the batch.

    With VECTOR above 1, rows are dense and strides count vectors of so many numbers. Which product of two is rounded is
    said here: left to the compiler, it would differ with VECTOR, and strides would change bits.
    """
    PAIRS: tl.constexpr = DIM // 2
    # a stride of 1 that the compiler knows makes wide loads
    d_s = 1 if VECTOR > 1 else s_d
    d_o = 1 if VECTOR > 1 else o_d
    pair = tl.arange(0, BLOCK_P)
    both = tl.arange(0, 2 * BLOCK_P)
    tail = tl.arange(0, BLOCK_REST)
    for head in range(first, stop):
        from_row = source + (head * s_h + token * s_n)[:, None] * VECTOR
        to_row = out + (head * o_h + token * o_n)[:, None] * VECTOR
        if INTERLEAVED:
            held = exists[:, None] & (both < DIM)[None, :]
            row = tl.load(from_row + both[None, :] * d_s, mask=held, other=0.0).to(tl.float32)
            x, y = tl.split(tl.reshape(row, (row.shape[0], BLOCK_P, 2)))
            turned = tl.join(tl.fma(x, cos, -(y * sin)), tl.fma(y, cos, x * sin))
            turned = tl.reshape(turned, (row.shape[0], 2 * BLOCK_P))
            tl.store(to_row + both[None, :] * d_o, turned.to(out.dtype.element_ty), mask=held)
        else:
            held = exists[:, None] & (pair < PAIRS)[None, :]
            x = tl.load(from_row + pair[None, :] * d_s, mask=held, other=0.0).to(tl.float32)
            y = tl.load(from_row + (PAIRS + pair)[None, :] * d_s, mask=held, other=0.0).to(tl.float32)
            left, right = tl.fma(x, cos, -(y * sin)), tl.fma(y, cos, x * sin)
            tl.store(to_row + pair[None, :] * d_o, left.to(out.dtype.element_ty), mask=held)
            tl.store(to_row + (PAIRS + pair)[None, :] * d_o, right.to(out.dtype.element_ty), mask=held)
        if REST > 0:
            held = exists[:, None] & (tail < REST)[None, :]
            kept = tl.load(from_row + (DIM + tail)[None, :] * d_s, mask=held)
            tl.store(to_row + (DIM + tail)[None, :] * d_o, kept, mask=held)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def rotary_kernel(
    query, out_query, key, out_key,
    q_b: tl.int64, q_h: tl.int64, q_n: tl.int64, q_d: tl.int64,
    oq_b: tl.int64, oq_h: tl.int64, oq_n: tl.int64, oq_d: tl.int64,
    k_b: tl.int64, k_h: tl.int64, k_n: tl.int64, k_d: tl.int64,
    ok_b: tl.int64, ok_h: tl.int64, ok_n: tl.int64, ok_d: tl.int64,
    heads_q: tl.int32, heads_k: tl.int32, each_q: tl.int32, each_k: tl.int32,
    length: tl.int64, blocks: tl.int32, splits: tl.int32,
    positions, position_b: tl.int64, position_n: tl.int64,
    cu, sequences: tl.int32, steps: tl.int32,
    offsets, offset_b: tl.int64, offset: tl.int64, step: tl.int64,
    frequencies, frequency_p: tl.int64, rate: tl.float64,
    cosines, cos_n: tl.int64, cos_p: tl.int64, sines, sin_n: tl.int64, sin_p: tl.int64, rows: tl.int64,
    scale: tl.float32,
    DIM: tl.constexpr, BLOCK_P: tl.constexpr, REST: tl.constexpr, BLOCK_REST: tl.constexpr, BT: tl.constexpr,
    INTERLEAVED: tl.constexpr, INVERSE: tl.constexpr, VECTOR_Q: tl.constexpr, VECTOR_K: tl.constexpr,
):  # fmt: skip
    """Rotated copies. A program has a block of BT tokens and `each_q`, `each_k` heads, the share of one of `splits`."""
    program = tl.program_id(0)
    block = program % blocks
    split = (program // blocks) % splits
    b = (program // blocks // splits).to(tl.int64)
    token = block.to(tl.int64) * BT + tl.arange(0, BT)
    exists = token < length
    pair = tl.arange(0, BLOCK_P)
    PAIRS: tl.constexpr = DIM // 2

    sequence = token * 0 + b
    position = token + b * step
    if cu is not None:
        sequence = sequence_of(token, cu, sequences, steps)
        position = token - tl.load(cu + sequence).to(tl.int64)
    if positions is not None:
        position = tl.load(positions + b * position_b + token * position_n, mask=exists, other=0).to(tl.int64)
    position += offset
    if offsets is not None:
        position += tl.load(offsets + sequence * offset_b, mask=sequence < sequences, other=0).to(tl.int64)

    if cosines is not None:
        row = tl.minimum(tl.maximum(position, 0), rows - 1)[:, None]
        held = exists[:, None] & (pair < PAIRS)[None, :]
        cos = tl.load(cosines + row * cos_n + pair[None, :] * cos_p, mask=held, other=0.0).to(tl.float32)
        sin = tl.load(sines + row * sin_n + pair[None, :] * sin_p, mask=held, other=0.0).to(tl.float32)
    else:
        if frequencies is not None:
            frequency = tl.load(frequencies + pair * frequency_p, mask=pair < PAIRS, other=0.0).to(tl.float64)
        else:
            frequency = tl.exp2(pair.to(tl.float64) * rate)
        sin, cos = sine_and_cosine(position[:, None] * phase_of(frequency)[None, :])
    cos *= scale
    sin *= -scale if INVERSE else scale

    first = split * each_q
    turn_heads(
        query + b * q_b * VECTOR_Q, out_query + b * oq_b * VECTOR_Q, q_h, q_n, q_d, oq_h, oq_n, oq_d,
        first, tl.minimum(first + each_q, heads_q), token, exists, cos, sin,
        DIM, BLOCK_P, REST, BLOCK_REST, INTERLEAVED, VECTOR_Q,
    )  # fmt: skip
    if key is not None:
        first = split * each_k
        turn_heads(
            key + b * k_b * VECTOR_K, out_key + b * ok_b * VECTOR_K, k_h, k_n, k_d, ok_h, ok_n, ok_d,
            first, tl.minimum(first + each_k, heads_k), token, exists, cos, sin,
            DIM, BLOCK_P, REST, BLOCK_REST, INTERLEAVED, VECTOR_K,
        )  # fmt: skip
