"""The same call again and again on a CUDA device: other tensors, addresses, streams and devices, graphs and hooks."""

import pytest
import torch

import onchip

pytestmark = pytest.mark.gpu
SHAPE = (2, 4, 130, 64)


@pytest.fixture(params=["triton", "hopper"])
def schedule(request):
    if request.param == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this is no Hopper GPU")
    return request.param


def draw(device="cuda", offset=0):
    """Query, key, value and a gradient of out that start so many elements behind an aligned address."""
    size = torch.Size(SHAPE).numel()
    buffers = torch.randn(4, size + 64, dtype=torch.bfloat16, device=device)
    return [buffer[offset : offset + size].view(SHAPE) for buffer in buffers]


def run(tensors, schedule):
    """Out and gradients."""
    *leaves, d_out = tensors
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    out = onchip.attention(*leaves, causal=True, schedule=schedule)
    return out.detach(), *torch.autograd.grad(out, leaves, d_out)


def check(results, tensors):
    """Against eager products in float64."""
    *leaves, d_out = (tensor.double() for tensor in tensors)
    leaves = [leaf.requires_grad_() for leaf in leaves]
    out = onchip.attention(*leaves, causal=True, schedule="dense")
    wanted = (out, *torch.autograd.grad(out, leaves, d_out))
    for got, expected in zip(results, wanted, strict=False):
        assert (got - expected).abs().max() <= 0.02 * expected.abs().max()


def test_other_tensors_and_addresses(schedule):
    for offset in (0, 0, 1, 0, 8, 3, 0):
        tensors = draw(offset=offset)
        check(run(tensors, schedule), tensors)


def test_streams(schedule):
    streams = [torch.cuda.Stream() for _ in range(3)]
    tensors = [draw() for _ in range(9)]
    torch.cuda.synchronize()
    results = []
    for place, given in enumerate(tensors):
        with torch.cuda.stream(streams[place % 3]):
            results.append(run(given, schedule))
    torch.cuda.synchronize()
    for found, given in zip(results, tensors, strict=True):
        check(found, given)


@pytest.mark.parametrize("warm", [0, 1, 3])
def test_graphs(schedule, warm):
    """A graph reads what its tensors hold when it is replayed, whether or not the kernel was launched before."""
    tensors = draw()
    for _ in range(max(warm, 1)):
        # kernels are compiled outside of a capture
        run(tensors if warm else draw(), schedule)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run(tensors, schedule)
    for _ in range(2):
        for tensor in tensors:
            tensor.normal_()
        graph.replay()
        check(results, tensors)
        again = draw()
        check(run(again, schedule), again)


def test_hooks_see_every_launch(schedule):
    from triton import knobs

    tensors, seen = draw(), []
    for _ in range(2):
        run(tensors, schedule)
    hook = lambda metadata: seen.append(metadata.get()["name"])  # noqa: E731
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        results = run(tensors, schedule)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    check(results, tensors)
    names = {
        "triton": ["forward_kernel", "delta_kernel", "keys_kernel", "queries_kernel"],
        "hopper": ["forward_kernel", "prepare_kernel", "narrow_kernel", "finish_kernel"],
    }
    assert seen == names[schedule]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one device")
def test_devices(schedule):
    for place in (0, 1, 0, 1):
        tensors = draw(f"cuda:{place}")
        check(run(tensors, schedule), tensors)


def test_graphs_of_the_compiler(schedule):
    """Warm-ups run in the memory of the graphs to come: nothing that is kept may lie there."""
    run_compiled = torch.compile(
        lambda *leaves: onchip.attention(*leaves, causal=True, schedule=schedule), mode="reduce-overhead"
    )
    for _ in range(4):
        *leaves, d_out = draw()
        with torch.no_grad():
            out = run_compiled(*leaves).clone()
        check((out,), [*leaves, d_out])
        run([*leaves, d_out], schedule)
