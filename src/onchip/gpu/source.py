"""What a mask and scores mean, as Triton source: the one place where a problem's semantics enter the kernels.

A kernel takes up to three functions as constants and one tuple `given` of what they read:

    keep(i, j, where, given)                   which pairs are visible
    change(s, i, j, where, given)              the score after every step
    differentiate(g, s, i, j, where, given)    the gradient of the score before the steps; s is that score

`where` is (b, h, token_q, token_k, length_q, length_k): the sequence and the query head (int64), the sequence's first
tokens and its lengths. i, j and h have any shapes that broadcast against each other. Source depends on structure alone
(the spec of onchip/lowering.py, and which tensors lie densely along their columns, or in eights), so equal structures
share kernels, in this process and on disk. Triton compiles a kernel anew for an int that becomes 1 or a multiple of 16,
so ints travel as odd numbers beyond 2**40 (`coded`, `decoded`).
"""

from __future__ import annotations

import hashlib
import linecache
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import triton
import triton.language as tl

from onchip.lowering import Node

CODE = 2**40 + 1


def coded(value: int) -> int:
    """An int as `given` holds it."""
    return 2 * value + CODE


def decoded(slot: int) -> str:
    """The expression that reads an int of `given`, int64."""
    return f"((given[{slot}] - {CODE}) // 2)"


ARGUMENTS = "i, j, where, given"

Reads = tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Semantics:
    """Functions of one structure, and what `given` holds for them.

    `reads` lists ("tensor", place, role), ("integer", place) and ("real", place): places in the problem's lowered
    lists. A role says which strides follow the pointer: "pair", "head", "row", "column", and of what is read in vectors
    "pair in eights" and "column in eights".
    `hides` says that a step may give minus infinity, `eights` that columns have to come in eights, see `Emitter`.
    """

    keep: Any
    change: Any
    differentiate: Any
    reads: Reads
    hides: bool
    eights: bool


class Emitter:
    """Writes expressions and remembers what they read.

    Args:
        dense: places of tensors whose last stride is 1.
        pairs, columns: places of those that are read in vectors, with an entry for each pair or each column. Their
            other strides are multiples of 8, and so is the number of their columns, of which j names eight in a row,
            from a multiple of 8 on. Strides are counted in eights, so that the compiler knows as much.
    """

    def __init__(
        self,
        packed: bool,
        dense: frozenset[int] = frozenset(),
        pairs: frozenset[int] = frozenset(),
        columns: frozenset[int] = frozenset(),
    ) -> None:
        self._packed, self._dense, self._pairs, self._columns = packed, dense, pairs, columns
        self.reads: list[tuple[Any, ...]] = []
        self._slots: dict[tuple[Any, ...], int] = {}
        self._count = 0

    def _slot(self, read: tuple[Any, ...], width: int) -> int:
        if read not in self._slots:
            self._slots[read] = self._count
            self.reads.append(read)
            self._count += width
        return self._slots[read]

    def integer(self, place: int) -> str:
        return f"{decoded(self._slot(('integer', place), 1))}.to(tl.int32)"

    def real(self, place: int) -> str:
        return f"given[{self._slot(('real', place), 1)}]"

    def head(self, place: int) -> str:
        slot = self._slot(("tensor", place, "head"), 3)
        return f"tl.load(given[{slot}] + b * {decoded(slot + 1)} + h * {decoded(slot + 2)})"

    def sequence(self, place: int) -> str:
        slot = self._slot(("tensor", place, "head"), 3)
        return f"tl.load(given[{slot}] + b * {decoded(slot + 2)})"

    def row(self, place: int) -> str:
        slot = self._slot(("tensor", place, "row"), 3)
        return f"tl.load(given[{slot}] + b * {decoded(slot + 1)} + (token_q + i).to(tl.int64) * {decoded(slot + 2)})"

    def column(self, place: int) -> str:
        if place in self._columns:
            slot = self._slot(("tensor", place, "column in eights"), 2)
            return f"tl.load(given[{slot}] + b * {decoded(slot + 1)} * 8 + j)"
        slot = self._slot(("tensor", place, "column"), 3)
        return f"tl.load(given[{slot}] + b * {decoded(slot + 1)} + (token_k + j).to(tl.int64) * {decoded(slot + 2)})"

    def pair(self, place: int) -> str:
        if place not in self._pairs:
            return self.entry(place, "i", "j")
        slot = self._slot(("tensor", place, "pair in eights"), 4)
        b, h, q = (decoded(slot + n) for n in range(1, 4))
        return f"tl.load(given[{slot}] + (b * {b} + h * {h} + i.to(tl.int64) * {q}) * 8 + j)"

    def entry(self, place: int, i: str, j: str) -> str:
        slot = self._slot(("tensor", place, "pair"), 7)
        b, h, q, k, rows, columns = (decoded(slot + n) for n in range(1, 7))
        if self._packed:
            # as long as the longest sequence, which only the device knows
            i, j = f"tl.minimum({i}, {rows} - 1)", f"tl.minimum({j}, {columns} - 1)"
        j = j if place in self._dense else f"({j}).to(tl.int64) * {k}"
        return f"tl.load(given[{slot}] + (b * {b} + h * {h}) + ({i}).to(tl.int64) * {q} + {j})"

    def offset(self, diagonal: Node) -> str:
        if diagonal == "bottom-right":
            return "(length_k - length_q)"
        if diagonal == "top-left":
            return "0"
        kind, place = diagonal
        return f"{self.sequence(place)}.to(tl.int32)" if kind == "tensor" else self.integer(place)

    # Masks

    def mask(self, node: Node) -> str:
        return getattr(self, f"_{node[0]}")(*node[1:])

    def _and(self, *nodes: Node) -> str:
        return "(" + " & ".join(self.mask(node) for node in nodes) + ")"

    def _or(self, *nodes: Node) -> str:
        return "(" + " | ".join(self.mask(node) for node in nodes) + ")"

    def _not(self, node: Node) -> str:
        return f"({self.mask(node)} == 0)"

    def _band(self, left: int | None, right: int | None, diagonal: Node) -> str:
        distance = f"(j - i - {self.offset(diagonal)})"
        sides = [] if left is None else [f"({distance} >= -{self.integer(left)})"]
        sides += [] if right is None else [f"({distance} <= {self.integer(right)})"]
        return "(" + " & ".join(sides or ["(i + j >= 0)"]) + ")"

    def _keys(self, kept: int) -> str:
        return f"({self.column(kept)} != 0)"

    def _documents(self, query_ids: int, key_ids: int) -> str:
        return f"({self.row(query_ids)} == {self.column(key_ids)})"

    def _blocks(self, kept: int, size_q: int, size_k: int) -> str:
        return f"({self.entry(kept, f'(i // {self.integer(size_q)})', f'(j // {self.integer(size_k)})')} != 0)"

    def _tensor(self, kept: int) -> str:
        return f"({self.pair(kept)} != 0)"

    # Scores

    def steps(self, nodes: tuple[Node, ...]) -> list[str]:
        """Statements that turn s into the score after the steps."""
        lines = []
        for kind, *rest in nodes:
            if kind == "softcap":
                lines.append(f"s = capped(s, {self.real(rest[0])})")
            elif kind == "alibi":
                slopes, diagonal = rest
                distance = f"tl.abs(i + {self.offset(diagonal)} - j).to(tl.float32)"
                lines.append(f"s = s - {self.head(slopes)}.to(tl.float32) * {distance}")
            elif kind == "bias":
                lines += [
                    f"t = {self.pair(rest[0])}.to(tl.float32)",
                    "s = tl.where(t == float('-inf'), t, s + t)",
                ]
        return lines


