"""The publicly reported failures that need a GPU or its memory: each case by its id, at the size that was reported.

The ids name the entries of the project's case list; the link in each docstring is the report. Tests marked `big` take
up to 60 GB: of all processes that run tests, one at a time runs such a test.
"""

import fcntl
import gc
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import onchip
from onchip import masks, scores
from tests import harness, oracle
from tests.machine import moved
from tests.oracle import Problem, Result
from tests.problems import RAGGED, Spec, build, cumulative, named

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize("schedule", [None, "triton"], ids=["chosen", "triton"])]


@pytest.fixture
def alone():
    """Waits until no other process runs such a test, and gives back the memory that the test took."""
    with (Path(tempfile.gettempdir()) / "onchip-big-tests").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        torch.cuda.empty_cache()
        yield
        for name in ("last_type", "last_value", "last_traceback", "last_exc"):
            vars(sys).pop(name, None)  # the frames of a failure hold its tensors
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def big(test):
    """Marks a test that takes gigabytes."""
    return pytest.mark.xdist_group("big")(pytest.mark.usefixtures("alone")(test))


def problem_of(query, key, value, **fields):
    return Problem({"query": query, "key": key, "value": value}, **fields)


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, dtype=dtype, device="cuda")


def drawn(batch, heads, lengths, dim, dtype=torch.bfloat16):
    """Query, key and value, and the incoming gradients of out and LSE."""
    length_q, length_k = lengths
    query, d_out = normal(2, batch, heads, length_q, dim, dtype=dtype)
    key, value = normal(2, batch, heads, length_k, dim, dtype=dtype)
    return (query, key, value), (d_out, normal(batch, heads, length_q, dtype=torch.float32))


def dense(inputs, incoming, dtype, keep=None, bias=None, step=512):
    """The plain matmul-softmax-matmul and its gradients in `dtype`, a few rows at a time, where the tensors are.

    Gradients of keys and values add up in float32 or better over the steps, as inside one product.
    """
    query, *pair = inputs
    key, value = (leaf.detach().to(dtype).requires_grad_() for leaf in pair)
    sums = [torch.zeros_like(leaf, dtype=torch.promote_types(dtype, torch.float32)) for leaf in pair]
    columns = []  # out, lse, d_query, d_bias of each step
    for start in range(0, query.shape[2], step):
        rows = slice(start, start + step)
        q = query[:, :, rows].detach().to(dtype).requires_grad_()
        leaves = [q, key, value]
        s = (q @ key.mT) * q.shape[-1] ** -0.5
        if bias is not None:
            added = bias[:, :, rows].detach().to(dtype)
            s = s + added.requires_grad_(bias.requires_grad)
            leaves += [added] if bias.requires_grad else []
        if keep is not None:
            s = s.masked_fill(~keep[..., rows, :], -float("inf"))
        out, lse = s.softmax(-1) @ value, s.logsumexp(-1)
        arriving = [gradient[:, :, rows].to(dtype) for gradient in incoming]
        d_query, d_key, d_value, *d_bias = torch.autograd.grad((out, lse), leaves, arriving)
        for total, gradient in zip(sums, (d_key, d_value), strict=True):
            total += gradient
        columns.append((out.detach(), lse.detach(), d_query, *d_bias))
    out, lse, d_query, *d_bias = (torch.cat(parts, 2) for parts in zip(*columns, strict=True))
    gradients = {"query": d_query, "key": sums[0].to(dtype), "value": sums[1].to(dtype)}
    return Result(out, lse, gradients | ({"bias": d_bias[0]} if d_bias else {}))


def assert_right(got, inputs, incoming, at=(slice(None), slice(None)), **terms):
    """Clause 12 for the sequences and heads `at`, against float64 on the device. `terms` are cut already."""
    inputs, incoming = [leaf[at] for leaf in inputs], [gradient[at] for gradient in incoming]
    dtype = inputs[0].dtype
    ref = dict(dense(inputs, incoming, torch.float64, **terms).items())
    std = dict(dense(inputs, incoming, dtype, **terms).items())
    for name, x in got.items():
        oracle.assert_within_contract(name, x[at], ref[name], std[name], dtype)


