"""What tiled promises beyond the contract."""

import pytest
import torch

import onchip


def test_weights_of_short_rows_sum_to_one_in_the_backward():
    """Where a row fits one tile, its weights do not take over the rounding of the LSE, 4e-7 of each here."""
    for score in torch.linspace(4, 8, 21).tolist():
        query, key = torch.full((1, 1, 64, 1), score), torch.ones(1, 1, 128, 1)
        value = torch.randn(1, 1, 128, 1, requires_grad=True)
        out = onchip.attention(query, key, value, scale=1.0, schedule="tiled")
        (gradient,) = torch.autograd.grad(out, value, torch.ones_like(out))
        assert gradient.double().sum().item() == pytest.approx(64, rel=torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("schedule", ["tiled", "aten"])
@pytest.mark.parametrize(("length", "window"), [(512, (128, 128)), (1600, (1024, 128)), (1300, (0, 256))])
def test_pieces_of_one_shape_lie_differently_under_a_band(length, window, schedule):
    """What a band hides is kept for pieces that lie alike, not for those of the same shape."""
    leaves = [leaf.requires_grad_() for leaf in torch.randn(3, 1, 2, length, 8).unbind()]
    gradient = torch.randn(1, 2, length, 8)
    out, expected = (onchip.attention(*leaves, window=window, schedule=name) for name in (schedule, "dense"))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    found = (torch.autograd.grad(result, leaves, gradient) for result in (out, expected))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
