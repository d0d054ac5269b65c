"""What `onchip tune` does on a card: a row from its candidates to the call that uses what was kept."""

import pytest
import torch

import onchip
from onchip.bench.tune.card import Card, limits_of
from onchip.bench.tune.cases import cases
from onchip.bench.tune.session import tune
from onchip.schedules.triton import tuned
from onchip.schedules.triton.tiles import SHORT

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path))
    monkeypatch.delenv(tuned.SWITCH, raising=False)
    tuned.forget()
    yield
    tuned.forget()


def measure(row):
    """The row's measurement, in the time of a batch of candidates."""
    device = torch.device("cuda", torch.cuda.current_device())
    todo = cases([row], dims=(64,), dtypes=(torch.bfloat16,))
    options = {"key": tuned.key_of(device), "limits": limits_of(device), "path": tuned.tuned_path(device)}
    (measured,) = tune(Card(device), todo, budget=5.0, step=lambda name: None, **options)
    tuned.forget()
    assert tuned.read(options["path"], options["key"], options["limits"].shared).reason is None
    return measured


@pytest.mark.parametrize("row", ["forward:few", "keys:grouped", "queries:plain", "gradient:changed"])
def test_a_row_is_measured_and_kept(row):
    measured = measure(row)
    assert measured.reason is None
    assert measured.found.raced > 0 and measured.found.ms > 0 and 0 < measured.found.ratio <= 1


def test_a_call_takes_what_was_measured_and_is_right():
    found = measure("forward:band").found
    query = torch.randn(1, 2, SHORT + 76, 64, device="cuda", dtype=torch.bfloat16)
    plan = onchip.plan(query, query, query, causal=True, schedule="triton")
    assert plan.kernels[0].tile_source.startswith("tuned here on ")
    assert plan.tiles == (found.tile.rows, found.tile.columns)
    out = onchip.attention(query, query, query, causal=True, schedule="triton")
    expected = onchip.attention(query.double(), query.double(), query.double(), causal=True, schedule="dense")
    assert (out.double() - expected).abs().max() <= 3e-2 * expected.abs().max()
