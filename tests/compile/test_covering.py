"""Every kernel compiles for every head dim and target, and stays in registers, on matrix units and in shared memory."""

from dataclasses import replace

import pytest
import torch

from onchip.schedules.triton import tiles
from tests.compile import aot
from tests.compile.rows import DTYPES, FEATURES, HEAD_DIMS, KINDS, Row, covering

ROWS = covering()

# Loads and stores of local memory in loops where some are allowed, by kernel; on gfx942 spilled registers. Tiles of
# float32 and of head dims beyond 128 are small already: smaller ones would cost more than the spills. Measured over
# these rows and rounded up. Where ptxas gives up it uses 32 registers and spills several thousand times.
MOST_SPILLS = {"forward": 250, "keys": 1200, "queries": 300, "gradient": 650, "delta": 0}
MOST_SPILLS_TIMED = {"forward": 50, "keys": 50, "queries": 50, "gradient": 4, "delta": 0}
MOST_SPILLS_CAREFUL = {"forward": 100, "keys": 50, "queries": 50, "gradient": 40}
MOST_SPILLS_BOUNDED = 80
MOST_SPILLS_GFX942 = 100


def is_strict(row):
    """Where nothing may be spilled inside a loop."""
    return row.dtype != torch.float32 and max(row.dims) <= 128


def most_spills(row, careful):
    if is_strict(row):
        # where scores change, the tiles that a clock prefers hold a little less than they need
        changes = row.spec.score or row.spec.mask or row.spec.dropout_p
        timed = row.target == "sm_90" and changes and (row.kernel != "gradient" or max(row.dims) <= 64)
        # what heeds what is hidden runs only where something is not finite
        return (MOST_SPILLS_CAREFUL if careful else MOST_SPILLS_TIMED)[row.kernel] if timed else 0
    return MOST_SPILLS_GFX942 if row.target == "gfx942" else MOST_SPILLS[row.kernel]


def units(row):
    """What makes the products: always matrix units, for float32 as well (three products in TF32, on gfx942 IEEE).

    Hopper's own instruction makes 64 rows of a product at once; a tile with fewer gets that of older GPUs.
    """
    if row.kernel == "delta":
        return ""
    if row.target == "gfx942":
        return "v_mfma"
    rows, columns, *_ = row.launch().tile
    return (
        "wgmma.mma_async" if row.target == "sm_90" and (columns if row.kernel == "keys" else rows) >= 64 else "mma.sync"
    )


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_compiles(row, record_property):
    *_, last = every = row.compile()
    for made in every:
        careful = made is not last
        for name, value in vars(made).items():
            record_property(name, value)
        assert made.spills_in_loops <= most_spills(row, careful), f"{row.launch().tile}: {made}"
        assert made.shared <= aot.SHARED_LIMITS[row.target], f"{row.launch().tile}: {made}"
        assert made.registers <= aot.REGISTER_LIMITS[row.target], f"{row.launch().tile}: {made}"
        assert made.units == units(row), f"{row.launch().tile}: {made}"
    if is_strict(row):
        assert last.serialized == 0, "ptxas made products wait for each other (C75xx)"


BOUNDED = [
    (row, kind)
    for row in tiles.TABLE
    if row.tile.registers is not None
    for kind in row.kinds
    if kind in tiles.KINDS[row.kernel]
]


@pytest.mark.parametrize(("row", "kind"), BOUNDED, ids=[f"{row.kernel}-{row.dim}-{kind}" for row, kind in BOUNDED])
def test_a_bound_of_registers_lets_programs_share_a_multiprocessor(row, kind, record_property):
    """As many as the registers have room for; what that spills, and waits for, a clock found to be worth it."""
    assert row.architectures == ("sm_90",) and row.bits == 16
    threads = 32 * row.tile.warps
    programs = 65536 // (row.tile.registers * threads)
    assert programs > 65536 // (256 * threads)
    for name in ("scored", "dropped") if kind == "changed" else (kind,):
        made = Row(row.kernel, (row.dim, row.dim), torch.bfloat16, "sm_90", name, KINDS[name]).compile()[-1]
        for fact, value in vars(made).items():
            record_property(f"{name} {fact}", value)
        assert made.registers <= row.tile.registers and programs * (made.shared + 1024) <= 228 * 1024, made
        assert made.spills_in_loops <= MOST_SPILLS_BOUNDED, made


def test_rows_cover_features_at_every_target():
    assert len(ROWS) <= 250 and len(set(map(str, ROWS))) == len(ROWS)
    for target in ("sm_80", "sm_90", "gfx942"):
        for kernel in ("forward", "keys", "queries"):
            those = [row for row in ROWS if row.target == target and row.kernel == kernel]
            assert {row.feature for row in those} == set(FEATURES)
            assert {row.dims for row in those} == set(HEAD_DIMS)
            assert {row.dtype for row in those} == set(DTYPES)
    features = {(row.feature, row.dtype) for row in ROWS if row.kernel in ("forward", "keys", "queries")}
    assert features >= {(name, dtype) for name in FEATURES for dtype in DTYPES}


def test_features_reach_the_kernels():
    """A row that names a feature has it: the feature's argument or constant is there."""
    made = {
        name: Row("forward", (64, 64), torch.float16, "sm_90", name, spec).launch() for name, spec in FEATURES.items()
    }
    given = {
        name: dict(zip(launch.kernel.arg_names, launch.arguments, strict=False)) | launch.keywords
        for name, launch in made.items()
    }
    assert given["causal"]["HIGH"] and not given["causal"]["LOW"]
    assert given["window-sink"]["LOW"] and given["window-sink"]["HIGH"] and given["window-sink"]["sink"] is not None
    assert given["diagonals-padded"]["highs"] is not None and given["diagonals-padded"]["used_k"] is not None
    assert given["documents"]["LISTS"] and given["documents"]["keep"] is not None
    assert given["packed-softcap"]["cu_q"] is not None and given["packed-softcap"]["change"] is not None
    assert given["alibi"]["change"] is not None and given["alibi"]["VECTOR"] == 8
    assert given["bias-dropout"]["seed"] is not None and given["bias-dropout"]["change"] is not None
    assert given["few"]["PACK"] == 4 == given["few"]["GROUP"]
    assert given["irregular-tensor"]["VECTOR"] == 1 and given["irregular-tensor"]["LISTS"]


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_a_kernel_without_registers_is_seen_to_spill(target):
    """What the tests above hold at 0 is not always 0."""
    launch = Row("keys", (64, 64), torch.float16, target, "plain", KINDS["plain"]).launch()
    starved = {"waves_per_eu": 8} if target == "gfx942" else {"maxnreg": 64}
    made = aot.compile_launch(replace(launch, keywords=launch.keywords | starved), target)
    assert made.spills_in_loops > 0
