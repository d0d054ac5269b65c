"""Figures of devices: that each has a source, how they scale, and what becomes of a stored file."""

import json
import math
from dataclasses import fields, replace

import pytest
import torch
from hypothesis import given, strategies

from onchip.bench import ceilings
from onchip.model import hardware, presets
from onchip.model.hardware import Figure, Hardware, read_measured, write_measured
from onchip.model.presets import PRESETS, hardware_of, preset_of

CPU = torch.device("cpu")


def figures(device):
    """Every figure of a device by name."""
    found = {f"products {name}": figure for name, figure in device.products.items()}
    for field in fields(Hardware):
        if isinstance(getattr(device, field.name), Figure):
            found[field.name] = getattr(device, field.name)
    return found


@pytest.mark.parametrize("name", PRESETS)
def test_every_figure_has_a_source_and_a_unit(name):
    for what, figure in figures(PRESETS[name]).items():
        assert 0 < figure.value < math.inf, what
        assert len(figure.source.split()) >= 3 or figure.source.startswith("NVIDIA"), (what, figure.source)
        assert figure.unit in ("FLOP/s", "B/s", "B", "Hz", "1/s", "s", "SMs", "compute units", "cores"), what


@pytest.mark.parametrize("name", PRESETS)
def test_the_cache_is_faster_than_device_memory(name):
    assert PRESETS[name].exchange.value > 2 * PRESETS[name].device_memory.value


def test_an_h100_has_256_times_fewer_exponentials_than_operations():
    """Shah et al. 2024, FlashAttention-3, section 3.1: 989 TFLOPS of FP16 products, 3.9 of exponentials."""
    device = PRESETS["h100"]
    assert device.products["float16"].value == pytest.approx(989e12, rel=1e-3)
    assert device.exponentials.value == pytest.approx(3.9e12, rel=0.01)
    assert device.products["float16"].value / device.exponentials.value == pytest.approx(256, rel=1e-3)
    assert device.clock.value == pytest.approx(1830e6, rel=1e-3)


def test_rates_fit_clocks():
    """Operations a clock on each multiprocessor are what the makers say: 1024 multiply-adds, 2048, 4096."""
    for name, operations in (("a100", 2048), ("h100", 4096), ("h200", 4096), ("b200", 8192), ("rtx4090", 512)):
        device = PRESETS[name]
        cycles = device.processors.value * device.clock.value
        assert device.products["bfloat16"].value / cycles == pytest.approx(operations, rel=5e-3), name


def test_float32_from_three_products_in_tf32():
    device = PRESETS["h200"]
    assert device.product_rate("tf32x3") == device.products["tf32"].value / 3
    assert device.product_rate("bfloat16") == device.products["bfloat16"].value
    assert device.product_rate("int3") is None and PRESETS["epyc9654"].product_rate("tf32x3") is None


@given(strategies.integers(1, 500))
def test_a_part_of_a_processor(cores):
    whole = PRESETS["epyc9654"]
    part = whole.scaled(cores)
    share = cores / 96
    assert part.processors.value == cores and f"{cores} of 96" in part.name
    assert part.products["float32"].value == pytest.approx(share * whole.products["float32"].value)
    assert part.exponentials.value == pytest.approx(share * whole.exponentials.value)
    assert (part.device_memory, part.cache_size) == (whole.device_memory, whole.cache_size)
    with pytest.raises(ValueError, match="at least one processor, got 0"):
        whole.scaled(0)


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GeForce RTX 4090 D", None),
    ],
)
def test_a_preset_is_for_one_name(monkeypatch, name, preset):
    monkeypatch.setattr(presets, "device_name", lambda device: name)
    assert preset_of(torch.device("cuda")) is (None if preset is None else PRESETS[preset])


# Stored figures


def stored(tmp_path, device=PRESETS["h200"]):
    path = tmp_path / "hardware" / "device.json"
    write_measured(path, replace(device, measured=True), {"device_name": "test"})
    return path


@pytest.mark.parametrize("name", PRESETS)
def test_figures_come_back_from_their_file(tmp_path, name):
    path = stored(tmp_path, PRESETS[name])
    assert read_measured(path) == replace(PRESETS[name], measured=True)
    assert [entry.name for entry in path.parent.iterdir()] == ["device.json"]
    assert json.loads(path.read_text())["measured_on"] == {"device_name": "test"}


def test_a_file_that_is_not_there_or_no_file_is_ignored(tmp_path):
    assert read_measured(tmp_path / "nothing.json") is None
    assert read_measured(tmp_path) is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "null", '"text"', '{"format": 1}', '{"format": 0, "hardware": {}}', "\0\xff"]
)
def test_a_broken_file_is_ignored(tmp_path, text):
    path = tmp_path / "device.json"
    path.write_text(text, encoding="latin-1")
    assert read_measured(path) is None


