"""The command line: what it prints, where, and with which exit status."""

import json
import resource
import subprocess
import sys

import pytest
import torch

import onchip
from onchip import cli
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
        (["doctor", "--help"], ["--json", "for what does not, why"]),
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
