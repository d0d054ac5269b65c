"""The mergeable softmax state: associative, with an exact empty state, differentiable."""

import pytest
import torch
from hypothesis import given, strategies

from onchip import softmax

ROWS, DIM = 7, 5
INFINITY = float("inf")


def block(columns, seed=0, dtype=torch.float64, spread=1.0):
    generator = torch.Generator().manual_seed(seed)
    s = torch.randn(2, ROWS, columns, generator=generator, dtype=torch.float64) * spread
    v = torch.randn(2, columns, DIM, generator=generator, dtype=torch.float64)
    return s.to(dtype), v.to(dtype)


def empty(dtype=torch.float64):
    return softmax.empty((2, ROWS), DIM, dtype, "cpu")


def state_of(*blocks, dtype=torch.float64):
    state = empty(dtype)
    for s, v in blocks:
        state = softmax.update(state, s, v)
    return state


def dense(*blocks):
    s = torch.cat([s for s, _ in blocks], dim=-1)
    v = torch.cat([v for _, v in blocks], dim=-2)
    return torch.softmax(s, -1) @ v, torch.logsumexp(s, -1)


def assert_finished(state, expected, tolerance=1e-12):
    for got, wanted in zip(softmax.finish(state), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


@given(
    columns=strategies.lists(strategies.integers(0, 9), min_size=1, max_size=6),
    spread=strategies.sampled_from((0.1, 1.0, 300.0)),
)
def test_updates_are_one_softmax(columns, spread):
    blocks = [block(n, seed, spread=spread) for seed, n in enumerate(columns)]
    if sum(columns):
        assert_finished(state_of(*blocks), dense(*blocks))


@given(sizes=strategies.tuples(*[strategies.integers(0, 9)] * 3), spread=strategies.sampled_from((1.0, 300.0)))
def test_merge_is_associative(sizes, spread):
    a, b, c = (state_of(block(n, seed, spread=spread)) for seed, n in enumerate(sizes))
    left = softmax.finish(softmax.merge(softmax.merge(a, b), c))
    right = softmax.finish(softmax.merge(a, softmax.merge(b, c)))
    swapped = softmax.finish(softmax.merge(c, softmax.merge(b, a)))
    for x, y, z in zip(left, right, swapped, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(x, z, rtol=1e-12, atol=1e-12)


def test_merge_is_one_softmax():
    blocks = [block(4, 0, spread=20.0), block(6, 1, spread=0.1)]
    assert_finished(softmax.merge(state_of(blocks[0]), state_of(blocks[1])), dense(*blocks))


def test_the_empty_state_finishes_as_an_empty_row():
    out, lse = softmax.finish(empty())
    assert out.shape == (2, ROWS, DIM) and lse.shape == (2, ROWS)
    assert not out.any() and (lse == -INFINITY).all()


def test_merging_two_empty_states_is_empty():
    merged = softmax.merge(empty(), empty())
    for part, expected in zip(merged, empty(), strict=True):
        assert torch.equal(part, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("poison", [0.0, float("nan"), INFINITY])
def test_merging_with_an_empty_state_changes_no_bit(dtype, poison):
    """Even when the accumulator of the empty side holds NaN: no key of it was seen."""
    state = state_of(block(6, 3, dtype, spread=5.0), dtype=dtype)
    nothing = empty(dtype)._replace(accumulator=torch.full((2, ROWS, DIM), poison, dtype=dtype))
    for merged in (softmax.merge(state, nothing), softmax.merge(nothing, state)):
        for part, expected in zip(merged, state, strict=True):
            assert torch.equal(part, expected)


def test_rows_are_empty_one_by_one():
    """Some rows of one side are empty and hold NaN, the others merge."""
    s, v = block(6, 3)
    hidden = s.clone()
    hidden[:, ::2] = -INFINITY
    part = state_of((hidden, v))
    poisoned = part.accumulator.clone()
    poisoned[:, ::2] = float("nan")
    merged = softmax.merge(state_of(block(4, 5)), part._replace(accumulator=poisoned))
    clean = softmax.merge(state_of(block(4, 5)), part)
    for got, expected in zip(merged, clean, strict=True):
        assert torch.equal(got, expected)
    expected = dense(block(4, 5), (hidden, v))
    assert_finished(merged, expected)


def test_a_block_of_minus_infinity_adds_nothing():
    state = state_of(block(6, 3))
    s, v = block(4, 1)
    after = softmax.update(state, torch.full_like(s, -INFINITY), v)
    for got, expected in zip(after, state, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("level", [-1e30, 1e30, torch.finfo(torch.float32).min, torch.finfo(torch.float32).max])
def test_any_finite_score_counts(level):
    v = torch.randn(2, 8, DIM)
    s = torch.full((2, ROWS, 8), level)
    out, lse = softmax.finish(state_of((s[..., :3], v[:, :3]), (s[..., 3:], v[:, 3:]), dtype=torch.float32))
    torch.testing.assert_close(out, v.mean(1, keepdim=True).expand_as(out), rtol=1e-6, atol=1e-6)
    assert lse.isfinite().all()


def test_minimum_and_maximum_merge_without_overflow():
    v = torch.randn(2, 1, DIM)
    low, high = (
        torch.full((2, ROWS, 1), level) for level in (torch.finfo(torch.float32).min, torch.finfo(torch.float32).max)
    )
    merged = softmax.merge(state_of((low, v), dtype=torch.float32), state_of((high, 2 * v), dtype=torch.float32))
    out, _ = softmax.finish(merged)
    assert torch.equal(out, (2 * v).expand_as(out))


def test_finish_adds_the_sink_once():
    s, v = block(6, 2)
    sink = torch.tensor([[0.5], [-3.0]], dtype=torch.float64)
    out, lse = softmax.finish(state_of((s, v)), sink)
    column = sink[..., None].expand(2, ROWS, 1)
    weights = torch.softmax(torch.cat([s, column], -1), -1)[..., :-1]
    torch.testing.assert_close(out, weights @ v, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, torch.logsumexp(torch.cat([s, column], -1), -1), rtol=1e-12, atol=1e-12)


def test_the_sink_of_an_empty_row_is_its_lse():
    sink = torch.tensor([[0.5], [-300.0]], dtype=torch.float64)
    out, lse = softmax.finish(empty(), sink)
    assert not out.any()
    torch.testing.assert_close(lse, sink.expand(2, ROWS), rtol=1e-12, atol=0)


def test_a_sink_of_minus_infinity_is_no_sink():
    state = state_of(block(6, 2))
    sink = torch.full((2, 1), -INFINITY, dtype=torch.float64)
    for given_state in (state, empty()):
        for got, expected in zip(softmax.finish(given_state, sink), softmax.finish(given_state), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_a_large_sink_takes_everything_without_overflow():
    sink = torch.full((2, 1), 1e4, dtype=torch.float64)
    out, lse = softmax.finish(state_of(block(6, 2)), sink)
    assert not out.any()
    torch.testing.assert_close(lse, torch.full_like(lse, 1e4), rtol=1e-12, atol=0)


def test_from_output_is_the_inverse_of_finish():
    blocks = [block(6, 1, spread=30.0), block(3, 2)]
    again = softmax.from_output(*softmax.finish(state_of(blocks[0])))
    assert_finished(again, dense(blocks[0]))
    assert_finished(softmax.merge(again, state_of(blocks[1])), dense(*blocks))


def test_from_output_of_empty_rows():
    state = softmax.from_output(torch.zeros(2, ROWS, DIM), torch.full((2, ROWS), -INFINITY))
    out, lse = softmax.finish(softmax.merge(state, state))
    assert not out.any() and (lse == -INFINITY).all()


def test_a_nan_score_shows():
    s, v = block(6, 1)
    s[0, 2, 3] = float("nan")
    for state in (state_of((s, v)), softmax.merge(state_of((s, v)), state_of(block(3, 2)))):
        out, lse = softmax.finish(state)
        assert out[0, 2].isnan().all() and lse[0, 2].isnan()
        assert out[0, 3:].isfinite().all() and out[1].isfinite().all()


def test_gradients_of_update_merge_and_finish():
    (s1, v1), (s2, v2) = block(3, 0), block(4, 1)
    sink = torch.tensor([[0.5], [-3.0]], dtype=torch.float64)

    def function(s1, v1, s2, v2, sink):
        return softmax.finish(
            softmax.merge(state_of((s1, v1), (s2, v2)), state_of((s2, v1.mean(1, keepdim=True) + v2))), sink
        )

    inputs = [tensor.requires_grad_() for tensor in (s1, v1, s2, v2, sink)]
    torch.autograd.gradcheck(function, inputs)


def test_gradients_with_empty_rows_are_finite():
    (s1, v1), (s2, v2) = block(3, 0), block(4, 1)
    hide1, hide2 = torch.zeros(ROWS, 1, dtype=torch.bool), torch.zeros(ROWS, 1, dtype=torch.bool)
    hide1[:4], hide2[2:5] = True, True  # rows 2 and 3 are empty on both sides
    inputs = [tensor.requires_grad_() for tensor in (s1, v1, s2, v2)]
    a = state_of((s1.masked_fill(hide1, -INFINITY), v1))
    b = state_of((s2.masked_fill(hide2, -INFINITY), v2))
    out, lse = softmax.finish(softmax.merge(a, b))
    (out.square().sum() + lse[lse.isfinite()].sum()).backward()
    assert all(leaf.grad.isfinite().all() and leaf.grad.any() for leaf in inputs)
    assert not s1.grad[:, :4].any() and not s2.grad[:, 2:5].any()


def test_gradients_of_from_output():
    out, lse = torch.randn(2, 2, ROWS, DIM, dtype=torch.float64), torch.randn(2, 2, ROWS, dtype=torch.float64)

    def function(out_a, out_b, lse_a, lse_b):
        return softmax.finish(softmax.merge(softmax.from_output(out_a, lse_a), softmax.from_output(out_b, lse_b)))

    torch.autograd.gradcheck(function, [tensor.clone().requires_grad_() for tensor in (*out, *lse)])
