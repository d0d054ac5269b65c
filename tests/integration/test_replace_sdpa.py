"""`replace_sdpa` against the math backend of PyTorch's own scaled_dot_product_attention: outputs and all gradients."""

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import onchip
from onchip.integrations import sdpa

TORCH_SDPA = F.scaled_dot_product_attention


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """The keyword arguments of every call that reached onchip.attention."""
    seen: list[dict] = []
    attention = sdpa.attention

    def spy(*args, **kwargs):
        seen.append(kwargs)
        return attention(*args, **kwargs)

    monkeypatch.setattr(sdpa, "attention", spy)
    return seen


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    yield
    assert F.scaled_dot_product_attention is TORCH_SDPA
    assert torch.backends.mha.get_fastpath_enabled()
    assert sdpa._layers == []


def random(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def keep(*shape: int) -> Tensor:
    """A random bool mask whose first row is empty and whose second is full."""
    mask = torch.rand(shape) < 0.6
    mask[..., 0, :] = False
    mask[..., 1, :] = True
    return mask


def run(inputs: tuple[Tensor, ...], mask: Tensor | None, options: dict) -> tuple[Tensor, ...]:
    """The output, and the gradients of everything that takes one, for a fixed incoming gradient."""
    out = F.scaled_dot_product_attention(*inputs, attn_mask=mask, **options)
    wanted = [tensor for tensor in (*inputs, mask) if tensor is not None and tensor.requires_grad]
    incoming = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return (out, *torch.autograd.grad(out, wanted, incoming))


def compare(calls: list[dict], *inputs: Tensor, mask: Tensor | None = None, rtol=1e-10, atol=1e-12, **options) -> None:
    with sdpa_kernel(SDPBackend.MATH):
        expected = run(inputs, mask, options)
    assert not calls
    with onchip.replace_sdpa():
        actual = run(inputs, mask, options)
    assert len(calls) == 1
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ((3, 5), (4, 5), (4, 7)),
        ((2, 3, 5), (2, 4, 5), (2, 4, 7)),
        ((2, 3, 6, 5), (2, 3, 4, 5), (2, 3, 4, 7)),
        ((2, 3, 2, 6, 5), (2, 3, 2, 4, 5), (2, 3, 2, 4, 7)),
        ((2, 3, 6, 5), (1, 3, 4, 5), (2, 3, 4, 7)),
        ((2, 3, 6, 5), (2, 1, 4, 5), (2, 1, 4, 7)),
        ((2, 1, 6, 5), (2, 3, 4, 5), (2, 3, 4, 7)),
        ((2, 3, 6, 5), (2, 1, 4, 5), (2, 3, 4, 7)),
        ((6, 5), (2, 3, 4, 5), (3, 4, 7)),
        ((2, 1, 2, 3, 5), (1, 3, 2, 4, 5), (2, 3, 2, 4, 7)),
        ((6, 5), (4, 5), (2, 3, 4, 7)),
        ((3, 1, 5), (1, 4, 5), (1, 4, 7)),
    ],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_every_rank_and_broadcast(calls, query, key, value, is_causal):
    compare(calls, random(*query), random(*key), random(*value), is_causal=is_causal)


@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ((0, 3, 6, 5), (0, 3, 4, 5), (0, 3, 4, 7)),
        ((0, 3, 6, 5), (1, 3, 4, 5), (1, 3, 4, 7)),
        ((2, 0, 3, 6, 5), (2, 0, 3, 4, 5), (2, 0, 3, 4, 7)),
        ((2, 3, 0, 5), (2, 3, 4, 5), (2, 3, 4, 7)),
        ((2, 3, 6, 5), (2, 3, 0, 5), (2, 3, 0, 7)),
    ],
)
def test_empty_dimensions(calls, query, key, value):
    compare(calls, random(*query), random(*key), random(*value))


@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ((0, 6, 5), (0, 4, 5), (0, 4, 7)),
        ((2, 0, 6, 5), (2, 0, 4, 5), (2, 0, 4, 7)),
        ((2, 3, 6, 0), (2, 3, 4, 0), (2, 3, 4, 7)),
        ((2, 3, 6, 5), (2, 3, 4, 5), (2, 3, 4, 0)),
    ],
)
def test_no_heads_or_head_dims_are_left_to_torch(calls, query, key, value):
    inputs = random(*query), random(*key), random(*value)
    expected = run(inputs, None, {})
    with onchip.replace_sdpa():
        actual = run(inputs, None, {})
    assert not calls
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


