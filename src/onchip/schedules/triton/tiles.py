"""Tile sizes as data: one frozen configuration for each architecture, kernel, head dim, dtype and kind of problem.

Nothing is tuned in a call. A row is chosen by what a problem is, of its lengths only whether they are short: a kernel
serves any other length once it is compiled. What `onchip tune` measured on a card wins over this table there: see
tuned.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from onchip.gpu import FORWARD, GRADIENT, KEYS, QUERIES


@dataclass(frozen=True)
class Tile:
    """Rows and columns of a tile of scores, warps of a program, stages of its pipeline.

    Attributes:
        registers: of a thread at most, so that one more program fits beside others; None leaves them to ptxas, and so
            must rows for other processors than NVIDIA's.
        tma: of all but GRADIENT, on Hopper: what a loop reads comes by TMA where it can read it (`Call.maps`), which
            takes no registers for addresses, and none are held for weights while scores are computed.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    registers: int | None = None
    tma: bool = False


FEW = 64
"""Query heads of a group stand in one tile if there are no more positions than this."""

SHORT = 1024
"""Keys of a forward under a band that is over before a large tile pays: smaller programs share a multiprocessor, and
one begins or ends while another one computes."""

KERNELS = (FORWARD, KEYS, QUERIES, GRADIENT)
INTERPRETED = Tile(16, 32, 1, 1)


COMPILED = "compile reports"
"""A row's source: chosen by registers, spills and shared memory (`make compile-all`), without a clock."""
H200 = "measured on NVIDIA H200"
"""A row's source: `onchip tune` on that card, or a clock all the same (docs/tuning.md says of which rows)."""


@dataclass(frozen=True)
class Row:
    """The first row that fits names the tile.

    Attributes:
        architectures: of `architecture`, or () for any.
        kernel: one of KERNELS.
        dim: fits up to this head dim, the larger of the two.
        bits: of an element, 16 or 32.
        kinds: "plain", "band", "short" (of FORWARD: a band, with few keys), "masked" (of FORWARD: a mask beyond a
            band), "changed" (scores, dropout, and masks of other kernels), "few" (packed heads), "grouped" (of KEYS:
            more query heads than key heads); () is any.
        source: where its figures come from: COMPILED, or "measured on" and the card (`onchip tune --print-table`).
    """

    architectures: tuple[str, ...]
    kernel: str
    dim: int
    bits: int
    kinds: tuple[str, ...]
    tile: Tile
    source: str = COMPILED


KINDS = {
    FORWARD: ("plain", "band", "short", "masked", "changed", "few"),
    KEYS: ("plain", "band", "changed", "grouped"),
    QUERIES: ("plain", "band", "changed", "few"),
    GRADIENT: ("changed",),
}
"""Kinds of problems that each kernel meets."""
DIMS = (64, 128, 256)
"""Head dims that rows reach up to; a smaller head takes the next of them."""

