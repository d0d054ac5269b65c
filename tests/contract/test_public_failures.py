"""The failures that users of other attention libraries reported in public: each CPU case by its id, with its trigger.

The ids name the entries of the project's case list; the link in each docstring is the report.
"""

from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

import onchip
from onchip import masks, scores
from tests import harness, oracle
from tests.describe import Bias, Causal, Modify, Softcap, TensorMask
from tests.machine import sized
from tests.oracle import Problem
from tests.problems import Spec, build, cumulative


def problem_of(query, key, value, **fields):
    return Problem({"query": query, "key": key, "value": value}, **fields)


def normal(*shape, dtype=torch.float32, seed=0, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def test_P01_P02_one_wheel_without_a_build_step():
    """Dao-AILab/flash-attention#246, #1783: hours of compiling, and wheels that fit one torch only."""
    try:
        wheel = metadata.distribution("onchip").read_text("WHEEL")
    except metadata.PackageNotFoundError:
        pytest.skip("onchip is not installed but runs from its source folder")
    assert "Root-Is-Purelib: true" in wheel and "Tag: py3-none-any" in wheel
    assert not [
        path for path in Path(onchip.__file__).parent.rglob("*") if path.suffix in (".so", ".pyd", ".cpp", ".cu")
    ]


def test_P03_causal_with_more_queries_than_keys_packed(schedule):
    """Dao-AILab/flash-attention#443: NaN in dQ."""
    query, key, value = (3 * normal(n, 1, 32, dtype=torch.float16, seed=n) for n in (256, 3, 4))
    value = value[:3]
    cu_query, cu_key = (torch.tensor(offsets, dtype=torch.int32) for offsets in ([0, 76, 110, 256], [0, 1, 2, 3]))
    problem = problem_of(query, key, value, cu_query=cu_query, cu_key=cu_key, causal=True)
    d_out, d_lse = torch.ones_like(query), torch.zeros(1, 256)
    got = harness.attempt(problem, schedule, d_out, d_lse)
    seen = torch.zeros(256, dtype=torch.bool)
    seen[[75, 109, 255]] = True
    assert not got.out[~seen].any() and not got.gradients["query"][~seen].any()
    assert torch.equal(got.lse.isfinite(), seen[None])
    assert all(gradient.isfinite().all() for gradient in got.gradients.values())
    torch.testing.assert_close(got.out[seen], value, rtol=0, atol=0)
    torch.testing.assert_close(got.gradients["value"], torch.ones_like(value), rtol=0, atol=0)


@pytest.mark.compiled
def test_P03_causal_with_more_queries_than_keys_dense(schedule):
    problem = build(Spec(((2048, 1024),), heads=(1, 1), causal=True), torch.float32)
    got = harness.check(problem, schedule)
    assert not got.out[:, :, :1024].any() and not got.gradients["query"][:, :, :1024].any()
    assert (got.lse[:, :, :1024] == -float("inf")).all()


@pytest.mark.parametrize("pad", [1, 17, 255])
def test_P04_rows_behind_the_last_offset(pad, schedule, device):
    """Dao-AILab/flash-attention#2324: gradients of rows that no kernel writes."""
    weight = normal(32, 3 * 2 * 16, device=device).requires_grad_()
    x = normal(100 + pad, 32, seed=1, device=device)
    poison = [torch.full((100 + pad, 2, 16), float("nan"), device=device) for _ in range(16)]
    del poison
    query, key, value = (x @ weight).unflatten(1, (3, 2, 16)).unbind(1)
    for part in (query, key, value):
        part.retain_grad()
    offsets = torch.tensor([0, 60, 100], device=device)
    out = onchip.attention_varlen(query, key, value, offsets, causal=True, schedule=schedule)
    out.square().sum().backward()
    assert not out[100:].any()
    for part in (query, key, value):
        assert part.grad[:100].any() and not part.grad[100:].any()
    assert weight.grad.isfinite().all()


def test_P05_a_row_masked_by_a_bool(schedule):
    """pytorch/pytorch#103963: a row that is all False gives NaN."""
    keep = torch.rand(2, 1, 30, 40) < 0.5
    keep[:, :, 7] = False
    problem = replace(build(Spec(((30, 40),) * 2), torch.float32), mask=TensorMask(keep))
    got = harness.check(problem, schedule)
    assert not got.out[:, :, 7].any() and (got.lse[:, :, 7] == -float("inf")).all()
    assert not got.gradients or not got.gradients["query"][:, :, 7].any()


def test_P05_a_row_masked_by_minus_infinity(schedule):
    bias = torch.zeros(2, 1, 30, 40)
    bias[:, :, 7] = -float("inf")
    problem = replace(build(Spec(((30, 40),) * 2), torch.float32), score=(Bias(),)).with_leaves(bias=bias)
    got = harness.check(problem, schedule)
    assert not got.out[:, :, 7].any() and not got.gradients["query"][:, :, 7].any()
    assert (got.lse[:, :, 7] == -float("inf")).all()


def test_P05_a_row_of_the_smallest_finite_number(schedule):
    """pytorch/pytorch#110213: finite numbers compete, so the row is the mean of the values."""
    bias = torch.zeros(1, 1, 30, 40)
    bias[:, :, 7] = torch.finfo(torch.float32).min
    problem = replace(build(Spec(((30, 40),)), torch.float32), score=(Bias(),)).with_leaves(bias=bias)
    out, _ = harness.call(problem, schedule)
    torch.testing.assert_close(out[:, :, 7], problem.leaves["value"].mean(2), rtol=0, atol=1e-6)


@pytest.mark.compiled
def test_P05_leading_columns_of_the_smallest_finite_number(schedule):
    """pytorch/pytorch#109517: 441 rows, 64 dimensions, columns 0 to 128 at finfo.min (batch and heads reduced)."""
    bias = torch.zeros(1, 1, 1, 441)
    bias[..., :128] = torch.finfo(torch.float32).min
    query, key, value = normal(3, 2, 2, 441, 64)
    whole = problem_of(query, key, value, score=(Bias(),)).with_leaves(bias=bias)
    out, lse = harness.call(whole, schedule)
    cut = harness.call(problem_of(query, key[:, :, 128:], value[:, :, 128:]), schedule)
    torch.testing.assert_close(out, cut.out, rtol=0, atol=1e-6)
    torch.testing.assert_close(lse, cut.lse, rtol=1e-6, atol=0)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["key", "value"])
