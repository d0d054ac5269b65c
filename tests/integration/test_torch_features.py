"""torch.utils.checkpoint and torch.export around onchip."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import onchip
from onchip import masks, scores

OPERATOR = torch.ops.onchip.attention.default


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each time that a forward is computed."""
    seen: list[str] = []
    compute = onchip.ops._compute

    def spy(ready, *args, **kwargs):
        seen.append(ready.problem.layout)
        return compute(ready, *args, **kwargs)

    monkeypatch.setattr(onchip.ops, "_compute", spy)
    return seen


def leaves() -> list[Tensor]:
    return [torch.randn(2, 2, 9, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """More than attention, so that a checkpoint has something to compute again; dropout without a seed of its own."""
    return onchip.attention(query.sin(), key.cos(), value, causal=True, dropout_p=0.4, schedule="tiled").sin()


def by_backward(call: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Out and gradients, by .backward(), which the reentrant checkpoint needs."""
    torch.manual_seed(3)
    for tensor in inputs:
        tensor.grad = None
    out = call(*inputs)
    torch.rand(7)  # what others draw before the backward
    out.square().sum().backward()
    return (out.detach(), *(tensor.grad for tensor in inputs))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_replays_the_mask_of_dropout(forwards, use_reentrant):
    inputs = leaves()
    expected = by_backward(attend, inputs)
    assert len(forwards) == 1
    actual = by_backward(lambda *args: checkpoint(attend, *args, use_reentrant=use_reentrant), inputs)
    assert len(forwards) == 3, "the checkpoint computes the forward again"
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_checkpoint_of_a_packed_batch():
    offsets = torch.tensor([0, 4, 9])
    inputs = [torch.randn(9, 2, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def call(*inputs: Tensor) -> Tensor:
        return onchip.attention_varlen(*inputs, offsets, causal=True, dropout_p=0.2, score=scores.softcap(2.0))

    expected = by_backward(call, inputs)
    actual = by_backward(lambda *args: checkpoint(call, *args, use_reentrant=False), inputs)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


@pytest.mark.parametrize("as_list", [False, True])
def test_selective_checkpoint_saves_the_operator(forwards, as_list):
    """What a policy saves by its name is not computed again: the rest is."""

    def policy(context, operator, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if operator is OPERATOR else CheckpointPolicy.PREFER_RECOMPUTE

    inputs = leaves()
    expected = by_backward(attend, inputs)
    forwards.clear()

    def contexts():
        return create_selective_checkpoint_contexts([OPERATOR] if as_list else policy)

    actual = by_backward(lambda *args: checkpoint(attend, *args, use_reentrant=False, context_fn=contexts), inputs)
    assert len(forwards) == 1
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_compiled_selective_checkpoint(forwards):
    inputs = leaves()

    def call(*inputs: Tensor) -> Tensor:
        query, key, value = inputs
        return onchip.attention(query.sin(), key.cos(), value, causal=True, schedule="tiled").sin()

    def contexts():
        return create_selective_checkpoint_contexts([OPERATOR])

    def saved(*inputs: Tensor) -> Tensor:
        return checkpoint(call, *inputs, use_reentrant=False, context_fn=contexts)

    expected = by_backward(call, inputs)
    forwards.clear()
    actual = by_backward(torch.compile(saved, fullgraph=True, backend="aot_eager_decomp_partition"), inputs)
    assert len(forwards) == 1
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward, self.sinks = nn.Linear(16, 48), nn.Parameter(torch.randn(4))

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        query, key, value = self.inward(tokens).unflatten(-1, (3, 4, 4)).movedim(-3, 0).transpose(-3, -2)
        score = (scores.softcap(5.0), scores.sink(self.sinks))
        mask = masks.window(3, None)
        out = onchip.attention(query, key, value, causal=True, mask=mask, score=score, lengths=(None, lengths))
        return out.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_any_batch_and_length(tmp_path, strict):
    layer = Layer()
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=1, max=512)
    example = torch.randn(3, 7, 16), torch.tensor([7, 5, 3])
    shapes = {"tokens": {0: batch, 1: length}, "lengths": {0: batch}}
    program = torch.export.export(layer, example, dynamic_shapes=shapes, strict=strict)
    assert OPERATOR in {node.target for node in program.graph.nodes}
    torch.export.save(program, tmp_path / "layer.pt2")
    loaded = torch.export.load(tmp_path / "layer.pt2").module()
    for sizes in ((3, 7), (1, 1), (5, 33)):
        tokens, lengths = torch.randn(*sizes, 16), torch.randint(0, sizes[1] + 1, sizes[:1])
        torch.testing.assert_close(loaded(tokens, lengths), layer(tokens, lengths), rtol=1e-4, atol=1e-5)


def test_export_of_a_packed_batch():
    class Packed(nn.Module):
        def forward(self, query: Tensor, offsets: Tensor) -> Tensor:
            return onchip.attention_varlen(query, query, query, offsets, causal=True)

    tokens, count = torch.export.Dim("tokens", min=2, max=4096), torch.export.Dim("count", min=2, max=64)
    example = torch.randn(9, 2, 8), torch.tensor([0, 4, 9])
    shapes = {"query": {0: tokens}, "offsets": {0: count}}
    program = torch.export.export(Packed(), example, dynamic_shapes=shapes).module()
    query, offsets = torch.randn(20, 2, 8), torch.tensor([0, 6, 6, 15, 20])
    torch.testing.assert_close(program(query, offsets), Packed()(query, offsets))
