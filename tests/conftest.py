"""Options, seeds, threads, hypothesis profiles and the `schedule` fixture that every contract test runs over."""

import collections
import dataclasses
import functools
import json
import os
import time
from pathlib import Path

import hypothesis
import pytest
import torch

import onchip
from onchip.bench.machine import read_machine
from onchip.bench.protocol import read_commit
from tests import machine
from tests.harness import COMPLETE

# How many examples hypothesis draws. A new example on a GPU is often a new kernel to compile.
EXAMPLES = {"cpu": 30, "cuda": 8, "interpreted": 2}


def pytest_addoption(parser):
    group = parser.getgroup("onchip")
    group.addoption(
        "--schedule",
        action="append",
        default=[],
        metavar="NAME",
        help="run only tests over schedules, and these only over NAME (repeatable; 'chosen': that of the dispatcher)",
    )
    group.addoption("--device", default="cpu", choices=("cpu", "cuda"), help="where the contract tests compute")
    group.addoption("--record", metavar="FILE", help="write what ran, where, and what came out, as JSON")


def pytest_configure(config):
    machine.DEVICE = config.getoption("--device")
    known = ("chosen", *onchip.dispatch.schedules())
    if unknown := set(config.getoption("--schedule")).difference(known):
        raise pytest.UsageError(f"--schedule is one of {', '.join(known)}, not {', '.join(sorted(unknown))}")
    examples = EXAMPLES["interpreted" if machine.INTERPRETED else machine.DEVICE]
    # a schedule may decline most examples
    settings = {"deadline": None, "print_blob": True, "suppress_health_check": [hypothesis.HealthCheck.filter_too_much]}
    if machine.DEVICE == "cuda":
        # every example compiles kernels: to look for a smaller failure would take minutes
        settings["phases"] = [phase for phase in hypothesis.Phase if phase.name not in ("shrink", "explain")]
    hypothesis.settings.register_profile("default", max_examples=examples, **settings)
    hypothesis.settings.register_profile("ci", max_examples=examples, derandomize=True, **settings)
    hypothesis.settings.register_profile("long", max_examples=1000, **settings)
    hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")
    torch.set_num_threads(1)  # the problems are small, and xdist fills the cores
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch's deterministic mode asks for it


def wanted(item, schedules):
    """Whether the options and the machine leave a test in."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if machine.INTERPRETED and (
        item.get_closest_marker("compiled") or parameters.get("dtype") in (torch.float64, torch.bfloat16)
    ):
        return False
    if "schedule" not in parameters:
        return not schedules
    if schedules:
        return (parameters["schedule"] or "chosen") in schedules
    on_cuda = machine.DEVICE == "cuda" or item.get_closest_marker("gpu")
    return bool(on_cuda) or parameters["schedule"] not in machine.COMPILED


def each_value_once(items):
    """Few of the items, in which every value of every parameter of a test still occurs."""
    tests = {}
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        values = frozenset((name, str(value)) for name, value in parameters.items())
        tests.setdefault(item.nodeid.partition("[")[0], {})[item] = values
    for values in tests.values():
        rest = frozenset().union(*values.values())
        if not rest:
            yield from values
        while rest:
            item = max(values, key=lambda item: (len(values[item] & rest), ("dtype", "torch.float32") in values[item]))
            rest -= values[item]
            yield item


def pytest_collection_modifyitems(config, items):
    schedules = config.getoption("--schedule")
    kept = [item for item in items if wanted(item, schedules)]
    if machine.INTERPRETED:
        kept = list(each_value_once(kept))
    left_out = set(items).difference(kept)
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    # the longest first, so that no worker is left alone with one at the end
    items[:] = sorted(kept, key=lambda item: item.get_closest_marker("slow") is None)
    for function in {item.obj for item in items if hasattr(item.obj, "hypothesis")}:
        function.hypothesis.inner_test = rejecting(function.hypothesis.inner_test)
    for item in items:
        if not torch.cuda.is_available() and (machine.DEVICE == "cuda" or item.get_closest_marker("gpu")):
            item.add_marker(pytest.mark.skip(reason="no CUDA device here"))


def rejecting(test):
    """A test of one example, where an example that its schedule declines does not count."""

    @functools.wraps(test)
    def run(*positional, **keywords):
        try:
            return test(*positional, **keywords)
        except onchip.Unsupported:
            if keywords.get("schedule") in (None, *COMPLETE):
                raise
            hypothesis.reject()

    return run


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """A schedule that declines a problem skips the test, unless it is one that must run everything."""
    name = pyfuncitem.funcargs.get("schedule")
    try:
        return (yield)
    except onchip.Unsupported as reason:
        if name in (None, *COMPLETE):
            raise
        pytest.skip(f"{name} declines: " + "; ".join(reason.reasons[name]))
    except hypothesis.errors.Unsatisfiable:
        if name in (None, *COMPLETE):
            raise
        pytest.skip(f"{name} declines every example")


def pytest_sessionstart(session):
    session.config.started = time.perf_counter()


def pytest_terminal_summary(terminalreporter, config):
    """The record of a run; of several workers only the controller writes it."""
    path = config.getoption("--record")
    if path is None:
        return
    outcomes = {name: terminalreporter.stats.get(name, []) for name in ("passed", "failed", "error", "skipped")}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record = {
        "selection": {name: getattr(config.option, name) for name in ("markexpr", "keyword", "schedule", "device")},
        "commit": dataclasses.asdict(commit) if (commit := read_commit()) else None,
        "where": dataclasses.asdict(read_machine(device)),
        "seconds": round(time.perf_counter() - config.started),
        **{name: len(reports) for name, reports in outcomes.items()},
        "not_passed": sorted(report.nodeid for name in ("failed", "error") for report in outcomes[name]),
        "why_skipped": dict(
            collections.Counter(str(report.longrepr[2]) for report in outcomes["skipped"]).most_common()
        ),
    }
    Path(path).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(scope="session", params=[None, *sorted(onchip.dispatch.schedules())], ids=lambda name: name or "chosen")
def schedule(request):
    """Each registered schedule's name in turn, and None, which may pair one's forward with another's backward."""
    return request.param


@pytest.fixture(scope="session")
def device():
    """Where the tests that call onchip themselves make their tensors; the harness moves those of a problem there."""
    return machine.DEVICE


@pytest.fixture(scope="session")
def exact(schedule, device):
    """float64, or float32 where the schedule has no float64."""
    empty = torch.empty(1, 1, 1, 8, dtype=torch.float64, device=device)
    try:
        onchip.plan(empty, empty, empty, schedule=schedule)
    except onchip.Unsupported:
        return torch.float32
    return torch.float64


@pytest.fixture(
    scope="session", params=[torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=lambda d: str(d)[6:]
)
def dtype(request):
    return request.param


@pytest.fixture(scope="session", params=["dense", "padded", "packed"])
def layout(request):
    return request.param