def test_P06_nan_in_a_masked_key(where, poison, schedule):
    """pytorch/pytorch#101967: a NaN behind the mask poisons the result."""
    keep = torch.ones(40, dtype=torch.bool)
    keep[13] = False
    problem = replace(build(Spec(((30, 40),)), torch.float32), mask=TensorMask(keep.expand(30, 40)))
    clean = harness.attempt(problem, schedule)
    leaf = problem.leaves[where].clone()
    leaf[:, :, 13] = poison
    harness.assert_same_bits(harness.attempt(problem.with_leaves(**{where: leaf}), schedule), clean)


@pytest.mark.parametrize("level", [-2e5, -1e5, -5e4, -1e4, 1e5])
def test_P07_finite_sentinels_drop_rows(level, schedule):
    """flashinfer-ai/flashinfer#4267: logits below the sentinel gave output 0."""
    query = torch.ones(1, 16, 3, 128, dtype=torch.bfloat16)
    key = torch.full((1, 1, 64, 128), level / 128, dtype=torch.bfloat16)
    key[:, :, 0] = (level + 5000) / 128
    problem = problem_of(query, key, normal(1, 1, 64, 128, dtype=torch.bfloat16), scale=1.0)
    out, lse = harness.call(problem, schedule)
    expected = problem.leaves["value"][:, :, :1].expand(1, 16, 3, 128)
    torch.testing.assert_close(out, expected, rtol=torch.finfo(torch.bfloat16).eps, atol=0)
    exact = 128 * key[0, 0, 0, 0].double().item()
    torch.testing.assert_close(lse.double(), torch.full((1, 16, 3), exact, dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.compiled
def test_P08_a_large_batch_equals_its_chunks(schedule):
    """Dao-AILab/flash-attention#2260: 8300 sequences of one token (heads and dimension reduced)."""
    problem = problem_of(*normal(3, 8300, 2, 1, 16, dtype=torch.bfloat16))
    got = harness.attempt(problem, schedule)
    d_out, d_lse = oracle.cotangents(problem)
    for rows in (slice(0, 100), slice(8200, 8300)):
        chunk = problem_of(*(leaf[rows] for leaf in problem.leaves.values()))
        expected = harness.attempt(chunk, schedule, d_out[rows], d_lse[rows])
        for (name, x), (_, y) in zip(got.items(), expected.items(), strict=True):
            torch.testing.assert_close(x[rows], y, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.compiled
def test_P09_incoming_gradient_with_a_wide_row_stride(schedule):
    """Dao-AILab/flash-attention#2611: dO is a view of a concatenation, row stride 9728."""
    problem = build(
        Spec(((50, 50), (30, 30)), heads=(16, 16), dims=(96, 96), layout="packed", causal=True), torch.float32
    )
    d_out = normal(80, 16 * 96 + 8192)[:, : 16 * 96].unflatten(1, (16, 96))
    assert d_out.stride() == (9728, 96, 1)
    d_lse = torch.zeros(16, 80)
    got = harness.attempt(problem, schedule, d_out, d_lse)
    harness.assert_same_bits(got, harness.attempt(problem, schedule, d_out.contiguous(), d_lse))


@pytest.mark.compiled
def test_P10_an_expanded_mask_with_zero_strides(schedule, device):
    """pytorch/pytorch#150054: a (length, length) mask expanded over batch and heads (length reduced)."""
    keep = torch.rand(150, 150, device=device) < 0.5
    query, key, value = (leaf.requires_grad_() for leaf in normal(3, 2, 8, 150, 16, device=device))
    grads = []
    for mask in (keep.expand(2, 8, 150, 150), keep.expand(2, 8, 150, 150).contiguous()):
        out = onchip.attention(query, key, value, mask=mask, schedule=schedule)
        grads.append((out, *torch.autograd.grad(out.square().sum(), (query, key, value))))
    assert all(torch.equal(x, y) for x, y in zip(*grads, strict=True))


@pytest.mark.compiled
def test_P11_more_heads_than_a_grid_dimension(schedule):
    """Dao-AILab/flash-attention#1812: shape (1, 3, 71280, 128), that is 71280 heads (dimension reduced)."""
    query, key, value = normal(3, 1, 71280, 3, 8)
    out, _ = harness.call(problem_of(query, key, value), schedule)
    expected = torch.softmax(query.double() @ key.double().mT / 8**0.5, -1) @ value.double()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.compiled
def test_P11_more_sequences_than_a_grid_dimension(schedule):
    """pytorch/pytorch#146704: batch 65536 (heads and dimension reduced)."""
    query, key, value = normal(3, 65536, 1, 4, 8)
    out, _ = harness.call(problem_of(query, key, value), schedule)
    expected = torch.softmax(query.double() @ key.double().mT / 8**0.5, -1) @ value.double()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


BOTTOM_RIGHT = {
    (2, 5): [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]],
    (5, 2): [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]],
}


@pytest.mark.parametrize("lengths", BOTTOM_RIGHT)
def test_P12_causal_is_bottom_right(lengths, schedule):
    """Dao-AILab/flash-attention#282 and the 2.1 change."""
    weights = harness.weights(build(Spec((lengths,), causal=True), torch.float32), schedule)[0]
    assert torch.equal(weights != 0, torch.tensor(BOTTOM_RIGHT[lengths]).bool().expand_as(weights))


def test_P12_top_left_is_that_of_torch(schedule):
    query, key, value = normal(2, 2, 20, 16), *normal(2, 2, 2, 50, 16)
    out, _ = harness.call(problem_of(query, key, value, mask=Causal("top-left")), schedule)
    torch.testing.assert_close(
        out, F.scaled_dot_product_attention(query, key, value, is_causal=True), rtol=1e-5, atol=1e-5
    )


def test_P12_one_query_sees_every_key(schedule):
    weights = harness.weights(build(Spec(((1, 57),), causal=True), torch.float32), schedule)[0]
    assert (weights > 0).all()


@pytest.mark.compiled
@pytest.mark.parametrize("lengths", [(77, 133), (133, 77)])
def test_P12_unequal_lengths_off_the_tile(lengths, schedule):
    harness.check(build(Spec((lengths,), causal=True, heads=(4, 2)), torch.float32), schedule)


def test_P13_window_counts(schedule):
    """huggingface/transformers#39408: how many keys a window of width w shows."""
    weights = harness.weights(build(Spec(((8, 8),), causal=True, window=(3, None)), torch.float32), schedule)[0]
    assert torch.equal((weights != 0).sum(-1)[0], torch.tensor([min(i + 1, 4) for i in range(8)]))
    weights = harness.weights(build(Spec(((8, 8),), window=(0, 0)), torch.float32), schedule)[0]
    assert torch.equal(weights != 0, torch.eye(8).bool().expand_as(weights))
    weights = harness.weights(build(Spec(((8, 8),), window=(50, 8)), torch.float32), schedule)[0]
    assert (weights != 0).all()
    weights = harness.weights(build(Spec(((3, 8),), window=(2, 0)), torch.float32), schedule)[0]
    assert torch.equal(
        (weights != 0)[0], torch.tensor([[0, 0, 0, 1, 1, 1, 0, 0], [0] * 4 + [1] * 3 + [0], [0] * 5 + [1] * 3]) > 0
    )


def test_P13_a_window_of_minus_one_is_refused():
    with pytest.raises(ValueError, match="None"):
        onchip.attention(*normal(3, 1, 1, 8, 8), window=(-1, 0))


@pytest.mark.compiled
@pytest.mark.parametrize("causal", [False, True])
def test_P14_deterministic_repeats(causal, schedule):
    """Dao-AILab/flash-attention#2244: dQ differed in 29 of 30 runs (length and dimension reduced)."""
    problem = build(Spec(((256, 256),) * 2, heads=(16, 4), dims=(32, 32), causal=causal), torch.float32)
    first = harness.attempt(problem, schedule, deterministic=True)
    for _ in range(8):
        harness.assert_same_bits(harness.attempt(problem, schedule, deterministic=True), first)


@pytest.mark.compiled
@pytest.mark.parametrize("cap", [0.5, 10.0, 15.0, 30.0, 50.0])
def test_P15_softcap(cap, schedule):
    """Dao-AILab/flash-attention#2402 and #2544: wrong formula, wrong packed gradient (128 / 217 rows)."""
    spec = Spec(((128, 217),), heads=(2, 2), dims=(128, 128), causal=True, scale=1.0)
    dense = replace(build(spec, torch.float32), score=(Softcap(cap),))
    got = harness.check(dense, schedule)
    packed = replace(build(replace(spec, layout="packed"), torch.float32), score=(Softcap(cap),))
    leaves = {name: leaf[0].transpose(0, 1) for name, leaf in dense.leaves.items()}
    d_out, d_lse = oracle.cotangents(dense)
    same = harness.attempt(packed.with_leaves(**leaves), schedule, d_out[0].transpose(0, 1), d_lse[0])
    torch.testing.assert_close(same.out.transpose(0, 1)[None], got.out, rtol=1e-5, atol=1e-6)
    for name, gradient in same.gradients.items():
        torch.testing.assert_close(gradient.transpose(0, 1)[None], got.gradients[name], rtol=1e-4, atol=1e-5)


def test_P15_scores_far_above_the_cap(schedule):
    """The derivative of tanh falls to 0 there: every gradient stays finite and right."""
    for dtype, scale in ((torch.float32, 1e4), (torch.float64, 40.0)):
        problem = replace(build(Spec(((40, 50),), scale=scale), dtype), score=(Softcap(10.0),))
        got = harness.check(problem, schedule)
        assert all(gradient.isfinite().all() for gradient in got.gradients.values())


@pytest.mark.compiled
@pytest.mark.parametrize("loss", ["mean", "z-loss"])
def test_P16_the_gradient_of_the_lse(loss, schedule):
    """Dao-AILab/flash-attention#1817: loss = lse.mean() gave zero gradients without an error."""
    problem = build(Spec(((128, 128),) * 2, heads=(4, 4), dims=(64, 64)), torch.bfloat16)
    out, lse = harness.call(problem, schedule)
    d_out = torch.zeros_like(out) if loss == "mean" else torch.ones_like(out)
    d_lse = torch.full_like(lse, 1 / lse.numel()) if loss == "mean" else 6 * lse
    got = harness.attempt(problem, schedule, d_out, d_lse)
    oracle.assert_all_within_contract(got, problem, d_out, d_lse)
    assert got.gradients["query"].any() and got.gradients["key"].any()


@pytest.mark.parametrize("shape", [(1, 1, 64, 64), (2, 1, 1, 64), (1, 3, 64, 64), (64, 64), (1, 1, 1, 1)], ids=str)
def test_P17_only_the_bias_needs_a_gradient(shape, schedule, device):
    """pytorch/pytorch#148476: illegal memory access when only the mask needs a gradient."""
    query, key, value = normal(3, 2, 3, 64, 16, device=device)
    bias = normal(*shape, seed=4, device=device).requires_grad_()
    out, lse = onchip.attention_with_lse(query, key, value, score=scores.bias(bias), schedule=schedule)
    d_out, d_lse = torch.randn_like(out), torch.randn_like(lse)
    (got,) = torch.autograd.grad((out, lse), bias, (d_out, d_lse))
    exact = bias.detach().double().requires_grad_()
    s = query.double() @ key.double().mT / 4 + exact
    (expected,) = torch.autograd.grad(
        (s.softmax(-1) @ value.double(), s.logsumexp(-1)), exact, (d_out.double(), d_lse.double())
    )
    assert got.shape == shape
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-5)


