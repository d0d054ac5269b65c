"""Rotary embeddings beside other implementations, under torch's transforms and compilers, and what they refuse."""

import re

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import onchip

SMALL = {"rtol": 0, "atol": 2e-6}


def inputs(length=9, dim=16, dtype=torch.float32):
    return torch.randn(2, 4, length, dim, dtype=dtype), torch.randn(2, 2, length, dim, dtype=dtype)


# Other implementations


def test_it_is_what_llama_computes():
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    config = llama.LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    embedding = llama.LlamaRotaryEmbedding(config)
    query, key = inputs()
    positions = torch.randint(0, 300, (2, 9))
    cos, sin = embedding(query, positions)
    expected = llama.apply_rotary_pos_emb(query, key, cos, sin)
    torch.testing.assert_close(
        onchip.rotary(query, key, positions, frequencies=embedding.inv_freq), expected, rtol=0, atol=1e-4
    )
    # on its own tables there is no difference of angles
    tables = cos[..., :8], sin[..., :8]
    torch.testing.assert_close(onchip.rotary(query, key, tables=tables), expected, **SMALL)


def test_it_is_what_gptj_computes_on_a_part_of_a_row():
    gptj = pytest.importorskip("transformers.models.gptj.modeling_gptj")
    table = gptj.create_sinusoidal_positions(40, 12)
    query, key = inputs()
    sin, cos = (half.expand(2, -1, -1) for half in table[5:14].chunk(2, -1))
    got = onchip.rotary(query, key, dim=12, interleaved=True, offset=5)
    for tensor, result in zip((query, key), got, strict=True):
        turned = gptj.apply_rotary_pos_emb(tensor[..., :12].transpose(1, 2), sin, cos).transpose(1, 2)
        torch.testing.assert_close(result, torch.cat([turned, tensor[..., 12:]], -1), rtol=0, atol=1e-5)


def test_both_pairings_are_one_up_to_the_order_of_a_row():
    """Why weights of one kind can be converted to the other."""
    query, _ = inputs()
    order = torch.arange(16).view(8, 2).mT.flatten()
    halves, _ = onchip.rotary(query[..., order], None)
    neighbours, _ = onchip.rotary(query, None, interleaved=True)
    torch.testing.assert_close(halves, neighbours[..., order], **SMALL)


# Derivatives


