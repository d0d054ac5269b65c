"""What the kernel reads and writes, tile by tile, block by block.

Counted are its inputs and outputs as its loops take them (rows outside, columns inside, each head on its own), and
inputs that are widened or scaled before. The kernel's own tile of scores, of each thread, is left out: it is small
enough for a cache. A call without gradients is assumed in the forward, and no gradient of the LSE in the backward.
"""

from __future__ import annotations

from collections import Counter

import torch

from onchip.choices import has_bfloat16_tiles
from onchip.model.kernels import Kernel
from onchip.model.traffic import Traffic
from onchip.problem import Problem
from onchip.schedules.aten.tiles import Block, blocks, scales_exactly, tiles
from onchip.segments import segments


def kernels(problem: Problem, backward: bool, target: str | None) -> list[Kernel]:
    """A direction as one kernel that is started for each block. Reads lengths."""
    counts = _Counts(problem, backward)
    for number, segment in enumerate(segments(problem)):
        for block in blocks(problem, segment):
            counts.add(number, block)
    return counts.kernels()


class _Counts:
    """Counts of one direction while blocks are added."""

    def __init__(self, problem: Problem, backward: bool) -> None:
        self._problem, self._backward = problem, backward
        native = problem.dtype == torch.bfloat16 and not problem.gives_lse and has_bfloat16_tiles()
        self._dtype = problem.dtype if backward or native else problem.score_dtype
        self._dim = max(problem.dim_qk, problem.dim_v)
        self._tile = tiles(problem)
        self._loads: Counter[str] = Counter()
        self._stores: Counter[str] = Counter()
        self._once: Counter[str] = Counter()
        self._columns: dict[tuple[int, int, int], bytearray] = {}
        self._masks: dict[int, int] = {}
        self._pairs = self._launches = 0

    def add(self, segment: int, block: Block) -> None:
        problem, width = self._problem, self._dtype.itemsize
        sequences = block.batch.stop - block.batch.start
        rows, columns = block.rows.stop - block.rows.start, block.columns.stop - block.columns.start
        heads, heads_kv = sequences * problem.heads_q, sequences * problem.heads_kv
        if columns == 0:
            return
        self._launches += 1
        self._prepare(heads * rows, heads_kv * columns)
        area = walked = 0
        for first in range(0, rows, self._tile[0]):
            height = min(self._tile[0], rows - first)
            reach = min(first + height, columns) if block.causal else columns
            area, walked = area + height * reach, walked + reach
        pairs, line = heads * area, self._dim * width
        self._once_each(segment, block, heads * rows, min(rows, columns) if block.causal else columns)
        self._pairs += pairs
        row_names = ("query", "d_out", "out") if self._backward else ("query",)
        for name in row_names:
            self._loads[name] += heads * rows * line
        for name in ("key", "value"):
            self._loads[name] += heads * walked * line
        if block.added is not None:
            self._loads["mask"] += pairs * block.added.element_size()
            self._masks[id(block.added)] = block.added.numel() * block.added.element_size()
        if not self._backward:
            self._stores["out"] += heads * rows * line
            self._stores["lse"] += heads * rows * 4
            return
        self._loads["lse"] += heads * rows * 4
        # sums of a tile are read and written for every tile of scores
        columns_of_tiles = -(-columns // self._tile[1])
        for name, moved in (
            ("d_query", heads * rows * columns_of_tiles),
            ("d_key", heads * walked),
            ("d_value", heads * walked),
        ):
            self._loads[name] += moved * line
            self._stores[name] += moved * line

    def _once_each(self, segment: int, block: Block, rows: int, columns: int) -> None:
        """Rows and columns that the block touches; other blocks have other rows, and maybe the same columns."""
        problem, width = self._problem, self._problem.dtype.itemsize
        seen = self._columns.setdefault((segment, block.batch.start, block.batch.stop), bytearray())
        stop = block.columns.start + columns
        seen.extend(bytes(max(0, stop - len(seen))))
        seen[block.columns.start : stop] = b"\1" * columns
        self._once["query"] += rows * problem.dim_qk * width
        if self._backward:
            self._once["d_out"] += rows * problem.dim_v * width
            self._once["out"] += rows * problem.dim_v * width
            self._once["lse"] += rows * 4

    def _prepare(self, rows: int, columns: int) -> None:
        """Copies of inputs in another dtype, scaled, or with zeros up to one head dim."""
        problem, before, after = self._problem, self._problem.dtype.itemsize, self._dtype.itemsize
        scaled = self._backward and not scales_exactly(problem.scale)
        for name, count, dim in (
            ("query", rows, problem.dim_qk),
            ("key", columns, problem.dim_qk),
            ("value", columns, problem.dim_v),
        ):
            if self._dtype != problem.dtype or (scaled and name == "query"):
                self._loads[name] += count * dim * before
                self._stores[name] += count * dim * after
                self._launches += 1
            if dim < self._dim:
                self._loads[name] += count * dim * after
                self._stores[name] += count * self._dim * after
                self._launches += 1

    def kernels(self) -> list[Kernel]:
        """The one kernel, or none if there is nothing to write."""
        problem, width = self._problem, self._problem.dtype.itemsize
        sequences = 1 if problem.layout == "packed" else problem.batch
        rows, columns = sequences * problem.heads_q * problem.length_q, sequences * problem.heads_kv * problem.length_k
        results = {"out": rows * problem.dim_v * width, "lse": rows * 4}
        products = (1, 1)
        if self._backward:
            products = (3, 2)
            results = {"d_query": rows * problem.dim_qk * width, "d_key": columns * problem.dim_qk * width,
                       "d_value": columns * problem.dim_v * width}  # fmt: skip
        if not any(results.values()):
            return []
        once = dict(self._once)
        touched = sum((stop - start) * sum(seen) for (_, start, stop), seen in self._columns.items()) * problem.heads_kv
        once |= {"key": touched * problem.dim_qk * width, "value": touched * problem.dim_v * width}
        if self._masks:
            once["mask"] = sum(self._masks.values())
        needed = 2 * self._pairs * (products[0] * problem.dim_qk + products[1] * problem.dim_v)
        executed = 2 * self._pairs * sum(products) * self._dim
        return [
            Kernel(
                name="backward" if self._backward else "forward",
                requested=Traffic(dict(self._loads), dict(self._stores), executed, self._pairs),
                compulsory=Traffic(once, results, needed, self._pairs),
                precision=str(self._dtype).removeprefix("torch."),
                pairs=self._pairs,
                tile=self._tile,
                launches=max(1, self._launches),
            )
        ]
