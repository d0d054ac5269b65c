"""Clause 6: LSE is the natural logarithm, float32 (float64 for float64), and differentiable."""

import math

import pytest
import torch

import onchip
from tests import harness, oracle
from tests.machine import moved
from tests.problems import Spec, build


def test_natural_logarithm_of_the_number_of_equal_keys(schedule, dtype):
    problem = build(Spec(((5, 77),), scale=0.0), dtype)
    lse = harness.call(problem, schedule).lse
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(77)), rtol=1e-6, atol=0)


def test_dtype_and_layout(layout, schedule, dtype):
    lengths = ((20, 33),) * 2 if layout == "dense" else ((20, 33), (7, 9))
    problem = build(Spec(lengths, heads=(6, 2), layout=layout), dtype)
    out, lse = harness.call(problem, schedule)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert out.dtype == dtype
    assert lse.shape == ((6, 27) if layout == "packed" else (2, 6, 20))


def test_both_public_functions_return_the_same_output(layout, schedule, device):
    lengths = ((20, 33),) * 2 if layout == "dense" else ((20, 33), (7, 9))
    problem = moved(build(Spec(lengths, layout=layout, causal=True), torch.float32), device)
    positional, keywords = harness.arguments(problem, problem.leaves)
    plain = onchip.attention_varlen if problem.packed else onchip.attention
    out = plain(*positional, **keywords, schedule=schedule)
    assert isinstance(out, torch.Tensor)
    assert torch.equal(out, harness.compute(problem, schedule, problem.leaves).out)


@pytest.mark.parametrize("loss", ["mean", "z-loss"])
def test_gradient_through_the_lse(loss, layout, schedule, dtype):
    """The incoming gradients of loss = lse.mean() and of out.sum() + 3 lse^2."""
    lengths = ((20, 33),) * 2 if layout == "dense" else ((20, 33), (7, 9))
    problem = build(Spec(lengths, heads=(4, 2), layout=layout, causal=True, score=("sink",)), dtype)
    out, lse = harness.call(problem, schedule)
    if loss == "mean":
        d_out, d_lse = torch.zeros_like(out), torch.full_like(lse, 1 / lse.numel())
    else:
        d_out, d_lse = torch.ones_like(out), 6 * lse.nan_to_num(neginf=0.0)
    got = harness.attempt(problem, schedule, d_out, d_lse)
    oracle.assert_all_within_contract(got, problem, d_out, d_lse)
    assert got.gradients["query"].any() and got.gradients["key"].any()


def test_only_the_lse_enters_the_loss(schedule, device):
    leaves = [leaf.requires_grad_() for leaf in torch.randn(3, 2, 2, 40, 16, device=device)]
    onchip.attention_with_lse(*leaves, schedule=schedule).lse.mean().backward()
    query, key, _ = (leaf.detach().double().requires_grad_() for leaf in leaves)
    torch.logsumexp(query @ key.transpose(-1, -2) / 4, dim=-1).mean().backward()
    torch.testing.assert_close(leaves[0].grad.double(), query.grad, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(leaves[1].grad.double(), key.grad, rtol=1e-5, atol=1e-9)
    assert leaves[2].grad is None or not leaves[2].grad.any()


@pytest.mark.compiled
@pytest.mark.parametrize("offset", [62, 63, 64, 127, 1151])
def test_wherever_a_tile_meets_the_diagonal(offset, schedule, dtype):
    """The first rows of a tile may see nothing of the block that holds the last row's diagonal, and all of the next."""
    dims = (128, 128) if offset > 1024 else (16, 16)
    problem = build(Spec(((70, 70 + offset),), heads=(1, 1), dims=dims, causal=True), dtype)
    result = harness.check(problem, schedule)
    assert result.lse.isfinite().all()
