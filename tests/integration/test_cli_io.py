"""`onchip io`: what it prints, draws and returns."""

import json

import pytest

from onchip.bench import io_plots
from onchip.cli import app, io_runs
from onchip.model import forms
from onchip.model.communication import SCHEMES, Sharding
from onchip.model.io import ALGORITHMS, Sizes, cost
from onchip.model.shape import Blocks, Shape

SMALL = ("--batch=1", "--heads=2", "--length=70", "--key-length=50", "--dim=8", "--dim-value=4", "--chip-bytes=2000")


def run(capsys, *arguments):
    status = app.run(list(arguments))
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def facts(capsys, *arguments):
    status, out, err = run(capsys, *arguments, "--json")
    assert (status, err) == (0, "")
    return json.loads(out)


def test_the_default_is_figure_2_and_says_what_fits_it(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    status, out, err = run(capsys, "io")
    assert (status, err) == (0, "")
    for word in ("40.27", "24.70", "15.57", "25.23", "4.38", "Figure 2", "66.6 and 75.2 GFLOP", "824.6 and 962.1"):
        assert word in out
    assert set(ALGORITHMS) <= set(out.replace("│", " ").split())


def test_another_shape_gets_no_note_on_figure_2(capsys):
    for option in (
        ["--length", "1000"],
        ["--direction", "forward"],
        ["--chip-bytes", "100000"],
        ["--dtype", "float32"],
    ):
        assert facts(capsys, "io", *option)["notes"] == []
    assert len(facts(capsys, "io")["notes"]) == 2


def test_json_has_every_tensor_of_the_shape_that_was_asked_for(capsys):
    found = facts(capsys, "io", *SMALL, "--block-rows", "16", "--block-columns", "8", "--direction", "backward")
    shape = Shape(batch=1, heads=2, length_q=70, length_k=50, dim=8, dim_v=4)
    assert found["shape"] == {
        "batch": 1, "heads": 2, "length_q": 70, "length_k": 50, "dim": 8, "dim_v": 4,
        "element_bytes": 2, "statistic_bytes": 4,
    }  # fmt: skip
    assert found["chip_elements"] == 1000
    assert [row["name"] for row in found["rows"]] == list(ALGORITHMS)
    for row in found["rows"]:
        form = cost(ALGORITHMS[row["name"]], shape, Sizes(Blocks(16, 8), Blocks(16, 8)), "backward")
        assert (row["loads"], row["stores"]) == (form.traffic.loads, form.traffic.stores)
        assert (row["peak_elements"], row["fits"]) == (form.peak_elements, form.peak_elements <= 1000)


def test_a_chip_too_small_for_any_block(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    status, out, _ = run(capsys, "io", "--chip-bytes", "100")
    assert status == 0 and "no block fits" in out and "(too much)" in out


@pytest.mark.parametrize("direction", ["forward", "backward", "both"])
def test_sweeps_are_printed_and_drawn(capsys, tmp_path, monkeypatch, direction):
    monkeypatch.setenv("COLUMNS", "200")
    status, out, err = run(capsys, "io", "sweep", *SMALL, "--direction", direction, "--output", str(tmp_path / "new"))
    assert (status, err) == (0, "")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["block.png", "length.png", "memory.png"]
    for path in (tmp_path / "new").iterdir():
        assert path.read_bytes().startswith(b"\x89PNG")
    for word in (
        "elements on the chip",
        "rows or columns of a block",
        "tokens",
        "Proposition 3",
        "inputs and results once",
    ):
        assert word in out


def test_one_sweep_into_one_file_as_json(capsys, tmp_path):
    picture = tmp_path / "one.png"
    status, out, err = run(capsys, "io", "sweep", *SMALL, "--over", "memory", "--output", str(picture), "--json")
    assert status == 0 and "Picture: " in err and picture.read_bytes().startswith(b"\x89PNG")
    sweeps = json.loads(out)["sweeps"]
    assert list(sweeps) == ["memory"]
    assert [point["x"] for point in sweeps["memory"]["lines"]["flash2"]] == sweeps["memory"]["chips"]


def test_all_sweeps_reach_as_far_as_they_say(capsys):
    sweeps = facts(capsys, "io", "sweep", *SMALL)["sweeps"]
    ends = {name: [sweep["lines"]["flash2"][place]["x"] for place in (0, -1)] for name, sweep in sweeps.items()}
    assert ends == {"memory": [8, 70 * 8], "block": [16, 70], "length": [128, 131072]}


def test_a_picture_that_cannot_be_drawn_is_status_1_or_2(capsys, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    arguments = ("io", "sweep", *SMALL, "--over", "block", "--output")
    status, _, err = run(capsys, *arguments, str(tmp_path / "file" / "folder"))
    assert status == 2 and "--output:" in err

    def missing(*_):
        raise ModuleNotFoundError("matplotlib")

    monkeypatch.setattr("onchip.cli.io_tables.plot_sweep", missing)
    status, _, err = run(capsys, *arguments, str(tmp_path))
    assert status == 1 and "pip install 'onchip[bench]'" in err


def test_every_line_of_a_sweep_has_a_color():
    names = {*ALGORITHMS, io_plots.PAPER, io_plots.BOUND, io_plots.THEOREM}
    assert names == set(io_plots.COLORS)


def test_simulations_agree_with_the_closed_forms(capsys):
    found = facts(capsys, "io", "simulate", *SMALL)
    assert [one["name"] for one in found["runs"]] == list(ALGORITHMS)
    assert found["good"] and all(one["counts_agree"] for one in found["runs"])
    assert all(one["largest_relative_error"] is None for one in found["runs"])


def test_simulations_with_values_compute_one_head(capsys):
    found = facts(capsys, "io", "simulate", "--values", *SMALL, "--algorithm", "flash1,flash2")
    assert (found["shape"]["batch"], found["shape"]["heads"]) == (1, 1)
    assert [one["name"] for one in found["runs"]] == ["flash1", "flash2"]
    assert all(one["largest_relative_error"] < 1e-12 for one in found["runs"])


def test_a_simulation_that_differs_is_status_1(capsys, monkeypatch):
    algorithm = ALGORITHMS["flash2"]
    wrong = algorithm.forward.__class__(algorithm.forward.run, forms.flash1.forward, algorithm.forward.sized)
    other = algorithm.__class__(algorithm.name, algorithm.summary, algorithm.source, wrong, algorithm.backward)
    monkeypatch.setitem(io_runs.ALGORITHMS, "flash2", other)
    status, out, _ = run(capsys, "io", "simulate", *SMALL, "--algorithm", "flash2")
    assert status == 1 and "differ" in out


def test_a_wrong_result_is_status_1(capsys, monkeypatch):
    monkeypatch.setattr("onchip.model.loops.steps.delta", lambda out, d_out: 0 * (d_out * out).sum(-1, keepdim=True))
    status, _, _ = run(capsys, "io", "simulate", "--values", *SMALL, "--algorithm", "flash1")
    assert status == 1


def test_communication_is_that_of_the_model(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    options = (
        "--devices=4",
        "--heads=8",
        "--kv-heads=2",
        "--length=100",
        "--dim=16",
        "--dim-value=8",
        "--dtype=float32",
    )
    options += ("--no-causal",)
    found = facts(capsys, "io", "communication", *options)
    sharding = Sharding(
        devices=4, batch=1, heads=8, kv_heads=2, length=100, dim=16, dim_v=8, element_bytes=4, gradient_bytes=4
    )
    for name, scheme in SCHEMES.items():
        assert found["schemes"][name]["total_sent"] == scheme(sharding).total_sent
    status, out, _ = run(capsys, "io", "communication", *options)
    assert status == 0 and "not causal" in out


def test_a_sharding_that_is_not_possible_is_named(capsys):
    status, out, _ = run(capsys, "io", "communication", "--devices", "6")
    assert status == 0 and "32 heads do not divide among 6 devices" in " ".join(out.split())
    assert list(facts(capsys, "io", "communication", "--devices", "6")["not_possible"]) == ["all-to-all"]
