"""Hopper's forward on a Hopper GPU: drawn sizes over few kernels, rows that pass their reference, the timed shapes."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings, strategies

import onchip
from tests import harness, machine, oracle
from tests.problems import Spec, build

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_hopper(monkeypatch):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this is no Hopper GPU")
    monkeypatch.setattr(machine, "DEVICE", "cuda")


@pytest.fixture(autouse=True)
def poisoned():
    """Memory that nothing was written to is NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Kind:
    """What makes a kernel; sizes, windows and scales are drawn for it."""

    layout: str
    dims: tuple
    heads: tuple = (2, 2)
    causal: bool = False
    sides: tuple | None = None  # which sides of a window there are
    score: tuple = ()
    view: str = "contiguous"
    dropout_p: float = 0.0

    def __str__(self):
        words = (self.layout, "x".join(map(str, self.dims)), "causal" * self.causal, "window" * bool(self.sides))
        return "-".join(word for word in (*words, *self.score, "dropout" * bool(self.dropout_p)) if word)


KINDS = (
    Kind("dense", (64, 64)),
    Kind("dense", (128, 128), heads=(4, 1), causal=True, view="transposed"),
    Kind("dense", (128, 128), sides=(True, False)),
    Kind("dense", (192, 128), causal=True, score=("alibi",)),
    Kind("dense", (256, 256), causal=True),
    Kind("padded", (96, 64), sides=(True, True), score=("softcap",)),
    Kind("padded", (64, 128), heads=(3, 1), score=("sink",)),
    Kind("packed", (128, 128), causal=True, view="stacked"),
    Kind("packed", (64, 64), heads=(6, 2), sides=(True, True), score=("sink",)),
    Kind("packed", (192, 128), heads=(8, 1), causal=True, score=("alibi", "sink")),
    Kind("gapped", (256, 256), score=("softcap",)),
    Kind("gapped", (40, 40), causal=True, score=("softcap", "alibi")),
    Kind("dense", (64, 64), causal=True, dropout_p=0.1),
    Kind("padded", (128, 128), heads=(4, 2), dropout_p=0.5),
    Kind("packed", (256, 256), heads=(4, 1), causal=True, dropout_p=0.2),
)
LONGEST = 700
each_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
each_dtype = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])


@strategies.composite
def sizes(draw, kind):
    """A Spec of the kind."""
    length = strategies.one_of(strategies.integers(0, LONGEST), strategies.sampled_from((0, 1, 64, 128, 256, 512)))
    # of few rows the heads of a group share a tile
    rows = draw(strategies.sampled_from((length, strategies.integers(0, 64))))
    lengths = draw(strategies.lists(strategies.tuples(rows, length), min_size=1, max_size=4))
    if kind.layout == "dense":
        lengths = lengths[:1] * len(lengths)
    window = kind.sides and tuple(draw(strategies.integers(0, 300)) if side else None for side in kind.sides)
    return Spec(
        lengths=tuple(lengths),
        heads=kind.heads,
        dims=kind.dims,
        layout=kind.layout,
        causal=kind.causal,
        window=window,
        score=kind.score,
        dropout_p=kind.dropout_p,
        scale=draw(strategies.sampled_from((None, 0.5, 2.0))),
        view=kind.view,
        tail=0 if kind.layout == "dense" else draw(strategies.sampled_from((0, 5, 130))),
        seed=draw(strategies.integers(0, 1000)),
    )


def assert_right(problem):
    with torch.no_grad():
        out, lse = harness.call(problem, "hopper")
    oracle.assert_all_within_contract(oracle.Result(out, lse, {}), problem, *oracle.cotangents(problem))


@each_kind
@each_dtype
@settings(max_examples=25)
@given(data=strategies.data())
def test_any_sizes(kind, dtype, data):
    assert_right(build(data.draw(sizes(kind)), dtype))


@each_kind
@settings(max_examples=15)
@given(data=strategies.data(), above=strategies.sampled_from((30.0, 60.0, 100.0)))
def test_rows_that_pass_their_reference_by_far(kind, data, above):
    """One key scores so many natural-log units above all others: in bfloat16 the last of these passes any reference
    but its own."""
    spec = data.draw(sizes(kind))
    problem = build(spec, torch.bfloat16)
    query, key = problem.leaves["query"].clone(), problem.leaves["key"].clone()
    tokens = 0 if spec.layout in ("packed", "gapped") else 2
    if key.shape[tokens] == 0:
        return
    place = data.draw(strategies.integers(0, key.shape[tokens] - 1))
    element = (above / (spec.scale or spec.dims[0] ** -0.5)) ** 0.5
    query[..., 0] = element
    key[..., 0] = 0
    key.select(tokens, place)[..., 0] = element
    assert_right(problem.with_leaves(query=query, key=key))


