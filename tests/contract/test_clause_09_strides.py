"""Clause 9: any strides give the same bits as contiguous copies, and the output has the query's stride order."""

import pytest
import torch

import onchip
from tests import harness, oracle
from tests.machine import sized
from tests.problems import Spec, build

LONGER, SHORTER = sized(((70, 90), (33, 17)), ((18, 33), (17, 9)))
LENGTHS = {"dense": (LONGER,) * 2, "padded": (LONGER, SHORTER), "packed": (LONGER, SHORTER)}
LENGTH = sized(70, 20)


@pytest.mark.parametrize("view", ["transposed", "interleaved", "stacked"])
def test_strided_inputs(view, layout, schedule, dtype):
    problem = build(Spec(LENGTHS[layout], heads=(4, 2), dims=(16, 24), layout=layout, view=view, causal=True), dtype)
    plain = {name: leaf.contiguous() for name, leaf in problem.leaves.items()}
    assert any(leaf.stride() != plain[name].stride() for name, leaf in problem.leaves.items())
    got = harness.attempt(problem, schedule)
    harness.assert_same_bits(got, harness.attempt(problem.with_leaves(**plain), schedule))


def test_queries_keys_and_values_of_one_packed_projection(schedule, dtype, device):
    projection = torch.randn(2, LENGTH, 3, 4, 16, dtype=dtype, device=device, requires_grad=True)
    views = [part.transpose(1, 2) for part in projection.unbind(2)]
    out = onchip.attention(*views, causal=True, schedule=schedule)
    copies = [view.detach().contiguous().requires_grad_() for view in views]
    expected = onchip.attention(*copies, causal=True, schedule=schedule)
    assert torch.equal(out, expected)
    d_out = torch.randn_like(expected)
    out.backward(d_out)
    expected.backward(d_out)
    for part, copy in zip(projection.grad.unbind(2), copies, strict=True):
        assert torch.equal(part.transpose(1, 2), copy.grad)


def test_addresses_between_those_that_vectors_are_read_from(schedule, dtype, device):
    """The same call again and again, where its tensors start at multiples of 16 bytes, or one element behind.

    Other bits are allowed: a processor's own products depend on addresses.
    """
    size, shape = 2 * LENGTH * 16, (1, 2, LENGTH, 16)
    buffers = torch.randn(3, size + 16, dtype=dtype, device=device)
    d_out = torch.randn(shape, dtype=dtype, device=device)
    for offsets in ((0, 0, 0), (1, 0, 0), (0, 0, 0), (0, 1, 1), (0, 0, 0)):
        views = [buffer[offset : offset + size].view(shape) for buffer, offset in zip(buffers, offsets, strict=True)]
        results = []
        for leaves in (views, [view.clone() for view in views]):
            leaves = [leaf.detach().requires_grad_() for leaf in leaves]
            out = onchip.attention(*leaves, causal=True, schedule=schedule)
            results.append((out, *torch.autograd.grad(out, leaves, d_out)))
        for got, expected in zip(*results, strict=True):
            assert (got - expected).abs().max() <= 4 * torch.finfo(dtype).eps * expected.abs().max()


def test_expanded_keys_and_values(schedule, dtype, device):
    key, value = torch.randn(2, 2, 1, LENGTH, 16, dtype=dtype, device=device)
    query = torch.randn(2, 4, LENGTH, 16, dtype=dtype, device=device)
    expanded = [leaf.expand(2, 4, LENGTH, 16) for leaf in (key, value)]
    out = onchip.attention_with_lse(query, *expanded, schedule=schedule)
    copies = onchip.attention_with_lse(query, *(leaf.contiguous() for leaf in expanded), schedule=schedule)
    assert torch.equal(out.out, copies.out) and torch.equal(out.lse, copies.lse)


