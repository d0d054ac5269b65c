"""`onchip tune`: what it prints, keeps and refuses. Where a card is needed, a fake one answers."""

import json
import time

import pytest
import torch

from onchip.bench.tune.candidates import Limits
from onchip.bench.tune.search import CannotRun, Timing
from onchip.cli import INTERRUPTED, app, doctor
from onchip.cli import tune as command
from onchip.schedules.triton import tuned
from onchip.schedules.triton.tuned import Key

KEY = Key(device="NVIDIA H200", architecture="sm_90", torch="2.11.0", triton="3.6.0", kernels="0123")
LIMITS = Limits(227 * 1024, 255, 32)


class Fake:
    """A card on which wider tiles are faster; it stops at the case that `stop` names, in the way that `error` says."""

    batch = 16

    def __init__(self, stop=None, error=None):
        self.stop, self.error = stop, error

    def open(self, case, shipped):
        if self.error is not None and case.kind == self.stop:
            raise self.error

    def compile(self, tiles):
        return {tile: "spills" for tile in tiles if tile.stages == 4}

    def check(self, tile):
        return None

    def race(self, shipped, tiles, rounds):
        ms = {tile: 1e3 / tile.rows / tile.columns for tile in (shipped, *tiles)}
        return {tile: Timing(ms[tile], ms[tile] / ms[shipped], ms[tile] / ms[shipped]) for tile in ms}

    def serves(self, tile):
        return None

    def close(self):
        pass


@pytest.fixture
def card(tmp_path, monkeypatch):
    """A card to be found, whose file lies where the test looks; calling it sets how it stops."""
    target = command.Target(torch.device("cuda", 0), KEY, LIMITS, tmp_path / "tiles" / "card.json")
    monkeypatch.setattr(command, "find_target", lambda device: target)
    monkeypatch.setattr(command, "make_bench", lambda target: Fake())

    def stopping(stop, error):
        monkeypatch.setattr(command, "make_bench", lambda target: Fake(stop, error))
        return target.path

    stopping.path = target.path
    return stopping


def run(capsys, *arguments):
    status = app.run(["tune", *arguments])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_help_names_every_option(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    status, out, _ = run(capsys, "--help")
    options = "--budget --only --dims --dtypes --device --dry-run --show --print-table --reset --json"
    assert status == 0 and [option for option in options.split() if option not in out] == []


FORWARD = ("--only", "forward", "--dims", "64", "--dtypes", "bfloat16")


@pytest.mark.parametrize("arguments", [(), ("--show",), ("--reset",), ("--print-table",), ("--dry-run",)])
def test_without_a_card_it_says_so(capsys, arguments):
    status, out, err = run(capsys, *arguments, "--device", "cpu")
    assert (status, out) == (1, "") and err.startswith("onchip: tune measures tiles of GPU kernels, and ")
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--dims", "64,300"), "--dims takes head dims up to 256: got 300"),
        (("--dims", "none"), "--dims takes positive whole numbers"),
        (("--dtypes", "float64"), "--dtypes takes bfloat16, float16, float32, separated by commas: got 'float64'"),
        (("--dtypes", "float16,bfloat16"), "dtypes of the same width share their tiles"),
        (("--only", "forward,backward"), "got backward"),
        (("--budget", "0"), "greater than or equal to 1"),
        (("--show", "--reset"), "got --show and --reset"),
        (("--json", "--print-table"), "--json does not go with --print-table"),
    ],
)
def test_wrong_arguments_are_named(capsys, arguments, words):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "") and words in err


