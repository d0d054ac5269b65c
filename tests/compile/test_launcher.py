"""Launches of one kernel again and again, on a device that only says what it was told to launch."""

from dataclasses import dataclass, replace

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver

from onchip.gpu.launcher import Launcher
from onchip.gpu.start import compiling
from tests.compile import aot


@triton.jit(do_not_specialize=["stride", "length"])
def add_kernel(x, y, out, given, stride: tl.int64, length: tl.int32, SIZE: tl.constexpr, HALF: tl.constexpr):
    place = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    total = tl.load(x + place * stride, mask=place < length, other=0.0)
    if y is not None:
        total += tl.load(y + place, mask=place < length, other=0.0)
    tl.store(out + place, total * (0.5 if HALF else given[0]), mask=place < length)


@dataclass(frozen=True)
class Launched:
    """What reached the device: which of the compiled kernels, on which device it was loaded, and what it was given.

    `aligned` are the places of the arguments that the kernel takes for multiples of 16.
    """

    aligned: tuple
    loaded: int
    grid: tuple
    stream: int
    arguments: tuple


class Device:
    """Devices of compute capability 9.0, as a driver of Triton's; `launches` is what they were told."""

    def __init__(self):
        self.launches, self.stream, self.device = [], 7, 0
        self.utils = self

    def launcher_cls(self, source, metadata):
        aligned = tuple(sorted(place for (place,), found in source.attrs.items() if found))

        def run(x, y, z, stream, function, packed, told, enter, leave, *arguments):
            if enter is not None:
                enter(told)
            given = tuple(item.data_ptr() if isinstance(item, torch.Tensor) else item for item in arguments)
            self.launches.append(Launched(aligned, function, (x, y, z), stream, given))
            if leave is not None:
                leave(told)

        return run

    def load_binary(self, name, binary, shared, device):
        return object(), device, 32, 0, 1024

    def unload_module(self, module):
        pass

    def get_device_properties(self, device):
        return {"max_shared_mem": aot.SHARED_LIMITS["sm_90"]}

    def get_current_target(self):
        return aot.TARGETS["sm_90"]

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        return self.stream


@pytest.fixture
def device():
    before, made = driver._active, Device()
    driver.set_active(made)
    # kernels that were compiled for another driver
    add_kernel.device_caches.clear()
    yield made
    add_kernel.device_caches.clear()
    driver._active = before


@pytest.fixture
def bound(monkeypatch):
    """How often Triton's own launch has run."""
    calls, run = [], type(add_kernel).run

    def counted(self, *arguments, **keywords):
        calls.append(self.fn.__name__)
        return run(self, *arguments, **keywords)

    monkeypatch.setattr(type(add_kernel), "run", counted)
    return calls


def tensors(offset=0, count=3):
    """Tensors that start so many elements behind an aligned address."""
    found = [torch.zeros(80)[offset : offset + 64] for _ in range(count)]
    assert all(tensor.data_ptr() % 16 == 4 * offset % 16 for tensor in found)
    return found


def launcher(**constants):
    return Launcher(add_kernel, 2, ((0.5,), 1, 64), {"SIZE": 32, "HALF": False, "num_warps": 1} | constants)


def addresses(launched):
    return launched.arguments[:3]


def test_later_launches_are_the_first_one_with_other_addresses(device, bound):
    launch, given = launcher(), [tensors(), tensors(), tensors()]
    for x in given:
        launch(*x)
    assert len(bound) == 1
    first = device.launches[0]
    assert first.grid == (2, 1, 1) and first.arguments[3:] == ((0.5,), 1, 64, 32, False)
    for x, launched in zip(given, device.launches, strict=True):
        assert addresses(launched) == tuple(part.data_ptr() for part in x)
        assert launched == replace(first, arguments=launched.arguments)
        assert launched.arguments[3:] == first.arguments[3:]


def test_an_absent_tensor_stays_absent(device, bound):
    launch = launcher()
    for _ in range(2):
        x, out = tensors(count=2)
        launch(x, None, out)
        assert addresses(device.launches[-1]) == (x.data_ptr(), None, out.data_ptr())
    assert len(bound) == 1


