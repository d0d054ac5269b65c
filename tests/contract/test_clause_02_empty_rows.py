"""Clause 2: a row that sees no key has output 0, LSE minus infinity (or the sink), gradient 0, and adds nothing."""

from dataclasses import replace

import pytest
import torch

from tests import harness, oracle
from tests.describe import Bias, Blocks, Causal, Documents, Keys, Modify, Predicate, Sink, TensorMask, Window
from tests.machine import sized
from tests.problems import Spec, build

ROWS, COLUMNS, EMPTY = sized((70, 50, 20), (35, 25, 10))  # rows below EMPTY see nothing
HEADS = sized((4, 2), (2, 1))


def hide_rows(b, h, i, j):
    return (i >= EMPTY) & (j >= 0)


def ways(dtype):
    rows = torch.arange(ROWS) >= EMPTY
    bias = torch.zeros(1, 1, ROWS, COLUMNS, dtype=dtype)
    bias[:, :, :EMPTY] = -float("inf")
    mask = {
        "causal": Causal(),
        "window": Window(None, 3, -EMPTY - 3),
        "documents": Documents(rows.int(), torch.ones(COLUMNS, dtype=torch.int32)),
        "blocks": Blocks(torch.tensor([[False]] * 2 + [[True]] * 5), (EMPTY // 2, COLUMNS)),
        "tensor": TensorMask(rows[:, None].expand(ROWS, COLUMNS).contiguous()),
        "predicate": Predicate(hide_rows),
        "not": ~Predicate(lambda b, h, i, j: (i < EMPTY) & (j >= 0)),
        "or": Window(None, 3, -EMPTY - 3) | Documents(rows.int(), torch.ones(COLUMNS, dtype=torch.int32)),
    }
    yield from ((name, {"mask": value}, {}) for name, value in mask.items())
    yield "bias", {"score": (Bias(),)}, {"bias": bias}
    hide = Modify(lambda s, b, h, i, j: torch.where(i >= EMPTY, s, -float("inf")))
    yield "modify", {"score": (hide,)}, {}


WAYS = [name for name, _, _ in ways(torch.float32)]


def problem_of(way, dtype, sink):
    fields, leaves = next((fields, leaves) for name, fields, leaves in ways(dtype) if name == way)
    problem = build(Spec(((ROWS, COLUMNS),), heads=HEADS), dtype).with_leaves(**leaves)
    problem = replace(problem, **fields)
    if sink:
        logits = torch.tensor([0.5, -1.0, 0.0, 2.0])[: HEADS[0]]
        problem = replace(problem, score=(*problem.score, Sink())).with_leaves(sink=logits.to(torch.float32))
    return problem


@pytest.mark.parametrize("sink", [False, True], ids=["plain", "sink"])
@pytest.mark.parametrize("way", WAYS)
def test_empty_rows(way, sink, schedule):
    problem = problem_of(way, torch.float32, sink)
    result = harness.check(problem, schedule)
    assert torch.equal(result.out[:, :, :EMPTY], torch.zeros_like(result.out[:, :, :EMPTY]))
    logits = problem.leaves["sink"] if sink else torch.full(HEADS[:1], -float("inf"))
    torch.testing.assert_close(
        result.lse[:, :, :EMPTY], logits[None, :, None].expand(1, HEADS[0], EMPTY), rtol=0, atol=0
    )
    assert not result.gradients or not result.gradients["query"][:, :, :EMPTY].any()
    assert result.out[:, :, EMPTY:].abs().amin(-1).gt(0).all(), "a row with keys came out empty"


@pytest.mark.parametrize("way", WAYS)
def test_empty_rows_add_nothing_to_the_gradients_of_keys_and_values(way, schedule):
    problem = problem_of(way, torch.float32, sink=False)
    d_out, d_lse = oracle.cotangents(problem)
    quiet_out, quiet_lse = d_out.clone(), d_lse.clone()
    quiet_out[:, :, :EMPTY], quiet_lse[:, :, :EMPTY] = 0, 0
    d_out[:, :, :EMPTY] *= 1e4
    loud, quiet = (
        harness.attempt(problem, schedule, d_out, d_lse),
        harness.attempt(problem, schedule, quiet_out, quiet_lse),
    )
    harness.assert_same_bits(loud, quiet)


def test_a_batch_where_every_row_is_empty(schedule, dtype):
    problem = replace(build(Spec(((33, 20),) * 2), dtype), mask=Keys(torch.zeros(2, 20, dtype=torch.bool)))
    result = harness.attempt(problem, schedule)
    assert not result.out.any() and (result.lse == -float("inf")).all()
    assert all(not gradient.any() for gradient in result.gradients.values())


def test_sequences_without_keys_or_queries(layout, schedule, dtype):
    lengths = ((20, 0),) * 2 if layout == "dense" else ((20, 0), (0, 9), (0, 0), (12, 9))
    harness.check(build(Spec(lengths, layout=layout, causal=True, score=("sink",)), dtype), schedule)
