"""What only a GPU shows of rotary embeddings: no waiting, graphs that replay, sizes beyond 2**31, and one launch."""

import pytest
import torch

import onchip

pytestmark = pytest.mark.gpu


def inputs(dtype=torch.bfloat16, length=300, **options):
    options = {"dtype": dtype, "device": "cuda"} | options
    return torch.randn(2, 8, length, 128, **options), torch.randn(2, 2, length, 128, **options)


@pytest.fixture
def no_waiting():
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def kernels_of(function):
    """The names of what a call launches."""
    function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_both_paths_agree(dtype, interleaved):
    query, key = inputs(dtype)
    for offset in (0, 2**20 + 1):
        got = onchip.rotary(query, key, offset=offset, interleaved=interleaved, schedule="triton")
        expected = onchip.rotary(query.double(), key.double(), offset=offset, interleaved=interleaved)
        for one, two in zip(got, expected, strict=True):
            torch.testing.assert_close(one.double(), two, rtol=torch.finfo(dtype).eps / 1.9, atol=5e-6)


def test_one_launch_rotates_both_and_one_goes_back():
    query, key = (part.requires_grad_() for part in inputs())
    gradients = [torch.randn_like(part) for part in (query, key)]
    positions = torch.arange(300, device="cuda")
    assert kernels_of(lambda: onchip.rotary(query, key, positions)) == ["rotary_kernel"]
    out = onchip.rotary(query, key, positions)
    back = kernels_of(lambda: torch.autograd.grad(out, (query, key), gradients, retain_graph=True))
    assert back == ["rotary_kernel"]


def test_nothing_waits(no_waiting):
    query, key = (part.requires_grad_() for part in inputs())
    offset = torch.full((2,), 7, device="cuda")
    table = torch.rand(400, 64, device="cuda")
    for keywords in ({"offset": offset}, {"tables": (table, table), "offset": offset}, {"dim": 32}):
        out = onchip.rotary(query, key, **keywords)
        torch.autograd.grad(out, (query, key), [part.detach() for part in out])
    packed = torch.randn(50, 4, 64, device="cuda", dtype=torch.bfloat16)
    cu = torch.full((3,), 50, device="cuda", dtype=torch.int32)
    onchip.rotary(packed, None, cu_seqlens_query=cu)


def test_a_graph_replays_with_other_positions():
    query, key = inputs()
    offset, positions = torch.zeros(2, dtype=torch.int64, device="cuda"), torch.arange(300, device="cuda")
    onchip.rotary(query, key, positions, offset=offset)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = onchip.rotary(query, key, positions, offset=offset)
    offset.copy_(torch.tensor([5, 9]))
    positions.copy_(torch.randperm(300))
    graph.replay()
    for one, two in zip(out, onchip.rotary(query, key, positions, offset=offset), strict=True):
        assert torch.equal(one, two)


def test_offsets_of_64_bits():
    """More numbers than 2**31, in one tensor and in a view that is only as far apart."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs 12 GiB")
    large = torch.zeros(1, 2, 2**23 + 5, 128, dtype=torch.float16, device="cuda")
    large[..., -4:, :] = torch.randn(1, 2, 4, 128, device="cuda")
    got, _ = onchip.rotary(large, None)
    expected, _ = onchip.rotary(large[..., -4:, :], None, offset=2**23 + 1)
    assert torch.equal(got[..., -4:, :], expected)
    far = large.view(2, -1, 128)[:, :: 2**23 + 4].transpose(0, 1)[None]
    assert torch.equal(onchip.rotary(far, None)[0], onchip.rotary(far.contiguous(), None)[0])


def test_positions_outside_of_tables():
    """They take the ends of the tables; on request they are an error."""
    query, _ = inputs(torch.float32, 4)
    cos, sin = torch.rand(2, 10, 64, device="cuda")
    got, _ = onchip.rotary(query, None, torch.tensor([-3, 0, 9, 70], device="cuda"), tables=(cos, sin))
    expected, _ = onchip.rotary(query, None, torch.tensor([0, 0, 9, 9], device="cuda"), tables=(cos, sin))
    assert torch.equal(got, expected)
    with onchip.checked(), pytest.raises(ValueError, match="tables' 10 rows, got 7 to 10"):
        onchip.rotary(query, None, offset=7, tables=(cos, sin))


def test_float64_goes_through_torch():
    query, key = inputs(torch.float64, 20)
    for one, two in zip(onchip.rotary(query, key), onchip.rotary(query.cpu(), key.cpu()), strict=True):
        torch.testing.assert_close(one.cpu(), two)


def test_a_compiled_layer():
    def layer(query, key):
        return onchip.attention(*onchip.rotary(query * 2, key, dim=64), key, causal=True)

    query, key = (part.requires_grad_() for part in inputs())
    got, expected = torch.compile(layer, fullgraph=True)(query, key), layer(query, key)
    torch.testing.assert_close(got, expected)
    gradient = torch.randn_like(got)
    found = [torch.autograd.grad(out, (query, key), gradient) for out in (got, expected)]
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=0.05, atol=0.02)