MASKS = [
    ((2, 3, 6, 5), (6, 4)),
    ((2, 3, 6, 5), (1, 6, 4)),
    ((2, 3, 6, 5), (3, 6, 4)),
    ((2, 3, 6, 5), (2, 1, 6, 4)),
    ((2, 3, 6, 5), (2, 3, 6, 4)),
    ((2, 6, 5), (6, 4)),
    ((2, 6, 5), (2, 6, 4)),
    ((6, 5), (6, 4)),
    ((2, 4, 3, 6, 5), (6, 4)),
    ((2, 4, 3, 6, 5), (4, 1, 6, 4)),
    ((2, 4, 3, 6, 5), (2, 1, 3, 6, 4)),
    ((2, 4, 3, 6, 5), (1, 1, 3, 6, 4)),
]


@pytest.mark.parametrize(("query", "mask"), MASKS)
def test_bool_mask(calls, query, mask):
    key, value = random(*query[:-2], 4, 5), random(*query[:-2], 4, 7)
    compare(calls, random(*query), key, value, mask=keep(*mask))


@pytest.mark.parametrize(("query", "mask"), MASKS)
def test_float_mask_and_its_gradient(calls, query, mask):
    key, value = random(*query[:-2], 4, 5), random(*query[:-2], 4, 7)
    compare(calls, random(*query), key, value, mask=random(*mask))


@pytest.mark.parametrize("shape", [(2, 1, 1, 4), (1, 4), (6, 1), (2, 3, 1, 1)])
def test_mask_broadcasts_over_queries_and_keys(calls, shape):
    inputs = random(2, 3, 6, 5), random(2, 3, 4, 5), random(2, 3, 4, 7)
    compare(calls, *inputs, mask=torch.rand(shape) < 0.5)
    calls.clear()
    compare(calls, *inputs, mask=random(*shape))


def test_minus_infinity_in_a_float_mask_hides(calls):
    mask = torch.zeros(6, 4, dtype=torch.float64).masked_fill(~keep(6, 4), float("-inf"))
    compare(calls, random(2, 3, 6, 5), random(2, 3, 4, 5), random(2, 3, 4, 7), mask=mask)


def test_float32_mask_on_a_float64_query(calls):
    mask = torch.randn(6, 4)
    compare(calls, random(2, 3, 6, 5), random(2, 3, 4, 5), random(2, 3, 4, 7), mask=mask)


def test_a_row_without_keys_is_zero_with_zero_gradients():
    query, key, value = random(1, 1, 3, 4), random(1, 1, 5, 4), random(1, 1, 5, 4)
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[1] = False
    with onchip.replace_sdpa():
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    (grad,) = torch.autograd.grad(out.sum(), query)
    assert (out[:, :, 1] == 0).all() and (out[:, :, 0] != 0).all()
    assert (grad[:, :, 1] == 0).all()


