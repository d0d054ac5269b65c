"""The forward kernel for Hopper: one warp brings tiles by TMA, two or three warpgroups compute 64 rows each.

    producer   one warp. Takes the next tile of rows, finds its sequence, tells the warpgroups (a ring of two
               notices), and brings q, then k of block j with v of block j - 1 into one slot of a ring.
    consumer   a warpgroup of 64 rows; q stays in registers as an operand.
        for each block of columns j, from the first one up:
            s = q k(j)^T   and   acc += p v(j - 1)      in flight together
            p = exp2(s * scale - reference)             while the second one runs
        out = acc / sum(p)                              through shared memory, by TMA

The reference is the row's maximum over the first blocks: as many as it takes until every row that sees a key has seen
one, which is one block but for a band that begins with the diagonal. Then it stays. bfloat16 has the exponents of
float32, so weights, sums and accumulator keep their precision whatever comes later; they can only overflow. A row
whose sum passes 2**120, or with an output that is not finite, marks its tile, and marked tiles are computed again, with
a running maximum, before the program ends. float16 has no such exponents, and under ALiBi scores rise along the whole
walk: there the maximum runs always. A key that
all rows look at is one of the first in language models, so it costs nothing; and all tiles of a head begin with the
same keys, which one of them has then brought into the L2 cache.

With a seed, weights that drop become zeros once they are summed. Which ones is drawn while the products run, see
dropout.py.

Programs stay: each takes tiles by an atomic counter until there are none, the longest first. What a tile gives does
not depend on who computes it or when.
Sources: Shah et al. 2024, FlashAttention-3, sections 3.1 and 3.2 (producer and consumers, two products in flight);
Dao 2023, FlashAttention-2, algorithm 1.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from onchip.gpu.call import empty_results, on_device
from onchip.gpu.launcher import PerProblem
from onchip.gpu.parts import band_of, extent, find_among, nearest
from onchip.problem import Problem
from onchip.schedules.hopper.dropout import afresh, dropped, loaded_dropout, without
from onchip.schedules.hopper.launch import Prepared, expressible, prepare
from onchip.schedules.hopper.names import barrier, copy_elements, load_tile, reinterpret, store_tile
from onchip.schedules.hopper.special import exp2

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
LIMIT = gl.constexpr(2.0**120)
"""A sum of weights beyond this marks its tile: its reciprocal is a normal number yet."""
NOTICE = gl.constexpr(16)
"""Ints of a notice, of which eleven are used."""
VECTOR = gl.constexpr(8)
"""Strides count so many elements, 16 bytes."""
PER_TILE = gl.constexpr(2)
"""Ints of a tile in the workspace: the tile that its program took before, and its mark."""


@gluon.jit
def operand(p, layout: gl.constexpr, LOW_PRECISION: gl.constexpr):
    """Weights as the left operand of a product.

    The conversion is volatile, so that it stays between the exponentials and does not follow them all.
    """
    if gl.bfloat16 == LOW_PRECISION:
        halves = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [p], dtype=gl.bfloat16, is_pure=False, pack=2
        )
    else:
        halves = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [p], dtype=gl.float16, is_pure=False, pack=2
        )
    return gl.convert_layout(halves, layout)


@gluon.jit
def partial_sums(p):
    """Sums of a row's weights that each thread holds, (rows, 4): the last additions are made once, at the end."""
    rows: gl.constexpr = p.shape[0]
    columns: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(p.reshape([rows, columns // 8, 4, 2]), axis=3), axis=1)


@gluon.jit
def arrive(barrier):
    """Every thread arrives for itself: `mbarrier.arrive` would let them wait for each other first."""
    async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def following(slot, phase, STAGES: gl.constexpr):
    slot += 1
    if slot == STAGES:
        slot = slot * 0
        phase ^= 1
    return slot, phase


# Which tile


@gluon.jit
def lanes():
    """0 to 31, in every warp."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.arange(0, 32, layout=layout)


@gluon.jit
def first_row(
    number, batch, heads, length_q, tiles, section, cu_q, PACK: gl.constexpr, ROWS: gl.constexpr, HIGH: gl.constexpr
):
    """Sequence, head and first row of a tile, or the number of its PACK heads and their first row.

    Heads come in sections whose keys and values fit the L2 cache together. Inside a section rows go first, so that the
    longest tiles under a band that ends at the diagonal are the first.
    """
    if cu_q is not None:
        slot = number % tiles
        if HIGH:
            slot = tiles - 1 - slot
        b, tile = find_among(slot, cu_q, length_q, batch, lanes(), PACK, ROWS)
        h = number // tiles
    else:
        whole = section * tiles
        before = number // whole * section
        here = gl.minimum(section, batch * heads - before)
        place = number - before * tiles
        tile = place // here
        if HIGH:
            tile = tiles - 1 - tile
        b = (before + place % here) // heads
        h = (before + place % here) % heads
    return b, h, tile * (ROWS // PACK)


@gluon.jit
def blocks_of(first, last, least, most, length_k, BK: gl.constexpr):
    """The blocks of columns [begin, end) that rows [first, last] see something of."""
    stop = gl.minimum(last + most + 1, length_k)
    begin = gl.maximum(first + least, 0) // BK
    end = (gl.maximum(stop, 0) + BK - 1) // BK
    end = gl.where(last < first, begin, gl.maximum(begin, end))
    return begin, end


# Notices, from the producer to the consumers


@gluon.jit
def put(ring, place: gl.constexpr, slot, value):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    ring.index(slot * NOTICE + place).store(gl.full([1], 0, gl.int32, layout=layout) + value)


@gluon.jit
def get(ring, place: gl.constexpr, slot):
    return gl.max(ring.index(slot * NOTICE + place).load(gl.BlockedLayout([1], [32], [4], [0])), axis=0)


@gluon.jit
def tell(ring, told, heard, turn, number, b, h, first, q_of, k_of, band):
    token_q, room_q, length_q = q_of
    token_k, room_k, length_k = k_of
    least, most = band
    slot = turn % 2
    mbarrier.wait(heard.index(slot), ((turn // 2) & 1) ^ 1)
    put(ring, 0, slot, number)
    put(ring, 1, slot, b)
    put(ring, 2, slot, h)
    put(ring, 3, slot, first)
    put(ring, 4, slot, token_q)
    put(ring, 5, slot, room_q)
    put(ring, 6, slot, length_q)
    put(ring, 7, slot, token_k)
    put(ring, 8, slot, length_k)
    put(ring, 9, slot, least)
    put(ring, 10, slot, most)
    mbarrier.arrive(told.index(slot), count=1)


@gluon.jit
def end_round(ring, told, heard, turn):
    slot = turn % 2
    mbarrier.wait(heard.index(slot), ((turn // 2) & 1) ^ 1)
    put(ring, 0, slot, -1)
    mbarrier.arrive(told.index(slot), count=1)


# The producer


@gluon.jit
def copy_values(value, v_strides, v_s, slot, b, kv_head, token_k, length_k, column,
                DV: gl.constexpr, BLOCK_DV: gl.constexpr, BK: gl.constexpr):  # fmt: skip
    """The last rows of V of a sequence behind which others lie: zeros follow, for 0 times anything is to be 0."""
    v_b, v_h, v_n = v_strides
    # eight rows of a panel of 64 elements are what the swizzle of 128 bytes repeats
    panels: gl.constexpr = BLOCK_DV // 64
    groups: gl.constexpr = BK // 8
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    pieces = reinterpret(v_s, v_s.dtype, [v_s.shape[0] * panels * groups, 8, 64], swizzled)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    rows = gl.arange(0, 8, layout=gl.SliceLayout(1, layout))
    dims = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    start = value + (b.to(gl.int64) * v_b + kv_head.to(gl.int64) * v_h + (token_k + column).to(gl.int64) * v_n) * VECTOR
    for piece in range(panels * groups):
        row = piece % groups * 8 + rows
        dim = piece // groups * 64 + dims
        pointers = start + row.to(gl.int64)[:, None] * v_n * VECTOR + dim[None, :]
        there = (row < length_k - column)[:, None] & (dim < DV)[None, :]
        place = pieces.index(slot * panels * groups + piece)
        copy_elements(place, pointers, mask=there)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()


@gluon.jit
def load_pieces(desc, at, barrier, memory, place, PIECES: gl.constexpr, PANELS: gl.constexpr):
    """A head dim in pieces of 64, or whole; memory has PANELS of them for each place."""
    b, first, second = at
    for piece in gl.static_range(PIECES):
        load_tile(desc, [b, first, second, piece * 64], barrier, memory.index(place * PANELS + piece))


@gluon.jit
def place_of(b, h, row, PACK: gl.constexpr):
    """Where the tensor map of q or of out has a row of a head, or of the first of the heads that share a tile."""
    first, second = h, row
    if PACK > 1:
        first, second = row, h * PACK
    return b, first, second


@gluon.jit
def bring(
    b, h, first, q_of, k_of, band, slot, phase, q_phase, descriptors, value, v_strides, q_s, k_s, v_s,
    q_full, q_empty, full, empty,
    GROUP: gl.constexpr, PACK: gl.constexpr, DV: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    BK: gl.constexpr, PIECES: gl.constexpr, PANELS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    ALONE: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Everything that one tile of rows reads."""
    q_desc, k_desc, v_desc = descriptors
    token_q, room_q, length_q = q_of
    token_k, room_k, length_k = k_of
    least, most = band
    last = gl.minimum(first + 64 // PACK * GROUPS, length_q) - 1
    begin, end = blocks_of(first, last, least, most, length_k, BK)
    kv_head = h // GROUP
    # a packed batch is one sequence to TMA
    at = b * 0 if PACKED else b
    k_bytes: gl.constexpr = BK * BLOCK_D * PIECES * 2
    v_bytes: gl.constexpr = BK * BLOCK_DV * 2
    if end > begin:
        mbarrier.wait(empty.index(slot), phase)
        mbarrier.expect(full.index(slot), k_bytes)
        load_pieces(k_desc, (at, kv_head, token_k + begin * BK), full.index(slot), k_s, slot, PIECES, PIECES)
        slot, phase = following(slot, phase, STAGES)
    for group in gl.static_range(GROUPS):
        mbarrier.wait(q_empty.index(group), q_phase)
        mbarrier.expect(q_full.index(group), 64 * BLOCK_D * PIECES * 2)
        q_place = place_of(at, h, token_q + first + 64 // PACK * group, PACK)
        load_pieces(q_desc, q_place, q_full.index(group), q_s, group, PIECES, PANELS)
    for block in range(begin, end):
        # V of this block, K of the next one
        barrier = full.index(slot)
        mbarrier.wait(empty.index(slot), phase)
        copied = False
        if not ALONE:
            copied = (block + 1) * BK > length_k
            if copied:
                copy_values(value, v_strides, v_s, slot, b, kv_head, token_k, length_k, block * BK, DV, BLOCK_DV, BK)
        if block + 1 < end:
            if copied:
                mbarrier.expect(barrier, k_bytes)
            else:
                mbarrier.expect(barrier, k_bytes + v_bytes)
            load_pieces(k_desc, (at, kv_head, token_k + (block + 1) * BK), barrier, k_s, slot, PIECES, PIECES)
        else:
            if copied:
                mbarrier.arrive(barrier, count=1)
            else:
                mbarrier.expect(barrier, v_bytes)
        if not copied:
            load_tile(v_desc, [at, kv_head, token_k + block * BK, 0], barrier, v_s.index(slot))
        slot, phase = following(slot, phase, STAGES)
    return slot, phase


@gluon.jit
def produce(
    descriptors, value, v_strides, counter, work, sizes, layout, bounds, ring, q_s, k_s, v_s, barriers,
    HIGH: gl.constexpr, AGAIN: gl.constexpr, GROUP: gl.constexpr, PACK: gl.constexpr, DV: gl.constexpr,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, BK: gl.constexpr, PIECES: gl.constexpr, PANELS: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, ALONE: gl.constexpr,
):  # fmt: skip
    batch, heads, length_q, length_k, tiles, section, total = sizes
    cu_q, cu_k, used_q, used_k = layout
    low, high, low_aligned, high_aligned, lows, highs = bounds
    told, heard, q_full, q_empty, full, empty, done = barriers
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    slot = program * 0
    phase = slot + 1
    q_phase = slot + 1
    turn = slot
    before = slot - 1
    number = program
    if AGAIN:
        gl.store(work + program, 0)
    while number < total:
        # its latency passes while the tile is brought
        taken = gl.atomic_add(counter, 1, sem="relaxed")
        if taken == total - 1:
            # as many numbers are asked for as there are tiles, so nobody asks again: the next launch starts at 0
            gl.store(counter, 0)
        b, h, first = first_row(number, batch, heads, length_q, tiles, section, cu_q, PACK, 64 * GROUPS, HIGH)
        q_of = extent(b, cu_q, used_q, length_q, batch)
        if first < q_of[1]:
            k_of = extent(b, cu_k, used_k, length_k, batch)
            band = band_of(b, q_of[2], k_of[2], batch, low, high, low_aligned, high_aligned, lows, highs)
            if AGAIN:
                gl.store(work + programs + PER_TILE * number, before)
                gl.store(work + programs + PER_TILE * number + 1, 0)
                before = number
            tell(ring, told, heard, turn, number, b, h, first, q_of, k_of, band)
            turn += 1
            slot, phase = bring(
                b, h, first, q_of, k_of, band, slot, phase, q_phase, descriptors, value, v_strides, q_s, k_s, v_s,
                q_full, q_empty, full, empty, GROUP, PACK, DV, BLOCK_D, BLOCK_DV, BK, PIECES, PANELS, GROUPS, STAGES,
                ALONE, cu_q is not None,
            )  # fmt: skip
            q_phase ^= 1
        number = programs + taken
    end_round(ring, told, heard, turn)
    turn += 1
    if AGAIN:
        mbarrier.wait(done, 0)
        if gl.load(work + program, volatile=True) != 0:
            number = before
            while number >= 0:
                entry = work + programs + PER_TILE * number
                if gl.load(entry + 1, volatile=True) != 0:
                    b, h, first = first_row(
                        number, batch, heads, length_q, tiles, section, cu_q, PACK, 64 * GROUPS, HIGH
                    )
                    q_of = extent(b, cu_q, used_q, length_q, batch)
                    k_of = extent(b, cu_k, used_k, length_k, batch)
                    band = band_of(b, q_of[2], k_of[2], batch, low, high, low_aligned, high_aligned, lows, highs)
                    tell(ring, told, heard, turn, number, b, h, first, q_of, k_of, band)
                    turn += 1
                    slot, phase = bring(
                        b, h, first, q_of, k_of, band, slot, phase, q_phase, descriptors, value, v_strides, q_s, k_s,
                        v_s, q_full, q_empty, full, empty, GROUP, PACK, DV, BLOCK_D, BLOCK_DV, BK, PIECES, PANELS,
                        GROUPS, STAGES, ALONE, cu_q is not None,
                    )  # fmt: skip
                    q_phase ^= 1
                number = gl.load(entry)
            end_round(ring, told, heard, turn)


# The consumers


@gluon.jit
def scored(s, i, column, length_q, length_k, begins, ends, where, given, scale, partial, change: gl.constexpr,
           SCALED: gl.constexpr, MASKED: gl.constexpr, LOW: gl.constexpr):  # fmt: skip
    """Scores in base 2 but for the scale (if not SCALED), with what is hidden at minus infinity.

    MASKED blocks are those that may hide something, `partial` ones of them those that do.
    """
    columns = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
    j = (column + columns)[None, :]
    if change is not None:
        s = change(s * scale, nearest(i, length_q)[:, None], nearest(j, length_k), where, given) * LOG2E
    elif SCALED:
        s = s * scale
    if MASKED:
        if partial:
            show = j < ends[:, None]
            if LOW:
                show = show & (j >= begins[:, None])
            s = gl.where(show, s, float("-inf"))
    return s


@gluon.jit
def raised(s, m, factor):
    """The larger maximum, what to subtract from scores times the factor, and what the old weights are worth."""
    top = gl.maximum(m, gl.max(s, axis=1))
    shift = gl.where(top == float("-inf"), 0.0, top * factor)
    kept = exp2(gl.where(m == float("-inf"), float("-inf"), m * factor - shift))
    return top, shift, kept


@gluon.jit
def product(q, q_s, k_s, slot, layout: gl.constexpr, BLOCK_D: gl.constexpr, BK: gl.constexpr, PIECES: gl.constexpr,
            PANELS: gl.constexpr, GROUP_NUMBER: gl.constexpr):  # fmt: skip
    """q k^T of one block, in flight. A head dim of several pieces leaves q in shared memory, for want of registers."""
    s = gl.zeros([64, BK], gl.float32, layout=layout)
    if PIECES == 1:
        k = k_s.index(slot).reshape([BK, BLOCK_D])
        s = warpgroup_mma(q, k.permute((1, 0)), s, use_acc=False, is_async=True)
    else:
        for piece in gl.static_range(PIECES):
            part = q_s.index(GROUP_NUMBER * PANELS + piece).reshape([64, BLOCK_D])
            k = k_s.index(slot * PIECES + piece).reshape([BK, BLOCK_D])
            s = warpgroup_mma(part, k.permute((1, 0)), s, use_acc=piece > 0, is_async=True)
    return s


@gluon.jit
def drops_of(dropout, where, i, column, PIECES: gl.constexpr):
    """What drops of the block from this column on: these products of integers run beside those of matrices."""
    drops = None
    if dropout is not None:
        k0, k1, threshold, kept_scale = dropout
        key = (k0, k1)
        if PIECES > 1:
            # accumulators of wide heads leave no registers
            key = afresh(key)
        drops = dropped(key, where[0], where[1], i, column, threshold)
    return drops


@gluon.jit
def with_drops(p, drops):
    """Weights, and with dropout also which of them drop: a loop carries no None."""
    if drops is not None:
        p = (p, drops)
    return p


@gluon.jit
def living(p, dropout):
    """What of `with_drops` meets the values. Made just before it does: 16 bits that a loop carries had better come
    from a conversion, whose results need no copies."""
    if dropout is not None:
        p = without(p[0], p[1])
    return p


@gluon.jit
def step(
    q, p, acc, m, shift, l, slot, phase, column, i, begins, ends, lengths, where, given, dropout, scale, factor,
    q_s, k_s, v_s, full, empty,
    change: gl.constexpr, SCALED: gl.constexpr, RUNNING: gl.constexpr, MASKED: gl.constexpr, LOW: gl.constexpr,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, BK: gl.constexpr, PIECES: gl.constexpr, PANELS: gl.constexpr,
    STAGES: gl.constexpr, DTYPE: gl.constexpr, GROUP_NUMBER: gl.constexpr,
):  # fmt: skip
    """Scores of one block while the weights of the one before meet their values."""
    length_q, length_k = lengths
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BK, 16])
    o_layout: gl.constexpr = acc.type.layout
    mbarrier.wait(full.index(slot), phase)
    v = v_s.index(slot).reshape([BK, BLOCK_DV])
    s = product(q, q_s, k_s, slot, s_layout, BLOCK_D, BK, PIECES, PANELS, GROUP_NUMBER)
    acc = warpgroup_mma(living(p, dropout), v, acc, is_async=True)
    drops = drops_of(dropout, where, i, column, PIECES)
    s = warpgroup_mma_wait(1, deps=[s])
    s = scored(s, i, column, length_q, length_k, begins, ends, where, given, scale, True, change, SCALED, MASKED, LOW)
    if RUNNING:
        m, shift, kept = raised(s, m, factor)
    weights = exp2(s * factor - shift[:, None])
    sums = partial_sums(weights)
    if RUNNING:
        l = l * gl.convert_layout(kept, gl.SliceLayout(1, l.type.layout))[:, None] + sums
    else:
        l = l + sums
    p = operand(weights, gl.DotOperandLayout(0, o_layout, 2), DTYPE)
    acc = warpgroup_mma_wait(0, deps=[acc])
    arrive(empty.index(slot))
    if RUNNING:
        acc = acc * gl.convert_layout(kept, gl.SliceLayout(1, o_layout))[:, None]
    slot, phase = following(slot, phase, STAGES)
    return with_drops(p, drops), acc, m, shift, l, slot, phase


@gluon.jit
def release(count, slot, phase, full, empty, STAGES: gl.constexpr):
    """Let slots go that other warpgroups read. They have to be full before: an arrival counts in its own phase."""
    for _ in range(count):
        mbarrier.wait(full.index(slot), phase)
        arrive(empty.index(slot))
        slot, phase = following(slot, phase, STAGES)
    return slot, phase


@gluon.jit
def finish(
    acc, m, total, i, first, b, h, token_q, room_q, length_q, o_desc, out, o_strides, lse, lse_strides, sink, dropout,
    o_s, PACK: gl.constexpr, PACKED: gl.constexpr, DV: gl.constexpr, BLOCK_DV: gl.constexpr, SPREAD: gl.constexpr,
    GROUP_NUMBER: gl.constexpr,
):  # fmt: skip
    """Out and LSE of 64 rows, from their sums and their references in base 2."""
    row_s: gl.constexpr = i.type.layout
    o_layout: gl.constexpr = acc.type.layout
    row_o: gl.constexpr = gl.SliceLayout(1, o_layout)
    head = h
    if PACK > 1:
        head = h * PACK + gl.arange(0, 64, layout=row_s) % PACK
    seen = (total != 0.0) & (i < length_q)
    total = gl.where(seen, total, 1.0)
    portion = 1.0 / total
    result = gl.where(seen, m + gl.log2(total), float("-inf"))
    if sink is not None:
        logit = gl.load(sink + head).to(gl.float32) * LOG2E
        top = gl.maximum(result, logit)
        lowest = gl.where(top == float("-inf"), 0.0, top)
        worth = exp2(result - lowest)
        both = worth + exp2(logit - lowest)
        portion = gl.where(seen, portion * worth / both, portion)
        result = gl.where((both == 0.0) | (i >= length_q), float("-inf"), lowest + gl.log2(both))
    if dropout is not None:
        portion = portion * dropout[3]
    lse_b, lse_h = lse_strides
    lse_start = lse + b.to(gl.int64) * lse_b + head.to(gl.int64) * lse_h + token_q.to(gl.int64)
    gl.store(lse_start + i, result * LN2, mask=i < room_q)
    # a row that sees nothing may have met what is not a number in rows that other rows see
    portion = gl.convert_layout(portion, row_o)[:, None]
    shown = gl.convert_layout(gl.where(seen, 1, 0), row_o)[:, None]
    acc = gl.where(shown != 0, acc * portion, 0.0)
    o = o_s.index(GROUP_NUMBER * SPREAD)
    tma.store_wait(0)
    o.reshape([64, BLOCK_DV]).store(acc.to(o_desc.dtype))
    if PACKED and first + 64 // PACK > room_q:
        # behind the sequence lie the rows of another one
        o_b, o_h, o_n = o_strides
        lanes: gl.constexpr = BLOCK_DV // 8
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])
        dims = gl.arange(0, BLOCK_DV, layout=gl.SliceLayout(0, layout))
        start = out + (h.to(gl.int64) * PACK * o_h + (token_q + first).to(gl.int64) * o_n) * VECTOR
        for part in gl.static_range(4):
            row = part * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, layout))
            offsets = (row // PACK).to(gl.int64) * o_n + (row % PACK).to(gl.int64) * o_h
            pointers = start + offsets[:, None] * VECTOR + dims[None, :]
            there = (first + row // PACK < room_q)[:, None] & (dims < DV)[None, :]
            gl.store(pointers, o.reshape([64, BLOCK_DV]).slice(part * 16, 16, dim=0).load(layout), mask=there)
    else:
        fence_async_shared()
        at, second, third = place_of(b * 0 if PACKED else b, h, token_q + first, PACK)
        store_tile(o_desc, [at, second, third, 0], o)


@gluon.jit
def attend(
    ring, turn, told, heard, slot, phase, q_phase, o_desc, out, o_strides, lse, lse_strides, work,
    scale, sink, given, dropout, q_s, k_s, v_s, o_s, q_full, q_empty, full, empty,
    change: gl.constexpr, SCALED: gl.constexpr, SAFE: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr,
    PACK: gl.constexpr, PACKED: gl.constexpr, DV: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    BK: gl.constexpr, PIECES: gl.constexpr, PANELS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    GROUP_NUMBER: gl.constexpr,
):  # fmt: skip
    """The tile of a notice: the 64 rows of this warpgroup. Returns whether there was one."""
    DTYPE: gl.constexpr = o_desc.dtype
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_DV, 16]
    )
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    row_s: gl.constexpr = gl.SliceLayout(1, s_layout)
    place = turn % 2
    mbarrier.wait(told.index(place), (turn // 2) & 1)
    number = get(ring, 0, place)
    b = get(ring, 1, place)
    h = get(ring, 2, place)
    tile_first = get(ring, 3, place)
    token_q = get(ring, 4, place)
    room_q = get(ring, 5, place)
    length_q = get(ring, 6, place)
    token_k = get(ring, 7, place)
    length_k = get(ring, 8, place)
    least = get(ring, 9, place)
    most = get(ring, 10, place)
    mbarrier.arrive(heard.index(place), count=1)
    if number >= 0:
        tile_last = gl.minimum(tile_first + 64 // PACK * GROUPS, length_q) - 1
        tile_begin, tile_end = blocks_of(tile_first, tile_last, least, most, length_k, BK)
        first = tile_first + 64 // PACK * GROUP_NUMBER
        last = gl.minimum(first + 64 // PACK, length_q) - 1
        begin, end = blocks_of(first, last, least, most, length_k, BK)
        # a warpgroup without a key still lets every slot of the tile pass
        none = end <= begin
        begin = gl.where(none, tile_begin, begin)
        end = gl.where(none, tile_begin, end)
        slot, phase = release(begin - tile_begin, slot, phase, full, empty, STAGES)

        # the heads of a row follow each other
        rows = gl.arange(0, 64, layout=row_s)
        i = first + rows // PACK
        begins = gl.maximum(i + least, 0)
        ends = gl.where(i < length_q, gl.minimum(i + most + 1, length_k), 0)
        head = h.to(gl.int64)
        if PACK > 1:
            head = (h * PACK + rows % PACK).to(gl.int64)[:, None]
        where = (b.to(gl.int64), head, token_q, token_k, length_q, length_k)
        lengths = (length_q, length_k)
        factor = scale
        if SCALED:
            factor = 1.0
        acc = gl.zeros([64, BLOCK_DV], gl.float32, layout=o_layout)
        m = gl.full([64], float("-inf"), gl.float32, layout=row_s)
        mbarrier.wait(q_full.index(GROUP_NUMBER), q_phase)
        q = None
        if PIECES == 1:
            q = q_s.index(GROUP_NUMBER).reshape([64, BLOCK_D]).load(gl.DotOperandLayout(0, s_layout, 2))
            arrive(q_empty.index(GROUP_NUMBER))
        sums = gl.zeros([64, BK], gl.float32, layout=s_layout)
        l = partial_sums(sums)
        if end > begin:
            mbarrier.wait(full.index(slot), phase)
            s = product(q, q_s, k_s, slot, s_layout, BLOCK_D, BK, PIECES, PANELS, GROUP_NUMBER)
            drops = drops_of(dropout, where, i, begin * BK, PIECES)
            s = warpgroup_mma_wait(0, deps=[s])
            arrive(empty.index(slot))
            slot, phase = following(slot, phase, STAGES)
            stop = gl.minimum(first + most + 1, length_k)
            partial = True
            if GROUPS == 2 and not HIGH:
                # three warpgroups have no registers for a branch
                partial = ((begin + 1) * BK > stop) | (begin * BK < last + least)
            s = scored(
                s, i, begin * BK, length_q, length_k, begins, ends, where, given, scale, partial,
                change, SCALED, True, LOW,
            )  # fmt: skip
            m, shift, kept = raised(s, m, factor)
            weights = exp2(s * factor - shift[:, None])
            l = partial_sums(weights)
            p = with_drops(operand(weights, p_layout, DTYPE), drops)
            # blocks (begin, low) until every row that sees something has seen some, [low, high) that every row sees
            # all of, and [high, end)
            low = begin + 1
            if LOW:
                low = gl.minimum(gl.maximum(gl.maximum(last + least, 0) // BK + 1, low), end)
                for block in range(begin + 1, low):
                    p, acc, m, shift, l, slot, phase = step(
                        q, p, acc, m, shift, l, slot, phase, block * BK, i, begins, ends, lengths, where,
                        given, dropout, scale, factor, q_s, k_s, v_s, full, empty, change, SCALED, True, True, True,
                        BLOCK_D, BLOCK_DV, BK, PIECES, PANELS, STAGES, DTYPE, GROUP_NUMBER,
                    )  # fmt: skip
            high = gl.maximum(stop, 0) // BK
            high = gl.minimum(gl.maximum(high, low), end)
            for block in range(low, high):
                p, acc, m, shift, l, slot, phase = step(
                    q, p, acc, m, shift, l, slot, phase, block * BK, i, begins, ends, lengths, where,
                    given, dropout, scale, factor, q_s, k_s, v_s, full, empty, change, SCALED, SAFE, False, False,
                    BLOCK_D, BLOCK_DV, BK, PIECES, PANELS, STAGES, DTYPE, GROUP_NUMBER,
                )  # fmt: skip
            for block in range(high, end):
                p, acc, m, shift, l, slot, phase = step(
                    q, p, acc, m, shift, l, slot, phase, block * BK, i, begins, ends, lengths, where,
                    given, dropout, scale, factor, q_s, k_s, v_s, full, empty, change, SCALED, SAFE, True, False,
                    BLOCK_D, BLOCK_DV, BK, PIECES, PANELS, STAGES, DTYPE, GROUP_NUMBER,
                )  # fmt: skip
            mbarrier.wait(full.index(slot), phase)
            acc = warpgroup_mma(living(p, dropout), v_s.index(slot).reshape([BK, BLOCK_DV]), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            arrive(empty.index(slot))
            slot, phase = following(slot, phase, STAGES)
            slot, phase = release(tile_end - end, slot, phase, full, empty, STAGES)
        elif tile_end > tile_begin:
            slot, phase = release(tile_end - tile_begin + 1, slot, phase, full, empty, STAGES)

        total = gl.convert_layout(gl.sum(l, axis=1), row_s)
        marked = number * 0
        if not SAFE:
            # what is not a number is not within a limit, either; one element that is not finite shows in a row's sum
            spread = gl.abs(gl.convert_layout(gl.sum(acc, axis=1), row_s))
            beyond = gl.where((i < length_q) & ~((total <= LIMIT) & (spread < float("inf"))), 1, 0)
            marked = gl.max(gl.convert_layout(beyond, gl.BlockedLayout([1], [32], [4], [0])), axis=0)
        if marked != 0:
            gl.store(work + gl.program_id(0), 1)
            gl.store(work + gl.num_programs(0) + PER_TILE * number + 1, 1)
        else:
            if PIECES > 1:
                # out takes the place of q, which the whole warpgroup has to be through with
                barrier()
            finish(
                acc, m * factor, total, i, first, b, h, token_q, room_q, length_q, o_desc, out, o_strides, lse,
                lse_strides, sink, dropout, o_s, PACK, PACKED, DV, BLOCK_DV,
                1 if PIECES == 1 else PANELS * BLOCK_D // BLOCK_DV, GROUP_NUMBER,
            )  # fmt: skip
        if PIECES > 1:
            tma.store_wait(0)
            arrive(q_empty.index(GROUP_NUMBER))
    return number >= 0, slot, phase


@gluon.jit
def consume(
    o_desc, out, o_strides, lse, lse_strides, work, scale, sink, given, seed, threshold, kept_scale, ring,
    q_s, k_s, v_s, o_s, barriers,
    change: gl.constexpr, SCALED: gl.constexpr, AGAIN: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr,
    PACK: gl.constexpr, PACKED: gl.constexpr, DV: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    BK: gl.constexpr, PIECES: gl.constexpr, PANELS: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    GROUP_NUMBER: gl.constexpr,
):  # fmt: skip
    told, heard, q_full, q_empty, full, empty, done = barriers
    dropout = loaded_dropout((seed, threshold, kept_scale))
    slot = gl.program_id(0) * 0
    phase = slot
    q_phase = slot
    turn = slot
    more = slot == 0
    while more:
        more, slot, phase = attend(
            ring, turn, told, heard, slot, phase, q_phase, o_desc, out, o_strides, lse, lse_strides, work,
            scale, sink, given, dropout, q_s, k_s, v_s, o_s, q_full, q_empty, full, empty,
            change, SCALED, not AGAIN, LOW, HIGH, PACK, PACKED, DV, BLOCK_D, BLOCK_DV, BK, PIECES, PANELS, GROUPS,
            STAGES, GROUP_NUMBER,
        )  # fmt: skip
        q_phase ^= 1
        turn += 1
    if AGAIN:
        # the round's end took no q
        q_phase ^= 1
        mbarrier.arrive(done, count=1)
        mbarrier.wait(done, 0)
        if gl.load(work + gl.program_id(0), volatile=True) != 0:
            more = slot == slot
            while more:
                more, slot, phase = attend(
                    ring, turn, told, heard, slot, phase, q_phase, o_desc, out, o_strides, lse, lse_strides, work,
                    scale, sink, given, dropout, q_s, k_s, v_s, o_s, q_full, q_empty, full, empty,
                    change, SCALED, True, LOW, HIGH, PACK, PACKED, DV, BLOCK_D, BLOCK_DV, BK, PIECES, PANELS, GROUPS,
                    STAGES, GROUP_NUMBER,
                )  # fmt: skip
                q_phase ^= 1
                turn += 1
    tma.store_wait(0)


UNSPECIALIZED = [
    "batch", "heads", "length_q", "length_k", "tiles", "section", "total", "v_b", "v_h", "v_n", "o_b", "o_h", "o_n",
    "lse_b", "lse_h", "low", "high", "low_aligned", "high_aligned", "threshold",
]  # fmt: skip


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, value, out, lse, counter, work,
    v_b: gl.int64, v_h: gl.int64, v_n: gl.int64, o_b: gl.int64, o_h: gl.int64, o_n: gl.int64,
    lse_b: gl.int64, lse_h: gl.int64,
    batch: gl.int32, heads: gl.int32, length_q: gl.int32, length_k: gl.int32,
    tiles: gl.int32, section: gl.int32, total: gl.int32,
    cu_q, cu_k, used_q, used_k, low, high, low_aligned, high_aligned, lows, highs,
    scale: gl.float32, sink, given, seed, threshold: gl.int32, kept_scale: gl.float32,
    change: gl.constexpr, SCALED: gl.constexpr, AGAIN: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr,
    ALONE: gl.constexpr, GROUP: gl.constexpr, PACK: gl.constexpr, DV: gl.constexpr, BLOCK_D: gl.constexpr,
    BLOCK_DV: gl.constexpr, PIECES: gl.constexpr, BK: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
    REGISTERS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Out and LSE of every tile of rows. `heads` counts groups of PACK query heads, of which GROUP share a key head."""
    DTYPE: gl.constexpr = q_desc.dtype
    PACKED: gl.constexpr = cu_q is not None
    # a group's q has room for its out, which then takes its place
    PANELS: gl.constexpr = 1 if PIECES == 1 else 4
    FIRST: gl.constexpr = 1 if PACK == 1 else 64 // PACK
    SECOND: gl.constexpr = 64 if PACK == 1 else PACK
    q_s = gl.allocate_shared_memory(DTYPE, [GROUPS * PANELS, 1, FIRST, SECOND, BLOCK_D], q_desc.layout)
    if PIECES == 1:
        o_s = gl.allocate_shared_memory(DTYPE, [GROUPS, 1, FIRST, SECOND, BLOCK_DV], o_desc.layout)
    else:
        places: gl.constexpr = GROUPS * PANELS * BLOCK_D // BLOCK_DV
        o_s = reinterpret(q_s, DTYPE, [places, 1, FIRST, SECOND, BLOCK_DV], o_desc.layout)
    k_s = gl.allocate_shared_memory(DTYPE, [STAGES * PIECES, 1, 1, BK, BLOCK_D], k_desc.layout)
    v_s = gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, BK, BLOCK_DV], v_desc.layout)
    ring = gl.allocate_shared_memory(gl.int32, [2 * NOTICE, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    heard = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [GROUPS, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # a barrier that nobody uses would share its memory with something else, which barriers cannot
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()) if AGAIN else told
    for place in gl.static_range(2):
        mbarrier.init(told.index(place), count=1)
        mbarrier.init(heard.index(place), count=GROUPS)
    for group in gl.static_range(GROUPS):
        mbarrier.init(q_full.index(group), count=1)
        mbarrier.init(q_empty.index(group), count=128)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=128 * GROUPS)
    if AGAIN:
        mbarrier.init(done, count=GROUPS)
    descriptors = (q_desc, k_desc, v_desc)
    sizes = (batch, heads, length_q, length_k, tiles, section, total)
    layout = (cu_q, cu_k, used_q, used_k)
    bounds = (low, high, low_aligned, high_aligned, lows, highs)
    barriers = (told, heard, q_full, q_empty, full, empty, done)
    v_strides, o_strides, lse_strides = (v_b, v_h, v_n), (o_b, o_h, o_n), (lse_b, lse_h)
    # a tuple with a name would turn its constants into tensors
    gl.static_assert(GROUPS == 2 or GROUPS == 3)
    if GROUPS == 2:
        gl.warp_specialize([
            (consume, (o_desc, out, o_strides, lse, lse_strides, work, scale, sink, given, seed, threshold, kept_scale,
                       ring, q_s, k_s, v_s, o_s, barriers, change, SCALED, AGAIN, LOW, HIGH, PACK, PACKED, DV,
                       BLOCK_D, BLOCK_DV, BK, PIECES, PANELS, GROUPS, STAGES, 0)),
            (consume, (o_desc, out, o_strides, lse, lse_strides, work, scale, sink, given, seed, threshold, kept_scale,
                       ring, q_s, k_s, v_s, o_s, barriers, change, SCALED, AGAIN, LOW, HIGH, PACK, PACKED, DV,
                       BLOCK_D, BLOCK_DV, BK, PIECES, PANELS, GROUPS, STAGES, 1)),
            (produce, (descriptors, value, v_strides, counter, work, sizes, layout, bounds, ring, q_s, k_s, v_s,
                       barriers, HIGH, AGAIN, GROUP, PACK, DV, BLOCK_D, BLOCK_DV, BK, PIECES, PANELS, GROUPS, STAGES,
                       ALONE)),
        ], [4, 1], [REGISTERS, 32])  # fmt: skip
    else:
        gl.warp_specialize([
            (consume, (o_desc, out, o_strides, lse, lse_strides, work, scale, sink, given, seed, threshold, kept_scale,
                       ring, q_s, k_s, v_s, o_s, barriers, change, SCALED, AGAIN, LOW, HIGH, PACK, PACKED, DV,
                       BLOCK_D, BLOCK_DV, BK, PIECES, PANELS, GROUPS, STAGES, 0)),
            (consume, (o_desc, out, o_strides, lse, lse_strides, work, scale, sink, given, seed, threshold, kept_scale,
                       ring, q_s, k_s, v_s, o_s, barriers, change, SCALED, AGAIN, LOW, HIGH, PACK, PACKED, DV,
                       BLOCK_D, BLOCK_DV, BK, PIECES, PANELS, GROUPS, STAGES, 1)),
            (consume, (o_desc, out, o_strides, lse, lse_strides, work, scale, sink, given, seed, threshold, kept_scale,
                       ring, q_s, k_s, v_s, o_s, barriers, change, SCALED, AGAIN, LOW, HIGH, PACK, PACKED, DV,
                       BLOCK_D, BLOCK_DV, BK, PIECES, PANELS, GROUPS, STAGES, 2)),
            (produce, (descriptors, value, v_strides, counter, work, sizes, layout, bounds, ring, q_s, k_s, v_s,
                       barriers, HIGH, AGAIN, GROUP, PACK, DV, BLOCK_D, BLOCK_DV, BK, PIECES, PANELS, GROUPS, STAGES,
                       ALONE)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip


def forward(problem: Problem, query: Tensor, key: Tensor, value: Tensor, *, saves: bool) -> tuple[Tensor, Tensor]:
    """Out and LSE."""
    out, lse = empty_results(problem, query)
    if out.numel() == 0:
        return out, lse
    known, facts = _PREPARED.of(problem), (query.stride(), key.stride(), value.stride())
    ready = known.get(facts)
    if ready is not None and ready.launcher.kernel is not forward_kernel:
        # somebody put another kernel in its place
        ready = None
    with on_device(query.device):
        if ready is None or (query.data_ptr() | key.data_ptr() | value.data_ptr()) % 16:
            inputs = query, key, value
            query, key, value = (expressible(tensor) for tensor in inputs)
            if key.numel() == 0:
                # nothing of them is read, but a descriptor stands on memory
                key, value = query, out
            ready = prepare(forward_kernel, problem, query, key, value, out)
            if all(given is taken for given, taken in zip(inputs, (query, key, value), strict=True)):
                known[facts] = ready
        ready.run(query, key, value, out, lse)
    return out, lse


_PREPARED: PerProblem[Prepared] = PerProblem()
"""Launches by problem, and by strides."""