def test_measuring_keeps_and_prints_each_row(capsys, card, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    status, out, err = run(capsys, *FORWARD)
    assert (status, err) == (0, "")
    assert "128 x 128" in out and "6 of 6 rows measured" in out and "spills" in out and "card.json" in out
    stored = tuned.read(card.path, KEY, LIMITS.shared)
    assert {entry.kind for entry in stored.entries} == {"plain", "short", "band", "masked", "changed", "few"}
    assert all(entry.ratio < 1 and entry.tile != entry.shipped for entry in stored.entries)


def test_what_was_measured_is_shown_beside_what_is_shipped(capsys, card, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    run(capsys, *FORWARD)
    status, out, _ = run(capsys, "--show")
    entry = tuned.read(card.path, KEY, LIMITS.shared).entries[0]
    assert status == 0 and "speed-up" in out and f"{1 / entry.ratio:.3f}" in out and entry.tuned_on in out
    status, out, _ = run(capsys, "--show", "--json")
    shown = json.loads(out)
    assert len(shown["rows"]) == 6 and shown["key"]["device"] == KEY.device and shown["ignored"] is None


def test_the_printed_table_is_rows_of_tiles_py(capsys, card):
    run(capsys, *FORWARD)
    status, out, _ = run(capsys, "--print-table")
    lines = out.splitlines()
    assert status == 0 and all(line.startswith('    Row(("sm_90",), FORWARD, 64, 16, ') for line in lines)
    assert all(line.endswith('"measured on NVIDIA H200"),') for line in lines)


def test_reset_removes_the_file(capsys, card):
    run(capsys, *FORWARD)
    assert run(capsys, "--reset") == (0, f"removed {card.path}\n", "")
    assert not card.path.exists()
    assert "nothing to remove" in run(capsys, "--reset")[1]
    for way in ("--show", "--print-table"):
        status, out, err = run(capsys, way)
        assert (status, out) == (1, "") and "no tiles tuned here" in err and "there is none" in err


def test_a_dry_run_counts_and_measures_nothing(capsys, card, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    status, out, _ = run(capsys, *FORWARD, "--dry-run")
    assert status == 0 and "candidates for 6 rows; nothing was measured" in out and not card.path.exists()
    rows = json.loads(run(capsys, *FORWARD, "--dry-run", "--json")[1])["rows"]
    assert sum(len(row["tiles"]) for row in rows) == int(out.split(" candidates for")[0].split()[-1])
    assert rows[0]["pruned"].keys() == {"shared memory", "registers", "idle warps"}


def test_json_is_all_that_standard_output_gets(capsys, card):
    status, out, _ = run(capsys, *FORWARD, "--json")
    facts = json.loads(out)
    assert status == 0 and facts["asked"] == len(facts["rows"]) == 6
    found = facts["rows"][0]["found"]
    assert (found["tile"]["rows"], found["tile"]["columns"]) == (128, 128) and found["dropped"]["spills"] > 0


def test_an_interrupt_keeps_rows_and_says_so(capsys, card):
    path = card("few", KeyboardInterrupt())
    status, out, err = run(capsys, *FORWARD)
    assert (status, err) == (INTERRUPTED, "onchip: interrupted\n") and "3 of 6 rows measured" in out
    assert len(tuned.read(path, KEY, LIMITS.shared).entries) == 3


def test_a_spent_budget_is_told(capsys, card, monkeypatch):
    monkeypatch.setattr(Fake, "open", lambda self, case, shipped: time.sleep(1))
    status, out, err = run(capsys, *FORWARD, "--budget", "1")
    assert (status, err) == (0, "") and "The time was over before the rest" in out
    assert 1 <= len(tuned.read(card.path, KEY, LIMITS.shared).entries) < 6


def test_a_lost_device_ends_it_with_what_was_measured(capsys, card):
    path = card("few", RuntimeError("a candidate stopped the device: illegal access"))
    status, out, err = run(capsys, *FORWARD)
    assert status == 1 and "3 of 6 rows measured" in out
    assert err == "onchip: measuring stopped after 3 of 6 rows: a candidate stopped the device: illegal access\n"
    assert len(tuned.read(path, KEY, LIMITS.shared).entries) == 3


def test_a_row_that_cannot_run_is_named(capsys, card, monkeypatch):
    monkeypatch.setenv("COLUMNS", "150")
    card("few", CannotRun("OutOfMemoryError: no room"))
    status, out, _ = run(capsys, *FORWARD)
    assert status == 0 and "not run: OutOfMemoryError" in out and "5 of 6 rows measured" in out


def test_a_folder_that_cannot_be_written_is_named(capsys, card, tmp_path):
    (tmp_path / "tiles").write_text("a file where the folder would be")
    status, _, err = run(capsys, *FORWARD)
    assert status == 1 and str(card.path) in err and "cannot be written" in err


def test_the_doctor_names_the_file(capsys, card, monkeypatch):
    monkeypatch.setattr(tuned, "tuned_path", lambda device: card.path)
    monkeypatch.setattr(tuned, "key_of", lambda device: KEY)
    monkeypatch.setattr(tuned, "shared_bytes", lambda device: LIMITS.shared)
    monkeypatch.delenv(tuned.SWITCH, raising=False)
    device = torch.device("cuda", 0)
    assert doctor._tiles(device) == {"path": str(card.path), "rows": 0, "ignored": "there is none"}
    run(capsys, *FORWARD)
    assert doctor._tiles(device) == {"path": str(card.path), "rows": 6, "ignored": None}
    monkeypatch.setenv(tuned.SWITCH, "0")
    assert doctor._tiles(device)["ignored"] == "ONCHIP_TUNED=0 is set"
