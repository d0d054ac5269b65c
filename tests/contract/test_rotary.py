"""Rotary embeddings against complex numbers in float64, on every path that is here.

`schedule` is the path: None chooses. Named "triton", the kernel runs on a GPU or interpreted.
"""

import pytest
import torch
from hypothesis import given, strategies

import onchip
from tests.machine import sized

EPS = {dtype: torch.finfo(dtype).eps for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)}


@pytest.fixture(scope="session", params=[None, "triton"], ids=lambda name: name or "chosen")
def schedule(request):
    return request.param


def frequencies_of(dim, base=10000.0):
    return base ** (torch.arange(0, dim, 2, dtype=torch.float64) / -dim)


def turned(tensor, angle, dim, interleaved=False):
    """(..., tokens, head_dim) times exp(i angle), angle (..., tokens, dim / 2), in complex float64."""
    wide = tensor.double()
    pairs = wide[..., :dim].unflatten(-1, (-1, 2) if interleaved else (2, -1))
    axis = -1 if interleaved else -2
    product = torch.complex(*pairs.unbind(axis)) * torch.exp(1j * angle)
    rotated = torch.stack([product.real, product.imag], axis).flatten(-2)
    return torch.cat([rotated, wide[..., dim:]], -1)


def assert_rounded(got, expected, dtype):
    """Within the rounding of the result, and of cosines, sines and products in float32 (float64)."""
    got, expected = got.detach().cpu().double(), expected.detach()
    inner = EPS[torch.float64] * 1e6 if dtype == torch.float64 else 6e-7
    largest = expected.abs().amax().item() if expected.numel() else 0.0
    bound = 0.51 * EPS[dtype] * expected.abs() + inner * max(largest, 1.0)
    assert torch.all((got - expected).abs() <= bound), f"{((got - expected).abs() - bound).max():.2e} too far"


@strategies.composite
def calls(draw):
    """Shapes, and keywords for both the call and the reference."""
    pairs, rest = draw(strategies.sampled_from([(1, 0), (3, 0), (8, 0), (4, 5), (32, 0), (16, 40)]))
    return {
        "batch": draw(strategies.integers(0, 3)),
        "heads": draw(strategies.sampled_from([(1, 1), (4, 2), (3, 1)])),
        "length": draw(strategies.integers(0, sized(40, 17))),
        "dim": 2 * pairs,
        "head_dim": 2 * pairs + rest,
        "order": draw(strategies.sampled_from([(0, 1, 2, 3), (0, 2, 1, 3), (3, 1, 0, 2)])),
        "positions": draw(strategies.sampled_from(["counted", "one", "each", "offset", "offsets"])),
        "angles": draw(strategies.sampled_from(["base", "frequencies", "tables", "rows"])),
        "interleaved": draw(strategies.booleans()),
        "scale": draw(strategies.sampled_from([1.0, 0.7])),
        "seed": draw(strategies.integers(0, 9)),
    }


def strided(shape, order, dtype, device):
    """Random numbers whose dimensions lie in memory in an order."""
    memory = torch.randn([shape[axis] for axis in order], dtype=torch.float64).to(dtype).to(device)
    return memory.permute([order.index(axis) for axis in range(len(shape))])


def places(call, device):
    """Keywords that say where tokens stand, and the positions (batch, length)."""
    batch, length = call["batch"], call["length"]
    counted = torch.arange(length).expand(batch, length)
    kind = "counted" if call["angles"] == "rows" else call["positions"]
    most = 60 if call["angles"] == "tables" else 2**20
    if kind == "one":
        drawn = torch.randint(0, most, (length,), dtype=torch.int32)
        return {"positions": drawn.to(device)}, drawn.expand(batch, length)
    if kind == "each":
        drawn = torch.randint(0, most, (batch, length))
        return {"positions": drawn.to(device)}, drawn
    if kind == "offset":
        return {"offset": most - 45}, counted + most - 45
    if kind == "offsets":
        drawn = torch.randint(0, most - 45, (batch,))
        return {"offset": drawn.to(device)}, counted + drawn[:, None]
    return {}, counted