VALUES = strategies.sampled_from([None, -1, 0, 1e999, "fast", [], {}, {"value": 1}, True])


@given(
    field=strategies.sampled_from([field.name for field in fields(Hardware) if field.name not in ("cache", "launch")]),
    value=VALUES,
    drop=strategies.booleans(),
)
def test_a_field_of_the_wrong_kind_is_no_figure(tmp_path_factory, field, value, drop):
    path = stored(tmp_path_factory.mktemp("stored"))
    record = json.loads(path.read_text())
    if drop:
        del record["hardware"][field]
    elif field in ("name", "device_type", "architecture", "measured") or (field == "products" and value == {}):
        return
    else:
        record["hardware"][field] = value
    path.write_text(json.dumps(record))
    assert read_measured(path) is None


def test_a_file_of_another_format_is_ignored(tmp_path):
    path = stored(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": hardware.FORMAT + 1}))
    assert read_measured(path) is None


def test_a_file_cut_anywhere_is_ignored(tmp_path):
    path = stored(tmp_path)
    text = path.read_text()
    for end in range(0, len(text) - 2, 97):
        path.write_text(text[:end])
        assert read_measured(path) is None


def test_measured_figures_win_where_they_fit(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    threads = torch.get_num_threads()
    assert hardware_of(CPU) == PRESETS["epyc9654"].scaled(threads)
    path = hardware.measured_path(CPU)
    assert path.is_relative_to(tmp_path / "onchip" / "hardware") and path.suffix == ".json"
    measured = replace(PRESETS["epyc9654"].scaled(threads), measured=True, name="this one")
    write_measured(path, measured, {})
    assert hardware_of(CPU) == measured
    write_measured(path, replace(measured, processors=Figure(threads + 1, "cores", "other threads than now")), {})
    assert not hardware_of(CPU).measured
    path.write_text("broken")
    assert not hardware_of(CPU).measured


def test_the_cache_folder_is_that_of_the_user_by_default(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hardware.measured_path(CPU).is_relative_to(tmp_path / ".cache" / "onchip" / "hardware")


# Measuring


@pytest.fixture
def quick(monkeypatch):
    """Small products and few samples."""
    monkeypatch.setattr(ceilings, "ROUNDS", 1)
    monkeypatch.setattr(ceilings, "WARMUP", 0)
    monkeypatch.setattr(ceilings, "LONGEST_SIDE", 64)
    monkeypatch.setattr(ceilings, "available_memory_bytes", lambda device: 2**20)


def test_measuring_takes_as_many_steps_as_it_says(quick):
    steps = []
    found = ceilings.measure(CPU, steps.append)
    assert len(steps) == ceilings.steps(CPU) == len(set(steps))
    assert found.failures == {} and set(found.spreads) == set(steps)
    assert found.hardware.measured and found.hardware.processors.value == torch.get_num_threads()
    taken = {name for name, figure in figures(found.hardware).items() if figure.source.startswith("measured: ")}
    assert taken == {
        "products float16", "products bfloat16", "products float32", "products float64",
        "device_memory", "exponentials", "launch",
    }  # fmt: skip


def test_what_cannot_be_measured_is_the_presets(quick, monkeypatch):
    def broken(*tensors, **options):
        raise RuntimeError("no such unit\nin detail")

    monkeypatch.setattr(torch, "exp2", broken)
    found = ceilings.measure(CPU, lambda step: None)
    assert found.failures == {"exponentials": "RuntimeError: RuntimeError: no such unit"}
    assert found.hardware.exponentials == preset_of(CPU).exponentials
    assert found.hardware.products["float32"].source.startswith("measured: ")


def test_an_interrupt_is_no_failure(quick, monkeypatch):
    def interrupted(*tensors, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "exp2", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ceilings.measure(CPU, lambda step: None)


def test_products_in_float32_are_asked_for_as_their_name_says(quick, monkeypatch):
    matmul, asked = torch.backends.cuda.matmul, []
    real = torch.matmul
    monkeypatch.setattr(
        torch, "matmul", lambda *tensors, **options: asked.append(matmul.fp32_precision) or real(*tensors, **options)
    )
    before = matmul.fp32_precision
    gauge = ceilings._CpuGauge(CPU)
    for precision, expected in (("tf32", "tf32"), ("float32", "ieee")):
        asked.clear()
        gauge._products(precision)
        assert set(asked) == {expected}
    assert matmul.fp32_precision == before