def assert_equal_bits(got, expected):
    """`harness.assert_same_bits` for large tensors without NaN."""
    pairs = zip(got.items(), expected.items(), strict=True)
    different = [name for (name, x), (_, y) in pairs if not torch.equal(x, y)]
    assert not different, f"{different} differ"


def slices(total, size):
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


@contextmanager
def poisoned_memory():
    """What torch.empty gives holds NaN, or the largest integer, instead of whatever was there."""
    flags = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3, device="cuda").isnan().all()
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fills
        torch.use_deterministic_algorithms(flags[0], warn_only=flags[1])


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("layout", ["packed", "padded", "gapped"])
@pytest.mark.parametrize("pad", [1, 17, 255])
def test_P04_rows_that_no_sequence_has(pad, layout, deterministic, schedule):
    """Dao-AILab/flash-attention#2324: gradients of rows that no kernel writes."""
    lengths = ((60, 60), (0, 5), (140, 300), (3, 0))
    problem = build(
        Spec(lengths, heads=(4, 2), dims=(64, 64), layout=layout, causal=True, tail=pad, seed=pad), torch.bfloat16
    )
    d_out, d_lse = oracle.cotangents(problem)
    with poisoned_memory():
        found = harness.attempt(
            moved(problem, "cuda"), schedule, d_out.cuda(), d_lse.cuda(), deterministic=deterministic
        )
    got = Result(found.out.cpu(), found.lse.cpu(), moved(found.gradients, "cpu"))
    for name, x in (("query", got.out), *got.gradients.items()):
        rest = torch.ones(x.shape[:-1], dtype=torch.bool)
        for sequence in problem.sequences():
            oracle.rows_of(rest[..., None], problem, sequence, "query" if name == "query" else "key")[:] = False
        assert rest.any() and not x[rest].any(), name
    oracle.assert_all_within_contract(got, problem, d_out, d_lse)