@pytest.mark.parametrize("kind", ["expanded", "transposed", "interleaved", "sliced"])
def test_strided_incoming_gradients(kind, layout, schedule, dtype):
    problem = build(Spec(LENGTHS[layout], heads=(4, 2), dims=(16, 24), layout=layout, causal=True), dtype)
    d_out, d_lse = oracle.cotangents(problem)
    if kind == "expanded":
        strided, lse = d_out.new_ones(()).expand_as(d_out), d_lse.new_ones(()).expand_as(d_lse)
    elif kind == "transposed":
        strided, lse = d_out.transpose(0, 1).contiguous().transpose(0, 1), d_lse.mT.contiguous().mT
    elif kind == "interleaved":
        strided, lse = (torch.stack([x, x + 1], -1).flatten(-2)[..., ::2] for x in (d_out, d_lse))
    else:
        strided, lse = (torch.cat([x, x + 1], dim=-1)[..., : x.shape[-1]] for x in (d_out, d_lse))
    assert not strided.is_contiguous()
    got = harness.attempt(problem, schedule, strided, lse)
    expected = harness.attempt(problem, schedule, strided.contiguous(), lse.contiguous())
    harness.assert_same_bits(got, expected)


def test_the_gradient_of_a_sum(schedule, device):
    leaves = [leaf.requires_grad_() for leaf in torch.randn(3, 2, 4, LENGTH, 16, device=device)]
    summed = torch.autograd.grad(onchip.attention(*leaves, schedule=schedule).sum(), leaves)
    d_out = torch.ones(2, 4, LENGTH, 16, device=device)
    for got, expected in zip(
        summed, torch.autograd.grad(onchip.attention(*leaves, schedule=schedule), leaves, d_out), strict=True
    ):
        assert torch.equal(got, expected)


def test_strided_bias_mask_and_slopes(schedule, device):
    query, key, value = torch.randn(3, 2, 4, LENGTH, 16, device=device)
    bias = torch.randn(LENGTH, LENGTH, 4, 2, device=device).permute(3, 2, 1, 0)
    keep = torch.rand(LENGTH, 1, LENGTH, device=device).lt(0.7).permute(1, 2, 0)[None].expand(2, 4, LENGTH, LENGTH)
    slopes = torch.rand(8, device=device)[::2]

    def run(bias, keep, slopes):
        score = (onchip.scores.bias(bias), onchip.scores.alibi(slopes))
        return onchip.attention_with_lse(query, key, value, mask=keep, score=score, schedule=schedule)

    got, expected = run(bias, keep, slopes), run(bias.contiguous(), keep.contiguous(), slopes.contiguous())
    assert torch.equal(got.out, expected.out) and torch.equal(got.lse, expected.lse)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (1, 0, 2, 3)], ids=str)
def test_the_output_has_the_stride_order_of_the_query(order, schedule, dtype, device):
    sizes = [2, 3, 5, 8]
    back = [order.index(axis) for axis in range(4)]
    query = torch.randn([sizes[axis] for axis in order], dtype=dtype, device=device).permute(back)
    key, value = (torch.randn(2, 3, 6, dim, dtype=dtype, device=device) for dim in (8, 4))
    out = onchip.attention(query, key, value, schedule=schedule)
    assert out.shape == (2, 3, 5, 4)
    assert out.permute(order).is_contiguous(), (
        f"strides {out.stride()} do not follow those of the query {query.stride()}"
    )


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)], ids=str)
def test_the_packed_output_has_the_stride_order_of_the_query(order, schedule, device):
    sizes = [5, 3, 8]
    query = torch.randn([sizes[axis] for axis in order], device=device)
    key, value = (torch.randn(5, 3, dim, device=device) for dim in (8, 4))
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32, device=device)
    query = query.permute([order.index(axis) for axis in range(3)])
    out = onchip.attention_varlen(query, key, value, offsets, schedule=schedule)
    assert out.permute(order).is_contiguous()


@pytest.mark.compiled
def test_a_slice_of_a_wide_buffer(schedule):
    """The incoming gradient is a view of a concatenation, so that its row stride is far larger than its row."""
    problem = build(
        Spec(((40, 40), (60, 60)), heads=(16, 16), dims=(96, 96), layout="packed", causal=True), torch.float32
    )
    wide = torch.randn(100, 16 * 96 + 8192)
    d_out = wide[:, : 16 * 96].unflatten(1, (16, 96))
    assert d_out.stride() == (9728, 96, 1)
    d_lse = torch.zeros(16, 100)
    got = harness.attempt(problem, schedule, d_out, d_lse)
    harness.assert_same_bits(got, harness.attempt(problem, schedule, d_out.contiguous(), d_lse))
