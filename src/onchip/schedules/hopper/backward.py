"""The backward kernels for Hopper: 128 keys stay, the rows that see them pass by.

    prepare_kernel   delta and LSE of 64 rows at a time, in base 2 and padded to whole blocks; zeros for dQ, or a mark
    backward_kernel  one program for 128 columns of a key head
        producer     one warp: K and V once, then q and do of every block of 64 rows, with their LSE and delta
        consumers    two warpgroups of 64 columns each; for each block of rows
                         s = k q^T   dp = v do^T   p = exp2(s * scale - lse)   ds = p * (dp - delta)
                         dv += p do   dk += ds q   and ds, for dq, to shared memory
        dq           one warp that adds the tiles of dq which the consumers leave it, who take turns (head dims above
                     64), or a warpgroup that also multiplies (to 64: k and v then are register operands)
    finish_kernel    dq from float32 sums, whose memory order is that of the accumulator's registers

dK and dV are sums of one program, over all heads of a group. dQ is added to in any order.
Sources: Dao 2023, FlashAttention-2, algorithm 2; Shah et al. 2024, FlashAttention-3, section 3.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from onchip.gpu.parts import band_of, extent, find_among, find_slot, nearest, row_values
from onchip.schedules.hopper.dropout import afresh, alive, dropped_turned, loaded_dropout, without
from onchip.schedules.hopper.forward import VECTOR, arrive, copy_values, lanes
from onchip.schedules.hopper.names import add_tile, barrier, load_tile, store_tile
from onchip.schedules.hopper.special import exp2

LOG2E = gl.constexpr(1.4426950408889634)
ROWS = gl.constexpr(64)
"""Rows of a block, and columns of a warpgroup."""
COLUMNS = gl.constexpr(128)
Q_EMPTY, DO_EMPTY = gl.constexpr(8), gl.constexpr(10)
"""Numbers of barriers in hardware, two each, for both places of a buffer. Triton's own have small numbers."""
DS_FULL, DQ_FULL = gl.constexpr(12), gl.constexpr(14)


def _barrier(what, warps):
    return gl.constexpr(f"bar.{what} $1, {32 * warps}; mov.b32 $0, 0;")


ARRIVE_FOR_PRODUCER, WAIT_FOR_CONSUMERS = _barrier("arrive", 9), _barrier("sync", 9)
ARRIVE_FOR_OTHER, WAIT_FOR_OTHER = _barrier("arrive", 8), _barrier("sync", 8)
ARRIVE_FOR_ADDER, WAIT_FOR_TILE = _barrier("arrive", 5), _barrier("sync", 5)
UNSPECIALIZED = [
    "q_b", "q_h", "q_n", "do_b", "do_h", "do_n", "k_b", "k_h", "k_n", "v_b", "v_h", "v_n", "dk_b", "dk_h", "dk_n",
    "dv_b", "dv_h", "dv_n", "batch", "heads", "length_q", "length_k", "tiles", "section", "slots", "low", "high",
    "low_aligned", "high_aligned", "threshold",
]  # fmt: skip


