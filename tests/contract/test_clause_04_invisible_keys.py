"""Clause 4: an invisible key has weight 0 and gradient 0, and what it holds does not matter; a visible NaN shows."""

from dataclasses import replace

import pytest
import torch

from tests import harness, oracle
from tests.describe import Bias, Blocks, Causal, Documents, Keys, Predicate, TensorMask, Window
from tests.machine import sized
from tests.problems import Spec, build

POISONS = (float("nan"), float("inf"), -float("inf"))
HEADS = sized((4, 2), (2, 1))
ROWS = sized(50, 20)  # of the problems in which some keys are hidden from all
HIDDEN = slice(32, 48)  # the keys that no row sees


def unseen(way, dtype):
    """A problem in which no row sees the keys `HIDDEN`, and the index of those keys in K and V."""
    ids = torch.zeros(70, dtype=torch.int64)
    ids[HIDDEN] = 9
    keep = ids == 0
    dense = build(Spec(((ROWS, 70),), heads=HEADS), dtype)
    at = (slice(None), slice(None), HIDDEN)
    if way == "lengths":
        padded = build(Spec(((50, 32), (50, 32)), heads=HEADS, layout="padded", tail=16, causal=True), dtype)
        return padded, at
    if way == "packed tail":
        return build(Spec(((20, 12), (30, 20)), heads=HEADS, layout="packed", tail=16), dtype), (HIDDEN,)
    if way == "packed documents":
        packed = build(Spec(((20, 60), (30, 10)), heads=HEADS, layout="packed"), dtype)
        return replace(packed, mask=Documents(torch.zeros(50, dtype=torch.int64), ids)), (HIDDEN,)
    mask = {
        "keys": Keys(keep),
        "keys of one sequence": Keys(keep[None]),
        "documents": Documents(torch.zeros(ROWS, dtype=torch.int64), ids),
        "documents and causal": Documents(torch.zeros(ROWS, dtype=torch.int64), ids) & Causal("top-left"),
        "blocks": Blocks(keep[::16][None], (ROWS, 16)),
        "tensor": TensorMask(keep.expand(ROWS, 70).clone()),
        "predicate": Predicate(lambda b, h, i, j: ((j < 32) | (j >= 48)) & (i >= 0)),
        "not": ~Keys(~keep),
    }
    return replace(dense, mask=mask[way]), at


WAYS = (
    "lengths", "packed tail", "packed documents", "keys", "keys of one sequence", "documents", "documents and causal",
    "blocks", "tensor", "predicate", "not",
)  # fmt: skip


@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("way", WAYS)
def test_what_unseen_keys_hold_does_not_matter(way, where, schedule):
    problem, at = unseen(way, torch.float32)
    clean = harness.attempt(problem, schedule)
    assert all(not clean.gradients[name][at].any() for name in ("key", "value")), "an unseen key has a gradient"
    for poison in sized(POISONS, POISONS[:1]):
        leaf = problem.leaves[where].clone()
        leaf[at] = poison
        harness.assert_same_bits(harness.attempt(problem.with_leaves(**{where: leaf}), schedule), clean)


@pytest.mark.parametrize("way", ["lengths", "packed tail", "keys"])
def test_unseen_keys_do_not_matter_in_any_dtype(way, schedule, dtype):
    problem, at = unseen(way, dtype)
    clean = harness.attempt(problem, schedule)
    leaves = {name: problem.leaves[name].clone() for name in ("key", "value")}
    for leaf in leaves.values():
        leaf[at] = float("nan")
    harness.assert_same_bits(harness.attempt(problem.with_leaves(**leaves), schedule), clean)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_rows_that_do_not_exist_do_not_matter(layout, schedule):
    """Queries and incoming gradients behind a length, or behind the last offset, may hold anything."""
    problem = build(Spec(((20, 12), (9, 20)), heads=HEADS, layout=layout, tail=16), torch.float32)
    d_out, d_lse = oracle.cotangents(problem)
    clean = harness.attempt(problem, schedule, d_out, d_lse)
    query, poisoned_out, poisoned_lse = problem.leaves["query"].clone(), d_out.clone(), d_lse.clone()
    if layout == "packed":
        query[29:], poisoned_out[29:], poisoned_lse[:, 29:] = (float("nan"),) * 3
    else:
        query[:, :, 20:], poisoned_out[:, :, 20:], poisoned_lse[:, :, 20:] = (float("nan"),) * 3
    harness.assert_same_bits(
        harness.attempt(problem.with_leaves(query=query), schedule, poisoned_out, poisoned_lse), clean
    )


