"""onchip in torch's registry of flash implementations, against the math backend of F.scaled_dot_product_attention."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.attention
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

import onchip
from onchip.integrations import flash

BOUNDS = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@pytest.fixture
def problems(monkeypatch: pytest.MonkeyPatch) -> list:
    """Every problem that a flash operator gave to onchip."""
    seen: list = []
    make = flash._problem

    def spy(*args, **kwargs):
        seen.append(make(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(flash, "_problem", spy)
    return seen


@pytest.fixture
def active() -> Iterator[None]:
    flash.register()
    torch.nn.attention.activate_flash_attention_impl("onchip")
    try:
        yield
    finally:
        if torch.nn.attention.current_flash_attention_impl() is not None:
            torch.nn.attention.restore_flash_attention_impl()


def leaves(*shapes: tuple, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def attend(inputs: list[Tensor], backend: SDPBackend, **options) -> tuple[Tensor, ...]:
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(*inputs, **options)
    return (out, *torch.autograd.grad(out, inputs, incoming_of(out)))


def incoming_of(out: Tensor) -> Tensor:
    """The gradient that comes back to an output."""
    return torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=out.device).view_as(out).to(out.dtype)


def check(inputs: list[Tensor], **options) -> None:
    """Output and gradients of the flash backend against the math backend in float64."""
    exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
    mask = options.get("attn_mask")
    wide = options | ({"attn_mask": mask.double()} if mask is not None and mask.is_floating_point() else {})
    expected = attend(exact, SDPBackend.MATH, **wide)
    actual = attend(inputs, SDPBackend.FLASH_ATTENTION, **options)
    bound = BOUNDS[inputs[0].dtype]
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == inputs[0].dtype
        torch.testing.assert_close(ours.double(), theirs, rtol=bound, atol=bound)


def test_nothing_changes_before_it_is_activated(problems):
    flash.register()
    assert "onchip" in torch.nn.attention.list_flash_attention_impls()
    check(leaves(*[(1, 2, 5, 8)] * 3))
    assert not problems


def test_restore_gives_back_torchs_own_kernel(problems, active):
    check(leaves(*[(1, 2, 5, 8)] * 3))
    assert len(problems) == 2, "one forward and one backward"
    assert torch.nn.attention.current_flash_attention_impl() == "onchip"
    torch.nn.attention.restore_flash_attention_impl()
    problems.clear()
    check(leaves(*[(1, 2, 5, 8)] * 3))
    assert not problems


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("is_causal", [False, True])
def test_dtypes(problems, active, dtype, is_causal):
    check(leaves(*[(2, 2, 37, 16)] * 3, dtype=dtype), is_causal=is_causal)
    assert len(problems) == 2


def test_causality_aligns_to_the_top_left(problems, active):
    check(leaves((2, 2, 5, 8), (2, 2, 9, 8), (2, 2, 9, 8)), is_causal=True)
    check(leaves((2, 2, 9, 8), (2, 2, 5, 8), (2, 2, 5, 8)), is_causal=True)
    assert len(problems) == 4


def test_grouped_heads_and_scale(problems, active):
    check(leaves((2, 6, 7, 8), (2, 2, 9, 8), (2, 2, 9, 8)), enable_gqa=True, scale=0.3)
    assert len(problems) == 2


@pytest.mark.parametrize("shape", [(7, 9), (1, 9), (2, 1, 1, 9), (2, 3, 7, 9)])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks(problems, active, shape, kind):
    mask = torch.rand(shape) < 0.6
    mask[..., 0] = True
    if kind == "float":
        mask = torch.randn(shape).masked_fill(~mask, -torch.inf)
    check(leaves((2, 3, 7, 8), (2, 3, 9, 8), (2, 3, 9, 8)), attn_mask=mask)
    assert len(problems) == 2


def test_strides(problems, active):
    """Heads beside dims in memory, as a model's projection leaves them; the output lies as the query does."""
    inputs = [torch.randn(2, 7, 3, 8).transpose(1, 2).requires_grad_() for _ in range(3)]
    check(inputs)
    assert F.scaled_dot_product_attention(*inputs).stride() == inputs[0].stride()
    assert len(problems) == 3


