"""What TMA brings to the Triton schedule: its interpreter reads descriptors, but no instructions."""

import pytest
import torch
import triton.language as tl

from onchip.schedules.triton import launch
from onchip.schedules.triton.tiles import Tile
from tests import harness, oracle
from tests.machine import INTERPRETED
from tests.problems import Spec, build

SPECS = [
    Spec(((37, 70),) * 2, heads=(4, 2), dims=(32, 32)),
    Spec(((50, 50),), heads=(2, 2), dims=(24, 40), causal=True),
    Spec(((33, 100),) * 2, heads=(2, 1), dims=(16, 16), window=(20, 3), score=("sink",)),
    Spec(((150, 150),), heads=(2, 2), dims=(16, 16), causal=True, mask="documents"),
]


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU, tiles say where TMA is used")
@pytest.mark.parametrize("schedule", ["triton"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_tiles_by_descriptors(spec, schedule, monkeypatch):
    maps, found = launch.Call.maps, []
    monkeypatch.setattr(launch.Call, "tile", lambda call, kernel: Tile(16, 32, 1, 1, tma=True))
    monkeypatch.setattr(launch.Call, "maps", lambda *given: found.append(maps(*given)) or found[-1])
    monkeypatch.setattr(tl, "inline_asm_elementwise", lambda text, constraints, given, **options: given[0])
    problem = build(spec, torch.float16)
    d_out, d_lse = oracle.cotangents(problem)
    got = harness.attempt(problem, schedule, d_out, d_lse)
    assert len(found) >= 3 and all(one is not None for maps in found for one, _ in maps)
    oracle.assert_all_within_contract(got, problem, d_out, d_lse)
