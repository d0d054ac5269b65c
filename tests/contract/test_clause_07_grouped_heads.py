"""Clause 7: heads_q is a multiple of heads_kv, gradients sum over the group, and dim_v is free."""

import pytest
import torch

from tests import harness, oracle
from tests.problems import Spec, build

LENGTHS = {"dense": ((20, 33),) * 2, "padded": ((20, 33), (7, 9)), "packed": ((20, 33), (7, 9))}


@pytest.mark.parametrize("heads", [(1, 1), (4, 2), (6, 1), (6, 3), (8, 8)], ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (16, 40), (40, 8)], ids=str)
def test_grouped_heads(heads, dims, layout, schedule, dtype):
    harness.check(build(Spec(LENGTHS[layout], heads=heads, dims=dims, layout=layout, causal=True), dtype), schedule)


@pytest.mark.parametrize("heads", [(4, 2), (6, 1)], ids=str)
def test_a_group_is_its_key_head_repeated(heads, layout, schedule):
    problem = build(Spec(LENGTHS[layout], heads=heads, layout=layout), torch.float64)
    axis = 1
    group = heads[0] // heads[1]
    repeated = problem.with_leaves(
        **{name: problem.leaves[name].repeat_interleave(group, axis) for name in ("key", "value")}
    )
    d_out, d_lse = oracle.cotangents(problem)
    got = harness.attempt(problem, schedule, d_out, d_lse)
    expected = harness.attempt(repeated, schedule, d_out, d_lse)
    for name in ("key", "value"):
        expected.gradients[name] = expected.gradients[name].unflatten(axis, (heads[1], group)).sum(axis + 1)
    for (name, x), (_, y) in zip(got.items(), expected.items(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
