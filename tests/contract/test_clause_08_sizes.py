"""Clause 8: any size works; rows behind the last offset of a packed call are written, with zeros."""

from dataclasses import replace

import pytest
import torch

import onchip
from tests import harness
from tests.machine import sized
from tests.problems import MASKS, RAGGED, SCORES, SIZES, Spec, build, named


@pytest.mark.compiled
@pytest.mark.smoke
@pytest.mark.parametrize(**named(SIZES))
def test_every_size(spec, schedule):
    harness.check(build(spec, torch.float32), schedule)


@pytest.mark.parametrize(
    "shape", [(0, 2, 5, 5), (2, 2, 0, 5), (2, 2, 5, 0), (0, 2, 0, 0), (1, 2, 1, 1)], ids=lambda s: "x".join(map(str, s))
)
def test_shapes_of_empty_results(shape, schedule, dtype, device):
    batch, heads, length_q, length_k = shape
    query = torch.randn(batch, heads, length_q, 8, dtype=dtype, device=device, requires_grad=True)
    key = torch.randn(batch, heads, length_k, 8, dtype=dtype, device=device, requires_grad=True)
    value = torch.randn(batch, heads, length_k, 4, dtype=dtype, device=device, requires_grad=True)
    out, lse = onchip.attention_with_lse(query, key, value, causal=True, schedule=schedule)
    assert out.shape == (batch, heads, length_q, 4)
    assert lse.shape == (batch, heads, length_q)
    out.sum().backward()
    for leaf in (query, key, value):
        assert leaf.grad.shape == leaf.shape and leaf.grad.isfinite().all()
    if length_k == 0:
        assert not out.any() and (lse == -float("inf")).all()


@pytest.mark.parametrize("feature", [*MASKS, *SCORES])
def test_every_mask_and_score_of_nothing(feature, layout, schedule, exact):
    """No queries, no keys, or neither: beside sequences that have some, and alone."""
    words = {"mask": feature} if feature in MASKS else {"score": (feature,)}
    for lengths in (((0, 5),), ((5, 0),), ((0, 0),))[: sized(3, 1)]:
        alone = Spec(lengths, heads=(4, 2), layout=layout, tail=0 if layout == "dense" else 3, **words)
        harness.check(build(alone, exact), schedule)
        if layout != "dense":
            harness.check(build(replace(alone, lengths=(*lengths, (7, 9), *lengths)), exact), schedule)


@pytest.mark.parametrize("tail", [1, 3, sized(255, 40)])
def test_rows_behind_the_last_offset(tail, schedule, dtype, device):
    """The allocator is poisoned first, so that memory which nobody writes shows as NaN."""
    problem = build(Spec(RAGGED[:3], heads=(4, 2), layout="packed", tail=tail, causal=True, score=("sink",)), dtype)
    poison = [
        torch.full((n, 4, 16), float("nan"), dtype=dtype, device=device)
        for n in (tail, 164 + tail, 193 + tail)
        for _ in range(8)
    ]
    del poison
    result = harness.check(problem, schedule)
    end_q, end_k = int(problem.cu_query[-1]), int(problem.cu_key[-1])
    assert not result.out[end_q:].any()
    assert (result.lse[:, end_q:] == -float("inf")).all()
    if result.gradients:  # not every schedule has them
        assert not result.gradients["query"][end_q:].any()
        assert not result.gradients["key"][end_k:].any() and not result.gradients["value"][end_k:].any()


def test_cu_seqlens_key_defaults_to_that_of_the_query(schedule, device):
    query, key, value = torch.randn(3, 30, 2, 8, device=device)
    offsets = torch.tensor([0, 11, 11, 30], dtype=torch.int32, device=device)
    both = onchip.attention_varlen(query, key, value, offsets, offsets, causal=True, schedule=schedule)
    assert torch.equal(onchip.attention_varlen(query, key, value, offsets, causal=True, schedule=schedule), both)


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_offsets_and_lengths_of_either_integer_type(integer, schedule):
    packed = build(Spec(RAGGED, layout="packed"), torch.float32)
    recast = replace(packed, cu_query=packed.cu_query.to(integer), cu_key=packed.cu_key.to(integer))
    assert torch.equal(harness.call(recast, schedule).out, harness.call(packed, schedule).out)
    padded = build(Spec(RAGGED, layout="padded"), torch.float32)
    lengths = padded.query_lengths.to(integer), padded.key_lengths.to(integer)
    assert torch.equal(harness.call(padded, schedule, lengths=lengths).out, harness.call(padded, schedule).out)


@pytest.mark.parametrize("given", ["query", "key"])
def test_either_side_of_lengths_may_be_none(given, schedule):
    problem = build(
        Spec(((20, 33), (20, 12)) if given == "key" else ((20, 33), (7, 33)), layout="padded"), torch.float32
    )
    both = harness.call(problem, schedule)
    lengths = (problem.query_lengths, None) if given == "query" else (None, problem.key_lengths)
    assert torch.equal(harness.call(problem, schedule, lengths=lengths).out, both.out)
