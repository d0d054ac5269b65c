"""What becomes of rows whose softmax reference comes from their first block of keys: a model of the Hopper forward.

The kernel (src/onchip/schedules/hopper/forward.py) takes a row's maximum over the first block that it walks and
subtracts it from every later score, so a weight may exceed 1. A row that leaves the range of the numbers is flagged,
and the tile of its program is computed again with a running maximum. Here the same walk is made in float32 with weights
rounded to bfloat16, block by block, so that what overflows there overflows here; only the order of the additions
inside a block differs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from activations_sources import Source
from torch import Tensor

from onchip.schedules.hopper.tiles import Tile, tile_of

LOG2E = math.log2(math.e)
WALKS = ("first", "last")
"""Whose maximum is the reference: of the block of column 0, or of a row's last one, which is causality's diagonal."""
WIDTHS = (64, 128)
LIMITS = {f"2^{power}": 2.0**power for power in (20, 40, 64, 100, 120)} | {"finite": math.inf}
"""Largest sums of weights that are no flag. Under each of them a sum or an output that is not finite is one."""
GROUP = 64
"""Rows of a warpgroup."""
CHUNK = 768
"""Rows whose scores exist at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Where the reference comes from: one of WALKS, and the columns of a block."""

    walk: str
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """Rows after their walk; float32.

    Attributes:
        reference: (heads, rows), in base 2. total: (heads, rows), the sum of the weights.
        accumulated: (heads, rows, dim), the sum of the weighted values.
    """

    reference: Tensor
    total: Tensor
    accumulated: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Flagged:
    """Shares that one limit flags, from 0 to 1.

    Attributes:
        rows: of all rows. seeing: of the rows that see what the source is about (`Source.seen_from`).
        tiles: of the tiles of 64 rows, a warpgroup's. work: of the blocks of scores, those that are computed twice:
            the program computes its tile again, which is two or three warpgroups.
    """

    rows: float
    seeing: float
    tiles: float
    work: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a policy does to a source.

    Attributes:
        gap: (median, 99th percentile, largest) over the rows of the largest score less the reference, in nats.
        flagged: by limit, the keys of LIMITS.
    """

    policy: Policy
    gap: tuple[float, float, float]
    flagged: dict[str, Flagged]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A source under every policy.

    Attributes:
        first_key: the mean weight of key 0 in the rows from the second tile of 64 on; 0 if there are none.
        outlier: the root mean square of the largest channel of the keys over that of the median one, in the head where
            it is the most.
    """

    first_key: float
    outlier: float
    outcomes: list[Outcome]


def policies() -> list[Policy]:
    """Every walk with every width."""
    return [Policy(walk=walk, width=width) for walk in WALKS for width in WIDTHS]


def kernel_tile(source: Source) -> Tile:
    """The tile that the kernel has for it."""
    return tile_of(source.query.shape[-1], source.value.shape[-1])


def measure(source: Source, chosen: Sequence[Policy]) -> Measured:
    """Walk all rows of a source under each policy."""
    value = _folded(source.value)
    walked: dict[Policy, list[tuple[Tensor, ...]]] = {policy: [] for policy in chosen}
    first_key = []
    for start, scores in _chunks(source):
        largest = scores.amax(-1)
        weight = torch.exp2(scores[..., 0] - largest) / torch.exp2(scores - largest[..., None]).sum(-1)
        first_key.append(weight)
        for policy, found in walked.items():
            end = walk(scores, value, start, policy, source.causal)
            found.append((largest - end.reference, end.total, end.accumulated.isfinite().all(-1)))
    outcomes = []
    for policy, parts in walked.items():
        gap, total, finite = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        flagged = {
            name: share(source, policy, ~(finite & total.isfinite() & (total <= limit)))
            for name, limit in LIMITS.items()
        }
        outcomes.append(Outcome(policy=policy, gap=_spread(gap / LOG2E), flagged=flagged))
    behind = torch.cat(first_key, dim=1)[:, GROUP:]
    channels = _folded(source.key).square().mean(1).sqrt()  # (heads, dim)
    return Measured(
        first_key=behind.mean().item() if behind.numel() else 0.0,
        outlier=(channels.amax(1) / channels.median(1).values).max().item(),
        outcomes=outcomes,
    )


def walk(scores: Tensor, value: Tensor, start: int, policy: Policy, causal: bool) -> Walked:
    """Walk rows under a policy.

    Args:
        scores: (heads, rows, keys) float32 in base 2, minus infinity where hidden; every row sees a key in the first
            block of its walk. value: (heads, all keys, dim) float32, of which the first `keys` are read.
        start: index of the first of these rows.
        causal: the last block of a row is that of its own index, not that of the last key.
    """
    heads, rows, keys = scores.shape
    width, blocks = policy.width, -(-keys // policy.width)
    blocked = F.pad(scores, (0, blocks * width - keys), value=-math.inf).unflatten(-1, (blocks, width))
    maxima = blocked.amax(-1)  # (heads, rows, blocks)
    if policy.walk == "first":
        begin = torch.zeros(rows, dtype=torch.int64, device=scores.device)
    elif causal:
        begin = torch.arange(start, start + rows, device=scores.device) // width
    else:
        begin = torch.full((rows,), blocks - 1, device=scores.device)
    reference = maxima.gather(-1, begin.expand(heads, rows)[..., None]).squeeze(-1)
    total = torch.zeros_like(reference)
    accumulated = value.new_zeros(heads, rows, value.shape[-1])
    for block in range(blocks) if policy.walk == "first" else reversed(range(blocks)):
        columns = slice(block * width, min((block + 1) * width, keys))
        weights = torch.exp2(scores[..., columns] - reference[..., None])
        total += weights.sum(-1)
        accumulated += weights.bfloat16().float() @ value[:, columns]
    return Walked(reference=reference, total=total, accumulated=accumulated)


def share(source: Source, policy: Policy, flagged: Tensor) -> Flagged:
    """The shares that flagged rows, bool (heads, length), make up."""
    heads, length = flagged.shape
    groups = kernel_tile(source).groups
    tiles = _any_of(flagged, GROUP)  # (heads, tiles of a warpgroup)
    again = _any_of(tiles, groups).repeat_interleave(groups, dim=1)[:, : tiles.shape[1]]
    stops = (torch.arange(tiles.shape[1], device=flagged.device) + 1) * GROUP
    blocks = -(-(stops.clamp(max=length) if source.causal else torch.full_like(stops, length)) // policy.width)
    return Flagged(
        rows=_mean(flagged),
        seeing=_mean(flagged[:, source.seen_from :]),
        tiles=_mean(tiles),
        work=((again * blocks).sum() / (heads * blocks.sum())).item(),
    )


def _chunks(source: Source) -> Iterator[tuple[int, Tensor]]:
    """Rows in order: the first of them, and their scores in base 2 with the keys that the last of them sees."""
    query, key = _folded(source.query), _folded(source.key)
    length = query.shape[1]
    scale = LOG2E * query.shape[-1] ** -0.5
    for start in range(0, length, CHUNK):
        stop = min(start + CHUNK, length)
        seen = stop if source.causal else length
        scores = (query[:, start:stop] @ key[:, :seen].mT).mul_(scale)
        if source.causal:
            rows = torch.arange(start, stop, device=query.device)[:, None]
            scores.masked_fill_(torch.arange(seen, device=query.device) > rows, -math.inf)
        yield start, scores


def _folded(tensor: Tensor) -> Tensor:
    """(batch, heads, length, dim) as float32 (batch * heads, length, dim)."""
    return tensor.float().flatten(0, 1)


def _any_of(flags: Tensor, count: int) -> Tensor:
    """For each group of so many columns, the last one perhaps smaller, whether any is set: (heads, groups)."""
    return F.pad(flags, (0, -flags.shape[1] % count)).unflatten(1, (-1, count)).any(-1)


def _mean(flags: Tensor) -> float:
    return flags.double().mean().item()


def _spread(values: Tensor) -> tuple[float, float, float]:
    ordered = values.flatten().sort().values
    last = ordered.numel() - 1
    return ordered[last // 2].item(), ordered[round(0.99 * last)].item(), ordered[last].item()