def angles(call, positions, device):
    """Keywords that say how far to turn, and the angles (batch, 1, length, dim / 2)."""
    dim, kind = call["dim"], call["angles"]
    if kind in ("base", "frequencies"):
        given = torch.rand(dim // 2) * 3 if kind == "frequencies" else frequencies_of(dim, 500.0)
        keywords = {"frequencies": given.to(device)} if kind == "frequencies" else {"base": 500.0, "dim": dim}
        return keywords, (positions[..., None] * given.double())[:, None]
    shape = (60, dim // 2) if kind == "tables" else (*positions.shape, dim // 2)
    angle = torch.rand(shape, dtype=torch.float64)
    # exact in float32, so that both read the same
    cos, sin = angle.cos().float(), angle.sin().float()
    read = torch.atan2(sin.double(), cos.double()), torch.hypot(sin.double(), cos.double())
    chosen = [part if kind == "rows" else part[positions] for part in read]
    return {"tables": (cos.to(device), sin.to(device))}, tuple(part[:, None] for part in chosen)


@given(call=calls())
def test_it_is_a_product_of_complex_numbers(call, dtype, schedule, device):
    """Every layout, kind of positions and of angles, out and both gradients."""
    torch.manual_seed(call["seed"])
    placed, positions = places(call, device)
    turning, angle = angles(call, positions, device)
    angle, norm = angle if isinstance(angle, tuple) else (angle, torch.ones((), dtype=torch.float64))
    shapes = [(call["batch"], heads, call["length"], call["head_dim"]) for heads in call["heads"]]
    query, key = (strided(shape, call["order"], dtype, device).requires_grad_() for shape in shapes)
    same = {"interleaved": call["interleaved"], "scale": call["scale"]}
    got = onchip.rotary(query, key, **placed, **turning, **same, schedule=schedule)
    incoming = [torch.randn(shape, dtype=torch.float64).to(dtype).to(device) for shape in shapes]
    gradients = torch.autograd.grad(got, (query, key), incoming)
    dim, interleaved = call["dim"], call["interleaved"]
    for tensor, out, d_out, gradient in zip((query, key), got, incoming, gradients, strict=True):
        assert out.dtype == gradient.dtype == dtype and out.shape == tensor.shape
        for values, result, sign in ((tensor, out, 1), (d_out, gradient, -1)):
            expected = turned(values.detach().cpu(), sign * angle, dim, interleaved)
            factor = torch.ones_like(expected)
            expanded = (norm * call["scale"]).expand(*expected.shape[:-1], dim // 2)
            factor[..., :dim] = expanded.repeat_interleave(2, -1) if interleaved else torch.cat([expanded] * 2, -1)
            assert_rounded(result, expected * factor, dtype)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)], ids=str)
def test_strides_change_no_bit(order, dtype, schedule, device):
    """Results lie in memory as their inputs do; gaps and expanded tensors are read where they are."""
    memory = torch.randn(2, 5, 9, 26, device=device).to(dtype)
    views = [
        strided((2, 4, 9, 16), order, dtype, device),
        memory[:, 1:, :, 5:21],
        memory[:1, :1, :, :16].expand(2, 4, 9, 16),
    ]
    for interleaved in (False, True):
        for view in views:
            got, _ = onchip.rotary(view, None, interleaved=interleaved, schedule=schedule)
            expected, _ = onchip.rotary(view.contiguous(), None, interleaved=interleaved, schedule=schedule)
            assert torch.equal(got, expected)
    assert onchip.rotary(views[0], None, schedule=schedule)[0].stride() == views[0].stride()


