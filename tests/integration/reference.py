"""Attention for transformers by its formula, over bool tensors and in the dtype of its inputs.

The models' own eager attention takes its softmax in float32 whatever they compute in, and adds finfo.min to what is
hidden, which in float64 overflows there: a row that sees nothing becomes NaN, and every row after it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

NAME = "reference"


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Softmax over the visible keys and the sink; a row that sees nothing gives zeros."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    score = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    if position_bias is not None:
        score = score + position_bias
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is None and causal and query.shape[2] > 1:
        attention_mask = torch.ones(score.shape[-2:], dtype=torch.bool).tril()
    if attention_mask is not None:
        score = score.masked_fill(~attention_mask, -torch.inf)
    if s_aux is not None:
        score = torch.cat([score, s_aux.view(1, -1, 1, 1).expand(*score.shape[:-1], 1)], -1)
    empty = (score == -torch.inf).all(-1, keepdim=True)
    weights = score.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    if s_aux is not None:
        weights = weights[..., :-1]
    return (weights @ value).transpose(1, 2), None


def make_mask(*arguments: Any, **options: Any) -> Tensor | None:
    """Always a tensor."""
    return sdpa_mask(*arguments, **{**options, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


def register() -> None:
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, make_mask)
