"""benchmarks/stalls.py without ncu: what it reads and prints."""

import importlib
import json

import pytest
from typer.testing import CliRunner

NAMES = (
    "Kernel Name", "NVTX", "gpu__time_duration.sum", "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio",
    "smsp__average_warps_issue_stalled_wait_not_issued_per_issue_active.ratio",
)  # fmt: skip


@pytest.fixture
def stalls(monkeypatch):
    monkeypatch.syspath_prepend("benchmarks")
    return importlib.import_module("stalls")


def printed(*launches):
    rows = (NAMES, ("", "", "ns", "", "", ""), *launches)
    return "==PROF== Connected\n" + "\n".join(",".join(f'"{cell}"' for cell in row) for row in rows)


def test_shares_are_of_all_samples(stalls):
    found = stalls.parse(printed(("forward_kernel", "part=<d64 n512>", "1,500,000", "3", "1", "9")))
    assert found == {"d64 n512": {"microseconds": 1500.0, "shares": {"barrier": 0.75, "wait": 0.25}}}


def test_a_launch_outside_of_every_part_is_an_error(stalls):
    with pytest.raises(ValueError, match="forward_kernel was launched in no part"):
        stalls.parse(printed(("forward_kernel", "", "1", "1", "1", "1")))


def test_the_record_is_printed(stalls, tmp_path):
    shown = CliRunner().invoke(stalls.app, ["show"])
    record = json.loads((stalls.RECORDS / stalls.RECORD).read_text())
    assert shown.exit_code == 0 and all(name in shown.output for name in record["cases"])
    assert CliRunner().invoke(stalls.app, ["show", "--out", str(tmp_path)]).exit_code != 0
