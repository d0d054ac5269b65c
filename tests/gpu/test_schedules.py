"""The covering problems on a CUDA device, against the same oracle on the CPU."""

import dataclasses

import pytest
import torch

from tests import harness, oracle
from tests.problems import COVERING, build, named

pytestmark = pytest.mark.gpu


def moved(value, device):
    """A problem, or any part of one, with its tensors on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(moved(item, device) for item in value)
    if isinstance(value, dict):
        return {name: moved(item, device) for name, item in value.items()}
    if dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: moved(getattr(value, name), device) for name in fields})
    return value


@pytest.mark.parametrize(**named(COVERING))
def test_covering_problems(spec, schedule, dtype):
    problem = build(spec, dtype)
    d_out, d_lse = oracle.cotangents(problem)
    found = harness.attempt(moved(problem, "cuda"), schedule, d_out.cuda(), d_lse.cuda())
    on_host = oracle.Result(found.out.cpu(), found.lse.cpu(), moved(found.gradients, "cpu"))
    oracle.assert_all_within_contract(on_host, problem, d_out, d_lse)


@pytest.mark.parametrize(**named([spec for spec in COVERING if spec.score or spec.layout == "packed"]))
def test_gradients_repeat_bit_for_bit_on_request(spec):
    problem = moved(build(spec, torch.float32), "cuda")
    d_out, d_lse = (cotangent.cuda() for cotangent in oracle.cotangents(build(spec, torch.float32)))
    results = [harness.attempt(problem, "tiled", d_out, d_lse, deterministic=True) for _ in range(3)]
    for result in results[1:]:
        harness.assert_same_bits(result, results[0])