@pytest.mark.parametrize(
    ("query", "key", "value"),
    [
        ((2, 6, 3, 5), (2, 2, 4, 5), (2, 2, 4, 7)),
        ((6, 3, 5), (2, 4, 5), (2, 4, 7)),
        ((2, 3, 6, 3, 5), (2, 3, 2, 4, 5), (2, 3, 2, 4, 7)),
        ((2, 6, 3, 5), (1, 2, 4, 5), (1, 2, 4, 7)),
        ((2, 6, 3, 5), (2, 4, 5), (2, 4, 7)),
        ((2, 6, 3, 5), (2, 2, 4, 5), (2, 3, 4, 7)),
        ((2, 6, 3, 5), (2, 6, 4, 5), (2, 6, 4, 7)),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_grouped_heads(calls, query, key, value, masked):
    mask = keep(query[-3], 3, 4) if masked else None
    compare(calls, random(*query), random(*key), random(*value), mask=mask, enable_gqa=True)


@pytest.mark.parametrize("scale", [0.3, -1.0, 2, 0.0, torch.tensor(0.5)])
def test_scale(calls, scale):
    compare(calls, random(2, 3, 6, 5), random(2, 3, 4, 5), random(2, 3, 4, 7), scale=scale)


def test_positional_arguments():
    inputs = random(2, 3, 6, 5), random(2, 3, 4, 5), random(2, 3, 4, 7)
    expected = F.scaled_dot_product_attention(*inputs, None, 0.0, True)
    with onchip.replace_sdpa():
        actual = F.scaled_dot_product_attention(*inputs, None, 0.0, True)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask_dtype", [None, torch.bool, torch.float32, "query"])
def test_low_precision_is_as_close_to_float64_as_torch_is(dtype, mask_dtype):
    inputs = [random(2, 4, 200, 64, dtype=dtype) for _ in range(3)]
    mask = None
    if mask_dtype == torch.bool:
        mask = keep(200, 200)
    elif mask_dtype is not None:
        mask = torch.randn(200, 200, dtype=dtype if mask_dtype == "query" else mask_dtype)
    wide = tuple(tensor.detach().double().requires_grad_() for tensor in inputs)
    wide_mask = mask.double() if mask is not None and mask.is_floating_point() else mask
    with sdpa_kernel(SDPBackend.MATH):
        exact = run(wide, wide_mask, {})
        plain = run(tuple(inputs), mask, {})
    with onchip.replace_sdpa():
        actual = run(tuple(inputs), mask, {})
    for ours, theirs, truth in zip(actual, plain, exact, strict=True):
        assert ours.dtype == dtype
        allowed = 2 * (theirs - truth).abs().max() + torch.finfo(dtype).eps * truth.abs().max()
        assert (ours - truth).abs().max() <= allowed


@pytest.mark.parametrize("sizes", [(6, 4), (4, 6), (5, 5)])
@pytest.mark.parametrize("variant", [causal_upper_left, causal_lower_right])
@pytest.mark.filterwarnings("ignore:Lower right causal bias")
def test_causal_bias(calls, sizes, variant):
    length_q, length_k = sizes
    inputs = random(2, 3, length_q, 5), random(2, 3, length_k, 5), random(2, 3, length_k, 7)
    compare(calls, *inputs, mask=variant(*sizes))
    assert calls[0]["score"] is None and isinstance(calls[0]["mask"], type(onchip.masks.causal()))


@pytest.mark.parametrize("mask", [causal_upper_left(3, 8), causal_lower_right(7, 7), causal_lower_right(1, 4)])
def test_causal_bias_of_another_size(calls, mask):
    compare(calls, random(2, 3, 6, 5), random(2, 3, 4, 5), random(2, 3, 4, 7), mask=mask)


def test_causal_bias_that_does_not_fit_raises():
    inputs = random(2, 3, 6, 5), random(2, 3, 4, 5), random(2, 3, 4, 7)
    with onchip.replace_sdpa(), pytest.raises((ValueError, RuntimeError)):
        F.scaled_dot_product_attention(*inputs, attn_mask=causal_lower_right(3, 4))


@pytest.mark.parametrize("make", [lambda x: x.mT, lambda x: x[..., ::2], lambda x: x[:, :1].expand(-1, 3, -1, -1)])
def test_strides(calls, make: Callable[[Tensor], Tensor]):
    leaves = [random(2, 3, 6, 6) for _ in range(3)]
    compare(calls, *(make(leaf) for leaf in leaves), is_causal=True)


def test_dropout_statistics_and_seed():
    query, key, value = random(2, 2, 64, 16), random(2, 2, 128, 16), torch.ones(2, 2, 128, 1, dtype=torch.float64)
    with onchip.replace_sdpa():
        torch.manual_seed(0)
        first = F.scaled_dot_product_attention(query, key, value, dropout_p=0.25)
        second = F.scaled_dot_product_attention(query, key, value, dropout_p=0.25)
        torch.manual_seed(0)
        again = F.scaled_dot_product_attention(query, key, value, dropout_p=0.25)
    assert torch.equal(first, again) and not torch.equal(first, second)
    assert first.std() > 0.01
    assert abs(first.mean() - 1) < 0.05


def test_dropout_gradient_uses_the_mask_of_the_forward():
    query, key, value = random(1, 2, 8, 4), random(1, 2, 8, 4), random(1, 2, 8, 4)

    def seeded(*inputs: Tensor) -> Tensor:
        torch.manual_seed(3)
        return F.scaled_dot_product_attention(*inputs, dropout_p=0.5)

    with onchip.replace_sdpa():
        assert torch.autograd.gradcheck(seeded, (query, key, value))


def test_dropout_of_one_gives_zeros_and_zero_gradients():
    inputs = [random(2, 3, 6, 5) for _ in range(3)]
    with onchip.replace_sdpa():
        out = F.scaled_dot_product_attention(*inputs, dropout_p=1.0)
    assert (out == 0).all()
    assert all((grad == 0).all() for grad in torch.autograd.grad(out.sum(), inputs))


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        (
            [(1, 2, 3, 4)] * 3,
            {"attn_mask": torch.ones(3, 3, dtype=torch.bool), "is_causal": True},
            "exclude each other",
        ),
        ([(4,)] * 3, {}, "at least two dimensions"),
        ([(1, 8, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)], {}, "enable_gqa=True"),
        ([(1, 8, 3, 4), (1, 3, 3, 4), (1, 3, 3, 4)], {"enable_gqa": True}, "multiple"),
        ([(1, 8, 3, 4), (1, 2, 3, 4), (1, 3, 3, 4)], {"enable_gqa": True}, "multiple"),
        ([(2, 8, 3, 4), (3, 8, 3, 4), (3, 8, 3, 4)], {}, "batch dimensions"),
        ([(2, 2, 3, 4)] * 3, {"attn_mask": torch.ones(3, 3, dtype=torch.int32)}, "bool, float32 or"),
        ([(2, 2, 3, 4)] * 3, {"attn_mask": torch.ones(3, 3, dtype=torch.float64)}, "bool, float32 or"),
    ],
)
def test_errors_are_of_the_kind_that_torch_raises(shapes, options, message):
    inputs = [torch.randn(shape) for shape in shapes]
    with sdpa_kernel(SDPBackend.MATH), pytest.raises(RuntimeError):
        F.scaled_dot_product_attention(*inputs, **options)
    with onchip.replace_sdpa(), pytest.raises(RuntimeError, match=message):
        F.scaled_dot_product_attention(*inputs, **options)


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        ([(2, 2, 3, 4), (2, 2, 3, 5), (2, 2, 3, 4)], {}),
        ([(2, 2, 3, 4), (2, 2, 3, 4), (2, 2, 5, 4)], {}),
        ([(2, 2, 3, 4)] * 3, {"attn_mask": torch.ones(4, 3, dtype=torch.bool)}),
        ([(2, 2, 3, 4)] * 3, {"attn_mask": torch.ones(4, 3)}),
        ([(2, 2, 3, 4)] * 3, {"attn_mask": torch.ones(1, 1, 2, 3, 3, dtype=torch.bool)}),
        ([(2, 2, 3, 4)] * 3, {"dropout_p": 1.5}),
        ([(2, 2, 3, 4)] * 3, {"scale": float("nan")}),
    ],
)
def test_shapes_and_values_that_cannot_be_used_raise(shapes, options):
    inputs = [torch.randn(shape) for shape in shapes]
    with onchip.replace_sdpa(), pytest.raises(ValueError):
        F.scaled_dot_product_attention(*inputs, **options)