@big
@pytest.mark.parametrize(
    "shape", [(8300, 16, 1, 128), (28800, 16, 15, 72), (1600, 16, 729, 72)], ids=lambda shape: "x".join(map(str, shape))
)
def test_P08_a_large_batch_equals_its_chunks(shape, schedule):
    """Dao-AILab/flash-attention#2260, #1500: rounded up to tiles, a buffer holds more than 2^31 elements."""
    batch, heads, length, dim = shape
    inputs, incoming = drawn(batch, heads, (length, length), dim)
    got = harness.attempt(problem_of(*inputs), schedule, *incoming, deterministic=True)
    for rows in slices(batch, batch // 4):
        chunk = problem_of(*(leaf[rows] for leaf in inputs))
        expected = harness.attempt(chunk, schedule, *(gradient[rows] for gradient in incoming), deterministic=True)
        part = Result(got.out[rows], got.lse[rows], {name: x[rows] for name, x in got.gradients.items()})
        assert_equal_bits(part, expected)
    for first in (0, batch // 2, batch - 2):
        assert_right(got, inputs, incoming, at=(slice(first, first + 2), slice(None)))


@big
@pytest.mark.parametrize("wide", ["d_out", "all"])
def test_P09_a_row_stride_that_reaches_beyond_two_to_the_31(wide, schedule):
    """Dao-AILab/flash-attention#2611: dO (410923, 16, 96) is a view of a concatenation, row stride 9728."""
    lengths = [1, *[8000] * 51, 0, 2793, 129]
    tokens = sum(lengths)
    assert tokens == 410923
    buffer = torch.empty(tokens, 9728, dtype=torch.bfloat16, device="cuda").normal_()
    strided = [buffer[:, 1536 * n : 1536 * (n + 1)].unflatten(1, (16, 96)) for n in range(4)]
    assert strided[0].stride() == (9728, 96, 1) and tokens * 9728 > 2**31
    copies = [part.contiguous() for part in strided]
    cu = cumulative(lengths).cuda()
    d_lse = normal(16, tokens, dtype=torch.float32)
    results = []
    for *inputs, d_out in (strided if wide == "all" else [*copies[:3], strided[3]], copies):
        problem = problem_of(*inputs, cu_query=cu, cu_key=cu, causal=True)
        results.append(harness.attempt(problem, schedule, d_out, d_lse, deterministic=True))
    assert_equal_bits(*results)
    last = slice(tokens - 129, tokens)  # against the float64 reference
    got = results[0]
    alone = Result(
        as_batch(got.out[last]),
        got.lse[None, :, last],
        {name: as_batch(gradient[last]) for name, gradient in got.gradients.items()},
    )
    *inputs, d_out = (as_batch(part[last]) for part in copies)
    assert_right(alone, inputs, (d_out, d_lse[None, :, last]), keep=torch.ones(129, 129, device="cuda").tril().bool())


def as_batch(packed, length=None):
    """(tokens, heads, dim) as (batch, heads, length, dim) of equal lengths."""
    return packed.unflatten(0, (-1, length or packed.shape[0])).transpose(1, 2)


@big
@pytest.mark.parametrize("stride", [2**31 - 16, 2**31 + 16], ids=["below", "above"])
@pytest.mark.parametrize("padded", [False, True], ids=["dense", "padded"])
def test_P09_a_batch_stride_around_two_to_the_31(stride, padded, schedule):
    """The stride itself fits into 32 bits or does not; the offset of the last sequence never does."""
    inputs, (d_out, d_lse) = drawn(3, 4, (300, 300), 64)
    plain = [*inputs, d_out]
    size = d_out[0].numel()
    buffer = torch.full((2 * stride + len(plain) * size,), float("nan"), dtype=torch.bfloat16, device="cuda")
    strided = [
        buffer.as_strided((3, 4, 300, 64), (stride, 300 * 64, 64, 1), n * size).copy_(part)
        for n, part in enumerate(plain)
    ]
    lengths = torch.tensor([300, 17, 250], device="cuda") if padded else None
    fields = {"query_lengths": lengths, "key_lengths": lengths, "causal": True}
    got, expected = (
        harness.attempt(problem_of(*inputs, **fields), schedule, d_out, d_lse) for *inputs, d_out in (strided, plain)
    )
    assert_equal_bits(got, expected)


@big
@pytest.mark.parametrize("kind", ["mask", "bias"])
def test_P10_an_expanded_square_of_more_than_two_to_the_31_elements(kind, schedule):
    """pytorch/pytorch#150054: length 49999, 8 heads, one (length, length) mask for all of them."""
    length, heads = 49_999, 8
    inputs, incoming = drawn(1, heads, (length, length), 64)
    square = torch.empty(length, length, dtype=torch.bool if kind == "mask" else torch.bfloat16, device="cuda")
    if kind == "mask":
        square.bernoulli_(0.5)
        keywords, terms = {"mask": square.expand(1, heads, length, length)}, {"keep": square}
    else:
        square.normal_()
        wide = square.expand(1, heads, length, length)
        keywords, terms = {"score": scores.bias(wide)}, {"bias": square[None, None]}
    leaves = [leaf.requires_grad_() for leaf in inputs]
    out, lse = onchip.attention_with_lse(*leaves, schedule=schedule, **keywords)
    gradients = dict(zip(("query", "key", "value"), torch.autograd.grad((out, lse), leaves, incoming), strict=True))
    got = Result(out.detach(), lse.detach(), gradients)
    for head in (0, heads - 1):
        assert_right(got, inputs, incoming, at=(slice(None), slice(head, head + 1)), **terms)


@big
@pytest.mark.parametrize("kind", ["mask", "bias"])
def test_P10_pairs_of_more_than_two_to_the_31_elements_in_memory(kind, schedule):
    """alexzhang13/flashattention2-custom-mask#2, pytorch/pytorch#145869: (8, 28, 4096, 4096), and its gradient."""
    batch, heads, length = 8, 28, 4096
    inputs, incoming = drawn(batch, heads, (length, length), 64)
    pairs = torch.empty(
        batch, heads, length, length, dtype=torch.bool if kind == "mask" else torch.bfloat16, device="cuda"
    )
    assert pairs.numel() > 2**31
    leaves = {name: leaf.requires_grad_() for name, leaf in zip(("query", "key", "value"), inputs, strict=True)}
    if kind == "mask":
        pairs.bernoulli_(0.5)
        out, lse = onchip.attention_with_lse(*leaves.values(), mask=masks.tensor(pairs), schedule=schedule)
    else:
        leaves["bias"] = pairs.normal_().requires_grad_()
        out, lse = onchip.attention_with_lse(*inputs, score=scores.bias(leaves["bias"]), schedule=schedule)
    gradients = dict(zip(leaves, torch.autograd.grad((out, lse), list(leaves.values()), incoming), strict=True))
    got = Result(out.detach(), lse.detach(), gradients)
    for sequence, head in ((0, 0), (4, 15), (7, 26)):
        at = slice(sequence, sequence + 1), slice(head, head + 2)
        assert_right(got, inputs, incoming, at=at, **{"keep" if kind == "mask" else "bias": pairs[at]})


def test_P11_more_sequences_than_a_grid_dimension(schedule):
    """pytorch/pytorch#146704: batch 65536, 8 heads, 4 tokens, dimension 64."""
    inputs, incoming = drawn(65536, 8, (4, 4), 64)
    got = harness.attempt(problem_of(*inputs), schedule, *incoming)
    for part in slices(65536, 4096):
        assert_right(got, inputs, incoming, at=(part, slice(None)))


def test_P11_more_heads_than_a_grid_dimension(schedule):
    """Dao-AILab/flash-attention#1812: shape (1, 3, 71280, 128), that is 71280 heads."""
    inputs, incoming = drawn(1, 71280, (3, 3), 128)
    got = harness.attempt(problem_of(*inputs), schedule, *incoming)
    for part in slices(71280, 20000):
        assert_right(got, inputs, incoming, at=(slice(None), part))


def test_P11_more_row_tiles_than_a_grid_dimension(schedule):
    """pytorch/pytorch#142228: more than 64 * 65535 queries."""
    inputs, incoming = drawn(1, 1, (64 * 65535 + 129, 5), 16)
    got = harness.attempt(problem_of(*inputs), schedule, *incoming)
    assert_right(got, inputs, incoming, step=2**19)


def test_P11_more_column_tiles_than_a_grid_dimension(schedule):
    inputs, incoming = drawn(1, 1, (5, 64 * 65535 + 129), 16)
    got = harness.attempt(problem_of(*inputs), schedule, *incoming)
    assert_right(got, inputs, incoming)


@pytest.mark.parametrize("length", [1, 2048])
def test_P11_as_many_packed_tokens_as_a_grid_dimension(length, schedule):
    """facebookresearch/xformers#845: (65536, 16, 80), here as 65536 sequences and as 32."""
    tokens = 65536
    query, key, value, d_out = normal(4, tokens, 16, 80)
    d_lse = normal(16, tokens, dtype=torch.float32)
    cu = torch.arange(0, tokens + 1, length, dtype=torch.int32, device="cuda")
    found = harness.attempt(problem_of(query, key, value, cu_query=cu, cu_key=cu), schedule, d_out, d_lse)

    def rows(lse):
        return lse.unflatten(1, (-1, length)).transpose(0, 1)

    gradients = {name: as_batch(gradient, length) for name, gradient in found.gradients.items()}
    got = Result(as_batch(found.out, length), rows(found.lse), gradients)
    inputs = [as_batch(leaf, length) for leaf in (query, key, value)]
    for part in slices(tokens, 2048) if length == 1 else (slice(0, 1), slice(31, 32)):
        assert_right(got, inputs, (as_batch(d_out, length), rows(d_lse)), at=(part, slice(None)))


@pytest.mark.parametrize(
    **named(
        [
            Spec(((2048, 2048),) * 2, heads=(16, 4), dims=(128, 128)),
            Spec(((2048, 2048),) * 2, heads=(16, 4), dims=(128, 128), causal=True),
            Spec(((2048, 2048),) * 2, heads=(16, 4), dims=(128, 128), window=(300, 40)),
            Spec(
                ((2048, 2048), (1, 700), (1300, 900), (5, 0)), heads=(16, 4), dims=(128, 128), layout="packed", tail=9
            ),
            Spec(
                ((2048, 2048),) * 2,
                heads=(16, 4),
                dims=(128, 128),
                causal=True,
                score=("alibi", "bias", "sink"),
                bias="hk",
                dropout_p=0.1,
            ),
        ]
    )
)
def test_P14_deterministic_while_other_work_runs(spec, schedule):
    """Dao-AILab/flash-attention#2244: dQ differed in 29 of 30 runs."""
    problem = build(spec, torch.bfloat16)
    incoming = [gradient.cuda() for gradient in oracle.cotangents(problem)]
    problem = moved(problem, "cuda")
    first = harness.attempt(problem, schedule, *incoming, deterministic=True)
    other = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for repeat in range(30):
        with torch.cuda.stream(side):
            for _ in range(repeat % 5):
                other @ other
        assert_equal_bits(harness.attempt(problem, schedule, *incoming, deterministic=True), first)
    torch.cuda.synchronize()


def one_projection(dtype):
    """Views of one (batch, length, 3, heads, dim) tensor."""
    return [part.transpose(1, 2) for part in normal(2, 200, 3, 4, 64, dtype=dtype).unbind(2)]


def transposed(dtype):
    return [part.transpose(1, 2) for part in normal(3, 2, 200, 4, 64, dtype=dtype)]


def sliced_sequence(dtype):
    query, key, value = normal(3, 2, 4, 384, 64, dtype=dtype)
    return [query, key[:, :, :-128], value[:, :, :-128]]


def expanded_heads(dtype):
    query = normal(2, 4, 200, 64, dtype=dtype)
    return [query, *(part.expand(2, 4, 200, 64) for part in normal(2, 2, 1, 200, 64, dtype=dtype))]


def expanded_batch(dtype):
    query = normal(2, 4, 200, 64, dtype=dtype)
    return [query, *(part.expand(2, 2, 200, 64) for part in normal(2, 1, 2, 200, 64, dtype=dtype))]


def every_second_column(dtype):
    return [part[..., ::2] for part in normal(3, 2, 4, 200, 128, dtype=dtype)]


def odd_address(dtype):
    """Rows that start one element behind an aligned address."""
    return [part[1:].view(2, 4, 200, 64) for part in normal(3, 2 * 4 * 200 * 64 + 1, dtype=dtype)]


def odd_rows(dtype):
    """Rows 65 elements apart."""
    return [part[..., :64] for part in normal(3, 2, 4, 200, 65, dtype=dtype)]


VIEWS = (
    one_projection,
    transposed,
    sliced_sequence,
    expanded_heads,
    expanded_batch,
    every_second_column,
    odd_address,
    odd_rows,
)


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
def test_P18_strided_inputs_and_gradients(view, dtype, deterministic, schedule):
    """Dao-AILab/flash-attention#355 and pytorch/pytorch#146377: wrong gradients for views, or memory left as it was."""
    inputs = view(dtype)
    shape = inputs[0].shape
    batch, heads, length, dim = shape
    strided, copies = problem_of(*inputs, causal=True), problem_of(*(leaf.contiguous() for leaf in inputs), causal=True)
    cases = {
        "out.sum()": (torch.ones((), dtype=dtype, device="cuda").expand(shape), torch.zeros((), device="cuda")),
        "transposed": (normal(batch, length, heads, dim, dtype=dtype).transpose(1, 2), normal(1, dtype=torch.float32)),
        "every second column": (
            normal(batch, heads, length, 2 * dim, dtype=dtype)[..., ::2],
            normal(batch, length, heads, dtype=torch.float32).transpose(1, 2),
        ),
    }
    for d_out, d_lse in cases.values():
        d_lse = d_lse.expand(shape[:3])
        with poisoned_memory():
            got = harness.attempt(strided, schedule, d_out, d_lse, deterministic=deterministic)
        assert got.out.isfinite().all()
        expected = harness.attempt(
            copies, schedule, d_out.contiguous(), d_lse.contiguous(), deterministic=deterministic
        )
        harness.assert_same_bits(got, expected)


def test_P18_a_slice_after_a_call_with_another_shape(schedule):
    """pytorch/pytorch#146377: K[:, :, :-128] of (1, 16, 4096, 64) after a call with the whole."""
    inputs, incoming = drawn(1, 16, (4096, 4096), 64)
    harness.attempt(problem_of(*inputs), schedule, *incoming)
    query, *pair = inputs
    inputs = [query, *(leaf[:, :, :-128] for leaf in pair)]
    got = harness.attempt(problem_of(*inputs), schedule, *incoming)
    assert_right(got, inputs, incoming, at=(slice(None), slice(3, 5)))


def test_P24_one_graph_for_every_length(schedule):
    """pytorch/pytorch#110322, huggingface/transformers#41803: specialised lengths and graph breaks."""
    counter = CompileCounterWithBackend("inductor")
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, dynamic=True, backend=counter)
    def compiled(query, key, value):
        return onchip.attention(query, key, value, causal=True, deterministic=True, schedule=schedule)

    def gradients(function, leaves, d_out):
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        out = function(*leaves)
        return out.detach(), *torch.autograd.grad(out, leaves, d_out)

    for length in (128, 200, 256, 384, 500, 640, 1000, 1024):
        inputs, (d_out, _) = drawn(2, 4, (length, length), 64)
        expected = gradients(
            lambda *leaves: onchip.attention(*leaves, causal=True, deterministic=True, schedule=schedule), inputs, d_out
        )
        for x, y in zip(gradients(compiled, inputs, d_out), expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)
    torch._dynamo.reset()
    assert counter.frame_count <= 2


def captured(problem, schedule, incoming, **overrides):
    """A CUDA graph of forward and backward, and where its replays leave their results."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            harness.attempt(problem, schedule, *incoming, **overrides)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = harness.attempt(problem, schedule, *incoming, **overrides)
    return graph, result


@pytest.mark.parametrize("times", [1, 40])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_P24_a_replay_reads_the_offsets_of_its_time(causal, times, schedule):
    """Dao-AILab/flash-attention#1164: lengths baked into the captured graph."""
    tokens_q, tokens_k = 16 * times, 40 * times
    query, d_out = normal(2, tokens_q, 4, 64)
    key, value = normal(2, tokens_k, 2, 64)
    incoming = d_out, normal(4, tokens_q, dtype=torch.float32)
    cu_query, cu_key = (
        torch.tensor(offsets, dtype=torch.int32, device="cuda") * times for offsets in ([0, 8, 16], [0, 20, 40])
    )
    problem = problem_of(query, key, value, cu_query=cu_query, cu_key=cu_key, causal=causal)
    graph, result = captured(problem, schedule, incoming, deterministic=True)
    for offsets in (
        ([0, 8, 16], [0, 20, 40]),
        ([0, 1, 16], [0, 20, 40]),
        ([0, 15, 16], [0, 39, 40]),
        ([0, 0, 16], [0, 3, 9]),
        ([0, 5, 6], [0, 0, 40]),
    ):
        for cu, values in zip((cu_query, cu_key), offsets, strict=True):
            cu.copy_(torch.tensor(values, dtype=torch.int32) * times)
        graph.replay()
        harness.assert_same_bits(result, harness.attempt(problem, schedule, *incoming, deterministic=True))


def test_P24_a_replay_reads_the_lengths_of_its_time(schedule):
    inputs, incoming = drawn(3, 4, (300, 300), 64)
    lengths_q, lengths_k = (torch.tensor([300, 17, 200], device="cuda") for _ in range(2))
    problem = problem_of(*inputs, query_lengths=lengths_q, key_lengths=lengths_k, causal=True)
    graph, result = captured(problem, schedule, incoming, deterministic=True)
    for values in (([1, 300, 129], [300, 5, 128]), ([0, 64, 300], [7, 0, 300]), ([300] * 3, [300] * 3)):
        for lengths, value in zip((lengths_q, lengths_k), values, strict=True):
            lengths.copy_(torch.tensor(value))
        graph.replay()
        harness.assert_same_bits(result, harness.attempt(problem, schedule, *incoming, deterministic=True))


def test_P24_a_replay_reads_the_dropout_seed_of_its_time(schedule):
    inputs, incoming = drawn(2, 4, (300, 300), 64)
    seed = torch.tensor(1, device="cuda")
    keywords = {"dropout_p": 0.25, "dropout_seed": seed, "deterministic": True}
    graph, result = captured(problem_of(*inputs), schedule, incoming, **keywords)
    seen = []
    for value in (1, 2, -(2**62) - 5, 1):
        seed.fill_(value)
        graph.replay()
        harness.assert_same_bits(result, harness.attempt(problem_of(*inputs), schedule, *incoming, **keywords))
        seen.append(result.out.clone())
    assert torch.equal(seen[0], seen[3]) and not torch.equal(seen[0], seen[1])


def test_P24_a_replay_draws_new_dropout(schedule):
    inputs, incoming = drawn(2, 4, (300, 300), 64)
    graph, result = captured(problem_of(*inputs), schedule, incoming, dropout_p=0.25)
    graph.replay()
    first = result.out.clone()
    graph.replay()
    assert not torch.equal(result.out, first)


@pytest.mark.parametrize(
    **named(
        [
            Spec(((300, 300),) * 2, heads=(4, 2), causal=True),
            Spec(((1, 900),) * 2, heads=(4, 2), causal=True),
            Spec(RAGGED, layout="packed", window=(30, 5), tail=7),
            Spec(RAGGED, layout="padded", causal=True, tail=7, dropout_p=0.25),
            Spec(RAGGED, layout="gapped", mask="keys & documents", tail=7),
            Spec(((129, 200),) * 2, mask="blocks | ~ diagonals", heads=(4, 2)),
            Spec(((129, 200),) * 2, mask="tensor & windows"),
            Spec(RAGGED, layout="packed", score=("softcap", "alibi", "bias", "sink"), slopes="bh"),
        ]
    )
)
def test_P24_nothing_waits_for_the_device(spec, schedule):
    """huggingface/diffusers#14568: a maximum read back in the preparation of every call."""

    def problem():
        made = build(spec, torch.bfloat16)
        incoming = [gradient.cuda() for gradient in oracle.cotangents(made)]
        return moved(made, "cuda"), incoming

    warm, incoming = problem()
    harness.attempt(warm, schedule, *incoming)
    fresh, incoming = problem()
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        harness.attempt(fresh, schedule, *incoming)
    finally:
        torch.cuda.set_sync_debug_mode(before)


def compiled_kernels():
    """How many Triton kernels the library has compiled in this process."""
    triton = pytest.importorskip("triton")
    functions = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "onchip":
            for value in list(vars(module).values()):
                while isinstance(value, triton.runtime.autotuner.Autotuner | triton.runtime.autotuner.Heuristics):
                    value = value.fn
                if isinstance(value, triton.runtime.JITFunction):
                    functions[id(value)] = value
    device = torch.cuda.current_device()
    return sum(
        len(function.device_caches[device][0]) for function in functions.values() if device in function.device_caches
    )


@pytest.mark.parametrize("features", [{}, {"mask": "keys", "score": ("alibi", "sink")}], ids=["plain", "changed"])
@pytest.mark.parametrize("layout", ["dense", "padded", "packed"])
def test_P24_new_lengths_compile_no_new_kernels(layout, features, schedule):
    """Dao-AILab/flash-attention#2635, #2507: a compilation for every new maximal length."""

    def attempt(length):
        lengths = ((length, length),) * 2 if layout == "dense" else ((length, length), (length // 3, length // 2))
        spec = Spec(lengths, heads=(4, 2), dims=(64, 64), layout=layout, causal=True, **features)
        problem = build(spec, torch.bfloat16)
        incoming = [gradient.cuda() for gradient in oracle.cotangents(problem)]
        harness.attempt(moved(problem, "cuda"), schedule, *incoming)

    # kernels may differ for lengths that are multiples of 16 and for short, long and longer ones, but for nothing else
    for length in (33, 48, 128, 129, 250, 256, 500, 512, 1000, 1024, 2000, 2048):
        attempt(length)
    before = compiled_kernels()
    for length in (35, 80, 131, 144, 251, 272, 333, 640, 777, 1001, 1040, 1536, 1999):
        attempt(length)
    assert before > 0
    assert compiled_kernels() == before