def test_a_module_trains_on_it(problems, active):
    layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    layer(torch.randn(2, 6, 16)).sum().backward()
    assert len(problems) == 2
    assert all(parameter.grad.isfinite().all() for parameter in layer.parameters())


def test_fake_tensors_lie_as_real_ones_do(active):
    cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    for order in ((0, 1, 2, 3), (0, 2, 1, 3)):
        query = torch.randn([(2, 3, 5, 8)[place] for place in order]).permute(order)
        real = cpu(query, query, query)
        back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        gradients = back(query, query, query, query, *real, 0.0, False)
        with FakeTensorMode() as mode:
            fake_query = mode.from_tensor(query)
            fake = cpu(fake_query, fake_query, fake_query)
            fakes = (*fake, *back(fake_query, fake_query, fake_query, fake_query, *fake, 0.0, False))
        for one, other in zip((*real, *gradients), fakes, strict=True):
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


@pytest.mark.parametrize("when", ["before", "after"])
def test_compiled_graphs_follow(problems, when):
    """A graph holds aten's operator, so what is active when it runs counts, not what was when it was compiled."""
    compiled = torch.compile(
        lambda *inputs: F.scaled_dot_product_attention(*inputs, is_causal=True), backend="aot_eager"
    )
    inputs = leaves(*[(1, 2, 8, 16)] * 3)
    if when == "after":
        compiled(*inputs)
    flash.register()
    torch.nn.attention.activate_flash_attention_impl("onchip")
    try:
        actual = torch.autograd.grad(compiled(*inputs).square().sum(), inputs)
    finally:
        torch.nn.attention.restore_flash_attention_impl()
    assert len(problems) == 2
    expected = torch.autograd.grad(F.scaled_dot_product_attention(*inputs, is_causal=True).square().sum(), inputs)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_inductor(problems, active):
    compiled = torch.compile(
        lambda *inputs: F.scaled_dot_product_attention(*inputs, is_causal=True) * 2, fullgraph=True
    )
    inputs = [torch.randn(1, 8, 2, 16).transpose(1, 2).requires_grad_() for _ in range(3)]
    actual = torch.autograd.grad(compiled(*inputs).square().sum(), inputs)
    assert len(problems) == 2
    torch.nn.attention.restore_flash_attention_impl()
    expected = torch.autograd.grad((2 * F.scaled_dot_product_attention(*inputs, is_causal=True)).square().sum(), inputs)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_onchips_own_schedules_are_not_diverted(problems, active):
    """The schedule that runs on torch's kernel still finds that kernel, and gives the same bits."""
    inputs = leaves(*[(1, 2, 9, 8)] * 3)
    actual = onchip.attention(*inputs, causal=True, schedule="aten")
    actual = (actual, *torch.autograd.grad(actual.sum(), inputs))
    assert not problems
    torch.nn.attention.restore_flash_attention_impl()
    expected = onchip.attention(*inputs, causal=True, schedule="aten")
    expected = (expected, *torch.autograd.grad(expected.sum(), inputs))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_an_older_torch_is_told(monkeypatch):
    monkeypatch.delattr(torch.nn.attention, "restore_flash_attention_impl")
    with pytest.raises(RuntimeError, match="restore_flash_attention_impl: .* from torch 2.11 on"):
        flash.register()


def test_refusals_on_a_cpu(active):
    query = torch.randn(1, 2, 4, 8)
    cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    with pytest.raises(NotImplementedError, match="dropout could not be replayed"):
        cpu(query, query, query, 0.5)
    with pytest.raises(NotImplementedError, match="the value's must be the same"):
        cpu(query, query, query[..., :4])


# The kernels of the CUDA operators are plain functions, which compute on a CPU as well.