def test_mixed_dtypes_raise():
    inputs = torch.randn(2, 2, 3, 4), torch.randn(2, 2, 3, 4).double(), torch.randn(2, 2, 3, 4)
    with onchip.replace_sdpa(), pytest.raises(TypeError, match="dtype"):
        F.scaled_dot_product_attention(*inputs)


def test_schedule_is_passed_on(calls):
    inputs = [random(2, 3, 6, 5) for _ in range(3)]
    with onchip.replace_sdpa(schedule="dense"):
        F.scaled_dot_product_attention(*inputs)
        with onchip.replace_sdpa(schedule="tiled"):
            F.scaled_dot_product_attention(*inputs)
        F.scaled_dot_product_attention(*inputs)
    assert [call["schedule"] for call in calls] == ["dense", "tiled", "dense"]


# Autocast, tensor subclasses and modes, tensors that onchip does not take.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("masked", [False, True])
def test_autocast(calls, dtype, masked):
    inputs = [random(2, 3, 6, 5, dtype=dtype) for _ in range(3)]
    mask = torch.randn(6, 6, dtype=dtype) if masked else None
    with torch.autocast("cpu", torch.bfloat16):
        expected = run(tuple(inputs), mask, {})
        with onchip.replace_sdpa():
            actual = run(tuple(inputs), mask, {})
    assert len(calls) == 1
    assert actual[0].dtype == (torch.float64 if dtype == torch.float64 else torch.bfloat16)
    tolerance = 1e-10 if dtype == torch.float64 else 3e-2
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def test_autocast_does_not_round_inside():
    inputs = [random(1, 2, 40, 16, dtype=torch.bfloat16) for _ in range(3)]
    with onchip.replace_sdpa():
        expected = run(tuple(inputs), None, {})
        with torch.autocast("cpu", torch.bfloat16):
            actual = run(tuple(inputs), None, {})
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_autocast_joins_dtypes(calls):
    query, key, value = random(2, 3, 6, 5, dtype=torch.bfloat16), random(2, 3, 4, 5).float(), random(2, 3, 4, 5).float()
    with torch.autocast("cpu", torch.bfloat16), onchip.replace_sdpa():
        assert F.scaled_dot_product_attention(query, key, value).dtype == torch.bfloat16
    assert len(calls) == 1