def test_P17_a_captured_scalar(schedule):
    """pytorch/pytorch#145208: a captured tensor without dimensions failed in the backward."""
    slope = torch.tensor(0.3, dtype=torch.float64)
    problem = replace(
        build(Spec(((64, 64),))), score=(Modify(lambda s, b, h, i, j, slope: s + slope * (i - j), ("slope",)),)
    ).with_leaves(slope=slope)
    assert harness.check(problem, schedule).gradients["slope"].shape == ()


def test_P17_a_learned_relative_table(schedule):
    """pytorch/pytorch#137452: gradients of captured tensors, here (heads, 2 * reach + 1) indexed by i - j."""
    problem = build(Spec(((64, 64),) * 2, heads=(4, 2), score=("relative",)), torch.float32)
    first = harness.check(problem, schedule, deterministic=True)
    again = harness.attempt(problem, schedule, deterministic=True)
    assert torch.equal(first.gradients["table"], again.gradients["table"])


@pytest.mark.compiled
def test_P18_strided_inputs_and_gradients(schedule, dtype):
    """Dao-AILab/flash-attention#355 and pytorch/pytorch#146377: wrong gradients for views."""
    projection = normal(2, 40, 3, 4, 16, dtype=dtype)
    parts = [part.transpose(1, 2) for part in projection.unbind(2)]
    query = parts[0]
    key, value = (part[:, :1, :-8] for part in parts[1:])  # one key head, a sliced sequence
    strided = problem_of(query, key.expand(2, 4, 32, 16), value.expand(2, 4, 32, 16))
    copies = strided.with_leaves(**{name: leaf.contiguous() for name, leaf in strided.leaves.items()})
    d_lse = normal(2, 4, 40, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    for d_out in (
        torch.ones((), dtype=dtype).expand(2, 4, 40, 16),
        normal(2, 40, 4, 16, dtype=dtype).transpose(1, 2),
        normal(2, 4, 40, 32, dtype=dtype)[..., ::2],
    ):
        got = harness.attempt(strided, schedule, d_out, d_lse)
        harness.assert_same_bits(got, harness.attempt(copies, schedule, d_out.contiguous(), d_lse))


@pytest.mark.compiled
def test_P18_a_slice_after_a_call_with_another_shape(schedule):
    query, key, value = normal(3, 1, 4, 256, 16)
    harness.attempt(problem_of(query, key, value), schedule)
    sliced = problem_of(query, key[:, :, :-128], value[:, :, :-128])
    harness.check(sliced, schedule)


@pytest.mark.parametrize(
    "case",
    [
        ([0, 1, 0, 1], [0, 3, 0, 5], (9, 3), 64),
        ([0, 0, 0, 1], [0, 0, 0, 1], (21, 7), 120),
        ([1, 1], [0, 0], (8, 2), 128),
        ([0, 0], [4, 5], (2, 2), 16),
    ],
    ids=["issue 1537", "issue 1619", "no keys", "no queries"],
)
@pytest.mark.parametrize("causal", [False, True])
def test_P19_packed_lengths_of_zero_and_one(case, causal, schedule):
    """Dao-AILab/flash-attention#1537 and #1619."""
    lengths_q, lengths_k, heads, dim = case
    lengths = tuple(zip(lengths_q, lengths_k, strict=True))
    harness.check(
        build(Spec(lengths, heads=heads, dims=(dim, dim), layout="packed", causal=causal), torch.float32), schedule
    )


@pytest.mark.parametrize("length_q", [1, 64, 128, 256])
@pytest.mark.parametrize("dim", [128, 192])
@pytest.mark.parametrize("causal", [False, True])
def test_P19_no_keys(length_q, dim, causal, schedule):
    """Dao-AILab/flash-attention#2470: an illegal instruction, or a division by zero with causal."""
    got = harness.attempt(build(Spec(((length_q, 0),), dims=(dim, dim), causal=causal), torch.float32), schedule)
    assert not got.out.any() and (got.lse == -float("inf")).all()
    assert not got.gradients["query"].any() and got.gradients["key"].shape == (1, 2, 0, dim)


@pytest.mark.parametrize("lengths", [(), ((0, 5),), ((1, 1),)], ids=["batch 0", "no queries", "one of each"])
def test_P19_degenerate_batches(lengths, schedule, dtype):
    """Dao-AILab/flash-attention#2515: ZeroDivisionError; one query and key: not supported elsewhere."""
    got = harness.check(build(Spec(lengths, heads=(8, 2), dims=(128, 128)), dtype), schedule)
    if lengths == ((0, 5),) and got.gradients:
        assert not got.gradients["key"].any() and not got.gradients["value"].any()


@pytest.mark.compiled
@pytest.mark.parametrize("length", [1, 63, 127, 129, 1025])
def test_P20_lengths_that_do_not_fill_a_block(length, schedule):
    """pytorch/pytorch#153799: causal and score + (q - k) together gave NaN gradients."""
    problem = build(Spec(((length, length),), heads=(1, 1), dims=(64, 64), causal=True), torch.bfloat16)
    harness.check(replace(problem, score=(Modify(lambda s, b, h, i, j: s + (i - j)),)), schedule)


def test_P20_tail_columns_never_reach_a_function(schedule):
    """A function that would be NaN or out of range outside the matrix."""
    table = torch.randn(65, dtype=torch.float64)
    inside = Modify(
        lambda s, b, h, i, j, table: s + table[j] + torch.sqrt(64.5 - j.to(s.dtype)) + torch.sqrt(64.5 - i.to(s.dtype)),
        ("table",),
    )
    harness.check(replace(build(Spec(((65, 65),), causal=True)), score=(inside,)).with_leaves(table=table), schedule)


def test_P21_many_documents_need_no_square_tensor():
    """meta-pytorch/attention-gym#187: 32 documents; a (length, length) tensor would be 1.6 GB of bool here."""
    length = 40_000
    ids = torch.arange(length) // (length // 32)
    query, key, value = normal(3, 1, 1, length, 8)
    mask = masks.documents(ids)
    out = onchip.attention(query, key, value, causal=True, mask=mask, schedule="tiled")
    last = slice(length - 1250, length)
    alone = onchip.attention(*(leaf[:, :, last] for leaf in (query, key, value)), causal=True, schedule="tiled")
    torch.testing.assert_close(out[:, :, last], alone, rtol=1e-5, atol=1e-5)


def test_P21_a_narrow_window_visits_few_tiles():
    """pytorch/pytorch#152528: a window of 5 over a long sequence, in linear time."""
    query, key, value = normal(3, 1, 1, 100_000, 8)
    out = onchip.attention(query, key, value, window=(5, 0), schedule="tiled")
    rows = torch.tensor([7, 50_000, 99_999])
    for row in rows.tolist():
        near = slice(row - 5, row + 1)
        weights = torch.softmax(query[0, 0, row].double() @ key[0, 0, near].double().T / 8**0.5, 0)
        torch.testing.assert_close(out[0, 0, row].double(), weights @ value[0, 0, near].double(), rtol=1e-5, atol=1e-5)


def test_P24_one_graph_serves_other_lengths(schedule, device):
    """Dao-AILab/flash-attention#2635, #1164: a compilation for every maximal length, and lengths baked into graphs."""
    counter = CompileCounterWithBackend("eager")
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def compiled(query, key, value, cu):
        return onchip.attention_varlen(query, key, value, cu, causal=True, schedule=schedule)

    for offsets in ([0, 8, 16], [0, 1, 16], [0, 15, 16], sized([0, 700, 1024], [0, 31, 40]), [0, 0, sized(128, 20)]):
        query, key, value = normal(3, offsets[-1], 2, 8, device=device)
        cu = torch.tensor(offsets, device=device)
        expected = onchip.attention_varlen(query, key, value, cu, causal=True, schedule=schedule)
        torch.testing.assert_close(compiled(query, key, value, cu), expected)
    assert counter.frame_count <= 2


def test_P25_the_plan_names_its_schedule_and_every_reason(device):
    """pytorch/pytorch#181528: grouped heads in float32 silently ran the slow path."""
    query, key, value = normal(1, 8, 64, 16, device=device), *normal(2, 1, 2, 64, 16, device=device)
    plan = onchip.plan(query, key, value)
    for name in onchip.dispatch.schedules():
        assert name in (plan.forward, plan.backward) or plan.reasons[name]
        assert name in str(plan)


@pytest.mark.parametrize("dims", [(31, 31), (512, 512), (192, 128), (64, 256)], ids=str)
def test_P25_unusual_head_dimensions(dims, schedule):
    """Dao-AILab/flash-attention#2427 (512), #914 (dim_v differs), meta-pytorch/attention-gym#127 (31)."""
    harness.check(build(Spec(((40, 50),), heads=(4, 2), dims=dims), torch.float32), schedule)


@pytest.mark.parametrize("slopes", ["h", "bh"])
@pytest.mark.parametrize("layout", ["dense", "packed"])
@pytest.mark.parametrize("lengths", [(1, 50), (30, 50), (50, 30)], ids=str)
def test_S1_alibi_is_aligned_to_the_bottom_right(slopes, layout, lengths, schedule):
    """Dao-AILab/flash-attention#907: sign and offset differ between training and decode."""
    spec = Spec((lengths,) * 2, heads=(4, 4), layout=layout, score=("alibi",), slopes=slopes)
    problem = build(spec, torch.float32)
    query, key = (torch.zeros_like(problem.leaves[name]) for name in ("query", "key"))
    problem = problem.with_leaves(query=query, key=key)
    i, j = torch.arange(lengths[0])[:, None], torch.arange(lengths[1])
    distance = (i + lengths[1] - lengths[0] - j).abs()
    for number, weights in enumerate(harness.weights(problem, schedule)):
        slope = problem.leaves["slopes"] if slopes == "h" else problem.leaves["slopes"][number]
        expected = torch.softmax(-slope[:, None, None] * distance, dim=-1)
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)