def over_columns(mask: Node, scores: tuple[Node, ...]) -> tuple[frozenset[int], frozenset[int]]:
    """Places of tensors with an entry for each pair, and of those with one for each column."""
    pairs: set[int] = {rest[0] for kind, *rest in scores if kind == "bias"}
    columns: set[int] = set()
    waiting = [] if mask is None else [mask]
    while waiting:
        kind, *rest = waiting.pop()
        if kind in ("and", "or", "not"):
            waiting += rest
        elif kind == "tensor":
            pairs.add(rest[0])
        elif kind in ("keys", "documents"):
            columns.add(rest[-1])
    return frozenset(pairs), frozenset(columns)


@lru_cache(maxsize=1024)
def semantics(
    mask: Node,
    scores: tuple[Node, ...],
    packed: bool,
    dense: frozenset[int],
    pairs: frozenset[int],
    columns: frozenset[int],
    capped: Any,
    capped_slope: Any,
) -> Semantics:
    """The functions of a residual mask (a node of a spec, or None) and of score steps in order, without a sink.

    `dense`, `pairs` and `columns` are as for `Emitter`. `capped` is the jitted softcap of a score, `capped_slope` its
    derivative.
    """
    emitter = Emitter(packed, dense, pairs, columns)
    keep = None if mask is None else _function("keep", ARGUMENTS, [f"return {emitter.mask(mask)}"])
    steps = [*emitter.steps(scores), "return s"]
    change = None if not scores else _function("change", f"s, {ARGUMENTS}", steps, capped=capped)
    # every other step adds a term
    slopes = [f"g = g * capped_slope(s, {emitter.real(rest[0])})" for kind, *rest in scores if kind == "softcap"]
    differentiate = None
    if slopes:
        body = [*slopes, "return g"]
        differentiate = _function("differentiate", f"g, s, {ARGUMENTS}", body, capped_slope=capped_slope)
    reads = tuple(emitter.reads)
    hides = any(kind in ("bias", "modify") for kind, *_ in scores)
    eights = any(str(read[-1]).endswith("in eights") for read in reads)
    return Semantics(keep, change, differentiate, reads, hides, eights)


@lru_cache(maxsize=1024)
def distance(diagonal: Node, packed: bool) -> tuple[Any, Reads]:
    """The derivative of an ALiBi step by its slope, as a function of the pair."""
    emitter = Emitter(packed)
    body = f"return -tl.abs(i + {emitter.offset(diagonal)} - j).to(tl.float32)"
    return _function("distance", ARGUMENTS, [body]), tuple(emitter.reads)


def _function(name: str, arguments: str, lines: list[str], **beside: Any) -> Any:
    """A jitted function of generated source, under a file name that tracebacks and the compiler find."""
    lines = ["b, h, token_q, token_k, length_q, length_k = where", *lines]
    source = f"def {name}({arguments}):\n" + "".join(f"    {line}\n" for line in lines)
    file = f"<onchip {name} {hashlib.sha256(source.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    scope = {"tl": tl, "__name__": __name__} | beside
    exec(compile(source, file, "exec"), scope)
    return triton.jit(scope[name])
