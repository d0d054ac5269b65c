"""The backward kernel for Hopper at head dims above 128: 128 keys stay, and the rows that see them pass by twice.

    producers    a warp for K, q and LSE and one for V, do and delta: k and v once, then blocks of 64 rows, twice
    consumers    two warpgroups of 64 columns each
                 first pass    s = k q^T   dp = v do^T   p = exp2(s * scale - lse)   ds = p * (dp - delta)
                               dk += ds q   and, in turns, ds through shared memory for dq = ds^T k of all columns
                 second pass   s = k q^T   p = exp2(s * scale - lse)   dv += p do
    dq           one warp that adds the pieces of dq which the consumers leave it

A warpgroup's registers hold one gradient of 64 columns, but not both. So scores are made twice: six products in place
of five. With 64 columns to a program both gradients would fit, each cut in two by head dim; but then each block of rows
brings twice as many sums of dq to memory for the same work, and weights have to go through shared memory, whose
bandwidth is what the first pass lacks.

Head dims are cut into panels of 64, so a width of three panels needs no padding. As many panels of K and V as registers
are left for are operands from there.
Sources: Dao 2023, FlashAttention-2, algorithm 2; Shah et al. 2024, FlashAttention-3, section 3.
"""

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

from onchip.schedules.hopper.backward import (
    ROWS,
    UNSPECIALIZED,
    before_us,
    block_of,
    columns_of,
    drops_of,
    exponents,
    flat,
    halves,
    is_first,
    leave,
    living,
    next_block,
    number_of,
    of_living,
    release,
    turned,
    unknown_zero,
)
from onchip.schedules.hopper.dropout import loaded_dropout
from onchip.schedules.hopper.forward import VECTOR, arrive
from onchip.schedules.hopper.names import copy_elements, load_tile, reinterpret, store_tile
from onchip.schedules.hopper.special import exp2

PANEL = gl.constexpr(64)
"""Elements of a head dim that a tile of TMA and a product hold."""
TILE = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
"""Of (64, 64) float32 in the registers of a warpgroup."""


# The ring


@gluon.jit
def place_of(slot, SLOT: gl.constexpr, V_PANELS: gl.constexpr, BORROWS: gl.constexpr):
    """The first panel of a slot of the ring, which follows the panels of V and holds q and then do, SLOT panels."""
    at = V_PANELS + slot * SLOT
    if BORROWS:
        # the second slot is what V has left
        at = (1 - slot) * V_PANELS
    return at