@pytest.mark.parametrize("base", [10000.0, 1000000.0])
def test_far_positions_are_as_exact_as_near_ones(base, schedule, device):
    """Angles are not rounded: cosines and sines of positions to 2**30 have the error of float32 alone."""
    mpmath = pytest.importorskip("mpmath")
    dim, positions = 16, torch.tensor([0, 1, 1000, 2**20 + 1, 10**6, 2**24 + 1, 2**30 - 7])
    ones = torch.zeros(1, 1, len(positions), dim)
    ones[..., : dim // 2] = 1
    got, _ = onchip.rotary(ones.to(device), None, positions.to(device), base=base, schedule=schedule)
    with mpmath.workprec(200):
        exponents = [mpmath.mpf(-2 * pair) / dim for pair in range(dim // 2)]
        angles = [[p * mpmath.mpf(base) ** exponent for exponent in exponents] for p in positions.tolist()]
        exact = [[function(angle) for function in (mpmath.cos, mpmath.sin) for angle in row] for row in angles]
        expected = torch.tensor([[float(value) for value in row] for row in exact], dtype=torch.float64)
    assert (got[0, 0].cpu().double() - expected).abs().max() < 3e-7


def test_products_depend_on_differences_of_positions(schedule, device):
    """Equation 16 of RoFormer: moving query and key together by a million changes nothing but rounding."""
    query, key = torch.randn(2, 1, 2, 12, 64, device=device).unbind()
    near, far = (onchip.rotary(query, key, offset=offset, schedule=schedule) for offset in (0, 10**6))
    scores = [(q.double() @ k.double().mT).cpu() for q, k in (near, far)]
    torch.testing.assert_close(scores[1], scores[0], rtol=0, atol=2e-5)
    assert (scores[0] - (query.double() @ key.double().mT).cpu()).abs().max() > 0.1


@pytest.mark.parametrize("offset", [0, 7, "each"])
def test_packed_sequences_are_rotated_as_alone(offset, dtype, schedule, device):
    """Positions restart with each sequence, empty ones included; tokens behind the last count from its end."""
    starts = [0, 3, 3, 20, 31]
    cu = torch.tensor(starts, dtype=torch.int32, device=device)
    query, key = (torch.randn(37, heads, 16, device=device).to(dtype) for heads in (4, 2))
    offsets = [5, 0, 100, 2] if offset == "each" else [offset] * 4
    given = torch.tensor(offsets, device=device) if offset == "each" else offset
    got = onchip.rotary(query, key, offset=given, cu_seqlens_query=cu, schedule=schedule)
    behind = 0 if offset == "each" else offset
    parts = zip(starts, [*starts[1:], 37], [*offsets, behind], strict=True)
    for start, stop, each in parts:
        for tensor, result in zip((query, key), got, strict=True):
            alone = tensor[start:stop].transpose(0, 1)[None]
            expected, _ = onchip.rotary(alone, None, offset=each, schedule=schedule)
            assert torch.equal(result[start:stop], expected[0].transpose(0, 1))


def test_packed_positions(schedule, device):
    query, key = torch.randn(9, 2, 8, device=device), torch.randn(9, 1, 8, device=device)
    positions = torch.randint(0, 50, (9,), device=device)
    got = onchip.rotary(query, key, positions, schedule=schedule)
    expected = onchip.rotary(*(part.transpose(0, 1)[None] for part in (query, key)), positions, schedule=schedule)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other[0].transpose(0, 1))


def test_query_and_key_may_stand_elsewhere(schedule, device):
    """Pairs of positions and offsets, lengths that differ, and dtypes that differ."""
    query, key = torch.randn(2, 2, 3, 8, device=device), torch.randn(2, 1, 7, 8, device=device).half()
    got = onchip.rotary(query, key, offset=(4, 0), schedule=schedule)
    expected = [onchip.rotary(part, None, offset=o, schedule=schedule)[0] for part, o in ((query, 4), (key, 0))]
    positions = torch.arange(4, 7, device=device), torch.arange(7, device=device)
    again = onchip.rotary(query, key, positions, schedule=schedule)
    for one, two, three in zip(got, expected, again, strict=True):
        assert torch.equal(one, two) and torch.equal(one, three) and one.dtype == three.dtype


def test_the_inverse_undoes_a_rotation(dtype, schedule, device):
    query = torch.randn(1, 2, 9, 16, device=device).to(dtype)
    there, _ = onchip.rotary(query, None, offset=1000, schedule=schedule)
    back, _ = onchip.rotary(there, None, offset=1000, inverse=True, schedule=schedule)
    torch.testing.assert_close(back, query, rtol=0, atol=4 * EPS[dtype] * query.abs().max().item())


def test_only_what_needs_a_gradient_gets_one(schedule, device):
    query, key = torch.randn(1, 2, 9, 8, device=device, requires_grad=True), torch.randn(1, 2, 9, 8, device=device)
    got_query, got_key = onchip.rotary(query, key, schedule=schedule)
    # a gradient that is expanded, as that of a sum
    got_query.sum().backward()
    expected, _ = onchip.rotary(torch.ones_like(key), None, inverse=True, schedule=schedule)
    assert torch.equal(query.grad, expected)
    both = [part.detach().requires_grad_() for part in (query, key)]
    _, second = onchip.rotary(*both, schedule=schedule)
    assert torch.autograd.grad(second.sum(), both, allow_unused=True)[0] is None


@pytest.mark.parametrize("interleaved", [False, True])
def test_one_row_of_tables_for_each_token(interleaved, schedule, device):
    """As models with several kinds of positions need them; a batch of one row serves every sequence."""
    query, key = torch.randn(3, 4, 9, 16, device=device), torch.randn(3, 2, 9, 16, device=device)
    angle = torch.rand(3, 9, 5, dtype=torch.float64, device=device) * 6
    for each in (angle, angle[:1]):
        tables = each.cos().float(), each.sin().float()
        got = onchip.rotary(query, key, tables=tables, interleaved=interleaved, schedule=schedule)
        for tensor, result in zip((query, key), got, strict=True):
            expected = turned(tensor.cpu(), each[:, None].cpu(), 10, interleaved)
            assert_rounded(result, expected, torch.float32)


@pytest.mark.compiled
def test_sizes_beyond_one_piece(dtype, schedule, device):
    """A long sequence and a large batch give what short ones give."""
    query = torch.randn(2, 3, 2000, 64, device=device).to(dtype)
    positions = torch.randint(0, 2**20, (2, 2000), device=device)
    for where in (positions, positions[:1]):
        got, _ = onchip.rotary(query, None, where, dim=48, schedule=schedule)
        for number in range(2):
            part = slice(1700, 1900)
            short, place = query[number : number + 1, :, part], where[min(number, len(where) - 1), part]
            assert torch.equal(
                got[number : number + 1, :, part], onchip.rotary(short, None, place, dim=48, schedule=schedule)[0]
            )
