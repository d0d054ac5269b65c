"""Attention and its gradients in float64, in blocks of query rows, so that memory stays bounded at any length."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_BYTES = 64 * 2**20


class Gradients(NamedTuple):
    """The output and the gradients, each in the shape of what it belongs to."""

    out: Tensor
    d_query: Tensor
    d_key: Tensor
    d_value: Tensor


def reference_attention(query: Tensor, key: Tensor, value: Tensor, d_out: Tensor, *, causal: bool) -> Gradients:
    """Softmax attention and its gradients by their formulas, one block of rows at a time.

    With S = scale Q K^T, P = softmax(S), O = P V and the incoming gradient dO:
    dV = P^T dO, dP = dO V^T, dS = P * (dP - rowsum(P * dP)), dQ = scale dS K, dK = scale dS^T Q.

    Args:
        query, key, value, d_out: (batch, heads, length, dim), the same length for all; any floating dtype.
        causal: a row sees the keys up to its own index.
    Returns:
        Gradients in float64. It holds at most three blocks of BLOCK_BYTES besides them.
    """
    query, key, value, d_out = (tensor.detach().double() for tensor in (query, key, value, d_out))
    batch, heads, length, dim = query.shape
    scale = dim**-0.5
    out, d_query = torch.empty_like(value), torch.empty_like(query)
    d_key, d_value = torch.zeros_like(key), torch.zeros_like(value)
    block = max(1, BLOCK_BYTES // (8 * batch * heads * length))
    for start in range(0, length, block):
        rows = slice(start, min(start + block, length))
        # Rows of a causal block see nothing behind its last row.
        keys = slice(0, rows.stop if causal else length)
        scores = scale * query[:, :, rows] @ key[:, :, keys].transpose(-2, -1)  # (batch, heads, rows, keys)
        if causal:
            i = torch.arange(rows.start, rows.stop, device=query.device)[:, None]
            j = torch.arange(keys.stop, device=query.device)
            scores.masked_fill_(j > i, -torch.inf)
        weights = scores.softmax(-1)
        out[:, :, rows] = weights @ value[:, :, keys]
        d_value[:, :, keys] += weights.transpose(-2, -1) @ d_out[:, :, rows]
        d_scores = d_out[:, :, rows] @ value[:, :, keys].transpose(-2, -1)
        d_scores.sub_((d_out[:, :, rows] * out[:, :, rows]).sum(-1, keepdim=True)).mul_(weights)
        d_query[:, :, rows] = scale * d_scores @ key[:, :, keys]
        d_key[:, :, keys] += scale * d_scores.transpose(-2, -1) @ query[:, :, rows]
    return Gradients(out, d_query, d_key, d_value)