def test_S1_a_decoded_row_is_the_last_row_of_the_prefill(schedule, device):
    query, key, value = normal(3, 1, 4, 50, 16, device=device)
    keywords = {"causal": True, "score": scores.alibi(torch.rand(4, device=device)), "schedule": schedule}
    prefill = onchip.attention(query, key, value, **keywords)
    decode = onchip.attention(query[:, :, -1:], key, value, **keywords)
    torch.testing.assert_close(decode, prefill[:, :, -1:], rtol=1e-5, atol=1e-6)


def test_S2_the_backward_uses_the_dropout_mask_of_the_forward(schedule, exact, device):
    """pytorch/pytorch#197563: dV of p = 0.48 came from another mask."""
    query, key = normal(2, 1, 2, 64, 16, dtype=exact, device=device)
    diagonal = torch.eye(64, dtype=exact, device=device).expand(1, 2, 64, 64)
    value = diagonal.clone().requires_grad_()
    weights = onchip.attention(query, key, value, dropout_p=0.48, schedule=schedule)
    (implied,) = torch.autograd.grad(weights, value, diagonal)
    torch.testing.assert_close(implied.mT, weights.detach(), rtol=1e-12 if exact == torch.float64 else 1e-5, atol=0)


def test_S3_one_documented_layout_of_the_lse(schedule, device):
    query, key, value = normal(3, 2, 3, 20, 8, device=device)
    assert onchip.attention_with_lse(query, key, value, schedule=schedule).lse.shape == (2, 3, 20)
    flat = [leaf.transpose(1, 2).flatten(0, 1) for leaf in (query, key, value)]
    offsets = cumulative([20, 20]).to(device)
    assert onchip.attention_varlen_with_lse(*flat, offsets, schedule=schedule).lse.shape == (3, 40)


