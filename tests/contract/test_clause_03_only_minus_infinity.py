"""Clause 3: only minus infinity masks; finite scores of any size compete."""

from dataclasses import replace

import pytest
import torch

from tests import harness
from tests.describe import Bias, TensorMask
from tests.problems import Spec, build


def biased(bias, dtype, length=70):
    problem = build(Spec(((bias.shape[-2], length),)), dtype)
    return replace(problem, score=(Bias(),)).with_leaves(bias=bias)


@pytest.mark.parametrize("floor", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_a_row_of_the_smallest_number_is_the_mean_of_the_values(floor, schedule):
    bias = torch.zeros(1, 1, 40, 70)
    bias[:, :, 5:30] = torch.finfo(floor).min
    problem = biased(bias, torch.float32)
    out, lse = harness.call(problem, schedule)
    mean = problem.leaves["value"].mean(dim=2, keepdim=True).expand(-1, -1, 25, -1)
    torch.testing.assert_close(out[:, :, 5:30], mean, rtol=0, atol=4 * torch.finfo(torch.float32).eps)
    assert lse.isfinite().all()


@pytest.mark.parametrize("sign", [-1, 1])
def test_the_largest_numbers_compete_in_every_dtype(sign, schedule, dtype):
    extreme = torch.finfo(dtype).max * sign
    bias = torch.zeros(1, 1, 20, 70, dtype=dtype)
    bias[..., ::3] = extreme
    bias[:, :, 10:] = extreme
    out, lse = harness.call(biased(bias, dtype), schedule)
    assert out.isfinite().all() and lse.isfinite().all()
    visible = (torch.arange(70) % 3 == 0) == (sign > 0)
    weights = harness.weights(biased(bias, dtype), schedule)[0]
    assert not weights[:, :10, ~visible].any(), "a score lower by the largest number has weight 0"
    assert weights[:, :10, visible].gt(0).all()
    assert weights[:, 10:].gt(0).all(), "equal scores share the weight, however large"


@pytest.mark.parametrize("level", [-2e5, -1e5, -5e4, -1e4, 1e4, 1e5])
def test_large_scores_from_query_and_key(level, schedule, dtype):
    problem = build(Spec(((40, 64),), heads=(4, 1), dims=(128, 16), scale=1.0), dtype)
    key = torch.full_like(problem.leaves["key"], level / 128)
    key[:, :, 0] = (level + 5000) / 128
    query = torch.ones_like(problem.leaves["query"])
    weights = harness.weights(problem.with_leaves(query=query, key=key), schedule)[0]
    expected = torch.zeros_like(weights)
    expected[:, :, 0] = 1
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(weights, expected, rtol=eps, atol=0)
    equal = harness.weights(problem.with_leaves(query=query, key=key[:, :, 1:2].expand_as(key)), schedule)[0]
    torch.testing.assert_close(equal, torch.full_like(equal, 1 / 64), rtol=eps, atol=0)


@pytest.mark.parametrize("level", [-1e5, -1e4, 1e4, 1e5])
def test_gradients_up_to_a_hundred_thousand(level, schedule):
    harness.check(biased(torch.randn(1, 2, 20, 70) + level, torch.float32), schedule)


@pytest.mark.parametrize("level", [-1e30, 1e8, 1e30])
def test_dense_gradients_are_exact_beyond(level):
    """All scores equal: the gradients are those of scale 0, although a float32 LSE could not hold the scores apart."""
    problem = replace(biased(torch.full((1, 2, 20, 70), level), torch.float32), scale=0.0)
    flat = problem.with_leaves(bias=torch.zeros(1, 2, 20, 70))
    got, expected = harness.attempt(problem, "dense"), harness.attempt(flat, "dense")
    assert torch.equal(got.out, expected.out)
    for name, gradient in got.gradients.items():
        assert torch.equal(gradient, expected.gradients[name]), name


def test_minus_infinity_in_a_bias_masks(schedule, dtype):
    problem = build(Spec(((40, 70),)), dtype)
    keep = torch.rand(1, 1, 40, 70) < 0.5
    bias = torch.zeros(1, 1, 40, 70, dtype=dtype).masked_fill(~keep, -float("inf"))
    biased = replace(problem, score=(Bias(),)).with_leaves(bias=bias)
    masked = harness.call(replace(problem, mask=TensorMask(keep, bare=True)), schedule)
    added = harness.call(biased, schedule)
    torch.testing.assert_close(added.out, masked.out, rtol=0, atol=4 * torch.finfo(dtype).eps)
    weights = harness.weights(biased, schedule)[0]
    assert torch.equal(weights > 0, keep[0].expand_as(weights))
