"""Formulas on the values of blocks that several nests share. Letters as in `onchip.model.loops`."""

from __future__ import annotations

import torch
from torch import Tensor


def softmax(s: Tensor) -> Tensor:
    """P of whole rows."""
    return torch.softmax(s, -1)


def weights(s: Tensor, lse: Tensor) -> Tensor:
    """P of a block from the log-sum-exp of its rows."""
    return torch.exp(s - lse)


def delta(out: Tensor, d_out: Tensor) -> Tensor:
    """D = rowsum(dO * O), which equals rowsum(P * dP). (Dao et al. 2022, appendix B.2, equation 4.)"""
    return (d_out * out).sum(-1, keepdim=True)


def softmax_gradient(d_weights: Tensor, p: Tensor, delta: Tensor) -> Tensor:
    """dS = P * (dP - D)."""
    return p * (d_weights - delta)


def softmax_gradient_of_rows(d_weights: Tensor, p: Tensor) -> Tensor:
    """dS of whole rows, where D can be summed from P and dP."""
    return p * (d_weights - (p * d_weights).sum(-1, keepdim=True))