HIDING = {
    "causal": Causal(),
    "window": Window(10, 4),
    "tensor": TensorMask(torch.rand(70, 70, generator=torch.Generator().manual_seed(3)) < 0.5),
    "predicate": Predicate(lambda b, h, i, j: (i + j) % 3 != 0),
    "or": Causal("top-left") | Predicate(lambda b, h, i, j: (i + j) % 3 == 0),
    "documents": Documents(torch.arange(70) // 23),
}


@pytest.mark.parametrize("poison", POISONS)
@pytest.mark.parametrize("way", HIDING)
def test_a_hidden_key_never_matters_to_the_forward_of_a_row(way, poison, schedule):
    problem = replace(build(Spec(((70, 70),), heads=HEADS)), mask=HIDING[way]).to(torch.float32)
    sequence = next(problem.sequences())
    clean = harness.call(problem, schedule)
    for column in sized((0, 33, 69), (33,)):
        sees = problem.visible(sequence)[0, :, column]
        key = problem.leaves["key"].clone()
        key[:, :, column] = poison
        out, lse = harness.call(problem.with_leaves(key=key), schedule)
        assert torch.equal(out[:, :, ~sees], clean.out[:, :, ~sees])
        assert torch.equal(lse[:, :, ~sees], clean.lse[:, :, ~sees])


@pytest.mark.parametrize("poison", POISONS)
def test_a_key_that_a_bias_hides_never_matters_to_the_forward_of_a_row(poison, schedule):
    bias = torch.zeros(1, 1, 70, 70)
    bias[..., :40, 33] = -float("inf")
    problem = replace(build(Spec(((70, 70),), heads=(4, 2)), torch.float32), score=(Bias(),)).with_leaves(bias=bias)
    clean = harness.call(problem, schedule)
    key = problem.leaves["key"].clone()
    key[:, :, 33] = poison
    out, lse = harness.call(problem.with_leaves(key=key), schedule)
    assert torch.equal(out[:, :, :40], clean.out[:, :, :40])
    assert torch.equal(lse[:, :, :40], clean.lse[:, :, :40])


@pytest.mark.parametrize("way", [None, *HIDING])
def test_a_visible_nan_shows(way, schedule, dtype):
    problem = replace(build(Spec(((70, 70),), heads=HEADS), dtype), mask=HIDING.get(way))
    sees = problem.visible(next(problem.sequences()))[0, :, 33]
    for name in ("key", "value"):
        leaf = problem.leaves[name].clone()
        leaf[:, :, 33, 2] = float("nan")
        out, lse = harness.call(problem.with_leaves(**{name: leaf}), schedule)
        shown = out[..., 2] if name == "value" else out.sum(-1)
        assert shown[:, :, sees].isnan().all()
        assert lse[:, :, sees].isnan().all() == (name == "key")
    query = problem.leaves["query"].clone()
    query[:, :, 40, 1] = float("nan")
    out, lse = harness.call(problem.with_leaves(query=query), schedule)
    assert out[:, :, 40].isnan().all() and lse[:, :, 40].isnan().all()
    assert out[:, :, :40].isfinite().all() and out[:, :, 41:].isfinite().all()


def test_a_visible_nan_in_a_bias_shows(schedule):
    problem = replace(build(Spec(((70, 70),), causal=True), torch.float32), score=(Bias(),))
    bias = torch.zeros(1, 1, 70, 70)
    bias[:, :, 40, 33], bias[:, :, 10, 33] = float("nan"), float("nan")  # the second is hidden
    out, _ = harness.call(problem.with_leaves(bias=bias), schedule)
    assert out[:, :, 40].isnan().all()
    assert out[:, :, :40].isfinite().all() and out[:, :, 41:].isfinite().all()


def test_hidden_keys_have_weight_and_gradient_exactly_zero(schedule, dtype):
    problem = replace(build(Spec(((70, 70),), heads=HEADS), dtype), mask=Causal("top-left"))
    visible = problem.visible(next(problem.sequences()))
    weights = harness.weights(problem, schedule)[0]
    assert torch.equal(weights != 0, visible)
    d_out, d_lse = oracle.cotangents(problem)
    d_out[:, :, 30:], d_lse[:, :, 30:] = 0, 0
    gradients = harness.attempt(problem, schedule, d_out, d_lse).gradients
    assert not gradients["key"][:, :, 30:].any() and not gradients["value"][:, :, 30:].any()
    assert gradients["key"][:, :, :30].any() and gradients["value"][:, :, :30].any()
