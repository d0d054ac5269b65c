"""The dropout counter against Random123's known answers, and against the numpy version for every index."""

import numpy as np
import pytest
import torch
from hypothesis import given, strategies

from onchip import philox
from tests import philox_reference

ONES = 0xFFFFFFFF
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
KNOWN = [
    (7, (0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    (7, (ONES,) * 4, (ONES,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (10, (0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (10, (ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (10, *PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


@pytest.mark.parametrize(("rounds", "counter", "key", "expected"), KNOWN)
def test_the_reference_gives_the_known_answers(rounds, counter, key, expected):
    assert tuple(int(word) for word in philox_reference.philox4x32(counter, key, rounds)) == expected


def index(*values):
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize("words", [KNOWN[0][3]])
def test_lanes_are_halves_of_the_words_low_half_first(words):
    """Counter 0 and key 0 are the draws of sequence 0, head 0, row 0, columns 0 to 7 with seed 0."""
    draws = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    column = torch.arange(8)
    for threshold in draws:
        kept = philox.keep(index(0), index(0), index(0), index(0), column, threshold)
        assert kept.dtype == torch.bool
        assert kept.tolist() == [draw >= threshold for draw in draws]


@given(
    seed=strategies.integers(0, 2**63 - 1),
    sequence=strategies.integers(0, 2**31 - 1),
    head=strategies.integers(0, 2**20),
    row=strategies.integers(0, 2**31 - 1),
    column=strategies.integers(0, 2**31 - 1),
    threshold=strategies.integers(0, 65535),
)
def test_any_index(seed, sequence, head, row, column, threshold):
    words = philox_reference.philox4x32((column // 8, row, head, sequence), (seed & ONES, seed >> 32), rounds=7)
    lane = int(words[column % 8 // 2]) >> (16 * (column % 2)) & 0xFFFF
    kept = philox.keep(index(seed), index(sequence), index(head), index(row), index(column), threshold)
    assert kept.tolist() == [lane >= threshold]


def test_indices_broadcast():
    head, row, column = torch.arange(3)[:, None, None], torch.arange(20)[:, None], torch.arange(45)
    kept = philox.keep(index(77), index(5)[0], head, row, column, philox_reference.threshold(0.3))
    assert torch.equal(kept, torch.from_numpy(philox_reference.keep(0.3, 77, 5, 3, 20, 45)))


@pytest.mark.parametrize("start", [0, 3, 8, 13])
def test_one_draw_serves_eight_neighbours(start):
    """Naming the first column is only a faster way to the same bits."""
    row, column = torch.arange(20)[:, None], torch.arange(start, start + 30)
    indices = index(77), index(5)[0], torch.arange(3)[:, None, None], row, column
    expected = philox.keep(*indices, 20000)
    assert torch.equal(philox.keep(*indices, 20000, start=start), expected)
    seed, sequence, head, row, column = indices
    for dtype in (torch.float32, torch.float64):
        factor = philox.keep_as(dtype, int(seed), sequence, head, row, start, column.shape[-1], 20000)
        assert torch.equal(factor, expected.to(dtype))


def test_the_draws_are_uniform():
    """A chi-square over 16 bins of 65536 draws: 15 degrees of freedom, seven standard deviations above their mean."""
    counts = np.bincount((philox_reference.lanes(9, 1, 2, 256, 256) >> np.uint64(12)).astype(int).ravel(), minlength=16)
    assert ((counts - 4096) ** 2 / 4096).sum() < 15 + 7 * 30**0.5
    kept = philox.keep(index(9), index(1), index(2), torch.arange(256)[:, None], torch.arange(256), 16384)
    assert abs(kept.double().mean().item() - 0.75) < 5 * (0.25 * 0.75 / 65536) ** 0.5
