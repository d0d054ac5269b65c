"""What each kernel moves and computes, tile by tile.

Counted as programs ask for it: a tile of query, key, value, out and their gradients by its rows that exist; of a bias
or a mask each entry once for each tile of scores that it is read for, in a tile of the lists of blocks their entries.
Not counted are the few numbers that a program reads beside (offsets, lengths, diagonals, sinks, the seed), what
building the lists takes, copies of tensors that the kernels cannot read well, and the gradient of a sink, which is
linear in the rows.
"""

from __future__ import annotations

import torch

from onchip.gpu import FORWARD, GRADIENT, KEYS
from onchip.gpu.call import Call, power_of_two, precision_of
from onchip.gpu.sides import Side, sides_of
from onchip.gpu.walk import Axis, ListVisits, Walk
from onchip.model.kernels import Kernel
from onchip.model.traffic import Traffic
from onchip.problem import Problem
from onchip.scores import Softcap


class Counts:
    """Counts of one kernel while its walks are added up.

    Args:
        heads: query heads that visit tiles on their own (groups of packed ones count once).
    """

    def __init__(self, call: Call, kernel: str, heads: int) -> None:
        self.call, self.problem, self.heads = call, call.problem, heads
        self.tile, self.walks = call.tile(kernel), call.walks(kernel)
        self.tile_source = call.tile_source(kernel)
        self.turned, self.pack = kernel == KEYS, call.problem.heads_q // heads
        self.listed = call.lists and kernel != GRADIENT
        self.width = call.problem.dtype.itemsize
        self.loads: dict[str, int] = {}
        self.stores: dict[str, int] = {}
        self.least: dict[str, int] = {}

    @property
    def steps(self) -> int:
        """Tiles of scores that are computed."""
        return self._over(False, False)

    @property
    def others_loaded(self) -> int:
        """Rows of the other axis that are loaded, of all tiles of scores."""
        return self._over(False, True)

    @property
    def own_loaded(self) -> int:
        """Rows of the own axis that are loaded where every tile of scores loads them anew."""
        return self._over(True, False)

    @property
    def pairs(self) -> int:
        """Pairs in the tiles of scores."""
        return self._over(True, True)

    def _over(self, rows_of_own: bool, rows_of_other: bool) -> int:
        """The sum over every visit of every head, of 1 or of the rows that exist along an axis."""
        total = 0
        for walk in self.walks:
            own = walk.own.exists if rows_of_own else walk.own.ones
            other = walk.other.exists if rows_of_other else walk.other.ones
            once = walk.sequences * walk.visits.weigh(own, other)
            total += once * self.call.repeats(walk.visits, self.heads)
        return total

    def others_touched(self, group: int, whole: bool = False) -> int:
        """Rows of the other axis that any of `group` query heads visits, over all groups; of whole tiles if `whole`."""
        groups = self.problem.heads_q // group
        return sum(
            walk.sequences
            * walk.visits.covered(None, walk.other.whole if whole else walk.other.exists, group)
            * self.call.repeats(walk.visits, groups)
            for walk in self.walks
        )

    def own_touched(self) -> int:
        """Rows of the own axis that visit anything, over all heads."""
        return sum(
            walk.sequences * walk.visits.covered(walk.own.exists, None, 1) * self.call.repeats(walk.visits, self.heads)
            for walk in self.walks
        )

    def owned(self) -> int:
        """Rows that exist along the own axis, over the sequences."""
        return sum(walk.sequences * int(walk.own.exists.sum()) for walk in self.walks)

    def add(self, name: str, row_bytes: int, loaded: int, touched: int) -> None:
        """Rows of a tensor that programs load, and those that they touch at all."""
        self.loads[name] = self.loads.get(name, 0) + row_bytes * loaded
        self.least[name] = self.least.get(name, 0) + row_bytes * touched

    def add_sides(self, masked_everywhere: bool = False) -> None:
        """Tensors of masks and scores.

        Args:
            masked_everywhere: masks are evaluated in every tile, not only where a list says that something may hide.
        """
        touched: dict[tuple[str, int], int] = {}
        for side in sides_of(self.call):
            partial = side.masks and self.listed and not masked_everywhere
            size, place = side.tensor.element_size(), (side.name, id(side.tensor))
            self.add(side.name, size, self._requested(side, partial), 0)
            # a tensor that is read in two ways is touched once
            touched[place] = max(touched.get(place, 0), size * self._compulsory(side, partial))
        for (name, _), least in touched.items():
            self.add(name, least, 0, 1)

    def _axes(self, walk: Walk) -> tuple[Axis, Axis]:
        return (walk.other, walk.own) if self.turned else (walk.own, walk.other)

    def _requested(self, side: Side, partial: bool) -> int:
        _, head, row, column = side.varies
        count = 0
        for walk in self.walks:
            rows, columns = self._axes(walk)
            of_columns = columns.distinct(column, False, side.sizes[1], self.call.semantics.eights)
            measures = rows.distinct(row, head, side.sizes[0]), of_columns
            own, other = measures[::-1] if self.turned else measures
            once = walk.sequences * walk.visits.weigh(own, other, partial)
            count += once * self.call.repeats(walk.visits, self.heads)
        return count

    def _compulsory(self, side: Side, partial: bool) -> int:
        """Entries that are read at all, or fewer.

        What sequences share counts for that one of them which reads the most; an entry that stands for many pairs, or
        that packed heads share, counts where the tile of its first pair is visited.
        """
        sequence, head, row, column = side.varies
        found = [0]
        for walk in self.walks:
            rows, columns = self._axes(walk)
            # of packed heads each has rows of its own
            apart = self.pack if head and (not row or side.sizes[0] > 1) else 1
            of_rows = rows.exists if head and side.sizes[0] == 1 else rows.begins(side.sizes[0])
            measures = of_rows if row else None, columns.begins(side.sizes[1]) if column else None
            own, other = measures[::-1] if self.turned else measures
            groups = self.heads if head else 1
            once = walk.visits.covered(own, other, self.heads // groups, partial)
            once *= self.call.repeats(walk.visits, groups) * apart
            found.append(once * (walk.sequences if sequence else 1))
        return sum(found) if sequence else max(found)

    def add_lists(self, programs: int) -> None:
        """Of the lists of blocks: how many there are, for each program and query head, and one number for each step."""
        if self.listed:
            entries = sum(walk.visits.entries for walk in self.walks if isinstance(walk.visits, ListVisits))
            self.add("lists", 4, 2 * programs + self.steps, entries)

    def kernel(self, name: str, products: tuple[int, int], exponentials: int) -> Kernel:
        """The record.

        Args:
            products: how many products of a tile run over the head dim of query and key, and over that of value.
            exponentials: evaluations in all.
        """
        problem, tile = self.problem, self.tile
        pairs = self.pairs
        wide, wide_v = power_of_two(problem.dim_qk), power_of_two(problem.dim_v)
        executed = 2 * self.steps * tile.rows * tile.columns * (products[0] * wide + products[1] * wide_v)
        needed = 2 * pairs * (products[0] * problem.dim_qk + products[1] * problem.dim_v)
        return Kernel(
            name=name,
            requested=Traffic(self.loads, self.stores, executed, exponentials),
            compulsory=Traffic(self.least, self.stores, needed, pairs),
            precision=_precision(problem, self.call.target),
            pairs=pairs,
            tile=(tile.rows, tile.columns),
            tile_source=self.tile_source,
        )


def _precision(problem: Problem, target: str) -> str:
    how = precision_of(problem.dtype, target)
    if problem.dtype != torch.float32:
        return str(problem.dtype).removeprefix("torch.")
    return "float32" if how == "ieee" else how


def slots(call: Call, rooms: list[int], tokens: int, pack: int, rows: int) -> int:
    """Tiles of rows for each head that do not return at once, over all sequences."""
    # what lies behind the last offset is one more sequence
    rooms = [*rooms, tokens - sum(rooms)] if call.packed else rooms
    return sum(-(-room * pack // rows) for room in rooms)


def softcaps(problem: Problem) -> int:
    return sum(isinstance(score, Softcap) for score in problem.scores)


def forward_kernel(call: Call, rows: int) -> Kernel:
    problem = call.problem
    counts = Counts(call, FORWARD, problem.heads_q // call.pack)
    tile, width = counts.tile, counts.width
    owned, loaded = counts.owned() * counts.heads, counts.others_loaded
    touched = counts.others_touched(problem.group)
    programs = slots(call, call.rooms()[0], problem.length_q, call.pack, tile.rows) * counts.heads
    counts.add("query", problem.dim_qk * width, owned, owned)
    counts.add("key", problem.dim_qk * width, loaded, touched)
    counts.add("value", problem.dim_v * width, loaded, touched)
    counts.add_sides()
    counts.add_lists(programs)
    counts.stores |= {"out": rows * problem.dim_v * width, "lse": 4 * rows}
    # the rescaling of each row is one more
    each = tile.rows * (tile.columns * (1 + softcaps(problem)) + 1)
    sink = 0 if call.sink is None else 2 * tile.rows * programs
    return counts.kernel(FORWARD, (1, 1), counts.steps * each + sink)
