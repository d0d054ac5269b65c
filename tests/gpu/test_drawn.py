"""Problems that hypothesis draws, on a CUDA device, against the oracle on the CPU."""

from dataclasses import replace

import hypothesis
import pytest
import torch
from hypothesis import given, settings

import onchip
from tests import harness, machine, oracle
from tests.problems import build, specs

SCHEDULES = ("triton",)
# These must run every problem without user functions; another schedule may decline some.
COMPLETE = ("triton",)
INSTEAD_OF_FUNCTIONS = {"checkers": "tensor", "nearby": "windows"}
FUNCTIONS = ("wobble", "relative", "gate")

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def on_cuda(monkeypatch):
    monkeypatch.setattr(machine, "DEVICE", "cuda")


def without_functions(spec, layout):
    """The drawn flags in one layout, with other masks and no scores in the place of user functions."""
    mask = spec.mask and " ".join(INSTEAD_OF_FUNCTIONS.get(word, word) for word in spec.mask.split())
    lengths = spec.lengths[:1] * min(len(spec.lengths), 2) if layout == "dense" else spec.lengths
    score = tuple(name for name in spec.score if name not in FUNCTIONS)
    return replace(spec, layout=layout, lengths=lengths, mask=mask, score=score)


each_layout = pytest.mark.parametrize("layout", ["dense", "padded", "packed", "gapped"])
# every example compiles kernels: few of them for each test, and none to find a smaller failure
few = settings(max_examples=15, phases=[phase for phase in hypothesis.Phase if phase.name not in ("shrink", "explain")])


@pytest.mark.parametrize("schedule", SCHEDULES)
@each_layout
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=lambda d: str(d)[6:])
@few
@given(spec=specs(longest=150))
def test_any_problem_without_functions(spec, dtype, layout, schedule):
    spec = without_functions(spec, layout)
    hypothesis.note(str(spec))
    problem = build(spec, dtype)
    d_out, d_lse = oracle.cotangents(problem)
    try:
        got = harness.attempt(problem, schedule, d_out, d_lse)
    except onchip.Unsupported as reason:
        if schedule in COMPLETE:
            raise AssertionError(f"{schedule} declines {spec}: {reason}") from reason
        raise
    oracle.assert_all_within_contract(got, problem, d_out, d_lse)