@gluon.jit
def use_of(i, steps, SLOTS: gl.constexpr, BORROWS: gl.constexpr):
    """Slot of step i, which counts on through both passes, and how often the slot was used before."""
    slot = i % SLOTS
    use = i // SLOTS
    if BORROWS:
        # the first pass had the first slot only
        slot = gl.where(i < steps, 0, (i - steps) % 2)
        use = gl.where(i < steps, i, (i - steps) // 2 + gl.where(slot == 0, steps, 0))
    return slot, use


# The producers


@gluon.jit
def copy_panels(base, strides, memory, place, b, head, token, length, row, DIM: gl.constexpr, PANELS: gl.constexpr):
    """The last rows of a sequence behind which others lie: zeros follow, for 0 times anything is to be 0."""
    s_b, s_h, s_n = strides
    # eight rows of a panel are what the swizzle of 128 bytes repeats
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    pieces = reinterpret(memory, memory.dtype, [memory.shape[0] * 8, 8, PANEL], swizzled)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    rows = gl.arange(0, 8, layout=gl.SliceLayout(1, layout))
    dims = gl.arange(0, PANEL, layout=gl.SliceLayout(0, layout))
    start = base + (b.to(gl.int64) * s_b + head.to(gl.int64) * s_h + (token + row).to(gl.int64) * s_n) * VECTOR
    # never negative, which the compiler does not know: the loop unrolled would spill
    for piece in range(PANELS * 8 + gl.minimum(token + length, 0)):
        line = piece % 8 * 8 + rows
        dim = piece // 8 * PANEL + dims
        pointers = start + line.to(gl.int64)[:, None] * s_n * VECTOR + dim[None, :]
        there = (line < length - row)[:, None] & (dim < DIM)[None, :]
        copy_elements(pieces.index(place * 8 + piece), pointers, mask=there)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()


@gluon.jit
def bring(
    desc, base, strides, memory, place, b, head, token, length, row, barrier, beside,
    DIM: gl.constexpr, PANELS: gl.constexpr, ALONE: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """The panels of 64 rows, whose barrier also counts so many bytes that come beside them.

    Where other rows follow a sequence, zeros take their place: what they hold may be anything.
    """
    copied = row * 0 != 0
    if not ALONE:
        copied = row + 64 > length
        if copied:
            copy_panels(base, strides, memory, place, b, head, token, length, row, DIM, PANELS)
    if copied:
        if beside > 0:
            mbarrier.expect(barrier, beside)
        else:
            mbarrier.arrive(barrier, count=1)
    else:
        mbarrier.expect(barrier, beside + PANELS * 64 * PANEL * 2)
        at = b * 0 if PACKED else b
        for panel in gl.static_range(PANELS):
            load_tile(desc, [at, head, token + row, panel * PANEL], barrier, memory.index(place + panel))


@gluon.jit
def produce(
    column_desc, row_desc, beside_desc, columns, rows, column_strides, row_strides, sizes, layout, bounds, slots,
    columns_s, ring_s, beside_s, barriers,
    GROUP: gl.constexpr, DIM: gl.constexpr, PANELS: gl.constexpr, AT: gl.constexpr, SLOT: gl.constexpr,
    V_PANELS: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, ALONE: gl.constexpr,
):  # fmt: skip
    """K, q and LSE, or V, do and delta: a warp for each, so that neither waits until there is room for the other."""
    column_full, v_empty, full, empty = barriers
    PACKED: gl.constexpr = layout[0] is not None
    BORROWS: gl.constexpr = SLOTS > STAGES
    b, h, first, q_of, k_of, band, begin, end = columns_of(sizes, layout, bounds)
    heads = sizes[2] * GROUP
    steps = (end - begin) * GROUP
    for w in range(2):
        bring(
            column_desc, columns, column_strides, columns_s, w * PANELS, b, h, k_of[0], k_of[2], first + w * 64,
            column_full, 0, DIM, PANELS, ALONE, PACKED,
        )  # fmt: skip
    m = begin
    member = h * 0
    for i in range(steps * 2):
        if i == steps:
            m = begin + 0
            member = h * 0
        slot, use = use_of(i, steps, SLOTS, BORROWS)
        # a condition with `and` would not be known when there is no such slot
        if BORROWS:  # noqa: SIM102
            if i == steps + 1:
                mbarrier.wait(v_empty, 0)
        head = h * GROUP + member
        mbarrier.wait(empty.index(slot), (use & 1) ^ 1)
        bring(
            row_desc, rows, row_strides, ring_s, place_of(slot, SLOT, V_PANELS, BORROWS) + AT, b, head, q_of[0],
            q_of[2], m * ROWS, full.index(slot), ROWS * 4, DIM, PANELS, ALONE, PACKED,
        )  # fmt: skip
        row = block_of(b, head, m, q_of[0], heads, slots, PACKED) * ROWS
        load_tile(beside_desc, [row], full.index(slot), beside_s.index(slot))
        m, member = next_block(m, member, begin, end)


# The consumers


@gluon.jit
def panel_of(memory, place):
    return memory.index(place).reshape([64, PANEL])


@gluon.jit
def zeros_of(PANELS: gl.constexpr):
    found = ()
    for _ in gl.static_range(PANELS):
        found += (gl.zeros([64, PANEL], gl.float32, layout=TILE),)  # type: ignore[assignment]
    return found


@gluon.jit
def held_of(memory, place, HELD: gl.constexpr):
    """Panels as left operands in registers, from where they are read once and not for every block of rows."""
    found = ()
    for panel in gl.static_range(HELD):
        found += (panel_of(memory, place + panel).load(gl.DotOperandLayout(0, TILE, 2)),)  # type: ignore[assignment]
    return found


@gluon.jit
def scores_of(held, left_s, left, right_s, right, PANELS: gl.constexpr, HELD: gl.constexpr):
    """(columns, rows): the product of 64 rows of k and q, or of v and do, in flight, as so many products as panels."""
    s = gl.zeros([64, ROWS], gl.float32, layout=TILE)
    for panel in gl.static_range(PANELS):
        rows = panel_of(right_s, right + panel).permute((1, 0))
        if panel < HELD:
            s = warpgroup_mma(held[panel], rows, s, use_acc=panel > 0, is_async=True)
        else:
            s = warpgroup_mma(panel_of(left_s, left + panel), rows, s, use_acc=panel > 0, is_async=True)
    return s


@gluon.jit
def added(sums, left, right_s, right, PANELS: gl.constexpr):
    """Sums plus the product of registers and panels, in flight, as so many products as panels."""
    found = ()
    for panel in gl.static_range(PANELS):
        found += (warpgroup_mma(left, panel_of(right_s, right + panel), sums[panel], is_async=True),)  # type: ignore[assignment]
    return found


@gluon.jit
def landed(sums, PANELS: gl.constexpr):
    """Sums of which no product is in flight any more."""
    found = ()
    for panel in gl.static_range(PANELS):
        found += (warpgroup_mma_wait(0, deps=[sums[panel]]),)  # type: ignore[assignment]
    return found


@gluon.jit
def leave_dq(i, zero, ds_s, part, dq_s, k_s, ds_empty, dq_full, dq_empty, PIECES: gl.constexpr, TILES: gl.constexpr):
    """A block of dq, made and left to its warp piece by piece.

    ds, turned, is read into registers: there all pieces have it, and the next block may take its place.
    """
    layout: gl.constexpr = gl.DotOperandLayout(0, TILE, 2)
    first = ds_s.index(part * 2).permute((1, 0)).load(layout)
    second = ds_s.index(part * 2 + 1).permute((1, 0)).load(layout)
    for piece in gl.static_range(PIECES):
        dq = gl.zeros([ROWS, PANEL], gl.float32, layout=TILE)
        dq = warpgroup_mma(first, panel_of(k_s, piece + zero), dq, use_acc=False, is_async=True)
        dq = warpgroup_mma(second, panel_of(k_s, PIECES + piece + zero), dq, is_async=True)
        if piece == 0:
            # what a product reads has come
            arrive(ds_empty.index(part))
        dq = warpgroup_mma_wait(0, deps=[dq])
        number = i * PIECES + piece
        tile = number % TILES
        mbarrier.wait(dq_empty.index(tile), ((number // TILES) & 1) ^ 1)
        dq_s.index(tile).store(flat(dq, PANEL))
        fence_async_shared()
        arrive(dq_full.index(tile))


@gluon.jit
def step_of_keys(
    i, m, steps, column, dk, held, band, where, given, dropout, scale, k_s, ring_s, lse_s, delta_s, ds_s, dq_s,
    barriers,
    change: gl.constexpr, differentiate: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr, PIECES: gl.constexpr,
    VALUES: gl.constexpr, HELD: gl.constexpr, SLOTS: gl.constexpr, BORROWS: gl.constexpr, PARTS: gl.constexpr,
    TILES: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """A block of rows in the first pass."""
    q_full, q_empty, do_full, do_empty, ds_full, ds_empty, dq_full, dq_empty = barriers
    p_layout: gl.constexpr = gl.DotOperandLayout(0, TILE, 2)
    slot, use = use_of(i, steps, SLOTS, BORROWS)
    phase = use & 1
    zero = unknown_zero()
    q_place = place_of(slot, PIECES + VALUES, 2 * VALUES, BORROWS) + zero
    mbarrier.wait(q_full.index(slot), phase)
    s = scores_of((), k_s, W * PIECES + zero, ring_s, q_place, PIECES, 0)
    mbarrier.wait(do_full.index(slot), phase)
    dp = scores_of(held, ring_s, W * VALUES + zero, ring_s, q_place + PIECES, VALUES, HELD)
    drops = drops_of(dropout, where, m, column)
    lse = lse_s.index(slot).load(gl.SliceLayout(0, TILE))
    s = warpgroup_mma_wait(VALUES, deps=[s])
    z, raw = exponents(s, m, column, lse, band, where, given, scale, change, LOW, HIGH, False)
    p = turned(exp2(z), raw, m, column, where, given, change, differentiate)
    delta = delta_s.index(slot).load(gl.SliceLayout(0, TILE))
    dp = warpgroup_mma_wait(0, deps=[dp])
    ds = halves(p * (of_living(dp, dropout, drops) - delta[None, :]), ring_s.dtype)
    arrive(do_empty.index(slot))
    part = i % PARTS
    mbarrier.wait(ds_empty.index(part), ((i // PARTS) & 1) ^ 1)
    ds_s.index(part * 2 + W).store(ds)
    dk = added(dk, gl.convert_layout(ds, p_layout), ring_s, q_place, PIECES)
    fence_async_shared()
    arrive(ds_full.index(part))
    dk = landed(dk, PIECES)
    arrive(q_empty.index(slot))
    if i % 2 == W:
        mbarrier.wait(ds_full.index(part), (i // PARTS) & 1)
        leave_dq(i, zero, ds_s, part, dq_s, k_s, ds_empty, dq_full, dq_empty, PIECES, TILES)
    return dk


@gluon.jit
def step_of_values(
    i, m, steps, column, dv, weights, held, band, where, given, dropout, scale, k_s, ring_s, lse_s, barriers,
    change: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr, FIRST: gl.constexpr, PIECES: gl.constexpr,
    VALUES: gl.constexpr, HELD: gl.constexpr, SLOTS: gl.constexpr, BORROWS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """A block of rows in the second pass: its weights, while those of the block before meet their do."""
    q_full, q_empty, do_full, do_empty = barriers
    slot, use = use_of(i, steps, SLOTS, BORROWS)
    before, before_use = use_of(i - 1, steps, SLOTS, BORROWS)
    zero = unknown_zero()
    q_place = place_of(slot, PIECES + VALUES, 2 * VALUES, BORROWS) + zero
    do_place = place_of(before, PIECES + VALUES, 2 * VALUES, BORROWS) + PIECES + zero
    mbarrier.wait(q_full.index(slot), use & 1)
    s = scores_of(held, k_s, W * PIECES + zero, ring_s, q_place, PIECES, HELD)
    if not FIRST:
        mbarrier.wait(do_full.index(before), before_use & 1)
        dv = added(dv, weights, ring_s, do_place, VALUES)
    drops = drops_of(dropout, where, m, column)
    lse = lse_s.index(slot).load(gl.SliceLayout(0, TILE))
    s = warpgroup_mma_wait(0 if FIRST else VALUES, deps=[s])
    z, _ = exponents(s, m, column, lse, band, where, given, scale, change, LOW, HIGH, False)
    arrive(q_empty.index(slot))
    p = living(halves(exp2(z), ring_s.dtype), dropout, drops)
    if not FIRST:
        dv = landed(dv, VALUES)
        arrive(do_empty.index(before))
    return dv, gl.convert_layout(p, gl.DotOperandLayout(0, TILE, 2))


@gluon.jit
def store_gradient(
    panels, desc, base, strides, memory, place, b, h, k_of, column, factor, DIM: gl.constexpr, PANELS: gl.constexpr,
    PLACES: gl.constexpr, ALONE: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """64 rows, through so many panels of shared memory; where other rows follow the sequence, by threads."""
    token, room, length = k_of
    s_b, s_h, s_n = strides
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for panel in gl.static_range(PANELS):
        if panel >= PLACES:
            tma.store_wait(PLACES - 1)
        tile = panels[panel] * factor
        if not ALONE:
            rows = column + gl.arange(0, 64, layout=gl.SliceLayout(1, TILE))
            tile = gl.where((rows < length)[:, None], tile, 0.0)
        buffer = memory.index(place + panel % PLACES)
        seen = buffer.reshape([64, PANEL])
        seen.store(tile.to(desc.dtype))
        if PACKED and column + 64 > room:
            dims = panel * PANEL + gl.arange(0, PANEL, layout=gl.SliceLayout(0, layout))
            start = base + (h.to(gl.int64) * s_h + (token + column).to(gl.int64) * s_n) * VECTOR
            for part in gl.static_range(4):
                row = part * 16 + gl.arange(0, 16, layout=gl.SliceLayout(1, layout))
                pointers = start + row.to(gl.int64)[:, None] * s_n * VECTOR + dims[None, :]
                there = (column + row < room)[:, None] & (dims < DIM)[None, :]
                gl.store(pointers, seen.slice(part * 16, 16, dim=0).load(layout), mask=there)
        else:
            fence_async_shared()
            at = b * 0 if PACKED else b
            store_tile(desc, [at, h, token + column, panel * PANEL], buffer)
    tma.store_wait(0)


@gluon.jit
def consume(
    grad_descs, grads, grad_strides, sizes, layout, bounds, scale, plain_scale, given, dropout, k_s, ring_s, lse_s,
    delta_s, ds_s, dq_s, barriers,
    change: gl.constexpr, differentiate: gl.constexpr, LOW: gl.constexpr, HIGH: gl.constexpr, GROUP: gl.constexpr,
    DIM: gl.constexpr, DV: gl.constexpr, PIECES: gl.constexpr, VALUES: gl.constexpr, STAGES: gl.constexpr,
    SLOTS: gl.constexpr, PARTS: gl.constexpr, TILES: gl.constexpr, HELD_K: gl.constexpr, HELD_V: gl.constexpr,
    ALONE: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    dk_desc, dv_desc = grad_descs
    grad_key, grad_value = grads
    dk_strides, dv_strides = grad_strides
    k_full, v_full, v_empty, q_full, q_empty, do_full, do_empty, ds_full, ds_empty, dq_full, dq_empty = barriers
    PACKED: gl.constexpr = layout[0] is not None
    BORROWS: gl.constexpr = SLOTS > STAGES
    b, h, first, q_of, k_of, band, begin, end = columns_of(sizes, layout, bounds)
    steps = (end - begin) * GROUP
    column = first + W * 64
    drawing = loaded_dropout(dropout)
    mbarrier.wait(k_full, 0)
    mbarrier.wait(v_full, 0)

    held = held_of(ring_s, W * VALUES, HELD_V)
    dk = zeros_of(PIECES)
    m = begin
    member = h * 0
    for i in range(steps):
        where = (b.to(gl.int64), (h * GROUP + member).to(gl.int64), q_of[0], k_of[0], q_of[2], k_of[2])
        dk = step_of_keys(
            i, m, steps, column, dk, held, band, where, given, drawing, scale, k_s, ring_s, lse_s, delta_s, ds_s, dq_s,
            (q_full, q_empty, do_full, do_empty, ds_full, ds_empty, dq_full, dq_empty),
            change, differentiate, LOW, HIGH, PIECES, VALUES, HELD_V, SLOTS, BORROWS, PARTS, TILES, W,
        )  # fmt: skip
        m, member = next_block(m, member, begin, end)
    # through the warpgroup's own tile of V, which nobody else reads
    store_gradient(
        dk, dk_desc, grad_key, dk_strides, ring_s, W * VALUES, b, h, k_of, column, plain_scale, DIM, PIECES, VALUES,
        ALONE, PACKED,
    )  # fmt: skip
    arrive(v_empty)

    held = held_of(k_s, W * PIECES, HELD_K)
    dv = zeros_of(VALUES)
    if steps > 0:
        ring = (q_full, q_empty, do_full, do_empty)
        m = begin
        member = h * 0
        where = (b.to(gl.int64), (h * GROUP).to(gl.int64), q_of[0], k_of[0], q_of[2], k_of[2])
        weights = gl.zeros([64, ROWS], ring_s.dtype, layout=gl.DotOperandLayout(0, TILE, 2))
        dv, weights = step_of_values(
            steps, m, steps, column, dv, weights, held, band, where, given, drawing, scale, k_s, ring_s, lse_s, ring,
            change, LOW, HIGH, True, PIECES, VALUES, HELD_K, SLOTS, BORROWS, W,
        )  # fmt: skip
        for i in range(steps + 1, steps * 2):
            m, member = next_block(m, member, begin, end)
            where = (b.to(gl.int64), (h * GROUP + member).to(gl.int64), q_of[0], k_of[0], q_of[2], k_of[2])
            dv, weights = step_of_values(
                i, m, steps, column, dv, weights, held, band, where, given, drawing, scale, k_s, ring_s, lse_s, ring,
                change, LOW, HIGH, False, PIECES, VALUES, HELD_K, SLOTS, BORROWS, W,
            )  # fmt: skip
        last, use = use_of(steps * 2 - 1, steps, SLOTS, BORROWS)
        do_place = place_of(last, PIECES + VALUES, 2 * VALUES, BORROWS) + PIECES
        mbarrier.wait(do_full.index(last), use & 1)
        dv = landed(added(dv, weights, ring_s, do_place, VALUES), VALUES)
    kept_scale = 1.0
    if drawing is not None:
        kept_scale = drawing[3]
    # through its own tile of K, once the other one has made its last block of dq from that
    mbarrier.wait(v_empty, 0)
    store_gradient(
        dv, dv_desc, grad_value, dv_strides, k_s, W * PIECES, b, h, k_of, column, kept_scale, DV, VALUES, PIECES,
        ALONE, PACKED,
    )  # fmt: skip


@gluon.jit
def add_pieces(
    dq_desc, order, sizes, layout, bounds, slots, dq_s, dq_full, dq_empty,
    HIGH: gl.constexpr, ORDERED: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, PIECES: gl.constexpr,
    TILES: gl.constexpr,
):  # fmt: skip
    """The warp that adds dq, 64 rows and 64 elements at a time."""
    b, h, first, q_of, k_of, band, begin, end = columns_of(sizes, layout, bounds)
    heads = sizes[2] * GROUP
    m = begin
    member = h * 0
    for i in range((end - begin) * GROUP):
        block = block_of(b, h * GROUP + member, m, q_of[0], heads, slots, layout[0] is not None)
        fills = is_first(order, block, before_us(m, first, k_of[2], band, HIGH), ORDERED)
        for piece in range(PIECES):
            number = i * PIECES + piece
            tile = number % TILES
            mbarrier.wait(dq_full.index(tile), (number // TILES) & 1)
            leave(dq_desc, block * (2 * D) + piece * (2 * PANEL), dq_s.index(tile), fills)
            tma.store_wait(0)
            mbarrier.arrive(dq_empty.index(tile), count=1)
        release(order, block, fills, ORDERED)
        m, member = next_block(m, member, begin, end)


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def widest_kernel(
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
    """dK, dV and sums of dQ, for head dims above 128; D is the width of the sums, descriptors have panels of 64."""
    DTYPE: gl.constexpr = q_desc.dtype
    PIECES: gl.constexpr = (DIM + 63) // 64
    VALUES: gl.constexpr = (DV + 63) // 64
    # in units of 8 KiB: K and V, then a slot of q and do, then two tiles of ds and one of float32 for dq
    KEPT: gl.constexpr = 2 * (PIECES + VALUES)
    STAGES: gl.constexpr = 2 if 2 * KEPT + 4 <= 28 else 1
    LEFT: gl.constexpr = 28 - KEPT - STAGES * (PIECES + VALUES)
    PARTS: gl.constexpr = 2 if LEFT >= 6 else 1
    TILES: gl.constexpr = 2 if LEFT - 2 * PARTS >= 4 else 1
    # a single slot is joined by another one where V was, if that is wide enough
    SLOTS: gl.constexpr = 2 if STAGES == 2 or VALUES >= PIECES else 1
    # panels in registers, beside those of dk, and of dv
    HELD_K: gl.constexpr = min(PIECES, 10 - 2 * VALUES)
    HELD_V: gl.constexpr = min(VALUES, 8 - 2 * PIECES) if differentiate is None else 0
    k_s = gl.allocate_shared_memory(DTYPE, [2 * PIECES, 1, 1, 64, 64], k_desc.layout)
    ring_s = gl.allocate_shared_memory(DTYPE, [2 * VALUES + STAGES * (PIECES + VALUES), 1, 1, 64, 64], q_desc.layout)
    ds_s = gl.allocate_shared_memory(DTYPE, [2 * PARTS, 64, 64], gl.NVMMASharedLayout(128, 16, rank=2))
    dq_s = gl.allocate_shared_memory(gl.float32, [TILES, 128, 32], dq_desc.layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [2, ROWS], lse_desc.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [2, ROWS], delta_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    do_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ds_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    dq_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    dq_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(k_full, count=2)
    mbarrier.init(v_full, count=2)
    mbarrier.init(v_empty, count=256)
    for place in gl.static_range(2):
        mbarrier.init(q_full.index(place), count=1)
        mbarrier.init(do_full.index(place), count=1)
        mbarrier.init(q_empty.index(place), count=256)
        mbarrier.init(do_empty.index(place), count=256)
        mbarrier.init(ds_full.index(place), count=256)
        mbarrier.init(ds_empty.index(place), count=128)
        mbarrier.init(dq_full.index(place), count=128)
        mbarrier.init(dq_empty.index(place), count=1)
    dropout = (seed, threshold, kept_scale)
    number = number_of(order, slots * heads * GROUP * (1 if cu_q is not None else batch), HIGH, ORDERED)
    sizes = (number, batch, heads, length_q, length_k, tiles, section)
    layout = (cu_q, cu_k, used_q, used_k)
    bounds = (low, high, low_aligned, high_aligned, lows, highs)
    grad_descs, grads = (dk_desc, dv_desc), (grad_key, grad_value)
    grad_strides = ((dk_b, dk_h, dk_n), (dv_b, dv_h, dv_n))
    barriers = (k_full, v_full, v_empty, q_full, q_empty, do_full, do_empty, ds_full, ds_empty, dq_full, dq_empty)
    gl.warp_specialize([
        (consume, (grad_descs, grads, grad_strides, sizes, layout, bounds, scale, plain_scale, given, dropout, k_s,
                   ring_s, lse_s, delta_s, ds_s, dq_s, barriers, change, differentiate, LOW, HIGH, GROUP, DIM, DV,
                   PIECES, VALUES, STAGES, SLOTS, PARTS, TILES, HELD_K, HELD_V, ALONE, 0)),
        (consume, (grad_descs, grads, grad_strides, sizes, layout, bounds, scale, plain_scale, given, dropout, k_s,
                   ring_s, lse_s, delta_s, ds_s, dq_s, barriers, change, differentiate, LOW, HIGH, GROUP, DIM, DV,
                   PIECES, VALUES, STAGES, SLOTS, PARTS, TILES, HELD_K, HELD_V, ALONE, 1)),
        (produce, (k_desc, q_desc, lse_desc, key, query, (k_b, k_h, k_n), (q_b, q_h, q_n), sizes, layout, bounds, slots,
                   k_s, ring_s, lse_s, (k_full, v_empty, q_full, q_empty), GROUP, DIM, PIECES, 0, PIECES + VALUES,
                   2 * VALUES, STAGES, SLOTS, ALONE)),
        (produce, (v_desc, do_desc, delta_desc, value, grad_out, (v_b, v_h, v_n), (do_b, do_h, do_n), sizes, layout,
                   bounds, slots, ring_s, ring_s, delta_s, (v_full, v_empty, do_full, do_empty), GROUP, DV, VALUES,
                   PIECES, PIECES + VALUES, 2 * VALUES, STAGES, SLOTS, ALONE)),
        (add_pieces, (dq_desc, order, sizes, layout, bounds, slots, dq_s, dq_full, dq_empty, HIGH, ORDERED, GROUP, D,
                      PIECES, TILES)),
    ], [4, 1, 1, 1], [240, 24, 24, 24])  # fmt: skip