def sdpa(*inputs: Tensor, dropout_p: float = 0.0, is_causal: bool = False) -> tuple[Tensor, ...]:
    return flash._cuda_sdpa(*inputs, dropout_p, is_causal)


def test_cuda_sdpa_matches_the_public_function():
    query, key = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8)
    out, lse, cu_q, cu_k, max_q, max_k, state, unused, debug = sdpa(query, key, key, is_causal=True)
    expected = onchip.attention_with_lse(query, key, key, causal=True)
    torch.testing.assert_close((out, lse), tuple(expected), rtol=1e-5, atol=1e-6)
    assert (cu_q, cu_k, max_q, max_k) == (None, None, 5, 7)
    assert (state.dtype, state.shape, unused.dtype, unused.shape) == (torch.uint64, (2,), torch.uint64, ())
    assert debug.numel() == 0 and lse.dtype == torch.float32


def test_cuda_dropout_is_replayed():
    """The seed travels in what aten calls the state of the generator."""
    inputs = leaves(*[(2, 2, 9, 8)] * 3)
    with torch.no_grad():
        out, lse, *_, state, unused, _ = sdpa(*inputs, dropout_p=0.4)
        incoming = torch.randn_like(out)
        arguments = (out, lse, None, None, 9, 9, 0.4, False, state, unused)
        actual = flash._cuda_sdpa_backward(incoming, *inputs, *arguments)
    seed = state.view(torch.int64)[:1]
    expected = onchip.attention(*inputs, dropout_p=0.4, dropout_seed=seed)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(actual, torch.autograd.grad(expected, inputs, incoming), rtol=1e-4, atol=1e-5)
    assert not torch.equal(sdpa(*inputs, dropout_p=0.4)[0], out), "each call draws a seed"


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("is_causal", "window"), [(False, (-1, -1)), (True, (-1, 0)), (False, (3, 0)), (True, (2, None))]
)
def test_cuda_flash_attention(packed, is_causal, window, dropout_p):
    shape, shape_k = ((12, 4, 8), (14, 2, 8)) if packed else ((2, 6, 4, 8), (2, 7, 2, 8))
    inputs = leaves(shape, shape_k, shape_k)
    cu = (torch.tensor([0, 5, 12]), torch.tensor([0, 8, 14])) if packed else (None, None)
    sides = {"window_size_left": window[0], "window_size_right": window[1]}
    with torch.no_grad():
        out, lse, state, unused, _ = flash._flash_forward(*inputs, *cu, 7, 8, dropout_p, is_causal, False, **sides)
        incoming = torch.randn_like(out)
        arguments = (out, lse, *cu, 7, 8, dropout_p, is_causal, state, unused)
        gradients = flash._flash_backward(incoming, *inputs, *arguments, **sides)
    options = {
        "causal": is_causal,
        "window": tuple(None if side in (None, -1) else side for side in window),
        "dropout_p": dropout_p,
        "dropout_seed": state.view(torch.int64)[:1],
    }
    if packed:
        expected = onchip.attention_varlen_with_lse(*inputs, *cu, **options)
        result = expected.out
    else:
        expected = onchip.attention_with_lse(*(tensor.transpose(1, 2) for tensor in inputs), **options)
        result = expected.out.transpose(1, 2)
    torch.testing.assert_close((out, lse), (result, expected.lse), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradients, torch.autograd.grad(result, inputs, incoming), rtol=1e-4, atol=1e-5)


def test_cuda_flash_attention_with_fewer_keys_in_use():
    query, key = torch.randn(12, 2, 8), torch.randn(14, 2, 8)
    cu, used = (torch.tensor([0, 5, 12]), torch.tensor([0, 8, 14])), torch.tensor([3, 6])
    arguments = (query, key, key, *cu, 7, 8, 0.0, False, False)
    out, lse, *_ = flash._flash_forward(*arguments, seqused_k=used)
    expected = onchip.attention_varlen_with_lse(query, key, key, *cu, lengths=(None, used))
    torch.testing.assert_close((out, lse), tuple(expected))
    into = torch.empty_like(out)
    assert torch.equal(flash._flash_forward_in_place(into, *arguments, seqused_k=used), lse)
    assert torch.equal(into, out)


