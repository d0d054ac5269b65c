"""The dropout counter: which weights live is a pure function of (seed, sequence, query head, row, column).

Philox4x32 with 7 rounds (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3). The key is
the 64-bit seed, the counter is (column // 8, row, head, sequence), and each draw of four 32-bit words gives eight
16-bit lanes, one for each column of the group of eight. Nothing depends on tiles, devices or shards, so nothing but the
seed is stored.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 7
LANES = 8
MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
WEYL_0, WEYL_1 = 0x9E3779B9, 0xBB67AE85
_LOW32, _LOW16 = 0xFFFFFFFF, 0xFFFF


def threshold(p: float) -> int:
    """p rounded to 1/65536, as a count of 16-bit lanes that drop; p < 1 never drops everything."""
    return min(round(p * 65536), 65535)


def kept_scale(p: float) -> float:
    """What a kept weight is multiplied by: 1 / (1 - p) for the rounded p."""
    return 65536 / (65536 - threshold(p))


def _multiply(constant: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of constant * word. int64 holds no 64-bit product, so the word is split in halves."""
    low = (word & _LOW16) * constant
    high = (word >> 16) * constant
    middle = low + ((high & _LOW16) << 16)
    return (high >> 16) + (middle >> 32), middle & _LOW32


def philox4x32(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor], rounds: int = ROUNDS
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random 32-bit words for each counter; words are int64 tensors that broadcast against each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for round_number in range(rounds):
        if round_number:
            k0, k1 = (k0 + WEYL_0) & _LOW32, (k1 + WEYL_1) & _LOW32
        high_0, low_0 = _multiply(MULTIPLIER_0, c0)
        high_1, low_1 = _multiply(MULTIPLIER_1, c2)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
    return c0, c1, c2, c3


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
    groups = torch.arange(start // LANES, (start + count + LANES - 1) // LANES, device=column.device)
    words = philox4x32((groups, row, head, sequence), key)
    shape = torch.broadcast_shapes(*(word.shape for word in words))
    kept = [part.expand(shape) >= threshold for word in words for part in (word & _LOW16, word >> 16)]
    return torch.stack(kept, dim=-1).flatten(-2)[..., start % LANES : start % LANES + count]
