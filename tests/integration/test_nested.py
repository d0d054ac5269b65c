"""Jagged nested tensors against each sequence by itself."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import onchip
from onchip import masks, scores

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def jagged(lengths, heads=2, dim=4, dtype=torch.float64) -> Tensor:
    """A leaf (batch, j, heads, dim)."""
    parts = [torch.randn(length, heads, dim, dtype=dtype) for length in lengths]
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)


def alone(tensor: Tensor) -> list[Tensor]:
    """Each sequence as a leaf (1, heads, length, dim)."""
    return [part.detach().transpose(0, 1)[None].requires_grad_() for part in tensor.unbind()]


def compare(query: Tensor, key: Tensor, value: Tensor, **options) -> None:
    """Out, LSE and gradients of leaves (batch, j, heads, dim)."""
    leaves = (query, key, value)
    out, lse = onchip.attention_with_lse(*(tensor.transpose(1, 2) for tensor in leaves), **options)
    finite = lse.values().masked_fill(lse.values().isinf(), 0.0)
    gradients = torch.autograd.grad(out.values().square().sum() + finite.sum(), leaves)
    found = list(zip(out.unbind(), lse.unbind(), *(gradient.unbind() for gradient in gradients), strict=True))
    for sequence, results in zip(zip(*map(alone, leaves), strict=True), found, strict=True):
        out, lse = onchip.attention_with_lse(*sequence, **options)
        finite = lse.masked_fill(lse.isinf(), 0.0)
        due = torch.autograd.grad(out.square().sum() + finite.sum(), sequence)
        expected = (out[0], lse[0], *(part[0].transpose(0, 1) for part in due))
        torch.testing.assert_close(tuple(results), expected, rtol=1e-10, atol=1e-12)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=4),
    causal=st.booleans(),
    window=st.sampled_from([None, (2, None), (1, 3)]),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
)
def test_each_sequence_by_itself(lengths, causal, window, heads):
    rows, columns = zip(*lengths, strict=True)
    query, key, value = jagged(rows, heads[0]), jagged(columns, heads[1]), None
    offsets = key.offsets()
    values = torch.randn(int(offsets[-1]), heads[1], 6, dtype=torch.float64)
    value = torch.nested.nested_tensor_from_jagged(values, offsets).detach().requires_grad_()
    score = (scores.softcap(3.0), scores.alibi(torch.linspace(0.1, 0.9, heads[0], dtype=torch.float64)))
    compare(query, key, value, causal=causal, window=window, score=score)


def test_the_result_adds_to_the_input():
    """Over the query's own offsets, so that a residual connection works."""
    leaf = jagged((3, 5, 1))
    heads = leaf.transpose(1, 2)
    out = onchip.attention(heads, heads, heads, causal=True)
    assert out.offsets() is heads.offsets() and out.shape == heads.shape
    total = (out + heads).transpose(1, 2)
    assert total.shape == leaf.shape
    torch.testing.assert_close(total.values(), out.transpose(1, 2).values() + leaf.values())


def test_dropout_counts_as_in_the_packed_call():
    leaf = jagged((3, 9, 4))
    heads = leaf.transpose(1, 2)
    out = onchip.attention(heads, heads, heads, dropout_p=0.4, dropout_seed=7)
    packed = onchip.attention_varlen(*[leaf.values()] * 3, leaf.offsets(), dropout_p=0.4, dropout_seed=7)
    assert torch.equal(out.transpose(1, 2).values(), packed)


def test_masks_of_tokens():
    leaf = jagged((3, 5))
    heads = leaf.transpose(1, 2)
    ids = torch.tensor([0, 0, 1, 0, 1, 1, 2, 2])
    out = onchip.attention(heads, heads, heads, mask=masks.documents(ids))
    packed = onchip.attention_varlen(*[leaf.values()] * 3, leaf.offsets(), mask=masks.documents(ids))
    torch.testing.assert_close(out.transpose(1, 2).values(), packed)


@pytest.mark.parametrize("start", [(0, 0, 0), (2, 0, 1)])
def test_tokens_between_sequences(start):
    """torch.nested.narrow leaves tokens that belong to no sequence, which may hold anything."""
    starts, lengths = torch.tensor(start), torch.tensor([3, 1, 4])
    padded = torch.full((3, 6, 2, 4), torch.nan, dtype=torch.float64)
    for row, first, length in zip(padded, starts, lengths, strict=True):
        row[first : first + length] = torch.randn(length, 2, 4)
    narrowed = torch.nested.narrow(padded, 1, starts, lengths, layout=torch.jagged)
    heads = narrowed.transpose(1, 2)
    out = onchip.attention(heads, heads, heads, causal=True)
    assert out.offsets() is heads.offsets() and out.lengths() is not None
    assert (out + heads).shape == heads.shape
    for ours, part in zip(out.unbind(), narrowed.unbind(), strict=True):
        expected = onchip.attention(*[part.transpose(0, 1)[None]] * 3, causal=True)
        torch.testing.assert_close(ours, expected[0])
    with pytest.raises(NotImplementedError, match="outside of sequences"):
        onchip.attention(heads, heads, heads, mask=masks.keys(torch.ones(18, dtype=torch.bool)))


