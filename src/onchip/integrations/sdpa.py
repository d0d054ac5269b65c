"""Run `torch.nn.functional.scaled_dot_product_attention` on onchip, without a change to the model that calls it."""

from __future__ import annotations

import functools
import inspect
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import ContextDecorator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.nn.functional
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_variadic

from onchip import masks, scores
from onchip.attention import attention
from onchip.dispatch import ScheduleName

SDPA = Callable[..., Tensor]
Function = TypeVar("Function", bound=Callable[..., Any])

_torch_sdpa: SDPA = torch.nn.functional.scaled_dot_product_attention


class replace_sdpa(ContextDecorator):
    """Inside, `torch.nn.functional.scaled_dot_product_attention` runs on `onchip.attention`.

    A context manager, a decorator for plain functions, and both again inside themselves:

        with onchip.replace_sdpa():
            loss = model(tokens).sum()

        @onchip.replace_sdpa(schedule="tiled")
        def step(tokens): ...

    The replacement keeps the meaning that PyTorch documents: a bool `attn_mask` keeps the pairs that are True, a float
    one is added to the scores and may ask for a gradient, `is_causal` aligns to the top left (`onchip.attention` with
    `causal=True` aligns to the bottom right), `enable_gqa` groups heads, leading dimensions broadcast, autocast
    applies, and `CausalBias` masks are recognised. `nn.MultiheadAttention` with `need_weights=False` and
    `nn.TransformerEncoderLayer` are included: their fused inference path is off inside.

    It is process-wide. The attribute of `torch.nn.functional` is replaced for every thread, and code that took the
    function out of the module beforehand (`from torch.nn.functional import scaled_dot_product_attention`) keeps
    PyTorch's. Leaving restores what was there on entering; threads may enter and leave in any order.

    Enter outside a compiled function, not within it.

    Three things differ from PyTorch. A row that sees no key gives zeros on every device. Dropout draws another mask
    from the same generator, one that backward replays. `torch.nn.attention.sdpa_kernel` chooses nothing here.

    Jagged nested tensors (batch, heads, j, dim) without a mask run on onchip. Other nested and sparse tensors, and
    tensors without a head or with a head dim of 0, go to PyTorch's own function. Tensor subclasses and modes that
    define `__torch_function__` receive the replacement as the function.

    Args:
        schedule: the name of the schedule that must run, as in `onchip.attention`; None chooses.
    Raises (the replaced function):
        RuntimeError: where PyTorch raises it: a rank below 2, leading dimensions that do not broadcast, unequal heads
            without `enable_gqa`, a mask of another dtype, `attn_mask` together with `is_causal`.
        ValueError, TypeError: as `onchip.attention` for every other argument that cannot be used.
        onchip.Unsupported: the named schedule cannot run the problem.
    """

    def __init__(self, schedule: ScheduleName | None = None) -> None:
        self.schedule = schedule
        self._entered: list[_Layer] = []

    def __enter__(self) -> replace_sdpa:
        with _lock:
            layer = _Layer(
                function=_replacement(self.schedule),
                function_before=torch.nn.functional.scaled_dot_product_attention,
                fast_path_before=torch.backends.mha.get_fastpath_enabled(),
            )
            _layers.append(layer)
            self._entered.append(layer)
            torch.nn.functional.scaled_dot_product_attention = layer.function
            torch.backends.mha.set_fastpath_enabled(False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        with _lock:
            layer = self._entered.pop()
            position = _layers.index(layer)
            del _layers[position]
            if position == len(_layers):
                torch.nn.functional.scaled_dot_product_attention = layer.function_before
                torch.backends.mha.set_fastpath_enabled(layer.fast_path_before)
                return
            # Another thread entered later and is still inside: it inherits what to restore.
            above = _layers[position]
            if above.function_before is layer.function:
                above.function_before = layer.function_before
            above.fast_path_before = layer.fast_path_before

    def __call__(self, function: Function) -> Function:
        if (
            inspect.iscoroutinefunction(function)
            or inspect.isgeneratorfunction(function)
            or inspect.isasyncgenfunction(function)
        ):
            raise TypeError(
                f"replace_sdpa decorates plain functions, got {function!r}, whose body runs after the call has "
                "returned: use `with replace_sdpa():` inside it"
            )
        return super().__call__(function)


@dataclass(eq=False)
class _Layer:
    function: SDPA
    function_before: SDPA
    fast_path_before: bool


_lock = threading.Lock()
_layers: list[_Layer] = []


@functools.cache
def _replacement(schedule: ScheduleName | None) -> SDPA:
    """One function object per schedule, so that entering again does not recompile compiled callers."""

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if _unstructured(query) or _unstructured(key) or _unstructured(value):
            if _attends_jagged(query, key, value, attn_mask, enable_gqa):
                diagonal = masks.causal(diagonal="top-left") if is_causal else None
                return attention(query, key, value, mask=diagonal, scale=scale, dropout_p=dropout_p, schedule=schedule)
            return _torch_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if has_torch_function_variadic(query, key, value, None if _is_causal_bias(attn_mask) else attn_mask):
            return handle_torch_function(
                torch.nn.functional.scaled_dot_product_attention,
                (query, key, value, attn_mask),
                query,
                key,
                value,
                attn_mask=attn_mask,
                dropout_p=dropout_p,
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        return _attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, schedule)

    scaled_dot_product_attention.__doc__ = _torch_sdpa.__doc__
    scaled_dot_product_attention.__wrapped__ = _torch_sdpa  # type: ignore[attr-defined]
    return scaled_dot_product_attention


def _unstructured(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and (tensor.is_nested or tensor.layout is not torch.strided)


def _attends_jagged(query: Any, key: Any, value: Any, attn_mask: Any, enable_gqa: bool) -> bool:
    """Whether the three are jagged tensors (batch, heads, j, dim) that mean the same to onchip."""
    return attn_mask is None and all(
        isinstance(tensor, Tensor)
        and tensor.layout is torch.jagged
        and tensor.dim() == 4
        and tensor._ragged_idx == 2  # type: ignore[attr-defined]
        and (enable_gqa or tensor.shape[1] == query.shape[1])
        for tensor in (query, key, value)
    )


def _is_causal_bias(mask: Any) -> bool:
    # By name: importing torch.nn.attention.bias loads torch._dynamo, which costs seconds.
    kind = type(mask)
    return kind.__name__ == "CausalBias" and kind.__module__ == "torch.nn.attention.bias"


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    schedule: ScheduleName | None,
) -> Tensor:
    if is_causal and attn_mask is not None:
        raise RuntimeError("attn_mask and is_causal exclude each other: got both, put causality into the mask")
    if min(query.dim(), key.dim(), value.dim()) < 2:
        raise RuntimeError(f"query, key and value must have at least two dimensions: got {_shapes(query, key, value)}")

    batch, heads, key_heads = _leading(query, key, value, enable_gqa)
    if 0 in (heads, query.shape[-1], value.shape[-1]):
        return _torch_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    rank = max(query.dim(), key.dim(), value.dim())
    if key_heads is None:
        # Key and value are grouped differently, which onchip does not know: both get the query's heads.
        key = key.repeat_interleave(heads // key.shape[-3], dim=-3)
        value = value.repeat_interleave(heads // value.shape[-3], dim=-3)
        key_heads = heads

    mask: Any = masks.causal(diagonal="top-left") if is_causal else None
    score: Any = None
    if _is_causal_bias(attn_mask):
        mask = _causal_bias(attn_mask, query.shape[-2], key.shape[-2], query.device)
    elif attn_mask is not None:
        folded = _fold_mask(attn_mask, batch)
        if attn_mask.dtype == torch.bool:
            mask = masks.tensor(folded)
        elif attn_mask.dtype in (torch.float32, query.dtype) or _autocast(query.device.type):
            score = scores.bias(folded)
        else:
            raise RuntimeError(
                f"attn_mask must be bool, float32 or of the query's dtype: got {attn_mask.dtype} with a query of "
                f"{query.dtype}, convert it"
            )

    out = attention(
        _fold(query, batch, heads),
        _fold(key, batch, key_heads),
        _fold(value, batch, key_heads),
        mask=mask,
        score=score,
        scale=scale.item() if isinstance(scale, Tensor) else scale,
        # onchip needs a probability below 1, where PyTorch takes 1 and gives zeros.
        dropout_p=0.0 if dropout_p == 1.0 else dropout_p,
        schedule=schedule,
    )
    if dropout_p == 1.0:
        out = out * 0.0
    leading = (*batch, heads) if rank > 2 else ()
    return out.reshape(*leading, *out.shape[-2:])


def _autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def _leading(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Sequence[int], int, int | None]:
    """The batch dimensions, the heads of the query, and the heads that key and value share (None: they differ)."""
    batch: Sequence[int] = query.shape[:-3]
    if not batch == key.shape[:-3] == value.shape[:-3]:
        batch = _broadcast("batch dimensions", [query.shape[:-3], key.shape[:-3], value.shape[:-3]], query, key, value)
    query_heads, key_heads, value_heads = (t.shape[-3] if t.dim() > 2 else 1 for t in (query, key, value))
    if query_heads == key_heads == value_heads:
        return batch, query_heads, key_heads
    if enable_gqa:
        if key_heads == 0 or value_heads == 0 or query_heads % key_heads or query_heads % value_heads:
            raise RuntimeError(
                "the query's heads must be a multiple of the key's and of the value's: "
                f"got {query_heads}, {key_heads} and {value_heads} ({_shapes(query, key, value)})"
            )
        return batch, query_heads, key_heads if key_heads == value_heads else None
    heads = [(query_heads,), (key_heads,), (value_heads,)]
    (head,) = _broadcast("heads", heads, query, key, value, " or pass enable_gqa=True")
    # One key head for all is grouping, which needs no expanded gradient.
    return batch, head, 1 if key_heads == value_heads == 1 else head


def _broadcast(
    name: str, sizes: Sequence[Sequence[int]], query: Tensor, key: Tensor, value: Tensor, hint: str = ""
) -> Sequence[int]:
    try:
        return torch.broadcast_shapes(*sizes)
    except RuntimeError:
        raise RuntimeError(
            f"the {name} of query, key and value must broadcast: got {_shapes(query, key, value)}, make them equal or 1"
            + hint
        ) from None


def _fold(tensor: Tensor, batch: Sequence[int], heads: int) -> Tensor:
    """(..., heads or 1, length, dim) to (batch, heads, length, dim); copies only where broadcast dimensions merge."""
    tail = tensor.shape[-2:]
    return tensor.expand(*batch, heads, *tail).reshape(math.prod(batch), heads, *tail)


def _fold_mask(mask: Tensor, batch: Sequence[int]) -> Tensor:
    """A mask that broadcasts to (*batch, heads, length_q, length_k) as a view that broadcasts to four dimensions."""
    count = len(batch)
    mask = mask[(None,) * (count + 3 - mask.dim())]
    if count == 1:
        return mask
    if any(size != 1 for size in mask.shape[:count]):
        mask = mask.expand(*batch, *mask.shape[count:])
    return mask.reshape(math.prod(mask.shape[:count]), *mask.shape[count:])


def _causal_bias(bias: Any, length_q: int, length_k: int, device: torch.device) -> masks.Mask:
    if bias.variant.name == "UPPER_LEFT" or bias.seq_len_q == bias.seq_len_kv:
        return masks.causal(diagonal="top-left")
    if (bias.seq_len_q, bias.seq_len_kv) == (length_q, length_k):
        return masks.causal(diagonal="bottom-right")
    offset = bias.seq_len_kv - bias.seq_len_q
    keep = torch.ones(bias.seq_len_q, bias.seq_len_kv, dtype=torch.bool, device=device).tril(offset)
    return masks.tensor(keep)


def _shapes(query: Tensor, key: Tensor, value: Tensor) -> str:
    return f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
