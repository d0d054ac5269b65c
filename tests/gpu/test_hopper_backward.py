"""Hopper's backward on a Hopper GPU: drawn sizes over few kernels, the order of sums, the timed shapes."""

import pytest
import torch
from hypothesis import given, settings, strategies

import onchip
from tests import harness, oracle
from tests.gpu.test_hopper import Kind, each_dtype, on_hopper, poisoned, sizes, timed_inputs
from tests.problems import Spec, build

pytestmark = pytest.mark.gpu
__all__ = ["on_hopper", "poisoned"]

KINDS = (
    Kind("dense", (64, 64)),
    Kind("dense", (64, 64), heads=(4, 2), causal=True, view="transposed"),
    Kind("dense", (128, 128), heads=(2, 1), causal=True),
    Kind("dense", (128, 128), sides=(True, False)),
    Kind("dense", (40, 40), sides=(True, True), score=("softcap",)),
    Kind("padded", (64, 64), heads=(3, 1), causal=True, score=("sink",)),
    Kind("padded", (96, 64), sides=(True, True), score=("softcap",)),
    Kind("padded", (128, 64), score=("alibi",)),
    Kind("packed", (64, 64), heads=(6, 2), sides=(True, True), score=("sink",)),
    Kind("packed", (128, 128), causal=True, view="stacked"),
    Kind("gapped", (64, 128), causal=True, score=("alibi", "sink")),
    Kind("gapped", (32, 32), causal=True),
    Kind("dense", (64, 64), heads=(4, 2), causal=True, dropout_p=0.1),
    Kind("packed", (128, 128), dropout_p=0.5),
    Kind("padded", (192, 128), causal=True, dropout_p=0.2),
    Kind("dense", (256, 256), heads=(4, 2), causal=True),
    Kind("packed", (192, 128), causal=True),
    Kind("padded", (160, 136), sides=(True, True), score=("softcap",)),
)
each_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
each_order = pytest.mark.parametrize("deterministic", [False, True], ids=["any-order", "ordered"])


@each_kind
@each_dtype
@each_order
@settings(max_examples=15)
@given(data=strategies.data())
def test_any_sizes(kind, dtype, deterministic, data):
    harness.check(build(data.draw(sizes(kind)), dtype), "hopper", deterministic=deterministic)


@pytest.mark.parametrize("layout", ["dense", "packed"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (192, 128)], ids=["64", "128", "192x128"])
def test_long_sequences_of_many_heads(layout, dims):
    """More programs than multiprocessors, so later ones wait for the first."""
    lengths = ((2000, 2100),) * 2 if layout == "dense" else ((1500, 1400), (0, 50), (2600, 2600))
    for causal in (False, True):
        problem = build(Spec(lengths, heads=(8, 4), dims=dims, layout=layout, causal=causal), torch.bfloat16)
        d_out, d_lse = oracle.cotangents(problem)
        wide = problem.with_leaves(**{name: leaf.double() for name, leaf in problem.leaves.items()})
        expected = harness.attempt(wide, "dense", d_out.double(), d_lse.double(), deterministic=False)
        for deterministic in (False, True):
            found = harness.attempt(problem, "hopper", d_out, d_lse, deterministic=deterministic)
            for name, gradient in expected.gradients.items():
                assert (found.gradients[name].double() - gradient).norm() <= 6e-3 * gradient.norm(), name


TIMED = [
    (dims, length, causal)
    for dims in ((64, 64), (128, 128), (256, 256), (192, 128))
    for length in (2048, 8192, 16384)
    for causal in (False, True)
]


def gradients(tensors, d_out, **options):
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = onchip.attention(*leaves, **options)
    return torch.autograd.grad(out, leaves, d_out)


def reference(query, key, value, d_out, causal):
    """Gradients of one head, in float64, a few rows of scores at a time."""
    scale, columns = query.shape[-1] ** -0.5, torch.arange(len(key), device=key.device)
    d_query, d_key, d_value = (torch.zeros_like(tensor) for tensor in (query, key, value))
    for first in range(0, len(query), 1024):
        rows = slice(first, first + 1024)
        scores = query[rows] @ key.T * scale
        if causal:
            scores.masked_fill_(columns > columns[rows, None], float("-inf"))
        weights = scores.softmax(-1)
        d_weights = d_out[rows] @ value.T
        d_scores = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True)) * scale
        d_query[rows] = d_scores @ key
        d_key += d_scores.T @ query[rows]
        d_value += weights.T @ d_out[rows]
    return d_query, d_key, d_value


@each_order
@pytest.mark.parametrize(("dims", "length", "causal"), TIMED)
def test_timed_shapes(dims, length, causal, deterministic):
    """The first and the last head against float64: what rounding weights and their gradients to bfloat16 loses."""
    tensors = timed_inputs(dims, length)
    d_out = torch.randn_like(tensors[2])
    found = gradients(tensors, d_out, causal=causal, schedule="hopper", deterministic=deterministic)
    for b, h in ((0, 0), (-1, -1)):
        wanted = reference(*(tensor[b, h].double() for tensor in (*tensors, d_out)), causal)
        for got, expected in zip(found, wanted, strict=True):
            tiles = expected.unflatten(0, (-1, 64))
            off = (got[b, h].double().unflatten(0, (-1, 64)) - tiles).norm(dim=(1, 2))
            assert bool((off <= 6e-3 * (tiles.norm(dim=(1, 2)) + tiles.norm() / len(tiles) ** 0.5)).all())


@pytest.mark.parametrize(("dims", "length", "causal"), [case for case in TIMED if case[1] <= 8192])
def test_repeats_in_order_are_equal_bit_for_bit(dims, length, causal):
    """A thousand of them, while another stream keeps the card busy; of the longer sequences a hundred."""
    tensors = timed_inputs(dims, length)
    d_out = torch.randn_like(tensors[2])
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = onchip.attention(*leaves, causal=causal, schedule="hopper", deterministic=True)
    torch.use_deterministic_algorithms(False)
    first = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
    other, side = torch.randn(2048, 2048, dtype=torch.bfloat16, device="cuda"), torch.cuda.Stream()
    differences = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for repeat in range(1000 if length <= 2048 else 100):
        with torch.cuda.stream(side):
            for _ in range(repeat % 4):
                other @ other
        again = torch.autograd.grad(out, leaves, d_out, retain_graph=True)
        for one, two in zip(again, first, strict=True):
            differences += (one.view(torch.int16) != two.view(torch.int16)).sum()
    assert int(differences) == 0
