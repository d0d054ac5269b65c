"""Sets of pairs, and distances of a key from a query, as the mask functions of transformers compute with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onchip import masks
from onchip.masks import Mask

Shift = int | Tensor


class Unread(Exception):
    """A mask function does something that has no symbol."""


@dataclass(frozen=True)
class Axes:
    """What the indices of a mask function run over.

    Attributes:
        batch: number of sequences.
        lengths: (queries, keys) of the call.
        starts: the token that is the first query, and the first key; ints, or int tensors of one element.
        device: where ids are to be made.
        packed: position ids that are read together with documents count the tokens of each document (transformers finds
            its documents by them), so that their differences within a document are those of the indices.
    """

    batch: int
    lengths: tuple[int, int]
    starts: tuple[Shift, Shift]
    device: torch.device
    packed: bool


class Visible:
    """Pairs that a function keeps.

    Attributes:
        mask: a value of `onchip.masks`, or True for all pairs, False for none.
        remapped: it compares positions that count from the start of each document.
        documents: it keeps pairs of one document only.
        tidy: bands and at most one set of packed documents, intersected.
    """

    device = None

    def __init__(self, mask: Mask | bool, remapped: bool = False, documents: bool = False, tidy: bool = True) -> None:
        self.mask, self.remapped, self.documents, self.tidy = mask, remapped, documents, tidy

    def to(self, device: Any) -> Visible:
        return self

    def __and__(self, other: Any) -> Visible:
        _check_pairs(other)
        if isinstance(self.mask, bool):
            return other if self.mask else self
        if isinstance(other.mask, bool):
            return self if other.mask else other
        return Visible(
            self.mask & other.mask,
            remapped=self.remapped or other.remapped,
            documents=self.documents or other.documents,
            tidy=self.tidy and other.tidy and not (self.documents and other.documents),
        )

    def __or__(self, other: Any) -> Visible:
        _check_pairs(other)
        if isinstance(self.mask, bool):
            return self if self.mask else other
        if isinstance(other.mask, bool):
            return other if other.mask else self
        return Visible(
            self.mask | other.mask,
            remapped=self.remapped or other.remapped,
            documents=self.documents and other.documents,
            tidy=False,
        )

    def __invert__(self) -> Visible:
        if isinstance(self.mask, bool):
            return Visible(not self.mask)
        return Visible(~self.mask, remapped=self.remapped, tidy=False)

    def __bool__(self) -> bool:
        raise Unread("a truth value of pairs")


def _check_pairs(other: Any) -> None:
    if not isinstance(other, Visible):
        raise Unread(f"a combination of pairs with {type(other).__name__}")


class Distance:
    """`sign * (column - row) + constant`, or its absolute value, to compare with an int.

    Attributes:
        remapped: it is a difference of positions that count from the start of each document.
    """

    def __init__(self, axes: Axes, sign: int, constant: Shift, remapped: bool, absolute: bool = False) -> None:
        self.axes, self.sign, self.constant = axes, sign, constant
        self.remapped, self.absolute = remapped, absolute

    def __abs__(self) -> Distance:
        return Distance(self.axes, self.sign, self.constant, self.remapped, absolute=True)

    def __le__(self, bound: Any) -> Visible:
        _check_int(bound)
        band = self._band(bound, upper=self.sign > 0)
        if self.absolute:
            band = band & self._band(-bound, upper=self.sign < 0)
        return Visible(band, self.remapped)

    def __ge__(self, bound: Any) -> Visible:
        _check_int(bound)
        if self.absolute:
            raise Unread("pairs that are far from each other")
        return Visible(self._band(bound, upper=self.sign < 0), self.remapped)

    def __lt__(self, bound: Any) -> Visible:
        _check_int(bound)
        return self <= bound - 1

    def __gt__(self, bound: Any) -> Visible:
        _check_int(bound)
        return self >= bound + 1

    def _band(self, bound: int, upper: bool) -> Mask:
        """Columns up to the diagonal where the distance is the bound, or from it on."""
        diagonal = (bound - self.constant) * self.sign
        if isinstance(diagonal, Tensor):
            diagonal = diagonal.reshape(1).repeat(self.axes.batch)
        return masks.window(None, 0, diagonal) if upper else masks.window(0, None, diagonal)


def _check_int(bound: Any) -> None:
    if isinstance(bound, bool) or not isinstance(bound, (int, torch.SymInt)):
        raise Unread(f"a distance beside {type(bound).__name__}")
