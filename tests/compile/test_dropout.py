"""Dropout in Hopper's kernels: its functions are compiled and run in numpy, and what lives is what philox.keep says.

Of the portable kernels, how often they draw."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
import triton
from hypothesis import example, given, strategies
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from onchip import philox
from onchip.schedules.hopper.dropout import afresh, alive, dropped, dropped_turned, key_of, without
from tests.compile import aot, ptx
from tests.compile.rows import TWO, Spec
from tests.compile.test_hopper import FEATURES, MEASURED

ONE = 0x3F80  # in bfloat16
INDEX = strategies.integers(0, 2**31 - 65)
SIZES = {
    "seed": strategies.integers(-(2**63), 2**63 - 1),
    "sequence": strategies.integers(0, 2**31 - 1),
    "head": strategies.integers(0, 2**20),
    "row": INDEX,
    "column": strategies.integers(0, 2**25 - 1).map(lambda block: 64 * block),
    "threshold": strategies.one_of(strategies.integers(0, 65535), strategies.sampled_from((0, 1, 32768, 65535))),
}
EXTREMES = dict(seed=-(2**63), sequence=2**31 - 1, head=2**20, row=2**31 - 65, column=2**31 - 64)


@gluon.jit
def kernel(
    seed, out, sequence, head, row, column, threshold, PACK: gl.constexpr, TURNED: gl.constexpr, MASKS: gl.constexpr
):
    """Ones that live: rows of PACK heads by columns, or columns by rows if TURNED; by masks, or one by one."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    x = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    y = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    key = key_of(seed)
    heads = head
    if PACK > 1:
        heads = (head * PACK + x % PACK)[:, None]
        key = afresh(key)
    if TURNED:
        word = dropped_turned(key, sequence, heads, row, column, threshold)
    else:
        word = dropped(key, sequence, heads, row + x // PACK, column, threshold)
    if MASKS:
        ones = without(gl.full([64, 64], 1.0, gl.bfloat16, layout=layout), word, TURNED)
    else:
        ones = gl.where(alive(word, layout, TURNED), 1.0, 0.0).to(gl.bfloat16)
    gl.store(out + x[:, None] * 64 + y[None, :], ones)


@cache
def compiled(pack, turned, masks):
    integers = dict.fromkeys(("sequence", "head", "row", "column", "threshold"), "i32")
    signature = {"seed": "*i64", "out": "*bf16", **integers, **dict.fromkeys(("PACK", "TURNED", "MASKS"), "constexpr")}
    constants = {(7,): pack, (8,): turned, (9,): masks}
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(2)}
    source = GluonASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=aot.TARGETS["sm_90"], options={"num_warps": 4})


def lives(made, seed, **indices):
    """What the kernel writes, as bool (64, 64)."""
    memory = np.zeros(16 + 2 * 64 * 64, np.uint8)
    memory[:8] = np.array([seed], np.int64).view(np.uint8)
    ptx.run(made.asm["ptx"], (0, 16, *indices.values()), memory)
    written = memory[16:].view(np.uint16)
    assert set(written.tolist()) <= {0, ONE}
    return torch.from_numpy(written == ONE).reshape(64, 64)


def index(value):
    return torch.tensor([value], dtype=torch.int64)


@pytest.mark.parametrize(("pack", "masks"), [(1, True), (1, False), (2, True), (8, True), (64, True)])
@given(**SIZES)
@example(**EXTREMES, threshold=6554)
def test_rows_by_columns(pack, masks, seed, sequence, head, row, column, threshold):
    made = compiled(pack, False, masks)
    found = lives(made, seed, sequence=sequence, head=head, row=row, column=column, threshold=threshold)
    place = torch.arange(64)[:, None]
    where = index(sequence), head * pack + place % pack, row + place // pack, column + torch.arange(64)
    assert torch.equal(found, philox.keep(index(seed), *where, threshold))


@pytest.mark.parametrize("masks", [True, False])
@given(**SIZES)
@example(**EXTREMES, threshold=6554)
def test_columns_by_rows(masks, seed, sequence, head, row, column, threshold):
    made = compiled(1, True, masks)
    found = lives(made, seed, sequence=sequence, head=head, row=row, column=column, threshold=threshold)
    where = index(sequence), index(head), row + torch.arange(64), column + torch.arange(64)[:, None]
    assert torch.equal(found, philox.keep(index(seed), *where, threshold))


@pytest.mark.parametrize(("turned", "exchanges"), [(False, 2), (True, 3)])
def test_a_draw_serves_eight_weights(turned, exchanges, tmp_path):
    """A thread has 32 weights: 4 draws of 2 * 7 products, fewer where rows or columns share some, and few shuffles."""
    binary = tmp_path / "kernel.cubin"
    binary.write_bytes(compiled(1, turned, True).asm["cubin"])
    instructions = aot.parse_sass(aot._dump("-sass", binary)).values()
    count = lambda name: sum(name in instruction for instruction in instructions)  # noqa: E731
    assert count("IMAD.WIDE.U32") + count("IMAD.HI.U32") < 4 * 2 * philox.ROUNDS
    assert count("SHFL") == exchanges
    assert count("VIMNMX.U16x2") == count("VIADDMNMX.U16x2") == 4 * 4
    assert count("PRMT") <= 16 + exchanges
    assert count("LDL") == count("STL") == count("LDS") == 0


# The forward kernel with dropout: how many instructions of its innermost loops may spill. Where the heads of a group
# share a tile, rows have products of their own, and a masked block at the end of a walk spills some.
WHOLE = [
    ("causal", (64, 64), torch.bfloat16, 0),
    ("causal", (128, 128), torch.float16, 0),
    ("few", (64, 64), torch.bfloat16, 80),
    ("causal", (256, 256), torch.bfloat16, 0),
]


@pytest.mark.parametrize(("feature", "dims", "dtype", "spills"), WHOLE, ids=lambda value: str(value).split(".")[-1])
def test_the_forward_compiles(feature, dims, dtype, spills):
    launch = aot.launch_of_hopper(replace(FEATURES[feature], dims=dims, dropout_p=0.1), dtype)
    made = aot.compile_launch(launch, "sm_90")
    if triton.__version__.startswith(MEASURED):
        assert made.spills_at_products <= spills, made
    assert made.units == "wgmma.mma_async" and made.serialized == 0 and made.overwritten == (), made
    assert made.shared <= aot.SHARED_LIMITS["sm_90"], made
    assert launch.keywords["REGISTERS"] in made.handed, made


def test_portable_kernels_draw_once_for_eight_columns():
    """Not in each of the threads that hold some of the eight, four of them or eight."""
    launches = aot.launches_of(Spec(TWO, heads=(2, 2), dims=(64, 64), dropout_p=0.1), torch.bfloat16, "sm_90")
    for launch in launches[:1] + launches[2:]:
        rows, columns, warps, _ = launch.tile
        draws = rows * columns // 8 // (32 * warps)
        products = aot.made_of(launch, "sm_90").asm["ptx"].count("mul.wide.u32")
        # in a loop with a mask, and in one without
        assert 0 < products <= 2 * (2 * philox.ROUNDS * draws), launch.name
