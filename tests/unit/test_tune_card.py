"""The card's part of `onchip tune` as far as it goes without one: compiling for a target, and judging results."""

import dataclasses
import importlib
import re
import threading
import types

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver

from onchip.bench.tune import card as module
from onchip.bench.tune.candidates import Limits
from onchip.bench.tune.card import NO_COMPILE, NO_LAUNCH, SPILLS, WRONG, Card, DeviceLost
from onchip.bench.tune.cases import Case, Inputs, heaviest, timed
from onchip.gpu import call as gpu
from onchip.schedules.triton.tiles import Tile
from tests.machine import INTERPRETED

pytestmark = pytest.mark.skipif(INTERPRETED, reason="kernels are compiled here, not interpreted")
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
SMALL, LARGE = Tile(32, 32, 4, 2), Tile(64, 64, 4, 2)
BOUNDED = Tile(64, 64, 4, 2, 128)


class Loader:
    """Answers for the driver of an H100: what a loaded binary takes, without loading it."""

    spills = 0

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source, metadata):
        return self.launched

    def launched(self, *arguments):
        raise AssertionError("nothing is launched to compile")

    @property
    def utils(self):
        return types.SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 227 * 1024},
            load_binary=lambda name, *arguments: (1, 1, 100, self.spills, 1024),
        )


def forget_kernels():
    """What was compiled for the loader must serve nobody else."""
    for name in ("forward", "backward"):
        schedule = importlib.import_module(f"onchip.schedules.triton.{name}")
        for kernel in (value for key, value in vars(schedule).items() if key.endswith("_kernel")):
            kernel.device_caches.clear()


@pytest.fixture
def loader(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(gpu, "architecture", lambda device: "sm_90")
    loader = Loader()
    monkeypatch.setattr(driver, "_active", loader)
    forget_kernels()
    yield loader
    forget_kernels()


def card(shared=227 * 1024):
    made = object.__new__(Card)
    made._device, made._limits, made._workers = CUDA, Limits(shared, 255, 32), 2
    made._open, made._pool, made._graphs, made._expected = None, None, {}, []
    return made


def on_the_card(inputs):
    """The inputs with a problem that says it is on the card; the tensors are not."""
    return Inputs(dataclasses.replace(inputs.problem, device=CUDA), inputs.query, inputs.key, inputs.value)


@pytest.mark.parametrize(("kernel", "kind"), [("forward", "band"), ("gradient", "changed")])
def test_candidates_are_compiled_with_their_tiles_and_not_launched(loader, kernel, kind):
    case, made = Case(kernel, 16, torch.bfloat16, kind), card()
    inputs = on_the_card(timed(case, CPU, tokens=2048, length=2048))
    found = made._compile(case, [SMALL, LARGE], lambda: module._start_all(case, inputs))
    kernels = [kernel for tile in (SMALL, LARGE) for kernel in found[tile]]
    assert [kernel.name for kernel in kernels] == [f"{kernel}_kernel"] * 2
    assert kernels[0].metadata.shared < kernels[1].metadata.shared or kernels[0].asm["cubin"] != kernels[1].asm["cubin"]
    assert made._fault(kernels, spills=True) is None


def test_a_kernel_is_out_that_spills_or_does_not_fit(loader):
    case = Case("forward", 16, torch.bfloat16, "short")
    inputs = on_the_card(timed(case, CPU, tokens=256, length=128))
    compiled = card()._compile(case, [SMALL], lambda: module._start_all(case, inputs))[SMALL]
    shared = compiled[0].metadata.shared
    assert card(shared)._fault(compiled, spills=True) is None
    assert card(shared - 1)._fault(compiled, spills=True) == NO_LAUNCH
    loader.spills = 4
    fresh = card()._compile(case, [LARGE], lambda: module._start_all(case, inputs))[LARGE]
    assert card()._fault(fresh, spills=True) == SPILLS and card()._fault(fresh, spills=False) is None


def test_a_bound_of_registers_may_spill(loader):
    case, made = Case("forward", 16, torch.bfloat16, "short"), card()
    inputs = on_the_card(timed(case, CPU, tokens=256, length=128))
    made._open, made._run = types.SimpleNamespace(case=case), lambda: module._start_all(case, inputs)
    loader.spills = 4
    assert made.compile([LARGE, BOUNDED]) == {LARGE: SPILLS}


def test_a_kernel_that_does_not_compile_stands_alone(loader):
    case = Case("forward", 16, torch.bfloat16, "short")
    inputs = on_the_card(timed(case, CPU, tokens=256, length=128))
    wrong = Tile(48, 32, 4, 2)
    found = card()._compile(case, [wrong, SMALL], lambda: module._start_all(case, inputs))
    assert card()._fault(found[wrong], spills=True) == NO_COMPILE
    assert card()._fault(found[SMALL], spills=True) is None


def test_a_winner_must_serve_the_heaviest_of_its_row(loader, monkeypatch):
    case, given = Case("forward", 16, torch.bfloat16, "band"), []
    monkeypatch.setattr(module, "heaviest", lambda *of: given.append(of) or map(on_the_card, heaviest(case, CPU)))
    made = card()
    made._open = types.SimpleNamespace(case=case)
    assert made.serves(SMALL) is None and given == [(case, CUDA)]
    made._limits = Limits(256, 255, 32)
    assert made.serves(SMALL) == "too large for others of its row"


class Told(Card):
    """A card whose kernel gives what a test says."""

    def __init__(self, expected, result, alive=True):
        self._open = types.SimpleNamespace(case=Case("forward", 64, torch.bfloat16, "band"))
        self._device, self._expected, self._result, self._alive, self.captured = CUDA, expected, result, alive, []

    def _run(self):
        if isinstance(self._result, Exception):
            raise self._result
        return self._result

    def _survive(self, tiles="a candidate"):
        if not self._alive:
            raise DeviceLost(f"{tiles}: gone")

    def _capture(self, tile):
        self.captured.append(tile)


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        ([1.0, -2.0, float("-inf")], None),
        ([1.0, -2.01, float("-inf")], None),
        ([1.0, -2.2, float("-inf")], WRONG),
        ([1.0, float("nan"), float("-inf")], WRONG),
        ([1.0, -2.0, float("inf")], WRONG),
        ([1.0, -2.0, 0.0], WRONG),
        (RuntimeError("out of resources"), NO_LAUNCH),
    ],
)
def test_a_result_is_held_against_the_shipped_tiles(monkeypatch, result, verdict):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    true = torch.tensor([1.0, -2.0, float("-inf")], dtype=torch.bfloat16)
    told = Told([true], result if isinstance(result, Exception) else [torch.tensor(result, dtype=torch.bfloat16)])
    assert told.check(SMALL) == verdict
    assert told.captured == ([SMALL] if verdict is None else []), "what is wrong is not timed"


