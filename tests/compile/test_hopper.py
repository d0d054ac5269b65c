"""The Hopper kernels compile without a GPU: they spill at no product, and products overlap and have registers."""

from dataclasses import replace

import pytest
import torch
import triton

from tests.compile import aot
from tests.compile.rows import RAGGED, TWO, Spec

FEATURES = {
    "full": Spec(TWO),
    "causal": Spec(TWO, causal=True, heads=(4, 2)),
    "window-sink": Spec(TWO, window=(20, 5), score=("sink",)),
    "diagonals-padded": Spec(TWO, mask="diagonals", layout="padded", tail=3),
    "packed": Spec(RAGGED, layout="packed", causal=True, heads=(4, 2)),
    "packed-softcap": Spec(RAGGED, layout="packed", causal=True, score=("softcap",)),
    "alibi": Spec(TWO, score=("alibi",), causal=True),
    "few": Spec(((20, 100), (20, 100)), heads=(6, 1), causal=True, score=("alibi", "sink")),
    "few-packed": Spec(((20, 100), (3, 70)), heads=(8, 2), layout="packed", causal=True),
}
OTHER_DIMS = (
    ("causal", (96, 64)), ("packed", (40, 40)), ("packed", (128, 128)), ("alibi", (96, 96)), ("window-sink", (80, 64)),
    ("full", (8, 8)), ("full", (256, 256)), ("causal", (192, 128)), ("packed", (256, 192)), ("alibi", (192, 128)),
    ("packed-softcap", (256, 256)),
)  # fmt: skip
ROWS = [
    (feature, dims, torch.bfloat16 if (place + dims[0] // 8) % 2 else torch.float16)
    for place, feature in enumerate(FEATURES)
    for dims in ((64, 64), (128, 128))
] + [(feature, dims, torch.bfloat16) for feature, dims in OTHER_DIMS]
# Triton whose code the tiles were measured with. Newer ones give other code, which is bounded, not tuned.
MEASURED = "3.6"
MOST_SPILLS = 0 if triton.__version__.startswith(MEASURED) else 120


@pytest.mark.parametrize(("feature", "dims", "dtype"), ROWS, ids=lambda value: str(value).replace("torch.", ""))
def test_compiles(feature, dims, dtype):
    launch = aot.launch_of_hopper(replace(FEATURES[feature], dims=dims), dtype)
    made = aot.compile_launch(launch, "sm_90")
    # the warp that brings tiles has few registers, and time for what it spills
    assert made.spills_at_products <= MOST_SPILLS, made
    assert made.shared <= aot.SHARED_LIMITS["sm_90"], made
    assert made.units == "wgmma.mma_async", made
    assert made.overwritten == (), "memory of a barrier that nobody uses holds something else"
    assert made.serialized == 0, "ptxas made products wait for each other (C75xx)"
    given = launch.keywords["REGISTERS"]
    assert given in made.handed, f"consumers got {made.handed} registers and not {given}"
