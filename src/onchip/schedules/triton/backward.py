"""The backward kernels: weights are recomputed from the scores and the LSE, nothing quadratic is stored.

    p = exp(s - lse)   dv = p^T do   dp = do v^T   ds = p * (dp - delta)   dq = ds k * scale   dk = ds^T q * scale
    delta = sum(do * out) - dlse

    delta_kernel     delta of each row, and its LSE as weights want it, in rows padded so that tiles need no masks
    keys_kernel      a tile of columns walks over the rows that see it, of every query head of its group
        k, v                        (BK, D), (BK, DV)   stay
        q, do, lse, delta           (BQ, D), ...        pipelined through shared memory
        s, p, dp, ds, transposed    (BK, BQ)            registers, so that products take them as they lie
        dk, dv                      (BK, D), (BK, DV)   registers
    queries_kernel   a tile of rows walks over the columns that it sees, as in the forward, and sums dq
    gradient_kernel  the gradient of a bias or of slopes, one tile of theirs at a time

Every sum is made by one program in one order: the same bits each time, and no atomics.
Source: Dao 2023, FlashAttention-2, algorithm 2; dlse enters like a negative delta.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from onchip.gpu import GRADIENT, KEYS, QUERIES
from onchip.gpu.call import on_device
from onchip.gpu.launcher import Launcher, PerProblem, Series
from onchip.gpu.parts import (
    LOG2E,
    alive,
    band_of,
    extent,
    find_slot,
    listed_column,
    listed_visits,
    load_tile,
    moved,
    multiple,
    multiply,
    nearest,
    nearest_column,
    offsets_of,
    range_of,
    row_values,
    start_of,
    store_tile,
    visible,
    visits,
    waited_for,
)
from onchip.gpu.source import distance
from onchip.gpu.start import start
from onchip.lowering import Node
from onchip.problem import Problem
from onchip.schedules.triton.finite import look_through, unusual_of
from onchip.schedules.triton.launch import DELTA_ROWS, Call, are_aligned, conditions
from onchip.strides import laid_out

UNSPECIALIZED = [
    "low", "high", "low_aligned", "high_aligned", "batch", "heads", "length_q", "length_k", "tiles", "threshold",
    "q_b", "q_h", "q_n", "q_d", "k_b", "k_h", "k_n", "k_d", "v_b", "v_h", "v_n", "v_d", "do_b", "do_h", "do_n", "do_d",
    "o_b", "o_h", "o_n", "o_d", "dq_b", "dq_h", "dq_n", "dq_d", "dk_b", "dk_h", "dk_n", "dk_d",
    "dv_b", "dv_h", "dv_n", "dv_d", "lse_b", "lse_h", "row_b", "row_h", "dlse_b", "dlse_h", "dlse_n",
    "list_b", "list_h", "blocks_k",
    "total_b", "total_h", "total_q", "total_k", "sums_b", "sums_h", "tiles_q", "tiles_k", "rows", "columns",
]  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALIZED)
def delta_kernel(
    out, grad_out, lse, grad_lse, row_lse, row_delta,
    o_b: tl.int64, o_h: tl.int64, o_n: tl.int64, o_d: tl.int64,
    do_b: tl.int64, do_h: tl.int64, do_n: tl.int64, do_d: tl.int64,
    lse_b: tl.int64, lse_h: tl.int64, dlse_b: tl.int64, dlse_h: tl.int64, dlse_n: tl.int64,
    heads: tl.int32, length_q: tl.int32, tiles: tl.int32,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BQ: tl.constexpr, BASE2: tl.constexpr, WIDE: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """delta and LSE of each row, and of those that fill up the last tile, which see nothing; see `parts.row_values`."""
    program = tl.program_id(0)
    tile = program % tiles
    h = (program // tiles) % heads
    b = program // tiles // heads
    first = tile * BQ
    r = tl.arange(0, BQ)
    exists = first + r < length_q
    o_offsets = offsets_of(r, 0, o_h, o_n, o_d, BLOCK_DV, 1, WIDE, VECTOR)
    do_offsets = offsets_of(r, 0, do_h, do_n, do_d, BLOCK_DV, 1, WIDE, VECTOR)
    o_start = start_of(out, b, h, first, o_b, o_h, o_n, VECTOR)
    do_start = start_of(grad_out, b, h, first, do_b, do_h, do_n, VECTOR)
    o = load_tile(o_start, o_offsets, exists, True, DV, BLOCK_DV)
    do = load_tile(do_start, do_offsets, exists, True, DV, BLOCK_DV)
    place = b.to(tl.int64) * lse_b + h.to(tl.int64) * lse_h + first + r
    due = None
    if grad_lse is not None:
        row = (first + r).to(tl.int64)
        dues = grad_lse + b.to(tl.int64) * dlse_b + h.to(tl.int64) * dlse_h + row * dlse_n
        due = tl.load(dues, mask=exists, other=0.0)
    found, total = row_values(o, do, tl.load(lse + place, mask=exists, other=float("-inf")), due, BASE2)
    to = program.to(tl.int64) * BQ + r
    tl.store(row_lse + to, found)
    tl.store(row_delta + to, total)


@triton.jit
def score_gradient(
    a, c, da, dc, lse, delta, i, j, begins, ends, column, where, scores, dropout, given,
    keep: tl.constexpr, change: tl.constexpr, differentiate: tl.constexpr,
    BK: tl.constexpr, TURNED: tl.constexpr, MASKED: tl.constexpr, BOUNDED: tl.constexpr, CAREFUL: tl.constexpr,
    EIGHTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of a tile: the weights that dV sums, the gradient of the score after its steps and before them, what is seen.

    (a, c, da, dc) is (q, k, do, v), or (k, q, v, do) if TURNED; lse (in base 2 without a change), delta, i and j
    broadcast against the tile, and so do begins and ends, the ranges of parts.range_of over the rows of c. The last
    result says which rows of c some row of a sees, if CAREFUL.
    """
    b, head, token_q, token_k, length_q, length_k = where
    seed, threshold, kept_scale = dropout
    s = multiply(a, tl.trans(c), None, PRECISION)
    raw = s * scores
    s = raw
    if change is not None or keep is not None:
        near_i, near_j = nearest(i, length_q), nearest_column(j, length_k, EIGHTS)
    if change is not None:
        s = change(raw, near_i, near_j, where, given)
    if MASKED:
        show = visible(i if TURNED else j, begins, ends, BOUNDED)
        if keep is not None:
            show = show & keep(near_i, near_j, where, given)
    if change is None:
        z = s - lse
    else:
        z = (s - lse) * LOG2E
    if MASKED:
        # not sooner: with and without care scores are to round alike, so nothing may stand between these operations
        z = tl.where(show, z, float("-inf"))
    p = tl.exp2(z)
    dp = multiply(da, tl.trans(dc), None, PRECISION)
    weight = p
    if seed is not None:
        if TURNED:
            lives = tl.trans(alive(seed, b, head, tl.trans(i), column, threshold, BK))
        else:
            lives = alive(seed, b, head, i, column, threshold, BK)
        weight = tl.where(lives, p, 0.0)
        dp = tl.where(lives, dp * kept_scale, 0.0)
    g = p * (dp - delta)
    ds = g
    if differentiate is not None:
        ds = differentiate(g, raw, near_i, near_j, where, given)
    if (CAREFUL or PRECISION == "tf32x3") and (MASKED or change is not None):
        # products of float32 take ds apart, whose last operation would round otherwise without this one behind it
        hidden = z == float("-inf")
        g = tl.where(hidden, 0.0, g)
        ds = tl.where(hidden, 0.0, ds)
    seen = tl.max(z, 0) > float("-inf")
    return weight, g, ds, seen


