"""The direct way of eager calls: the same bits as the operator's, nothing remembered that a call may change."""

import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import onchip
from onchip import masks, scores
from tests import harness, oracle
from tests.problems import Spec, build

SPECS = [
    Spec(((20, 33),), heads=(4, 2), causal=True),
    Spec(((40, 40),), heads=(2, 2), causal=True),
    Spec(((20, 33), (7, 0)), layout="padded", score=("bias",), mask="keys"),
    Spec(((20, 33), (7, 9)), layout="packed", tail=3, window=(9, 2)),
    Spec(((20, 33),), mask="documents"),
]


class Observer(TorchDispatchMode):
    """Sees every operator, so that calls go through onchip's."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.name())
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_operator_gives_the_same_bits(spec):
    problem = build(spec, torch.float32)
    d_out, d_lse = oracle.cotangents(problem)
    direct = harness.attempt(problem, None, d_out, d_lse)
    with Observer() as observer:
        observed = harness.attempt(problem, None, d_out, d_lse)
    assert {"onchip::attention", "onchip::attention_backward"} <= observer.names
    harness.assert_same_bits(direct, observed)


@pytest.mark.parametrize(
    "options",
    [{"causal": True}, {"window": (5, None)}, {"window": (3, 2), "scale": 0.5}, {"score": scores.softcap(0.5)}],
    ids=str,
)
def test_a_second_call_asks_nothing_again(monkeypatch, options):
    leaves = torch.randn(3, 1, 2, 24, 8).unbind()
    first = onchip.attention(*leaves, **options)
    monkeypatch.setattr(sys.modules["onchip.attention"], "_bind", None)
    assert torch.equal(onchip.attention(*leaves, **options), first)


def test_autocast_is_asked_for_each_time():
    """Inputs that have its dtype are taken as they are, others are cast; its dtype reaches no product inside."""
    full = [leaf.requires_grad_() for leaf in torch.randn(3, 1, 2, 24, 8).unbind()]
    low = [leaf.detach().bfloat16().requires_grad_() for leaf in full]

    def results(leaves):
        out = onchip.attention(*leaves, schedule="tiled")
        return out.detach(), *torch.autograd.grad(out.sum(), leaves)

    expected = results(full), results(low)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            cast, same = results(full), results(low)
        assert torch.equal(cast[0], expected[1][0])
        for got, wanted in ((same, expected[1]), (results(full), expected[0]), (results(low), expected[1])):
            assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))


def test_inputs_that_autocast_leaves_as_they_are_are_remembered(monkeypatch):
    low = torch.randn(3, 1, 2, 24, 8, dtype=torch.bfloat16).unbind()
    expected = onchip.attention(*low)
    monkeypatch.setattr(sys.modules["onchip.attention"], "_bind", None)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(onchip.attention(*low), expected)


def test_what_is_remembered_stays_bounded(monkeypatch):
    module = sys.modules["onchip.attention"]
    monkeypatch.setattr(module, "_MOST", 4)
    for length in range(1, 12):
        onchip.attention(*torch.randn(3, 1, 1, length, 8).unbind())
        assert len(module._READY) <= 4


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"causal": 1}, TypeError),
        ({"scale": True}, TypeError),
        ({"dropout_p": False}, TypeError),
        ({"schedule": "none"}, ValueError),
        ({"window": 3}, TypeError),
        ({"window": (True, 0)}, TypeError),
        ({"window": (1, False)}, TypeError),
        ({"window": (1.0, 0)}, TypeError),
        ({"window": (1, 0, 0)}, TypeError),
        ({"window": (-1, 0)}, ValueError),
        ({"dropout_seed": 0.5}, TypeError),
    ],
)
def test_a_call_that_equals_a_good_one_is_checked(change, error):
    """1 == True and False == 0.0, so what is remembered must not let the wrong type in."""
    leaves = torch.randn(3, 1, 2, 24, 8).unbind()
    good = {"causal": True, "scale": 1.0, "dropout_p": 0.0, "window": (1, 0)}
    onchip.attention(*leaves, **good)
    with pytest.raises(error):
        onchip.attention(*leaves, **good | change)


def test_other_dtypes_and_shapes_are_other_calls():
    query, key, value = torch.randn(3, 1, 2, 24, 8).unbind()
    onchip.attention(query, key, value)
    with pytest.raises(TypeError, match="one dtype"):
        onchip.attention(query, key.double(), value)
    with pytest.raises(ValueError, match="one length"):
        onchip.attention(query, key, value[:, :, 1:])


def test_other_caps_are_other_calls():
    leaves = torch.randn(3, 1, 2, 24, 8).unbind()
    plain = onchip.attention(*leaves)
    small, large = (onchip.attention(*leaves, score=scores.softcap(cap)) for cap in (0.5, 1e6))
    torch.testing.assert_close(large, plain)
    assert not torch.allclose(small, plain)
    assert torch.equal(onchip.attention(*leaves, score=scores.softcap(0.5)), small)
    assert torch.equal(onchip.attention(*leaves), plain)


def test_deterministic_algorithms_are_asked_for_each_time():
    leaves = torch.randn(3, 1, 2, 24, 8).unbind()
    onchip.attention(*leaves)
    torch.use_deterministic_algorithms(True)
    try:
        assert onchip.attention(*leaves).isfinite().all()
    finally:
        torch.use_deterministic_algorithms(False)
    assert {ready.problem.deterministic for ready in sys.modules["onchip.attention"]._READY.values()} == {False, True}


def test_a_named_schedule_without_a_backward_says_so_before_the_forward():
    query, key, value = torch.randn(3, 1, 2, 24, 8).unbind()
    bias = torch.zeros(24, requires_grad=True)
    with pytest.raises(onchip.Unsupported, match="no gradient of a bias"):
        onchip.attention(query, key, value, score=scores.bias(bias), schedule="aten")
    out = onchip.attention(query, key, value, score=scores.bias(bias.detach()), schedule="aten")
    assert torch.equal(out, onchip.attention(query, key, value, schedule="aten"))


@pytest.mark.parametrize("grad", [False, True])
def test_results_can_be_changed_in_place(grad):
    """An output is no view of something else for autograd."""
    leaves = [leaf.requires_grad_(grad) for leaf in torch.randn(3, 2, 4, 200, 32).unbind()]
    out = onchip.attention(*(leaf.transpose(1, 2).contiguous().transpose(1, 2) for leaf in leaves))
    out += 1.0
    with torch.no_grad():
        out = onchip.attention(*leaves)
    out += leaves[0]
    with Observer():
        out = onchip.attention(*leaves, causal=True)
    out += leaves[0]


def test_a_double_backward_goes_through_the_operator():
    leaves = [leaf.requires_grad_() for leaf in torch.randn(3, 1, 1, 6, 4).unbind()]
    out = onchip.attention(*leaves, causal=True)
    first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(part.sum() for part in first), leaves)
    expected_out = onchip.attention(*leaves, causal=True, schedule="dense")
    expected = torch.autograd.grad(expected_out.square().sum(), leaves, create_graph=True)
    for got, want in zip(second, torch.autograd.grad(sum(part.sum() for part in expected), leaves), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_masks_of_each_sequence_are_clipped_alike():
    """Sequence by sequence, and all at once in the definition."""
    query, key, value = torch.randn(3, 40, 4, 60, 16).unbind()
    lengths = torch.arange(40) + 1
    keep = (torch.arange(60) < lengths[:, None])[:, None, None, :].expand(40, 1, 60, 60)
    holes = keep & (torch.rand(40, 1, 60, 60) < 0.7)
    for mask in (keep, keep.contiguous(), holes, holes.expand(40, 4, 60, 60), holes[:, :, :1]):
        got = onchip.attention_with_lse(query, key, value, mask=masks.tensor(mask), schedule="aten")
        want = onchip.attention_with_lse(query, key, value, mask=masks.tensor(mask), schedule="dense")
        torch.testing.assert_close(got.out, want.out, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(got.lse, want.lse, rtol=1e-5, atol=1e-6)


def test_every_argument_is_another_call():
    """The same shapes with other flags are not answered from what is remembered."""
    leaves = torch.randn(3, 1, 2, 24, 8).unbind()
    for options in ({}, {"causal": True}, {"scale": 0.5}, {"scale": 2.0, "causal": True}, {"window": (4, 1)}):
        for schedule in (None, "aten", "tiled"):
            got = onchip.attention_with_lse(*leaves, **options, schedule=schedule)
            want = onchip.attention_with_lse(*leaves, **options, schedule="dense")
            torch.testing.assert_close(got.out, want.out, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(got.lse, want.lse, rtol=1e-5, atol=1e-6)
    assert onchip.attention(*leaves, causal=True, schedule="tiled").shape == (1, 2, 24, 8)


@pytest.mark.parametrize("poisoned", [False, True])
def test_aten_itself_treats_rows_that_see_nothing(poisoned):
    """No other schedule may be needed, not even where hidden keys and the gradients of such rows hold anything."""
    leaves = [leaf.requires_grad_() for leaf in torch.randn(3, 2, 2, 30, 8).unbind()]
    keep = torch.rand(2, 1, 30, 30) < 0.5
    keep[:, :, 5:9], keep[..., 20:] = False, False
    gradient = torch.randn(2, 2, 30, 8)
    found = {}
    for schedule in ("aten", "dense"):
        query, key, value = leaves
        if poisoned and schedule == "aten":
            hidden = (torch.arange(30) >= 20)[:, None]
            key, value = (torch.where(hidden, float("nan"), leaf) for leaf in (key, value))
            gradient = gradient.index_fill(2, torch.arange(5, 9), float("inf"))
        out = onchip.attention(query, key, value, mask=masks.tensor(keep), schedule=schedule)
        used = gradient if schedule == "aten" else gradient.nan_to_num(posinf=0.0)
        found[schedule] = (out, *torch.autograd.grad(out, leaves, used))
    for got, want in zip(found["aten"], found["dense"], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