@pytest.mark.parametrize("offsets", [(0, 1, 0, 4, 1), (1, 0, 0, 1, 4)], ids=str)
def test_an_address_that_is_not_aligned_takes_the_kernel_that_was_compiled_for_such(device, bound, offsets):
    """The other one may load vectors from there, which the device does not do."""
    launch = launcher()
    for offset in offsets:
        launch(*tensors(offset))
    assert [launched.aligned for launched in device.launches] == [
        () if offset == 1 else (0, 1, 2) for offset in offsets
    ]
    assert len(bound) == 3, "those that are not aligned, and the first one that is, are Triton's own"


@pytest.mark.parametrize("place", [0, 1, 2])
def test_one_address_that_is_not_aligned_suffices(device, bound, place):
    launch = launcher()
    launch(*tensors())
    mixed = tensors()
    mixed[place] = tensors(2)[0]
    launch(*mixed)
    assert len(bound) == 2 and set(device.launches[1].aligned) == {0, 1, 2} - {place}


def test_streams_are_asked_for_at_each_launch(device):
    launch = launcher()
    for stream in (7, 7, 9, 0):
        device.stream = stream
        launch(*tensors())
    assert [launched.stream for launched in device.launches] == [7, 7, 9, 0]


def test_devices_have_launchers_of_their_own(device):
    """A binary is loaded on one device."""
    for number in (0, 1):
        device.device, launch = number, launcher()
        for _ in range(2):
            launch(*tensors())
    assert [launched.loaded for launched in device.launches] == [0, 0, 1, 1]


def test_constants_are_part_of_a_launch(device):
    one, other = launcher(), launcher(HALF=True)
    for launch in (one, other, one, other):
        launch(*tensors())
    assert [launched.arguments[-1] for launched in device.launches] == [False, True, False, True]


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_see_every_launch(device, bound, name):
    launch, seen, chain = launcher(), [], getattr(knobs.runtime, name)
    launch(*tensors())

    def hook(metadata):
        seen.append(metadata)

    chain.add(hook)
    try:
        for _ in range(2):
            launch(*tensors())
    finally:
        chain.remove(hook)
    launch(*tensors())
    assert len(bound) == 3 and len(device.launches) == 4
    assert [metadata.get()["name"] for metadata in seen] == ["add_kernel"] * 2


def test_hooks_of_the_kernel_see_every_launch(device):
    launch, seen = launcher(), []
    launch(*tensors())
    hook = lambda *arguments, **keywords: seen.append(len(arguments))  # noqa: E731
    add_kernel.add_pre_run_hook(hook)
    try:
        for _ in range(2):
            launch(*tensors())
    finally:
        add_kernel.pre_run_hooks.remove(hook)
    launch(*tensors())
    assert seen == [6, 6]


def test_settings_of_triton_are_asked_for_at_each_launch(device, bound, monkeypatch):
    launch = launcher()
    launch(*tensors())
    monkeypatch.setattr(knobs.runtime, "debug", True)
    for _ in range(2):
        launch(*tensors())
    assert len(bound) == 2, "kept with the new setting"
    monkeypatch.setattr(knobs.runtime, "debug", False)
    launch(*tensors())
    assert len(bound) == 3


def test_nothing_is_launched_while_kernels_are_compiled_alone(device):
    launch = launcher()
    with compiling() as held:
        launch(*tensors())
    assert not device.launches and [name for name, _ in held] == ["add"]
    for _ in range(2):
        launch(*tensors())
    with compiling() as held:
        launch(*tensors())
    assert len(device.launches) == 2 and [name for name, _ in held] == ["add"]


def test_what_is_not_compiled_is_started_each_time():
    """As Triton's interpreter does, whose launches give None."""
    started = []

    class Interpreted:
        def __getitem__(self, grid):
            return lambda *arguments, **keywords: started.append((grid, arguments, keywords))

    launch, x = Launcher(Interpreted(), 3, (1, 2), {"SIZE": 32}), torch.zeros(4)
    for _ in range(2):
        launch(x, None, descriptors=("d",))
    assert started == [((3,), ("d", x, None, 1, 2), {"SIZE": 32})] * 2
