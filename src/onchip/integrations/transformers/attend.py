"""The attention function that models of transformers call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onchip import masks, scores
from onchip.attention import attention, attention_varlen
from onchip.checks import describe
from onchip.dispatch import ScheduleName
from onchip.integrations.transformers.pattern import Pattern
from onchip.masks import Mask
from onchip.scores import Score

IGNORED = frozenset(
    {
        "cache_position",
        "encoder_hidden_states",
        "kernel_options",
        "layer_idx",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "seq_idx",
        "target_dtype",
        "token_type_ids",
        "use_cache",
    }
)
"""Keywords that models hand on to attention and that do not change its result: what they say of visibility is in the
mask, and rotary positions are in query and key. `max_length_*` are bounds that kernels of others need."""


def attention_function(schedule: ScheduleName | None) -> Callable[..., tuple[Tensor, None]]:
    """The attention function to register, for one schedule or None."""

    def attend(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Pattern | Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        deterministic: bool | None = None,
        output_attentions: bool | None = None,
        # transformers hands on every keyword of the model's call.
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Attention of one layer.

        Args:
            module: the layer; `training` turns dropout on, `is_causal` holds where the keyword is None.
            query: (batch, heads, queries, dim). key, value: (batch, key heads, keys, dim and value dim).
            attention_mask: a Pattern; a bool tensor that broadcasts to (batch, heads, queries, keys), True where
                visible; a floating one that is added to the scores; None: all keys, causality if the layer is
                causal.
            sliding_window: how many keys a query sees, its own included; read only where no mask says it.
            s_aux: one logit for each head in the denominator. position_bias: added to the scores, differentiable.
            cu_seq_lens_q, cu_seq_lens_k: offsets of packed sequences among the tokens of the batch.
        Returns:
            (batch, queries, heads, value dim), and None in the place of the weights.
        Raises:
            ValueError: weights are asked for, packed sequences meet a mask, a mask does not fit.
            TypeError: a keyword or a mask of a kind that is not known.
        """
        _refuse(output_attentions, others)
        causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
        common = _Common(
            score=tuple(_score(softcap, s_aux)),
            scale=scaling,
            dropout=dropout if module.training else 0.0,
            deterministic=deterministic,
            schedule=schedule,
        )
        if cu_seq_lens_q is not None or cu_seq_lens_k is not None:
            if cu_seq_lens_q is None or cu_seq_lens_k is None:
                raise ValueError("cu_seq_lens_q and cu_seq_lens_k come together: got one of them")
            _refuse_with_sequences(attention_mask, position_bias)
            return _packed(query, key, value, cu_seq_lens_q, cu_seq_lens_k, causal, sliding_window, common), None
        mask: Mask | None = None
        key_lengths: Tensor | None = None
        score = common.score
        if isinstance(attention_mask, Pattern):
            _check_lengths(attention_mask, query, key)
            mask, causal, key_lengths = attention_mask.mask, attention_mask.causal, attention_mask.key_lengths
        elif attention_mask is not None:
            mask, added = _given(attention_mask)
            score, causal = (*score, *added), False
        else:
            causal = causal and query.shape[2] > 1
            if causal and key.shape[2] > query.shape[2]:
                # A cache of fixed size before its first token: the keys behind the queries are not written yet.
                key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
                position_bias = None if position_bias is None else position_bias[..., : query.shape[2]]
            mask, causal = _unmasked(query.shape[2], key.shape[2], causal, sliding_window)
        if position_bias is not None:
            score = (*score, scores.bias(position_bias))
        out = attention(
            query,
            key,
            value,
            causal=causal,
            mask=mask,
            score=score or None,
            lengths=None if key_lengths is None else (None, key_lengths),
            scale=common.scale,
            dropout_p=common.dropout,
            deterministic=common.deterministic,
            schedule=common.schedule,
        )
        return out.transpose(1, 2).contiguous(), None

    return attend


