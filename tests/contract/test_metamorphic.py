"""Relations between two answers that hold whatever the inputs are."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies

import onchip
from tests import harness, oracle
from tests.describe import Sink
from tests.machine import sized
from tests.problems import SHORT, Spec, build

TOLERANCE = {torch.float64: {"rtol": 1e-10, "atol": 1e-11}, torch.float32: {"rtol": 1e-4, "atol": 1e-4}}
LONGEST = sized(90, SHORT)
lengths = strategies.integers(1, LONGEST)
head_pairs = strategies.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)])
seeds = strategies.integers(0, 10_000)
plain_scores = strategies.sampled_from([(), ("softcap",), ("sink",), ("softcap", "sink")])


def close(got, expected, name=""):
    torch.testing.assert_close(got, expected, **TOLERANCE[got.dtype], msg=lambda text: f"{name}: {text}")


@given(
    length_q=lengths, length_k=lengths, heads=head_pairs, score=plain_scores, dropout=strategies.booleans(), seed=seeds
)
def test_permuting_keys(length_q, length_k, heads, score, dropout, seed, schedule, exact):
    """Keys, values and the columns of the mask move together: nothing changes but the order of dK and dV."""
    problem = build(Spec(((length_q, length_k),), heads=heads, score=score, mask="tensor", seed=seed), exact)
    order = torch.randperm(length_k, generator=torch.Generator().manual_seed(seed))
    moved = replace(
        problem.with_leaves(**{name: problem.leaves[name][:, :, order] for name in ("key", "value")}),
        mask=replace(problem.mask, tensor=problem.mask.tensor[..., order]),
    )
    got, expected = harness.attempt(moved, schedule), harness.attempt(problem, schedule)
    for name in ("key", "value"):
        expected.gradients[name] = expected.gradients[name][:, :, order]
    for (name, x), (_, y) in zip(got.items(), expected.items(), strict=True):
        close(x, y, name)


@given(length_q=lengths, length_k=lengths, heads=head_pairs, causal=strategies.booleans(), seed=seeds)
def test_a_constant_added_to_the_values(length_q, length_k, heads, causal, seed, schedule, exact):
    """Weights sum to one: the output of every row with a key moves by the constant, and no score gradient changes."""
    problem = build(Spec(((length_q, length_k),), heads=heads, causal=causal, seed=seed), exact)
    constant = torch.randn(heads[1], 1, 16, dtype=exact, generator=torch.Generator().manual_seed(seed))
    moved = problem.with_leaves(value=problem.leaves["value"] + constant)
    got, expected = harness.attempt(moved, schedule), harness.attempt(problem, schedule)
    shift = constant.repeat_interleave(heads[0] // heads[1], 0)[None] * expected.lse.isfinite()[..., None]
    close(got.out, expected.out + shift, "out")
    close(got.lse, expected.lse, "lse")
    for name, gradient in got.gradients.items():
        close(gradient, expected.gradients[name], name)


@given(length_q=lengths, length_k=lengths, heads=head_pairs, causal=strategies.booleans(), seed=seeds)
def test_keys_shifted(length_q, length_k, heads, causal, seed, schedule, exact):
    """A vector added to every key adds one number to all scores of a row: only the LSE moves, by scale * q . vector."""
    problem = build(Spec(((length_q, length_k),), heads=heads, causal=causal, seed=seed), exact)
    vector = torch.randn(heads[1], 1, 16, dtype=exact, generator=torch.Generator().manual_seed(seed))
    got = harness.call(problem.with_leaves(key=problem.leaves["key"] + vector), schedule)
    expected = harness.call(problem, schedule)
    close(got.out, expected.out, "out")
    shift = (problem.leaves["query"] * vector.repeat_interleave(heads[0] // heads[1], 0)).sum(-1) / 4
    close(got.lse, expected.lse + shift, "lse")


@given(length_q=lengths, length_k=lengths, times=strategies.integers(2, 4), heads=head_pairs, seed=seeds)
def test_keys_duplicated(length_q, length_k, times, heads, seed, schedule, exact):
    """The same keys several times over: the same output, and an LSE larger by the logarithm of the count."""
    problem = build(Spec(((length_q, length_k),), heads=heads, seed=seed), exact)
    repeated = problem.with_leaves(**{name: problem.leaves[name].repeat(1, 1, times, 1) for name in ("key", "value")})
    got, expected = harness.call(repeated, schedule), harness.call(problem, schedule)
    close(got.out, expected.out, "out")
    close(got.lse, expected.lse + math.log(times), "lse")


@given(
    length_q=lengths,
    pieces=strategies.lists(strategies.integers(0, sized(40, 15)), min_size=1, max_size=5),
    heads=head_pairs,
    masked=strategies.booleans(),
    sink=strategies.booleans(),
    seed=seeds,
)
def test_split_and_merged_anywhere(length_q, pieces, heads, masked, sink, seed, schedule, exact):
    """Partial results over any split of the keys, some of them empty, merge to the whole; the sink joins at the end."""
    total = sum(pieces)
    problem = build(Spec(((length_q, total),), heads=heads, mask="tensor" if masked else None, seed=seed), exact)
    logits = torch.randn(heads[0], dtype=exact, generator=torch.Generator().manual_seed(seed)) if sink else None
    state, start = onchip.softmax.empty((1, heads[0], length_q), 16, exact, "cpu"), 0
    for piece in pieces:
        part = slice(start, start + piece)
        partial = problem.with_leaves(**{name: problem.leaves[name][:, :, part] for name in ("key", "value")})
        if masked:
            partial = replace(partial, mask=replace(problem.mask, tensor=problem.mask.tensor[..., part]))
        state = onchip.softmax.merge(state, onchip.softmax.from_output(*harness.call(partial, schedule)))
        start += piece
    out, lse = onchip.softmax.finish(state, None if logits is None else logits[None, :, None])
    whole = problem if logits is None else replace(problem, score=(Sink(),)).with_leaves(sink=logits)
    expected = harness.call(whole, schedule)
    close(out, expected.out, "out")
    close(lse, expected.lse, "lse")


@given(
    length_q=lengths, length_k=lengths, heads=head_pairs, causal=strategies.booleans(), score=plain_scores, seed=seeds
)
def test_heads_alone(length_q, length_k, heads, causal, score, seed, schedule, exact):
    """Each query head computed by itself."""
    problem = build(Spec(((length_q, length_k),) * 2, heads=heads, causal=causal, score=score, seed=seed), exact)
    whole = harness.call(problem, schedule)
    for head in range(heads[0]):
        group = head // (heads[0] // heads[1])
        leaves = {name: leaf[:, group : group + 1] for name, leaf in problem.leaves.items() if name in ("key", "value")}
        leaves["query"] = problem.leaves["query"][:, head : head + 1]
        if "sink" in problem.leaves:
            leaves["sink"] = problem.leaves["sink"][head : head + 1]
        alone = harness.call(problem.with_leaves(**leaves), schedule)
        close(alone.out[:, 0], whole.out[:, head], "out")
        close(alone.lse[:, 0], whole.lse[:, head], "lse")


@given(
    length_q=lengths,
    length_k=lengths,
    heads=head_pairs,
    causal=strategies.booleans(),
    dropout=strategies.booleans(),
    seed=seeds,
)
def test_grouped_heads_against_repeated_heads(length_q, length_k, heads, causal, dropout, seed, schedule, exact):
    spec = Spec(((length_q, length_k),), heads=heads, causal=causal, dropout_p=0.25 if dropout else 0.0, seed=seed)
    problem = build(spec, exact)
    group = heads[0] // heads[1]
    repeated = problem.with_leaves(
        **{name: problem.leaves[name].repeat_interleave(group, 1) for name in ("key", "value")}
    )
    got, expected = harness.attempt(problem, schedule), harness.attempt(repeated, schedule)
    for name in ("key", "value"):
        expected.gradients[name] = expected.gradients[name].unflatten(1, (heads[1], group)).sum(2)
    for (name, x), (_, y) in zip(got.items(), expected.items(), strict=True):
        close(x, y, name)


@given(length_q=lengths, length_k=lengths, heads=head_pairs, causal=strategies.booleans(), seed=seeds)
def test_rows_of_the_bias_gradient_sum_to_zero(length_q, length_k, heads, causal, seed, schedule, exact):
    """A constant added to a row of scores changes nothing but the LSE, so without its gradient the row sums to 0."""
    problem = build(Spec(((length_q, length_k),), heads=heads, causal=causal, score=("bias",), seed=seed), exact)
    d_out, d_lse = oracle.cotangents(problem)
    gradient = harness.attempt(problem, schedule, d_out, torch.zeros_like(d_lse)).gradients["bias"]
    close(gradient.sum(-1), torch.zeros_like(gradient.sum(-1)), "without the LSE")
    result = harness.attempt(problem, schedule, torch.zeros_like(d_out), d_lse)
    seen = result.lse.isfinite()
    close(result.gradients["bias"].sum(-1), d_lse * seen, "of the LSE alone")


@given(length_q=lengths, length_k=lengths, heads=head_pairs, window=strategies.integers(0, LONGEST), seed=seeds)
def test_the_value_gradients_sum_to_the_incoming_gradient(length_q, length_k, heads, window, seed, schedule, exact):
    """Weights sum to one, so dV summed over keys is dO summed over the rows that see a key, head by head."""
    problem = build(Spec(((length_q, length_k),), heads=heads, window=(window, None), seed=seed), exact)
    d_out, d_lse = oracle.cotangents(problem)
    result = harness.attempt(problem, schedule, d_out, d_lse)
    rows = (d_out * result.lse.isfinite()[..., None]).sum(2)
    close(result.gradients["value"].sum(2), rows.unflatten(1, (heads[1], -1)).sum(2), "value")


@pytest.mark.parametrize("layout", ["padded", "packed"])
@given(
    pairs=strategies.lists(strategies.tuples(*[strategies.integers(0, sized(60, 25))] * 2), min_size=1, max_size=4),
    seed=seeds,
)
def test_layouts_are_sequences_alone(pairs, seed, layout, schedule, exact):
    """A padded or packed call is the dense call of each sequence."""
    problem = build(Spec(tuple(pairs), heads=(4, 2), layout=layout, causal=True, seed=seed), exact)
    out = harness.call(problem, schedule).out
    for sequence in problem.sequences():
        leaves = {
            name: oracle.rows_of(leaf, problem, sequence, "query" if name == "query" else "key")[None]
            for name, leaf in problem.leaves.items()
        }
        alone = harness.call(oracle.Problem(leaves, causal=True), schedule).out[0]
        close(oracle.rows_of(out, problem, sequence), alone, f"sequence {sequence.number}")
