"""The problem that the IO model counts, and how a loop nest cuts it into blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Attention without mask and dropout over `batch * heads` independent heads.

    Attributes:
        length_q, length_k: rows of query and out, rows of key and value.
        dim, dim_v: columns of query and key, columns of value and out.
        element_bytes: size of an element of the tensors and of every (length_q, length_k) matrix.
        statistic_bytes: size of an element of the softmax statistics, which are kept in higher precision.

    Raises:
        ValueError: a size is below what it can be.
    """

    batch: int
    heads: int
    length_q: int
    length_k: int
    dim: int
    dim_v: int
    element_bytes: int = 2
    statistic_bytes: int = 4

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            least = 0 if field.name in ("batch", "heads", "length_q", "length_k") else 1
            if getattr(self, field.name) < least:
                raise ValueError(f"{field.name} must be at least {least}, got {getattr(self, field.name)}")

    @property
    def copies(self) -> int:
        """How many heads run the same program on data of their own."""
        return self.batch * self.heads

    @property
    def scale(self) -> float:
        """What a dot product of query and key is multiplied by."""
        return self.dim**-0.5

    @property
    def matrix_bytes(self) -> int:
        """Bytes of one (length_q, length_k) matrix of every head: one S-sized move."""
        return self.copies * self.length_q * self.length_k * self.element_bytes


@dataclass(frozen=True, slots=True)
class Blocks:
    """How many rows (of the query) and columns (of scores, that is keys) a block has.

    Attributes:
        visited: pairs (row block, column block) that a block-sparse nest computes; None visits all.

    Raises:
        ValueError: a block is empty.
    """

    rows: int
    columns: int
    visited: frozenset[tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        if self.rows < 1 or self.columns < 1:
            raise ValueError(f"a block has at least one row and one column, got {self.rows} and {self.columns}")

    def visits(self, row_block: int, column_block: int) -> bool:
        """Whether a block-sparse nest computes this block of scores."""
        return self.visited is None or (row_block, column_block) in self.visited


def cut(length: int, size: int) -> Iterator[range]:
    """The blocks of `length` rows, each of `size` except perhaps the last."""
    for start in range(0, length, size):
        yield range(start, min(start + size, length))


def count(length: int, size: int) -> int:
    """How many blocks `cut` gives."""
    return -(-length // size)
