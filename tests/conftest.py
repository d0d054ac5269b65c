"""Seeds, threads, markers, hypothesis profiles and the `schedule` fixture that every contract test runs over."""

import os

import hypothesis
import pytest
import torch

import onchip
from tests.harness import COMPLETE

hypothesis.settings.register_profile("default", deadline=None, max_examples=30, print_blob=True)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=30, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("long", deadline=None, max_examples=1000, print_blob=True)


def pytest_configure():
    hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")
    torch.set_num_threads(1)  # the problems are small, and xdist fills the cores


def pytest_collection_modifyitems(items):
    # the longest first, so that no worker is left alone with one at the end
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """A schedule that declines a problem skips the test, unless it is one that must run everything."""
    try:
        return (yield)
    except onchip.Unsupported as reason:
        name = pyfuncitem.funcargs.get("schedule")
        if name in (None, *COMPLETE):
            raise
        pytest.skip(f"{name} declines: " + "; ".join(reason.reasons[name]))


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session", params=[None, *sorted(onchip.dispatch.schedules())], ids=lambda name: name or "chosen")
def schedule(request):
    """Each registered schedule's name in turn, and None, which may pair one's forward with another's backward."""
    return request.param


@pytest.fixture(
    scope="session", params=[torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:]
)
def dtype(request):
    return request.param


@pytest.fixture(scope="session", params=["dense", "padded", "packed"])
def layout(request):
    return request.param