@dataclass(frozen=True, eq=False)
class _Common:
    """What packed calls and others have in common."""

    score: tuple[Score, ...]
    scale: float | None
    dropout: float
    deterministic: bool | None
    schedule: ScheduleName | None


def _refuse(output_attentions: bool | None, others: dict[str, Any]) -> None:
    if output_attentions:
        raise ValueError(
            "output_attentions=True asks for the weights, which onchip never stores: "
            "use model.set_attn_implementation('eager') for them"
        )
    for name, value in others.items():
        if value is not None and name not in IGNORED:
            raise TypeError(
                f"onchip does not know the keyword {name!r} of attention ({describe(value)}), which may change its "
                f"result: leave it away, or use another attn_implementation. Known and ignored are {sorted(IGNORED)}"
            )


def _score(softcap: float | None, sink: Tensor | None) -> list[Score]:
    found = [] if softcap is None else [scores.softcap(softcap)]
    return found if sink is None else [*found, scores.sink(sink)]


def _check_lengths(pattern: Pattern, query: Tensor, key: Tensor) -> None:
    _, _, rows, columns = pattern.shape
    if (rows, columns) != (query.shape[2], key.shape[2]):
        raise ValueError(
            f"attention_mask was made for {rows} queries and {columns} keys, got query {tuple(query.shape)} and key "
            f"{tuple(key.shape)}"
        )


def _given(mask: Any) -> tuple[Mask | None, tuple[Score, ...]]:
    """A tensor as a mask, or as a term of the scores."""
    if not isinstance(mask, Tensor):
        raise TypeError(
            f"attention_mask must be a tensor, None or what onchip's mask function made, got {type(mask).__name__}"
        )
    if mask.dim() != 4:
        raise ValueError(f"attention_mask must be (batch, heads or 1, queries, keys), got {tuple(mask.shape)}")
    if mask.dtype == torch.bool:
        return masks.tensor(mask), ()
    if mask.is_floating_point():
        return None, (scores.bias(mask),)
    raise TypeError(f"attention_mask must be bool (True is visible) or floating (added to scores), got {mask.dtype}")


def _unmasked(rows: int, columns: int, causal: bool, sliding_window: int | None) -> tuple[Mask | None, bool]:
    """What is visible where the model made no mask; transformers aligns to the top left there."""
    if sliding_window is None:
        return (None, True) if causal and rows == columns else (masks.causal("top-left") if causal else None, False)
    # A single query is the last token: it sees the last keys.
    diagonal = "bottom-right" if rows == 1 else "top-left"
    return masks.window(sliding_window - 1, 0 if causal or rows == 1 else sliding_window - 1, diagonal), False


def _refuse_with_sequences(mask: Any, position_bias: Tensor | None) -> None:
    if position_bias is not None:
        raise ValueError("position_bias cannot be given with cu_seq_lens_q: it has no rows for packed sequences")
    if mask is not None and not (isinstance(mask, Pattern) and mask.tidy):
        raise ValueError(
            "cu_seq_lens_q says which tokens are a sequence; a mask with padding, chunks or an overlay cannot be given "
            "with it: leave attention_mask away, or cu_seq_lens_q and cu_seq_lens_k"
        )


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    causal: bool,
    sliding_window: int | None,
    common: _Common,
) -> Tensor:
    """(batch, queries, heads, value dim) of sequences that follow each other through the batch."""
    window = None if sliding_window is None else (sliding_window - 1, 0 if causal else sliding_window - 1)
    tokens_q, tokens_k, tokens_v = (part.transpose(1, 2).flatten(0, 1) for part in (query, key, value))
    out = attention_varlen(
        tokens_q,
        tokens_k,
        tokens_v,
        offsets_q,
        offsets_k,
        causal=causal,
        window=window,
        score=common.score or None,
        scale=common.scale,
        dropout_p=common.dropout,
        deterministic=common.deterministic,
        schedule=common.schedule,
    )
    return out.reshape(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])
