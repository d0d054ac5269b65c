"""What carries problems to another device and back: the same values under the same strides."""

from dataclasses import fields

import pytest
import torch

from tests import harness, machine, oracle
from tests.problems import COVERING, Spec, build

VIEWS = {
    "contiguous": lambda plain: plain,
    "transposed": lambda plain: plain.transpose(1, 2),
    "interleaved": lambda plain: torch.stack([plain, plain + 1], dim=-1).flatten(-2)[..., ::2],
    "a slice": lambda plain: plain[:, 1:, :2, 3:-1],
    "of one projection": lambda plain: torch.stack([plain + 1, plain, plain - 1], dim=2)[:, :, 1],
    "expanded": lambda plain: plain[:1, :, :1].expand(3, -1, 4, -1),
    "one number": lambda plain: plain[0, 0, 0, 0].expand(2, 3, 4, 5),
    "one row of zero strides": lambda plain: plain[:, :, :, :1].expand(-1, -1, -1, 7),
    "empty": lambda plain: plain.transpose(1, 2)[:, :0],
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_copy_keeps_strides(view):
    tensor = VIEWS[view](torch.randn(2, 3, 4, 5))
    before = tensor.clone()
    copy = machine.copied(tensor, "cpu")
    assert torch.equal(copy, before) and copy.stride() == tensor.stride()
    assert not tensor.numel() or copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
    away = machine.moved(tensor, "meta")
    assert (away.shape, away.stride(), away.device.type) == (tensor.shape, tensor.stride(), "meta")


@pytest.mark.parametrize("view", [view for view in VIEWS if view != "empty"])
def test_gradients_come_back_through_a_copy(view):
    plain = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VIEWS[view](plain).shape, dtype=torch.float64)
    expected, got = (
        torch.autograd.grad((tensor * weight).sum(), plain)[0]
        for tensor in (VIEWS[view](plain), machine.copied(VIEWS[view](plain), "cpu"))
    )
    torch.testing.assert_close(got, expected)


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from tensors_of(item)
    elif hasattr(value, "__dataclass_fields__"):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))


@pytest.mark.parametrize("spec", COVERING, ids=str)
def test_every_tensor_of_a_problem_moves(spec):
    problem = build(spec, torch.float32)
    away = list(tensors_of(machine.moved(problem, "meta")))
    assert [tensor.device.type for tensor in away] == ["meta"] * len(away)
    assert [tensor.stride() for tensor in away] == [tensor.stride() for tensor in tensors_of(problem)]


@pytest.mark.parametrize("view", ["contiguous", "transposed", "interleaved", "stacked"])
def test_results_are_those_of_the_copy(view, monkeypatch):
    """The harness on another device, which is the same one under another name."""
    spec = Spec(((20, 33), (7, 9)), heads=(4, 2), layout="packed", view=view, score=("bias",), dropout_p=0.25)
    problem = build(spec, torch.float32)
    d_out, d_lse = oracle.cotangents(problem)
    incoming, seed = (d_out[:, :, :1].expand_as(d_out), d_lse), torch.tensor(77)

    def results():
        yield harness.attempt(problem, "tiled", *incoming, dropout_seed=seed)
        yield harness.attempt(problem, "tiled")
        yield oracle.Result(*harness.call(problem, "tiled"), {})

    expected, copied, copies = list(results()), machine.copied, []
    monkeypatch.setattr(machine, "copied", lambda *given: copies.append(given) or copied(*given))
    monkeypatch.setattr(machine, "DEVICE", "cpu:0")
    for got, known in zip(results(), expected, strict=True):
        harness.assert_same_bits(got, known)
    assert any(tensor is seed for tensor, _ in copies) and any(tensor is incoming[0] for tensor, _ in copies)
    assert all(any(tensor is leaf for tensor, _ in copies) for leaf in problem.leaves.values())
