"""The forward kernel: one tile of rows walks over the columns that it sees.

    q                                      (BQ, D)    stays in registers or shared memory
    for each piece of columns, BK at a time           (parts.visits, or the lists of blocks)
        k, v                               (BK, D), (BK, DV)   pipelined through shared memory
        s = q k^T * scale ; change ; hide  (BQ, BK)   registers
        m, l, acc = online softmax         (BQ,), (BQ,), (BQ, DV)  registers
    out = acc / l, lse = m + log l

Scores are in base 2 unless something changes them: then they stay natural and the maximum is subtracted before the
scaling, so that scores of any size compete exactly.
Source: Dao 2023, FlashAttention-2, algorithm 1; Milakov and Gimelshein 2018, section 3.
"""

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from onchip.gpu import FORWARD
from onchip.gpu.call import Results, on_device
from onchip.gpu.launcher import Launcher, PerProblem, Series
from onchip.gpu.parts import (
    LN2,
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
    start_of,
    store_tile,
    visible,
    visits,
    waited_for,
)
from onchip.problem import Problem
from onchip.schedules.triton.finite import unusual_of
from onchip.schedules.triton.launch import Call, are_aligned, conditions

UNSPECIALIZED = [
    "low", "high", "low_aligned", "high_aligned", "batch", "heads", "length_q", "length_k", "tiles", "threshold",
    "q_b", "q_h", "q_n", "q_d", "k_b", "k_h", "k_n", "k_d", "v_b", "v_h", "v_n", "v_d", "o_b", "o_h", "o_n", "o_d",
    "lse_b", "lse_h", "list_b", "list_h", "blocks_k",
]  # fmt: skip


