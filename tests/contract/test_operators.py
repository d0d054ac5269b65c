"""The operators under torch's own machinery: opcheck, one compiled graph, transforms, checkpointing, autocast."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import onchip
from onchip import masks, scores
from tests import harness, oracle
from tests.machine import moved, sized
from tests.problems import Spec, build, cumulative, named

CLOSE = {"rtol": 1e-10, "atol": 1e-11}
CLOSE_IN = {torch.float64: CLOSE, torch.float32: {"rtol": 1e-4, "atol": 1e-5}}
INSIDE = sorted(set(onchip.dispatch.schedules()) - onchip.dispatch.COMPOSITE)  # schedules that run in the operators
OPERATOR_SPECS = [
    Spec(((20, 33),), heads=(4, 2), causal=True),
    Spec(((20, 33), (7, 0)), layout="padded", score=("alibi", "bias"), mask="keys"),
    Spec(((20, 33), (7, 9)), layout="packed", tail=3, window=(9, 2), score=("softcap", "sink")),
    Spec(((20, 33),), mask="documents & checkers", score=("relative",), dropout_p=0.25),
]


class Recorder(TorchDispatchMode):
    """Remembers the arguments with which an operator of onchip is called."""

    def __init__(self):
        super().__init__()
        self.calls = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "onchip":
            self.calls[function] = args, kwargs or {}
        return function(*args, **kwargs or {})


def detached(argument):
    if isinstance(argument, torch.Tensor):
        return argument.detach().clone(memory_format=torch.preserve_format)
    if isinstance(argument, list | tuple):
        return [detached(item) for item in argument]
    return argument


@pytest.mark.parametrize("schedule", INSIDE)
@pytest.mark.parametrize(**named(sized(OPERATOR_SPECS, OPERATOR_SPECS[:1])))
def test_opcheck(spec, schedule):
    """Schema, fake kernel and autograd registration, for the arguments that a real call lowers to."""
    problem = build(spec, torch.float32)
    with Recorder() as recorder:
        harness.attempt(problem, schedule)
    names = {function._schema.name for function in recorder.calls}
    assert {"onchip::attention", "onchip::attention_backward"} <= names
    for function, (args, kwargs) in recorder.calls.items():
        args = [detached(argument) for argument in args]
        torch.library.opcheck(function, tuple(args), kwargs)
        if function._schema.name == "onchip::attention":
            for leaf in (*args[:3], *(tensor for tensor in args[3] if tensor.is_floating_point())):
                leaf.requires_grad_()
            torch.library.opcheck(function, tuple(args), kwargs)


@pytest.mark.parametrize("schedule", INSIDE)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)], ids=str)
def test_the_fake_kernel_knows_the_strides(order, schedule, device):
    back = [order.index(axis) for axis in range(4)]
    sizes = [2, 4, 5, 8]
    query = torch.randn([sizes[axis] for axis in order], device=device).permute(back)
    key, value = torch.randn(2, 2, 6, 8, device=device), torch.randn(2, 2, 6, 4, device=device)
    with Recorder() as recorder:
        real = onchip.attention_with_lse(query, key, value, schedule=schedule)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        (function, (args, _)), *_ = recorder.calls.items()
        fake = function(
            *(mode.from_tensor(argument) if isinstance(argument, torch.Tensor) else argument for argument in args)
        )
    for got, expected in zip(fake, real, strict=True):
        assert (got.shape, got.stride(), got.dtype) == (expected.shape, expected.stride(), expected.dtype)


@contextmanager
def compilations(limit):
    """Counts the graphs that dynamo hands to its backend."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    count = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 1 <= count <= limit, f"{count} graphs were compiled"
    torch._dynamo.reset()


def gradients_of(function, leaves):
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out = function(*leaves)
    weight = torch.sin(torch.arange(out.numel(), dtype=out.dtype, device=out.device)).view_as(out)
    return (out.detach(), *torch.autograd.grad((out * weight).sum(), leaves))