def test_a_lost_device_ends_the_search():
    with pytest.raises(DeviceLost, match=re.escape(f"{SMALL}: gone")):
        Told([], RuntimeError("an illegal memory access was encountered"), alive=False).check(SMALL)


def test_a_device_lost_in_a_race_names_those_that_ran(monkeypatch):
    def lost(*given, **options):
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(module, "compare", lost)
    told = Told([], None, alive=False)
    told._graphs = dict.fromkeys((SMALL, LARGE), types.SimpleNamespace(replay=None))
    with pytest.raises(DeviceLost, match=re.escape(f"one of {SMALL}, {LARGE}: gone")):
        told.race(SMALL, [LARGE], 3)


def test_a_race_is_interleaved_with_the_shipped_tile(monkeypatch):
    """Times and ratios come from the project's timer, under the tiles that they are of; a failure is left out."""
    compare, calls = module.compare, []
    monkeypatch.setattr(module, "compare", lambda given, **options: compare(given, **(options | {"device": "cpu"})))

    def graph(name, fails=False):
        def replay():
            calls.append(name)
            if fails:
                raise RuntimeError("no")

        return types.SimpleNamespace(replay=replay)

    made, lost = card(), Tile(16, 16, 4, 1)
    monkeypatch.setattr(module, "SAMPLE_MS", 0.0)
    made._graphs = {LARGE: graph("shipped"), SMALL: graph("other"), lost: graph("lost", fails=True)}
    timings = made.race(LARGE, [SMALL, lost], 3)
    assert set(timings) == {LARGE, SMALL} and timings[LARGE].ratio == 1.0 and timings[SMALL].ms > 0
    assert calls.count("shipped") == calls.count("other") == 4


def test_what_failed_beside_other_threads_is_compiled_alone(loader, monkeypatch):
    """ast.parse of Python before 3.11.8 and 3.12.2 may raise for what another thread does."""
    parse, threads = JITFunction.parse, []

    def disturbed(kernel):
        threads.append(threading.current_thread())
        if threads[-1] is not threading.main_thread():
            raise SystemError("AST constructor recursion depth mismatch (before=33, after=75)")
        return parse(kernel)

    case = Case("forward", 16, torch.bfloat16, "short")
    inputs = on_the_card(timed(case, CPU, tokens=256, length=128))
    monkeypatch.setattr(JITFunction, "parse", disturbed)
    found = card()._compile(case, [SMALL], lambda: module._start_all(case, inputs))
    assert card()._fault(found[SMALL], spills=True) is None
    assert any(thread is not threading.main_thread() for thread in threads)