@pytest.mark.parametrize("interleaved", [False, True])
def test_first_and_second_derivatives(interleaved):
    query, key = (part[:1, :2].requires_grad_() for part in inputs(3, 8, torch.float64))

    def rotate(query, key):
        return onchip.rotary(query, key, interleaved=interleaved, dim=6, offset=3, scale=1.3)

    assert torch.autograd.gradcheck(rotate, (query, key), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(rotate, (query, key))


def test_nothing_of_the_inputs_is_kept():
    """What the backward needs is where tokens stand."""
    query, key = (part.requires_grad_() for part in inputs())
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        onchip.rotary(query, key, torch.arange(9))
    assert sum(tensor.numel() for tensor in kept) == 9


def test_torch_func():
    query, key = inputs(5, 8, torch.float64)

    def rotate(query, key, positions):
        return onchip.rotary(query, key, positions)

    each = torch.randint(0, 99, (3, 2, 5))
    queries, keys = (torch.stack([part, 2 * part, -part]) for part in (query, key))
    for got, place in zip(torch.vmap(rotate)(queries, keys, each), (0, 1), strict=True):
        expected = [rotate(*example)[place] for example in zip(queries, keys, each, strict=True)]
        torch.testing.assert_close(got, torch.stack(expected))
    total = lambda query: (onchip.rotary(query, key)[0] ** 3).sum()  # noqa: E731
    variable = query.clone().requires_grad_()
    torch.testing.assert_close(torch.func.grad(total)(query), *torch.autograd.grad(total(variable), variable))
    _, tangent = torch.func.jvp(lambda query: onchip.rotary(query, None)[0], (query,), (query,))
    torch.testing.assert_close(tangent, onchip.rotary(query, None)[0])
    with pytest.raises(onchip.Unsupported, match="transforms"):
        torch.vmap(lambda query: onchip.rotary(query, None, schedule="triton")[0])(query[:, None])


# The operator


CALLS = {
    "counted": {},
    "tables": {"tables": (torch.randn(20, 4), torch.randn(20, 4)), "offset": torch.tensor([3, 8])},
    "interleaved": {"interleaved": True, "inverse": True, "frequencies": torch.rand(4), "positions": torch.arange(9)},
}


@pytest.mark.parametrize("call", CALLS)
def test_opcheck(call):
    seen = {}

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.namespace == "onchip":
                seen[function] = args
            return function(*args, **kwargs or {})

    with Recorder():
        onchip.rotary(*inputs(), **CALLS[call])
    ((function, (leaves, *rest)),) = seen.items()
    torch.library.opcheck(function, ([leaf.clone() for leaf in leaves], *rest))
    torch.library.opcheck(function, ([leaf.clone().requires_grad_() for leaf in leaves], *rest))
    # a layer's view: heads behind the length
    strided = [leaf.transpose(1, 2).contiguous().transpose(1, 2) for leaf in leaves]
    torch.library.opcheck(function, (strided, *rest))


def test_the_operator_under_vmap():
    queries, offsets = torch.randn(3, 2, 4, 9, 8), torch.randint(0, 99, (3, 2))

    def rotate(query, offsets):
        values = (0, 0, 8, 1e4, 1.0, False, False, "")
        return torch.ops.onchip.rotary([query], None, offsets, None, None, None, None, *values)[0]

    expected = [onchip.rotary(query, None, offset=offset)[0] for query, offset in zip(queries, offsets, strict=True)]
    torch.testing.assert_close(torch.vmap(rotate)(queries, offsets), torch.stack(expected), **SMALL)


def test_one_graph_for_every_length_and_offset():
    def layer(query, key, offset):
        rotated = onchip.rotary(query, key, offset=offset)
        return onchip.attention(*rotated, key, causal=True)

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    counters = torch._dynamo.utils.counters
    counters.clear()
    for length, offset in ((9, 2), (17, 30), (64, 5)):
        leaves = [part.requires_grad_() for part in inputs(length)]
        got, expected = compiled(*leaves, offset), layer(*leaves, offset)
        torch.testing.assert_close(got, expected)
        for one, two in zip(*(torch.autograd.grad(out.sum(), leaves) for out in (got, expected)), strict=True):
            torch.testing.assert_close(one, two)
    assert counters["stats"]["unique_graphs"] <= 2
    torch._dynamo.reset()


def test_export():
    class Layer(torch.nn.Module):
        def forward(self, query, key, positions):
            return onchip.rotary(query, key, positions)

    given = (*inputs(), torch.arange(9))
    program = torch.export.export(Layer(), given)
    assert any("onchip.rotary" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(*given), Layer()(*given))


def test_checkpoint_and_autocast():
    query, key = (part.requires_grad_() for part in inputs())
    squares = lambda *tensors: sum(part.square().sum() for part in onchip.rotary(*tensors))  # noqa: E731
    checkpoint(squares, query, key, use_reentrant=False).backward()
    # a rotation keeps lengths
    torch.testing.assert_close(query.grad, 2 * query.detach())
    with torch.autocast("cpu", torch.bfloat16):
        assert onchip.rotary(query, key)[0].dtype == torch.float32


def test_direct_calls_give_the_operators_bits():
    query, key = inputs(40)
    direct = onchip.rotary(query, key)
    observed = torch.compile(lambda query, key: onchip.rotary(query, key), backend="eager")(query, key)
    for one, two in zip(direct, observed, strict=True):
        assert torch.equal(one, two)


# What it refuses

PACKED = torch.zeros(6, 2, 8)
CU = torch.tensor([0, 4, 6])
Q, K = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 5, 8)
LONG = torch.zeros(2, 2, 7, 8)
TABLE = torch.zeros(5, 4)