def test_torch_function_subclass_sees_the_call(calls):
    class Recording(Tensor):
        seen: list = []

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.seen.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    inputs = [torch.randn(2, 3, 6, 5) for _ in range(3)]
    with onchip.replace_sdpa():
        out = F.scaled_dot_product_attention(inputs[0].as_subclass(Recording), *inputs[1:], is_causal=True)
        assert F.scaled_dot_product_attention in Recording.seen
    assert type(out) is Recording
    assert len(calls) == 1
    torch.testing.assert_close(out.as_subclass(Tensor), F.scaled_dot_product_attention(*inputs, is_causal=True))


@pytest.mark.parametrize("mask", [None, torch.ones(6, 6, dtype=torch.bool), causal_upper_left(6, 6)])
def test_torch_function_mode(calls, mask):
    inputs = [torch.randn(2, 3, 6, 5) for _ in range(3)]
    with onchip.replace_sdpa(), torch.device("cpu"):
        out = F.scaled_dot_product_attention(*inputs, attn_mask=mask)
    assert len(calls) == 1
    torch.testing.assert_close(out, F.scaled_dot_product_attention(*inputs, attn_mask=mask))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_strided_nested_tensors_go_to_torch(calls):
    nested = torch.nested.nested_tensor([torch.randn(2, 3, 4), torch.randn(2, 5, 4)])
    expected = F.scaled_dot_product_attention(nested, nested, nested)
    with onchip.replace_sdpa():
        actual = F.scaled_dot_product_attention(nested, nested, nested)
    assert not calls
    for ours, theirs in zip(actual.unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("is_causal", [False, True])
def test_jagged_nested_tensors(calls, is_causal):
    """Each sequence by itself, causal from the top left; with a mask or a fifth dimension PyTorch decides."""
    lengths, lengths_k = (3, 5, 1), (4, 5, 2)
    query, key = (
        torch.nested.nested_tensor([torch.randn(n, 2, 4) for n in each], layout=torch.jagged, requires_grad=True)
        for each in (lengths, lengths_k)
    )
    with onchip.replace_sdpa():
        heads, heads_k = query.transpose(1, 2), key.transpose(1, 2)
        out = F.scaled_dot_product_attention(heads, heads_k, heads_k, is_causal=is_causal, scale=0.3)
    assert len(calls) == 1
    gradients = torch.autograd.grad(out.values().square().sum(), (query, key))
    parts = [[part.detach().requires_grad_() for part in tensor.unbind()] for tensor in (query, key)]
    pairs = [(q.transpose(0, 1), k.transpose(0, 1)) for q, k in zip(*parts, strict=True)]
    expected = [F.scaled_dot_product_attention(q, k, k, is_causal=is_causal, scale=0.3) for q, k in pairs]
    due = torch.autograd.grad(sum(part.square().sum() for part in expected), parts[0] + parts[1])
    torch.testing.assert_close(list(out.unbind()), expected)
    torch.testing.assert_close([part for gradient in gradients for part in gradient.unbind()], list(due))


def test_meta_tensors():
    inputs = [torch.randn(2, 3, 6, 5, device="meta") for _ in range(3)]
    mask = torch.zeros(6, 6, device="meta")
    with onchip.replace_sdpa():
        out = F.scaled_dot_product_attention(*inputs, attn_mask=mask)
    assert out.is_meta and out.shape == (2, 3, 6, 5)


def test_function_transforms(calls):
    tokens = torch.randn(5, 2, 6, 8, dtype=torch.float64)

    def call(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    def outputs() -> tuple[Tensor, ...]:
        grads = torch.func.grad(lambda x: call(x).square().sum())(tokens)
        return torch.func.vmap(call)(tokens), grads, *torch.func.jvp(call, (tokens,), (torch.ones_like(tokens),))

    with sdpa_kernel(SDPBackend.MATH):
        expected = outputs()
    with onchip.replace_sdpa():
        actual = outputs()
    assert len(calls) == 3
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


def test_exported_program_holds_onchip():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    tokens = torch.randn(2, 6, 16)
    with onchip.replace_sdpa():
        program = torch.export.export(layer, (tokens,))
    assert any("onchip" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(tokens), layer(tokens), rtol=1e-4, atol=1e-5)


# Modules.


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("masked", [None, "bool", "float", "per head", "causal"])
@pytest.mark.parametrize("training", [False, True])
def test_multihead_attention(calls, batch_first, padded, masked, training):
    module = nn.MultiheadAttention(16, 4, batch_first=batch_first, dtype=torch.float64).train(training)
    tokens = random(2, 6, 16) if batch_first else random(6, 2, 16)
    options: dict = {"need_weights": False}
    if padded:
        options["key_padding_mask"] = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    if masked == "bool":
        options["attn_mask"] = torch.ones(6, 6, dtype=torch.bool).triu(1)
    elif masked == "float":
        options["attn_mask"] = torch.randn(6, 6, dtype=torch.float64)
    elif masked == "per head":
        options["attn_mask"] = torch.randn(8, 6, 6, dtype=torch.float64)
    elif masked == "causal":
        options["attn_mask"] = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
        options["is_causal"] = True

    def outputs() -> tuple[Tensor, ...]:
        out, weights = module(tokens, tokens, tokens, **options)
        assert weights is None
        return (out, *torch.autograd.grad(out.square().sum(), (tokens, *module.parameters())))

    with sdpa_kernel(SDPBackend.MATH):
        expected = outputs()
    with onchip.replace_sdpa():
        actual = outputs()
    assert len(calls) == 1
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_encoder_layer(calls, training, padded, norm_first):
    layer = nn.TransformerEncoderLayer(
        16, 4, 32, dropout=0.0, batch_first=True, norm_first=norm_first, dtype=torch.float64
    ).train(training)
    tokens = random(2, 6, 16)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2]) if padded else None

    def outputs() -> tuple[Tensor, ...]:
        out = layer(tokens, src_key_padding_mask=padding)
        return (out, *torch.autograd.grad(out.square().sum(), (tokens, *layer.parameters())))

    expected = outputs()
    with onchip.replace_sdpa():
        actual = outputs()
    assert len(calls) == 1
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("padded", [False, True])
def test_fused_inference_path_is_off_inside(calls, padded):
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 3).eval()
    tokens = torch.randn(2, 6, 16)
    padding = torch.tensor([[False] * 6, [False] * 4 + [True] * 2]) if padded else None
    with torch.no_grad():
        expected = encoder(tokens, src_key_padding_mask=padding)
        with onchip.replace_sdpa():
            assert not torch.backends.mha.get_fastpath_enabled()
            actual = encoder(tokens, src_key_padding_mask=padding)
    assert len(calls) == 3
    real = slice(None) if padding is None else ~padding
    torch.testing.assert_close(actual[real], expected[real], rtol=1e-4, atol=1e-5)