@each_kind
def test_values_that_overflow_the_accumulator(kind):
    """Weights far above 1 times values near the largest: the reference has to be the maximum."""
    spec = Spec(
        lengths=((300, 300),), heads=kind.heads, dims=kind.dims, layout=kind.layout, causal=kind.causal,
        score=kind.score, dropout_p=kind.dropout_p, view=kind.view,
        window=kind.sides and tuple(200 if side else None for side in kind.sides),
    )  # fmt: skip
    problem = build(spec, torch.bfloat16)
    query, key = problem.leaves["query"].clone(), problem.leaves["key"].clone()
    tokens = 0 if spec.layout in ("packed", "gapped") else 2
    element = (60.0 * spec.dims[0] ** 0.5) ** 0.5
    query[..., 0] = element
    key[..., 0] = 0
    key.select(tokens, 250)[..., 0] = element
    problem = problem.with_leaves(query=query, key=key, value=problem.leaves["value"] * 2.0**60)
    assert_right(problem)


TIMED = [
    (dims, length, causal)
    for dims in ((64, 64), (128, 128), (256, 256), (192, 128))
    for length in (2048, 8192, 16384)
    for causal in (False, True)
]


def timed_inputs(dims, length):
    """bfloat16 (batch, heads, length, dim), laid out as (batch, length, heads, dim), of the speed tables' sizes."""
    batch, heads = 16384 // length, 2048 // dims[1]
    shapes = [(batch, length, heads, dim) for dim in (dims[0], dims[0], dims[1])]
    return [torch.randn(shape, device="cuda").bfloat16().transpose(1, 2) for shape in shapes]


def assert_rows_right(out, lse, query, key, value, causal):
    """Some rows against float64. Weights and outputs are each rounded to bfloat16, by 2**-8 at most, so an output is
    off by no more than what 2**-7 of each weight makes of its value."""
    length = query.shape[2]
    rows = torch.randint(length, (64,), device="cuda")
    rows[0], rows[-1] = 0, length - 1
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            scores = query[b, h, rows].double() @ key[b, h].double().T * query.shape[-1] ** -0.5
            if causal:
                scores = scores.masked_fill(torch.arange(length, device="cuda") > rows[:, None], float("-inf"))
            weights, values = scores.softmax(-1), value[b, h].double()
            bound = (weights @ values.abs()) * 2.0**-7 + 1e-6
            assert bool(((out[b, h, rows].double() - weights @ values).abs() <= bound).all())
            torch.testing.assert_close(lse[b, h, rows].double(), scores.logsumexp(-1), rtol=5e-5, atol=1e-4)


@pytest.mark.parametrize(("dims", "length", "causal"), TIMED)
def test_timed_shapes(dims, length, causal):
    for repeat in range(2):
        query, key, value = timed_inputs(dims, length)
        if repeat:
            # every row behind the first block finds a key that passes its reference
            query[..., 0] = key[:, :, 150, 0] = (100 * dims[0] ** 0.5) ** 0.5
        out, lse = onchip.attention_with_lse(query, key, value, causal=causal, schedule="hopper")
        assert_rows_right(out, lse, query, key, value, causal)


@pytest.mark.parametrize(("dims", "length", "causal"), [case for case in TIMED if case[1] <= 8192])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
def test_a_hundred_repeats_are_equal_bit_for_bit(dims, length, causal, dtype):
    """While another stream keeps the card busy, and half of the tiles are computed twice."""
    query, key, value = (tensor.to(dtype) for tensor in timed_inputs(dims, length))
    query[:, ::2, :, 0] = key[:, ::2, 150, 0] = (100 * dims[0] ** 0.5) ** 0.5
    torch.use_deterministic_algorithms(False)
    first = onchip.attention_with_lse(query, key, value, causal=causal, schedule="hopper")
    other, side = torch.randn(2048, 2048, dtype=torch.bfloat16, device="cuda"), torch.cuda.Stream()
    differences = torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for repeat in range(100):
        with torch.cuda.stream(side):
            for _ in range(repeat % 4):
                other @ other
        again = onchip.attention_with_lse(query, key, value, causal=causal, schedule="hopper")
        differences += (again.out.view(torch.int16) != first.out.view(torch.int16)).sum()
        differences += (again.lse.view(torch.int32) != first.lse.view(torch.int32)).sum()
    assert int(differences) == 0
