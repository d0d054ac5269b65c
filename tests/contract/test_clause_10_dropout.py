"""Clause 10: dropout is counter-based, the same on every schedule and tile size, and replayed in the backward."""

from dataclasses import replace

import pytest
import torch

import onchip
from tests import harness, philox_reference
from tests.machine import sized
from tests.problems import Spec, build

LONGER, SHORTER = sized(((70, 90), (33, 17)), ((18, 33), (17, 9)))
LENGTHS = {"dense": (LONGER,) * 2, "padded": (LONGER, SHORTER), "packed": (LONGER, (0, 4), SHORTER)}
SEED = 0x123456789ABCDEF


def dropped(spec, dtype, probability, seed=SEED):
    return replace(build(spec, dtype), dropout_p=probability, dropout_seed=seed)


@pytest.mark.parametrize("probability", [0.1, 0.25, 0.48, 0.9])
def test_the_mask_is_philox(probability, layout, schedule, dtype):
    problem = dropped(Spec(LENGTHS[layout], heads=(4, 2), layout=layout), dtype, probability)
    for sequence, weights in zip(problem.sequences(), harness.weights(problem, schedule), strict=True):
        keep = philox_reference.keep(probability, SEED, sequence.number, *weights.shape)
        assert torch.equal(weights != 0, torch.from_numpy(keep))


@pytest.mark.parametrize("probability", [0.1, 0.25, 0.48])
def test_output_and_gradients(probability, layout, schedule, dtype):
    harness.check(
        dropped(Spec(LENGTHS[layout], heads=(4, 2), layout=layout, causal=True), dtype, probability), schedule
    )


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 + 1, 2**63 - 1])
def test_every_bit_of_the_seed_counts(seed, schedule):
    problem = dropped(Spec(((20, 40),)), torch.float32, 0.5, seed)
    weights = harness.weights(problem, schedule)[0]
    assert torch.equal(weights != 0, torch.from_numpy(philox_reference.keep(0.5, seed, 0, 2, 20, 40)))
    from_tensor = harness.weights(problem, schedule, dropout_seed=torch.tensor([seed]))[0]
    from_scalar = harness.weights(problem, schedule, dropout_seed=torch.tensor(seed))[0]
    assert torch.equal(from_tensor, weights) and torch.equal(from_scalar, weights)


@pytest.mark.compiled
def test_the_mask_of_a_pair_does_not_depend_on_the_size(schedule):
    """Rows, columns, heads and sequences keep their draws when the problem grows past a tile."""
    small = harness.weights(dropped(Spec(((20, 30),), heads=(2, 1)), torch.float32, 0.5), schedule)[0]
    large = harness.weights(dropped(Spec(((300, 290),) * 2, heads=(4, 1)), torch.float32, 0.5), schedule)[0]
    assert torch.equal(small != 0, (large != 0)[:2, :20, :30])


def test_the_lse_is_that_without_dropout(layout, schedule, dtype):
    problem = build(Spec(LENGTHS[layout], layout=layout, score=("sink",)), dtype)
    expected = harness.call(problem, schedule).lse
    found = harness.call(replace(problem, dropout_p=0.5, dropout_seed=3), schedule).lse
    # tiles may differ, and with them the order of sums
    torch.testing.assert_close(found, expected, rtol=4 * torch.finfo(expected.dtype).eps, atol=0)


def test_no_dropout_is_the_plain_call(schedule):
    problem = build(Spec(), torch.float32)
    harness.assert_same_bits(
        harness.attempt(replace(problem, dropout_p=0.0, dropout_seed=3), schedule), harness.attempt(problem, schedule)
    )


def test_a_seed_is_drawn_from_the_generator_of_torch(schedule):
    problem = replace(build(Spec(), torch.float32), dropout_p=0.5)
    torch.manual_seed(5)
    first, second = harness.call(problem, schedule).out, harness.call(problem, schedule).out
    torch.manual_seed(5)
    again = harness.call(problem, schedule).out
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_the_backward_replays_a_drawn_seed(schedule, exact, device):
    """The gradient of the values is the transposed weights of the forward, dropout included."""
    query, key = torch.randn(2, 1, 2, 40, 16, dtype=exact, device=device)
    value = torch.eye(40, dtype=exact, device=device).expand(1, 2, 40, 40).clone().requires_grad_()
    weights = onchip.attention(query, key, value, dropout_p=0.48, schedule=schedule)
    d_out = torch.randn_like(weights)
    (d_value,) = torch.autograd.grad(weights, value, d_out)
    tolerance = 1e-12 if exact == torch.float64 else 1e-5
    torch.testing.assert_close(d_value, weights.detach().mT @ d_out, rtol=tolerance, atol=tolerance)


def test_the_output_is_unbiased(schedule):
    weights = [
        harness.weights(dropped(Spec(((64, 128),), scale=0.0), torch.float64, 0.25, seed), schedule)[0]
        for seed in range(8)
    ]
    stacked = torch.stack(weights)
    assert torch.equal(stacked.unique(), torch.tensor([0, 1 / 128 / 0.75], dtype=torch.float64))
    # 131072 draws of variance p / (1 - p): five standard deviations of their mean.
    assert abs(stacked.sum(-1).mean().item() - 1) < 5 * (0.25 / 0.75 / stacked.numel()) ** 0.5


@pytest.mark.compiled
def test_a_probability_that_rounds_to_one_stays_finite(schedule):
    harness.check(dropped(Spec(((100, 300),), heads=(8, 8)), torch.float32, 1 - 2.0**-20), schedule)


def test_schedules_agree_in_every_weight(schedule):
    problem = dropped(Spec((sized((130, 140), (20, 35)),), heads=(4, 2), causal=True), torch.float32, 0.3)
    got, expected = (harness.weights(problem, name)[0] for name in (schedule, "dense"))
    assert torch.equal(got != 0, expected != 0)