REFUSED = {
    "not a tensor": (([1], None), {}, TypeError, "query must be a tensor, got list"),
    "ints": ((Q.long(), None), {}, TypeError, "query must be float16, bfloat16, float32 or float64, got torch.int64"),
    "key": ((Q, 3), {}, TypeError, "key must be a tensor or None, got int"),
    "rank": ((Q[0, 0], None), {}, ValueError, "query must be (batch, heads, length, head_dim) or packed"),
    "ranks": ((Q, PACKED), {}, ValueError, "query and key must both be packed or neither"),
    "batch": ((Q, K[:1]), {}, ValueError, "query and key must have one batch size"),
    "head dims": ((Q, K[..., :6]), {}, ValueError, "query and key must have one head dim"),
    "odd": ((Q[..., :5], None), {}, ValueError, "dim must be even, from 2 to the head dim 5, got 5"),
    "wide": ((Q, None), {"dim": 10}, ValueError, "dim must be even, from 2 to the head dim 8, got 10"),
    "float dim": ((Q, None), {"dim": 4.0}, TypeError, "dim must be an even int or None, got float 4.0"),
    "two angles": ((Q, None), {"base": 1e4, "frequencies": TABLE[0]}, ValueError, "got base and frequencies"),
    "base": ((Q, None), {"base": 0}, ValueError, "base must be a finite number above 0"),
    "frequencies": ((Q, None), {"frequencies": CU}, TypeError, "frequencies must be a tensor of float32 or float64"),
    "many": ((Q, None), {"frequencies": torch.rand(5)}, ValueError, "from 2 to the head dim 8, got 10"),
    "dim and columns": ((Q, None), {"frequencies": TABLE[0], "dim": 6}, ValueError, "dim must be twice the 4 columns"),
    "learned": (
        (Q, None), {"frequencies": torch.rand(4, requires_grad=True)}, ValueError, "pass frequencies.detach()",
    ),
    "one table": ((Q, None), {"tables": TABLE}, TypeError, "tables must be a pair (cos, sin)"),
    "tables": ((Q, None), {"tables": (TABLE, TABLE[:3])}, ValueError, "tables must both be (rows, dim / 2) or"),
    "rows": ((Q, None), {"tables": (TABLE[None, :3],) * 2}, ValueError, "(2, 5, 4) for query, got (1, 3, 4)"),
    "rows and offset": ((Q, None), {"tables": (TABLE[None],) * 2, "offset": 1}, ValueError, "take no positions"),
    "past a table": ((Q, None), {"tables": (TABLE,) * 2, "offset": 1}, ValueError, "tables' 5 rows, got 1 to 5"),
    "float positions": ((Q, None, TABLE[:, 0]), {}, TypeError, "positions must be an int32 or int64 tensor"),
    "positions": ((Q, None, torch.arange(4)), {}, ValueError, "must have shape (5,) or (2, 5), got (4,)"),
    "three positions": ((Q, K, (1, 2, 3)), {}, ValueError, "positions must be one for both or a pair"),
    "float offset": ((Q, None), {"offset": 1.0}, TypeError, "offset must be an int or an int tensor, got float 1.0"),
    "offsets": ((Q, None), {"offset": torch.arange(3)}, ValueError, "one element or shape (2,), got (3,)"),
    "lengths": ((Q, LONG), {}, ValueError, "(length_k - length_q, 0) ends both at the same position"),
    "lengths of tables": ((Q, LONG), {"tables": (TABLE,) * 2}, ValueError, "query and key of different lengths"),
    "scale": ((Q, None), {"scale": float("nan")}, ValueError, "scale must be a finite number"),
    "schedule": ((Q, None), {"schedule": "dense"}, ValueError, "schedule must be None or one of torch, triton"),
    "packed": ((PACKED, None), {}, ValueError, "a packed query needs positions, or cu_seqlens_query"),
    "cu of dense": ((Q, None), {"cu_seqlens_query": CU}, ValueError, "is for packed tensors"),
    "cu and positions": (
        (PACKED, None, torch.arange(6)), {"cu_seqlens_query": CU}, ValueError, "may not both be given",
    ),
    "other cu": (
        (PACKED, PACKED), {"cu_seqlens_query": CU, "cu_seqlens_key": CU + 0}, ValueError, "need positions, or offset",
    ),
    "falling cu": ((PACKED, None), {"cu_seqlens_query": CU.flip(0)}, ValueError, "must rise from 0 to at most"),
    "packed offsets": ((PACKED, None, torch.arange(6)), {"offset": CU}, ValueError, "needs cu_seqlens"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_say_what_must_hold(case):
    positional, keywords, kind, text = REFUSED[case]
    with pytest.raises(kind, match=re.escape(text)):
        onchip.rotary(*positional, **keywords)


def test_a_named_schedule_never_falls_back():
    for tensor in (Q, Q.double()):
        with pytest.raises(onchip.Unsupported, match="triton"):
            onchip.rotary(tensor, None, schedule="triton")
