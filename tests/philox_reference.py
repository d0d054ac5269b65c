"""Philox4x32 written again from the paper (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3), in numpy."""

import numpy as np

MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
WEYL = (0x9E3779B9, 0xBB67AE85)
LOW = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)


def philox4x32(counter, key, rounds):
    """Four output words for broadcastable counter words (a sequence of 4) and one key (2 ints)."""
    a, b, c, d = np.broadcast_arrays(*(np.asarray(word, dtype=np.uint64) for word in counter))
    for index in range(rounds):
        k0, k1 = (np.uint64((word + index * step) & 0xFFFFFFFF) for word, step in zip(key, WEYL, strict=True))
        first, second = MULTIPLIERS[0] * a, MULTIPLIERS[1] * c
        a, b, c, d = (second >> HALF) ^ b ^ k0, second & LOW, (first >> HALF) ^ d ^ k1, first & LOW
    return a, b, c, d


def lanes(seed, sequence, head, rows, columns):
    """The 16-bit number drawn for each pair, (rows, columns), as uint64."""
    seed %= 1 << 64
    row, column = np.arange(rows)[:, None], np.arange(columns)[None, :]
    words = np.stack(philox4x32((column // 8, row, head, sequence), (seed & 0xFFFFFFFF, seed >> 32), rounds=7))
    lane = np.broadcast_to(column % 8, (rows, columns))
    word = np.take_along_axis(words, (lane // 2)[None], axis=0)[0]
    return (word >> (np.uint64(16) * (lane % 2).astype(np.uint64))) & np.uint64(0xFFFF)


def threshold(probability):
    """p rounded to 1/65536; a p below one never drops everything."""
    return min(round(probability * 65536), 65535)


def keep(probability, seed, sequence, heads, rows, columns):
    """Bool array (heads, rows, columns): which weights dropout leaves."""
    if rows == 0 or columns == 0:
        return np.ones((heads, rows, columns), dtype=bool)
    draws = [lanes(seed, sequence, head, rows, columns) for head in range(heads)]
    return np.stack(draws) >= np.uint64(threshold(probability))