@gluon.jit
def unknown_zero():
    """A zero that the compiler takes for a number: descriptors of known addresses would be kept from step to step, and
    spill, since there are more of them than registers."""
    return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def flat(dq, D: gl.constexpr):
    """(64, D) in the order of its registers, so that 16 bytes of a thread are stored together."""
    x = dq.reshape([4, 2, 8, D // 8, 4, 2]).permute([3, 0, 2, 4, 1, 5])
    return x.reshape([2 * D, 32])


@gluon.jit
def halves(p, DTYPE: gl.constexpr):
    """Rounded to 16 bits, two numbers in a register."""
    if gl.bfloat16 == DTYPE:
        return gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [p], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    else:
        return gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [p], dtype=gl.float16, is_pure=True, pack=2
        )


@gluon.jit
def at_barrier(number, INSTRUCTION: gl.constexpr):
    """Arrive at a barrier of that number, or wait there as well; its warps are counted in the instruction.

    An arrival is one instruction of a warp. At a barrier in shared memory each thread would arrive for itself, or the
    warpgroup would have to meet before.
    """
    gl.inline_asm_elementwise(INSTRUCTION, "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


# Which columns, and which rows


@gluon.jit
def columns_of(sizes, layout, bounds):
    """Of a program: sequence, key head, first column, extents of rows and columns, band, and blocks of rows."""
    number, batch, heads, length_q, length_k, tiles, section = sizes
    cu_q, cu_k, used_q, used_k = layout
    low, high, low_aligned, high_aligned, lows, highs = bounds
    if cu_k is not None:
        b, tile = find_among(number % tiles, cu_k, length_k, batch, lanes(), 1, COLUMNS)
        h = number // tiles
        first = tile * COLUMNS
    else:
        whole = section * tiles
        before = number // whole * section
        here = gl.minimum(section, batch * heads - before)
        place = number - before * tiles
        b = (before + place % here) // heads
        h = (before + place % here) % heads
        first = place // here * COLUMNS
    q_of = extent(b, cu_q, used_q, length_q, batch)
    k_of = extent(b, cu_k, used_k, length_k, batch)
    least, most = band_of(b, q_of[2], k_of[2], batch, low, high, low_aligned, high_aligned, lows, highs)
    last = gl.minimum(first + COLUMNS, k_of[2]) - 1
    begin = gl.maximum(first - most, 0) // ROWS
    stop = gl.maximum(gl.minimum(last - least + 1, q_of[2]), 0)
    end = gl.maximum((stop + ROWS - 1) // ROWS, begin)
    if first >= k_of[2]:
        end = begin + 0
    return b, h, first, q_of, k_of, (least, most), begin, end


@gluon.jit
def block_of(b, head, m, token_q, heads, slots, PACKED: gl.constexpr):
    """The number of a block of rows among those of all sequences and heads; see parts.find_slot."""
    if PACKED:
        number = head * slots + token_q // ROWS + b + m
    else:
        number = (b * heads + head) * slots + m
    return number


@gluon.jit
def next_block(m, member, begin, end):
    """The block behind m, of the next head behind the last one."""
    m += 1
    if m == end:
        m = begin + 0
        member += 1
    return m, member


# How programs add to dQ. With `order`, whoever comes first to a block stores, and the others add to that


@gluon.jit
def number_of(order, blocks, HIGH: gl.constexpr, ORDERED: gl.constexpr):
    """The program's number among all; if they add in order, among those that started.

    A program that waits for others waits for smaller numbers only, so these have started, and none waits for ever.
    Under a band that ends at the diagonal the last columns come first: their rows are the first to be done with.
    """
    if ORDERED:
        number = gl.atomic_add(order + blocks, 1)
        # Triton hands it to warps in shared memory, and from there on to partitions without waiting for slow warps
        barrier()
        if HIGH:
            number = gl.num_programs(0) - 1 - number
    else:
        number = gl.program_id(0)
    return number


@gluon.jit
def before_us(m, first, length_k, band, HIGH: gl.constexpr):
    """How many programs add to a block of rows before the one whose columns start at `first`."""
    least, most = band
    if HIGH:
        count = (gl.minimum(m * ROWS + ROWS - 1 + most, length_k - 1) // COLUMNS) - first // COLUMNS
    else:
        count = first // COLUMNS - gl.maximum(m * ROWS + least, 0) // COLUMNS
    return count


@gluon.jit
def loaded(pointer):
    """What other programs released there."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [pointer], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def claimed(pointer):
    """What stood there before this warp put 1 in place of a 0."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .pred one;
        .reg .b32 lane;
        mov.u32 lane, %laneid;
        setp.eq.u32 one, lane, 0;
        mov.b32 $0, 0;
        @one atom.acquire.gpu.global.cas.b32 $0, [$1], 0, 1;
        shfl.sync.idx.b32 $0, $0, 0, 0x1f, 0xffffffff;
        }
        """,
        "=&r,l", [pointer], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def is_first(order, block, turn, ORDERED: gl.constexpr):
    """Whether nobody has filled a block of dq yet. Waits until it is filled if it is somebody else who does.

    In order, `order` counts the programs that are done with the block. Otherwise 1 says that somebody is about to fill
    it, and 2 that it is filled. Without `order` zeros stand there.

    Nobody waits for ever: the programs of a head come to its blocks in one order, and what keeps a program from filling
    a block that it has claimed is at most its other warp, which waits for a block before that one.
    """
    if order is None:
        first = False
    elif ORDERED:
        while loaded(order + block) != turn:
            pass
        first = turn == 0
    else:
        first = loaded(order + block) == 0
        if first:
            first = claimed(order + block) == 0
        if not first:
            while loaded(order + block) != 2:
                pass
    return first


@gluon.jit
def leave(dq_desc, row, tile, first):
    """A tile of dq by TMA, to a block that holds nothing or to sums."""
    if first:
        store_tile(dq_desc, [row, 0], tile)
    else:
        add_tile(dq_desc, [row, 0], tile)


@gluon.jit
def release(order, block, first, ORDERED: gl.constexpr):
    """What this warp brought to a block is there."""
    if order is not None:
        if first or ORDERED:
            gl.inline_asm_elementwise(
                "cp.async.bulk.wait_group 0; bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [block],
                dtype=gl.int32, is_pure=False, pack=1,
            )  # fmt: skip
            gl.atomic_add(order + block, 1, sem="release", scope="gpu")


@gluon.jit
def add_tiles(
    dq_desc, order, sizes, layout, bounds, slots, dq_s, dq_full, dq_empty,
    HIGH: gl.constexpr, ORDERED: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """One of two warps that add tiles of dq, every other one each, so that one may wait.

    `dq_full` is None where tiles come by a barrier of the hardware.
    """
    b, h, first, q_of, k_of, band, begin, end = columns_of(sizes, layout, bounds)
    heads = sizes[2] * GROUP
    count = end - begin
    for i in range(W, count * GROUP, 2):
        m = begin + i % count
        block = block_of(b, h * GROUP + i // count, m, q_of[0], heads, slots, layout[0] is not None)
        fills = is_first(order, block, before_us(m, first, k_of[2], band, HIGH), ORDERED)
        if dq_full is None:
            at_barrier(DQ_FULL + W, WAIT_FOR_TILE)
        else:
            mbarrier.wait(dq_full.index(W), (i // 2) & 1)
        leave(dq_desc, block * (2 * D), dq_s.index(W), fills)
        tma.store_wait(0)
        mbarrier.arrive(dq_empty.index(W), count=1)
        release(order, block, fills, ORDERED)


# The producer


@gluon.jit
def bring(
    desc, base, strides, memory, slot, b, head, token, length, row, barrier, beside,
    DIM: gl.constexpr, D: gl.constexpr, ALONE: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """A tile of 64 rows, whose barrier also counts so many bytes that come beside it.

    Where other rows follow a sequence, zeros take their place: what they hold may be anything.
    """
    copied = row * 0 != 0
    if not ALONE:
        copied = row + 64 > length
        if copied:
            copy_values(base, strides, memory, slot, b, head, token, length, row, DIM, D, 64)
    if copied:
        if beside > 0:
            mbarrier.expect(barrier, beside)
        else:
            mbarrier.arrive(barrier, count=1)
    else:
        mbarrier.expect(barrier, beside + 64 * D * 2)
        at = b * 0 if PACKED else b
        load_tile(desc, [at, head, token + row, 0], barrier, memory.index(slot))


@gluon.jit
def produce(
    descriptors, tensors, strides, sizes, layout, bounds, slots, q_s, do_s, k_s, v_s, lse_s, delta_s, barriers,
    GROUP: gl.constexpr, DIM: gl.constexpr, DV: gl.constexpr, D: gl.constexpr,
    ALONE: gl.constexpr,
):  # fmt: skip
    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc = descriptors
    query, grad_out, key, value = tensors
    q_strides, do_strides, k_strides, v_strides = strides
    kv_full, q_full, do_full = barriers
    PACKED: gl.constexpr = layout[0] is not None
    b, h, first, q_of, k_of, band, begin, end = columns_of(sizes, layout, bounds)
    heads = sizes[2] * GROUP
    for w in gl.static_range(2):
        bring(k_desc, key, k_strides, k_s, w, b, h, k_of[0], k_of[2], first + w * 64, kv_full, 0, DIM, D, ALONE, PACKED)
        bring(
            v_desc, value, v_strides, v_s, w, b, h, k_of[0], k_of[2], first + w * 64, kv_full, 0, DV, D, ALONE, PACKED
        )
    m = begin
    member = h * 0
    steps = (end - begin) * GROUP
    for i in range(steps):
        slot = i % 2
        head = h * GROUP + member
        row = block_of(b, head, m, q_of[0], heads, slots, PACKED) * ROWS
        if i >= 2:
            at_barrier(Q_EMPTY + slot, WAIT_FOR_CONSUMERS)
        bring(
            q_desc, query, q_strides, q_s, slot, b, head, q_of[0], q_of[2], m * ROWS, q_full.index(slot), ROWS * 4,
            DIM, D, ALONE, PACKED,
        )  # fmt: skip
        load_tile(lse_desc, [row], q_full.index(slot), lse_s.index(slot))
        if i >= 2:
            at_barrier(DO_EMPTY + slot, WAIT_FOR_CONSUMERS)
        bring(
            do_desc, grad_out, do_strides, do_s, slot, b, head, q_of[0], q_of[2], m * ROWS, do_full.index(slot),
            ROWS * 4, DV, D, ALONE, PACKED,
        )  # fmt: skip
        load_tile(delta_desc, [row], do_full.index(slot), delta_s.index(slot))
        m, member = next_block(m, member, begin, end)
    # nobody leaves a barrier half full
    for i in range(gl.maximum(steps - 2, 0), steps):
        at_barrier(Q_EMPTY + i % 2, WAIT_FOR_CONSUMERS)
        at_barrier(DO_EMPTY + i % 2, WAIT_FOR_CONSUMERS)


# The consumers


@gluon.jit
def exponents(
    s, m, column, lse, band, where, given, scale,
    change: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr, BRANCH: gl.constexpr,
):  # fmt: skip
    """Exponents of the weights of a tile (columns, rows), minus infinity where hidden, and the scores before steps.

    With BRANCH tiles that end before the keys do are spared the test for that: without a barrier of the warp in its
    path ptxas makes selections of a branch, 32 of the 430 instructions of a block at head dim 128.
    """
    least, most = band
    b, head, token_q, token_k, length_q, length_k = where
    layout: gl.constexpr = s.type.layout
    if change is not None:
        position = (m * ROWS + gl.arange(0, 64, layout=gl.SliceLayout(0, layout)))[None, :]
        place = (column + gl.arange(0, 64, layout=gl.SliceLayout(1, layout)))[:, None]
        s = s * scale
        z = change(s, nearest(position, length_q), nearest(place, length_k), where, given) * LOG2E - lse[None, :]
    else:
        z = s * scale - lse[None, :]
    if column + 64 > length_k:
        if BRANCH:
            gl.inline_asm_elementwise(
                "bar.warp.sync 0xffffffff; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
            )
        # zeros in place of keys have weights too, and dq would be infinity times zero where scores are far below them
        j = column + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        z = gl.where((j < length_k)[:, None], z, float("-inf"))
    if LOW or HIGH:
        row = m * ROWS
        if (column - row - 63 < least) | (column + 63 - row > most):
            i = row + gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
            j = column + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
            if HIGH:
                z = gl.where(i[None, :] >= (j - most)[:, None], z, float("-inf"))
            if LOW:
                z = gl.where(i[None, :] <= (j - least)[:, None], z, float("-inf"))
    return z, s


@gluon.jit
def turned(g, raw, m, column, where, given, change: gl.constexpr, differentiate: gl.constexpr):
    """Weights times the derivative of the steps, which is linear: so soon, because fewer numbers wait for dp then."""
    if differentiate is not None:
        layout: gl.constexpr = g.type.layout
        i = (m * ROWS + gl.arange(0, 64, layout=gl.SliceLayout(0, layout)))[None, :]
        j = (column + gl.arange(0, 64, layout=gl.SliceLayout(1, layout)))[:, None]
        g = differentiate(g, raw, nearest(i, where[4]), nearest(j, where[5]), where, given)
    return g


@gluon.jit
def drops_of(dropout, where, m, column):
    """The bits of a tile's weights that drop: these products of integers run beside those of matrices."""
    drops = None
    if dropout is not None:
        key = afresh((dropout[0], dropout[1]))
        drops = dropped_turned(key, where[0], where[1], m * ROWS, column, dropout[2])
    return drops


@gluon.jit
def living(p, dropout, drops):
    """Weights in 16 bits, zero where they drop; what is left is scaled at the end."""
    if dropout is not None:
        p = without(p, drops, True)
    return p


@gluon.jit
def of_living(dp, dropout, drops):
    """The gradient of weights before those that drop became zero."""
    layout: gl.constexpr = dp.type.layout
    if dropout is not None:
        dp = gl.where(alive(drops, layout, True), dp * dropout[3], 0.0)
    return dp


@gluon.jit
def scaled(dv, dropout):
    if dropout is not None:
        dv = dv * dropout[3]
    return dv


@gluon.jit
def store_gradient(
    tile, desc, base, strides, buffer, b, h, token, room, column, DIM: gl.constexpr, D: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    """64 rows, through shared memory; where other rows follow the sequence, by threads."""
    tma.store_wait(0)
    memory = buffer.reshape([64, D])
    memory.store(tile.to(desc.dtype))
    if PACKED and column + 64 > room:
        s_b, s_h, s_n = strides
        lanes: gl.constexpr = D // 8
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])
        dims = gl.arange(0, D, layout=gl.SliceLayout(0, layout))
        start = base + (h.to(gl.int64) * s_h + (token + column).to(gl.int64) * s_n) * VECTOR
        for part in gl.static_range(4):
            row = part * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, layout))
            pointers = start + row.to(gl.int64)[:, None] * s_n * VECTOR + dims[None, :]
            there = (column + row < room)[:, None] & (dims < DIM)[None, :]
            gl.store(pointers, memory.slice(part * 16, 16, dim=0).load(layout), mask=there)
    else:
        fence_async_shared()
        at = b * 0 if PACKED else b
        store_tile(desc, [at, h, token + column, 0], buffer)


