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
