"""What the kernels share: where a tile lies, how it is loaded, which pairs it hides, how dropout draws.

Legend of this package: BQ rows and BK columns of a tile; D and DV head dims, BLOCK_D and BLOCK_DV powers of two that
hold them; i a row and j a column of a sequence, b its number, h a query head; s scores, p weights, m maximum, l sum.
PACK query heads of a group stand in one tile: row r of a tile is the position r // PACK of head r % PACK. Offsets of
tiles are int64; inside a tile they are int32 unless WIDE. Strides count vectors of VECTOR elements, 16 bytes, to which
pointers are aligned then; at VECTOR 1 nothing is known, and the last dimension has a stride as well.
"""

import triton
import triton.language as tl

from onchip import philox

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

ROUNDS = tl.constexpr(philox.ROUNDS)
MULTIPLIER_0, MULTIPLIER_1 = tl.constexpr(philox.MULTIPLIER_0), tl.constexpr(philox.MULTIPLIER_1)
WEYL_0, WEYL_1 = tl.constexpr(philox.WEYL_0), tl.constexpr(philox.WEYL_1)


# Where a tile lies


@triton.jit
def offset_of(cu, number, tokens):
    """An offset of a packed batch, kept inside its tensor."""
    return tl.minimum(tl.maximum(tl.load(cu + number).to(tl.int32), 0), tokens.to(tl.int32))


@triton.jit
def find_slot(slot, cu, tokens, batch, PACK: tl.constexpr, BLOCK: tl.constexpr):
    """The sequence that a slot of BLOCK rows belongs to, and the tile's number in it.

    Sequence b owns the slots from cu[b] * PACK // BLOCK + b on, which is always enough for its rows. What lies behind
    the last offset counts as one more sequence, number `batch`.
    """
    return find_among(slot, cu, tokens, batch, tl.arange(0, 32), PACK, BLOCK)


@triton.jit
def find_among(slot, cu, tokens, batch, lanes, PACK: tl.constexpr, BLOCK: tl.constexpr):
    """`find_slot` with lanes 0 to 31, which look at so many sequences at once: loads that wait for loads take long."""
    last = batch.to(tl.int32)
    low = slot.to(tl.int32) * 0
    high = low + last + 1
    first = first_slot(cu, low, tokens, PACK, BLOCK)
    while high - low > 1:
        step = (high - low + 31) // 32
        places = low + lanes * step
        firsts = first_slot(cu, tl.minimum(places, last), tokens, PACK, BLOCK)
        begins = (places < high) & (firsts <= slot)
        # they begin in order, and the one at `low` counts as begun
        low += tl.maximum(tl.sum(begins.to(tl.int32), 0) - 1, 0) * step
        high = tl.minimum(low + step, high)
        first = tl.maximum(first, tl.max(tl.where(begins, firsts, first), 0))
    return low, (slot - first).to(tl.int32)


