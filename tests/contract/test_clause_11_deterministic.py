"""Clause 11: deterministic=True gives equal bits over repeats, for outputs and all gradients."""

import pytest
import torch

from tests import harness
from tests.machine import sized
from tests.problems import RAGGED, Spec, build, named


@pytest.fixture(autouse=True)
def two_threads():
    """Sums must not depend on which thread comes first."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    **named(
        [
            Spec(((300, 300),) * 2, heads=(4, 2), dims=(64, 64), causal=True),
            Spec(((300, 300),), heads=(4, 1), score=("bias", "alibi", "sink"), bias="h", window=(60, 10)),
            Spec(RAGGED, heads=(4, 2), layout="packed", score=("relative", "gate"), dropout_p=0.25),
        ]
    )
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_equal_bits_over_repeats(spec, schedule, dtype):
    problem = build(spec, dtype)
    first = harness.attempt(problem, schedule, deterministic=True)
    for _ in range(sized(5, 1)):
        harness.assert_same_bits(harness.attempt(problem, schedule, deterministic=True), first)


def test_deterministic_results_are_right(schedule):
    harness.check(build(Spec(causal=True, heads=(4, 2), score=("bias",)), torch.float32), schedule, deterministic=True)


def test_none_follows_torch(schedule):
    """With torch's own switch on, the default call gives the bits of deterministic=True."""
    problem = build(Spec(RAGGED, heads=(4, 2), layout="packed", score=("relative",)), torch.float32)
    expected = harness.attempt(problem, schedule, deterministic=True)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        harness.assert_same_bits(harness.attempt(problem, schedule), expected)
    finally:
        torch.use_deterministic_algorithms(before)
