"""Chunks of keys whose partial results are merged at the end, with a checkpointed backward.

Rabe and Staats 2021, "Self-attention Does Not Need O(n^2) Memory", section 3 and figure 1: for a chunk of
queries each chunk of keys gives a partial result (unnormalised output, maximum, sum), and these are merged when all are
there. The
gradient is that of the whole by automatic differentiation, with the chunks under a checkpoint: the merge is
differentiated first, which gives each chunk a gradient of its partial result, then every chunk is computed again.

The maximum of a chunk carries no gradient, as in the original. What its compiler fuses is not part of the model.
"""

from __future__ import annotations

import torch
from torch import Tensor

from onchip import softmax
from onchip.model.loops import steps
from onchip.model.loops.arrays import declare
from onchip.model.memory import Block, TwoLevelMemory
from onchip.model.shape import Blocks, Shape, count, cut


def forward(memory: TwoLevelMemory, shape: Shape, blocks: Blocks) -> None:
    """Partial results of every chunk, then O and the log-sum-exp."""
    chunks = count(shape.length_k, blocks.columns)
    declare(memory, shape, "partial_out", "partial_maximum", "partial_total", chunks=chunks)
    declare(memory, shape, "out", "lse")
    for rows in cut(shape.length_q, blocks.rows):
        query = memory.load("query", rows)
        for chunk, columns in enumerate(cut(shape.length_k, blocks.columns)):
            _summarize(memory, shape, query, columns, _rows_of(shape, chunk, rows))
        memory.free(query)
        _merge(memory, shape, rows, chunks)


def _rows_of(shape: Shape, chunk: int, rows: range) -> range:
    """Where the partial result of some rows lies: chunk after chunk."""
    return range(chunk * shape.length_q + rows.start, chunk * shape.length_q + rows.stop)


def _summarize(memory: TwoLevelMemory, shape: Shape, query: Block, columns: range, place: range) -> None:
    key = memory.load("key", columns)
    s = memory.product(query, key, transpose_right=True, scale=shape.scale)
    memory.free(key)
    maximum, total = memory.constant(s.rows, 1, 0.0), memory.constant(s.rows, 1, 0.0)

    def exponentiate(s: Tensor, maximum: Tensor, total: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        maximum = s.amax(-1, keepdim=True)
        p = torch.exp(s - maximum)
        return p, maximum, p.sum(-1, keepdim=True)

    memory.change((s, maximum, total), exponentiate, exponentials=s.elements)
    value = memory.load("value", columns)
    out = memory.product(s, value)
    memory.free(s, value)
    for name, block in (("partial_out", out), ("partial_maximum", maximum), ("partial_total", total)):
        memory.store(name, block, place)
        memory.free(block)


def _merge(memory: TwoLevelMemory, shape: Shape, rows: range, chunks: int) -> None:
    state = [memory.constant(len(rows), size, start) for size, start in ((shape.dim_v, 0.0), (1, -torch.inf), (1, 0.0))]

    def merge(*parts: Tensor) -> tuple[Tensor, ...]:
        return softmax.merge(softmax.State(*parts[:3]), softmax.State(*parts[3:]))

    def finish(*parts: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = softmax.finish(softmax.State(*parts))
        return out, lse[..., None]

    for chunk in range(chunks):
        place = _rows_of(shape, chunk, rows)
        part = [memory.load(name, place) for name in ("partial_out", "partial_maximum", "partial_total")]
        memory.change(state, merge, *part, exponentials=2 * len(rows))
        memory.free(*part)
    out, lse, total = state
    memory.change((out, lse), finish, total)
    memory.store("out", out, rows)
    memory.store("lse", lse, rows)
    memory.free(*state)


def backward(memory: TwoLevelMemory, shape: Shape, blocks: Blocks) -> None:
    """The gradient of the merge, then of every chunk, whose parts of dK and dV are added up in slow memory."""
    chunks = count(shape.length_k, blocks.columns)
    declare(memory, shape, "d_partial_out", "d_partial_total", chunks=chunks)
    declare(memory, shape, "d_query", "d_key", "d_value")
    memory.store_constant("d_key", 0.0)
    memory.store_constant("d_value", 0.0)
    for rows in cut(shape.length_q, blocks.rows):
        _differentiate_merge(memory, shape, rows, chunks)
        query = memory.load("query", rows)
        d_query = memory.constant(query.rows, query.columns, 0.0)
        for chunk, columns in enumerate(cut(shape.length_k, blocks.columns)):
            _differentiate_chunk(memory, shape, query, d_query, columns, _rows_of(shape, chunk, rows))
        memory.store("d_query", d_query, rows)
        memory.free(query, d_query)


def _differentiate_merge(memory: TwoLevelMemory, shape: Shape, rows: range, chunks: int) -> None:
    """A chunk's part of the output is exp(m - lse) times its partial output: the gradients follow from that."""
    out, d_out = memory.load("out", rows), memory.load("d_out", rows)
    delta = memory.constant(len(rows), 1, 0.0)
    memory.change(delta, lambda _, out, d_out: steps.delta(out, d_out), out, d_out)
    memory.free(out)
    lse = memory.load("lse", rows)

    def gradients(maximum: Tensor, _: Tensor, lse: Tensor, d_out: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        factor = torch.exp(maximum - lse)
        return -factor * delta, factor * d_out

    for chunk in range(chunks):
        place = _rows_of(shape, chunk, rows)
        maximum = memory.load("partial_maximum", place)
        d_partial = memory.constant(len(rows), shape.dim_v, 0.0)
        memory.change((maximum, d_partial), gradients, lse, d_out, delta, exponentials=len(rows))
        memory.store("d_partial_total", maximum, place)
        memory.store("d_partial_out", d_partial, place)
        memory.free(maximum, d_partial)
    memory.free(d_out, delta, lse)


def _differentiate_chunk(
    memory: TwoLevelMemory, shape: Shape, query: Block, d_query: Block, columns: range, place: range
) -> None:
    key = memory.load("key", columns)
    s = memory.product(query, key, transpose_right=True, scale=shape.scale)
    memory.change(s, lambda s: torch.exp(s - s.amax(-1, keepdim=True)), exponentials=s.elements)
    d_out, d_total = memory.load("d_partial_out", place), memory.load("d_partial_total", place)
    d_value = memory.load("d_value", columns)
    memory.add_product(d_value, s, d_out, transpose_left=True)
    memory.store("d_value", d_value, columns)
    memory.free(d_value)
    value = memory.load("value", columns)
    ds = memory.product(d_out, value, transpose_right=True)
    memory.change(ds, lambda dp, p, d_total: p * (dp + d_total), s, d_total)
    memory.free(value, s, d_out, d_total)
    memory.add_product(d_query, ds, key, scale=shape.scale)
    memory.free(key)
    d_key = memory.load("d_key", columns)
    memory.add_product(d_key, ds, query, transpose_left=True, scale=shape.scale)
    memory.store("d_key", d_key, columns)
    memory.free(d_key, ds)