@triton.jit
def first_slot(cu, number, tokens, PACK: tl.constexpr, BLOCK: tl.constexpr):
    """The first slot that a sequence owns."""
    return (offset_of(cu, number, tokens).to(tl.int64) * PACK // BLOCK).to(tl.int32) + number


@triton.jit
def extent(b, cu, used, full, batch):
    """Of sequence b: its first token, how many rows have room there, and how many of them exist."""
    if cu is None:
        start = b * 0
        room = start + full.to(tl.int32)
    else:
        start = offset_of(cu, b, full)
        stop = offset_of(cu, tl.minimum(b + 1, batch.to(tl.int32)), full)
        # what lies behind the last offset
        stop = tl.where(b < batch.to(tl.int32), stop, full.to(tl.int32))
        room = tl.maximum(stop - start, 0)
    length = room
    if used is not None:
        last = tl.maximum(batch.to(tl.int32) - 1, 0)
        length = tl.minimum(tl.maximum(tl.load(used + tl.minimum(b, last)).to(tl.int32), 0), room)
    if cu is not None:
        length = tl.where(b < batch.to(tl.int32), length, 0)
    return start, room, length


@triton.jit
def band_of(b, length_q, length_k, batch, low, high, low_aligned, high_aligned, lows, highs):
    """A band low <= j - i <= high of sequence b, from bounds of their own, around its last diagonal, and per sequence.

    Bounds that are None do not exist; what is left of them all is returned, clamped to what an int32 difference holds.
    """
    shift = length_k - length_q
    place = tl.minimum(b, tl.maximum(batch.to(tl.int32) - 1, 0))
    least = -0x3FFFFFFF + b * 0
    most = 0x3FFFFFFF + b * 0
    if low is not None:
        least = tl.maximum(least, low.to(tl.int32))
    if low_aligned is not None:
        least = tl.maximum(least, shift + low_aligned.to(tl.int32))
    if lows is not None:
        least = tl.maximum(least, tl.load(lows + place))
    if high is not None:
        most = tl.minimum(most, high.to(tl.int32))
    if high_aligned is not None:
        most = tl.minimum(most, shift + high_aligned.to(tl.int32))
    if highs is not None:
        most = tl.minimum(most, tl.load(highs + place))
    return least, most


@triton.jit
def visits(first, last, low, high, length, BLOCK: tl.constexpr, EVERY_PARTIAL: tl.constexpr):
    """Where the rows [first, last] must look among `length` columns, in steps of BLOCK.

    Returns start, full_start, full_stop, stop: pairs in [full_start, full_stop) are all visible, those in the other two
    parts may be hidden. Works for columns that look at rows as well, with the band turned around.
    """
    start = tl.maximum(first + low, 0) // BLOCK * BLOCK
    stop = tl.minimum(last + high + 1, length)
    stop = tl.where(last < first, start, tl.maximum(stop, start))
    full_start = (tl.maximum(last + low, 0) + BLOCK - 1) // BLOCK * BLOCK
    full_stop = tl.maximum(tl.minimum(first + high + 1, length), 0) // BLOCK * BLOCK
    if EVERY_PARTIAL:
        full_start = start
        full_stop = start
    full_start = tl.minimum(full_start, stop)
    full_stop = tl.minimum(tl.maximum(full_stop, full_start), tl.maximum(stop, full_start))
    return start, full_start, full_stop, stop


@triton.jit
def listed_visits(counts, first, last, BK: tl.constexpr):
    """`visits` in steps of a list of blocks of 128: first those that may hide something, then those that do not."""
    partial = tl.load(counts) * (128 // BK)
    every = partial + tl.load(counts + 1) * (128 // BK)
    partial = tl.where(last < first, 0, partial)
    every = tl.where(last < first, 0, every)
    return partial * 0, partial, every, every


@triton.jit
def listed_column(order, step, BK: tl.constexpr):
    """The first column of a step."""
    return tl.load(order + step // (128 // BK)) * 128 + step % (128 // BK) * BK


# Loads and stores


@triton.jit
def start_of(base, b, h, token, stride_b, stride_h, stride_n, VECTOR: tl.constexpr):
    """Pointer to row `token` of head h in sequence b."""
    return base + (b.to(tl.int64) * stride_b + h.to(tl.int64) * stride_h + token.to(tl.int64) * stride_n) * VECTOR


@triton.jit
def moved(start, rows, stride_n, VECTOR: tl.constexpr):
    """The pointer, so many rows further, a multiple of 16.

    Counted in sixteens, a loop's first row is no number that the loop before it has at hand. Else LLVM would put its
    conversion, and with it the sums, on the path around that loop (partial redundancy elimination), which ptxas takes
    for changes of what products add to: it would make products wait for each other (C7515).
    """
    return start + (rows >> 4).to(tl.int64) * (stride_n * (16 * VECTOR))


@triton.jit
def offsets_of(
    position, head, stride_h, stride_n, stride_d,
    BLOCK: tl.constexpr, PACK: tl.constexpr, WIDE: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """Offsets (rows, BLOCK) of a tile: positions from its first row on, heads from the group's first one on."""
    d = tl.arange(0, BLOCK)
    if VECTOR == 1:
        if WIDE:
            d = d * stride_d
        else:
            d = d * stride_d.to(tl.int32)
    if PACK == 1:
        if WIDE:
            rows = position.to(tl.int64) * stride_n * VECTOR
        else:
            rows = position * stride_n.to(tl.int32) * VECTOR
    else:
        rows = (position.to(tl.int64) * stride_n + head.to(tl.int64) * stride_h) * VECTOR
    return rows[:, None] + d[None, :]


@triton.jit
def load_tile(start, offsets, exists, MASKED: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """(rows, BLOCK) with 0 beyond D, and where a row does not exist if MASKED."""
    pointers = start + offsets
    if BLOCK == D:
        if MASKED:
            tile = tl.load(pointers, mask=exists[:, None], other=0.0)
        else:
            tile = tl.load(pointers)
    else:
        inside = tl.arange(0, BLOCK)[None, :] < D
        if MASKED:
            inside = exists[:, None] & inside
        tile = tl.load(pointers, mask=inside, other=0.0)
    return tile


@triton.jit
def store_tile(start, offsets, exists, tile, D: tl.constexpr, BLOCK: tl.constexpr):
    keep = exists[:, None]
    if BLOCK != D:
        keep = keep & (tl.arange(0, BLOCK)[None, :] < D)
    tl.store(start + offsets, tile.to(start.dtype.element_ty), mask=keep)


@triton.jit
def multiply(a, b, accumulator, PRECISION: tl.constexpr):
    """a @ b, added to the accumulator unless it is None."""
    if accumulator is None:
        return tl.dot(a, b, input_precision=PRECISION)
    else:
        return tl.dot(a, b, accumulator, input_precision=PRECISION)


@triton.jit
def waited_for(sums):
    """The sums of products of Hopper's, unchanged.

    No instruction, but a use of them: the last product is waited for here, and not behind the next one of a loop. What
    it multiplies needs no registers meanwhile, and other programs have products to make.
    """
    return tl.inline_asm_elementwise("", "=f,0", [sums], dtype=tl.float32, is_pure=True, pack=1)


# Scores and weights


@triton.jit
def row_values(o, do, lse, due, BASE2: tl.constexpr):
    """LSE and delta of rows as weights and their gradients want them: delta = sum(do * o) - due.

    `due` is the gradient of the LSE, or None. A row that saw nothing, whose LSE is minus infinity, has plus infinity
    here, so that its weights are 0. Its output is 0, and what gradient arrives there does not matter.
    """
    delta = tl.sum(tl.where(o == 0.0, 0.0, o.to(tl.float32) * do.to(tl.float32)), 1)
    if due is not None:
        delta -= due
    dead = lse == float("-inf")
    if BASE2:
        lse = lse * LOG2E
    return tl.where(dead, float("inf"), lse), tl.where(dead, 0.0, delta)


@triton.jit
def range_of(position, exists, low, high, length):
    """Of each row that exists the columns [begin, end) that a band leaves it. Works for columns and rows as well."""
    end = tl.minimum(position + high + 1, length)
    return position + low, tl.where(exists, end, 0)


@triton.jit
def visible(index, begins, ends, BOUNDED: tl.constexpr):
    """Pairs inside the ranges, whose begins matter if BOUNDED; the arguments broadcast against each other."""
    keep = index < ends
    if BOUNDED:
        keep = keep & (index >= begins)
    return keep


@triton.jit
def nearest(index, length):
    """The index, or the nearest one that exists: what lies outside reads something, and is hidden later."""
    return tl.maximum(tl.minimum(index, length - 1), 0)


@triton.jit
def nearest_column(index, length, EIGHTS: tl.constexpr):
    """`nearest`, by whole eights if EIGHTS: then tensors have columns to a multiple of 8, and eight of them in a row
    remain eight in a row, as the compiler can tell."""
    if EIGHTS:
        near = tl.minimum(index // 8, tl.maximum(length - 1, 0) // 8) * 8 + index % 8
    else:
        near = nearest(index, length)
    return near


@triton.jit
def multiple(number, BLOCK: tl.constexpr, TOLD: tl.constexpr):
    """A number that is a multiple of BLOCK; the compiler is told so if TOLD, and reads and stores in vectors then."""
    if TOLD:
        number = number // BLOCK * BLOCK
    return number


@triton.jit
def capped(s, cap):
    """cap * tanh(s / cap), exact to a few units in the last place of float32.

    Below 0.625 a polynomial (Cephes, tanhf), above it 1 - 2 / (exp(2 x) + 1).
    """
    return _tanh(s / cap) * cap


@triton.jit
def capped_slope(s, cap):
    """The derivative of `capped`: 1 - tanh(s / cap) ** 2."""
    t = _tanh(s / cap)
    return 1.0 - t * t


@triton.jit
def _tanh(x):
    size = tl.abs(x)
    z = x * x
    small = -5.70498872745e-3 * z + 2.06390887954e-2
    small = small * z - 5.37397155531e-2
    small = small * z + 1.33314422036e-1
    small = small * z - 3.33332819422e-1
    small = small * z * x + x
    large = 1.0 - 2.0 / (tl.exp(2.0 * size) + 1.0)
    large = tl.where(x < 0, -large, large)
    return tl.where(size < 0.625, small, large)


@triton.jit
def alive(seed, sequence, head, row, column_start, threshold, BK: tl.constexpr):
    """Which weights dropout keeps, bool (rows, BK): the counter of onchip/philox.py.

    `row` is (rows, 1), `head` that or a number; `column_start` is a multiple of 8.
    """
    group = (column_start // 8 + tl.arange(0, BK // 8))[None, :]
    zero = (row * 0 + group * 0).to(tl.uint32)
    key = tl.load(seed)
    k0 = (key & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c0 = zero + group.to(tl.uint32)
    c1 = zero + row.to(tl.uint32)
    c2 = zero + head.to(tl.uint32)
    c3 = zero + sequence.to(tl.uint32)
    m0 = tl.full([1, 1], MULTIPLIER_0, tl.uint32)
    m1 = tl.full([1, 1], MULTIPLIER_1, tl.uint32)
    w0 = tl.full([1, 1], WEYL_0, tl.uint32)
    w1 = tl.full([1, 1], WEYL_1, tl.uint32)
    k0 = k0 + w0 * 0
    k1 = k1 + w1 * 0
    for _ in tl.static_range(ROUNDS):
        product_0 = c0.to(tl.uint64) * m0
        product_1 = c2.to(tl.uint64) * m1
        c0 = (product_1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c2 = (product_0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c1 = product_1.to(tl.uint32)
        c3 = product_0.to(tl.uint32)
        k0 = k0 + w0
        k1 = k1 + w1
    # Lanes 0 to 7 are the low and high halves of the four words. What a draw says of its eight columns is one number:
    # it takes an eighth of the room on its way to the threads that hold the weights. The number is a sum over a first
    # dimension because Triton would draw again in each of those threads, four or eight times as often, but does not
    # add again.
    least = threshold.to(tl.uint32)
    halves = tl.join(_pair(c0, least) | _pair(c1, least) << 2, (_pair(c2, least) | _pair(c3, least) << 2) << 4)
    bits = tl.sum(tl.permute(halves, [2, 0, 1]), 0)
    lane = (tl.full([8], 1, tl.uint32) << tl.arange(0, 8).to(tl.uint32))[None, None, :]
    return tl.reshape((bits[:, :, None] & lane) != 0, [bits.shape[0], BK])


@triton.jit
def _pair(word, least):
    """Two bits: whether the low half of a word is as large, and whether the high half is."""
    low = tl.where((word & 0xFFFF) >= least, 1, 0)
    return (low | tl.where(word >= least << 16, 2, 0)).to(tl.uint32)
