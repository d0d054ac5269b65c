"""The command line: what it prints, where, and with which exit status."""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import onchip
from onchip import cli
from onchip.bench import ceilings
from onchip.bench.demo import lengths
from onchip.cli import app


def run(capsys, *arguments):
    status = app.run(list(arguments))
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_version(capsys):
    assert run(capsys, "--version") == (0, f"onchip {onchip.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], ["demo", "plan", "doctor", "--version", "Exact attention"]),
        (["demo", "--help"], ["--tokens", "--heads", "--no-causal", "--quick", "--no-model", "--output"]),
        (["plan", "--help"], ["--kv-heads", "--key-length", "--dim-value", "--window", "--dropout", "--json"]),
        (["plan", "--help"], ["--hardware", "h200", "mi300x", "epyc9654"]),
        (["doctor", "--help"], ["--json", "for what does not, why", "--measure", "--device"]),
        (
            ["io", "--help"],
            ["sweep", "simulate", "communication", "--chip-bytes", "--block-rows", "--fraction", "--json"],
        ),
        (["io", "sweep", "--help"], ["--over", "memory", "block", "length", "--direction", "--output"]),
        (["io", "simulate", "--help"], ["--algorithm", "--values", "--block-columns"]),
        (["io", "communication", "--help"], ["--devices", "--kv-heads", "--no-causal", "--json"]),
        (["audit", "--help"], ["--law", "normal, outliers, logits, one-hot", "--schedule", "--out", "drift"]),
        (["audit", "drift", "--help"], ["--text", "--layers", "--context", "--rate", "--picture", "--json"]),
    ],
)
def test_help_names_every_choice(capsys, monkeypatch, arguments, words):
    monkeypatch.setenv("COLUMNS", "120")
    status, out, err = run(capsys, *arguments)
    assert (status, err) == (0, "")
    text = " ".join(out.replace("│", " ").split())
    assert [word for word in words if word not in text] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "--dtype", "int8"], "'int8' is not one of"),
        (["plan", "--no-such-option"], "No such option: --no-such-option"),
        (["plan", "--window", "5"], "--window takes two whole numbers, LEFT,RIGHT: got '5'"),
        (["plan", "--window=-1,0"], "window"),
        (["plan", "--heads", "12", "--kv-heads", "5"], "12"),
        (["plan", "--dropout", "1.5"], "dropout"),
        (["plan", "--scale", "nan"], "scale"),
        (["plan", "--softcap", "-1"], "cap"),
        (["plan", "--schedule", "nonsense"], "'nonsense'"),
        (["plan", "--device", "toaster"], "--device takes cpu, cuda or cuda:<index>: got 'toaster'"),
        (["plan", "--device", "cuda:99"], "--device cuda:99: torch finds"),
        (["plan", "--hardware", "h199"], "--hardware takes one of a100, h100, h200"),
        (["plan", "--hardware", "h200", "--schedule", "nonsense"], "'nonsense'"),
        (["doctor", "--device", "cpu"], "--device goes with --measure"),
        (["doctor", "--measure", "--device", "cuda:99"], "--device cuda:99: torch finds"),
        (["io", "--dim", "0"], "--dim"),
        (["io", "--chip-bytes", "1"], "--chip-bytes: 1 bytes hold no element of float16"),
        (["io", "--block-rows", "64"], "--block-rows and --block-columns go together"),
        (["io", "--fraction", "1.5"], "--fraction"),
        (["io", "--length", "5", "sweep"], "options of sweep stand after its name: got length"),
        (["io", "sweep", "--over", "time"], "'time' is not one of"),
        (["io", "sweep", "--length", "0"], "--length: a sweep needs at least one token"),
        (["io", "sweep", "--output", "one.png"], "--output: one.png is one file"),
        (["io", "simulate", "--algorithm", "flash9"], "--algorithm takes names among textbook, eager, saved-weights"),
        (["io", "simulate", "--values", "--length", "10000"], "--values: 10000 x 10000 scores are too many"),
        (
            ["io", "communication", "--heads", "12", "--kv-heads", "5"],
            "heads must be a multiple of kv_heads, got 12 and 5",
        ),
        (["io", "communication", "--devices", "0"], "--devices"),
        (["audit", "--law", "cauchy"], "--law takes names among normal, outliers, logits, one-hot: got 'cauchy'"),
        (["audit", "--dtype", "int8"], "--dtype takes names among float16, bfloat16, float32, float64: got 'int8'"),
        (["audit", "--schedule", "nonsense"], "got 'nonsense'"),
        (["audit", "--length", "0"], "--length takes positive whole numbers separated by commas: got '0'"),
        (["audit", "drift", "--dtype", "float16"], "'float16' is not one of"),
        (["demo", "--tokens", "1024,many"], "--tokens takes positive whole numbers separated by commas"),
        (["demo", "--tokens", "0"], "--tokens takes positive whole numbers separated by commas"),
        (["demo", "--heads", "0"], "--heads"),
        (["dmo"], "No such command 'dmo'. Did you mean 'demo'?"),
    ],
)
def test_a_bad_argument_gets_one_line_and_status_2(capsys, arguments, words):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert err.startswith("onchip: ") and err.count("\n") == 1 and words in err


