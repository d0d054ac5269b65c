"""What masks and scores read beside query, key and value, and how much of it a tile asks for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from onchip.gpu.call import Call
from onchip.masks import Blocks, Documents, Keys, Mask, Pairs, leaves
from onchip.scores import Alibi, Bias
from onchip.tile import per_head, rank4


@dataclass(frozen=True)
class Side:
    """How masks or scores read a tensor beside query, key and value.

    Attributes:
        varies: along which of (sequence, head, row, column) what is read differs.
        sizes: rows and columns that one entry stands for.
        masks: it says what is visible, so it is read only where something may be hidden.
    """

    name: str
    tensor: Tensor
    varies: tuple[bool, bool, bool, bool]
    sizes: tuple[int, int] = (1, 1)
    masks: bool = False


def _varies(tensor: Tensor) -> tuple[bool, bool, bool, bool]:
    pairs = zip(rank4(tensor).shape, rank4(tensor).stride(), strict=True)
    b, h, i, j = (size > 1 and stride != 0 for size, stride in pairs)
    return b, h, i, j


def sides_of(call: Call) -> list[Side]:
    """Every tensor over pairs, rows, columns or heads that the generated functions read."""
    problem = call.problem
    sides: list[Side] = []
    if call.semantics.keep is not None:
        for mask in leaves(problem.mask):
            sides += _of_mask(mask, problem.layout == "packed")
    for score in problem.scores:
        if isinstance(score, Bias):
            sides.append(Side("bias", score.tensor, _varies(score.tensor)))
        elif isinstance(score, Alibi):
            sides.append(Side("slopes", score.slopes, _varies(per_head(score.slopes))))
    return sides


def _of_mask(mask: Mask, packed: bool) -> Iterator[Side]:
    if isinstance(mask, Pairs):
        yield _masking(mask.kept, _varies(mask.kept))
    elif isinstance(mask, Blocks):
        yield _masking(mask.kept, _varies(mask.kept), (mask.size_q, mask.size_k))
    elif isinstance(mask, Keys):
        yield _masking(mask.kept, (_by_sequence(mask.kept, packed), False, False, True))
    elif isinstance(mask, Documents):
        yield _masking(mask.query_ids, (_by_sequence(mask.query_ids, packed), False, True, False))
        yield _masking(mask.key_ids, (_by_sequence(mask.key_ids, packed), False, False, True))


def _by_sequence(tensor: Tensor, packed: bool) -> bool:
    return packed or (tensor.dim() == 2 and tensor.shape[0] > 1 and tensor.stride(0) != 0)


def _masking(tensor: Tensor, varies: tuple[bool, bool, bool, bool], sizes: tuple[int, int] = (1, 1)) -> Side:
    return Side("mask", tensor, varies, sizes, masks=True)
