"""The covering problems on a CUDA device, against the same oracle on the CPU."""

import pytest
import torch

from tests import harness, machine
from tests.problems import COVERING, build, named

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_cuda(monkeypatch):
    monkeypatch.setattr(machine, "DEVICE", "cuda")


@pytest.mark.parametrize(**named(COVERING))
def test_covering_problems(spec, schedule, dtype):
    harness.check(build(spec, dtype), schedule)


@pytest.mark.parametrize(**named([spec for spec in COVERING if spec.score or spec.layout == "packed"]))
def test_gradients_repeat_bit_for_bit_on_request(spec):
    problem = build(spec, torch.float32)
    results = [harness.attempt(problem, "tiled", deterministic=True) for _ in range(3)]
    for result in results[1:]:
        harness.assert_same_bits(result, results[0])