def test_fast_path_that_was_off_stays_off():
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with onchip.replace_sdpa():
            pass
        assert not torch.backends.mha.get_fastpath_enabled()
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_transformer_decoder_layer(calls):
    layer = nn.TransformerDecoderLayer(16, 4, 32, dropout=0.0, batch_first=True, dtype=torch.float64)
    tokens, memory = random(2, 6, 16), random(2, 9, 16)
    causal = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    expected = layer(tokens, memory, tgt_mask=causal, tgt_is_causal=True)
    with onchip.replace_sdpa():
        actual = layer(tokens, memory, tgt_mask=causal, tgt_is_causal=True)
    assert len(calls) == 2
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)


# Entering and leaving.


def test_decorator(calls):
    @onchip.replace_sdpa()
    def twice(depth: int) -> Tensor:
        """The docstring."""
        assert F.scaled_dot_product_attention is not TORCH_SDPA
        tokens = torch.ones(1, 1, 2, 4)
        out = F.scaled_dot_product_attention(tokens, tokens, tokens)
        return out if depth == 0 else out + twice(depth - 1)

    assert twice.__doc__ == "The docstring."
    assert torch.equal(twice(2), torch.full((1, 1, 2, 4), 3.0))
    assert len(calls) == 3
    assert F.scaled_dot_product_attention is TORCH_SDPA


