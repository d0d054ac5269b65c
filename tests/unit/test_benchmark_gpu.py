"""The benchmark of the GPU, as far as a processor can show it: cases, calls that agree, records and their table."""

import dataclasses
import importlib
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from typer.testing import CliRunner

from onchip.bench.machine import read_machine
from onchip.bench.protocol import Comparison, Failure, Method, Ratio, Record, Result

FOLDER = Path(__file__).parents[2] / "benchmarks"
OURS = "onchip tiled"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """The script and what it is made of as modules; their folder is no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield {
            name: importlib.import_module(name)
            for name in ("gpu", "gpu_cases", "gpu_inputs", "gpu_contenders", "gpu_calls")
        }


@pytest.fixture
def gpu(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["gpu"]


@pytest.fixture
def cases(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["gpu_cases"]


@pytest.fixture
def contenders(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["gpu_contenders"]


@pytest.fixture
def calls(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["gpu_calls"]


@pytest.fixture
def small(gpu: ModuleType, cases: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script with a processor for its GPU and cases that fit it."""

    def shrunk(*options: Any) -> Any:
        return [dataclasses.replace(case, tokens=2 * case.length, width=32) for case in cases.cases(*options)]

    monkeypatch.setattr(gpu, "_machine", read_machine)
    monkeypatch.setattr(gpu, "cases", shrunk)
    return gpu


SMALL = ("--schedule", "tiled", "--without", "flex", "--dims", "16", "--lengths", "160", "--rounds", "2")


def run(gpu: ModuleType, *arguments: str, status: int = 0) -> str:
    """What a command line prints on standard output, or all that it prints where it fails."""
    result = CliRunner().invoke(gpu.app, arguments)
    assert result.exit_code == status, result.output
    return result.output if status else result.stdout


def rows(text: str) -> list[list[str]]:
    """The cells of the rows of the printed table."""
    return [re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if re.match(r"(fwd|bwd)\S* d\d", line)]


def record(case: Any, times_ms: dict[str, float | None]) -> Record:
    """A record with these times; None failed."""
    names = [name for name in times_ms if times_ms[name] is not None]
    reference = next(iter(times_ms))
    comparison = Comparison(
        method=Method(rounds=2, warmup_calls=1, order="", timer="", minimum_sample_ms=20.0, flush_bytes=0),
        reference=reference,
        results=tuple(Result.of(name, [times_ms[name]] * 2, 1) for name in names),
        ratios=tuple(
            Ratio.of(name, reference, [times_ms[name] / times_ms[reference]] * 2)
            for name in names
            if reference in names and name != reference
        ),
        failures=tuple(
            Failure(name=name, error=f"RuntimeError: {'no kernel ' * 20}", traceback="")
            for name in times_ms
            if name not in names
        ),
        gpu_before=None,
        gpu_after=None,
    )
    return Record.of("gpu", case.what, read_machine(), comparison)


def default_cases(cases: ModuleType) -> Any:
    return cases.cases(("forward", "backward"), (64, 128), (2048, 8192), ("bfloat16",))


def test_the_contenders(contenders: ModuleType) -> None:
    entered = contenders.contestants(["tiled", "dense"], ["flex", "fa4", "sdpa_flash"])
    names = [contestant.name.split()[0] for contestant in entered]
    assert names == ["onchip", "onchip", "sdpa_flash", "flex", "fa4"]
    assert [contenders.word(contestant.name) for contestant in entered] == names
    assert set(contenders.TAKES) == set(contenders.MAKERS) == set(contenders.OTHERS)


def test_the_default_cases(cases: ModuleType) -> None:
    found = default_cases(cases)
    assert len({case.name for case in found}) == len({case.what for case in found}) == len(found) == 16
    assert all(case.batch * case.length == 16384 and case.heads * case.dim == 2048 for case in found)
    assert found[0].name == "forward d64 n2048 full bfloat16"
    assert found[-1].name == "backward d128 n8192 causal bfloat16"


