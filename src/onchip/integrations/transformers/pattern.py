"""The masks that models of transformers ask for, without a (query, key) tensor where their pattern is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from onchip import masks, ops
from onchip.integrations.transformers.symbols import read
from onchip.integrations.transformers.visible import Axes, Shift, Unread, Visible
from onchip.masks import Band, Mask, leaves
from onchip.tile import RectGeometry


@dataclass(frozen=True, eq=False)
class Pattern:
    """What stands in the place of a mask tensor on its way through a model.

    Attributes:
        shape: (batch, 1, queries, keys), as the tensor would have it. Models only hand it on; with `ndim` of 4
            transformers takes it for a mask that is ready.
        mask: which pairs are visible; None is all of them, or all that `causal` leaves.
        causal: also hide keys behind the diagonal, aligned to the bottom right.
        key_lengths: int (batch,), how many keys of each sequence exist, where that is all that padding hides.
        tidy: causality, a window and packed documents are all there is.
    """

    shape: tuple[int, int, int, int]
    mask: Mask | None
    causal: bool
    key_lengths: Tensor | None
    tidy: bool

    ndim: ClassVar[int] = 4


def mask_function(dense: Callable[..., Tensor | None]) -> Callable[..., Any]:
    """The mask function to register beside the attention function.

    Args:
        dense: makes a bool tensor (batch, 1, queries, keys) from the same arguments: `sdpa_mask` of transformers.
    """

    def make_mask(
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: Shift = 0,
        kv_offset: Shift = 0,
        *,
        mask_function: Callable[..., Any] = _causal,
        attention_mask: Tensor | Pattern | None = None,
        allow_is_causal_skip: bool = True,
        allow_is_bidirectional_skip: bool = False,
        use_vmap: bool = False,
        device: torch.device | str = "cpu",
        # The interface adds arguments for other implementations, and more of them with each version.
        **others: Any,
    ) -> Pattern | Tensor:
        """A Pattern, or a bool tensor for what it cannot say or where the caller computes with the mask.

        Args:
            batch_size, q_length, kv_length: extents of the call.
            q_offset, kv_offset: the tokens that the first query and the first key are.
            mask_function: `function(b, h, q, k)` over tokens.
            attention_mask: bool (batch, tokens), True where a token is no padding.
            allow_is_causal_skip, allow_is_bidirectional_skip: whether the caller takes None for a mask.
            use_vmap: whether the function holds parts that the model or the user wrote.
        """
        if isinstance(attention_mask, Pattern):
            return attention_mask
        device = torch.device(device)
        visible = None
        # A user's function may do anything; a compiler that traces it cannot come back to try another way.
        if not (use_vmap and torch.compiler.is_compiling()):
            square = not isinstance(q_offset, Tensor) and (q_length, q_offset) == (kv_length, kv_offset)
            packed = square and attention_mask is None and not use_vmap
            axes = Axes(batch_size, (q_length, kv_length), (q_offset, kv_offset), device, packed)
            visible = _read(mask_function, axes)
        skips = allow_is_causal_skip or allow_is_bidirectional_skip
        if visible is None or visible.mask is False or not (skips or use_vmap or visible.documents):
            tensor = dense(
                batch_size=batch_size,
                q_length=q_length,
                kv_length=kv_length,
                q_offset=q_offset,
                kv_offset=kv_offset,
                mask_function=mask_function,
                attention_mask=attention_mask,
                allow_is_causal_skip=False,
                allow_is_bidirectional_skip=False,
                use_vmap=use_vmap,
                device=device,
            )
            assert tensor is not None, "a mask that may not be skipped"
            return tensor
        mask, causal = _simplest(visible.mask, batch_size, q_length, kv_length, device)
        kept, key_lengths = (None, None) if attention_mask is None else _padding(attention_mask, kv_length, kv_offset)
        if kept is not None:
            mask = masks.keys(kept) if mask is None else mask & masks.keys(kept)
        if key_lengths is not None and causal:
            # The bottom right would be that of the keys that exist.
            mask, causal = masks.causal(kv_length - q_length), False
        return Pattern(
            shape=(batch_size, 1, q_length, kv_length),
            mask=mask,
            causal=causal,
            key_lengths=key_lengths,
            tidy=visible.tidy and kept is None and key_lengths is None and not use_vmap,
        )

    return make_mask


def _causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    """What transformers' own mask functions keep by default."""
    return k <= q


def _read(function: Callable[..., Any], axes: Axes) -> Visible | None:
    try:
        return read(function, axes)
    except Unread:
        return None


def _simplest(mask: Mask | bool, batch: int, rows: int, columns: int, device: torch.device) -> tuple[Mask | None, bool]:
    """The mask without what hides nothing, and whether causality at the bottom right stands for it."""
    if isinstance(mask, bool):
        return None, False
    # Bands of ints only: the others are tensors, whose values stay on the device.
    if not all(isinstance(part, Band) and not isinstance(part.diagonal, Tensor) for part in leaves(mask)):
        return mask, False
    band = mask.band(RectGeometry(device, batch, 1, rows, columns, rows, columns))
    if band is None:
        return mask, False
    low, high = band
    low = None if low is not None and low <= 1 - rows else low
    high = None if high is not None and high >= columns - 1 else high
    if low is None:
        if high is None:
            return None, False
        if high == columns - rows:
            return None, True
    return mask, False


def _padding(kept: Tensor, length: int, start: Shift) -> tuple[Tensor | None, Tensor | None]:
    """Which keys are no padding, bool (batch, length), or how many, int (batch,), if they come first; None for all."""
    missing = length + start - kept.shape[-1]
    if isinstance(missing, Tensor):
        kept = kept.index_select(1, torch.arange(length, device=kept.device) + start)
    else:
        if missing > 0:
            kept = torch.nn.functional.pad(kept, (0, missing))
        kept = kept[:, start : start + length]
    # A look at the values costs nothing on a CPU; on a GPU it would wait for the device.
    if kept.device.type == "cpu" and not ops.is_observed(kept):
        if bool(kept.all()):
            return None, None
        if bool((kept[:, 1:] <= kept[:, :-1]).all()):
            return None, kept.sum(1)
    return kept, None