@triton.jit
def rows_of(b, head, token, row_b, row_h):
    """Where the LSE and delta of a head's rows begin, as delta_kernel leaves them; strides count sixteen rows."""
    return (b.to(tl.int64) * row_b + head.to(tl.int64) * row_h) * 16 + token.to(tl.int64)


@triton.jit
def load_row_values(lse, delta, position, exists, MASKED: tl.constexpr):
    """LSE and delta of rows; a row that is another sequence's, or does not exist, has no weights if MASKED."""
    if MASKED:
        row_lse = tl.load(lse + position, mask=exists, other=float("inf"))
        row_delta = tl.load(delta + position, mask=exists, other=0.0)
    else:
        row_lse = tl.load(lse + position)
        row_delta = tl.load(delta + position)
    return row_lse, row_delta


@triton.jit(do_not_specialize=UNSPECIALIZED)
def keys_kernel(
    q_map, do_map, query, key, value, grad_out, lse, delta, grad_key, grad_value, unusual,
    q_b: tl.int64, q_h: tl.int64, q_n: tl.int64, q_d: tl.int64,
    k_b: tl.int64, k_h: tl.int64, k_n: tl.int64, k_d: tl.int64,
    v_b: tl.int64, v_h: tl.int64, v_n: tl.int64, v_d: tl.int64,
    do_b: tl.int64, do_h: tl.int64, do_n: tl.int64, do_d: tl.int64,
    dk_b: tl.int64, dk_h: tl.int64, dk_n: tl.int64, dk_d: tl.int64,
    dv_b: tl.int64, dv_h: tl.int64, dv_n: tl.int64, dv_d: tl.int64,
    row_b: tl.int64, row_h: tl.int64,
    batch: tl.int32, heads: tl.int32, length_q: tl.int32, length_k: tl.int32, tiles: tl.int32,
    cu_q, cu_k, used_q, used_k,
    low, high, low_aligned, high_aligned, lows, highs,
    order, counts, list_b: tl.int64, list_h: tl.int64, blocks_k: tl.int64,
    scale: tl.float32, scores: tl.float32, seed, threshold: tl.int32, kept_scale: tl.float32,
    given,
    keep: tl.constexpr, change: tl.constexpr, differentiate: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, LISTS: tl.constexpr, CAREFUL: tl.constexpr, EIGHTS: tl.constexpr,
    EVERY: tl.constexpr, WIDE: tl.constexpr, VECTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV. `heads` counts key heads, `tiles` tiles of columns; scores are the products times `scores`.

    EVERY: it is known that every row sees something, or that all is finite. With `unusual` as in the forward.
    """
    if unusual is not None:
        if (tl.load(unusual) != 0) != CAREFUL:
            return
    program = tl.program_id(0)
    number = program % tiles
    kv_head = (program // tiles) % heads
    b = program // tiles // heads
    if cu_k is not None:
        b, tile = find_slot(number, cu_k, length_k, batch, 1, BK)
    else:
        tile = number
    token_k, room_k, length_k = extent(b, cu_k, used_k, length_k, batch)
    first = tile * BK
    if first >= room_k:
        return
    token_q, room_q, length_q = extent(b, cu_q, used_q, length_q, batch)
    least, most = band_of(b, length_q, length_k, batch, low, high, low_aligned, high_aligned, lows, highs)
    sequence = b.to(tl.int64)

    columns = tl.arange(0, BK)
    j = first + columns
    lives = j < length_k
    k_offsets = offsets_of(columns, 0, k_h, k_n, k_d, BLOCK_D, 1, WIDE, VECTOR)
    v_offsets = offsets_of(columns, 0, v_h, v_n, v_d, BLOCK_DV, 1, WIDE, VECTOR)
    k_start = start_of(key, b, kv_head, token_k + first, k_b, k_h, k_n, VECTOR)
    v_start = start_of(value, b, kv_head, token_k + first, v_b, v_h, v_n, VECTOR)
    k = load_tile(k_start, k_offsets, lives, True, D, BLOCK_D)
    v = load_tile(v_start, v_offsets, lives, True, DV, BLOCK_DV)
    dk = tl.zeros([BK, BLOCK_D], tl.float32)
    dv = tl.zeros([BK, BLOCK_DV], tl.float32)
    last = tl.minimum(first + BK, length_k) - 1
    # the rows that a column is seen by; what stands in columns that do not exist is dropped at the end
    begins, ends = range_of(j, j >= 0, -most, -least, length_q)
    r = tl.arange(0, BQ)
    q_offsets = offsets_of(r, 0, q_h, q_n, q_d, BLOCK_D, 1, WIDE, VECTOR)
    do_offsets = offsets_of(r, 0, do_h, do_n, do_d, BLOCK_DV, 1, WIDE, VECTOR)
    dropout = (seed, threshold, kept_scale)
    exists = j < room_k
    key_columns = (columns, token_k + first, b, kv_head, exists)
    if not LISTS:
        start, full_start, full_stop, stop = visits(first, last, -most, -least, length_q, BQ, keep is not None)
        if start == stop:
            store_columns(
                grad_key, grad_value, dk, dv, key_columns, (dk_b, dk_h, dk_n, dk_d), (dv_b, dv_h, dv_n, dv_d), D, DV,
                BLOCK_D, BLOCK_DV, WIDE, VECTOR,
            )  # fmt: skip
            return
    for member in range(0, GROUP):
        head = (kv_head * GROUP + member).to(tl.int64)
        q_start = start_of(query, b, head, token_q, q_b, q_h, q_n, VECTOR)
        do_start = start_of(grad_out, b, head, token_q, do_b, do_h, do_n, VECTOR)
        values = rows_of(b, head, token_q, row_b, row_h)
        rows = (q_start, do_start, q_offsets, do_offsets, q_n, do_n, lse + values, delta + values)
        maps = (q_map, do_map, b, kv_head * GROUP + member)
        where = (sequence, head, token_q, token_k, length_q, length_k)
        # what needs a mask, before and behind [full_start, full_stop), and then what does not
        if LISTS:
            row = sequence * list_b + head * list_h + first // 128
            listed = order + row * blocks_k
            start, full_start, full_stop, stop = listed_visits(counts + row * 2, first, last, BQ)
            masked = full_start
        else:
            listed = None
            masked = stop - (full_stop - full_start)
            if keep is None and change is None:
                # One step has a mask, so that the compiler knows of one: ptxas takes the sums of a loop that is skipped
                # for changes of what a product adds to, and would make products wait for each other.
                if masked == start:
                    full_start = start + BQ
                    masked = full_start
                tl.assume(masked > start)
        dk, dv = gather(
            dk, dv, k, v, rows, maps, begins, ends, where, first, start, masked, full_start, full_stop - full_start,
            listed, scores, dropout, given, keep, change, differentiate, D, DV, BLOCK_D, BLOCK_DV, BQ, BK, LISTS, True,
            HIGH, CAREFUL, EIGHTS, EVERY, VECTOR, PRECISION,
        )  # fmt: skip
        if LISTS or keep is None:
            dk, dv = gather(
                dk, dv, k, v, rows, maps, begins, ends, where, first, full_start, full_stop, full_stop, 0, listed,
                scores, dropout, given, None, change, differentiate, D, DV, BLOCK_D, BLOCK_DV, BQ, BK, LISTS, False,
                HIGH, CAREFUL, EIGHTS, EVERY, VECTOR, PRECISION,
            )  # fmt: skip
    dk = tl.where(lives[:, None], dk * scale, 0.0)
    dv = tl.where(lives[:, None], dv * kept_scale, 0.0)
    store_columns(
        grad_key, grad_value, dk, dv, key_columns, (dk_b, dk_h, dk_n, dk_d), (dv_b, dv_h, dv_n, dv_d), D, DV, BLOCK_D,
        BLOCK_DV, WIDE, VECTOR,
    )  # fmt: skip


@triton.jit
def store_columns(
    grad_key, grad_value, dk, dv, columns, dk_strides, dv_strides,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, WIDE: tl.constexpr,
    VECTOR: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of columns, those that are wanted."""
    c, token, b, kv_head, exists = columns
    if grad_key is not None:
        dk_b, dk_h, dk_n, dk_d = dk_strides
        dk_start = start_of(grad_key, b, kv_head, token, dk_b, dk_h, dk_n, VECTOR)
        store_tile(dk_start, offsets_of(c, 0, dk_h, dk_n, dk_d, BLOCK_D, 1, WIDE, VECTOR), exists, dk, D, BLOCK_D)
    if grad_value is not None:
        dv_b, dv_h, dv_n, dv_d = dv_strides
        dv_start = start_of(grad_value, b, kv_head, token, dv_b, dv_h, dv_n, VECTOR)
        store_tile(dv_start, offsets_of(c, 0, dv_h, dv_n, dv_d, BLOCK_DV, 1, WIDE, VECTOR), exists, dv, DV, BLOCK_DV)


@triton.jit
def gather(
    dk, dv, k, v, rows, maps, begins, ends, where, first, begin, end, gap, width, listed, scores, dropout, given,
    keep: tl.constexpr, change: tl.constexpr, differentiate: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BQ: tl.constexpr,
    BK: tl.constexpr, LISTS: tl.constexpr, MASKED: tl.constexpr, BOUNDED: tl.constexpr, CAREFUL: tl.constexpr,
    EIGHTS: tl.constexpr, EVERY: tl.constexpr, VECTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV of the columns from `first` on after the rows [begin, end), or after these steps of a list.

    If MASKED, rows from `gap` on are so many further down.
    """
    q_start, do_start, q_offsets, do_offsets, q_n, do_n, lse, delta = rows
    q_map, do_map, b, h = maps
    sequence, head, token_q, token_k, length_q, length_k = where
    r = tl.arange(0, BQ)
    j = (first + tl.arange(0, BK))[:, None]
    for step in range(begin, end, 1 if LISTS else BQ):
        if q_map is not None:
            dk, dv = waited_for(dk), waited_for(dv)
        row = listed_column(listed, step, BQ) if LISTS else step
        if MASKED and not LISTS:
            row += tl.where(step < gap, 0, width)
        position = row + r
        exists = position < length_q
        if q_map is not None:
            q = q_map.load([b, h, row, 0]).reshape([BQ, BLOCK_D])
            do = do_map.load([b, h, row, 0]).reshape([BQ, BLOCK_DV])
        else:
            q = load_tile(moved(q_start, row, q_n, VECTOR), q_offsets, exists, MASKED, D, BLOCK_D)
            do = load_tile(moved(do_start, row, do_n, VECTOR), do_offsets, exists, MASKED, DV, BLOCK_DV)
        row_lse, row_delta = load_row_values(
            moved(lse, row, 1, 1), moved(delta, row, 1, 1), r, exists, MASKED and not EVERY
        )  # fmt: skip
        if (MASKED and not EVERY) or CAREFUL:
            # a row that sees nothing must not give what it holds
            sees = (row_lse < float("inf")) | (row_lse != row_lse)
            q = tl.where(sees[:, None], q, 0.0).to(q.dtype)
            do = tl.where(sees[:, None], do, 0.0).to(do.dtype)
        weight, g, ds, seen = score_gradient(
            k, q, v, do, row_lse[None, :], row_delta[None, :], position[None, :], j, begins[:, None], ends[:, None],
            first, where, scores, dropout, given, keep, change, differentiate, BK, True, MASKED, BOUNDED, CAREFUL,
            EIGHTS, PRECISION,
        )  # fmt: skip
        dv = multiply(weight.to(do.dtype), do, dv, PRECISION)
        dk = multiply(ds.to(q.dtype), q, dk, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=UNSPECIALIZED)
def queries_kernel(
    k_map, v_map, query, key, value, grad_out, lse, delta, grad_query, unusual,
    q_b: tl.int64, q_h: tl.int64, q_n: tl.int64, q_d: tl.int64,
    k_b: tl.int64, k_h: tl.int64, k_n: tl.int64, k_d: tl.int64,
    v_b: tl.int64, v_h: tl.int64, v_n: tl.int64, v_d: tl.int64,
    do_b: tl.int64, do_h: tl.int64, do_n: tl.int64, do_d: tl.int64,
    dq_b: tl.int64, dq_h: tl.int64, dq_n: tl.int64, dq_d: tl.int64,
    row_b: tl.int64, row_h: tl.int64,
    batch: tl.int32, heads: tl.int32, length_q: tl.int32, length_k: tl.int32, tiles: tl.int32,
    cu_q, cu_k, used_q, used_k,
    low, high, low_aligned, high_aligned, lows, highs,
    order, counts, list_b: tl.int64, list_h: tl.int64, blocks_k: tl.int64,
    scale: tl.float32, scores: tl.float32, seed, threshold: tl.int32, kept_scale: tl.float32,
    given,
    keep: tl.constexpr, change: tl.constexpr, differentiate: tl.constexpr,
    GROUP: tl.constexpr, PACK: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, LISTS: tl.constexpr, CAREFUL: tl.constexpr, EIGHTS: tl.constexpr,
    WIDE: tl.constexpr, VECTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ. `heads` counts groups of PACK query heads, `tiles` tiles of rows; with `unusual` as in the forward."""
    if unusual is not None:
        if (tl.load(unusual) != 0) != CAREFUL:
            return
    program = tl.program_id(0)
    number = program % tiles
    h = (program // tiles) % heads
    b = program // tiles // heads
    if cu_q is not None:
        b, tile = find_slot(number, cu_q, length_q, batch, PACK, BQ)
    else:
        # under a band that ends at the diagonal the last tiles have the most to do, so they go first
        tile = tiles - 1 - number if HIGH else number
    token_q, room_q, length_q = extent(b, cu_q, used_q, length_q, batch)
    first = tile * BQ
    if first >= room_q * PACK:
        return
    token_k, room_k, length_k = extent(b, cu_k, used_k, length_k, batch)
    least, most = band_of(b, length_q, length_k, batch, low, high, low_aligned, high_aligned, lows, highs)
    sequence = b.to(tl.int64)

    r = tl.arange(0, BQ)
    position = (first + r) // PACK
    begins, ends = range_of(position, position < length_q, least, most, length_k)
    within = (first + r) % PACK
    exists = first + r < room_q * PACK
    lives = position < length_q
    row_first = first // PACK
    row_last = tl.minimum((first + BQ - 1) // PACK, length_q - 1)
    from_row = 0 * row_first if PACK > 1 else row_first
    head = h * PACK
    heads_of_rows = head.to(tl.int64) if PACK == 1 else (head + within).to(tl.int64)[:, None]
    kv_head = head // GROUP

    q_offsets = offsets_of(position - from_row, within, q_h, q_n, q_d, BLOCK_D, PACK, WIDE, VECTOR)
    do_offsets = offsets_of(position - from_row, within, do_h, do_n, do_d, BLOCK_DV, PACK, WIDE, VECTOR)
    q_start = start_of(query, b, head, token_q + from_row, q_b, q_h, q_n, VECTOR)
    do_start = start_of(grad_out, b, head, token_q + from_row, do_b, do_h, do_n, VECTOR)
    q = load_tile(q_start, q_offsets, lives, True, D, BLOCK_D)
    do = load_tile(do_start, do_offsets, lives, True, DV, BLOCK_DV)
    values = rows_of(b, head, token_q, row_b, row_h)
    value_rows = within.to(tl.int64) * (row_h * 16) + position
    row_lse, row_delta = load_row_values(lse + values, delta + values, value_rows, lives, True)
    sees = (row_lse < float("inf")) | (row_lse != row_lse)
    do = tl.where(sees[:, None], do, 0.0).to(do.dtype)
    columns = tl.arange(0, BK)
    k_offsets = offsets_of(columns, 0, k_h, k_n, k_d, BLOCK_D, 1, WIDE, VECTOR)
    v_offsets = offsets_of(columns, 0, v_h, v_n, v_d, BLOCK_DV, 1, WIDE, VECTOR)
    k_start = start_of(key, b, kv_head, token_k, k_b, k_h, k_n, VECTOR)
    v_start = start_of(value, b, kv_head, token_k, v_b, v_h, v_n, VECTOR)
    dq = tl.zeros([BQ, BLOCK_D], tl.float32)
    if LISTS:
        # a tile of rows lies within one block of 128
        row = sequence * list_b + head.to(tl.int64) * list_h + row_first // 128
        listed = order + row * blocks_k
        start, full_start, full_stop, stop = listed_visits(counts + row * 2, row_first, row_last, BK)
    else:
        listed = None
        start, full_start, full_stop, stop = visits(row_first, row_last, least, most, length_k, BK, keep is not None)
    keys = (k_start, v_start, k_offsets, v_offsets, k_n, v_n)
    maps = (k_map, v_map, b, kv_head)
    rows = (position, begins, ends)
    where = (sequence, heads_of_rows, token_q, token_k, length_q, length_k)
    dropout = (seed, threshold, kept_scale)
    if LOW or keep is not None:
        dq = trace_back(
            dq, q, do, row_lse, row_delta, keys, maps, rows, where, start, full_start, listed, scores, dropout, given,
            keep, change, differentiate, D, DV, BLOCK_D, BLOCK_DV, BK, LISTS, True, LOW, CAREFUL, EIGHTS, VECTOR,
            PRECISION,
        )  # fmt: skip
    if LISTS or keep is None:
        dq = trace_back(
            dq, q, do, row_lse, row_delta, keys, maps, rows, where, full_start, full_stop, listed, scores, dropout,
            given, None, change, differentiate, D, DV, BLOCK_D, BLOCK_DV, BK, LISTS, False, LOW, CAREFUL, EIGHTS,
            VECTOR, PRECISION,
        )  # fmt: skip
    if not LISTS:
        dq = trace_back(
            dq, q, do, row_lse, row_delta, keys, maps, rows, where, full_stop, stop, listed, scores, dropout, given,
            keep, change, differentiate, D, DV, BLOCK_D, BLOCK_DV, BK, LISTS, True, LOW, CAREFUL, EIGHTS, VECTOR,
            PRECISION,
        )  # fmt: skip
    dq = tl.where(sees[:, None], dq * scale, 0.0)
    dq_offsets = offsets_of(position - from_row, within, dq_h, dq_n, dq_d, BLOCK_D, PACK, WIDE, VECTOR)
    dq_start = start_of(grad_query, b, head, token_q + from_row, dq_b, dq_h, dq_n, VECTOR)
    store_tile(dq_start, dq_offsets, exists, dq, D, BLOCK_D)


@triton.jit
def trace_back(
    dq, q, do, row_lse, row_delta, keys, maps, rows, where, begin, end, listed, scores, dropout, given,
    keep: tl.constexpr, change: tl.constexpr, differentiate: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BK: tl.constexpr,
    LISTS: tl.constexpr, MASKED: tl.constexpr, BOUNDED: tl.constexpr, CAREFUL: tl.constexpr, EIGHTS: tl.constexpr,
    VECTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ of the rows after the columns [begin, end), or after these steps of a list."""
    k_start, v_start, k_offsets, v_offsets, k_n, v_n = keys
    k_map, v_map, b, kv_head = maps
    position, begins, ends = rows
    sequence, head, token_q, token_k, length_q, length_k = where
    columns = tl.arange(0, BK)
    for step in range(begin, end, 1 if LISTS else BK):
        column = listed_column(listed, step, BK) if LISTS else multiple(step, BK, EIGHTS)
        j = column + columns
        if k_map is not None:
            k = k_map.load([b, kv_head, column, 0]).reshape([BK, BLOCK_D])
            v = v_map.load([b, kv_head, column, 0]).reshape([BK, BLOCK_DV])
        else:
            k = load_tile(moved(k_start, column, k_n, VECTOR), k_offsets, j < length_k, MASKED, D, BLOCK_D)
            v = load_tile(moved(v_start, column, v_n, VECTOR), v_offsets, j < length_k, MASKED, DV, BLOCK_DV)
        weight, g, ds, seen = score_gradient(
            q, k, do, v, row_lse[:, None], row_delta[:, None], position[:, None], j[None, :], begins[:, None],
            ends[:, None], column, where, scores, dropout, given, keep, change, differentiate, BK, False, MASKED,
            BOUNDED, CAREFUL, EIGHTS, PRECISION,
        )  # fmt: skip
        if CAREFUL and (MASKED or change is not None):
            k = tl.where(seen[:, None], k, 0.0).to(k.dtype)
        dq = multiply(ds.to(k.dtype), k, dq, PRECISION)
    return dq


@triton.jit
def place_of(b, head, layout, bounds, sizes):
    """Of a sequence and a head: what steps of scores are told of them, and the band."""
    cu_q, cu_k, used_q, used_k = layout
    low, high, low_aligned, high_aligned, lows, highs = bounds
    batch, length_q, length_k = sizes
    token_q, room_q, count_q = extent(b, cu_q, used_q, length_q, batch)
    token_k, room_k, count_k = extent(b, cu_k, used_k, length_k, batch)
    band = band_of(b, count_q, count_k, batch, low, high, low_aligned, high_aligned, lows, highs)
    return (b.to(tl.int64), head.to(tl.int64), token_q, token_k, count_q, count_k), band


@triton.jit
def rows_to(
    b, head, row, where, band, given,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BQ: tl.constexpr,
    EVERY: tl.constexpr, VECTOR: tl.constexpr,
):  # fmt: skip
    """What a tile of pairs needs of its rows: q, do, LSE, delta, and the columns that they see."""
    query, grad_out, lse, delta, q_offsets, do_offsets, q_strides, do_strides, row_strides = given
    q_b, q_h, q_n = q_strides
    do_b, do_h, do_n = do_strides
    row_b, row_h = row_strides
    sequence, head_of, token_q, token_k, count_q, count_k = where
    position = row + tl.arange(0, BQ)
    lives = position < count_q
    q_start = start_of(query, b, head, token_q + row, q_b, q_h, q_n, VECTOR)
    do_start = start_of(grad_out, b, head, token_q + row, do_b, do_h, do_n, VECTOR)
    q = load_tile(q_start, q_offsets, lives, True, D, BLOCK_D)
    do = load_tile(do_start, do_offsets, lives, True, DV, BLOCK_DV)
    values = rows_of(b, head, token_q, row_b, row_h)
    row_lse, row_delta = load_row_values(lse + values, delta + values, position, lives, True)
    if not EVERY:
        sees = (row_lse < float("inf")) | (row_lse != row_lse)
        do = tl.where(sees[:, None], do, 0.0).to(do.dtype)
    begins, ends = range_of(position, lives, band[0], band[1], count_k)
    return q, do, row_lse, row_delta, begins, ends


@triton.jit
def pairs_of(
    b, kv_head, row, column, where, rows, keys, scores, dropout, given, weighted,
    keep: tl.constexpr, change: tl.constexpr, weigh: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BQ: tl.constexpr,
    BK: tl.constexpr, LOW: tl.constexpr, CAREFUL: tl.constexpr, EIGHTS: tl.constexpr, VECTOR: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the scores of a tile of pairs, times `weigh`."""
    q, do, row_lse, row_delta, begins, ends = rows
    key, value, k_offsets, v_offsets, k_strides, v_strides = keys
    k_b, k_h, k_n = k_strides
    v_b, v_h, v_n = v_strides
    sequence, head, token_q, token_k, count_q, count_k = where
    i = (row + tl.arange(0, BQ))[:, None]
    j = column + tl.arange(0, BK)
    k_start = start_of(key, b, kv_head, token_k + column, k_b, k_h, k_n, VECTOR)
    v_start = start_of(value, b, kv_head, token_k + column, v_b, v_h, v_n, VECTOR)
    k = load_tile(k_start, k_offsets, j < count_k, True, D, BLOCK_D)
    v = load_tile(v_start, v_offsets, j < count_k, True, DV, BLOCK_DV)
    weight, g, ds, seen = score_gradient(
        q, k, do, v, row_lse[:, None], row_delta[:, None], i, j[None, :], begins[:, None], ends[:, None], column,
        where, scores, dropout, given, keep, change, None, BK, False, True, LOW, CAREFUL, EIGHTS, PRECISION,
    )  # fmt: skip
    if weigh is not None:
        g *= weigh(nearest(i, count_q), nearest(j[None, :], count_k), where, weighted)
    return g


@triton.jit(do_not_specialize=UNSPECIALIZED)
def gradient_kernel(
    query, key, value, grad_out, lse, delta, total, unusual,
    q_b: tl.int64, q_h: tl.int64, q_n: tl.int64, q_d: tl.int64,
    k_b: tl.int64, k_h: tl.int64, k_n: tl.int64, k_d: tl.int64,
    v_b: tl.int64, v_h: tl.int64, v_n: tl.int64, v_d: tl.int64,
    do_b: tl.int64, do_h: tl.int64, do_n: tl.int64, do_d: tl.int64,
    total_b: tl.int64, total_h: tl.int64, total_q: tl.int64, total_k: tl.int64,
    row_b: tl.int64, row_h: tl.int64,
    batch: tl.int32, heads: tl.int32, length_q: tl.int32, length_k: tl.int32,
    sums_b: tl.int32, sums_h: tl.int32, tiles_q: tl.int32, tiles_k: tl.int32, rows: tl.int32, columns: tl.int32,
    cu_q, cu_k, used_q, used_k,
    low, high, low_aligned, high_aligned, lows, highs,
    scores: tl.float32, seed, threshold: tl.int32, kept_scale: tl.float32,
    given, weighted,
    keep: tl.constexpr, change: tl.constexpr, weigh: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    LOW: tl.constexpr, CAREFUL: tl.constexpr, EIGHTS: tl.constexpr, EVERY: tl.constexpr, ONE_LOOP: tl.constexpr,
    WHOLE: tl.constexpr, WIDE: tl.constexpr, VECTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of scores, times `weigh` of the pair, summed over the extents along which `total` has one entry.

    `total` is (batch or 1, heads or 1, rows, columns), contiguous, its columns WHOLE eights or not. A program makes one
    tile of it: ROWS and COLUMNS say which extents tiles divide, over the others it walks itself, and over sums_b
    sequences and sums_h heads. With `unusual` as in the forward.
    """
    if unusual is not None:
        if (tl.load(unusual) != 0) != CAREFUL:
            return
    program = tl.program_id(0)
    tile_k = program % tiles_k
    tile_q = (program // tiles_k) % tiles_q
    place = program // tiles_k // tiles_q
    parts_h = heads // sums_h
    first_h = place % parts_h * sums_h
    first_b = place // parts_h * sums_b
    r = tl.arange(0, BQ)
    c = tl.arange(0, BK)
    q_offsets = offsets_of(r, 0, q_h, q_n, q_d, BLOCK_D, 1, WIDE, VECTOR)
    k_offsets = offsets_of(c, 0, k_h, k_n, k_d, BLOCK_D, 1, WIDE, VECTOR)
    v_offsets = offsets_of(c, 0, v_h, v_n, v_d, BLOCK_DV, 1, WIDE, VECTOR)
    do_offsets = offsets_of(r, 0, do_h, do_n, do_d, BLOCK_DV, 1, WIDE, VECTOR)
    rows_at = (query, grad_out, lse, delta, q_offsets, do_offsets, (q_b, q_h, q_n), (do_b, do_h, do_n), (row_b, row_h))
    keys_at = (key, value, k_offsets, v_offsets, (k_b, k_h, k_n), (v_b, v_h, v_n))
    layout = (cu_q, cu_k, used_q, used_k)
    bounds = (low, high, low_aligned, high_aligned, lows, highs)
    sizes = (batch, length_q, length_k)
    dropout = (seed, threshold, kept_scale)
    sums = tl.zeros([BQ, BK], tl.float32)
    if ONE_LOOP and ROWS and COLUMNS:
        # one loop over sequences and heads, so that it can be pipelined, of pairs that are the same for all
        row, column = tile_q * BQ, multiple(tile_k * BK, BK, EIGHTS)
        where, band = place_of(first_b, first_h, layout, bounds, sizes)
        last = tl.minimum(row + BQ, where[4]) - 1
        start, full_start, full_stop, stop = visits(row, last, band[0], band[1], where[5], BK, True)
        steps = tl.where((column >= start) & (column < stop), sums_b * sums_h, 0)
        for step in range(0, steps):
            b, head = first_b + step // sums_h, first_h + step % sums_h
            where, band = place_of(b, head, layout, bounds, sizes)
            of_rows = rows_to(b, head, row, where, band, rows_at, D, DV, BLOCK_D, BLOCK_DV, BQ, EVERY, VECTOR)
            sums += pairs_of(
                b, head // GROUP, row, column, where, of_rows, keys_at, scores, dropout, given, weighted, keep, change,
                weigh, D, DV, BLOCK_D, BLOCK_DV, BQ, BK, LOW, CAREFUL, EIGHTS, VECTOR, PRECISION,
            )  # fmt: skip
    else:
        for step_b in range(0, sums_b):
            b = first_b + step_b
            for step_h in range(0, sums_h):
                head = first_h + step_h
                where, band = place_of(b, head, layout, bounds, sizes)
                begin_q = tile_q * BQ if ROWS else tile_q * 0
                end_q = tl.minimum(begin_q + BQ, where[4]) if ROWS else where[4]
                for row in range(begin_q, end_q, BQ):
                    of_rows = rows_to(b, head, row, where, band, rows_at, D, DV, BLOCK_D, BLOCK_DV, BQ, EVERY, VECTOR)
                    last = tl.minimum(row + BQ, where[4]) - 1
                    start, full_start, full_stop, stop = visits(row, last, band[0], band[1], where[5], BK, True)
                    if COLUMNS:
                        start = tl.maximum(start, tile_k * BK)
                        stop = tl.minimum(stop, tile_k * BK + BK)
                    for step in range(start, stop, BK):
                        sums += pairs_of(
                            b, head // GROUP, row, multiple(step, BK, EIGHTS), where, of_rows, keys_at, scores, dropout,
                            given, weighted, keep, change, weigh, D, DV, BLOCK_D, BLOCK_DV, BQ, BK, LOW, CAREFUL,
                            EIGHTS, VECTOR, PRECISION,
                        )  # fmt: skip
    total_b, total_h = multiple(total_b, 8, WHOLE), multiple(total_h, 8, WHOLE)
    total_q, columns = multiple(total_q, 8, WHOLE), multiple(columns, 8, WHOLE)
    target = total + (place // parts_h).to(tl.int64) * total_b + (place % parts_h).to(tl.int64) * total_h
    if ROWS and COLUMNS:
        i = (tile_q * BQ + r)[:, None]
        j = (tile_k * BK + c)[None, :]
        inside = (i < rows) & (j < columns)
        tl.store(target + i.to(tl.int64) * total_q + j, sums.to(total.dtype.element_ty), mask=inside)
    elif ROWS:
        i = tile_q * BQ + r
        tl.store(target + i.to(tl.int64) * total_q, tl.sum(sums, 1).to(total.dtype.element_ty), mask=i < rows)
    elif COLUMNS:
        j = tile_k * BK + c
        tl.store(target + j.to(tl.int64) * total_k, tl.sum(sums, 0).to(total.dtype.element_ty), mask=j < columns)
    else:
        tl.store(target, tl.sum(tl.sum(sums, 1), 0).to(total.dtype.element_ty))


def backward(
    problem: Problem,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    tensors: Sequence[Tensor],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of query, key, value and of each of `tensors`, None where not needed."""
    if out.numel() == 0:
        every = zip((query, key, value, *tensors), needs, strict=True)
        return [torch.zeros_like(tensor) if need else None for tensor, need in every]
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    lse = lse.contiguous()
    need_query, need_key, need_value, *need_tensors = needs
    facts = (
        query.stride(), key.stride(), value.stride(), grad_out.stride(), out.stride(),
        None if grad_lse is None else grad_lse.stride(), need_query, need_key, need_value, *conditions(problem),
    )  # fmt: skip
    known = _PREPARED.of(problem)
    prepared = known.get(facts)
    with on_device(query.device):
        if (
            prepared is None
            or prepared.series.kernels[0] is not delta_kernel
            or not are_aligned(query, key, value, grad_out, out)
        ):
            inputs = query, key, value
            prepared = _Prepared.of(Call(problem), inputs, grad_out, grad_lse, out, (need_query, need_key, need_value))
            if are_aligned(*inputs, grad_out, out):
                known[facts] = prepared
        if prepared.changes:
            query, key, value = Call(problem).readable(query, key, value)
        if prepared.copies:
            grad_out = torch.empty_like(out).copy_(grad_out)
        row_lse = torch.empty(prepared.rows, dtype=torch.float32, device=query.device)
        row_delta = torch.empty_like(row_lse)
        grad_query = torch.empty_like(query) if need_query else None
        grad_key = torch.empty_like(key) if need_key else None
        grad_value = torch.empty_like(value) if need_value else None
        unusual = unusual_of(prepared.careful, query.device)
        prepared.series(
            query, key, value, grad_out, lse, row_lse, row_delta, out, grad_lse, grad_query, grad_key, grad_value,
            unusual,
        )  # fmt: skip
        gradients: list[Tensor | None] = [grad_query, grad_key, grad_value]
        if any(need_tensors):
            walked = _Backward(Call(problem), (query, key, value, grad_out), lse, row_lse, row_delta, unusual)
            gradients += walked.gradients(tensors, need_tensors)
    return gradients


@dataclass(frozen=True, eq=False)
class _Prepared:
    """What backwards of one problem do for gradients of query, key and value, whose tensors have certain strides.

    Attributes:
        changes: whether query, key or value has to be copied before it is read. copies: whether grad_out has to be.
        careful: whether it matters if something is not finite. rows: how many numbers of each kind delta_kernel makes.
        series: the launches, over (query, key, value, grad_out, lse, row_lse, row_delta, out, grad_lse, grad_query,
            grad_key, grad_value, unusual).
    """

    changes: bool
    copies: bool
    careful: bool
    rows: int
    series: Series

    @staticmethod
    def of(
        call: Call,
        inputs: tuple[Tensor, ...],
        grad_out: Tensor,
        grad_lse: Tensor | None,
        out: Tensor,
        needs: tuple[bool, bool, bool],
    ) -> "_Prepared":
        """For tensors with the strides of these, which are aligned alike."""
        read = call.readable(*inputs)
        changes = any(one is not other for one, other in zip(read, inputs, strict=True))
        # an expanded gradient, as sums give it, would slow every load of it: a copy is read many times
        copies = call.vector(grad_out) == 1 and (call.vector(*read, out) > 1 or grad_out.dtype == torch.float32)
        if copies:
            grad_out = torch.empty_like(out)
        given = *read, grad_out
        grad_query, grad_key, grad_value = (
            torch.empty_like(tensor) if need else None for tensor, need in zip(read, needs, strict=True)
        )
        launches: list[tuple[Launcher, tuple[int, ...]]] = [
            (_sums_rows(call, out, grad_out, grad_lse), (7, 3, 4, 8, 5, 6))
        ]
        if call.careful:
            launches += ((look_through(call, tensor), (place, 12)) for place, tensor in enumerate(given))
        for careful in call.cares:
            if grad_key is not None or grad_value is not None:
                launcher = _of_keys(call, careful, given, grad_key, grad_value)
                launches.append((launcher, (0, 1, 2, 3, 5, 6, 10, 11, 12)))
            if grad_query is not None:
                launches.append((_of_queries(call, careful, given, grad_query), (0, 1, 2, 3, 5, 6, 9, 12)))
        places = call.problem.heads_q * (1 if call.packed else call.problem.batch)
        return _Prepared(changes, copies, call.careful, places * call.padded_rows, Series(*launches))


_PREPARED: PerProblem[_Prepared] = PerProblem()


class _Backward:
    """Gradients of what scores read, once each row has its delta.

    Args:
        inputs: query, key, value and the gradient of out, as kernels read them.
    """

    def __init__(
        self,
        call: Call,
        inputs: tuple[Tensor, ...],
        lse: Tensor,
        row_lse: Tensor,
        row_delta: Tensor,
        unusual: Tensor | None,
    ) -> None:
        self._problem, self._call, self._inputs, self._lse = call.problem, call, inputs, lse
        self._row_lse, self._row_delta, self._unusual = row_lse, row_delta, unusual

    def gradients(self, tensors: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor | None]:
        """Of each of `tensors`, None where not needed."""
        gradients: list[Tensor | None] = [None] * len(tensors)
        for node in self._call.score_nodes:
            if node[0] == "softcap" or not needs[node[1]]:
                continue
            tensor = tensors[node[1]]
            found = self._of_sink(tensor) if node[0] == "sink" else self._of_step(node, tensor)
            gradients[node[1]] = laid_out(found, tensor)
        return gradients

    def _of_sink(self, logits: Tensor) -> Tensor:
        """A sink is one more key whose value is 0: its weight is exp(sink - lse), its gradient -weight * delta."""
        shape = (-1, 1) if self._call.packed else (1, -1, 1)
        lse = self._lse.masked_fill(self._lse == float("-inf"), float("inf"))
        delta = self._row_delta.reshape(*lse.shape[:-1], -1)[..., : lse.shape[-1]]
        found = -(torch.exp(logits.float().reshape(shape) - lse) * delta)
        return found.sum(-1) if self._call.packed else found.sum((0, 2))

    def _of_step(self, node: Node, tensor: Tensor) -> Tensor:
        """The gradient of a bias or of slopes."""
        problem, call = self._problem, self._call
        if tensor.numel() == 0:
            return torch.zeros_like(tensor)
        weigh, reads = (None, ()) if node[0] == "bias" else distance(node[2], call.packed)
        shape = (1,) * (4 - tensor.dim()) + tuple(tensor.shape)
        if node[0] == "alibi":
            shape = (1, *tensor.shape, 1, 1) if tensor.dim() == 1 else (*tensor.shape, 1, 1)
        full = (problem.batch, problem.heads_q)
        if shape[2] > 1 and shape[3] > 1:
            total = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
            self._walk(total, shape[2], shape[3], weigh, reads)
            return total.reshape(tensor.shape)
        # linear in the lengths: one sum for each sequence and head, which are added up afterwards
        rows = problem.length_q if shape[2:] == (1, 1) and not call.packed else shape[2]
        total = torch.empty((*full, rows, shape[3]), dtype=torch.float32, device=tensor.device)
        self._walk(total, rows, shape[3], weigh, reads)
        return total.sum_to_size(shape).reshape(tensor.shape)

    def _walk(self, total: Tensor, rows: int, columns: int, weigh: Any, reads: Any) -> None:
        problem, call = self._problem, self._call
        tile, vector = call.tile(GRADIENT), call.vector(*self._inputs)
        tiles_q = -(-rows // tile.rows) if rows > 1 else 1
        tiles_k = -(-columns // tile.columns) if columns > 1 else 1
        sums_b = problem.batch if total.shape[0] == 1 else 1
        sums_h = problem.heads_q if total.shape[1] == 1 else 1
        programs = total.shape[0] * total.shape[1] * tiles_q * tiles_k
        if programs == 0:
            return
        for careful in call.cares:
            constants = call.constants(tile, vector, careful)
            del constants["LISTS"], constants["HIGH"]
            start(gradient_kernel, programs)(
                *self._inputs, self._row_lse, self._row_delta, total, self._unusual,
                *call.all_strides(vector, *self._inputs), *total.stride(), *call.row_strides, problem.batch,
                problem.heads_q, problem.length_q, problem.length_k, sums_b, sums_h, tiles_q, tiles_k, rows, columns,
                *call.layout, *call.band.arguments, call.scale, *call.dropout, call.given(call.semantics.reads),
                call.given(reads), keep=call.semantics.keep, change=call.semantics.change, weigh=weigh,
                ROWS=rows > 1, COLUMNS=columns > 1, EVERY=call.reads_every_row and not careful,
                ONE_LOOP=call.sums_in_one_loop, WHOLE=columns % 8 == 0, WIDE=call.wide(*self._inputs),
                **constants,
            )  # fmt: skip


# Launches for tensors with the strides of those given, which are aligned alike


def _sums_rows(call: Call, out: Tensor, grad_out: Tensor, grad_lse: Tensor | None) -> Launcher:
    problem, vector = call.problem, call.vector(out, grad_out)
    tiles = call.padded_rows // DELTA_ROWS
    strides: tuple[int, ...] = (0, 0, 0)
    if grad_lse is not None:
        strides = (0, *grad_lse.stride()) if call.packed else grad_lse.stride()
    rest = (
        *call.all_strides(vector, out, grad_out), *call.lse_strides, *strides, problem.heads_q, problem.length_q, tiles,
    )  # fmt: skip
    constants = {
        "DV": problem.dim_v, "BLOCK_DV": call.block_dv, "BQ": DELTA_ROWS,
        "BASE2": call.semantics.change is None, "WIDE": call.wide(out, grad_out), "VECTOR": vector, "num_warps": 4,
    }  # fmt: skip
    programs = tiles * problem.heads_q * (1 if call.packed else problem.batch)
    return Launcher(delta_kernel, programs, rest, constants)


def _of_keys(
    call: Call, careful: bool, inputs: tuple[Tensor, ...], grad_key: Tensor | None, grad_value: Tensor | None
) -> Launcher:
    problem, tile = call.problem, call.tile(KEYS)
    given = [tensor for tensor in (*inputs, grad_key, grad_value) if tensor is not None]
    tiles, vector = call.count(problem.length_k, 1, tile.columns), call.vector(*given)
    rest = (
        *call.all_strides(vector, *inputs, grad_key, grad_value), *call.row_strides,
        problem.batch, problem.heads_kv, problem.length_q, problem.length_k, tiles, *call.layout,
        *call.band.arguments, *call.lists_for(KEYS), problem.scale, call.scale, *call.dropout,
        call.given(call.semantics.reads),
    )  # fmt: skip
    constants = {
        "keep": call.semantics.keep, "change": call.semantics.change, "differentiate": call.semantics.differentiate,
        "EVERY": call.reads_every_row and not careful, "WIDE": call.wide(*given),
    }  # fmt: skip
    programs = tiles * problem.heads_kv * (1 if call.packed else problem.batch)
    maps = call.maps(tile, tile.rows, {0: inputs[0], 3: inputs[3]})
    return Launcher(keys_kernel, programs, rest, constants | call.constants(tile, vector, careful), maps)


def _of_queries(call: Call, careful: bool, inputs: tuple[Tensor, ...], grad_query: Tensor) -> Launcher:
    problem, tile, tensors = call.problem, call.tile(QUERIES), (*inputs, grad_query)
    vector = call.vector(*tensors)
    tiles, heads = call.count(problem.length_q, call.pack, tile.rows), problem.heads_q // call.pack
    rest = (
        *call.all_strides(vector, *tensors), *call.row_strides, problem.batch, heads, problem.length_q,
        problem.length_k, tiles, *call.layout, *call.band.arguments, *call.lists_for(QUERIES), problem.scale,
        call.scale, *call.dropout, call.given(call.semantics.reads),
    )  # fmt: skip
    constants = {
        "keep": call.semantics.keep, "change": call.semantics.change, "differentiate": call.semantics.differentiate,
        "PACK": call.pack, "WIDE": call.wide(*tensors),
    }  # fmt: skip
    programs = tiles * heads * (1 if call.packed else problem.batch)
    maps = call.maps(tile, tile.columns, {1: inputs[1], 2: inputs[2]})
    return Launcher(queries_kernel, programs, rest, constants | call.constants(tile, vector, careful), maps)
