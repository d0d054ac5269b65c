"""One compiled kernel serves every length: what Triton looks kernels up by holds nothing of it.

What masks and biases hold for columns is read in vectors where the length is a multiple of 8: there it is two.
"""

from dataclasses import replace

import pytest
import torch

from tests.compile import aot
from tests.compile.rows import FEATURES, WITH_GRADIENTS

LENGTHS = (100, 128, 1000)
IN_EIGHTS, RAGGED = (104, 128, 1000), (99, 100, 1001)
# More than so many rows are no longer packed with the heads of their group: that is another kernel, once.
FEW = (1, 16, 64)


def at_length(spec, length):
    """The problem with so many rows, and as many columns, or more if the features want few rows."""
    return replace(spec, lengths=tuple((length, max(length, 100)) for _ in spec.lengths))


def facts(launch, target):
    """What a compiled kernel depends on, one by one: by kind and argument, and by the place in a tuple."""
    found = {("name", ""): launch.name}
    for kind, values in vars(aot.specialized(launch, target)).items():
        for key, value in values.items():
            name, *place = key if isinstance(key, tuple) else (key,)
            name = launch.kernel.arg_names[name] if isinstance(name, int) else name
            found[(kind, name, *place)] = None if value == [] else value
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("feature", sorted(FEATURES | WITH_GRADIENTS))
def test_lengths_do_not_specialize(feature, target, dtype):
    spec = (FEATURES | WITH_GRADIENTS)[feature]
    columns = "bias" in spec.score or spec.mask is not None
    for lengths in (IN_EIGHTS, RAGGED) if columns else (FEW if feature == "few" else LENGTHS,):
        seen = []
        for length in lengths:
            launches = aot.launches_of(at_length(spec, length), dtype, target)
            seen.append([facts(launch, target) for launch in launches])
        for other in seen[1:]:
            assert len(other) == len(seen[0])
            for one, two in zip(seen[0], other, strict=True):
                differing = {fact for fact in one.keys() | two.keys() if one.get(fact) != two.get(fact)}
                assert not differing


def test_what_does_specialize():
    """The comparison sees a difference where there is one: alignment, a mask's structure, the dtype."""
    spec = FEATURES["causal"]
    variants = [spec, replace(spec, view="interleaved"), replace(spec, window=(5, None)), FEATURES["documents"]]
    seen = [aot.specialized(aot.launches_of(variant, torch.float16, "sm_90")[0], "sm_90") for variant in variants]
    seen.append(aot.specialized(aot.launches_of(spec, torch.bfloat16, "sm_90")[0], "sm_90"))
    assert all(one != other for place, one in enumerate(seen) for other in seen[:place])