def test_refusals_of_cuda_operators():
    query = torch.randn(12, 2, 8, requires_grad=True)
    cu = torch.tensor([0, 5, 12])
    arguments = (query, query, query, cu, cu, 7, 7, 0.0, False)
    for options, sentence in (
        ({"return_debug_mask": True}, "never in memory"),
        ({"block_table": cu}, "no paged keys"),
        ({"alibi_slopes": cu}, "gradients would be wrong"),
        ({"seqused_k": cu}, "gradients would be wrong"),
    ):
        with pytest.raises(NotImplementedError, match=sentence):
            flash._flash_forward(*arguments, **{"return_debug_mask": False} | options)
    with pytest.raises(ValueError, match="must both be given"):
        flash._flash_forward(query, query, query, cu, None, 7, 7, 0.0, False, False)


# On a GPU, through torch's own functions.


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dim", [64, 36])
def test_sdpa_on_cuda(problems, active, is_causal, dim):
    inputs = [torch.randn(2, 2, 70, dim, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    check(inputs, is_causal=is_causal)
    assert len(problems) == 2


@pytest.mark.gpu
def test_dropout_on_cuda(problems, active):
    """Gradients are those of the mask that the forward drew."""
    inputs = [torch.randn(1, 2, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    actual = attend(inputs, SDPBackend.FLASH_ATTENTION, dropout_p=0.25)
    assert len(problems) == 2 and torch.equal(problems[0].seed.flatten(), problems[1].seed.flatten())
    out = onchip.attention(*inputs, dropout_p=0.25, dropout_seed=problems[0].seed)
    expected = (out, *torch.autograd.grad(out, inputs, incoming_of(out)))
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_on_cuda(problems, active):
    parts = [torch.randn(length, 2, 64, device="cuda", dtype=torch.bfloat16) for length in (5, 70, 33)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    heads = nested.transpose(1, 2)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    (gradient,) = torch.autograd.grad(out.values().float().square().sum(), nested)
    assert len(problems) == 2
    for ours, part, grad in zip(out.unbind(), parts, gradient.unbind(), strict=True):
        alone = part.float().transpose(0, 1)[None].requires_grad_()
        expected = F.scaled_dot_product_attention(alone, alone, alone, is_causal=True)
        torch.testing.assert_close(ours.float(), expected[0], rtol=2e-2, atol=2e-2)
        (due,) = torch.autograd.grad(expected.square().sum(), alone)
        torch.testing.assert_close(grad.float(), due[0].transpose(0, 1), rtol=5e-2, atol=5e-2)


@pytest.mark.gpu
def test_varlen_attn_on_cuda(problems, active):
    from torch.nn.attention.varlen import varlen_attn

    inputs = [torch.randn(108, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    cu = torch.tensor([0, 5, 75, 108], device="cuda", dtype=torch.int32)
    out = varlen_attn(*inputs, cu, cu, 70, 70, window_size=(-1, 0))
    actual = (out, *torch.autograd.grad(out.float().square().sum(), inputs))
    assert len(problems) == 2
    out = onchip.attention_varlen(*inputs, cu, causal=True)
    expected = (out, *torch.autograd.grad(out.float().square().sum(), inputs))
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_compiled_on_cuda(problems, active):
    compiled = torch.compile(
        lambda *inputs: F.scaled_dot_product_attention(*inputs, is_causal=True) * 2, fullgraph=True
    )
    inputs = [torch.randn(2, 2, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        actual = torch.autograd.grad(compiled(*inputs).float().sum(), inputs)
    assert len(problems) == 2
    expected = torch.autograd.grad((2 * onchip.attention(*inputs, causal=True)).float().sum(), inputs)
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
