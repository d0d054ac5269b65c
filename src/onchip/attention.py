"""The public functions: bind the arguments of a call to a Problem, check what shapes can tell, and run it."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onchip import dispatch, masks, nested, ops, sharding
from onchip.dispatch import Plan, ScheduleName
from onchip.masks import Mask
from onchip.ops import autocasts
from onchip.problem import Problem, check_inputs, check_lengths, check_number, layout_shape
from onchip.scores import Score, Softcap, ordered

Lengths = tuple[Tensor | None, Tensor | None]
Window = tuple[int | None, int | None]


class Output(NamedTuple):
    """`out`, like query with value's dim, and `lse`, the natural log-sum-exp of each row's scores."""

    out: Tensor
    lse: Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    mask: Mask | Tensor | None = None,
    score: Score | tuple[Score, ...] | None = None,
    lengths: Lengths | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    deterministic: bool | None = None,
    schedule: ScheduleName | None = None,
) -> Tensor:
    """Exact attention, `softmax(scale * query @ key^T) @ value` over the visible keys.

    Args:
        query: (batch, heads_q, length_q, dim_qk), float16, bfloat16, float32 or float64, any strides.
        key: (batch, heads_kv, length_k, dim_qk); heads_q is a multiple of heads_kv.
        value: (batch, heads_kv, length_k, dim_v). All three may be jagged nested tensors, (batch, heads, j, dim): the
            call is then `attention_varlen` on their values, and the result is jagged over the query's offsets. Or all
            three may be DTensors sharded over batch or heads; so is the result then.
        causal: a query sees the keys up to its diagonal, aligned to the **bottom right**: the last query sees the last
            key. `F.scaled_dot_product_attention(is_causal=True)` aligns to the top left; that is
            `mask=masks.causal("top-left")`. The two agree where the lengths do.
        window: (left, right) keys before and after the diagonal, inclusive; None is unbounded.
        mask: a value of `onchip.masks`, or a bool tensor broadcastable to (batch, heads_q, length_q, length_k), True
            where visible. `causal`, `window` and `mask` intersect.
        score: a value of `onchip.scores` or a tuple of them.
        lengths: (query_lengths, key_lengths), int tensors (batch,) or None: how many leading rows of a sequence exist.
        scale: factor of the products; `dim_qk ** -0.5` by default.
        dropout_p: share of weights that dropout removes, in [0, 1).
        dropout_seed: an int, or an int64 tensor of one element; None draws one from torch's generator of the device.
        deterministic: equal bits over repeats, gradients included; None follows torch.use_deterministic_algorithms.
        schedule: None chooses; a name runs that schedule or raises.

    Returns:
        (batch, heads_q, length_q, dim_v) in the query's dtype and stride order. A row that sees no key is 0.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it, what came and what is accepted.
        Unsupported: the named schedule cannot run the problem.

    Cost: 2 * pairs * (dim_qk + dim_v) operations on the visible pairs; memory linear in the lengths. See `onchip.plan`.
    Source: Vaswani et al. 2017, section 3.2.1; Dao 2023, FlashAttention-2, algorithms 1 and 2.
    """
    if mask is None and lengths is None and dropout_seed is None and (score is None or type(score) is Softcap):
        ready = _ready(query, key, value, causal, window, score, scale, dropout_p, deterministic, schedule, False)
        if ready is not None:
            return ops.run_directly(ready, query, key, value)[0]
    if nested.is_given(query, key, value):
        packed = nested.unpack(query, key, value, mask, lengths)
        out = attention_varlen(
            *packed.inputs,
            causal=causal,
            window=window,
            mask=mask,
            score=score,
            lengths=packed.lengths,
            scale=scale,
            dropout_p=dropout_p,
            dropout_seed=dropout_seed,
            deterministic=deterministic,
            schedule=schedule,
        )
        return packed.jagged(out)
    query, key, value = _autocast(query, key, value)
    check_inputs(query, key, value, packed=False)
    problem = _bind(
        query,
        key,
        None,
        None,
        value,
        causal,
        window,
        mask,
        score,
        lengths,
        scale,
        dropout_p,
        dropout_seed,
        deterministic,
        schedule,
        False,
    )
    return _run(problem, query, key, value)[0]


def attention_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    mask: Mask | Tensor | None = None,
    score: Score | tuple[Score, ...] | None = None,
    lengths: Lengths | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    deterministic: bool | None = None,
    schedule: ScheduleName | None = None,
) -> Output:
    """`attention`, and the log-sum-exp of each row's scores.

    Returns:
        Output(out, lse): lse is (batch, heads_q, length_q), natural logarithm, differentiable; minus infinity for a row
        that sees no key (the sink's logit if there is a sink). Dropout does not change it.

    Arguments and errors are those of `attention`.
    """
    if mask is None and lengths is None and dropout_seed is None and (score is None or type(score) is Softcap):
        ready = _ready(query, key, value, causal, window, score, scale, dropout_p, deterministic, schedule, True)
        if ready is not None:
            return Output(*ops.run_directly(ready, query, key, value))
    if nested.is_given(query, key, value):
        packed = nested.unpack(query, key, value, mask, lengths)
        out, lse = attention_varlen_with_lse(
            *packed.inputs,
            causal=causal,
            window=window,
            mask=mask,
            score=score,
            lengths=packed.lengths,
            scale=scale,
            dropout_p=dropout_p,
            dropout_seed=dropout_seed,
            deterministic=deterministic,
            schedule=schedule,
        )
        return Output(packed.jagged(out), packed.jagged_lse(lse))
    query, key, value = _autocast(query, key, value)
    check_inputs(query, key, value, packed=False)
    problem = _bind(
        query,
        key,
        None,
        None,
        value,
        causal,
        window,
        mask,
        score,
        lengths,
        scale,
        dropout_p,
        dropout_seed,
        deterministic,
        schedule,
        True,
    )
    return Output(*_run(problem, query, key, value))


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_query: Tensor,
    cu_seqlens_key: Tensor | None = None,
    *,
    causal: bool = False,
    window: Window | None = None,
    mask: Mask | Tensor | None = None,
    score: Score | tuple[Score, ...] | None = None,
    lengths: Lengths | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    deterministic: bool | None = None,
    schedule: ScheduleName | None = None,
) -> Tensor:
    """Exact attention over sequences of different lengths, packed one behind the other without padding.

    Args:
        query: (tokens_q, heads_q, dim_qk). key: (tokens_k, heads_kv, dim_qk). value: (tokens_k, heads_kv, dim_v).
        cu_seqlens_query: int32 or int64 (batch + 1,), offsets of the sequences: from 0, never decreasing, to at most
            tokens_q.
        cu_seqlens_key: the same for keys; None means cu_seqlens_query.
        mask, score: batch means the sequence's number and indices count from its start. `masks.keys` and
            `masks.documents` take one entry for each token.
        lengths: how many leading tokens of each sequence exist, if fewer than its offsets give it room for.

    The other arguments and the errors are those of `attention`.

    Returns:
        (tokens_q, heads_q, dim_v) in the query's dtype and stride order; tokens outside every sequence are 0.
    """
    query, key, value = _autocast(query, key, value)
    check_inputs(query, key, value, packed=True)
    problem = _bind(
        query,
        key,
        cu_seqlens_query,
        cu_seqlens_query if cu_seqlens_key is None else cu_seqlens_key,
        value,
        causal,
        window,
        mask,
        score,
        lengths,
        scale,
        dropout_p,
        dropout_seed,
        deterministic,
        schedule,
        False,
    )
    return _run(problem, query, key, value)[0]


def attention_varlen_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_query: Tensor,
    cu_seqlens_key: Tensor | None = None,
    *,
    causal: bool = False,
    window: Window | None = None,
    mask: Mask | Tensor | None = None,
    score: Score | tuple[Score, ...] | None = None,
    lengths: Lengths | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    deterministic: bool | None = None,
    schedule: ScheduleName | None = None,
) -> Output:
    """`attention_varlen`, and the log-sum-exp of each row's scores.

    Returns:
        Output(out, lse): lse is (heads_q, tokens_q), natural logarithm, differentiable.

    Arguments and errors are those of `attention_varlen`.
    """
    query, key, value = _autocast(query, key, value)
    check_inputs(query, key, value, packed=True)
    problem = _bind(
        query,
        key,
        cu_seqlens_query,
        cu_seqlens_query if cu_seqlens_key is None else cu_seqlens_key,
        value,
        causal,
        window,
        mask,
        score,
        lengths,
        scale,
        dropout_p,
        dropout_seed,
        deterministic,
        schedule,
        True,
    )
    return Output(*_run(problem, query, key, value))


def plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    mask: Mask | Tensor | None = None,
    score: Score | tuple[Score, ...] | None = None,
    lengths: Lengths | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    deterministic: bool | None = None,
    schedule: ScheduleName | None = None,
) -> Plan:
    """What `attention` would do with these arguments; computes nothing.

    Returns:
        Plan: the chosen schedules, why not the others, operations, bytes, workspace. `print(plan)` explains.

    Arguments and errors are those of `attention`.
    """
    if nested.is_given(query, key, value):
        packed = nested.unpack(query, key, value, mask, lengths)
        return plan_varlen(
            *packed.inputs,
            causal=causal,
            window=window,
            mask=mask,
            score=score,
            lengths=packed.lengths,
            scale=scale,
            dropout_p=dropout_p,
            dropout_seed=dropout_seed,
            deterministic=deterministic,
            schedule=schedule,
        )
    query, key, value = _autocast(query, key, value)
    check_inputs(query, key, value, packed=False)
    problem = _bind(
        query,
        key,
        None,
        None,
        value,
        causal,
        window,
        mask,
        score,
        lengths,
        scale,
        dropout_p,
        0 if dropout_seed is None else dropout_seed,
        deterministic,
        schedule,
        False,
    )
    notes = ("causal=True aligns to the bottom right; SDPA's is_causal aligns to the top left",) if causal else ()
    return ops.plan(problem, notes)


def plan_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_query: Tensor,
    cu_seqlens_key: Tensor | None = None,
    *,
    causal: bool = False,
    window: Window | None = None,
    mask: Mask | Tensor | None = None,
    score: Score | tuple[Score, ...] | None = None,
    lengths: Lengths | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    deterministic: bool | None = None,
    schedule: ScheduleName | None = None,
) -> Plan:
    """What `attention_varlen` would do with these arguments; computes nothing.

    Returns:
        Plan, as `plan`. Arguments and errors are those of `attention_varlen`.
    """
    query, key, value = _autocast(query, key, value)
    check_inputs(query, key, value, packed=True)
    problem = _bind(
        query,
        key,
        cu_seqlens_query,
        cu_seqlens_query if cu_seqlens_key is None else cu_seqlens_key,
        value,
        causal,
        window,
        mask,
        score,
        lengths,
        scale,
        dropout_p,
        0 if dropout_seed is None else dropout_seed,
        deterministic,
        schedule,
        False,
    )
    return ops.plan(problem, ())


# Binding

_READY: dict[Any, dispatch.Ready] = {}
_MOST = 1024


def _ready(
    query: Any,
    key: Any,
    value: Any,
    causal: Any,
    window: Any,
    score: Softcap | None,
    scale: Any,
    dropout_p: Any,
    deterministic: Any,
    schedule: Any,
    gives_lse: bool,
) -> dispatch.Ready | None:
    """A plain call's problem and schedules, found at the first call with these facts; None where more must be asked."""
    if (
        ops.is_observed(query, key, value)
        or query.is_nested
        or (ops.narrows(query.device) and not _is_cast(query, key, value))
        or (window is not None and not _is_window(window))
        or (causal is not False and causal is not True)
        or (scale is not None and type(scale) is not float)
        or type(dropout_p) is not float
        or dropout_p != 0.0
        or (schedule is not None and (type(schedule) is not str or schedule in dispatch.COMPOSITE))
    ):
        return None
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    cap = None if score is None else score.cap
    facts = (
        *(query.shape, key.shape, value.shape, query.dtype, key.dtype, value.dtype, query.device, key.device),
        *(value.device, causal, window, cap, scale, bool(deterministic), schedule, gives_lse),
    )
    ready = _READY.get(facts)
    if ready is None:
        check_inputs(query, key, value, packed=False)
        rest = (window, None, score, None, scale, 0.0, None, deterministic, schedule, gives_lse)
        problem = _bind(query, key, None, None, value, causal, *rest)
        ready = dispatch.Ready(problem)
        if len(_READY) >= _MOST:
            _READY.clear()
        _READY[facts] = ready
    return ready


def _is_window(window: Any) -> bool:
    """Whether a window is one that equals no other but the same: True == 1 would."""
    return type(window) is tuple and all(side is None or type(side) is int for side in window)


def _is_cast(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether autocast would leave the inputs as they are."""
    return query.dtype == key.dtype == value.dtype == torch.get_autocast_dtype(query.device.type)


def _run(problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    if sharding.is_given(query, key, value):
        return sharding.run(problem, query, key, value)
    return ops.run(problem, query, key, value)


def _autocast(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under torch.autocast the inputs take its dtype, as torch's own attention does; float64 stays."""
    if isinstance(query, Tensor) and autocasts(query.device):
        dtype = torch.get_autocast_dtype(query.device.type)
        inputs = (query, key, value)
        if all(isinstance(part, Tensor) and part.is_floating_point() for part in inputs):
            query, key, value = (part if part.dtype == torch.float64 else part.to(dtype) for part in inputs)
    return query, key, value


def _bind(
    query: Tensor,
    key: Tensor,
    cu_seqlens_query: Tensor | None,
    cu_seqlens_key: Tensor | None,
    value: Tensor,
    causal: bool,
    window: Window | None,
    mask: Mask | Tensor | None,
    score: Score | tuple[Score, ...] | None,
    lengths: Lengths | None,
    scale: float | None,
    dropout_p: float,
    dropout_seed: int | Tensor | None,
    deterministic: bool | None,
    schedule: str | None,
    gives_lse: bool,
) -> Problem:
    device = query.device
    if cu_seqlens_query is not None:
        count = _offsets("cu_seqlens_query", cu_seqlens_query)
        check_lengths("cu_seqlens_query", cu_seqlens_query, count, device)
        check_lengths("cu_seqlens_key", cu_seqlens_key, count, device)
        batch, layout = count - 1, "packed"
    else:
        batch, layout = query.shape[0], "dense"
    query_lengths, key_lengths = _lengths(lengths, batch, device)
    if layout == "dense" and (query_lengths is not None or key_lengths is not None):
        layout = "padded"
    dispatch.check_name(schedule)
    dropout_p = check_number("dropout_p", dropout_p, 0.0, 1.0, "a number in [0, 1)")
    if scale is None:
        scale = query.shape[-1] ** -0.5
    else:
        scale = check_number("scale", scale, -math.inf, math.inf, "a finite number")
    problem = Problem(
        **layout_shape(layout, query, key, value, cu_seqlens_query),
        mask=_mask(causal, window, mask),
        scores=ordered(score),
        scale=scale,
        dropout_p=dropout_p,
        seed=_seed(dropout_p, dropout_seed, device),
        cu_seqlens_query=cu_seqlens_query,
        cu_seqlens_key=cu_seqlens_key,
        query_lengths=query_lengths,
        key_lengths=key_lengths,
        deterministic=torch.are_deterministic_algorithms_enabled() if deterministic is None else bool(deterministic),
        schedule=schedule,
        gives_lse=gives_lse,
    )
    problem.check_static()
    return problem


def _mask(causal: Any, window: Any, mask: Any) -> Mask | None:
    if not isinstance(causal, bool):
        raise TypeError(
            f"causal must be True or False, got {causal!r}; another diagonal is mask=masks.causal(diagonal)"
        )
    parts = [masks.causal()] if causal else []
    if window is not None:
        if isinstance(window, int):
            raise TypeError(
                f"window must be (left, right) or None, got the int {window}: to let each query see w keys up to its "
                "own, give (w - 1, 0)"
            )
        if not isinstance(window, tuple | list) or len(window) != 2:
            raise TypeError(f"window must be (left, right) or None, got {window!r}")
        parts.append(masks.window(*window))
    if isinstance(mask, Tensor):
        parts.append(masks.tensor(mask))
    elif isinstance(mask, Mask):
        parts.append(mask)
    elif mask is not None:
        raise TypeError(
            f"mask must be a value of onchip.masks or a bool tensor, got {type(mask).__name__}; "
            "a function is masks.predicate(fn)"
        )
    if not parts:
        return None
    return parts[0] if len(parts) == 1 else masks.every(parts)


def _lengths(lengths: Any, batch: int, device: torch.device) -> Lengths:
    if lengths is None:
        return None, None
    if not isinstance(lengths, tuple | list) or len(lengths) != 2:
        raise TypeError(
            f"lengths must be (query_lengths, key_lengths), either may be None, got {type(lengths).__name__}"
        )
    for name, given in zip(("query", "key"), lengths, strict=True):
        if given is not None:
            check_lengths(f"lengths: {name} lengths", given, batch, device)
    return lengths[0], lengths[1]


def _offsets(name: str, cu_seqlens: Any) -> int:
    """How many entries cu_seqlens has."""
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"{name} must be an int32 or int64 tensor, got {type(cu_seqlens).__name__}")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"{name} must have shape (batch + 1,), got {tuple(cu_seqlens.shape)}")
    return cu_seqlens.shape[0]


def _seed(dropout_p: float, seed: Any, device: torch.device) -> Tensor | None:
    """One int64 on the device, or None without dropout."""
    if seed is not None and not isinstance(seed, int | Tensor):
        raise TypeError(f"dropout_seed must be an int, an int64 tensor of one element, or None, got {seed!r}")
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise ValueError(
                f"dropout_seed must hold one int64, got a {seed.dtype} tensor of shape {tuple(seed.shape)}"
            )
        if seed.device != device:
            raise ValueError(f"dropout_seed must be on the query's device {device}, got {seed.device}")
    if dropout_p == 0.0:
        return None
    if seed is None:
        return torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device)
    if isinstance(seed, Tensor):
        return seed.reshape(())
    # 64 bits, read as a signed number; a fill needs no copy from the host
    return torch.full((), (seed + 2**63) % 2**64 - 2**63, dtype=torch.int64, device=device)
