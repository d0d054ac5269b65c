"""Jagged nested tensors as packed sequences, and packed results as jagged tensors again.

A jagged tensor (batch, heads, j, dim) stores (heads, tokens, dim) and offsets (batch + 1,): a packed batch with its two
leading dimensions swapped, and nothing is copied. One made by `torch.nested.narrow` also has lengths, and tokens
that belong to no sequence. Those may stand before the first sequence, where packed offsets must be 0, so its tokens are
turned round by as many places: one copy, on the device, for only the device knows that number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onchip.masks import Documents, Keys, Mask, leaves

Lengths = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True)
class Packed:
    """The arguments of a packed call that a jagged one means.

    Attributes:
        inputs: query, key, value (tokens, heads, dim), and the offsets of query and key, (batch + 1,).
        lengths: those of query and key, (batch,), or None where each sequence fills its room.
    """

    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
    lengths: Lengths | None
    _query: Any

    def jagged(self, out: Tensor) -> Tensor:
        """(tokens, heads, dim) as (batch, heads, j, dim), over the query's own offsets: the two can be added."""
        query = self._query
        if query.lengths() is not None:
            out = _turned(out, -query.offsets()[0])
        bounds = {"min_seqlen": query._maybe_min_seqlen, "max_seqlen": query._maybe_max_seqlen}
        return torch.nested.nested_tensor_from_jagged(out, query.offsets(), query.lengths(), **bounds).transpose(1, 2)

    def jagged_lse(self, lse: Tensor) -> Tensor:
        """(heads, tokens) as (batch, heads, j)."""
        return self.jagged(lse.mT)


def is_given(*tensors: Any) -> bool:
    """Whether any of the inputs is nested."""
    return any(isinstance(tensor, Tensor) and tensor.is_nested for tensor in tensors)


def unpack(query: Any, key: Any, value: Any, mask: Any, lengths: Any) -> Packed:
    """The packed call of three jagged tensors (batch, heads, j, dim).

    Raises:
        TypeError: some are nested and some not, or they are nested in the strided layout.
        ValueError: not (batch, heads, j, dim), key and value with different offsets, or lengths besides their own.
        NotImplementedError: a mask of one entry for each token with tensors that have tokens outside every sequence.
    """
    tensors = (query, key, value)
    for name, tensor in zip(("query", "key", "value"), tensors, strict=True):
        _check(name, tensor)
    if lengths is not None:
        raise ValueError("lengths must be None with nested tensors, which have their own")
    if key.shape[2] != value.shape[2]:
        raise ValueError("key and value must be jagged alike: make them over one offsets tensor")
    own = query.lengths(), key.lengths()
    full = own[0] is None and own[1] is None
    if not full and _counts_tokens(mask):
        raise NotImplementedError(
            "masks.keys and masks.documents take one entry for each token, and these nested tensors have tokens "
            "outside of sequences (torch.nested.narrow): copy them with .contiguous() first"
        )
    (q, cu_q), (k, cu_k), (v, _) = (_tokens(tensor) for tensor in tensors)
    return Packed((q, k, v, cu_q, cu_k), None if full else own, query)


def _check(name: str, tensor: Any) -> None:
    if not is_given(tensor) or tensor.layout != torch.jagged:
        came = f"nested with layout={tensor.layout}" if is_given(tensor) else "not nested"
        raise TypeError(
            f"query, key and value must all be nested with layout=torch.jagged, got a {name} that is {came}"
        )
    if tensor.dim() != 4 or tensor._ragged_idx != 2:
        raise ValueError(
            f"{name} must be (batch, heads, j, dim), jagged in dimension 2, got rank {tensor.dim()}, jagged in "
            f"dimension {tensor._ragged_idx}; (batch, j, heads, dim) becomes it by .transpose(1, 2)"
        )


def _tokens(tensor: Any) -> tuple[Tensor, Tensor]:
    """(tokens, heads, dim) and offsets from 0."""
    tokens, offsets = tensor.values().transpose(0, 1), tensor.offsets()
    if tensor.lengths() is None:
        return tokens, offsets
    return _turned(tokens, offsets[0]), offsets - offsets[0]


def _turned(tokens: Tensor, places: Tensor) -> Tensor:
    """Row i is row i + places of the tokens, round the end."""
    rows = torch.arange(tokens.shape[0], device=tokens.device) + places
    return tokens.index_select(0, rows % max(tokens.shape[0], 1))


def _counts_tokens(mask: Any) -> bool:
    return isinstance(mask, Mask) and any(isinstance(leaf, Keys | Documents) for leaf in leaves(mask))
