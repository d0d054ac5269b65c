"""The table of choices on a CPU: which problem takes what, and that its record supports it."""

import json
import math
from pathlib import Path

import pytest
import torch

import onchip
from onchip import choices, masks, scores

RECORDS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*/choices.json"))


def inputs(length=64, heads=2, dim=16, dtype=torch.float32, batch=1):
    return torch.randn(3, batch, heads, length, dim, dtype=dtype).unbind()


@pytest.mark.parametrize(
    ("length", "options", "forward", "backward"),
    [
        (64, {}, "aten", "aten"),
        (64, {"causal": True}, "aten", "aten"),
        (64, {"causal": True, "window": (8, 0)}, "aten", "aten"),
        (512, {"causal": True, "window": (8, 0)}, "tiled", "tiled"),
        (1024, {"causal": True, "window": (8, 0)}, "aten", "tiled"),
        (64, {"mask": masks.keys(torch.ones(64, dtype=torch.bool))}, "aten", "aten"),
        (64, {"score": scores.softcap(20.0)}, "dense", "dense"),
        (1024, {"score": scores.softcap(20.0)}, "tiled", "tiled"),
        (64, {"dropout_p": 0.5}, "dense", "dense"),
        (1024, {"dropout_p": 0.5}, "tiled", "tiled"),
        (64, {"score": scores.bias(torch.zeros(64))}, "aten", "tiled"),
    ],
)
def test_what_a_problem_takes(length, options, forward, backward):
    plan = onchip.plan(*inputs(length), **options)
    assert (plan.forward, plan.backward) == (forward, backward)


@pytest.mark.parametrize(
    ("dtype", "native", "heads", "backward"),
    [
        (torch.bfloat16, True, 8, "aten"),
        (torch.bfloat16, True, 2, "tiled"),
        (torch.bfloat16, False, 8, "tiled"),
        (torch.float16, True, 8, "tiled"),
    ],
)
def test_what_the_processor_decides(dtype, native, heads, backward, monkeypatch):
    monkeypatch.setattr(choices, "multiplies_bfloat16", lambda: native)
    assert onchip.plan(*inputs(512, heads, dtype=dtype)).backward == backward


def test_every_kind_has_a_row_in_both_directions():
    kinds = ("plain", "causal", "band", "masked", "ragged")
    for dtype in ("float32", "low", "native"):
        for kind in kinds:
            for backward in (False, True):
                rows = [row for row in choices.CPU if row.backward == backward and kind in row.kinds]
                assert any(dtype in row.dtypes and not row.length and not row.heads for row in rows)


def test_another_device_has_no_table():
    problem = onchip.plan(*inputs()).problem
    object.__setattr__(problem, "device", torch.device("mps"))
    assert choices.preferred(problem, False) == ()


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.parent.name)
def test_the_record_supports_the_table(path, monkeypatch):
    """Over the grid a choice takes at most 5 % longer than the best schedule in the mean, and nowhere twice as long.

    Calls below a millisecond count in the mean only, and single medians of a shared machine stray.
    """
    monkeypatch.setattr(choices, "multiplies_bfloat16", lambda: True)
    ratios = {}
    for row in json.loads(path.read_text())["rows"]:
        # score changes and dropout go by the sum of both directions: dense keeps its weights for the backward
        if row["kind"] not in ("scores", "dropout"):
            times = {name: time for name, time in row["times_ms"].items() if name != "dense"}
            chosen = named(row, row["direction"] == "backward")
            best = min(times.values())
            ratios[tuple(row.items())[:-1]] = times[chosen] / best
            assert best < 1 or times[chosen] < 2 * best, f"{chosen} takes {times} for {row}"
    mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
    assert mean < 1.05, f"{mean:.3f} in the mean"


def named(row, backward):
    """What the dispatcher takes for a row of the record."""
    length, heads, batch, dim, dtype = (row[name] for name in ("length", "heads", "batch", "dim", "dtype"))
    lengths = torch.linspace(length / 3, length, batch).round().int()
    if row["kind"] == "packed":
        parts = torch.zeros(3, int(lengths.sum()), heads, dim, dtype=getattr(torch, dtype)).unbind()
        plan = onchip.plan_varlen(*parts, torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int())
        return plan.backward if backward else plan.forward
    options = {
        "causal": {"causal": True},
        "window": {"causal": True, "window": (length // 4, 0)},
        "padding": {"mask": (torch.arange(length) < lengths[:, None])[:, None, None, :]},
    }.get(row["kind"], {})
    plan = onchip.plan(*inputs(length, heads, dim, getattr(torch, dtype), batch), **options)
    return plan.backward if backward else plan.forward


def test_a_named_schedule_without_gradients_has_a_plan_all_the_same():
    plan = onchip.plan(*inputs(dtype=torch.float16), schedule="aten")
    assert plan.backward is None and plan.backward_kernels == () and plan.backward_roofline is None
    assert "backward           none: aten has no gradients here" in str(plan)
    assert onchip.plan(*inputs(dtype=torch.float16)).backward == "tiled"
