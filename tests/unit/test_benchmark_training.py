"""The benchmark of training, as far as a processor can show it: the step, attention's share, records and failures."""

import importlib
import json
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from onchip.audit import text as texts
from onchip.audit.gpt import Shape
from onchip.bench.memory import PeakMemory

FOLDER = Path(__file__).parents[2] / "benchmarks"
CPU = torch.device("cpu")
SIZES = {"layers": 2, "heads": 2, "width": 16, "vocabulary": 300, "tokens": 64, "rounds": 2, "curve-steps": 12}
SMALL = [str(part) for name, value in SIZES.items() for part in (f"--{name}", value)]
SMALL += ["--device", "cpu", "--dtype", "float32", "--curve-context", "8"]


@pytest.fixture(scope="module", autouse=True)
def on_path():
    """The folder of the scripts is no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield


@pytest.fixture
def training():
    return importlib.import_module("training")


@pytest.fixture
def cases():
    return importlib.import_module("training_cases")


@pytest.fixture
def no_child(training, monkeypatch):
    """Memory is measured in another process, which takes seconds to start: here it is said to be 3 GiB."""
    measured = PeakMemory(peak_bytes=3 * 2**30, method="none")
    monkeypatch.setattr(training, "measure_peak_memory", lambda call, device: measured)


def run(training, *arguments, status=0):
    result = CliRunner().invoke(training.app, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return " ".join(result.stdout.split()) if status == 0 else " ".join(result.output.split())


def small_case(cases, context=16):
    shape = Shape(layers=3, heads=2, width=16, context=context, vocabulary=300)
    return cases.Case(shape=shape, tokens=64, dtype="float32")


def test_a_small_run_is_recorded_and_shown_again(training, no_child, tmp_path):
    printed = run(training, *SMALL, "--context", "16,32", "--schedule", "tiled", "--out", tmp_path)
    assert run(training, "show", "--out", tmp_path) == printed
    record = json.loads((tmp_path / "training.json").read_text())
    names = ["onchip", "onchip tiled", "sdpa_flash", "eager"]
    for case, context in zip(record["cases"], (16, 32), strict=True):
        assert case["case"]["shape"]["context"] == context and case["tokens_per_step"] == 64
        assert [result["name"] for result in case["comparison"]["results"]] == names == list(case["peak_bytes"])
        assert [len(result["samples_ms"]) for result in case["comparison"]["results"]] == [2] * 4
        for share in case["attention"].values():
            assert 0 < share["attention_ms"] < share["step_ms"]
        # there is no cuDNN on a CPU, and that does not stop the others
        assert [failure["name"] for failure in case["failures"]] == ["sdpa_cudnn"]
    losses = record["curves"]["losses"]
    assert list(losses) == names and [len(values) for values in losses.values()] == [12] * 4
    for values in losses.values():
        assert values == pytest.approx(losses["eager"], abs=1e-4) and values[-1] < values[0]
    assert "3" in printed and "sdpa_cudnn at context 32 failed: RuntimeError" in printed
    assert "12 steps from one seed at context 8" in printed


def test_the_memory_of_a_step_is_measured(training, tmp_path):
    without = [part for name in ("sdpa_flash", "sdpa_cudnn", "eager") for part in ("--without", name)]
    run(training, *SMALL, "--context", "16", "--curve-steps", "0", *without, "--out", tmp_path)
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["cases"][0]["peak_bytes"]["onchip"] >= 0 and "curves" not in record
    assert record["cases"][0]["failures"] == []


def test_memory_that_runs_out_is_a_result_and_the_next_one_runs(training, cases, no_child, monkeypatch, tmp_path):
    def too_large(query, key, value):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 1 TiB")

    monkeypatch.setitem(cases.OTHERS, "sdpa_flash", too_large)
    printed = run(training, *SMALL, "--context", "16", "--out", tmp_path)
    record = json.loads((tmp_path / "training.json").read_text())
    assert [result["name"] for result in record["cases"][0]["comparison"]["results"]] == ["onchip", "eager"]
    assert list(record["curves"]["losses"]) == ["onchip", "eager"]
    assert "sdpa_flash at context 16 failed: OutOfMemoryError: CUDA out of memory." in printed


def test_a_failure_of_ours_is_the_exit_status(training, no_child, tmp_path):
    printed = run(training, *SMALL, "--context", "16", "--schedule", "hopper", "--out", tmp_path, status=1)
    assert "onchip hopper failed: Unsupported" in printed


class Slow(torch.autograd.Function):
    """Attention that takes 10 ms forward and 20 ms backward."""

    @staticmethod
    def forward(ctx, query, key, value):
        time.sleep(0.01)
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(0.02)
        return gradient, gradient, gradient


def test_attentions_share_is_its_forwards_and_backwards(cases):
    case = small_case(cases)
    training = cases.Training(case, CPU)
    windows = torch.randint(256, (case.batch, 17))
    share = cases.attention_share(training, Slow.apply, windows)
    assert 90 <= share.attention_ms < share.step_ms
    rest = share.step_ms - share.attention_ms
    quick = cases.attention_share(training, lambda query, key, value: value, windows)
    assert quick.attention_ms < 30 and quick.attention_ms < share.attention_ms - 60
    assert rest > 0


def test_the_marks_change_no_bit(cases):
    case, attend = small_case(cases), cases.contenders()["onchip"]
    windows = torch.randint(256, (case.batch, 17))
    plain, marked = cases.Training(case, CPU), cases.Training(case, CPU)
    plain.step(attend, windows)
    cases.attention_share(marked, attend, windows)
    for left, right in zip(plain.model.parameters(), marked.model.parameters(), strict=True):
        assert torch.equal(left, right)


def test_each_curve_is_of_its_own_attention(training, cases, monkeypatch):
    monkeypatch.setattr(training, "losses", lambda case, attend, text, steps, device: [attend] * steps)
    attends = cases.contenders()
    found = training.measure_curves(small_case(cases), attends, None, 2, CPU)
    assert found["losses"] == {name: [attend] * 2 for name, attend in attends.items()} and not found["failures"]


def test_every_contender_starts_from_the_same_weights_and_windows(cases):
    text = texts.Text("name", "", torch.randint(256, (500,), dtype=torch.uint8))
    measure = partial(cases.losses, small_case(cases), text=text, steps=3, device=CPU)
    found = [measure(attend) for name, attend in cases.contenders().items() if name != "sdpa_cudnn"]
    assert found[0] == measure(cases.contenders()["onchip"])
    for losses in found[1:]:
        assert losses == pytest.approx(found[0], abs=1e-5)


@pytest.mark.parametrize(("context", "batch", "tokens"), [(16, 4, 64), (64, 1, 64), (100, 1, 100), (48, 1, 48)])
def test_a_step_has_its_tokens_in_whole_windows(cases, context, batch, tokens):
    case = small_case(cases, context)
    assert (case.batch, case.tokens_per_step) == (batch, tokens)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--width 15", "width must be a multiple of heads: got width 15 and 2 heads"),
        ("--without flex", "--without: 'flex' is not one of sdpa_flash, sdpa_cudnn, eager"),
        ("--schedule fast", "--schedule: 'fast' is not one of"),
        ("--dtype float64", "--dtype is bfloat16 or float32: got 'float64'"),
        ("--context 9,x", "--context takes positive whole numbers"),
        ("show --out nowhere", "options of show stand after its name"),
    ],
)
def test_wrong_options_are_said_in_words(training, options, words):
    assert words in run(training, *SMALL, *options.split(), status=2)


def test_show_says_where_it_found_nothing(training, tmp_path):
    assert f"there is no training.json in {tmp_path}".split()[-1] in run(training, "show", "--out", tmp_path, status=2)
