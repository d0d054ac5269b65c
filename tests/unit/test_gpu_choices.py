"""The table of choices for Hopper GPUs, the benchmark that it follows from, and that a record supports it."""

import dataclasses
import importlib
import importlib.util
import json
import math
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import onchip
from onchip import choices
from onchip.bench.machine import read_machine
from onchip.bench.protocol import Ratio, Result
from onchip.model import hardware, presets

FOLDER = Path(__file__).parents[2] / "benchmarks"
RECORDS = sorted((FOLDER / "results").glob("*/forward-choices.json"))
CUDA = torch.device("cuda")
has_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(scope="module")
def script():
    """The benchmark as a module; its folder is no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield importlib.import_module("gpu_choices")


def tensors(batch, heads, heads_kv, queries, keys, dim=64):
    """Query, key and value without memory."""
    shapes = ((heads, queries), (heads_kv, keys), (heads_kv, keys))
    return [torch.empty(batch, *shape, dim, device="meta", dtype=torch.bfloat16) for shape in shapes]


def on_cuda(problem):
    return dataclasses.replace(problem, device=CUDA)


def first(*sizes, backward=False):
    return choices.preferred(on_cuda(onchip.plan(*tensors(*sizes), causal=True).problem), backward)


# The table. Sizes are (batch, query heads, key heads, queries, keys)


@pytest.fixture
def table(monkeypatch):
    """A table with every bound, whatever the present one holds."""
    rows = (
        choices.GpuChoice(("triton",), dim=64, below=1024, queries=64, group=4, tiles=132),
        choices.GpuChoice(("tiled", "triton"), rows=16),
    )
    monkeypatch.setattr(choices, "HOPPER", rows)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1, 32, 32, 64, 1023), ("triton",)),
        ((1, 32, 32, 65, 1023), ()),
        ((1, 32, 32, 64, 1024), ()),
        ((1, 32, 32, 64, 1023, 72), ()),
        ((1, 32, 8, 32, 1023), ("triton",)),
        ((1, 40, 8, 32, 1023), ()),
        # tiles: sequences times key heads
        ((131, 1, 1, 64, 1023), ("triton",)),
        ((132, 1, 1, 64, 1023), ()),
        # four heads of 16 queries are a tile of 64 rows, of 17 queries two
        ((1, 131 * 4, 131, 16, 1023), ("triton",)),
        ((1, 131 * 4, 131, 17, 1023), ()),
        ((1, 66 * 4, 66, 17, 1023), ()),
        ((1, 65 * 4, 65, 17, 1023), ("triton",)),
        # the first row that fits, and then the next one
        ((1, 2, 2, 16, 1023), ("triton",)),
        ((1, 2, 2, 16, 1024), ("tiled", "triton")),
        ((1, 4, 2, 8, 1024), ("tiled", "triton")),
        ((1, 4, 2, 9, 1024), ()),
        ((132, 2, 2, 2, 1023), ("tiled", "triton")),
        ((1, 2, 2, 17, 1024), ()),
    ],
)
def test_a_row_fits_up_to_its_bounds(table, sizes, expected):
    assert first(*sizes) == expected
    assert first(*sizes, backward=True) == ()


@pytest.mark.parametrize(
    ("batch", "queries", "keys", "expected"),
    [
        (4, 4 * 64, 4 * 1024 - 1, ("triton",)),
        (4, 4 * 64 + 1, 4 * 1023, ()),
        (4, 4 * 64, 4 * 1024, ()),
        (66, 66 * 64, 66 * 1023, ()),
        (65, 65 * 64, 65 * 1023, ("triton",)),
    ],
)
def test_the_means_of_a_packed_batch_count(table, batch, queries, keys, expected):
    """`length_q` and `length_k` are tokens of all sequences there; each has two key heads."""
    query, key, value = torch.randn(queries, 2, 8), torch.randn(keys, 2, 8), torch.randn(keys, 2, 8)
    offsets = [torch.linspace(0, total, batch + 1).int() for total in (queries, keys)]
    assert choices.preferred(on_cuda(onchip.plan_varlen(query, key, value, *offsets).problem), False) == expected


def test_a_row_without_bounds_fits_everything(monkeypatch):
    monkeypatch.setattr(choices, "HOPPER", (choices.GpuChoice(("triton",)),))
    assert first(64, 8, 8, 4096, 1) == first(0, 8, 8, 0, 0) == ("triton",)


def test_another_kind_of_device_has_no_table(table):
    assert first(1, 2, 2, 64, 1023)
    assert choices.preferred(onchip.plan(*tensors(1, 2, 2, 64, 1023)).problem, False) == ()


def test_rows_name_schedules():
    assert all(set(row.first) <= set(onchip.dispatch.schedules()) for row in choices.HOPPER)


@has_triton
@pytest.mark.parametrize(("sizes", "expected"), [((1, 8, 8, 64, 512), "triton"), ((1, 8, 8, 65, 512), "hopper")])
def test_the_dispatcher_takes_what_the_table_says(table, sizes, expected):
    """On a Hopper GPU, which is planned for and need not be here."""
    plan = onchip.plan(*tensors(*sizes), causal=True).on(presets.PRESETS["h200"])
    assert (plan.forward, plan.backward) == (expected, "hopper")


@has_triton
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (0, 0)])
def test_the_table_changes_nothing_on_other_gpus(capability, monkeypatch):
    """(0, 0) is what other makers' devices have."""
    monkeypatch.setattr("onchip.schedules.hopper.capability_of", lambda device: capability)
    for sizes in ((1, 8, 8, 1, 512), (1, 8, 2, 512, 4096)):
        problem = on_cuda(onchip.plan(*tensors(*sizes), causal=True).problem)
        chosen, reasons = onchip.dispatch.choose(problem)
        with monkeypatch.context() as patch:
            patch.setattr(choices, "HOPPER", ())
            without, other_reasons = onchip.dispatch.choose(problem)
        assert chosen.name == without.name == "triton" and reasons == other_reasons