def test_operations_count_half_under_a_causal_mask_and_more_in_the_backward(cases: ModuleType) -> None:
    def count(direction: str, causal: bool) -> int:
        case = cases.Case(direction=direction, dim=128, length=8192, causal=causal)
        return case.what.operations_flops

    forward = 4 * 2 * 16 * 8192**2 * 128
    assert (count("forward", False), count("forward", True)) == (forward, forward // 2)
    assert (count("backward", False), count("backward", True)) == (forward * 5 // 2, forward * 5 // 4)


def test_tensors_lie_as_the_layout_says(cases: ModuleType, modules: dict[str, ModuleType]) -> None:
    case = cases.Case(direction="backward", dim=16, length=24, causal=False, tokens=48, width=32)
    inputs = modules["gpu_inputs"].draw(case, CPU)
    tensors = (*inputs.tensors, inputs.gradient)
    assert [tensor.requires_grad for tensor in tensors] == [True, True, True, False]
    for tensor in tensors:
        assert (tensor.shape, tensor.dtype) == ((2, 2, 24, 16), torch.bfloat16)
        assert tensor.is_leaf and tensor.transpose(1, 2).is_contiguous()


def test_a_difference_shows_wherever_it_is(calls: ModuleType) -> None:
    expected = torch.randn(2, 300, 8) * torch.linspace(1, 0.01, 300)[:, None]
    assert calls.difference(expected, expected) == 0
    assert calls.difference(expected * 1.01, expected) == pytest.approx(0.01, rel=1e-3)
    late = expected.clone()
    late[1, 256:] = 0
    assert calls.difference(late, expected) == pytest.approx(1)
    late[1, 299, 3] = torch.nan
    assert not calls.difference(late, expected) < calls.TOLERANCE
    with pytest.raises(calls.WrongResult, match="shape"):
        calls.difference(expected[:, 1:], expected)


@pytest.mark.parametrize("direction", ["forward", "backward", "forward+backward"])
def test_a_wrong_result_is_not_timed(
    cases: ModuleType, calls: ModuleType, contenders: ModuleType, direction: str
) -> None:
    case = cases.Case(direction=direction, dim=16, length=96, causal=True, dtype="float32", tokens=96, width=32)

    def other(causal: bool, case: Any, inputs: Any) -> Callable[..., Tensor]:
        return partial(F.scaled_dot_product_attention, *inputs.tensors, is_causal=causal)

    entered = contenders.contestants(["tiled"], [])
    entered += [contenders.Contestant(name=name, make=partial(other, name == "right")) for name in ("right", "wrong")]
    made = calls.prepare(case, entered, CPU)
    assert list(made) == [OURS, "right", "wrong"]
    results = made["right"]()
    assert len(results) == 3 if direction != "forward" else isinstance(results, Tensor)
    with pytest.raises(calls.WrongResult, match="differs from onchip tiled by"):
        made["wrong"]()


def test_flash_attention_gets_its_own_layout(
    cases: ModuleType, calls: ModuleType, contenders: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = []

    def flash_attn_func(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[Tensor, None]:
        shapes.append(query.shape)
        views = (tensor.transpose(1, 2) for tensor in (query, key, value))
        return F.scaled_dot_product_attention(*views, is_causal=causal).transpose(1, 2), None

    module = ModuleType("flash_attn.cute")
    module.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    monkeypatch.setattr(contenders, "installed_version", {"flash-attn-4": "4.0"}.get)
    case = cases.Case(direction="backward", dim=16, length=96, causal=True, tokens=192, width=32)
    made = calls.prepare(case, contenders.contestants(["tiled"], contenders.PEERS), CPU)
    assert list(made) == [OURS, "fa3", "fa4 4.0"]
    assert shapes == [(2, 96, 2, 16)]
    assert len(made["fa4 4.0"]()) == 3
    with pytest.raises(ModuleNotFoundError):
        made["fa3"]()


def test_records_parse_and_print_the_same_table(small: ModuleType, tmp_path: Path) -> None:
    options = (*SMALL, "--peers", "--out", str(tmp_path))
    text = run(small, *options)
    # No cuDNN is here and no other package; that stops nothing, and what is not installed has not failed.
    assert "sdpa_cudnn failed in 4 of 4, first fwd d16 n160 full: RuntimeError" in text
    assert "fa3 failed" not in text and all(row[-2:] == ["not here"] * 2 for row in rows(text))
    assert [row[0] for row in rows(text)] == [
        "fwd d16 n160 full",
        "fwd d16 n160 causal",
        "bwd d16 n160 full",
        "bwd d16 n160 causal",
    ]
    records = [Record.from_json(path.read_text()) for path in tmp_path.iterdir()]
    assert len(records) == 4
    for found in records:
        assert (found.suite, found.what.batch, found.what.heads_query) == ("gpu", 2, 2)
        assert found.comparison.reference == found.comparison.results[0].name == OURS
        assert [failure.name.split()[0] for failure in found.comparison.failures][-2:] == ["fa3", "fa4"]
    assert run(small, "--show", *options) == text


def test_where_onchip_fails_the_others_are_timed_and_the_status_says_so(
    small: ModuleType, contenders: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*inputs: Any, **options: Any) -> Any:
        raise RuntimeError("out of order")

    monkeypatch.setattr(contenders.onchip, "attention", refuse)
    text = run(small, *SMALL, "--only", "forward d16 n160 full", "--out", str(tmp_path), status=1)
    assert "onchip tiled failed in 1 of 1, first fwd d16 n160 full: RuntimeError: out of order" in text
    ((_, ours, flash, _),) = rows(text)
    assert ours == "failed" and re.fullmatch(r"\d+\.\d", flash)


def test_a_broken_device_ends_the_run_and_keeps_what_was_measured(
    small: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measure = small.measure

    def broken(case: Any, *others: Any) -> Record:
        if case.direction == "backward":
            raise RuntimeError("illegal memory access")
        return measure(case, *others)

    monkeypatch.setattr(small, "measure", broken)
    text = run(small, *SMALL, "--out", str(tmp_path), status=1)
    assert "stopped: RuntimeError: illegal memory access" in text
    assert len(rows(text)) == len(list(tmp_path.iterdir())) == 2


def test_the_table_shows_speeds_and_ratios_and_is_short(gpu: ModuleType, cases: ModuleType, tmp_path: Path) -> None:
    for case in default_cases(cases):
        flops = case.what.operations_flops
        record(
            case,
            {
                "onchip triton": flops / 512e9,
                "sdpa_flash": flops / 341e9,
                "sdpa_cudnn": flops / 64.25e9 if case.causal else None,
                "flex": flops / 376e9,
                "fa3 0.0.3": flops / 640e9 if case.direction == "forward" else None,
                "fa4 4.0.0b36": flops / 1024e9,
            },
        ).write(tmp_path)
    text = run(gpu, "--show", "--out", str(tmp_path))
    lines = text.splitlines()
    assert len(lines) <= 25 and max(map(len, lines)) < 100
    assert len(rows(text)) == 16
    full = ["fwd d64 n2048 full", "512", "341 1.50x", "failed", "376 1.36x", "640 0.80x", "1024 0.50x"]
    causal = ["bwd d128 n8192 causal", "512", "341 1.50x", "64.2 7.97x", "376 1.36x", "failed", "1024 0.50x"]
    assert (rows(text)[0], rows(text)[-1]) == (full, causal)
    assert "sdpa_cudnn failed in 8 of 16, first fwd d64 n2048 full: RuntimeError: no kernel" in text
    assert "1.20x: onchip triton is 1.2 times as fast, median of 2 rounds; quartiles at most 0.0% apart" in text
    assert len(rows(run(gpu, "--show", "--dims", "128", "--only", "causal", "--out", str(tmp_path)))) == 4


def test_wrong_options_are_refused(gpu: ModuleType, small: ModuleType, tmp_path: Path) -> None:
    assert "no case has 'nothing' in its name" in run(gpu, "--only", "nothing", status=2)
    assert "no records of these cases" in run(gpu, "--show", "--out", str(tmp_path), status=2)
    assert "--dims: 'x' is not a number" in run(gpu, "--dims", "64,x", status=2)
    assert "--directions: 'sideways' is not one of forward," in run(gpu, "--directions", "sideways", status=2)
    assert "--without: 'fa2' is not one of sdpa_flash," in run(gpu, "--schedule", "tiled", "--without", "fa2", status=2)
    assert "--schedule: 'none' is not one of" in run(gpu, "--schedule", "none", status=2)


def test_without_a_gpu_nothing_is_timed(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_machine", lambda: None)
    assert "no CUDA device is here" in run(gpu, "--schedule", "tiled", status=2)
