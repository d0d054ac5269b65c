"""What test_distributed.py holds, as functions that two processes run: each compares shards with one process."""

import os
import traceback
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import onchip
from onchip import masks, scores

BATCH, HEADS, LENGTH = Shard(0), Shard(1), Shard(2)
WHOLE = Replicate()


def make(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def inputs(batch=2, heads=4, heads_kv=2, rows=5, columns=7, dim=4) -> list[Tensor]:
    return [make(batch, heads, rows, dim), make(batch, heads_kv, columns, dim), make(batch, heads_kv, columns, 6)]


def leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def results(function, tensors: list[Tensor]) -> list[Tensor]:
    """Out, LSE and the gradient of each tensor."""
    out, lse = function(*tensors)
    out_due, lse_due = (torch.linspace(-1, 1, part.numel(), dtype=part.dtype).view(part.shape) for part in (out, lse))
    total = (whole(out) * out_due).sum() + (whole(lse) * lse_due).sum()
    return [out, lse, *torch.autograd.grad(total, tensors)]


def compare(mesh, function, tensors: list[Tensor], placements: list) -> list[Tensor]:
    """The same call on plain tensors and on shards; None leaves a tensor plain. Gives back the sharded results."""
    expected = results(function, [leaf(tensor) for tensor in tensors])
    sharded = [
        leaf(tensor if placed is None else distribute_tensor(tensor, mesh, placed))
        for tensor, placed in zip(tensors, placements, strict=True)
    ]
    actual = results(function, sharded)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(whole(one), other, rtol=1e-10, atol=1e-12)
    for gradient, tensor in zip(actual[2:], sharded, strict=True):
        assert type(gradient) is type(tensor) and gradient.shape == tensor.shape
    return actual


def causal(query, key, value):
    return onchip.attention_with_lse(query, key, value, causal=True)


def with_head_scores(query, key, value, slopes, sinks):
    score = (scores.softcap(4.0), scores.alibi(slopes), scores.sink(sinks))
    return onchip.attention_with_lse(query, key, value, causal=True, score=score)


# The checks, each for a mesh of one dimension of two.


def check_heads(mesh):
    out, lse, *gradients = compare(mesh, causal, inputs(), [[HEADS]] * 3)
    assert out.placements == lse.placements == (HEADS,)
    assert all(gradient.placements == (HEADS,) for gradient in gradients)


def check_batch(mesh):
    out, *_ = compare(mesh, causal, inputs(), [[BATCH]] * 3)
    assert out.placements == (BATCH,) and out.to_local().shape[0] == 1


def check_batch_that_does_not_divide(mesh):
    compare(mesh, causal, inputs(batch=3), [[BATCH]] * 3)
    compare(mesh, causal, inputs(batch=1), [[BATCH]] * 3)


def check_slopes_and_sinks(mesh):
    """Per device the slopes of its own heads, whether plain, replicated or sharded."""
    tensors = [*inputs(), make(4).abs(), make(4)]
    for placed in ([None, None], [[WHOLE], [WHOLE]], [[Shard(0)], [Shard(0)]]):
        compare(mesh, with_head_scores, tensors, [[HEADS]] * 3 + placed)
        compare(mesh, with_head_scores, tensors, [[BATCH]] * 3 + placed)
    tensors[3] = make(2, 4).abs()
    compare(mesh, with_head_scores, tensors, [[HEADS]] * 3 + [None, None])
    compare(mesh, with_head_scores, tensors, [[BATCH]] * 3 + [[WHOLE], None])


def check_replicated_keys(mesh):
    """As the query is sharded; fewer key heads than devices go to those whose query heads share them."""
    out, *_ = compare(mesh, causal, inputs(), [[HEADS], [WHOLE], [WHOLE]])
    assert out.placements == (HEADS,)
    compare(mesh, causal, inputs(), [[BATCH], [WHOLE], [WHOLE]])
    compare(mesh, causal, inputs(heads_kv=1), [[HEADS], [WHOLE], [WHOLE]])
    compare(mesh, causal, inputs(heads_kv=1), [[HEADS], [HEADS], [HEADS]])
    out, *_ = compare(mesh, causal, inputs(), [[WHOLE]] * 3)
    assert out.placements == (WHOLE,)


def check_partial_sums(mesh):
    query, key, value = inputs()
    parts = [DTensor.from_local(tensor / 2, mesh, [Partial()]) for tensor in (query, key, value)]
    out = onchip.attention(*parts)
    torch.testing.assert_close(whole(out), onchip.attention(query, key, value))


def check_masks(mesh):
    """Everything that has a batch or heads is cut to the device's own."""
    query, key, value = inputs(rows=7)
    lengths = torch.tensor([4, 7]), torch.tensor([7, 5])
    diagonals = torch.tensor([1, -1])
    documents = torch.randint(0, 2, (2, 7))
    pairs = torch.rand(2, 4, 7, 7) < 0.8
    blocks = torch.rand(1, 4, 4, 4) < 0.8
    places = torch.arange(3)
    mask = (
        masks.documents(documents)
        | masks.tensor(pairs) & masks.blocks(blocks, 2)
        | masks.keys(torch.rand(2, 7) < 0.3)
        | masks.predicate(lambda b, h, i, j: (i + j) % 3 == places[1])
    ) & masks.causal(diagonals)

    def call(query, key, value, bias):
        score = (scores.bias(bias), scores.modify(lambda s, b, h, i, j: s + (i - j) * 0.01))
        return onchip.attention_with_lse(query, key, value, mask=mask, score=score, lengths=lengths)

    def total(query, key, value, bias):
        out, lse = call(query, key, value, bias)
        return out, torch.where(lse.isinf(), 0.0, lse) if not isinstance(lse, DTensor) else finite(lse)

    def finite(lse):
        part = lse.to_local()
        part = torch.where(part.isinf(), 0.0, part)
        return DTensor.from_local(part, mesh, lse.placements)

    for bias in (make(2, 1, 7, 7), make(4, 7, 7), make(1, 7)):
        for placed in (BATCH, HEADS):
            compare(mesh, total, [query, key, value, bias], [[placed]] * 3 + [None])


def check_packed(mesh):
    offsets = torch.tensor([0, 3, 3, 9])
    tensors = [make(9, 4, 4), make(9, 2, 4), make(9, 2, 6), make(4).abs()]

    def call(query, key, value, slopes):
        score = scores.alibi(slopes)
        return onchip.attention_varlen_with_lse(query, key, value, offsets, causal=True, score=score)

    out, lse, *_ = compare(mesh, call, tensors, [[HEADS]] * 3 + [None])
    assert (out.placements, lse.placements) == ((HEADS,), (Shard(0),))


def check_two_dimensions(mesh):
    """Data and tensor parallel together."""
    for sizes in ((1, 2), (2, 1)):
        both = init_device_mesh("cpu", sizes, mesh_dim_names=("data", "tensor"))
        out, *_ = compare(
            both, with_head_scores, [*inputs(), make(4).abs(), make(4)], [[BATCH, HEADS]] * 3 + [None, None]
        )
        assert out.placements == (BATCH, HEADS)


def check_strides(mesh):
    """A result lies as the query does on each device, and what it says of itself fits: it can be viewed."""
    parts = [make(2, 5, 2, 4).transpose(1, 2) for _ in range(3)]
    query, key, value = (DTensor.from_local(part, mesh, [HEADS], run_check=False) for part in parts)
    out = onchip.attention(query, key, value)
    assert out.stride() == query.stride() and out.to_local().stride() == parts[0].stride()
    merged = out.transpose(1, 2).flatten(2)
    torch.testing.assert_close(merged.to_local(), onchip.attention(*parts).transpose(1, 2).flatten(2))


def check_sdpa(mesh):
    """Through torch's public function."""
    tensors = inputs()
    with onchip.replace_sdpa():
        shards = [distribute_tensor(tensor, mesh, [HEADS]) for tensor in tensors]
        out = nn.functional.scaled_dot_product_attention(*shards, is_causal=True, enable_gqa=True)
    expected = nn.functional.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(whole(out), expected)


def check_compiled(mesh):
    """In one graph, gradients included."""

    def call(query, key, slopes):
        return onchip.attention_with_lse(query, key, key, causal=True, score=scores.alibi(slopes))

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    compare(mesh, compiled, [make(2, 4, 5, 4), make(2, 2, 5, 4), make(4).abs()], [[HEADS], [HEADS], [WHOLE]])


def check_refusals(mesh):
    query, key, value = (distribute_tensor(tensor, mesh, [HEADS]) for tensor in inputs())
    rows = query.redistribute(placements=[LENGTH])
    with pytest.raises(NotImplementedError, match="query is sharded over its length"):
        onchip.attention(rows, *(tensor.redistribute(placements=[WHOLE]) for tensor in (key, value)))
    columns = [tensor.redistribute(placements=[LENGTH]) for tensor in (key, value)]
    with pytest.raises(NotImplementedError, match="key is sharded over its length.*does not pass keys round"):
        onchip.attention(query, *columns)
    packed = [distribute_tensor(make(9, 2, 4), mesh, [Shard(0)]) for _ in range(3)]
    with pytest.raises(NotImplementedError, match="query is sharded over its length"):
        onchip.attention_varlen(*packed, torch.tensor([0, 3, 9]))
    with pytest.raises(NotImplementedError, match="must be sharded over batch or heads"):
        onchip.attention(query.redistribute(placements=[Shard(3)]), key, value)
    with pytest.raises(ValueError, match="shards the batch of one"):
        onchip.attention(query, key.redistribute(placements=[BATCH]), value.redistribute(placements=[BATCH]))
    with pytest.raises(TypeError, match="got key as Tensor"):
        onchip.attention(query, whole(key), value)
    with pytest.raises(NotImplementedError, match="dropout_p must be 0 where heads are sharded"):
        onchip.attention(query, key, value, dropout_p=0.1)
    for batch in (True, False):
        mask = masks.predicate(lambda b, h, i, j, batch=batch: (b if batch else h) + i >= j)
        placed = BATCH if batch else HEADS
        shards = [tensor.redistribute(placements=[placed]) for tensor in (query, key, value)]
        with pytest.raises(NotImplementedError, match="must not read its index"):
            onchip.attention(*shards, mask=mask)
        other = [tensor.redistribute(placements=[HEADS if batch else BATCH]) for tensor in (query, key, value)]
        torch.testing.assert_close(
            whole(onchip.attention(*other, mask=mask)), onchip.attention(*map(whole, shards), mask=mask)
        )
    odd = [distribute_tensor(tensor, mesh, [HEADS]) for tensor in inputs(heads=6, heads_kv=3)]
    with pytest.raises(ValueError, match="share key heads unevenly"):
        onchip.attention(*odd)
    odd = [distribute_tensor(tensor, mesh, [HEADS]) for tensor in inputs(heads=3, heads_kv=3)]
    with pytest.raises(ValueError, match="must be a multiple of the 2 parts"):
        onchip.attention(*odd)
    twice = torch.ones(4)
    score = (scores.sink(twice), scores.modify(lambda s, b, h, i, j: s * twice[0]))
    with pytest.raises(ValueError, match="stands in places that are sharded differently"):
        onchip.attention(query, key, value, score=score)


class Block(nn.Module):
    """Attention with sinks and fixed slopes between projections."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(16, 48)
        self.outward = nn.Linear(16, 16)
        self.sinks = nn.Parameter(torch.randn(4))
        self.register_buffer("slopes", torch.rand(4))

    def forward(self, tokens: Tensor) -> Tensor:
        heads = self.inward(tokens).unflatten(-1, (3, 4, 4)).movedim(-3, 0).transpose(-3, -2)
        score = (scores.alibi(self.slopes), scores.sink(self.sinks))
        out = onchip.attention(*heads, causal=True, score=score)
        return tokens + self.outward(out.transpose(-3, -2).flatten(-2))


def check_fully_shard(mesh):
    """FSDP2: after a step every parameter is what one process with the whole batch has."""
    plain = nn.Sequential(Block(), Block())
    sharded = nn.Sequential(Block(), Block())
    sharded.load_state_dict(plain.state_dict())
    for block in sharded:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    tokens = torch.randn(4, 9, 16)
    for model, batch in ((plain, tokens), (sharded, tokens.chunk(2)[dist.get_rank()])):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(batch).square().mean().backward()
        optimizer.step()
    for ours, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
        assert isinstance(ours, DTensor)
        torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-4, atol=1e-6)


CHECKS = {name.removeprefix("check_"): value for name, value in list(globals().items()) if name.startswith("check_")}


def work(rank: int, folder: str) -> None:
    """One process: every check, and the traceback of each that fails, in a file by its name."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for name, check in CHECKS.items():
        torch.manual_seed(0)
        try:
            check(mesh)
        except Exception:
            Path(folder, f"{name}.{rank}").write_text(traceback.format_exc(), encoding="utf-8")
    Path(folder, f"done.{rank}").touch()
    dist.destroy_process_group()
