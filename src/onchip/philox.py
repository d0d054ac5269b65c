"""The dropout counter: which weights live is a pure function of (seed, sequence, query head, row, column).

Philox4x32 with 7 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3). The key is
the 64-bit seed, the counter is (column // 8, row, head, sequence), and each draw of four 32-bit words gives eight
16-bit lanes, one for each column of the group of eight. Nothing depends on tiles, devices or shards, so nothing but the
seed is stored.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor

ROUNDS = 7
LANES = 8
MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
_LOW32, _LOW16 = 0xFFFFFFFF, 0xFFFF
_SIGNS = 0x8000800080008000 - 2**64


def threshold(p: float) -> int:
    """p rounded to 1/65536, as a count of 16-bit lanes that drop; p < 1 never drops everything."""
    return min(round(p * 65536), 65535)


def kept_scale(p: float) -> float:
    """What a kept weight is multiplied by: 1 / (1 - p) for the rounded p."""
    return 65536 / (65536 - threshold(p))


Words = tuple[Tensor, Tensor, Tensor, Tensor]


def _round(words: Words, k0: Tensor | int, k1: Tensor | int) -> Words:
    """One round. A product of two words fills the 64 bits of an int64, whatever its sign then means.

    c1 and c3 are not multiplied next, so what lies above their 32 bits may stay there.
    """
    c0, c1, c2, c3 = words
    product_0, product_1 = c0 * MULTIPLIER_0, c2 * MULTIPLIER_1
    return (
        ((product_1 >> 32) ^ (c1 ^ k0)) & _LOW32,
        product_1,
        ((product_0 >> 32) ^ (c3 ^ k1)) & _LOW32,
        product_0,
    )


def philox4x32(counter: Words, key: tuple[Tensor, Tensor], rounds: int = ROUNDS) -> Words:
    """Four random 32-bit words for each counter; words are int64 tensors that broadcast against each other."""
    words, (k0, k1) = counter, key
    for number in range(rounds):
        if number:
            k0, k1 = (k0 + WEYL_0) & _LOW32, (k1 + WEYL_1) & _LOW32
        words = _round(words, k0, k1)
    c0, c1, c2, c3 = words
    return c0, c1 & _LOW32, c2, c3 & _LOW32


def _philox4x32_in_place(counter: Words, seed: int) -> Words:
    """The same for a seed on the host, in six tensors' memory: on a CPU it takes a third of the time."""
    k0, k1 = seed & _LOW32, (seed >> 32) & _LOW32
    keys = [((k0 + number * WEYL_0) & _LOW32, (k1 + number * WEYL_1) & _LOW32) for number in range(ROUNDS)]
    words = counter
    for keys_of_round in keys[:2]:  # the counters' words still broadcast
        words = _round(words, *keys_of_round)
    shape = torch.broadcast_shapes(*(word.shape for word in words))
    c0, c1, c2, c3 = (torch.empty(shape, dtype=torch.int64).copy_(word) for word in words)
    spare_0, spare_1 = torch.empty_like(c0), torch.empty_like(c0)
    for k0, k1 in keys[2:]:
        product_0, product_1 = torch.mul(c0, MULTIPLIER_0, out=spare_0), torch.mul(c2, MULTIPLIER_1, out=spare_1)
        torch.bitwise_right_shift(product_1, 32, out=c0).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(_LOW32)
        torch.bitwise_right_shift(product_0, 32, out=c2).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(_LOW32)
        spare_0, spare_1, c1, c3 = c1, c3, product_1, product_0
    return c0, c1.bitwise_and_(_LOW32), c2, c3.bitwise_and_(_LOW32)


def keep(
    seed: Tensor, sequence: Tensor, head: Tensor, row: Tensor, column: Tensor, threshold: int, start: int | None = None
) -> Tensor:
    """Which weights live: bool, the broadcast shape of the index tensors.

    Args:
        seed: int64, one element, read as 64 bits.
        sequence, head, row, column: int64 tensors that broadcast against each other.
        threshold: lanes below it drop, of 65536.
        start: the first column, if `column` holds start, start + 1, ... along its last dimension and nothing else: then
            one draw serves eight neighbours.
    """
    seed = seed.reshape(())
    key = (seed & _LOW32, (seed >> 32) & _LOW32)
    if start is None:
        place = column % LANES
        w0, w1, w2, w3 = philox4x32((column // LANES, row, head, sequence), key)
        word = torch.where(place < 4, torch.where(place < 2, w0, w1), torch.where(place < 6, w2, w3))
        return (word >> (place % 2 * 16)) & _LOW16 >= threshold
    count = column.shape[-1]
    words = philox4x32((_groups(start, count, column.device), row, head, sequence), key)
    shape = torch.broadcast_shapes(*(word.shape for word in words))
    kept = [part.expand(shape) >= threshold for word in words for part in (word & _LOW16, word >> 16)]
    return torch.stack(kept, dim=-1).flatten(-2)[..., start % LANES : start % LANES + count]


def keep_as(
    dtype: torch.dtype,
    seed: int,
    sequence: Tensor,
    head: Tensor,
    row: Tensor,
    start: int,
    count: int,
    threshold: int,
) -> Tensor:
    """`keep` for the columns start, start + 1, ... on a CPU: 1 where a weight lives, 0 elsewhere, in a float dtype."""
    w0, w1, w2, w3 = _philox4x32_in_place((_groups(start, count, row.device), row, head, sequence), seed)
    low, high = w1.bitwise_left_shift_(32).bitwise_or_(w0), w3.bitwise_left_shift_(32).bitwise_or_(w2)
    # a lane less 32768 is a signed number, which compares as the lane does
    lanes = torch.stack([low, high], -1).bitwise_xor_(_SIGNS).view(torch.int16).flatten(-2)
    if sys.byteorder == "big":
        lanes = lanes.unflatten(-1, (-1, 4)).flip(-1).flatten(-2)
    lanes = lanes[..., start % LANES : start % LANES + count]
    return lanes.to(dtype).sub_(threshold - 32769).clamp_(0, 1)


def _groups(start: int, count: int, device: torch.device) -> Tensor:
    """The eights of columns that start, start + 1, ... lie in."""
    return torch.arange(start // LANES, (start + count + LANES - 1) // LANES, device=device)