@gluon.jit
def store_gradients(
    dk, dv, descriptors, tensors, strides, buffer, b, h, k_of, column, scale,
    DIM: gl.constexpr, DV: gl.constexpr, D: gl.constexpr, ALONE: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Through the warpgroup's own tile of V, which nobody else reads."""
    dk_desc, dv_desc = descriptors
    grad_key, grad_value = tensors
    dk_strides, dv_strides = strides
    token, room, length = k_of
    dk = dk * scale
    if not ALONE:
        rows = column + gl.arange(0, 64, layout=gl.SliceLayout(1, dk.type.layout))
        dk = gl.where((rows < length)[:, None], dk, 0.0)
        dv = gl.where((rows < length)[:, None], dv, 0.0)
    store_gradient(dv, dv_desc, grad_value, dv_strides, buffer, b, h, token, room, column, DV, D, PACKED)
    store_gradient(dk, dk_desc, grad_key, dk_strides, buffer, b, h, token, room, column, DIM, D, PACKED)
    tma.store_wait(0)


@gluon.jit
def step_by_turns(
    i, m, column, dk, dv, held, band, where, given, dropout, scale, q_s, do_s, k_s, v_s, lse_s, delta_s, ds_s, dq_s,
    barriers, change: gl.constexpr, differentiate: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr, D: gl.constexpr,
    W: gl.constexpr,
):  # fmt: skip
    """A block of rows; in its turn the warpgroup multiplies the whole tile of dq. `held` is half of v, or None."""
    q_full, do_full, dq_empty = barriers
    DTYPE: gl.constexpr = q_s.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    kv_layout: gl.constexpr = dk.type.layout
    p_layout: gl.constexpr = gl.DotOperandLayout(0, kv_layout, 2)
    zero = unknown_zero()
    slot = i % 2
    phase = (i // 2) & 1
    q = q_s.index(slot + zero).reshape([ROWS, D])
    do = do_s.index(slot + zero).reshape([ROWS, D])
    mbarrier.wait(q_full.index(slot), phase)
    s = gl.zeros([64, 64], gl.float32, layout=layout)
    s = warpgroup_mma(k_s.index(W + zero).reshape([64, D]), q.permute((1, 0)), s, use_acc=False, is_async=True)
    mbarrier.wait(do_full.index(slot), phase)
    dp = gl.zeros([64, 64], gl.float32, layout=layout)
    v = v_s.index(W + zero).reshape([64, D])
    if held is None:
        dp = warpgroup_mma(v, do.permute((1, 0)), dp, use_acc=False, is_async=True)
    else:
        HALF: gl.constexpr = D // 2
        dp = warpgroup_mma(held, do.slice(0, HALF, dim=1).permute((1, 0)), dp, use_acc=False, is_async=True)
        v = v.slice(HALF, HALF, dim=1)
        dp = warpgroup_mma(v, do.slice(HALF, HALF, dim=1).permute((1, 0)), dp, is_async=True)
    drops = drops_of(dropout, where, m, column)
    lse = lse_s.index(slot).load(gl.SliceLayout(0, layout))
    s = warpgroup_mma_wait(1 if held is None else 2, deps=[s])
    z, raw = exponents(s, m, column, lse, band, where, given, scale, change, LOW, HIGH, change is None)
    p = exp2(z)
    weights = gl.convert_layout(living(halves(p, DTYPE), dropout, drops), p_layout)
    p = turned(p, raw, m, column, where, given, change, differentiate)
    delta = delta_s.index(slot).load(gl.SliceLayout(0, layout))
    dp = warpgroup_mma_wait(0, deps=[dp])
    ds = halves(p * (of_living(dp, dropout, drops) - delta[None, :]), DTYPE)
    ds_s.index(slot * 2 + W + zero).store(ds)
    dv = warpgroup_mma(weights, do, dv, is_async=True)
    fence_async_shared()
    if slot != W:
        at_barrier(DS_FULL + slot, ARRIVE_FOR_OTHER)
    dk = warpgroup_mma(gl.convert_layout(ds, p_layout), q, dk, is_async=True)
    dv = warpgroup_mma_wait(1, deps=[dv])
    at_barrier(DO_EMPTY + slot, ARRIVE_FOR_PRODUCER)
    dk = warpgroup_mma_wait(0, deps=[dk])
    at_barrier(Q_EMPTY + slot, ARRIVE_FOR_PRODUCER)
    if slot == W:
        at_barrier(DS_FULL + slot, WAIT_FOR_OTHER)
        dq = gl.zeros([ROWS, D], gl.float32, layout=kv_layout)
        for w in gl.static_range(2):
            part = ds_s.index(slot * 2 + w + zero).permute((1, 0))
            dq = warpgroup_mma(part, k_s.index(w + zero).reshape([64, D]), dq, use_acc=w > 0, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[dq])
        mbarrier.wait(dq_empty.index(W), phase ^ 1)
        dq_s.index(W).store(flat(dq, D))
        fence_async_shared()
        at_barrier(DQ_FULL + W, ARRIVE_FOR_ADDER)
    return dk, dv


@gluon.jit
def consume_by_turns(
    grad_descs, grads, grad_strides, sizes, layout, bounds, scale, plain_scale, given, dropout, q_s, do_s, k_s, v_s,
    lse_s, delta_s, ds_s, dq_s, kv_full, barriers,
    change: gl.constexpr, differentiate: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr, GROUP: gl.constexpr,
    DIM: gl.constexpr, DV: gl.constexpr, D: gl.constexpr, ALONE: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    kv_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    b, h, first, q_of, k_of, band, begin, end = columns_of(sizes, layout, bounds)
    column = first + W * 64
    drawing = loaded_dropout(dropout)
    dk = gl.zeros([64, D], gl.float32, layout=kv_layout)
    dv = gl.zeros([64, D], gl.float32, layout=kv_layout)
    mbarrier.wait(kv_full, 0)
    if change is None and drawing is None:
        # There are registers for half of v, which need not be read from shared memory for every block then.
        s_layout: gl.constexpr = gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]
        )
        held = v_s.index(W).reshape([64, D]).slice(0, D // 2, dim=1).load(gl.DotOperandLayout(0, s_layout, 2))
    else:
        held = None
    m = begin
    member = h * 0
    for i in range((end - begin) * GROUP):
        where = (b.to(gl.int64), (h * GROUP + member).to(gl.int64), q_of[0], k_of[0], q_of[2], k_of[2])
        dk, dv = step_by_turns(
            i, m, column, dk, dv, held, band, where, given, drawing, scale, q_s, do_s, k_s, v_s, lse_s, delta_s, ds_s,
            dq_s, barriers, change, differentiate, LOW, HIGH, D, W,
        )  # fmt: skip
        m, member = next_block(m, member, begin, end)
    store_gradients(
        dk, scaled(dv, drawing), grad_descs, grads, grad_strides, v_s.index(W), b, h, k_of, column, plain_scale,
        DIM, DV, D, ALONE, layout[0] is not None,
    )  # fmt: skip


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def wide_kernel(
    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, dq_desc, dk_desc, dv_desc,
    query, grad_out, key, value, grad_key, grad_value, order,
    q_b: gl.int64, q_h: gl.int64, q_n: gl.int64, do_b: gl.int64, do_h: gl.int64, do_n: gl.int64,
    k_b: gl.int64, k_h: gl.int64, k_n: gl.int64, v_b: gl.int64, v_h: gl.int64, v_n: gl.int64,
    dk_b: gl.int64, dk_h: gl.int64, dk_n: gl.int64, dv_b: gl.int64, dv_h: gl.int64, dv_n: gl.int64,
    batch: gl.int32, heads: gl.int32, length_q: gl.int32, length_k: gl.int32,
    tiles: gl.int32, section: gl.int32, slots: gl.int32,
    cu_q, cu_k, used_q, used_k, low, high, low_aligned, high_aligned, lows, highs,
    scale: gl.float32, plain_scale: gl.float32, given, seed, threshold: gl.int32, kept_scale: gl.float32,
    change: gl.constexpr, differentiate: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr, GROUP: gl.constexpr,
    ORDERED: gl.constexpr, DIM: gl.constexpr, DV: gl.constexpr, D: gl.constexpr, ALONE: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """dK, dV and sums of dQ, for head dims above 64."""
    DTYPE: gl.constexpr = q_desc.dtype
    k_s = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 64, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 64, D], v_desc.layout)
    q_s = gl.allocate_shared_memory(DTYPE, [2, 1, 1, ROWS, D], q_desc.layout)
    do_s = gl.allocate_shared_memory(DTYPE, [2, 1, 1, ROWS, D], do_desc.layout)
    ds_s = gl.allocate_shared_memory(DTYPE, [4, 64, 64], gl.NVMMASharedLayout(128, 16, rank=2))
    dq_s = gl.allocate_shared_memory(gl.float32, [2, 2 * D, 32], dq_desc.layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [2, ROWS], lse_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [2, ROWS], delta_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    dq_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=4)
    for place in gl.static_range(2):
        mbarrier.init(q_full.index(place), count=1)
        mbarrier.init(do_full.index(place), count=1)
        mbarrier.init(dq_empty.index(place), count=1)
    number = number_of(order, slots * heads * GROUP * (1 if cu_q is not None else batch), HIGH, ORDERED)
    sizes = (number, batch, heads, length_q, length_k, tiles, section)
    layout = (cu_q, cu_k, used_q, used_k)
    bounds = (low, high, low_aligned, high_aligned, lows, highs)
    descriptors = (q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc)
    tensors = (query, grad_out, key, value)
    strides = ((q_b, q_h, q_n), (do_b, do_h, do_n), (k_b, k_h, k_n), (v_b, v_h, v_n))
    grad_descs, grads = (dk_desc, dv_desc), (grad_key, grad_value)
    grad_strides = ((dk_b, dk_h, dk_n), (dv_b, dv_h, dv_n))
    barriers = (q_full, do_full, dq_empty)
    dropout = (seed, threshold, kept_scale)
    gl.warp_specialize([
        (consume_by_turns, (grad_descs, grads, grad_strides, sizes, layout, bounds, scale, plain_scale, given, dropout,
                            q_s, do_s, k_s, v_s, lse_s, delta_s, ds_s, dq_s, kv_full, barriers, change, differentiate,
                            LOW, HIGH, GROUP, DIM, DV, D, ALONE, 0)),
        (consume_by_turns, (grad_descs, grads, grad_strides, sizes, layout, bounds, scale, plain_scale, given, dropout,
                            q_s, do_s, k_s, v_s, lse_s, delta_s, ds_s, dq_s, kv_full, barriers, change, differentiate,
                            LOW, HIGH, GROUP, DIM, DV, D, ALONE, 1)),
        (produce, (descriptors, tensors, strides, sizes, layout, bounds, slots, q_s, do_s, k_s, v_s, lse_s, delta_s,
                   (kv_full, q_full, do_full), GROUP, DIM, DV, D, ALONE)),
        (add_tiles, (dq_desc, order, sizes, layout, bounds, slots, dq_s, None, dq_empty, HIGH, ORDERED, GROUP,
                     D, 0)),
        (add_tiles, (dq_desc, order, sizes, layout, bounds, slots, dq_s, None, dq_empty, HIGH, ORDERED, GROUP,
                     D, 1)),
    ], [4, 1, 1, 1], [240, 24, 24, 24])  # fmt: skip


# Head dims to 64: a warpgroup of its own for dQ, and K and V as register operands


@gluon.jit
def step_ahead(
    i, steps, m, column, dk, dv, s, k, v, band, where, given, dropout, scale, q_s, do_s, lse_s, delta_s, ds_s,
    barriers, change: gl.constexpr, differentiate: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr, D: gl.constexpr,
    W: gl.constexpr,
):  # fmt: skip
    """A block of rows whose scores are there already; those of the next one are multiplied meanwhile."""
    q_full, do_full, ds_full, ds_empty = barriers
    DTYPE: gl.constexpr = q_s.dtype
    layout: gl.constexpr = s.type.layout
    p_layout: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    slot = i % 2
    phase = (i // 2) & 1
    q = q_s.index(slot).reshape([ROWS, D])
    do = do_s.index(slot).reshape([ROWS, D])
    mbarrier.wait(do_full.index(slot), phase)
    dp = gl.zeros([64, 64], gl.float32, layout=layout)
    dp = warpgroup_mma(v, do.permute((1, 0)), dp, use_acc=False, is_async=True)
    drops = drops_of(dropout, where, m, column)
    lse = lse_s.index(slot).load(gl.SliceLayout(0, layout))
    z, raw = exponents(s, m, column, lse, band, where, given, scale, change, LOW, HIGH, False)
    p = exp2(z)
    weights = gl.convert_layout(living(halves(p, DTYPE), dropout, drops), p_layout)
    p = turned(p, raw, m, column, where, given, change, differentiate)
    delta = delta_s.index(slot).load(gl.SliceLayout(0, layout))
    dp = warpgroup_mma_wait(0, deps=[dp])
    ds = halves(p * (of_living(dp, dropout, drops) - delta[None, :]), DTYPE)
    mbarrier.wait(ds_empty.index(slot), phase ^ 1)
    ds_s.index(slot * 2 + W).store(ds)
    dv = warpgroup_mma(weights, do, dv, is_async=True)
    fence_async_shared()
    arrive(ds_full.index(slot))
    dk = warpgroup_mma(gl.convert_layout(ds, p_layout), q, dk, is_async=True)
    # the last block multiplies its own scores again, and drops them
    ahead = gl.minimum(i + 1, steps - 1)
    mbarrier.wait(q_full.index(ahead % 2), (ahead // 2) & 1)
    following = gl.zeros([64, 64], gl.float32, layout=layout)
    following = warpgroup_mma(
        k, q_s.index(ahead % 2).reshape([ROWS, D]).permute((1, 0)), following, use_acc=False, is_async=True
    )
    dv = warpgroup_mma_wait(2, deps=[dv])
    at_barrier(DO_EMPTY + slot, ARRIVE_FOR_PRODUCER)
    dk = warpgroup_mma_wait(1, deps=[dk])
    s = warpgroup_mma_wait(0, deps=[following])
    at_barrier(Q_EMPTY + slot, ARRIVE_FOR_PRODUCER)
    return dk, dv, s


@gluon.jit
def consume_ahead(
    grad_descs, grads, grad_strides, sizes, layout, bounds, scale, plain_scale, given, dropout, q_s, do_s, k_s, v_s,
    lse_s, delta_s, ds_s, kv_full, barriers,
    change: gl.constexpr, differentiate: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr, GROUP: gl.constexpr,
    DIM: gl.constexpr, DV: gl.constexpr, D: gl.constexpr, ALONE: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    kv_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    q_full = barriers[0]
    b, h, first, q_of, k_of, band, begin, end = columns_of(sizes, layout, bounds)
    column = first + W * 64
    steps = (end - begin) * GROUP
    drawing = loaded_dropout(dropout)
    dk = gl.zeros([64, D], gl.float32, layout=kv_layout)
    dv = gl.zeros([64, D], gl.float32, layout=kv_layout)
    mbarrier.wait(kv_full, 0)
    k = k_s.index(W).reshape([64, D])
    v = v_s.index(W).reshape([64, D])
    if change is None:
        # in registers, which steps of scores would need
        k = k.load(gl.DotOperandLayout(0, s_layout, 2))
        v = v.load(gl.DotOperandLayout(0, s_layout, 2))
    if steps > 0:
        mbarrier.wait(q_full.index(0), 0)
        s = gl.zeros([64, 64], gl.float32, layout=s_layout)
        s = warpgroup_mma(k, q_s.index(0).reshape([ROWS, D]).permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        m = begin
        member = h * 0
        for i in range(steps):
            where = (b.to(gl.int64), (h * GROUP + member).to(gl.int64), q_of[0], k_of[0], q_of[2], k_of[2])
            dk, dv, s = step_ahead(
                i, steps, m, column, dk, dv, s, k, v, band, where, given, drawing, scale, q_s, do_s, lse_s, delta_s,
                ds_s, barriers, change, differentiate, LOW, HIGH, D, W,
            )  # fmt: skip
            m, member = next_block(m, member, begin, end)
    store_gradients(
        dk, scaled(dv, drawing), grad_descs, grads, grad_strides, v_s.index(W), b, h, k_of, column, plain_scale,
        DIM, DV, D, ALONE, layout[0] is not None,
    )  # fmt: skip


@gluon.jit
def multiply_for_dq(
    sizes, layout, bounds, ds_s, dq_s, k_s, kv_full, barriers, GROUP: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    """The warpgroup of dq."""
    ds_full, ds_empty, dq_full, dq_empty = barriers
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, D, 16])
    b, h, first, q_of, k_of, band, begin, end = columns_of(sizes, layout, bounds)
    mbarrier.wait(kv_full, 0)
    for i in range((end - begin) * GROUP):
        slot = i % 2
        phase = (i // 2) & 1
        mbarrier.wait(ds_full.index(slot), phase)
        dq = gl.zeros([ROWS, D], gl.float32, layout=dq_layout)
        for w in gl.static_range(2):
            part = ds_s.index(slot * 2 + w).permute((1, 0))
            dq = warpgroup_mma(part, k_s.index(w).reshape([64, D]), dq, use_acc=w > 0, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[dq])
        arrive(ds_empty.index(slot))
        mbarrier.wait(dq_empty.index(slot), phase ^ 1)
        dq_s.index(slot).store(flat(dq, D))
        fence_async_shared()
        arrive(dq_full.index(slot))


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def narrow_kernel(
    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, dq_desc, dk_desc, dv_desc,
    query, grad_out, key, value, grad_key, grad_value, order,
    q_b: gl.int64, q_h: gl.int64, q_n: gl.int64, do_b: gl.int64, do_h: gl.int64, do_n: gl.int64,
    k_b: gl.int64, k_h: gl.int64, k_n: gl.int64, v_b: gl.int64, v_h: gl.int64, v_n: gl.int64,
    dk_b: gl.int64, dk_h: gl.int64, dk_n: gl.int64, dv_b: gl.int64, dv_h: gl.int64, dv_n: gl.int64,
    batch: gl.int32, heads: gl.int32, length_q: gl.int32, length_k: gl.int32,
    tiles: gl.int32, section: gl.int32, slots: gl.int32,
    cu_q, cu_k, used_q, used_k, low, high, low_aligned, high_aligned, lows, highs,
    scale: gl.float32, plain_scale: gl.float32, given, seed, threshold: gl.int32, kept_scale: gl.float32,
    change: gl.constexpr, differentiate: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr, GROUP: gl.constexpr,
    ORDERED: gl.constexpr, DIM: gl.constexpr, DV: gl.constexpr, D: gl.constexpr, ALONE: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """dK, dV and sums of dQ, for head dims to 64."""
    DTYPE: gl.constexpr = q_desc.dtype
    k_s = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 64, D], k_desc.layout)
    v_s = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 64, D], v_desc.layout)
    q_s = gl.allocate_shared_memory(DTYPE, [2, 1, 1, ROWS, D], q_desc.layout)
    do_s = gl.allocate_shared_memory(DTYPE, [2, 1, 1, ROWS, D], do_desc.layout)
    ds_s = gl.allocate_shared_memory(DTYPE, [4, 64, 64], gl.NVMMASharedLayout(128, 16, rank=2))
    dq_s = gl.allocate_shared_memory(gl.float32, [2, 2 * D, 32], dq_desc.layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [2, ROWS], lse_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [2, ROWS], delta_desc.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ds_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    dq_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    dq_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=4)
    for place in gl.static_range(2):
        mbarrier.init(q_full.index(place), count=1)
        mbarrier.init(do_full.index(place), count=1)
        mbarrier.init(ds_full.index(place), count=256)
        mbarrier.init(ds_empty.index(place), count=128)
        mbarrier.init(dq_full.index(place), count=128)
        mbarrier.init(dq_empty.index(place), count=1)
    number = number_of(order, slots * heads * GROUP * (1 if cu_q is not None else batch), HIGH, ORDERED)
    sizes = (number, batch, heads, length_q, length_k, tiles, section)
    layout = (cu_q, cu_k, used_q, used_k)
    bounds = (low, high, low_aligned, high_aligned, lows, highs)
    descriptors = (q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc)
    tensors = (query, grad_out, key, value)
    strides = ((q_b, q_h, q_n), (do_b, do_h, do_n), (k_b, k_h, k_n), (v_b, v_h, v_n))
    grad_descs, grads = (dk_desc, dv_desc), (grad_key, grad_value)
    grad_strides = ((dk_b, dk_h, dk_n), (dv_b, dv_h, dv_n))
    barriers = (q_full, do_full, ds_full, ds_empty)
    dropout = (seed, threshold, kept_scale)
    gl.warp_specialize([
        (consume_ahead, (grad_descs, grads, grad_strides, sizes, layout, bounds, scale, plain_scale, given, dropout,
                         q_s, do_s, k_s, v_s, lse_s, delta_s, ds_s, kv_full, barriers, change, differentiate, LOW, HIGH,
                         GROUP, DIM, DV, D, ALONE, 0)),
        (consume_ahead, (grad_descs, grads, grad_strides, sizes, layout, bounds, scale, plain_scale, given, dropout,
                         q_s, do_s, k_s, v_s, lse_s, delta_s, ds_s, kv_full, barriers, change, differentiate, LOW, HIGH,
                         GROUP, DIM, DV, D, ALONE, 1)),
        (multiply_for_dq, (sizes, layout, bounds, ds_s, dq_s, k_s, kv_full, (ds_full, ds_empty, dq_full, dq_empty),
                           GROUP, D)),
        (produce, (descriptors, tensors, strides, sizes, layout, bounds, slots, q_s, do_s, k_s, v_s, lse_s, delta_s,
                   (kv_full, q_full, do_full), GROUP, DIM, DV, D, ALONE)),
        (add_tiles, (dq_desc, order, sizes, layout, bounds, slots, dq_s, dq_full, dq_empty, HIGH, ORDERED, GROUP,
                     D, 0)),
        (add_tiles, (dq_desc, order, sizes, layout, bounds, slots, dq_s, dq_full, dq_empty, HIGH, ORDERED, GROUP,
                     D, 1)),
    ], [4, 4, 1, 1, 1], [200, 72, 24, 24, 24])  # fmt: skip


# Before and after


@triton.jit
def block_at(number, heads, slots, length_q, batch, cu_q, used_q):
    """Of a block's number: sequence, head, first row in it, and the sequence's (first token, room, length)."""
    if cu_q is not None:
        h = number // slots
        b, m = find_slot(number % slots, cu_q, length_q, batch, 1, 64)
    else:
        m = number % slots
        h = number // slots % heads
        b = number // slots // heads
    return b, h, m * 64, extent(b, cu_q, used_q, length_q, batch)


@triton.jit(do_not_specialize=["o_b", "o_h", "o_n", "do_b", "do_h", "do_n", "lse_b", "lse_h", "dlse_b", "dlse_h",
                               "dlse_n", "batch", "heads", "length_q", "slots"])  # fmt: skip
def prepare_kernel(
    out, grad_out, lse, grad_lse, rows, delta, sums, order,
    o_b: tl.int64, o_h: tl.int64, o_n: tl.int64, do_b: tl.int64, do_h: tl.int64, do_n: tl.int64,
    lse_b: tl.int64, lse_h: tl.int64, dlse_b: tl.int64, dlse_h: tl.int64, dlse_n: tl.int64,
    batch: tl.int32, heads: tl.int32, length_q: tl.int32, slots: tl.int32, cu_q, used_q,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    """Delta and LSE of `parts.row_values`, and zeros: for dQ or, with `order`, as marks of blocks yet to be filled.

    The last block comes first: what the next kernel starts with is in the L2 cache then.
    """
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    b, h, first, q_of = block_at(number, heads, slots, length_q, batch, cu_q, used_q)
    token, room, length = q_of
    i = first + tl.arange(0, 64)
    there = i < length
    d = tl.arange(0, BLOCK_DV)
    inside = there[:, None] & (d < DV)[None, :]
    row = (token + i).to(tl.int64)[:, None]
    o_start = out + (b.to(tl.int64) * o_b + h.to(tl.int64) * o_h) * VECTOR
    do_start = grad_out + (b.to(tl.int64) * do_b + h.to(tl.int64) * do_h) * VECTOR
    o = tl.load(o_start + row * o_n * VECTOR + d[None, :], mask=inside, other=0.0)
    do = tl.load(do_start + row * do_n * VECTOR + d[None, :], mask=inside, other=0.0)
    place = b.to(tl.int64) * lse_b + h.to(tl.int64) * lse_h + token + i
    due = None
    if grad_lse is not None:
        dues = grad_lse + b.to(tl.int64) * dlse_b + h.to(tl.int64) * dlse_h + (token + i).to(tl.int64) * dlse_n
        due = tl.load(dues, mask=there, other=0.0)
    found, total = row_values(o, do, tl.load(lse + place, mask=there, other=float("-inf")), due, True)
    to = number.to(tl.int64) * 64 + tl.arange(0, 64)
    tl.store(rows + to, found)
    tl.store(delta + to, total)
    if order is None:
        zeros = number.to(tl.int64) * (64 * D) + tl.arange(0, 64 * D)
        tl.store(sums + zeros, tl.zeros([64 * D], tl.float32))
    else:
        tl.store(order + number, 0)
        if number == 0:
            tl.store(order + tl.num_programs(0), 0)


@triton.jit(do_not_specialize=["dq_b", "dq_h", "dq_n", "batch", "heads", "length_q", "slots"])
def finish_kernel(
    sums, order, grad_query, dq_b: tl.int64, dq_h: tl.int64, dq_n: tl.int64,
    batch: tl.int32, heads: tl.int32, length_q: tl.int32, slots: tl.int32, cu_q, used_q, scale: tl.float32,
    D: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """dQ of a block, from sums in the order of registers; zeros if nobody filled it, since its rows see nothing.

    The last block comes first, as in `prepare_kernel`: its sums are in the L2 cache still.
    """
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    b, h, first, q_of = block_at(number, heads, slots, length_q, batch, cu_q, used_q)
    token, room, length = q_of
    places = sums + number.to(tl.int64) * (64 * D) + tl.arange(0, 64 * D)
    if order is None:
        x = tl.load(places)
    else:
        x = tl.load(places, mask=tl.load(order + number) > 0, other=0.0)
    x = tl.permute(tl.reshape(x, [D // 8, 4, 8, 4, 2, 2]), [1, 4, 2, 0, 3, 5])
    x = tl.reshape(x, [64, D]) * scale
    i = first + tl.arange(0, 64)
    d = tl.arange(0, D)
    start = grad_query + (b.to(tl.int64) * dq_b + h.to(tl.int64) * dq_h) * VECTOR
    keep = (i < room)[:, None] & (d < DIM)[None, :]
    tl.store(
        start + (token + i).to(tl.int64)[:, None] * dq_n * VECTOR + d[None, :],
        x.to(grad_query.dtype.element_ty),
        mask=keep,
    )