ANY: tuple[str, ...] = ()
REGULAR = ("plain", "band", "short", "grouped")
AMPERE, HOPPER, CDNA3 = ("sm_80", "sm_86", "sm_89"), ("sm_90",), ("gfx942",)
TABLE = (
    # wgmma takes 64 rows of a product for four warps
    Row(HOPPER, FORWARD, 64, 16, REGULAR, Tile(64, 64, 4, 3, 128), H200),
    Row(HOPPER, FORWARD, 64, 16, ("masked",), Tile(64, 64, 4, 3, 168)),
    Row(HOPPER, FORWARD, 64, 16, ("changed",), Tile(64, 64, 4, 3, 168), H200),
    Row(HOPPER, FORWARD, 128, 16, ("plain", "masked"), Tile(128, 64, 8, 2, 128, tma=True), H200),
    Row(HOPPER, FORWARD, 128, 16, ("band",), Tile(64, 64, 4, 3), H200),
    Row(HOPPER, FORWARD, 128, 16, ("short",), Tile(64, 32, 4, 3), H200),
    Row(HOPPER, FORWARD, 128, 16, ("changed",), Tile(128, 64, 8, 3), H200),
    Row(HOPPER, FORWARD, 256, 16, REGULAR, Tile(128, 64, 8, 2), H200),
    Row(HOPPER, KEYS, 64, 16, REGULAR, Tile(64, 64, 4, 3), H200),
    Row(HOPPER, KEYS, 64, 16, ("changed",), Tile(32, 64, 4, 3, 168), H200),
    Row(HOPPER, KEYS, 128, 16, ANY, Tile(32, 128, 8, 3), H200),
    Row(HOPPER, KEYS, 256, 16, ("plain",), Tile(64, 32, 8, 2), H200),
    Row(HOPPER, KEYS, 256, 16, REGULAR, Tile(64, 32, 8, 2)),
    Row(HOPPER, QUERIES, 64, 16, REGULAR, Tile(64, 64, 4, 3), H200),
    Row(HOPPER, QUERIES, 64, 16, ("changed",), Tile(64, 64, 4, 3, 168), H200),
    Row(HOPPER, QUERIES, 128, 16, (*REGULAR, "changed"), Tile(128, 64, 8, 3), H200),
    Row(HOPPER, QUERIES, 256, 16, ("plain",), Tile(32, 64, 4, 2), H200),
    Row(HOPPER, QUERIES, 256, 16, REGULAR, Tile(32, 64, 4, 2)),
    Row(HOPPER, GRADIENT, 64, 16, ANY, Tile(64, 64, 4, 2), H200),
    Row(HOPPER, GRADIENT, 128, 16, ANY, Tile(64, 32, 8, 2)),
    Row(CDNA3, FORWARD, 128, 16, ANY, Tile(64, 32, 8, 2)),
    Row(CDNA3, KEYS, 64, 16, ("changed",), Tile(16, 64, 4, 2)),
    Row(CDNA3, KEYS, 128, 16, ANY, Tile(16, 64, 4, 2)),
    Row(CDNA3, KEYS, 256, 16, ANY, Tile(16, 32, 4, 1)),
    # any architecture: what does not spill on the smallest, within its 99 KiB of shared memory
    Row(ANY, FORWARD, 256, 16, ("few",), Tile(16, 64, 4, 2)),
    Row(ANY, FORWARD, 64, 16, ANY, Tile(128, 64, 8, 2)),
    Row(ANY, FORWARD, 128, 16, ANY, Tile(128, 32, 8, 2)),
    Row(ANY, FORWARD, 256, 16, ANY, Tile(64, 32, 8, 2)),
    Row(AMPERE, KEYS, 64, 16, ("grouped",), Tile(32, 128, 8, 2)),
    Row(ANY, KEYS, 64, 16, REGULAR, Tile(32, 64, 4, 2)),
    Row(ANY, KEYS, 16, 16, ANY, Tile(16, 64, 4, 2)),
    Row(ANY, KEYS, 64, 16, ANY, Tile(64, 32, 4, 2)),
    Row(ANY, KEYS, 128, 16, ANY, Tile(32, 64, 8, 2)),
    Row(ANY, KEYS, 256, 16, ANY, Tile(32, 32, 8, 1)),
    Row(ANY, QUERIES, 64, 16, ANY, Tile(64, 32, 4, 2)),
    Row(ANY, QUERIES, 128, 16, ANY, Tile(64, 16, 4, 2)),
    Row(ANY, QUERIES, 256, 16, ANY, Tile(32, 32, 4, 1)),
    Row(ANY, GRADIENT, 128, 16, ANY, Tile(32, 64, 4, 1)),
    Row(ANY, GRADIENT, 256, 16, ANY, Tile(32, 32, 8, 1)),
    # float32 takes twice the room, and three products for one
    Row(HOPPER, FORWARD, 64, 32, REGULAR, Tile(128, 64, 8, 2), H200),
    Row(HOPPER, QUERIES, 64, 32, REGULAR, Tile(128, 32, 8, 2), H200),
    Row(ANY, FORWARD, 64, 32, ANY, Tile(64, 32, 4, 2)),
    Row(ANY, FORWARD, 128, 32, ANY, Tile(32, 32, 4, 1)),
    Row(ANY, FORWARD, 256, 32, ANY, Tile(16, 16, 4, 1)),
    Row(ANY, KEYS, 64, 32, ANY, Tile(32, 32, 4, 1)),
    Row(ANY, KEYS, 128, 32, ANY, Tile(16, 32, 4, 1)),
    Row(ANY, KEYS, 256, 32, ANY, Tile(16, 16, 4, 1)),
    Row(ANY, QUERIES, 64, 32, ANY, Tile(32, 32, 4, 1)),
    Row(ANY, QUERIES, 128, 32, ANY, Tile(32, 16, 4, 1)),
    Row(ANY, QUERIES, 256, 32, ANY, Tile(16, 16, 8, 1)),
    Row(ANY, GRADIENT, 128, 32, ANY, Tile(16, 32, 4, 1)),
    Row(ANY, GRADIENT, 256, 32, ANY, Tile(16, 32, 4, 1)),
)


def row_dim(dim: int) -> int:
    """The head dim of the rows that a head dim belongs to."""
    return next(bound for bound in DIMS if dim <= bound)


def row_of(architecture: str, kernel: str, dim: int, bits: int, kind: str) -> Row:
    """The row for a kernel; `architecture` is "sm_80", "sm_90", "gfx942" and the like."""
    for row in TABLE:
        if (
            row.kernel == kernel
            and row.bits == bits
            and dim <= row.dim
            and (not row.architectures or architecture in row.architectures)
            and (not row.kinds or kind in row.kinds)
        ):
            return row
    raise AssertionError(f"no tile for {kernel}, head dim {dim}, {bits} bits")


def tile_of(architecture: str, kernel: str, dim: int, bits: int, kind: str) -> Tile:
    """The shipped tile for a kernel; `architecture` is as for `row_of`, or "interpreter"."""
    return INTERPRETED if architecture == "interpreter" else row_of(architecture, kernel, dim, bits, kind).tile
