"""The benchmark of the processor: verdicts, records that print the same table again, and the grid of schedules."""

import dataclasses
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner

import onchip
from onchip.bench.demo.sentences import ModelMissing
from onchip.bench.protocol import Record

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def cpu() -> Iterator[ModuleType]:
    """The script as a module; its folder is no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield importlib.import_module("cpu")


@pytest.fixture
def small(cpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script with the lengths of --quick in every run, so that a run that writes is as short."""
    every, grid = cpu.cases, cpu.points
    monkeypatch.setattr(cpu, "cases", lambda quick: every(True))
    monkeypatch.setattr(cpu, "points", lambda quick: [grid(True)[0], grid(True)[-1]])
    return cpu


def run(cpu: ModuleType, *arguments: str, status: int = 0) -> str:
    """What a command line prints on standard output, or all that it prints where it fails."""
    result = CliRunner().invoke(cpu.app, arguments)
    assert result.exit_code == status, result.output
    return result.output if status else result.stdout


def table(text: str) -> list[list[str]]:
    """The cells of the rows of the printed tables."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]


def case_with(cpu: ModuleType, **change: Any) -> Any:
    return dataclasses.replace(cpu.cases(True)[0], group=None, **change)


@pytest.mark.parametrize(
    ("number", "less_is_better", "expected"),
    [
        (1.2, False, "met"),
        (1.199, False, "over floor"),
        (1.0, False, "over floor"),
        (0.999, False, "under"),
        (40.0, True, "met"),
        (40.1, True, "over floor"),
        (60.0, True, "over floor"),
        (60.1, True, "under"),
        (-3.0, True, "met"),
    ],
)
def test_verdicts_at_goal_and_floor(cpu: ModuleType, number: float, less_is_better: bool, expected: str) -> None:
    goal, floor = (40.0, 60.0) if less_is_better else (1.2, 1.0)
    assert cpu.verdict(number, goal, floor, less_is_better=less_is_better) == expected


def test_every_case_has_its_own_record_and_a_floor_behind_its_goal(cpu: ModuleType) -> None:
    for cases in (cpu.cases(), cpu.cases(True)):
        assert len({(cpu.suite(case), case.direction) for case in cases}) == len(cases)
        assert all(case.floor > case.goal if case.difference else case.floor < case.goal for case in cases)


def test_quick_runs_and_writes_nothing(cpu: ModuleType, tmp_path: Path) -> None:
    text = run(cpu, "--quick", "--only", "float32 n256 d64 causal", "--out", str(tmp_path / "new"))
    assert [row[:2] for row in table(text)] == [
        ["float32 n256 d64 causal", "forward"],
        ["float32 n256 d64 causal", "forward+backward"],
        ["float32: median of 2", ""],
    ]
    assert all(row[-1] in ("met", "over floor", "under") for row in table(text))
    assert re.search(r"Load average: \S+ before, \S+ after", text)
    assert list(tmp_path.iterdir()) == []


def test_records_parse_and_print_the_same_table(small: ModuleType, tmp_path: Path) -> None:
    options = ("--only", "float32 n256 d64 full", "--out", str(tmp_path))
    rows = table(run(small, "--rounds", "3", *options))
    records = {
        record.what.direction: record for record in (Record.from_json(path.read_text()) for path in tmp_path.iterdir())
    }
    assert len(rows) == 3 and len(records) == len(list(tmp_path.iterdir())) == 2
    for name, direction, *cells in rows[:2]:
        record = records[direction]
        (ratio,) = record.comparison.ratios
        assert record.suite == f"cpu-{name.replace(' ', '-')}"
        assert (ratio.name, ratio.reference, ratio.rounds) == ("torch", "onchip", 3)
        assert cells[2:4] == [f"{ratio.median:.3f}", f"{ratio.lower_quartile:.3f} to {ratio.upper_quartile:.3f}"]
    assert table(run(small, "--show", *options)) == rows


def test_the_eager_call_is_a_difference_in_microseconds(small: ModuleType, tmp_path: Path) -> None:
    options = ("--only", "eager", "--out", str(tmp_path))
    rows = table(run(small, "--rounds", "1", *options))
    for path in tmp_path.iterdir():
        record = Record.from_json(path.read_text())
        ours, theirs = (record.comparison.result(name).median_ms for name in ("onchip", "torch"))
        (row,) = (row for row in rows if row[1] == record.what.direction)
        assert row[4] == f"{(ours - theirs) * 1e3:+.1f} µs"
    assert [row[6:8] for row in rows] == [["40 µs", "60 µs"], ["70 µs", "100 µs"]]
    assert table(run(small, "--show", *options)) == rows


def test_a_contender_that_raises_fails_its_case_only(
    cpu: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    good = case_with(cpu, name="good")

    def broken() -> Any:
        def call() -> None:
            raise RuntimeError("out of order")

        return dataclasses.replace(good.prepare(), ours=call)

    cases = [case_with(cpu, name="broken", prepare=broken), good]
    monkeypatch.setattr(cpu, "cases", lambda quick: cases)
    text = run(cpu, "--rounds", "1", "--out", str(tmp_path), status=1)
    assert [(row[0], row[-1] == "failed") for row in table(text)] == [("broken", True), ("good", False)]
    assert "broken, forward: onchip failed: RuntimeError: out of order" in text


def test_a_missing_model_is_left_out_with_its_reason(cpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise ModelMissing("not installed: pip install it")

    cases = [case_with(cpu, name="minilm", prepare=missing)]
    monkeypatch.setattr(cpu, "cases", lambda quick: cases)
    assert "minilm left out: not installed: pip install it" in run(cpu, "--quick")


def test_the_grid_is_written_and_shown(small: ModuleType, tmp_path: Path) -> None:
    options = ("--choices", "--only", "choices", "--out", str(tmp_path))
    rows = table(run(small, "--rounds", "1", *options))
    assert [path.name for path in tmp_path.iterdir()] == ["choices.json"]
    data = json.loads((tmp_path / "choices.json").read_text())
    assert set(data) == {"format", "created", "commit", "where", "rows"}
    first = data["rows"][0]
    times = first.pop("times_ms")
    assert first == {
        "direction": "forward",
        "dtype": "float32",
        "batch": 1,
        "heads": 1,
        "length": 16,
        "dim": 64,
        "kind": "plain",
    }
    assert set(times) <= set(onchip.dispatch.schedules()) and len(times) >= 2
    fastest, following, *_ = sorted(times, key=times.__getitem__)
    assert rows[0][7:] == [fastest, f"{times[fastest]:.3f}", following, f"{times[following] / times[fastest]:.2f}"]
    assert table(run(small, "--show", *options)) == rows


def test_a_schedule_that_cannot_run_a_point_is_left_out(cpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    attention = onchip.attention

    def refuse(*inputs: Any, schedule: Any, **options: Any) -> Any:
        if schedule == "tiled":
            raise onchip.Unsupported("this", {"tiled": ["it refuses"]}, "another")
        return attention(*inputs, schedule=schedule, **options)

    monkeypatch.setattr(onchip, "attention", refuse)
    backward = next(point for point in cpu.points(True) if point.direction == "backward")
    names = set(backward.contenders())
    assert "tiled" not in names and "dense" in names


def test_wrong_options_are_refused(cpu: ModuleType, tmp_path: Path) -> None:
    assert "no case has 'nothing' in its name" in run(cpu, "--only", "nothing", status=2)
    assert "no records of these cases" in run(cpu, "--show", "--out", str(tmp_path), status=2)
    assert "--quick writes none" in run(cpu, "--show", "--quick", status=2)


def test_sentences_grow_and_are_the_same_every_time(cpu: ModuleType) -> None:
    sentences = importlib.import_module("cpu_cases").sentences
    texts = sentences(64, 100)
    counts = [len(text.split()) for text in texts]
    assert (len(texts), counts[0], counts[-1]) == (64, 1, 100)
    assert counts == sorted(counts) and len(set(texts)) == 64
    assert texts == sentences(64, 100)
