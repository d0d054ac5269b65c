"""Launches of one kernel again and again, on a device that only says what it was told to launch."""

from dataclasses import dataclass, replace

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver

from onchip.gpu.launcher import Launcher, Series
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


# Several launches in a row


def series(*launchers):
    """Launches over (x, y, out, other): the first adds y to x, the second, if there is one, y to out."""
    launchers = launchers or (launcher(), launcher(HALF=True))
    return Series(*zip(launchers, ((0, 1, 2), (2, 1, 3)), strict=False))


def test_each_launch_of_a_series_gets_its_tensors(device, bound):
    launch = series()
    for _ in range(3):
        x = tensors(count=4)
        launch(*x)
        first, second = device.launches[-2:]
        x, y, out, other = (part.data_ptr() for part in x)
        assert (addresses(first), addresses(second)) == ((x, y, out), (out, y, other))
        assert (first.arguments[-1], second.arguments[-1]) == (False, True)
    assert len(bound) == 2 and len(device.launches) == 6


def test_an_absent_tensor_of_a_series_stays_absent(device, bound):
    launch = series()
    for _ in range(2):
        x, out, other = tensors()
        launch(x, None, out, other)
        assert [launched.arguments[1] for launched in device.launches[-2:]] == [None, None]
    assert len(bound) == 2


def test_a_series_with_an_address_that_is_not_aligned_is_each_launchers_own(device, bound):
    launch, x = series(), tensors(count=4)
    launch(*x)
    # the second launch alone takes it
    x[3] = tensors(1)[0]
    for _ in range(2):
        launch(*x)
    assert len(bound) == 4 and [len(launched.aligned) for launched in device.launches] == [3, 3, 3, 2, 3, 2]
    launch(*tensors(count=4))
    assert len(bound) == 4


def test_a_series_asks_for_its_stream_each_time(device):
    launch = series()
    for stream in (7, 9, 0):
        device.stream = stream
        launch(*tensors(count=4))
    assert [launched.stream for launched in device.launches] == [7, 7, 9, 9, 0, 0]


def test_hooks_see_every_launch_of_a_series(device, bound):
    launch, seen, chain = series(), [], knobs.runtime.launch_enter_hook
    launch(*tensors(count=4))
    chain.add(seen.append)
    try:
        launch(*tensors(count=4))
    finally:
        chain.remove(seen.append)
    assert [metadata.get()["name"] for metadata in seen] == ["add_kernel"] * 2
    hook = lambda *arguments, **keywords: seen.append(len(arguments))  # noqa: E731
    add_kernel.add_pre_run_hook(hook)
    try:
        launch(*tensors(count=4))
    finally:
        add_kernel.pre_run_hooks.remove(hook)
    assert seen[2:] == [6, 6]
    launch(*tensors(count=4))
    assert len(bound) == 6 and len(device.launches) == 8


def test_settings_of_triton_are_asked_for_at_each_series(device, bound, monkeypatch):
    launch = series()
    for debug in (False, True, True, False, False):
        monkeypatch.setattr(knobs.runtime, "debug", debug)
        launch(*tensors(count=4))
    assert len(bound) == 6 and len(device.launches) == 10


def test_a_series_is_compiled_alone_like_its_launches(device):
    launch = series()
    for _ in range(2):
        with compiling() as held:
            launch(*tensors(count=4))
        assert [name for name, _ in held] == ["add", "add"] and len(device.launches) in (0, 2)
        if not device.launches:
            launch(*tensors(count=4))


# What a repeated launch goes through


class Wrapped:
    """A function that launches with Python around it, as Triton's is for CUDA: scratch memory is what it is for."""

    global_scratch_size = profile_scratch_size = 0

    def __init__(self, launch):
        self.launch, self.calls = launch, 0

    def __call__(self, x, y, z, stream, function, packed, *arguments):
        self.calls += 1
        self.launch(x, y, z, stream, function, False, None, packed, *arguments)


class Nested(Wrapped):
    """As newer Tritons do, which pass arguments on as one."""

    def __call__(self, x, y, z, stream, function, packed, told, enter, leave, *arguments):
        self.calls += 1
        self.launch(x, y, z, stream, function, False, None, packed, told, enter, leave, arguments)


class Scratched(Wrapped):
    """For a kernel that needs scratch memory."""

    global_scratch_size = 64


@pytest.mark.parametrize(("kind", "direct"), [(Wrapped, True), (Nested, False), (Scratched, False)])
def test_python_around_a_launch_that_only_passes_on_is_left_out(device, monkeypatch, kind, direct):
    made, launcher_cls = [], device.launcher_cls

    def launcher_of(source, metadata):
        run = launcher_cls(source, metadata)

        def launch(x, y, z, stream, function, cooperative, scratch, packed, told, enter, leave, *arguments):
            assert (cooperative, scratch) == (False, None)
            (arguments,) = arguments if kind is Nested else (arguments,)
            run(x, y, z, stream, function, packed, told, enter, leave, *arguments)

        made.append(kind(launch))
        return made[-1]

    monkeypatch.setattr(device, "launcher_cls", launcher_of)
    launch = launcher()
    given = [tensors() for _ in range(3)]
    for x in given:
        launch(*x)
    (wrapped,) = made
    assert wrapped.calls == (1 if direct else 3)
    assert [addresses(launched) for launched in device.launches] == [
        tuple(map(torch.Tensor.data_ptr, x)) for x in given
    ]
    assert len({launched.arguments[3:] for launched in device.launches}) == 1


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