def test_decorator_refuses_functions_that_run_later():
    async def coroutine():
        pass

    def generator():
        yield

    async def async_generator():
        yield

    for function in (coroutine, generator, async_generator):
        with pytest.raises(TypeError, match="inside it"):
            onchip.replace_sdpa()(function)


def test_nesting_restores_each_level():
    one = onchip.replace_sdpa(schedule="dense")
    with one:
        outer = F.scaled_dot_product_attention
        with one, onchip.replace_sdpa(schedule="tiled"):
            inner = F.scaled_dot_product_attention
            assert inner is not outer
        assert F.scaled_dot_product_attention is outer
        assert not torch.backends.mha.get_fastpath_enabled()
    assert F.scaled_dot_product_attention is TORCH_SDPA


def test_restores_what_another_tool_put_there(monkeypatch):
    def other(*args, **kwargs):
        return TORCH_SDPA(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", other)
        with onchip.replace_sdpa():
            assert F.scaled_dot_product_attention is not other
            F.scaled_dot_product_attention = other
            with onchip.replace_sdpa():
                assert F.scaled_dot_product_attention is not other
            assert F.scaled_dot_product_attention is other
        assert F.scaled_dot_product_attention is other


def test_restores_after_an_exception():
    with pytest.raises(ZeroDivisionError), onchip.replace_sdpa(), onchip.replace_sdpa():
        raise ZeroDivisionError
    assert F.scaled_dot_product_attention is TORCH_SDPA
    assert torch.backends.mha.get_fastpath_enabled()


def test_leaving_in_another_order_than_entering():
    first, second, third = (onchip.replace_sdpa(schedule=name) for name in ("dense", "tiled", None))
    first.__enter__()
    second.__enter__()
    middle = F.scaled_dot_product_attention
    third.__enter__()
    top = F.scaled_dot_product_attention
    first.__exit__(None, None, None)
    assert F.scaled_dot_product_attention is top
    third.__exit__(None, None, None)
    assert F.scaled_dot_product_attention is middle
    second.__exit__(None, None, None)
    assert F.scaled_dot_product_attention is TORCH_SDPA


def test_threads():
    shared = onchip.replace_sdpa()
    barrier = threading.Barrier(4)
    wrong = []

    def work(index: int) -> None:
        barrier.wait()
        for turn in range(200):
            with shared if index % 2 else onchip.replace_sdpa(schedule=("dense", "tiled")[turn % 2]):
                if F.scaled_dot_product_attention is TORCH_SDPA or torch.backends.mha.get_fastpath_enabled():
                    wrong.append((index, turn))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert F.scaled_dot_product_attention is TORCH_SDPA


def test_documentation_is_torchs():
    with onchip.replace_sdpa():
        assert F.scaled_dot_product_attention.__doc__ == TORCH_SDPA.__doc__
        assert F.scaled_dot_product_attention.__wrapped__ is TORCH_SDPA
        assert F.scaled_dot_product_attention.__name__ == "scaled_dot_product_attention"


# Compiled callers, traced down to operators but not lowered to code.


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"attn_mask": torch.ones(6, 6, dtype=torch.bool).tril()},
        {"attn_mask": torch.randn(6, 6)},
        {"attn_mask": torch.randn(1, 6)},
        {"scale": 0.5},
    ],
    ids=["plain", "causal", "bool", "float", "row", "scale"],
)
@pytest.mark.parametrize("shape", [(2, 3, 6, 8), (3, 6, 8), (6, 8), (2, 1, 3, 6, 8)])
def test_compiled_in_one_graph(options, shape):
    torch.compiler.reset()
    inputs = [random(*shape, dtype=torch.float32) for _ in range(3)]
    expected = F.scaled_dot_product_attention(*inputs, **options)
    count = GraphCount()
    with onchip.replace_sdpa():
        compiled = torch.compile(
            lambda *args: F.scaled_dot_product_attention(*args, **options) * 2, backend=count.backend, fullgraph=True
        )
        out = compiled(*inputs)
    assert count.graphs == 1 and count.runs_onchip
    torch.testing.assert_close(out, 2 * expected, rtol=1e-5, atol=1e-5)
    actual_grads = torch.autograd.grad(out.sum(), inputs)
    torch.testing.assert_close(actual_grads, torch.autograd.grad(2 * expected.sum(), inputs), rtol=1e-4, atol=1e-5)