def test_an_interrupt_gets_one_line_and_status_130(capsys, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(lengths, "reference_attention", interrupted)
    status, _, err = run(capsys, "demo", "--quick", "--no-model")
    assert (status, err) == (130, "onchip: interrupted\n")


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_typer_or_rich_one_line_says_what_to_install(monkeypatch, missing):
    real = cli.importlib.util.find_spec
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None if name == missing else real(name))
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    # A message as the code of SystemExit is printed to standard error with status 1.
    assert ended.value.code == "onchip: the command line needs typer and rich: pip install 'onchip[cli]'"


def test_the_module_runs_as_a_program():
    command = [sys.executable, "-m", "onchip.cli", "plan", "--scale", "nan"]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stdout == "" and ended.stderr.count("\n") == 1


def test_plan_prints_the_plan_of_the_same_problem(capsys):
    status, out, err = run(capsys, "plan", "--length", "1000", "--causal", "--schedule", "dense")
    assert (status, err) == (0, "")
    query = torch.zeros(()).expand(1, 8, 1000, 64)
    assert out == f"{onchip.plan(query, query, query, causal=True, schedule='dense')}\n"


def test_plan_of_a_huge_problem_takes_no_memory(capsys):
    def peak_kib():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = peak_kib()
    options = "--batch 64 --heads 64 --length 4096 --dim 256 --json"
    status, out, _ = run(capsys, "plan", *options.split())
    assert status == 0
    # Each of the three tensors would take 16 GiB.
    assert peak_kib() - before < 2**20
    facts = json.loads(out)
    assert facts["computed_pairs"] == 64 * 64 * 4096**2
    assert facts["forward_flops"] == 4 * 256 * facts["computed_pairs"]


def test_plan_passes_every_option_on(capsys, monkeypatch):
    asked = {}

    def spy(query, key, value, **options):
        asked.update(options, shapes=[tuple(tensor.shape) for tensor in (query, key, value)], dtype=query.dtype)
        asked["score"] = repr(options["score"])
        return plan(query, key, value, **options)

    plan = onchip.plan
    monkeypatch.setattr(onchip, "plan", spy)
    options = "--batch 2 --heads 8 --kv-heads 2 --length 100 --key-length 200 --dim 32 --dim-value 16 --dtype bfloat16"
    more = "--causal --window 15, --softcap 30 --scale 0.5 --dropout 0.25 --deterministic --schedule dense"
    status, out, err = run(capsys, "plan", *options.split(), *more.split())
    assert (status, err) == (0, "")
    assert asked == {
        "shapes": [(2, 8, 100, 32), (2, 2, 200, 32), (2, 2, 200, 16)],
        "dtype": torch.bfloat16,
        "causal": True,
        "window": (15, None),
        "score": repr(onchip.scores.softcap(30.0)),
        "scale": 0.5,
        "dropout_p": 0.25,
        "deterministic": True,
        "schedule": "dense",
    }


def test_plan_for_a_device_that_is_not_here(capsys):
    options = "--hardware h100 --batch 2 --heads 16 --length 8192 --dim 128 --dtype float16 --schedule triton"
    status, out, err = run(capsys, "plan", *options.split(), "--json")
    assert (status, err) == (0, "")
    facts = json.loads(out)
    assert (facts["forward"], facts["backward"]) == ("triton", "triton")
    assert facts["hardware"] == {"name": "NVIDIA H100 SXM", "measured": False}
    bound = facts["roofline"]["forward"]
    assert bound["binding"] == "matrix products"
    assert bound["bound_us"] == bound["times_us"]["matrix products"] + bound["launch_us"]
    assert [kernel["name"] for kernel in facts["kernels"]["backward"]] == ["delta", "keys", "queries"]
    assert facts["kernels"]["forward"][0]["requested"]["flops"] == facts["forward_flops"]
    text = run(capsys, "plan", *options.split())[1]
    assert "NVIDIA H100 SXM: forward " in text and "us at least, bound by matrix products" in text
    status, out, err = run(capsys, "plan", "--hardware", "h100", "--schedule", "aten")
    assert (status, out) == (1, "") and "it is a kernel for the CPU" in err


