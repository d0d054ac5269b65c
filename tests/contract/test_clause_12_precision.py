"""Clause 12: twice the error of standard attention in the working dtype, 1e-12 in float64, outputs and gradients."""

import pytest
import torch
from hypothesis import given, settings

from tests import harness
from tests.problems import COVERING, LONG, SMOKE, Spec, build, named, specs


@pytest.mark.parametrize(**named(COVERING, SMOKE))
def test_covering_problems(spec, schedule, dtype):
    harness.check(build(spec, dtype), schedule)


@pytest.mark.compiled
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=lambda d: str(d)[6:])
@pytest.mark.parametrize(**named(LONG))
def test_problems_of_several_tiles(spec, schedule, dtype):
    harness.check(build(spec, dtype), schedule)


@pytest.mark.parametrize(**named(COVERING[::3]))
def test_the_schedule_that_the_dispatcher_chooses(spec):
    harness.check(build(spec, torch.float32), None)


@pytest.mark.compiled
@given(spec=specs())
def test_any_problem(spec, schedule):
    harness.check(build(spec, torch.float64), schedule)


@pytest.mark.compiled
@settings(max_examples=10)
@given(spec=specs(longest=1200))
def test_any_long_problem(spec, schedule):
    harness.check(build(spec, torch.float64), schedule)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:])
@given(spec=specs())
def test_any_problem_in_working_precision(spec, schedule, dtype):
    harness.check(build(spec, dtype), schedule)


def test_sums_are_kept_in_float32(schedule):
    """Thousands of equal weights: an accumulator in the working dtype would stop growing early."""
    for dtype in (torch.bfloat16, torch.float16):
        query, key = torch.zeros(2, 1, 1, 4096, 8, dtype=dtype)
        problem = build(Spec(((1, 4096),), heads=(1, 1), dims=(8, 8)), dtype)
        ones = problem.with_leaves(query=query[:, :, :1], key=key, value=torch.ones_like(key))
        out, lse = harness.call(ones, schedule)
        torch.testing.assert_close(out, torch.ones_like(out), rtol=0, atol=0)
        torch.testing.assert_close(lse, torch.full_like(lse, 4096).log(), rtol=1e-6, atol=0)