def assert_compiles(function, inputs, device):
    """One graph, at most two compilations over all inputs, forward and backward, and the eager answer."""
    inputs = [moved((tuple(leaves), rest), device) for leaves, rest in inputs]
    # first, so that a schedule that declines does so here
    eager = [gradients_of(lambda *leaves, rest=rest: function(*leaves, *rest), leaves) for leaves, rest in inputs]
    with compilations(2):
        compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
        for (leaves, rest), expected in zip(inputs, eager, strict=True):
            got = gradients_of(lambda *leaves, rest=rest: compiled(*leaves, *rest), leaves)
            for x, y in zip(got, expected, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


LENGTHS = sized((128, 200, 512, 1024), (16, 21, 40))
MASKS = {
    "none": lambda length, device: None,
    "documents": lambda length, device: masks.documents(torch.arange(length, device=device) // sized(50, 9)),
    "function": lambda length, device: masks.predicate(lambda b, h, i, j: (i - j).abs() % 3 == 0) & masks.causal(),
}


@pytest.mark.parametrize("mask", MASKS)
def test_one_dense_graph_for_every_length(mask, schedule, device):
    def function(query, key, value, mask):
        return onchip.attention(
            query, key, value, causal=True, mask=mask, score=scores.softcap(20.0), schedule=schedule
        )

    def example(length):
        return torch.randn(3, 1, 2, length, 16).unbind(), (MASKS[mask](length, device),)

    assert_compiles(function, [example(length) for length in LENGTHS], device)


def test_one_graph_with_learned_scores_for_every_length(schedule, device):
    def function(query, key, value, bias, slopes, sink):
        score = (scores.bias(bias), scores.alibi(slopes), scores.sink(sink))
        return onchip.attention(query, key, value, window=(90, 10), score=score, schedule=schedule)

    def example(length):
        return (*torch.randn(3, 1, 2, length, 16), torch.randn(2, 1, length), torch.rand(2), torch.randn(2)), ()

    assert_compiles(function, [example(length) for length in LENGTHS], device)


def test_one_padded_graph_for_every_length(schedule, device):
    def function(query, key, value, lengths):
        return onchip.attention(query, key, value, causal=True, lengths=(lengths, lengths), schedule=schedule)

    def example(length):
        return torch.randn(3, 2, 2, length, 16).unbind(), (torch.tensor([length, length // 2]),)

    assert_compiles(function, [example(length) for length in LENGTHS], device)


def test_one_packed_graph_for_every_length(schedule, device):
    def function(query, key, value, offsets):
        return onchip.attention_varlen(query, key, value, offsets, causal=True, window=(100, None), schedule=schedule)

    def example(length):
        return torch.randn(3, length, 2, 16).unbind(), (cumulative([length // 3, length - length // 3]),)

    assert_compiles(function, [example(length) for length in LENGTHS], device)


def test_a_compiled_graph_with_dropout_draws_a_new_seed_each_call(device):
    compiled = torch.compile(
        lambda *inputs: onchip.attention(*inputs, dropout_p=0.5), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    with compilations(2):
        inputs = torch.randn(3, 1, 2, 64, 16, device=device).unbind()
        torch.manual_seed(3)
        first, second = compiled(*inputs), compiled(*inputs)
        torch.manual_seed(3)
        assert torch.equal(compiled(*inputs), first)
        assert not torch.equal(first, second)


def test_functions_cannot_be_built_inside_a_compiled_region():
    def function(query, key, value):
        return onchip.attention(query, key, value, mask=masks.predicate(lambda b, h, i, j: i >= j))

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="outside"):
        compiled(*torch.randn(3, 1, 2, 16, 8))
    torch._dynamo.reset()


def dense_reference(query, key, value):
    """Causal attention of equal lengths, in plain torch."""
    s = query @ key.mT * query.shape[-1] ** -0.5
    hidden = torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1)
    return torch.softmax(s.masked_fill(hidden, -float("inf")), -1) @ value


def attend(schedule):
    return lambda *inputs: onchip.attention(*inputs, causal=True, schedule=schedule)


composite = pytest.mark.parametrize("schedule", [None, "dense"])


def test_a_schedule_that_cannot_be_transformed_says_so():
    """torch.func and forward mode need a composite schedule: a named other one refuses, and never falls back."""
    inputs = torch.randn(3, 1, 1, 4, 2).unbind()
    with pytest.raises(onchip.Unsupported, match="torch.func"):
        torch.func.grad(lambda *leaves: attend("tiled")(*leaves).sum())(*inputs)
    with pytest.raises(onchip.Unsupported, match="dense"):
        torch.func.jvp(attend("tiled"), inputs, inputs)


@composite
def test_functional_gradients(schedule, device):
    inputs = torch.randn(3, 2, 2, 9, 4, dtype=torch.float64, device=device).unbind()
    weight = torch.randn(2, 2, 9, 4, dtype=torch.float64, device=device)

    def loss(function):
        return lambda *inputs: (function(*inputs) * weight).sum()

    got = torch.func.grad(loss(attend(schedule)), argnums=(0, 1, 2))(*inputs)
    expected = torch.func.grad(loss(dense_reference), argnums=(0, 1, 2))(*inputs)
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, **CLOSE)


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (None, 0, 0), (2, 1, 0)], ids=str)
def test_vmap(axes, schedule, exact, device):
    def example(axis):
        plain = torch.randn(5, 2, 2, 9, 4, dtype=exact, device=device)
        return plain[0] if axis is None else plain.movedim(0, axis)

    inputs = [example(axis) for axis in axes]
    got = torch.vmap(attend(schedule), in_dims=axes)(*inputs)
    rows = [
        [leaf if axis is None else leaf.select(axis, n) for leaf, axis in zip(inputs, axes, strict=True)]
        for n in range(5)
    ]
    torch.testing.assert_close(got, torch.stack([dense_reference(*row) for row in rows]), **CLOSE_IN[exact])


@pytest.mark.parametrize("axes", [(0, 0), (None, 0), (0, None), (1, 2)], ids=str)
def test_vmap_over_scores_and_masks(axes, schedule, exact, device):
    """Every tensor of a call may be batched: here query and bias, mask and sink, forward and gradients."""

    def normal(*shape):
        return torch.randn(shape, dtype=exact, device=device)

    query, bias, sink = normal(5, 2, 2, 9, 4), normal(5, 1, 2, 9, 7), normal(5, 2)
    keep = torch.rand(5, 7, device=device) < 0.7
    keep[:, 0] = True
    key, value = normal(2, 2, 2, 7, 4)

    def function(query, bias, keep, sink):
        score = (scores.bias(bias), scores.sink(sink))
        return onchip.attention_with_lse(query, key, value, mask=masks.keys(keep), score=score, schedule=schedule)

    def placed(plain, axis):
        return (plain[0] if axis is None else plain.movedim(0, axis).contiguous()).requires_grad_()

    query, bias = placed(query, axes[0]), placed(bias, axes[1])
    got = torch.vmap(function, in_dims=(*axes, 0, 0))(query, bias, keep, sink)
    alone = []
    for n in range(5):
        row = [leaf if axis is None else leaf.select(axis, n) for leaf, axis in ((query, axes[0]), (bias, axes[1]))]
        alone.append(function(*row, keep[n], sink[n]))
    expected = [torch.stack([result.out for result in alone]), torch.stack([result.lse for result in alone])]
    weights = [torch.randn_like(part) for part in expected]
    gradients = [torch.autograd.grad(results, (query, bias), weights) for results in (got, expected)]
    for x, y in zip((*got, *gradients[0]), (*expected, *gradients[1]), strict=True):
        torch.testing.assert_close(x, y, **CLOSE_IN[exact])


def test_vmap_over_packed_calls(schedule, exact, device):
    inputs = torch.randn(3, 4, 12, 2, 8, dtype=exact, device=device).unbind()
    offsets = cumulative([5, 0, 7]).to(device)
    got = torch.vmap(lambda *leaves: onchip.attention_varlen(*leaves, offsets, causal=True, schedule=schedule))(*inputs)
    alone = [onchip.attention_varlen(*(leaf[n] for leaf in inputs), offsets, causal=True) for n in range(4)]
    torch.testing.assert_close(got, torch.stack(alone), **CLOSE_IN[exact])


@composite
def test_functional_gradients_of_scores(schedule, device):
    """torch.func.grad by a bias, slopes, a sink and a tensor that a function captures."""
    query, key, value = torch.randn(3, 1, 2, 9, 4, dtype=torch.float64, device=device)
    shapes = ((2, 9, 9), (2,), (2,), (9,))
    leaves = tuple(torch.randn(shape, dtype=torch.float64, device=device) for shape in shapes)

    def terms(bias, slopes, sink, table):
        look_up = scores.modify(lambda s, b, h, i, j: s + table[j])
        return scores.bias(bias), scores.alibi(slopes), scores.sink(sink), look_up

    def loss(*leaves):
        return onchip.attention(query, key, value, score=terms(*leaves), schedule=schedule).square().sum()

    got = torch.func.grad(loss, argnums=(0, 1, 2, 3))(*leaves)
    plain = [leaf.clone().requires_grad_() for leaf in leaves]
    for x, y in zip(got, torch.autograd.grad(loss(*plain), plain), strict=True):
        torch.testing.assert_close(x, y, **CLOSE)


@composite
def test_per_sample_gradients(schedule, device):
    """vmap over grad."""
    inputs = torch.randn(3, 5, 1, 2, 9, 4, dtype=torch.float64, device=device).unbind()
    got = torch.vmap(torch.func.grad(lambda *leaves: attend(schedule)(*leaves).square().sum()))(*inputs)
    expected = torch.stack(
        [
            torch.func.grad(lambda *leaves: dense_reference(*leaves).square().sum())(*(leaf[n] for leaf in inputs))
            for n in range(5)
        ]
    )
    torch.testing.assert_close(got, expected, **CLOSE)


def test_vmap_over_a_differentiable_call(schedule, exact, device):
    inputs = [leaf.requires_grad_() for leaf in torch.randn(3, 3, 2, 2, 9, 4, dtype=exact, device=device)]
    got = torch.autograd.grad(torch.vmap(attend(schedule))(*inputs).square().sum(), inputs)
    expected = torch.autograd.grad(dense_reference(*inputs).square().sum(), inputs)
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, **CLOSE_IN[exact])


@composite
def test_forward_mode(schedule, device):
    inputs, tangents = (tuple(torch.randn(3, 2, 2, 9, 4, dtype=torch.float64, device=device)) for _ in range(2))
    got = torch.func.jvp(attend(schedule), inputs, tangents)
    expected = torch.func.jvp(dense_reference, inputs, tangents)
    for x, y in zip(got, expected, strict=True):
        torch.testing.assert_close(x, y, **CLOSE)
    with torch.autograd.forward_ad.dual_level():
        duals = [torch.autograd.forward_ad.make_dual(x, t) for x, t in zip(inputs, tangents, strict=True)]
        dual = torch.autograd.forward_ad.unpack_dual(attend(schedule)(*duals))
    torch.testing.assert_close(dual.tangent, expected[1], **CLOSE)


@pytest.mark.parametrize(
    **named(
        [
            Spec(((6, 7),), heads=(4, 2), dims=(4, 3), causal=True),
            Spec(((6, 7), (3, 4)), dims=(4, 3), layout="packed", score=("softcap", "bias", "sink")),
            Spec(((7, 6), (2, 6)), dims=(4, 3), layout="padded", score=("alibi", "gate"), dropout_p=0.25),
        ]
    )
)
def test_double_backward(spec, schedule, exact):
    """The gradient of a function of the gradients, through out and LSE, against the oracle."""
    problem = build(spec, exact)
    d_out, d_lse = oracle.cotangents(problem)

    def second(run):
        leaves = {name: leaf.detach().requires_grad_() for name, leaf in problem.leaves.items()}
        out, lse = run(leaves)
        lse = torch.where(lse.isfinite(), lse, 0)
        first = torch.autograd.grad(
            (out * d_out).sum() + (lse * d_lse).square().sum(), list(leaves.values()), create_graph=True
        )
        penalty = sum(
            (gradient.square() * torch.cos(torch.arange(gradient.numel()).view_as(gradient))).sum()
            for gradient in first
        )
        return dict(zip(leaves, torch.autograd.grad(penalty, list(leaves.values())), strict=True))

    got = second(lambda leaves: harness.call(problem, schedule, leaves))
    expected = second(lambda leaves: oracle.forward(replace(problem, leaves=leaves)))
    tolerance = 1e-9 if exact == torch.float64 else 1e-3
    for name, gradient in got.items():
        bound = tolerance * (1 + expected[name].abs().max().item())
        torch.testing.assert_close(
            gradient, expected[name], rtol=0, atol=bound, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_replays_dropout(reentrant, schedule, device):
    leaves = [leaf.requires_grad_() for leaf in torch.randn(3, 1, 2, 40, 16, device=device)]

    def layer(*inputs):
        return onchip.attention(*inputs, dropout_p=0.5, schedule=schedule)

    torch.manual_seed(7)
    plain = layer(*leaves)
    expected = torch.autograd.grad(plain.square().sum(), leaves)
    torch.manual_seed(7)
    replayed = checkpoint(layer, *leaves, use_reentrant=reentrant)
    torch.rand(100, device=device)  # the generator moves on before the backward
    replayed.square().sum().backward()
    assert torch.equal(replayed, plain)
    for leaf, gradient in zip(leaves, expected, strict=True):
        assert torch.equal(leaf.grad, gradient)


def test_autocast(schedule, device):
    """Under autocast float32 inputs run in the lower precision, as torch's own attention does."""
    leaves = [leaf.requires_grad_() for leaf in torch.randn(3, 1, 2, 40, 16, device=device)]
    with torch.autocast(device, dtype=torch.bfloat16):
        out = onchip.attention(*leaves, causal=True, schedule=schedule)
    expected = onchip.attention(*(leaf.bfloat16() for leaf in leaves), causal=True, schedule=schedule)
    assert out.dtype == torch.bfloat16 and torch.equal(out, expected)
    out.float().square().sum().backward()
    assert all(leaf.grad.dtype == torch.float32 and leaf.grad.any() for leaf in leaves)


def test_autocast_of_mixed_inputs(schedule, device):
    query, key, value = torch.randn(3, 1, 2, 40, 16, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        out = onchip.attention(query, key.bfloat16(), value, schedule=schedule)
    assert out.dtype == torch.bfloat16


def test_inference_mode_and_no_grad(schedule, device):
    inputs = torch.randn(3, 1, 2, 40, 16, device=device).unbind()
    expected = onchip.attention(*inputs, causal=True, schedule=schedule)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert torch.equal(onchip.attention(*inputs, causal=True, schedule=schedule), expected)


@pytest.mark.parametrize("transform", ["grad", "vmap"])
def test_transforms_inside_a_compiled_region(transform, device):
    inputs = torch.randn(3, 1, 2, 12, 4, dtype=torch.float64, device=device).unbind()

    def attend(query, key, value):
        return onchip.attention(query, key, value, causal=True, score=scores.softcap(3.0)).sin().sum((-1, -2))

    if transform == "grad":
        function = torch.func.grad(lambda *tensors: attend(*tensors).sum())
    else:
        inputs = [
            tensor[None].repeat(3, 1, 1, 1, 1) * torch.arange(1, 4, device=device).view(3, 1, 1, 1, 1)
            for tensor in inputs
        ]
        function = torch.vmap(attend)
    with compilations(2):
        got = torch.compile(function, fullgraph=True, backend="aot_eager")(*inputs)
    torch.testing.assert_close(got, function(*inputs), **CLOSE)
