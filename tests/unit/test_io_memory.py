"""The memory of two levels: what it counts, what it refuses, and that both ways of running it count the same."""

import pytest
import torch

from onchip.model.memory import ChipFull, TwoLevelMemory


def memory(capacity=None, dtype=None, copies=3):
    made = TwoLevelMemory(copies, capacity=capacity, dtype=dtype)
    made.declare("a", 10, 4, 2, None if dtype is None else torch.arange(copies * 40, dtype=dtype).view(copies, 10, 4))
    made.declare("b", 10, 4, 8)
    return made


@pytest.mark.parametrize("dtype", [None, torch.float64], ids=["shapes", "values"])
def test_bytes_are_counted_by_name_and_for_all_copies(dtype):
    one = memory(dtype=dtype)
    block = one.load("a", range(2, 5))
    one.store("b", block, range(0, 3))
    one.store("b", block, range(3, 6))
    one.free(block)
    cost = one.take_cost()
    assert cost.traffic.loads == {"a": 3 * 3 * 4 * 2}
    assert cost.traffic.stores == {"b": 2 * 3 * 3 * 4 * 8}
    assert cost.peak_elements == 3 * 4


@pytest.mark.parametrize("dtype", [None, torch.float64], ids=["shapes", "values"])
@pytest.mark.parametrize(("left", "right"), [(False, False), (True, False), (False, True)])
def test_a_product_counts_two_operations_for_each_term(dtype, left, right):
    one = memory(dtype=dtype)
    a = one.load("a", range(0, 4))
    b = one.load("a", range(4, 8))
    result = one.product(a, b, transpose_left=left, transpose_right=right, scale=0.5)
    if dtype is not None:
        x, y = (block.value.mT if transposed else block.value for block, transposed in ((a, left), (b, right)))
        torch.testing.assert_close(result.value, 0.5 * (x @ y))
    one.free(a, b, result)
    cost = one.take_cost()
    assert cost.traffic.flops == 3 * 2 * 4 * 4 * 4
    assert cost.peak_elements == 3 * 16


def test_the_chip_holds_its_capacity_and_no_element_more():
    one = memory(capacity=40)
    one.free(one.load("a"))
    assert one.take_cost().peak_elements == 40
    one = memory(capacity=39)
    with pytest.raises(ChipFull, match="needs 40 elements on a chip of 39"):
        one.load("a")


def test_what_is_not_freed_is_found():
    one = memory()
    one.load("a", range(0, 1))
    with pytest.raises(AssertionError, match="4 elements were not freed"):
        one.take_cost()


def test_what_nobody_wrote_is_not_a_number():
    one = memory(dtype=torch.float64)
    assert one.load("b").value.isnan().all()
    one.store_constant("b", 2.0)
    assert (one.load("b").value == 2.0).all()


def test_a_loaded_block_is_a_copy():
    one = memory(dtype=torch.float64)
    block = one.load("a")
    before = one.arrays["a"].value.clone()
    block.value.zero_()
    assert torch.equal(one.arrays["a"].value, before)


def test_rows_that_an_array_does_not_have_are_refused():
    one = memory()
    for rows in (range(8, 11), range(-1, 2)):
        with pytest.raises(AssertionError, match="of 10"):
            one.load("a", rows)
    block = one.load("a", range(0, 3))
    with pytest.raises(AssertionError, match="another shape"):
        one.store("b", block, range(0, 4))


def test_costs_are_those_since_the_last_time():
    one = memory()
    one.free(one.load("a"))
    first = one.take_cost()
    one.free(one.load("a", range(0, 1)))
    second = one.take_cost()
    assert (first.peak_elements, second.peak_elements) == (40, 4)
    assert second.traffic.loads == {"a": 3 * 4 * 2} and second.traffic.flops == 0
