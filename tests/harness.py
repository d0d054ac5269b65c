"""Runs a problem on onchip and holds the answer against the oracle. The one place that knows how to call schedules."""

import torch

import onchip
from tests import machine, oracle
from tests.machine import moved

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


def compute(problem, schedule, leaves, **overrides):
    """Output(out, lse) of the public function, where the tensors are."""
    positional, keywords = arguments(problem, leaves)
    function = onchip.attention_varlen_with_lse if problem.packed else onchip.attention_with_lse
    output = function(*positional, **keywords | {"schedule": schedule} | overrides)
    assert all(part.device == leaves["query"].device for part in output)
    return output


def place(problem):
    """Where to compute a problem, which is where its tensors are unless that is the CPU, and where they are."""
    home = problem.leaves["query"].device.type
    return machine.DEVICE if home == "cpu" else home, home


def call(problem, schedule, leaves=None, **overrides):
    """Output(out, lse) on `leaves` or on the problem's own, computed on the device of --device and brought back."""
    device, home = place(problem)
    problem, overrides = moved(problem, device), moved(overrides, device)
    leaves = problem.leaves if leaves is None else moved(leaves, device)
    return onchip.Output(*moved(compute(problem, schedule, leaves, **overrides), home))


def attempt(problem, schedule, d_out=None, d_lse=None, **overrides):
    """Result of onchip: out, LSE and the gradient of every leaf for the given incoming gradients."""
    if d_out is None:
        d_out, d_lse = oracle.cotangents(problem)
    device, home = place(problem)
    problem, overrides, incoming = moved(problem, device), moved(overrides, device), moved((d_out, d_lse), device)
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in problem.leaves.items()}
    out, lse = compute(problem, schedule, leaves, **overrides)
    found = torch.autograd.grad((out, lse), list(leaves.values()), incoming, allow_unused=True)
    gradients = dict(zip(leaves, found, strict=True))
    missing = [name for name, gradient in gradients.items() if gradient is None]
    assert not missing, f"no gradient reached {missing}"
    assert all(gradient.device == leaves[name].device for name, gradient in gradients.items())
    return oracle.Result(*moved((out.detach(), lse.detach(), gradients), home))


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
    # a multiple of 8, which no schedule declines
    one_hot = value.new_zeros(*value.shape[:-1], max(-(-columns // 8) * 8, 8))
    for sequence in sequences:
        diagonal = torch.eye(sequence.length_k, one_hot.shape[-1], dtype=value.dtype)
        if problem.packed:
            one_hot[sequence.start_k : sequence.start_k + sequence.length_k] = diagonal[:, None]
        else:
            one_hot[sequence.number, :, : sequence.length_k] = diagonal
    out = call(problem.with_leaves(value=one_hot), schedule, **overrides).out
    return [oracle.rows_of(out, problem, sequence)[..., : sequence.length_k] for sequence in sequences]
