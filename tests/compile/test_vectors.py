"""What portable kernels read of biases and masks, and store of gradients: vectors, where eight columns follow."""

import re
from dataclasses import replace

import pytest
import torch

from tests.compile import aot
from tests.compile.rows import Spec

SINGLE = re.compile(r"(?:ld|st)\.global\S*\.(?:[bus]8|[bus]16) ")
"""A load or store of one element of 16 bits, or of a mask."""


@pytest.mark.parametrize("feature", [{"score": ("bias",)}, {"mask": "tensor"}], ids=["bias", "mask"])
def test_pairs_are_read_and_stored_in_vectors(feature):
    spec = Spec(((256, 256),), heads=(2, 2), dims=(64, 64), **feature)
    found = {}
    for launch in aot.launches_of(spec, torch.bfloat16, "sm_90"):
        if launch.name not in ("delta", "finite"):
            found.setdefault(launch.name, []).append(len(SINGLE.findall(aot.made_of(launch, "sm_90").asm["ptx"])))
    # two of each kind, see schedules/triton/finite.py
    assert len(found) == (4 if "score" in feature else 3)
    assert all(counts == [0, 0] for counts in found.values()), found


@pytest.mark.parametrize(
    ("dim", "target"), [(64, "gfx942"), (64, "sm_86"), (128, "sm_86"), (128, "sm_90"), (256, "sm_90"), (256, "gfx942")]
)
def test_vectors_of_a_bias_and_a_mask_have_room(dim, target):
    spec = Spec(((256, 256),), heads=(2, 2), dims=(dim, dim), score=("bias",), mask="tensor", dropout_p=0.1)
    seen = set()
    for launch in aot.launches_of(spec, torch.bfloat16, target):
        if launch.name in ("forward", "keys", "queries", "gradient"):
            assert launch.keywords["EIGHTS"]
            seen.add((launch.name, launch.keywords["CAREFUL"]))
            assert aot.compile_launch(launch, target).shared <= aot.SHARED_LIMITS[target], launch.name
    assert len(seen) == 8


@pytest.mark.parametrize("spec", [Spec(((1100, 1100),)), Spec(((300, 300),), causal=True, mask="documents")], ids=str)
def test_tma_brings_keys_and_values_of_wide_heads(spec):
    """Addresses take no registers then, so that with 128 of them products do not wait for each other."""
    launch = aot.launches_of(replace(spec, heads=(2, 2), dims=(128, 128)), torch.bfloat16, "sm_90")[0]
    ptx = aot.made_of(launch, "sm_90").asm["ptx"]
    assert "cp.async.bulk.tensor" in ptx and "cp.async.cg.shared.global" not in ptx
    made = aot.compile_launch(launch, "sm_90")
    assert made.registers == launch.keywords["maxnreg"] == 128 and made.serialized == 0