def test_S5_merging_two_empty_partial_results():
    """flashinfer-ai/flashinfer#4051: NaN instead of an empty result."""
    empty = onchip.softmax.from_output(torch.zeros(2, 5, 8), torch.full((2, 5), -float("inf")))
    out, lse = onchip.softmax.finish(onchip.softmax.merge(empty, empty))
    assert not out.any() and (lse == -float("inf")).all()


def test_S7_second_derivative(schedule, device):
    """pytorch/pytorch#116350: the fused kernels have none."""
    leaves = [leaf.double().requires_grad_() for leaf in normal(3, 1, 2, 5, 4, device=device)]

    def attend(*inputs):
        return onchip.attention(*inputs, causal=True, schedule=schedule)

    torch.autograd.gradgradcheck(attend, leaves, nondet_tol=0.0 if device == "cpu" else 1e-12)


def test_S7_forward_mode():
    """pytorch/pytorch#154226: the directional derivative, against a central difference."""
    primals, tangents = (tuple(normal(3, 1, 2, 5, 4, dtype=torch.float64, seed=seed)) for seed in (1, 2))

    def attend(*inputs):
        return onchip.attention(*inputs, causal=True)

    _, got = torch.func.jvp(attend, primals, tangents)
    step = 1e-6
    ahead, behind = (attend(*(p + sign * step * t for p, t in zip(primals, tangents, strict=True))) for sign in (1, -1))
    torch.testing.assert_close(got, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-8)


