"""What every result is measured against: attention and its gradients in float64, in blocks of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from onchip.audit.laws import Inputs

BLOCK_BYTES = 64 * 2**20
"""Size of one float64 block of scores; at most four of them exist at a time."""

Results = dict[str, Tensor]
"""out, lse, d_query, d_key, d_value; without the gradients where there are none."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The exact result, and of out, d_query, d_key and d_value how large the terms are that their sums add."""

    results: Results
    terms: dict[str, float]


def reference(inputs: Inputs) -> Reference:
    """Attention and its gradients in float64 on the inputs as they are rounded, one block of rows at a time.

    With S = scale Q K^T, L = log sum exp S, P = exp(S - L), and incoming gradients dO and dL: O = P V, dV = P^T dO,
    dS = P * (dO V^T - delta) with delta = rowsum(dO * O) - dL, dQ = scale dS K, dK = scale dS^T Q.

    A sum may be far smaller than its terms, which round all the same. Their sizes are the largest entries of P |V| for
    out, of P^T |dO| for dV, and for dQ and dK that of rowsum(P * |dO| |V|^T), a bound of both parts of a row of dS,
    times scale and the largest entry of K or Q. Source: docs/contract.md, clause 12; Dao 2023, FlashAttention-2,
    algorithm 2, for the gradients.
    """
    query, key, value, d_out = (part.double() for part in (inputs.query, inputs.key, inputs.value, inputs.d_out))
    batch, heads, length, _ = query.shape
    out, d_query, d_key, d_value = (torch.zeros_like(part) for part in (value, query, key, value))
    d_value_terms = torch.zeros_like(value)
    lse = torch.empty(batch, heads, length, dtype=torch.float64, device=query.device)
    largest_out = largest_row = 0.0
    block = max(1, BLOCK_BYTES // (8 * batch * heads * length))
    for start in range(0, length, block):
        rows = slice(start, min(start + block, length))
        # rows of a causal block see nothing behind its last row
        keys = slice(0, rows.stop if inputs.causal else length)
        q, do, k, v = query[:, :, rows], d_out[:, :, rows], key[:, :, keys], value[:, :, keys]
        s = (q @ k.mT).mul_(inputs.scale)  # (batch, heads, rows, keys)
        if inputs.causal:
            s.masked_fill_(future(rows, keys.stop, s.device), -math.inf)
        row_lse = s.logsumexp(-1)
        p = s.sub_(row_lse[..., None]).exp_()
        o = p @ v
        delta = (do * o).sum(-1)
        if inputs.d_lse is not None:
            delta -= inputs.d_lse[:, :, rows]
        d_value[:, :, keys] += p.mT @ do
        d_value_terms[:, :, keys] += p.mT @ do.abs()
        o_terms = p @ v.abs()
        ds = (do @ v.mT).sub_(delta[..., None]).mul_(p).mul_(inputs.scale)
        d_query[:, :, rows] = ds @ k
        d_key[:, :, keys] += ds.mT @ q
        out[:, :, rows], lse[:, :, rows] = o, row_lse
        largest_out = max(largest_out, o_terms.max().item())
        largest_row = max(largest_row, (do.abs() * o_terms).sum(-1).max().item())
    terms = {
        "out": largest_out,
        "d_query": largest_row * abs(inputs.scale) * largest(key),
        "d_key": largest_row * abs(inputs.scale) * largest(query),
        "d_value": largest(d_value_terms),
    }
    return Reference({"out": out, "lse": lse, "d_query": d_query, "d_key": d_key, "d_value": d_value}, terms)


def future(rows: slice, keys: int, device: torch.device) -> Tensor:
    """Bool (rows, keys): the keys behind a row's own index, which causality hides from it."""
    i = torch.arange(rows.start, rows.stop, device=device)[:, None]
    return torch.arange(keys, device=device) > i


def largest(tensor: Tensor) -> float:
    """The largest absolute value."""
    return tensor.abs().max().item()
