"""The Hopper kernels of the backward compile without a GPU: products overlap, have registers, and little is spilled."""

from dataclasses import replace

import pytest
import torch
import triton

from onchip.schedules.hopper.backward import DS_FULL, Q_EMPTY
from tests.compile import aot
from tests.compile.rows import RAGGED, TWO, Spec

FEATURES = {
    "full": Spec(TWO),
    "causal": Spec(TWO, causal=True),
    "grouped": Spec(TWO, causal=True, heads=(4, 2)),
    "window-sink": Spec(TWO, window=(20, 5), score=("sink",)),
    "padded": Spec(TWO, mask="diagonals", layout="padded", tail=3),
    "packed": Spec(RAGGED, layout="packed", causal=True, heads=(4, 2)),
    "softcap": Spec(RAGGED, layout="packed", causal=True, score=("softcap",)),
    "alibi": Spec(TWO, score=("alibi",), causal=True),
    "dropout": Spec(TWO, causal=True, dropout_p=0.1),
}
ROWS = [
    (feature, dims, torch.bfloat16 if (place + dims[0] // 64) % 2 else torch.float16, place % 3 == 1)
    for place, feature in enumerate(FEATURES)
    for dims in ((64, 64), (128, 128))
] + [
    ("causal", (96, 64), torch.bfloat16, True), ("packed", (40, 40), torch.bfloat16, True),
    ("causal", (256, 256), torch.bfloat16, False), ("packed", (256, 256), torch.float16, True),
    ("full", (192, 128), torch.bfloat16, True), ("grouped", (192, 192), torch.float16, False),
    ("dropout", (192, 128), torch.bfloat16, False), ("softcap", (256, 128), torch.bfloat16, False),
    ("padded", (160, 136), torch.bfloat16, False),
]  # fmt: skip
# loads and stores of local memory in loops that make products, above head dim 64
MOST_SPILLS = {"softcap": 140, "alibi": 120}
HELD_SPILLS = 4  # where half of v is in registers
# Triton whose code the kernels were measured with. Newer ones take more registers: spills are bounded, and beyond head
# dim 192 products may wait for each other.
MEASURED = triton.__version__.startswith("3.6")
SOME = ROWS if MEASURED else ROWS[::3]


@pytest.mark.parametrize(
    ("feature", "dims", "dtype", "deterministic"), SOME, ids=lambda value: str(value).replace("torch.", "")
)
def test_compiles(feature, dims, dtype, deterministic):
    spec = replace(FEATURES[feature], dims=dims)
    launches = aot.launches_of_hopper_backward(spec, dtype, deterministic)
    first, main, last = (aot.compile_launch(launch, "sm_90") for launch in launches)
    assert first.spills == last.spills == 0, (first, last)
    narrow = max(dims) <= 64
    held = not narrow and max(dims) <= 128 and feature != "dropout"
    most = 0 if narrow else MOST_SPILLS.get(feature, HELD_SPILLS if held else 0)
    assert main.spills_at_products <= (most if MEASURED else most + 110), main
    assert main.shared <= aot.SHARED_LIMITS["sm_90"], main
    assert main.units == "wgmma.mma_async", main
    assert main.overwritten == (), "memory of a barrier that nobody uses holds something else"
    assert main.hurried == (), "a program's number is overwritten though slow warps have yet to read it"
    assert main.barriers < min(Q_EMPTY.value, DS_FULL.value), "Triton takes a number that is the kernel's"
    assert main.serialized == 0 or (max(dims) > 192 and not MEASURED), "products wait for each other (C75xx)"
    assert (200 if narrow else 240) in main.handed, main.handed
