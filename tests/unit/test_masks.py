"""Every mask value, and combinations of them, against the pairs that the contract keeps, read as attention weights."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given

import onchip
from onchip.masks import Pairs
from onchip.normal_form import Tiles
from onchip.states import pooled_states, whole_states
from onchip.tile import RectGeometry
from tests import harness
from tests.describe import Causal, Documents, Keys, TensorMask, Window
from tests.problems import MASKS, Spec, build, mask_expressions

LENGTHS = {
    "dense": ((70, 90),) * 2,
    "padded": ((70, 90), (33, 0), (40, 12)),
    "packed": ((70, 90), (0, 4), (33, 70), (1, 1)),
}


def assert_keeps(problem, schedule):
    for sequence, weights in zip(problem.sequences(), harness.weights(problem, schedule), strict=True):
        expected = problem.visible(sequence)
        wrong = (weights != 0) != expected
        assert not wrong.any(), f"sequence {sequence.number}: {int(wrong.sum())} of {wrong.numel()} pairs are wrong"


@pytest.mark.parametrize("mask", MASKS)
def test_each_mask(mask, layout, schedule):
    assert_keeps(build(Spec(LENGTHS[layout], heads=(4, 2), layout=layout, mask=mask, tail=3), torch.float32), schedule)


@pytest.mark.parametrize("mask", [name for name in MASKS if name != "bare"])
def test_each_complement(mask, layout, schedule):
    spec = Spec(LENGTHS[layout], heads=(4, 2), layout=layout, mask=f"~ {mask}", window=(50, 60))
    assert_keeps(build(spec, torch.float32), schedule)


@given(mask=mask_expressions())
def test_any_combination(mask, layout, schedule):
    assert_keeps(
        build(Spec(LENGTHS[layout], heads=(4, 2), layout=layout, mask=mask, causal=True), torch.float32), schedule
    )


SPANNING = (*MASKS, "blocks & causal", "documents & window", "shuffled | left", "~ ( right & keys )", "~ keys | rows")


@pytest.mark.parametrize("lengths", [(300, 200), (520, 600)], ids=str)
@pytest.mark.parametrize("mask", SPANNING)
def test_masks_that_span_several_tiles(mask, lengths, schedule):
    assert_keeps(build(Spec((lengths,), mask=mask, heads=(2, 1)), torch.float32), schedule)


def test_the_arguments_intersect_with_the_mask(schedule):
    problem = build(Spec(((70, 90),), causal=True, window=(30, 10), mask="keys"), torch.float32)
    assert_keeps(problem, schedule)


def test_two_bands_with_other_diagonals(schedule):
    mask = Causal("top-left") & Window(40, None, "bottom-right") & Causal(torch.tensor([-3, 30]))
    assert_keeps(replace(build(Spec(((70, 90),) * 2), torch.float32), mask=mask), schedule)


def test_a_causal_mask_is_the_causal_argument(layout, schedule):
    problem = build(Spec(LENGTHS[layout], layout=layout, heads=(4, 2)), torch.float32)
    argument = harness.call(replace(problem, causal=True), schedule)
    value = harness.call(replace(problem, mask=Causal()), schedule)
    assert torch.equal(argument.out, value.out) and torch.equal(argument.lse, value.lse)


def test_documents_of_one_tensor_serve_queries_and_keys(schedule):
    ids = torch.tensor([0] * 20 + [3] * 17 + [1] * 33)
    assert_keeps(replace(build(Spec(((70, 70),)), torch.float32), mask=Documents(ids)), schedule)


@pytest.mark.parametrize("integer", [torch.int32, torch.int64])
def test_document_numbers_of_either_integer_type_and_any_sign(integer, schedule):
    ids = torch.tensor([-5] * 20 + [7] * 17 + [-1] * 33, dtype=integer)
    assert_keeps(replace(build(Spec(((70, 70),)), torch.float32), mask=Documents(ids)), schedule)


@pytest.mark.parametrize(
    "shape", [(1, 1), (70, 1), (1, 90), (4, 1, 1), (2, 1, 70, 90), (2, 4, 1, 90), (1, 4, 70, 1)], ids=str
)
def test_tensor_masks_broadcast(shape, schedule):
    keep = torch.rand(shape) < 0.6
    assert_keeps(replace(build(Spec(((70, 90),) * 2, heads=(4, 2)), torch.float32), mask=TensorMask(keep)), schedule)


def test_double_negation_is_the_mask(schedule):
    problem = build(Spec(((70, 90),), mask="documents"), torch.float32)
    twice = harness.call(replace(problem, mask=~~problem.mask), schedule)
    torch.testing.assert_close(twice.out, harness.call(problem, schedule).out, rtol=1e-6, atol=1e-6)


def test_masks_combine_only_with_masks():
    mask = onchip.masks.causal()
    for other in (3, "causal", None):
        with pytest.raises(TypeError):
            mask & other
    keys = Keys(torch.ones(8, dtype=torch.bool)).value()
    assert type(mask & keys) is not type(mask) and repr(mask & keys)


def test_a_function_must_not_read_numbers_out_of_tensors():
    """A number that the graph keeps would be wrong for the next tensor of the same shape."""
    for read in (torch.Tensor.item, int, float):
        limit = torch.tensor(3)
        with pytest.raises(ValueError, match=r"\.item\(\)"):
            onchip.masks.predicate(lambda b, h, i, j, read=read, limit=limit: i - j < read(limit))


@pytest.mark.parametrize("shape", [(2, 3, 300, 290), (1, 1, 128, 256), (2, 1, 300, 1), (1, 3, 1, 290), (1, 1, 5, 7)])
def test_states_of_a_whole_tensor_are_those_of_its_strips(shape):
    mask = Pairs(torch.rand(shape) < 0.9995)
    rows, columns = (size if size > 1 else other for size, other in zip(shape[2:], (300, 290), strict=True))
    grid = Tiles(RectGeometry(torch.device("cpu"), 2, 3, rows, columns, rows, columns))
    strips, whole = pooled_states(mask.keep, grid), whole_states(mask.keep, grid)
    assert torch.equal(whole, strips.expand(whole.shape))


def test_states_of_an_expanded_mask_are_made_once():
    mask = Pairs((torch.rand(200, 200) < 0.9).expand(2, 3, 200, 200))
    grid = Tiles(RectGeometry(torch.device("cpu"), 2, 3, 200, 200, 200, 200))
    assert whole_states(mask.keep, grid).shape == (1, 1, 2, 2)
