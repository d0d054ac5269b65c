"""The record of a measurement: counted operations, statistics, and JSON that reads back as what was written."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from onchip.bench import machine, protocol
from onchip.bench.machine import Gpu, GpuState, read_machine
from onchip.bench.protocol import Comparison, Failure, Method, Ratio, Record, Result, Workload


def make_workload(**change):
    arguments = {
        "batch": 2,
        "heads_query": 8,
        "heads_key": 2,
        "length_query": 1024,
        "length_key": 2048,
        "dim_query_key": 64,
        "dim_value": 32,
        "dtype": "torch.bfloat16",
        "direction": "forward",
    }
    return Workload.attention(**{**arguments, **change})


def make_record():
    method = Method(
        rounds=3,
        warmup_calls=1,
        order="rotated",
        timer="torch.cuda.Event",
        minimum_sample_ms=20.0,
        flush_bytes=0,
    )
    gpu = Gpu(
        multiprocessors=132,
        memory_bytes=2**37,
        l2_bytes=None,
        compute_capability="9.0",
        driver_version="580.1",
        power_limit_w=700.0,
        maximum_sm_clock_mhz=1980.0,
    )
    state = GpuState(sm_clock_mhz=1500.0, memory_clock_mhz=3201.0, power_draw_w=690.5, temperature_celsius=None)
    comparison = Comparison(
        method=method,
        reference="sdpa",
        results=(Result.of("sdpa", [2.0, 3.0, 4.0], 7), Result.of("onchip", [1.0, 1.5, 2.0], 9)),
        ratios=(Ratio.of("onchip", "sdpa", [0.5, 0.5, 0.5]),),
        failures=(Failure(name="other", error="RuntimeError: no", traceback="line\nline"),),
        gpu_before=state,
        gpu_after=None,
    )
    where = dataclasses.replace(read_machine(), device_type="cuda", device_name="NVIDIA H200", gpu=gpu)
    return Record.of("suite one", make_workload(), where, comparison)


def test_operations_of_each_direction():
    pairs = 2 * 8 * 1024 * 2048
    forward = 2 * pairs * (64 + 32)
    assert make_workload().visible_pairs == pairs
    assert make_workload().operations_flops == forward
    assert make_workload(direction="backward").operations_flops == forward * 5 // 2
    assert make_workload(direction="forward+backward").operations_flops == forward * 7 // 2


def test_causal_counts_half_and_a_mask_counts_its_own_pairs():
    assert make_workload(causal=True).operations_flops * 2 == make_workload().operations_flops
    assert make_workload(causal=True).mask == "causal"
    window = make_workload(mask="window (511, 0)", visible_pairs=1000)
    assert (window.mask, window.operations_flops) == ("window (511, 0)", 2 * 1000 * (64 + 32))


def test_key_sizes_default_to_those_of_the_query():
    workload = Workload.attention(
        batch=1, heads_query=4, length_query=10, dim_query_key=16, dtype="float32", direction="forward"
    )
    assert (workload.heads_key, workload.length_key, workload.dim_value) == (4, 10, 16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"direction": "sideways"}, "direction must be one of forward, backward, forward.backward: got 'sideways'"),
        ({"mask": "window"}, "a mask needs the count of its visible pairs"),
    ],
)
def test_a_workload_refuses_what_it_cannot_count(change, message):
    with pytest.raises(ValueError, match=message):
        make_workload(**change)


def test_speed_is_operations_over_the_median():
    record = make_record()
    assert record.speed_tflops("onchip") == pytest.approx(record.what.operations_flops / 1.5e-3 / 1e12)


def test_summaries_give_quartiles():
    result = Result.of("a", [5.0, 1.0, 3.0, 2.0, 4.0], 1)
    assert (result.minimum_ms, result.lower_quartile_ms, result.median_ms, result.upper_quartile_ms) == (1, 2, 3, 4)
    ratio = Ratio.of("a", "b", [2.0])
    assert (ratio.lower_quartile, ratio.median, ratio.upper_quartile, ratio.rounds) == (2.0, 2.0, 2.0, 1)


def test_json_reads_back_as_the_same_record_and_the_same_text():
    record = make_record()
    text = record.to_json()
    assert Record.from_json(text) == record
    assert Record.from_json(text).to_json() == text


def test_keys_have_the_order_of_the_fields():
    data = json.loads(make_record().to_json())
    assert list(data) == ["format", "suite", "created", "commit", "what", "where", "comparison"]
    assert list(data["what"]) == [field.name for field in dataclasses.fields(Workload)]


def test_every_physical_number_names_its_unit():
    plain = re.compile(
        r"format|batch|heads_|length_|dim_|visible_pairs|cores|threads|load_average|cudnn_version|multiprocessors"
        r"|rounds|_calls$|calls_per_sample|(comparison\.ratios.*\.(median|lower_quartile|upper_quartile))$"
    )
    unit = re.compile(r"_(ms|bytes|flops|mhz|w|celsius)$")

    def visit(value, path):
        if isinstance(value, dict):
            for key, item in value.items():
                visit(item, f"{path}.{key}" if path else key)
        elif isinstance(value, list):
            for item in value:
                visit(item, path)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            assert unit.search(path) or plain.search(path), path

    visit(json.loads(make_record().to_json()), "")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(format=99), "a record has format 1: got 99"),
        (lambda data: data.pop("suite"), r"record must have exactly its fields: missing \['suite'\], unknown \[\]"),
        (lambda data: data["where"].update(extra=1), r"record.where must have .* unknown \['extra'\]"),
        (lambda data: data["what"].update(batch="two"), "record.what.batch must be int: got 'two'"),
        (lambda data: data["what"].update(batch=True), "record.what.batch must be int: got True"),
        (
            lambda data: data["comparison"]["results"][1].update(samples_ms=["x"]),
            r"record.comparison.results\[1\].samples_ms\[0\] must be float: got 'x'",
        ),
    ],
)
def test_a_damaged_record_is_refused_with_the_place(change, message):
    data = json.loads(make_record().to_json())
    change(data)
    with pytest.raises(ValueError, match=message):
        Record.from_json(json.dumps(data))


def test_text_that_is_no_record_is_refused():
    with pytest.raises(ValueError, match="a record has format 1: got 'list'"):
        Record.from_json("[]")


def test_not_a_number_is_never_written():
    record = make_record()
    broken = dataclasses.replace(record.comparison, results=(Result.of("a", [float("nan")], 1),))
    with pytest.raises(ValueError, match="not JSON compliant"):
        dataclasses.replace(record, comparison=broken).to_json()


def test_samples_can_be_left_out():
    short = make_record().comparison.without_samples()
    assert [result.samples_ms for result in short.results] == [(), ()]
    assert short.result("sdpa").median_ms == 3.0


def test_write_makes_the_directory_and_one_file_named_after_the_workload(tmp_path):
    record = make_record()
    path = record.write(tmp_path / "deep" / "er")
    assert path.name == "suite-one-forward-b2-h8of2-n1024x2048-d64x32-bfloat16-dense-mask-none.json"
    assert Record.from_json(path.read_text()) == record
    assert record.write(tmp_path / "deep" / "er") == path
    assert len(list(path.parent.iterdir())) == 1


def test_the_default_directory_is_named_after_the_device():
    assert protocol.default_directory(make_record().where) == Path("benchmarks/results/nvidia-h200")


def test_the_machine_is_described():
    where = read_machine("cpu")
    assert where.device_type == "cpu"
    assert where.device_name == where.processor != ""
    assert where.cores >= 1 and where.threads >= 1
    assert where.gpu is None
    assert where.torch_version.startswith(machine.installed_version("torch").split("+")[0])
    assert machine.installed_version("no-such-package-here") is None
    assert machine.read_gpu_state("cpu") is None


def test_available_memory_is_within_the_memory_of_the_machine():
    available, total = machine.available_memory_bytes(), machine.total_memory_bytes()
    assert available is None or total is None or 0 < available <= total


def test_the_commit_is_that_of_the_repository_that_tracks_the_source(tmp_path, monkeypatch):
    monkeypatch.setattr(protocol, "__file__", str(tmp_path / "protocol.py"))
    assert protocol.read_commit() is None


@pytest.mark.gpu
def test_a_gpu_is_described():
    where = read_machine("cuda")
    assert where.device_type == "cuda" and where.gpu.multiprocessors > 0
    assert where.cuda_version is not None
    state = machine.read_gpu_state("cuda")
    assert state is None or state.sm_clock_mhz > 0
