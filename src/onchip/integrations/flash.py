"""onchip as a flash-attention implementation of `torch.nn.attention`, under F.scaled_dot_product_attention.

    onchip.integrations.flash.register()
    torch.nn.attention.activate_flash_attention_impl("onchip")
    ...
    torch.nn.attention.restore_flash_attention_impl()

Between the two, the flash operators of aten run here, on CPU and CUDA, forward and backward: from
F.scaled_dot_product_attention, from nn.MultiheadAttention, from graphs that torch.compile has built before, and on CUDA
from jagged nested tensors and `torch.nn.attention.varlen.varlen_attn`. Which backend a call takes stays torch's choice;
`torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION)` asks for this one.

    operator                                        causal aligns to   beyond that
    _scaled_dot_product_flash_attention_for_cpu     top left           an additive or bool mask
    _scaled_dot_product_flash_attention             bottom right       dropout
    _flash_attention_forward                        bottom right       dropout, packed batches, windows, key lengths

The CUDA operators align to the bottom right, as FlashAttention does since 2.1: torch sends them `is_causal` only where
the two agree, and `CausalVariant.LOWER_RIGHT`.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from onchip import masks, scores
from onchip.attention import _bind
from onchip.problem import Problem
from onchip.strides import laid_out

NAME = "onchip"

_NEEDED = ("register_flash_attention_impl", "activate_flash_attention_impl", "restore_flash_attention_impl")


def register() -> None:
    """Offer onchip to `torch.nn.attention.activate_flash_attention_impl("onchip")`. Changes nothing by itself.

    Raises:
        RuntimeError: this torch has no registry, or none whose implementations can be taken back (torch before 2.11).
    """
    import torch.nn.attention

    missing = [name for name in _NEEDED if not hasattr(torch.nn.attention, name)]
    if missing:
        raise RuntimeError(
            f"torch {torch.__version__} lacks torch.nn.attention.{' and .'.join(missing)}: the registry of flash "
            "implementations is complete from torch 2.11 on; onchip.replace_sdpa() needs none"
        )
    torch.nn.attention.register_flash_attention_impl(NAME, register_fn=_activate)


@dataclass
class _Active:
    """What torch keeps while onchip is active: the registrations live as long as the library."""

    library: Library | None

    def remove(self) -> None:
        self.library = None


def _activate() -> _Active:
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        # that a kernel is registered over another one is what was asked for
        warnings.simplefilter("ignore", UserWarning)
        for device, kernels in _KERNELS.items():
            for name, kernel in kernels.items():
                if hasattr(torch.ops.aten, name):
                    library.impl(name, kernel, device)
    return _Active(library)


# What both devices share. Below autograd: gradients are aten's, which calls the backward operators.


def _problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens: tuple[Tensor | None, Tensor | None] = (None, None),
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    mask: masks.Mask | None = None,
    score: scores.Score | None = None,
    key_lengths: Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    gives_lse: bool = True,
) -> Problem:
    if query.shape[-1] != value.shape[-1]:
        raise NotImplementedError(
            "torch's flash operators give the output the query's head dim, so the value's must be the same: got "
            f"query {tuple(query.shape)} and value {tuple(value.shape)}; onchip.attention takes both"
        )
    return _bind(
        query,
        key,
        *cu_seqlens,
        value,
        causal,
        window,
        mask,
        score,
        None if key_lengths is None else (None, key_lengths),
        scale,
        dropout_p,
        seed,
        None,
        None,
        gives_lse,
    )


def _forward(problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = torch.ops.onchip.attention(query, key, value, *problem.lower())
    return laid_out(out, query), lse


def _backward(
    problem: Problem, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, ...]:
    tensors, *rest = problem.lower()
    needs = [True] * 3 + [False] * len(tensors)
    saved = (query, key, value, out, lse)
    return tuple(torch.ops.onchip.attention_backward(grad_out, None, *saved, tensors, *rest, needs))


# CPU


def _cpu_problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    is_causal: bool,
    attn_mask: Tensor | None,
    scale: float | None,
) -> Problem:
    if dropout_p != 0.0:
        raise NotImplementedError(
            "torch's flash operator for the CPU hands no seed to its backward, so dropout could not be replayed: got "
            f"dropout_p={dropout_p}; onchip.attention(dropout_p=...) has it"
        )
    mask = masks.causal("top-left") if is_causal else None
    score = None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        mask = masks.tensor(attn_mask) if mask is None else mask & masks.tensor(attn_mask)
    elif attn_mask is not None:
        score = scores.bias(attn_mask)
    return _problem(query, key, value, mask=mask, score=score, scale=scale, gives_lse=False)


def _lengths_before_heads(tensor: Tensor) -> Tensor:
    """(batch, heads, length, ...), in memory (batch, length, heads, ...) as the operator's fake kernel says."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _cpu_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    problem = _cpu_problem(query, key, value, dropout_p, is_causal, attn_mask, scale)
    out, lse = _forward(problem, query, key, value)
    return out, _lengths_before_heads(lse)


def _cpu_sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    problem = _cpu_problem(query, key, value, dropout_p, is_causal, attn_mask, scale)
    gradients = _backward(problem, grad_out, query, key, value, out, logsumexp)
    return tuple(_lengths_before_heads(gradient) for gradient in gradients)


# CUDA