def test_it_asks_nothing_of_the_device_and_takes_no_time(monkeypatch):
    def asked(*_):
        raise AssertionError("a device is asked")

    monkeypatch.setattr(torch.cuda, "get_device_properties", asked)
    monkeypatch.setattr(hardware, "capability_of", asked)
    problem = on_cuda(onchip.plan(*tensors(1, 32, 8, 512, 4096), causal=True).problem)
    times = []
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(100):
            choices.preferred(problem, False)
        times.append((time.perf_counter() - start) / 100)
    assert min(times) < 20e-6


# The record


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.parent.name)
def test_the_record_supports_the_table(script, path):
    """A choice is nowhere more than 1.15 times as slow as the other one, and 3 % in the geometric mean at most."""
    measured = script.read(path)
    assert [entry.point for entry in measured] == script.points()
    assert not [entry for entry in measured if entry.failures]
    losses = {entry.point.name: entry.loss(script.taken(entry.point)) for entry in measured}
    assert max(losses.values()) <= 1.15, {name: loss for name, loss in losses.items() if loss > 1.15}
    assert math.exp(sum(map(math.log, losses.values())) / len(losses)) <= 1.03


# The benchmark


def test_the_grid(script):
    points = script.points()
    assert len({point.name for point in points}) == len(points) > 100
    assert {point.queries for point in points} == {1, 16, 64, 512}
    assert {(point.keys, point.batch) for point in points} >= {(512, 1), (32768, 8), (4096, 64)}
    assert {(point.dim, point.heads_key) for point in points} == {(64, 32), (64, 8), (128, 32), (128, 8)}
    assert len({point.kernel for point in points}) == 4
    assert [point for group in script.groups(points) for point in group] == points


def test_a_point_counts_bytes_and_operations(script):
    point = script.Point(dim=16, heads_key=8, keys=100, batch=2, queries=3)
    query, key, value = tensors(2, 32, 8, 3, 100, 16)
    assert point.bytes == 2 * sum(tensor.numel() for tensor in (query, key, value, query))
    pairs = 2 * 32 * int(torch.ones(3, 100).tril(100 - 3).sum())
    assert point.operations == 2 * pairs * (16 + 16)


def test_the_estimate_needs_no_gpu(script):
    text = run(script, "--estimate")
    assert text.startswith("115 points, 4 kernels of each schedule: about ")
    assert script.seconds(script.points(), script.ROUNDS) < 100
    assert run(script, "--estimate", "--only", "d128 h32/8 ").startswith("24 points, 1 kernels")


@pytest.fixture
def small(script, monkeypatch):
    """The script with a processor for its GPU, and two groups of points that fit it."""
    points = [
        script.Point(dim=16, heads_key=heads_key, keys=32, batch=batch, queries=queries)
        for heads_key in (32, 8) for batch in (1, 2) for queries in (1, 5)
    ]  # fmt: skip
    monkeypatch.setattr(script, "points", lambda: points)
    monkeypatch.setattr(script, "_machine", read_machine)
    monkeypatch.setattr(script, "SCHEDULES", ("tiled", "dense"))
    monkeypatch.setattr(script, "SAMPLE_MS", 0.0)
    return script


def run(script, *arguments, status=0):
    result = CliRunner().invoke(script.app, arguments)
    assert result.exit_code == status, result.output
    return result.stdout if status == 0 else result.output


