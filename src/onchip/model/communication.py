"""What devices send each other when one sequence is sharded over them, and how evenly a causal mask divides the work.

    ring         Liu, Zaharia and Abbeel 2023, "Ring Attention with Blockwise Transformers": device r keeps the queries
                 of one piece of the sequence; keys and values go round, and in the backward their gradients go round
                 with them and one step further, home. (The backward in the order of zhuzilin/ring-flash-attention.)
    zigzag       the same ring, where device r holds the pieces r and 2P - 1 - r of 2P. (The assignment is that of Llama
                 Team 2024, "The Llama 3 Herd of Models", section 3.3.2; as a ring: zhuzilin/ring-flash-attention.)
    all-to-all   Jacobs et al. 2023, "DeepSpeed Ulysses": tokens are exchanged for heads before attention and back after
                 it, so a device computes some heads over the whole sequence.

Counted is what a device hands to others, in bytes, exactly, also where nothing divides evenly. The rings send every
block all the way round, whether or not a causal mask needs it, as ring-flash-attention does. Statistics do not travel.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Self-attention over `length` tokens on `devices` devices.

    Attributes:
        element_bytes: of queries, keys, values, outputs and, all-to-all, gradients.
        gradient_bytes: of the sums of dK and dV that travel round the ring, which are kept in higher precision.
        causal: a token sees itself and those before it; all-to-all and the bytes do not depend on it.

    Raises:
        ValueError: a size is below what it can be, or `heads` is no multiple of `kv_heads`.
    """

    devices: int
    batch: int
    heads: int
    kv_heads: int
    length: int
    dim: int
    dim_v: int
    element_bytes: int = 2
    gradient_bytes: int = 4
    causal: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            least = 0 if field.name in ("batch", "length", "causal") else 1
            if getattr(self, field.name) < least:
                raise ValueError(f"{field.name} must be at least {least}, got {getattr(self, field.name)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads, got {self.heads} and {self.kv_heads}")


@dataclass(frozen=True, slots=True)
class Communication:
    """What one scheme sends and computes.

    Attributes:
        forward_sent, backward_sent: bytes that each device hands to others.
        pairs: visible pairs of (query, key), over the batch and the query heads, that each device computes.
        step_pairs: the pairs of the busiest device, summed over the steps: the work that the whole waits for when a
            step begins only when all have ended the one before.
    """

    forward_sent: tuple[int, ...]
    backward_sent: tuple[int, ...]
    pairs: tuple[int, ...]
    step_pairs: int

    @property
    def total_sent(self) -> int:
        """Bytes of all devices, forward and backward."""
        return sum(self.forward_sent) + sum(self.backward_sent)

    @property
    def imbalance(self) -> float:
        """Pairs of the busiest device over the mean; 1 is even."""
        return max(self.pairs) * len(self.pairs) / sum(self.pairs) if sum(self.pairs) else 1.0

    @property
    def efficiency(self) -> float:
        """The part of the time that devices compute and do not wait for the busiest one of a step; 1 is all of it."""
        return sum(self.pairs) / (len(self.pairs) * self.step_pairs) if self.step_pairs else 1.0


def ring(sharding: Sharding) -> Communication:
    """Contiguous pieces: device r holds the r-th."""
    pieces = split(sharding.length, sharding.devices)
    return _ring(sharding, [(piece,) for piece in pieces])


def zigzag(sharding: Sharding) -> Communication:
    """Two pieces a device: one from the front and one from the back."""
    pieces = split(sharding.length, 2 * sharding.devices)
    return _ring(sharding, [(pieces[r], pieces[-1 - r]) for r in range(sharding.devices)])


def _ring(sharding: Sharding, held: list[tuple[range, ...]]) -> Communication:
    devices = range(sharding.devices)
    tokens = [sum(map(len, pieces)) for pieces in held]
    row = sharding.batch * sharding.kv_heads * (sharding.dim + sharding.dim_v)
    # Device r receives the keys of r - 1, r - 2, ... and passes on all but the last, those of r + 1. Gradients make one
    # step more, in which those of r + 1 come home.
    keys = [sum(tokens) - tokens[(r + 1) % sharding.devices] for r in devices]
    gradients = [sum(tokens) if sharding.devices > 1 else 0 for _ in devices]
    pairs = [
        [
            sum(_pairs(rows, columns, sharding.causal) for rows in held[r] for columns in held[(r - step) % len(held)])
            for r in devices
        ]
        for step in devices
    ]
    heads = sharding.batch * sharding.heads
    return Communication(
        tuple(row * sharding.element_bytes * key for key in keys),
        tuple(
            row * (sharding.element_bytes * key + sharding.gradient_bytes * gradient)
            for key, gradient in zip(keys, gradients, strict=True)
        ),
        tuple(heads * sum(step[r] for step in pairs) for r in devices),
        heads * sum(map(max, pairs)),
    )


def all_to_all(sharding: Sharding) -> Communication:
    """Contiguous pieces outside attention, heads inside.

    A device gets the key and value heads that its query heads use: with fewer of these than devices each goes to
    several, and the parts of its gradient come back from all of them.

    Raises:
        ValueError: the query heads do not divide among the devices.
    """
    devices = range(sharding.devices)
    if sharding.heads % sharding.devices:
        raise ValueError(
            f"all-to-all gives each device the same number of heads: {sharding.heads} heads do not divide among "
            f"{sharding.devices} devices"
        )
    tokens = [len(piece) for piece in split(sharding.length, sharding.devices)]
    heads, group = sharding.heads // sharding.devices, sharding.heads // sharding.kv_heads
    kv_heads = [((r + 1) * heads - 1) // group - r * heads // group + 1 for r in devices]
    query, out, both = heads * sharding.dim, heads * sharding.dim_v, sharding.dim + sharding.dim_v

    def sent(elements: Callable[[int, int], int]) -> tuple[int, ...]:
        scale = sharding.batch * sharding.element_bytes
        return tuple(scale * sum(elements(source, to) for to in devices if to != source) for source in devices)

    pairs = sharding.batch * heads * _pairs(range(sharding.length), range(sharding.length), sharding.causal)
    return Communication(
        sent(lambda source, to: tokens[source] * (query + kv_heads[to] * both) + tokens[to] * out),
        sent(lambda source, to: tokens[source] * out + tokens[to] * (query + kv_heads[source] * both)),
        (pairs,) * sharding.devices,
        pairs,
    )


SCHEMES: dict[str, Callable[[Sharding], Communication]] = {"ring": ring, "zigzag": zigzag, "all-to-all": all_to_all}


def split(length: int, parts: int) -> list[range]:
    """Consecutive pieces whose sizes differ by at most one, the larger ones first."""
    size, larger = divmod(length, parts)
    starts = [part * size + min(part, larger) for part in range(parts + 1)]
    return [range(start, stop) for start, stop in zip(starts, starts[1:], strict=False)]


def _pairs(rows: range, columns: range, causal: bool) -> int:
    """Pairs (i, j) with i in rows and j in columns, and j <= i if causal."""
    if not causal:
        return len(rows) * len(columns)

    def below(stop: int) -> int:
        # pairs of the rows before `stop`: the first ones see 1, 2, ... columns, those after them all
        seen = max(0, stop - columns.start)
        growing = min(seen, len(columns))
        return growing * (growing + 1) // 2 + (seen - growing) * len(columns)

    return below(rows.stop) - below(rows.start)