def quick_measuring(monkeypatch, tmp_path):
    monkeypatch.setattr(ceilings, "ROUNDS", 1)
    monkeypatch.setattr(ceilings, "LONGEST_SIDE", 64)
    monkeypatch.setattr(ceilings, "available_memory_bytes", lambda device: 2**20)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_doctor_measures_and_plans_use_it(capsys, monkeypatch, tmp_path):
    quick_measuring(monkeypatch, tmp_path)
    assert "measured" not in run(capsys, "plan")[1]
    status, out, err = run(capsys, "doctor", "--measure", "--device", "cpu", "--json")
    assert status == 0
    facts = json.loads(out)
    assert facts["hardware"]["products"]["float32"]["source"].startswith("measured: torch.matmul")
    assert facts["measured_on"]["cores"] >= 1 and facts["measured_on"]["failures"] == {}
    assert json.loads(Path(facts["path"]).read_text())["hardware"] == facts["hardware"]
    assert f"roofline           {facts['hardware']['name']}: forward" in run(capsys, "plan")[1]
    assert facts["hardware"]["name"].endswith(", measured")


def test_doctor_prints_what_it_measured_and_from_what(capsys, monkeypatch, tmp_path):
    quick_measuring(monkeypatch, tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    status, out, err = run(capsys, "doctor", "--measure", "--device", "cpu")
    assert (status, err) == (0, "")
    for word in (
        "products, float32",
        "exponentials",
        "device memory",
        "a copy of",
        "Plans use these figures from now on",
    ):
        assert word in out


def test_doctor_says_where_it_cannot_store(capsys, monkeypatch, tmp_path):
    quick_measuring(monkeypatch, tmp_path)
    (tmp_path / "onchip").write_text("a file where a folder should be")
    status, _, err = run(capsys, "doctor", "--measure", "--device", "cpu")
    assert status == 1 and "cannot be written" in err and err.count("\n") == 1


def test_doctor_runs_every_schedule_and_compares_it(capsys):
    status, out, err = run(capsys, "doctor", "--json")
    assert (status, err) == (0, "")
    facts = json.loads(out)
    assert [item["name"] for item in facts["schedules"]] == list(onchip.dispatch.schedules())
    on_cpu = {item["name"]: item["checks"][0] for item in facts["schedules"]}
    assert on_cpu["dense"]["status"] == on_cpu["tiled"]["status"] == "runs"
    assert facts["packages"]["torch"] is not None


def test_doctor_finds_a_wrong_result(capsys, monkeypatch):
    right = onchip.attention
    monkeypatch.setattr(onchip, "attention", lambda *tensors, **options: right(*tensors, **options) * 1.001)
    status, out, _ = run(capsys, "doctor")
    assert status == 1
    assert "wrong" in out


def test_doctor_says_why_something_does_not_run(capsys, monkeypatch):
    def refuse(*tensors, schedule, **options):
        raise onchip.Unsupported("this problem", {schedule: ["there is no such chip here"]}, "another chip")

    monkeypatch.setattr(onchip, "attention", refuse)
    facts = json.loads(run(capsys, "doctor", "--json")[1])
    checks = [item["checks"][0] for item in facts["schedules"]]
    assert {check["status"] for check in checks} == {"does not run"}
    assert {check["detail"] for check in checks} == {"there is no such chip here"}


def test_doctor_prints_versions_devices_and_schedules(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    status, out, _ = run(capsys, "doctor")
    assert status == 0
    for word in (f"onchip {onchip.__version__}", "torch", "cpu:", "dense", "tiled", "runs"):
        assert word in out


def test_demo_prints_every_contender_and_draws_a_picture(capsys, tmp_path):
    picture = tmp_path / "pictures" / "demo.png"
    status, out, err = run(capsys, "demo", "--tokens", "64,96", "--heads", "2", "--no-model", "--output", str(picture))
    assert (status, err) == (0, "")
    assert picture.read_bytes().startswith(b"\x89PNG")
    for word in ("64", "96", "standard", "SDPA", "onchip", "time (ms)", "2 heads of 64, float32, causal"):
        assert word in out


def test_demo_says_where_standard_attention_does_not_fit(monkeypatch):
    monkeypatch.setattr(lengths, "available_memory_bytes", lambda device: 2**20)
    rows = {row.contender: row for row in lengths.run_lengths(lengths.Setting(heads=1), [512], lambda step: None)}
    assert rows["standard"].left_out == "does not fit: needs 0.0 GiB, 0.0 GiB are available"
    assert rows["standard"].time_ms is None
    assert rows["onchip"].left_out is None and rows["onchip"].time_ms > 0


def test_demo_says_what_would_take_too_long():
    setting = lengths.Setting(heads=1, call_limit_s=0.0)
    steps = []
    rows = list(lengths.run_lengths(setting, [64], steps.append))
    assert [row.left_out.split(":")[0] for row in rows] == ["too slow"] * 3
    assert len(steps) == lengths.steps([64])


@pytest.mark.parametrize("causal", [False, True])
def test_demo_measures_errors_against_float64(causal):
    setting = lengths.Setting(heads=2, causal=causal)
    for row in lengths.run_lengths(setting, [200], lambda step: None):
        assert 0 < row.out_error < 1e-5, row
        assert 0 < row.gradient_error < 1e-5, row
        assert row.peak_bytes > 0