def test_a_record_holds_the_protocol_and_prints_the_same_table(small, tmp_path):
    text = run(small, "--rounds", "3", "--out", str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["forward-choices.json"]
    data = json.loads((tmp_path / small.RECORD).read_text())
    assert data["method"]["rounds"] == 3 and data["method"]["timer"] == "time.perf_counter"
    assert data["where"]["torch_version"] == torch.__version__ and data["created"] and "commit" in data
    measured = small.read(tmp_path / small.RECORD)
    assert [entry.point for entry in measured] == small.points()
    for entry in measured:
        assert [result.name for result in entry.results] == ["tiled", "dense"] and not entry.failures
        assert (entry.ratio.name, entry.ratio.reference, entry.ratio.rounds) == ("dense", "tiled", 3)
    assert run(small, "--show", "--out", str(tmp_path)) == text
    assert "d16 h32/8 k32 b2 q5" in text and "of 8 points" in text
    assert "of 4 points" in run(small, "--show", "--only", "h32/8", "--out", str(tmp_path))


def test_a_part_is_written_only_where_a_folder_is_named(small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ("--rounds", "1", "--only", "h32/8 k32 b1 q1")
    assert "of 1 point," in run(small, *options)
    assert not list(tmp_path.iterdir())
    run(small, *options, "--out", "here")
    assert len(small.read(tmp_path / "here" / small.RECORD)) == 1


@pytest.mark.parametrize("wrong", ["far", "nan"])
def test_a_wrong_result_is_not_timed(small, tmp_path, monkeypatch, wrong):
    attention = onchip.attention

    def changed(*inputs, schedule, **options):
        out = attention(*inputs, schedule=schedule, **options)
        if schedule == "dense" and out.shape[:3] == (2, 32, 5):
            out[1, 31, 4] = torch.nan if wrong == "nan" else 2 * out[1, 31, 4] + 1
        return out

    monkeypatch.setattr(onchip, "attention", changed)
    text = run(small, "--rounds", "1", "--out", str(tmp_path), status=1)
    assert "d16 h32/8 k32 b2 q5 dense failed: WrongResult: differs from tiled by" in text
    assert "of 6 points" in text
    failed = [entry for entry in small.read(tmp_path / small.RECORD) if entry.failures]
    assert [entry.point.name for entry in failed] == ["d16 h32/32 k32 b2 q5", "d16 h32/8 k32 b2 q5"]
    assert all(entry.ratio is None and [result.name for result in entry.results] == ["tiled"] for entry in failed)


def test_a_device_that_breaks_down_leaves_what_was_measured(small, tmp_path, monkeypatch):
    drawn = small._drawn

    def break_down(batch, heads, *rest):
        if heads == 8:
            raise RuntimeError("an illegal memory access was encountered")
        return drawn(batch, heads, *rest)

    monkeypatch.setattr(small, "_drawn", break_down)
    assert "of 4 points" in run(small, "--rounds", "1", "--out", str(tmp_path), status=1)
    assert len(small.read(tmp_path / small.RECORD)) == 4


def test_the_table_marks_where_the_slower_one_is_taken(script, table, monkeypatch, capsys):
    """Times are of both schedules for a GPU; few keys are on `table`."""
    sizes = {"quick": (512, 1), "slow": (512, 16), "plain": (4096, 16)}
    times = {"quick": (0.004, 0.002), "slow": (0.002, 0.003), "plain": (0.002, 0.004)}
    measured = [
        script.Measured(
            point=script.Point(dim=64, heads_key=8, keys=keys, batch=1, queries=queries),
            results=tuple(Result.of(name, [ms], 1) for name, ms in zip(("hopper", "triton"), times[name], strict=True)),
            ratio=Ratio.of("triton", "hopper", [times[name][1] / times[name][0]]),
            failures=(),
        )
        for name, (keys, queries) in sizes.items()
    ]
    assert [script.taken(entry.point) for entry in measured] == ["triton", "triton", "hopper"]
    script.print_measured(script.make_console(script.WIDTH), measured)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    rows = [line[5:] for line in lines if line and line[0] == "d64"]
    assert rows == [
        ["4.0", "2.0", "0.50", "0.50", "to", "0.50", "triton"],
        ["2.0", "3.0", "1.50", "1.50", "to", "1.50", "triton", "1.50x"],
        ["2.0", "4.0", "2.00", "2.00", "to", "2.00", "hopper"],
    ]
    said = {" ".join(line).split(":")[0]: line for line in lines if "mean" in line}
    assert f"{1.5 ** (1 / 3):.3f}" in said["the table"] and "slower at 1" in " ".join(said["the table"])
    assert "slower at 1" in " ".join(said["hopper alone"]) and "slower at 2" in " ".join(said["triton alone"])


def test_what_does_not_fit_together_is_refused(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "_machine", lambda: None)
    assert "no point has 'd7'" in run(script, "--only", "d7", status=2)
    assert "no CUDA device is here" in run(script, status=2)
    assert "no forward-choices.json" in run(script, "--show", "--out", str(tmp_path), status=2)
