"""Clause 5: windows are inclusive on both sides around their diagonal; None is unbounded."""

from dataclasses import replace

import pytest
import torch

from tests import harness
from tests.describe import Window
from tests.machine import sized
from tests.problems import Spec, build

SIDES = (None, 0, 1, 3, 200)
EACH_DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
LENGTHS = ((8, 8), (5, 9), (9, 5), (1, 7), sized((129, 100), (35, 20)))


def formula(length_q, length_k, left, right, offset):
    """The window written as one loop over pairs."""
    rows = []
    for i in range(length_q):
        low = 0 if left is None else i + offset - left
        high = length_k - 1 if right is None else i + offset + right
        rows.append([low <= j <= high for j in range(length_k)])
    return torch.tensor(rows)


@pytest.mark.parametrize("left", SIDES)
@pytest.mark.parametrize("right", SIDES)
def test_window_argument_is_bottom_right(left, right, schedule):
    for length_q, length_k in LENGTHS:
        problem = build(Spec(((length_q, length_k),), window=(left, right)), torch.float32)
        weights = harness.weights(problem, schedule)[0]
        expected = formula(length_q, length_k, left, right, length_k - length_q)
        assert torch.equal(weights != 0, expected.expand_as(weights)), (length_q, length_k)


@pytest.mark.parametrize(
    "diagonal",
    ["bottom-right", "top-left", -3, 0, 12, torch.tensor([4, -2])],
    ids=["bottom", "top", "-3", "0", "12", "tensor"],
)
@EACH_DTYPE
def test_window_mask_follows_its_diagonal(diagonal, dtype, schedule):
    for length_q, length_k in LENGTHS:
        for left, right in ((2, 1), (None, 0), (0, None)):
            problem = replace(build(Spec(((length_q, length_k),) * 2), dtype), mask=Window(left, right, diagonal))
            for number, weights in enumerate(harness.weights(problem, schedule)):
                offset = {"bottom-right": length_k - length_q, "top-left": 0}.get(str(diagonal), diagonal)
                offset = int(offset[number]) if isinstance(offset, torch.Tensor) else offset
                expected = formula(length_q, length_k, left, right, offset)
                assert torch.equal(weights != 0, expected.expand_as(weights)), (length_q, length_k, left, right)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@EACH_DTYPE
def test_windows_follow_the_lengths_of_each_sequence(layout, dtype, schedule):
    lengths = ((20, 33), (33, 20), (1, 9))
    problem = build(Spec(lengths, layout=layout, window=(4, 2)), dtype)
    for (length_q, length_k), weights in zip(lengths, harness.weights(problem, schedule), strict=True):
        expected = formula(length_q, length_k, 4, 2, length_k - length_q)
        assert torch.equal(weights != 0, expected.expand_as(weights))