def _pack_seed(problem: Problem) -> tuple[Tensor, Tensor]:
    """Dropout's seed in the two tensors that aten hands to its backward: (2,) and () uint64, on AMD () int64."""
    seed = problem.seed
    if torch.version.hip:
        nothing = torch.zeros((), dtype=torch.int64, device=problem.device)
        return nothing if seed is None else seed.clone(), nothing.clone()
    state = torch.zeros(2, dtype=torch.int64, device=problem.device)
    if seed is not None:
        state[0] = seed
    return state.view(torch.uint64), torch.zeros((), dtype=torch.int64, device=problem.device).view(torch.uint64)


def _unpack_seed(dropout_p: float, state: Tensor) -> Tensor | None:
    return None if dropout_p == 0.0 else state.view(torch.int64).flatten()[:1]


def _refuse_weights(return_debug_mask: bool) -> None:
    if return_debug_mask:
        raise NotImplementedError("return_debug_mask must be False: the weights are never in memory")


def _cuda_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    _refuse_weights(return_debug_mask)
    problem = _problem(query, key, value, causal=is_causal, scale=scale, dropout_p=dropout_p)
    out, lse = _forward(problem, query, key, value)
    state, unused = _pack_seed(problem)
    return out, lse, None, None, query.shape[2], key.shape[2], state, unused, query.new_empty(0)


def _cuda_sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    seed = _unpack_seed(dropout_p, philox_seed)
    problem = _problem(query, key, value, causal=is_causal, scale=scale, dropout_p=dropout_p, seed=seed)
    return _backward(problem, grad_out, query, key, value, out, logsumexp)


def _window(left: int | None, right: int | None) -> tuple[int | None, int | None] | None:
    """aten's -1 is unbounded, as None is."""
    sides = tuple(None if side is None or side < 0 else side for side in (left, right))
    return None if sides == (None, None) else (sides[0], sides[1])


def _packed(cum_seq_q: Tensor | None, cum_seq_k: Tensor | None) -> bool:
    if (cum_seq_q is None) != (cum_seq_k is None):
        raise ValueError("cum_seq_q and cum_seq_k must both be given (packed) or both be None (dense)")
    return cum_seq_q is not None


def _flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, ...]:
    """(batch, length, heads, dim), or packed (tokens, heads, dim).

    `num_splits` asks for speed, or with 1 for results that do not depend on the batch, as they never do here.
    """
    _refuse_weights(return_debug_mask)
    _refuse_what_aten_cannot_differentiate(query, key, value, seqused_k, alibi_slopes, block_table)
    packed = _packed(cum_seq_q, cum_seq_k)
    inputs = (query, key, value) if packed else (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    problem = _problem(
        *inputs,
        cu_seqlens=(cum_seq_q, cum_seq_k),
        causal=is_causal,
        window=_window(window_size_left, window_size_right),
        key_lengths=seqused_k,
        scale=scale,
        dropout_p=dropout_p,
    )
    out, lse = _forward(problem, *inputs)
    return laid_out(out if packed else out.transpose(1, 2), query), lse, *_pack_seed(problem), query.new_empty(0)


def _refuse_what_aten_cannot_differentiate(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seqused_k: Tensor | None,
    alibi_slopes: Tensor | None,
    block_table: Tensor | None,
) -> None:
    if block_table is not None:
        raise NotImplementedError("block_table must be None: onchip has no paged keys; pack them")
    if alibi_slopes is not None:
        raise NotImplementedError(
            "alibi_slopes must be None: they do not reach torch's backward operator, so gradients would be wrong; "
            "onchip.attention takes scores.alibi(slopes)"
        )
    recorded = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    if seqused_k is not None and recorded:
        raise NotImplementedError(
            "seqused_k does not reach torch's backward operator, so gradients would be wrong: call it under "
            "torch.no_grad(), or onchip.attention_varlen with lengths"
        )


def _flash_forward_in_place(out: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
    result, lse, *_ = _flash_forward(*arguments, **keywords)
    out.copy_(result)
    return lse


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    packed = _packed(cum_seq_q, cum_seq_k)
    grad, q, k, v, o = (tensor if packed else tensor.transpose(1, 2) for tensor in (grad_out, query, key, value, out))
    problem = _problem(
        q,
        k,
        v,
        cu_seqlens=(cum_seq_q, cum_seq_k),
        causal=is_causal,
        window=_window(window_size_left, window_size_right),
        scale=scale,
        dropout_p=dropout_p,
        seed=_unpack_seed(dropout_p, rng_state),
    )
    gradients = _backward(problem, grad, q, k, v, o, logsumexp)
    return tuple(
        laid_out(gradient if packed else gradient.transpose(1, 2), like)
        for gradient, like in zip(gradients, (query, key, value), strict=True)
    )


_KERNELS: dict[str, dict[str, Any]] = {
    "CPU": {
        "_scaled_dot_product_flash_attention_for_cpu": _cpu_sdpa,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _cpu_sdpa_backward,
    },
    "CUDA": {
        "_scaled_dot_product_flash_attention": _cuda_sdpa,
        "_scaled_dot_product_flash_attention_backward": _cuda_sdpa_backward,
        "_flash_attention_forward": _flash_forward,
        "_flash_attention_forward_no_dropout_inplace": _flash_forward_in_place,
        "_flash_attention_backward": _flash_backward,
    },
}
"""By dispatch key. Newer torch has more operators than older; those that are not there are left out."""