def test_compiled_grouped_heads_under_autocast():
    torch.compiler.reset()
    query, key, value = (random(2, heads, 6, 8, dtype=torch.float32) for heads in (4, 2, 2))
    count = GraphCount()

    def call(query, key, value):
        with torch.autocast("cpu", torch.bfloat16):
            return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    with onchip.replace_sdpa():
        expected = call(query, key, value)
        out = torch.compile(call, backend=count.backend, fullgraph=True)(query, key, value)
    assert count.graphs == 1 and count.runs_onchip
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("training", [False, True])
def test_compiled_encoder_layer_in_one_graph(training):
    torch.compiler.reset()
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True).train(training)
    tokens = random(2, 6, 16, dtype=torch.float32)
    count = GraphCount()
    compiled = torch.compile(layer, backend=count.backend, fullgraph=True)
    expected = layer(tokens)
    for inside in (True, False, True):
        with onchip.replace_sdpa() if inside else nullcontext():
            torch.testing.assert_close(compiled(tokens), expected, rtol=1e-5, atol=1e-5)
        assert count.runs_onchip is inside
    assert count.graphs == 2


def test_a_function_compiled_outside_follows_entering_and_leaving(calls):
    torch.compiler.reset()
    count = GraphCount()
    compiled = torch.compile(lambda x: F.scaled_dot_product_attention(x, x, x), backend=count.backend, fullgraph=True)
    tokens = torch.randn(2, 3, 6, 8)
    expected = F.scaled_dot_product_attention(tokens, tokens, tokens)
    for inside in (False, True, False, True):
        with onchip.replace_sdpa() if inside else nullcontext():
            torch.testing.assert_close(compiled(tokens), expected)
        assert count.runs_onchip is inside


class GraphCount:
    """A compiler that counts the forward graphs and says whether the last one to run holds onchip's operator."""

    def __init__(self) -> None:
        self.graphs = 0
        self.runs_onchip: bool | None = None
        self.backend = aot_autograd(
            fw_compiler=self._forward, bw_compiler=lambda module, inputs: make_boxed_func(module)
        )

    def _forward(self, module: torch.fx.GraphModule, inputs: list) -> Callable:
        self.graphs += 1
        onchip_inside = any("onchip" in str(node.target) for node in module.graph.nodes)

        def forward(*args):
            self.runs_onchip = onchip_inside
            return module(*args)

        return make_boxed_func(forward)