def test_gradients_of_tokens_between_sequences():
    padded = torch.randn(2, 6, 2, 4, dtype=torch.float64, requires_grad=True)
    starts, lengths = torch.tensor([1, 2]), torch.tensor([4, 3])
    heads = torch.nested.narrow(padded, 1, starts, lengths, layout=torch.jagged).transpose(1, 2)
    weights = torch.randn(12, 2, 4, dtype=torch.float64)
    out = onchip.attention(heads, heads, heads, causal=True)
    (gradient,) = torch.autograd.grad((out.transpose(1, 2).values() * weights).sum(), padded)
    total = 0
    for number, (first, length) in enumerate(zip(starts, lengths, strict=True)):
        rows = slice(int(first), int(first + length))
        part = padded[number, rows].transpose(0, 1)[None]
        expected = onchip.attention(part, part, part, causal=True)[0].transpose(0, 1)
        total = total + (expected * weights.view(2, 6, 2, 4)[number, rows]).sum()
    torch.testing.assert_close(gradient, torch.autograd.grad(total, padded)[0])


def test_autocast():
    heads = jagged((3, 5), dtype=torch.float32).transpose(1, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert onchip.attention(heads, heads, heads).dtype == torch.bfloat16


def test_plan():
    heads = jagged((3, 5)).transpose(1, 2)
    assert onchip.plan(heads, heads, heads).problem.layout == "packed"


def test_one_compiled_graph_for_other_lengths():
    def block(tokens: Tensor) -> Tensor:
        heads = tokens.transpose(1, 2)
        return (onchip.attention(heads, heads, heads, causal=True) + heads).transpose(1, 2)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    for lengths in ((3, 5, 2), (7, 2, 6), (4, 4, 9)):
        leaf = jagged(lengths)
        actual, expected = compiled(leaf), block(leaf)
        torch.testing.assert_close(actual.values(), expected.values())
        found, due = (torch.autograd.grad(out.values().square().sum(), leaf)[0] for out in (actual, expected))
        torch.testing.assert_close(found.values(), due.values())
    assert counter.frame_count == 1


def test_refusals():
    leaf = jagged((3, 5))
    heads = leaf.transpose(1, 2)
    strided = torch.nested.nested_tensor([torch.randn(2, 3, 4), torch.randn(2, 5, 4)])
    with pytest.raises(TypeError, match="got a key that is not nested"):
        onchip.attention(heads, torch.randn(2, 2, 5, 4), heads)
    with pytest.raises(TypeError, match="got a query that is nested with layout=torch.strided"):
        onchip.attention(strided, strided, strided)
    with pytest.raises(ValueError, match=r"jagged in dimension 1; .*transpose"):
        onchip.attention(leaf, leaf, leaf)
    with pytest.raises(ValueError, match="lengths must be None"):
        onchip.attention(heads, heads, heads, lengths=(None, torch.tensor([1, 2])))
    with pytest.raises(ValueError, match="key and value must be jagged alike"):
        onchip.attention(heads, heads, jagged((3, 5)).transpose(1, 2))
    with pytest.raises(ValueError, match="batch|entries|shape"):
        onchip.attention(heads, *[jagged((3, 5, 1)).transpose(1, 2)] * 2)


@pytest.mark.gpu
def test_on_a_gpu():
    """Nothing waits for the device."""
    lengths = (70, 3, 129)
    parts = [torch.randn(length, 2, 64, device="cuda", dtype=torch.bfloat16) for length in lengths]
    leaf = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    heads = leaf.transpose(1, 2)
    onchip.attention(heads, heads, heads, causal=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = onchip.attention(heads, heads, heads, causal=True)
        (gradient,) = torch.autograd.grad(out.values().float().sum(), leaf)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    packed = onchip.attention_varlen(*[leaf.values()] * 3, leaf.offsets(), causal=True)
    assert torch.equal(out.transpose(1, 2).values(), packed)
    due = torch.autograd.grad(packed.float().sum(), leaf)[0]
    torch.testing.assert_close(gradient.values(), due.values(), rtol=1e-2, atol=1e-2)