@triton.jit(do_not_specialize=UNSPECIALIZED)
def forward_kernel(
    k_map, v_map, query, key, value, out, lse, unusual,
    q_b: tl.int64, q_h: tl.int64, q_n: tl.int64, q_d: tl.int64,
    k_b: tl.int64, k_h: tl.int64, k_n: tl.int64, k_d: tl.int64,
    v_b: tl.int64, v_h: tl.int64, v_n: tl.int64, v_d: tl.int64,
    o_b: tl.int64, o_h: tl.int64, o_n: tl.int64, o_d: tl.int64,
    lse_b: tl.int64, lse_h: tl.int64,
    batch: tl.int32, heads: tl.int32, length_q: tl.int32, length_k: tl.int32, tiles: tl.int32,
    cu_q, cu_k, used_q, used_k,
    low, high, low_aligned, high_aligned, lows, highs,
    order, counts, list_b: tl.int64, list_h: tl.int64, blocks_k: tl.int64,
    scale: tl.float32, sink, seed, threshold: tl.int32, kept_scale: tl.float32,
    given,
    keep: tl.constexpr, change: tl.constexpr,
    GROUP: tl.constexpr, PACK: tl.constexpr, SCALED: tl.constexpr, SAME: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, LISTS: tl.constexpr, CAREFUL: tl.constexpr, EIGHTS: tl.constexpr,
    WIDE: tl.constexpr, VECTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Out and LSE. `heads` counts groups of PACK query heads; `tiles` the tiles of rows (slots, if packed).

    k_map, v_map: descriptors of key and value, which TMA reads then, or None.
    SAME: rows of value are as long, and lie as far apart, as those of key.

    With `unusual` there are two kernels: one that leaves 1 there if a sum is NaN, as 0 times what is not finite is,
    and behind it the CAREFUL one, which computes everything anew then and returns at once otherwise; see finite.py.
    """
    if CAREFUL:
        if tl.load(unusual) == 0:
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

    r = tl.arange(0, BQ)
    position = (first + r) // PACK
    exists = first + r < room_q * PACK
    row_first = first // PACK
    row_last = tl.minimum((first + BQ - 1) // PACK, length_q - 1)
    head = h * PACK
    within = (first + r) % PACK
    heads_of_rows = head.to(tl.int64) if PACK == 1 else (head + within).to(tl.int64)[:, None]
    from_row = 0 * row_first if PACK > 1 else row_first
    kv_head = head // GROUP

    q_offsets = offsets_of(position - from_row, within, q_h, q_n, q_d, BLOCK_D, PACK, WIDE, VECTOR)
    q_start = start_of(query, b, head, token_q + from_row, q_b, q_h, q_n, VECTOR)
    q = load_tile(q_start, q_offsets, position < length_q, True, D, BLOCK_D)
    columns = tl.arange(0, BK)
    k_offsets = offsets_of(columns, 0, k_h, k_n, k_d, BLOCK_D, 1, WIDE, VECTOR)
    if SAME:
        v_offsets = k_offsets
        v_n = k_n
    else:
        v_offsets = offsets_of(columns, 0, v_h, v_n, v_d, BLOCK_DV, 1, WIDE, VECTOR)
    k_start = start_of(key, b, kv_head, token_k, k_b, k_h, k_n, VECTOR)
    v_start = start_of(value, b, kv_head, token_k, v_b, v_h, v_n, VECTOR)

    m = tl.full([BQ], float("-inf"), tl.float32)
    l = tl.zeros([BQ], tl.float32)
    acc = tl.zeros([BQ, BLOCK_DV], tl.float32)
    sequence = b.to(tl.int64)
    begins, ends = range_of(position, position < length_q, least, most, length_k)
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
    dropout = (seed, threshold)
    if LOW or keep is not None:
        acc, m, l = attend(
            acc, m, l, q, keys, maps, rows, where, start, full_start, listed, scale, dropout, given, keep, change,
            D, DV, BLOCK_D, BLOCK_DV, BK, LISTS, True, SCALED, LOW, CAREFUL, EIGHTS, VECTOR, PRECISION,
        )  # fmt: skip
    if LISTS or keep is None:
        acc, m, l = attend(
            acc, m, l, q, keys, maps, rows, where, full_start, full_stop, listed, scale, dropout, given, None, change,
            D, DV, BLOCK_D, BLOCK_DV, BK, LISTS, False, SCALED, LOW, CAREFUL, EIGHTS, VECTOR, PRECISION,
        )  # fmt: skip
    if not LISTS:
        acc, m, l = attend(
            acc, m, l, q, keys, maps, rows, where, full_stop, stop, listed, scale, dropout, given, keep, change,
            D, DV, BLOCK_D, BLOCK_DV, BK, LISTS, True, SCALED, LOW, CAREFUL, EIGHTS, VECTOR, PRECISION,
        )  # fmt: skip

    if unusual is not None and not CAREFUL:
        checked = tl.sum(acc, 1)
        tl.store(unusual + 0 * r, 1, mask=checked != checked)
    # a row that saw a key has l >= 1, or NaN
    seen = (l != 0.0) & (position < length_q)
    if sink is not None:
        logit = tl.load(sink + head + within).to(tl.float32)
        if change is None:
            logit = logit * LOG2E
        top = tl.maximum(m, logit)
        top = tl.where(top == float("-inf"), 0.0, top)
        if change is None:
            kept = tl.exp2(m - top)
            l = l * kept + tl.exp2(logit - top)
        else:
            kept = tl.exp2((m - top) * LOG2E)
            l = l * kept + tl.exp2((logit - top) * LOG2E)
        acc = acc * kept[:, None]
        m = top
    total = tl.where(l == 0.0, 1.0, l)
    acc = tl.where(seen[:, None], acc * (1.0 / total)[:, None], 0.0)
    if seed is not None:
        acc = acc * kept_scale
    if change is None:
        m = m * LN2
    result = m + tl.log(total)
    result = tl.where((l == 0.0) | (position >= length_q), float("-inf"), result)
    lse_start = lse + sequence * lse_b + head.to(tl.int64) * lse_h + token_q.to(tl.int64)
    tl.store(lse_start + within.to(tl.int64) * lse_h + position, result, mask=exists)
    o_offsets = offsets_of(position - from_row, within, o_h, o_n, o_d, BLOCK_DV, PACK, WIDE, VECTOR)
    o_start = start_of(out, b, head, token_q + from_row, o_b, o_h, o_n, VECTOR)
    store_tile(o_start, o_offsets, exists, acc, DV, BLOCK_DV)


@triton.jit
def attend(
    acc, m, l, q, keys, maps, rows, where, begin, end, listed, scale, dropout, given,
    keep: tl.constexpr, change: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BK: tl.constexpr,
    LISTS: tl.constexpr, MASKED: tl.constexpr, SCALED: tl.constexpr, LOW: tl.constexpr, CAREFUL: tl.constexpr,
    EIGHTS: tl.constexpr, VECTOR: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The state of the rows after the columns [begin, end), or after these steps of a list.

    SCALED: scores are scaled one by one, as a scale that is not positive wants it.
    """
    k_start, v_start, k_offsets, v_offsets, k_n, v_n = keys
    k_map, v_map, b, kv_head = maps
    position, begins, ends = rows
    sequence, head, token_q, token_k, length_q, length_k = where
    seed, threshold = dropout
    columns = tl.arange(0, BK)
    i = position[:, None]
    for step in range(begin, end, 1 if LISTS else BK):
        if k_map is not None:
            acc = waited_for(acc)
        column = listed_column(listed, step, BK) if LISTS else multiple(step, BK, EIGHTS)
        inside = columns < length_k - column
        j = (column + columns)[None, :]
        if k_map is not None:
            k = k_map.load([b, kv_head, column, 0]).reshape([BK, BLOCK_D])
        else:
            k = load_tile(moved(k_start, column, k_n, VECTOR), k_offsets, inside, MASKED, D, BLOCK_D)
        s = multiply(q, tl.trans(k), None, PRECISION)  # (BQ, BK)
        if change is not None:
            near_i, near_j = nearest(i, length_q), nearest_column(j, length_k, EIGHTS)
            s = change(s * scale, near_i, near_j, where, given)
        elif SCALED:
            s = s * scale
        if MASKED:
            show = visible(j, begins[:, None], ends[:, None], LOW)
            if keep is not None:
                near_i, near_j = nearest(i, length_q), nearest_column(j, length_k, EIGHTS)
                show = show & keep(near_i, near_j, where, given)
            s = tl.where(show, s, float("-inf"))
        if change is None and not SCALED:
            # The maximum is scaled instead of every score, which is then scaled and shifted at once. What is hidden
            # stays at minus infinity, since the scale is positive.
            top = tl.maximum(m, tl.max(s, 1) * scale)
            shift = tl.where(top == float("-inf"), 0.0, top)
            p = tl.exp2(s * scale - shift[:, None])
        else:
            top = tl.maximum(m, tl.max(s, 1))
            shift = tl.where(top == float("-inf"), 0.0, top)
            if change is None:
                p = tl.exp2(s - shift[:, None])
            else:
                p = tl.exp2((s - shift[:, None]) * LOG2E)
        if change is None:
            kept = tl.exp2(m - shift)
        else:
            kept = tl.exp2((m - shift) * LOG2E)
        l = l * kept + tl.sum(p, 1)
        m = top
        acc = acc * kept[:, None]
        if seed is not None:
            p = tl.where(alive(seed, sequence, head, i, column, threshold, BK), p, 0.0)
        if v_map is not None:
            v = v_map.load([b, kv_head, column, 0]).reshape([BK, BLOCK_DV])
        else:
            v = load_tile(moved(v_start, column, v_n, VECTOR), v_offsets, inside, MASKED, DV, BLOCK_DV)
        if CAREFUL and (MASKED or change is not None):
            # what no row of the tile sees may hold anything
            v = tl.where((tl.max(s, 0) > float("-inf"))[:, None], v, 0.0).to(v.dtype)
        acc = multiply(p.to(v.dtype), v, acc, PRECISION)
    return acc, m, l


def forward(problem: Problem, query: Tensor, key: Tensor, value: Tensor, *, saves: bool) -> tuple[Tensor, Tensor]:
    """Out and LSE."""
    facts = (query.stride(), key.stride(), value.stride(), *conditions(problem))
    prepared = _PREPARED.of(problem).get(facts)
    with on_device(query.device):
        if prepared is not None and prepared.launch.kernels[-1] is forward_kernel and are_aligned(query, key, value):
            out, lse = prepared.results.empty(query)
            prepared.launch(query, key, value, out, lse, unusual_of(prepared.careful, query.device))
            return out, lse
        return _prepare(problem, query, key, value, facts)


def _prepare(
    problem: Problem, query: Tensor, key: Tensor, value: Tensor, facts: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    """Run a forward, and keep what later ones repeat."""
    results = Results.of(problem, query)
    out, lse = results.empty(query)
    if out.numel() == 0:
        return out, lse
    call, inputs = Call(problem), (query, key, value)
    query, key, value = call.readable(*inputs)
    launch = _launch(call, query, key, value, out)
    if are_aligned(*inputs) and all(a is b for a, b in zip(inputs, (query, key, value), strict=True)):
        _PREPARED.of(problem)[facts] = _Prepared(launch, results, call.careful)
    launch(query, key, value, out, lse, unusual_of(call.careful, query.device))
    return out, lse


@dataclass(frozen=True, eq=False, slots=True)
class _Prepared:
    """What forwards of one problem do whose tensors have certain strides, and start at aligned addresses."""

    launch: Launcher | Series
    results: Results
    careful: bool


_PREPARED: PerProblem[_Prepared] = PerProblem()


def _launch(call: Call, *tensors: Tensor) -> Launcher | Series:
    """The launch over (query, key, value, out, lse, unusual) for tensors with the strides of these, (query, key, value,
    out), which are aligned alike."""
    launchers = [_launcher(call, careful, *tensors) for careful in reversed(call.cares)]
    every = tuple(range(6))
    return launchers[0] if len(launchers) == 1 else Series(*((launcher, every) for launcher in launchers))


def _launcher(call: Call, careful: bool, *tensors: Tensor) -> Launcher:
    problem, tile = call.problem, call.tile(FORWARD)
    tiles, heads = call.count(problem.length_q, call.pack, tile.rows), problem.heads_q // call.pack
    programs = tiles * heads * (1 if call.packed else problem.batch)
    vector = call.vector(*tensors)
    rest = (
        *call.all_strides(vector, *tensors), *call.lse_strides, problem.batch, heads, problem.length_q,
        problem.length_k, tiles, *call.layout, *call.band.arguments, *call.lists_for(FORWARD), call.scale, call.sink,
        *call.dropout, call.given(call.semantics.reads),
    )  # fmt: skip
    key, value = tensors[1:3]
    same = problem.dim_qk == problem.dim_v and call.strides(key)[2:] == call.strides(value)[2:]
    constants = {
        "SAME": same, "keep": call.semantics.keep, "change": call.semantics.change, "PACK": call.pack,
        "SCALED": problem.scale <= 0, "WIDE": call.wide(*tensors),
    }  # fmt: skip
    maps = call.maps(tile, tile.columns, {1: key, 2: value})
    return Launcher(forward_kernel, programs, rest, constants | call.constants(tile, vector, careful), maps)
