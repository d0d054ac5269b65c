"""What the operators of the loop move and compute, tile by tile.

Counted are the products with their operands and results, the passes over tiles of scores, and what is read and written
of inputs, outputs and gradients. Tiles of scores lie in memory that is used over and over, which a cache may hold, so
the compulsory part leaves them out. Not counted are statistics of rows, masks while they are built, what scores read
beside the tile, their gradients, and the second run where a result is not finite.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from onchip.model.kernels import Kernel
from onchip.model.traffic import Traffic, total
from onchip.normal_form import Visit
from onchip.problem import Problem
from onchip.schedules.tiled.tiles import Group, Pieces
from onchip.scores import Softcap, steps
from onchip.segments import Segment, segments


@dataclass(frozen=True)
class Passes:
    """How often a walk reads and writes each of its tiles, beside the products.

    Attributes:
        score_loads, score_stores: of the tile of scores, which becomes weights.
        d_score_loads, d_score_stores: of the tile of their gradients, in the backward.
    """

    score_loads: int
    score_stores: int
    d_score_loads: int = 0
    d_score_stores: int = 0

    @property
    def operators(self) -> int:
        """Each reads one tile, at least, and most write it."""
        return self.score_loads + self.d_score_loads


def _changes(problem: Problem) -> int:
    """Passes over a tile for the steps of the scores: a softcap divides, takes tanh and multiplies."""
    return sum(3 if isinstance(step, Softcap) else 1 for step in steps(problem.scores))


def _passes(problem: Problem, backward: bool, partial: bool, alone: bool) -> Passes:
    """Of one piece of columns; `alone` if it is the only one that its rows see."""
    more = _changes(problem) + int(partial)
    dropout = int(problem.seed is not None)
    if not backward:
        # maximum, difference, base 2, exponential, sum
        return Passes(5 + more + dropout, 3 + more + dropout)
    # difference, base 2, exponential; or the softmax itself, with a maximum, a sum and a division
    loads, stores = (6, 4) if alone else (3, 3)
    # less delta; times the weights
    return Passes(loads + more + dropout, stores + more, 2 + dropout, 2 + dropout)


def kernels(problem: Problem, backward: bool, target: str | None) -> list[Kernel]:
    """The walk of a direction as one kernel of many operators. Reads lengths."""
    walk = _Walk(problem, backward)
    for segment in segments(problem):
        walk.add_segment(segment)
    return walk.kernels()


class _Walk:
    """Counts of one direction while segments are added."""

    def __init__(self, problem: Problem, backward: bool) -> None:
        self._problem, self._backward = problem, backward
        self._low = problem.dtype != problem.score_dtype
        self._width, self._wide = problem.dtype.itemsize, problem.score_dtype.itemsize
        self._requested: list[Traffic] = []
        self._compulsory: Counter[str] = Counter()
        self._pairs = self._launches = 0
        self._tile = (0, 0)

    def add_segment(self, segment: Segment) -> None:
        pieces = Pieces(self._problem, segment, False)
        sequences = 1 if segment.packed else segment.batch.stop - segment.batch.start
        groups = list(pieces.groups(sequences, self._backward))
        if not groups:
            return
        if self._tile == (0, 0):
            self._tile = (groups[0].rows, groups[0].columns)
        sizes = [
            (group.batch.stop - group.batch.start) * (group.key_heads.stop - group.key_heads.start) for group in groups
        ]
        if pieces.uniform:
            # every group walks over the same pieces
            self._add_groups(segment, pieces, groups[:1], [sum(sizes)], len(groups))
        else:
            self._add_groups(segment, pieces, groups, sizes, 1)

    def _add_groups(self, segment: Segment, pieces: Pieces, groups: list[Group], sizes: list[int], alike: int) -> None:
        """Add groups of `sizes` pairs (sequence, key head), each of them the sum over so many that are alike."""
        rows, columns = segment.rows.stop - segment.rows.start, segment.columns.stop - segment.columns.start
        for group, size in zip(groups, sizes, strict=True):
            seen = bytearray(columns)
            for start in range(0, rows, group.rows):
                part = slice(start, min(start + group.rows, rows))
                visits = pieces.visits(group, part)
                for visit in visits:
                    seen[visit.start : visit.stop] = b"\1" * (visit.stop - visit.start)
                self._add_rows(size, part.stop - part.start, visits, alike)
            # in low precision all keys of a group are widened
            touched = columns if self._low else sum(seen)
            self._add_inputs(size, rows, columns, touched)

    def _add_rows(self, size: int, height: int, visits: list[Visit], alike: int) -> None:
        problem, wide = self._problem, self._wide
        rows = size * problem.group * height
        for place, visit in enumerate(visits):
            width = visit.stop - visit.start
            passes = _passes(problem, self._backward, visit.partial, len(visits) == 1)
            scores, columns = rows * width, size * width
            products = self._products(rows, columns, scores, first=place == 0)
            self._requested.append(
                Traffic(
                    {"scores": passes.score_loads * scores * wide, "d_scores": passes.d_score_loads * scores * wide},
                    {"scores": passes.score_stores * scores * wide, "d_scores": passes.d_score_stores * scores * wide},
                    exponentials=scores,
                )
            )
            self._requested.append(products)
            self._pairs += scores
            self._launches += alike * (passes.operators + (5 if self._backward else 2))

    def _products(self, rows: int, columns: int, scores: int, first: bool) -> Traffic:
        """Operands and results of the products of one tile; sums are read unless they are the first."""
        dim, dim_v, wide = self._problem.dim_qk, self._problem.dim_v, self._wide
        q, k, v, o = rows * dim * wide, columns * dim * wide, columns * dim_v * wide, rows * dim_v * wide
        tile = scores * wide
        if not self._backward:
            loads = {"query": q, "key": k, "scores": tile, "value": v, "out": 0 if first else o}
            return Traffic(loads, {"scores": tile, "out": o}, flops=2 * scores * (dim + dim_v))
        # s = q k^T, dv = p^T do, dp = do v^T, dk = ds^T q, dq = ds k; dk and dv are read and written
        loads = {"query": 2 * q, "key": 2 * k, "value": v, "d_out": 2 * o, "scores": 2 * tile, "d_scores": 2 * tile}
        loads |= {"d_query": 0 if first else q, "d_key": k, "d_value": v}
        stores = {"scores": tile, "d_scores": tile, "d_query": q, "d_key": k, "d_value": v}
        return Traffic(loads, stores, flops=2 * scores * (3 * dim + 2 * dim_v))

    def _add_inputs(self, size: int, rows: int, columns: int, touched: int) -> None:
        """What is read of the inputs once: rows of queries, and columns that any row visits."""
        problem, width = self._problem, self._width
        per_row = {"query": problem.dim_qk * width}
        if self._backward:
            per_row |= {"d_out": problem.dim_v * width, "out": problem.dim_v * width, "lse": self._wide}
        for name, bytes_each in per_row.items():
            self._compulsory[name] += size * problem.group * rows * bytes_each
        for name, dim in (("key", problem.dim_qk), ("value", problem.dim_v)):
            self._compulsory[name] += size * touched * dim * width
            if self._low:
                moved = size * columns * dim
                self._requested.append(Traffic({name: moved * width}, {name: moved * self._wide}))

    def kernels(self) -> list[Kernel]:
        """The one kernel, or none if there is nothing to write."""
        problem = self._problem
        sequences = 1 if problem.layout == "packed" else problem.batch
        rows, columns = (
            sequences * heads * length
            for heads, length in ((problem.heads_q, problem.length_q), (problem.heads_kv, problem.length_k))
        )
        results = {"out": rows * problem.dim_v * self._width, "lse": rows * self._wide}
        if self._backward:
            results = {
                "d_query": rows * problem.dim_qk * self._width,
                "d_key": columns * problem.dim_qk * self._width,
                "d_value": columns * problem.dim_v * self._width,
            }
        if not any(results.values()):
            return []
        once = Traffic(dict(self._compulsory), results, sum(part.flops for part in self._requested), self._pairs)
        # rows are scaled and gradients summed in the dtype of scores; what is read and written besides is read once
        read = {name: size for name, size in self._compulsory.items() if name not in ("key", "value")}
        name = "backward" if self._backward else "forward"
        return [
            Kernel(
                name=name,
                requested=_without_zeros(total((*self._requested, Traffic(read, results)))),
                compulsory=_without_zeros(once),
                precision=str(problem.score_dtype).removeprefix("torch."),
                pairs=self._pairs,
                tile=self._tile,
                launches=max(1, self._launches),
            )
        ]


def _without_zeros(traffic: Traffic) -> Traffic:
    loads, stores = ({name: size for name, size in part.items() if size} for part in (traffic.loads, traffic.stores))
    return Traffic(loads, stores, traffic.flops, traffic.exponentials)
