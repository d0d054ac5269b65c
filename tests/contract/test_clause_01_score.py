"""Clause 1: the score, its order, and the sink in the denominator."""

import functools
from dataclasses import replace

import pytest
import torch

import onchip
from tests import harness
from tests.describe import Modify, Sink
from tests.problems import SCORES, Spec, build, named

SHAPES = {
    "dense": ((20, 33), (20, 33)),
    "padded": ((20, 33), (9, 12)),
    "packed": ((20, 33), (9, 12), (0, 5)),
}


@pytest.mark.parametrize("score", SCORES)
def test_each_score(score, layout, schedule, dtype):
    harness.check(build(Spec(SHAPES[layout], heads=(4, 2), layout=layout, score=(score,)), dtype), schedule)


@pytest.mark.parametrize("bias", ["bhqk", "hk", "q"])
@pytest.mark.parametrize("lengths", [((21, 40),) * 2, ((40, 136),) * 2], ids=["40", "136"])
def test_columns_in_whole_vectors(lengths, bias, schedule, dtype):
    """Eight columns of a bias and of a mask lie in a row, and the last tile has fewer columns than others."""
    harness.check(build(Spec(lengths, heads=(4, 2), mask="tensor", score=("bias",), bias=bias), dtype), schedule)


@pytest.mark.parametrize("scale", [None, 0.0, -0.7, 3.0])
def test_scale(scale, schedule, dtype):
    harness.check(build(Spec(scale=scale, dims=(40, 16)), dtype), schedule)


def test_the_order_does_not_depend_on_the_tuple(schedule):
    problem = build(Spec(score=("softcap", "alibi", "bias", "relative", "sink")), torch.float32)
    harness.assert_same_bits(
        harness.attempt(problem, schedule), harness.attempt(replace(problem, score=problem.score[::-1]), schedule)
    )


@pytest.mark.parametrize("swap", [False, True])
def test_modify_functions_run_in_tuple_order(swap, schedule):
    double = Modify(lambda s, b, h, i, j: 2 * s)
    raise_late = Modify(lambda s, b, h, i, j: s + 0.05 * j)
    problem = build(Spec(((20, 20),)), torch.float64)
    harness.check(replace(problem, score=(raise_late, double) if swap else (double, raise_late)), schedule)


def test_several_biases_add(schedule, exact, device):
    query, key, value = torch.randn(3, 1, 2, 20, 8, dtype=exact, device=device)
    first, second = torch.randn(2, 1, 2, 20, 20, dtype=exact, device=device)
    both = onchip.attention(
        query, key, value, schedule=schedule, score=(onchip.scores.bias(first), onchip.scores.bias(second))
    )
    summed = onchip.attention(query, key, value, schedule=schedule, score=onchip.scores.bias(first + second))
    tolerance = 4 * torch.finfo(exact).eps
    torch.testing.assert_close(both, summed, rtol=0, atol=tolerance * summed.abs().max().item())


def times(factor, s, b, h, i, j):
    return s * factor


def keyword_times(s, b, h, i, j, *, factor):
    return s * factor


BINDINGS = {
    "closure": lambda factor: lambda s, b, h, i, j: s * factor,
    "default": lambda factor: lambda s, b, h, i, j, factor=factor: s * factor,
    "partial": lambda factor: functools.partial(times, factor),
    "keyword": lambda factor: functools.partial(keyword_times, factor=factor),
}


@pytest.mark.parametrize("binding", BINDINGS)
def test_functions_of_one_code_keep_their_own_constants(binding, schedule):
    """The same line of code over another number is another function, however the number is bound."""
    problem = build(Spec(((20, 20),)), torch.float64)
    for factor in (0.5, 2.0, -1.0, 2):
        harness.check(replace(problem, score=(Modify(BINDINGS[binding](factor)),)), schedule)


def test_functions_of_one_code_keep_their_own_tensors(schedule):
    problem = build(Spec(((20, 20),)), torch.float64)
    look_up = Modify(lambda s, b, h, i, j, table: s + table[j], ("table",))
    for size in (20, 31, 20):
        table = torch.randn(size, dtype=torch.float64)
        harness.check(replace(problem, score=(look_up,)).with_leaves(table=table), schedule)


def test_functions_see_the_indices_of_the_contract(layout, schedule):
    """batch is the sequence, head the query head, row and column count from the start of the sequence."""
    problem = build(Spec(SHAPES[layout], heads=(4, 2), layout=layout, causal=True), torch.float64)
    places = Modify(lambda s, b, h, i, j: 0 * s + 0.3 * b * j + torch.sin((h * j).to(s.dtype)) + 0.01 * i * j)
    harness.check(replace(problem, score=(places,)), schedule)


def test_a_function_may_mask_with_minus_infinity(schedule):
    problem = build(Spec(((20, 33),)), torch.float64)
    hide = Modify(lambda s, b, h, i, j: torch.where((i + j) % 3 == 0, s, -float("inf")))
    harness.check(replace(problem, score=(hide,)), schedule)


def test_a_sink_adds_to_the_denominator_only(schedule, exact):
    problem = build(Spec(((20, 33),)), exact)
    plain = harness.call(problem, schedule)
    logits = torch.tensor([0.5, -2.0], dtype=exact)
    sunk = harness.call(replace(problem, score=(Sink(),)).with_leaves(sink=logits), schedule)
    expected = torch.logaddexp(plain.lse, logits[None, :, None])
    close = {"rtol": 0, "atol": 1e-12 if exact == torch.float64 else 1e-5}
    torch.testing.assert_close(sunk.lse, expected, **close)
    torch.testing.assert_close(sunk.out, plain.out * (plain.lse - expected).exp()[..., None], **close)


@pytest.mark.parametrize("twice", ["softcap", "alibi", "sink"])
def test_at_most_one_of_each(twice):
    query, key, value = torch.randn(3, 1, 2, 4, 8)
    term = {
        "softcap": onchip.scores.softcap(2.0),
        "alibi": onchip.scores.alibi(torch.ones(2)),
        "sink": onchip.scores.sink(torch.ones(2)),
    }[twice]
    with pytest.raises(ValueError, match=twice):
        onchip.attention(query, key, value, score=(term, term))


@pytest.mark.parametrize(
    **named(
        [
            Spec(((5, 6), (5, 6)), heads=(4, 2), dims=(3, 2), causal=True, score=("softcap", "alibi", "bias", "sink")),
            Spec(
                ((5, 6), (3, 0), (6, 4)), heads=(2, 1), dims=(3, 2), layout="packed", score=("bias", "relative", "sink")
            ),
            Spec(((5, 6), (4, 3)), dims=(2, 3), layout="padded", score=("gate", "alibi"), slopes="bh", bias="hq"),
        ]
    )
)
def test_gradients_against_finite_differences(spec, schedule, device):
    """gradcheck through out and LSE for query, key, value, bias, slopes, sink and captured tensors."""
    problem = build(spec)
    names = list(problem.leaves)
    seen = harness.call(problem, schedule).lse.isfinite()

    def function(*leaves):
        out, lse = harness.call(problem, schedule, dict(zip(names, leaves, strict=True)))
        return out, lse[seen]

    leaves = [leaf.detach().requires_grad_() for leaf in problem.leaves.values()]
    torch.autograd.gradcheck(function, leaves, fast_mode=True, nondet_tol=0.0 if device == "cpu" else 1e-12)