def test_S8_neighbours_in_a_batch_do_not_matter(layout, schedule):
    """vllm-project/vllm#51902: one sequence changes with its neighbours."""
    long, tall = sized(((70, 90), (90, 10)), ((20, 35), (18, 10)))
    lengths = (long,) * 3 if layout == "dense" else ((20, 30), long, tall)
    problem = build(Spec(lengths, heads=(4, 2), layout=layout, causal=True), torch.float32)
    sequence = list(problem.sequences())[1]
    before = oracle.rows_of(harness.call(problem, schedule).out, problem, sequence)
    leaves = {name: leaf.clone() for name, leaf in problem.leaves.items()}
    for name, leaf in leaves.items():
        start, length = (
            (sequence.start_q, sequence.length_q) if name == "query" else (sequence.start_k, sequence.length_k)
        )
        others = torch.ones(leaf.shape[0], dtype=torch.bool)
        others[slice(start, start + length) if problem.packed else 1] = False
        leaf[others] = torch.randn_like(leaf[others]) * 10
    after = oracle.rows_of(harness.call(problem.with_leaves(**leaves), schedule).out, problem, sequence)
    assert torch.equal(after, before)


def test_S10_offsets_that_claim_three_times_the_tokens(schedule, device):
    """huggingface/transformers#44911: reads beyond the tensor."""
    query, key, value = normal(3, 30, 2, 8, device=device)
    offsets = torch.tensor([0, 30, 60, 90], device=device)
    with onchip.checked(), pytest.raises(ValueError, match="90"):
        onchip.attention_varlen(query, key, value, offsets, schedule=schedule)


@pytest.mark.compiled
def test_S12_float32_works_everywhere(layout, schedule):
    """Dao-AILab/flash-attention#13: float32 inputs."""
    lengths = ((63, 100),) * 2 if layout == "dense" else ((63, 100), (1, 17))
    harness.check(
        build(Spec(lengths, heads=(4, 2), dims=(64, 64), layout=layout, causal=True), torch.float32), schedule
    )
