"""Runs a problem on onchip and holds the answer against the oracle. The one place that knows how to call schedules."""

import torch

import onchip
from tests import oracle

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Schedules that must run every problem. Any other one may decline with reasons: conftest.py then skips the test.
COMPLETE = ("dense", "tiled")


def arguments(problem, leaves):
    """Positional tensors and keywords of the public call."""
    score = tuple(term.value(*(leaves[name] for name in term.leaves)) for term in problem.score)
    keywords = {
        "causal": problem.causal,
        "window": problem.window,
        "mask": None if problem.mask is None else problem.mask.value(),
        "score": score if len(score) != 1 else score[0],
        "scale": problem.scale,
        "dropout_p": problem.dropout_p,
        "dropout_seed": problem.dropout_seed,
    }
    keywords["score"] = keywords["score"] or None
    positional = [leaves["query"], leaves["key"], leaves["value"]]
    if problem.packed:
        positional += [problem.cu_query, problem.cu_key]
    if problem.query_lengths is not None or problem.key_lengths is not None:
        keywords["lengths"] = (problem.query_lengths, problem.key_lengths)
    return positional, keywords


def call(problem, schedule, leaves=None, **overrides):
    """Output(out, lse) of the public function, on `leaves` or on the problem's own."""
    positional, keywords = arguments(problem, problem.leaves if leaves is None else leaves)
    function = onchip.attention_varlen_with_lse if problem.packed else onchip.attention_with_lse
    return function(*positional, **keywords | {"schedule": schedule} | overrides)


def attempt(problem, schedule, d_out=None, d_lse=None, **overrides):
    """Result of onchip: out, LSE and the gradient of every leaf for the given incoming gradients."""
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in problem.leaves.items()}
    out, lse = call(problem, schedule, leaves, **overrides)
    if d_out is None:
        d_out, d_lse = oracle.cotangents(problem)
    found = torch.autograd.grad((out, lse), list(leaves.values()), (d_out, d_lse), allow_unused=True)
    gradients = dict(zip(leaves, found, strict=True))
    missing = [name for name, gradient in gradients.items() if gradient is None]
    assert not missing, f"no gradient reached {missing}"
    return oracle.Result(out.detach(), lse.detach(), gradients)


def check(problem, schedule, **overrides):
    """Out, LSE and every gradient within clause 12 of the float64 oracle. Without gradients if a schedule has none."""
    d_out, d_lse = oracle.cotangents(problem)
    try:
        got = attempt(problem, schedule, d_out, d_lse, **overrides)
    except onchip.Unsupported:
        if schedule in (None, *COMPLETE):
            raise
        with torch.no_grad():
            out, lse = call(problem, schedule, **overrides)
        got = oracle.Result(out, lse, {})
    assert got.out.dtype == problem.dtype
    assert got.lse.dtype == (torch.float64 if problem.dtype == torch.float64 else torch.float32)
    oracle.assert_all_within_contract(got, problem, d_out, d_lse)
    return got


def assert_same_bits(got, expected):
    """Two results are equal bit for bit (NaN equals NaN)."""
    for (name, x), (_, y) in zip(got.items(), expected.items(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")


def weights(problem, schedule, **overrides):
    """The attention weights (heads, rows, columns) of each sequence, read through one-hot values."""
    sequences = list(problem.sequences())
    columns = max(sequence.length_k for sequence in sequences)
    value = problem.leaves["value"]
    one_hot = value.new_zeros(*value.shape[:-1], max(columns, 1))
    for sequence in sequences:
        diagonal = torch.eye(sequence.length_k, one_hot.shape[-1], dtype=value.dtype)
        if problem.packed:
            one_hot[sequence.start_k : sequence.start_k + sequence.length_k] = diagonal[:, None]
        else:
            one_hot[sequence.number, :, : sequence.length_k] = diagonal
    out = call(problem.with_leaves(value=one_hot), schedule, **overrides).out
    return [oracle.rows_of(out, problem, sequence)[..., : sequence.length_k] for sequence in sequences]
