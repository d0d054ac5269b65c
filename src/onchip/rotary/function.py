"""The public function: binds the arguments to rotations, checks what shapes can tell, and runs them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from onchip.problem import check_number
from onchip.rotary.arguments import (
    angles_of,
    check_cu_seqlens,
    check_inputs,
    check_start,
    offset_of,
    pair_of,
    positions_of,
)
from onchip.rotary.operator import SCHEDULES, ScheduleName, run
from onchip.rotary.rotation import Rotation

Key = TypeVar("Key", Tensor, None)
Offset = int | Tensor


def rotary(
    query: Tensor,
    key: Key,
    positions: Tensor | tuple[Tensor, Tensor] | None = None,
    *,
    offset: Offset | tuple[Offset, Offset] = 0,
    cu_seqlens_query: Tensor | None = None,
    cu_seqlens_key: Tensor | None = None,
    dim: int | None = None,
    interleaved: bool = False,
    base: float | None = None,
    frequencies: Tensor | None = None,
    tables: tuple[Tensor, Tensor] | None = None,
    scale: float = 1.0,
    inverse: bool = False,
    schedule: ScheduleName | None = None,
) -> tuple[Tensor, Key]:
    """Rotate queries and keys by their positions: the rotary position embedding.

    Pair i of a row at position p, (x, y), becomes `scale * (x cos a - y sin a, y cos a + x sin a)` with the angle
    `a = p * frequency_i` in radians and `frequency_i = base ** (-2 i / dim)`. The product of a query and a key then
    depends on their positions by the difference alone.

    Args:
        query: (batch, heads_q, length_q, head_dim), or packed as `attention_varlen` takes it, (tokens_q, heads_q,
            head_dim); float16, bfloat16, float32 or float64, any strides.
        key: (batch, heads_kv, length_k, head_dim) or (tokens_k, heads_kv, head_dim), or None; its dtype may be another.
        positions: int32 or int64, (length,), or (batch or 1, length) where not packed; one for both, or a pair
            (query's, key's). None counts from 0. A packed batch needs positions or `cu_seqlens_query`.
        offset: added to all positions, as where a cache already holds keys: an int, an int tensor of one element, or
            an int tensor (batch,) with one for each sequence (packed: together with cu_seqlens); or a pair (query's,
            key's). Where query and key have different lengths and no positions, a pair is needed:
            `(length_k - length_q, 0)` ends both at the same position, as causal attention does.
        cu_seqlens_query: int32 or int64 (sequences + 1,), offsets of packed sequences as in `attention_varlen`:
            positions count from each start. Tokens behind the last offset count from it.
        cu_seqlens_key: the same for keys; None means cu_seqlens_query. With another tensor, as with other lengths,
            `offset` must be a pair.
        dim: how many leading numbers of a row are rotated, even; the rest is copied. By default what `frequencies` or
            `tables` say, else head_dim.
        interleaved: pair i is the numbers (2 i, 2 i + 1), as in GPT-J; otherwise (i, i + dim / 2), as in GPT-NeoX and
            Llama.
        base: of the frequencies, 10000 unless given; at most one of base, frequencies and tables.
        frequencies: float32 or float64 (dim / 2,), radians a position, as scaled ones of Llama 3 or YaRN are.
        tables: (cos, sin), floating, each (rows, dim / 2) and read at the positions, or (batch or 1, length, dim / 2)
            with one row for each token: then positions and offset may not be given.
        scale: factor of the result of rotated pairs; the attention factor of YaRN.
        inverse: rotate by the negative angle, which undoes a rotation of the same scale 1.
        schedule: "torch" or "triton"; None chooses: the Triton kernel on GPUs, torch operations elsewhere and for
            float64. A name runs that or raises.

    Returns:
        (query, key), rotated, each with its dtype and in its stride order; new tensors. None for a key of None.

    Raises:
        TypeError, ValueError: an argument does not fit; the message names it, what came and what is accepted.
        Unsupported: the named schedule cannot run it.

    Precision: angles of `base` and `frequencies` are reduced exactly (the kernel: as integers, modulo 2**-64 of a
    turn; torch: in float64), so cosines and sines are within 3e-7 of the true ones at any position up to 2**30.
    Products are float32 (float64 for float64), and results are rounded once.
    Gradients: of query and key, any number of times; nothing of either is kept for them. `frequencies` and `tables`
    have none, so they may not require any. Values on a GPU are not read: positions outside of tables take
    their first or last row there; `onchip.checked()` validates them, as happens on a CPU.
    Cost: each number is read and written once; on a GPU one launch for both where they share positions, else two.
    Source: Su et al. 2021, RoFormer, section 3.2.2, equations 14, 15 and 34.
    """
    check_inputs(query, key)
    if schedule is not None and schedule not in SCHEDULES:
        raise ValueError(f"schedule must be None or one of {', '.join(SCHEDULES)}, got {schedule!r}")
    placed, offsets = pair_of("positions", positions), pair_of("offset", offset)
    started = (cu_seqlens_query, cu_seqlens_query if cu_seqlens_key is None else cu_seqlens_key)
    dim, base = angles_of(query, dim, base, frequencies, tables)
    cos, sin = (None, None) if tables is None else tables
    scale = float(check_number("scale", scale, -math.inf, math.inf, "a finite number"))
    # for both; where tokens stand is bound for each
    shared = Rotation(
        *(None, None, None, frequencies, cos, sin, 0, 0, dim, base, scale),
        *(bool(interleaved), bool(inverse), schedule or ""),
    )
    counted = positions is None and not isinstance(offset, tuple | list)
    if key is not None and counted and (cos is None or cos.dim() == 2):
        check_start(query, key, *started)
    rotation = _placed(shared, "query", query, placed[0], offsets[0], started[0])
    if key is None:
        return run([query], rotation)[0], None
    of_key = _placed(shared, "key", key, placed[1], offsets[1], started[1])

    length = 0 if query.dim() == 3 else 2
    if (
        placed[0] is placed[1]
        and offsets[0] is offsets[1]
        and started[0] is started[1]
        and query.shape[length] == key.shape[length]
    ):
        rotated_query, rotated_key = run([query, key], rotation)
    else:
        (rotated_query,), (rotated_key,) = run([query], rotation), run([key], of_key)
    return rotated_query, rotated_key


def _placed(
    shared: Rotation, side: str, tensor: Tensor, positions: Any, offset: Any, cu_seqlens: Tensor | None
) -> Rotation:
    """The rotation of one side: `shared` with where its tokens stand."""
    packed = tensor.dim() == 3
    batch, length = (1, tensor.shape[0]) if packed else (tensor.shape[0], tensor.shape[2])
    cos, sin, step = shared.cos, shared.sin, 0
    if cos is not None and sin is not None and cos.dim() == 3:
        if positions is not None or cu_seqlens is not None or not isinstance(offset, int) or offset != 0:
            raise ValueError("tables with a row for each token take no positions, offset or cu_seqlens")
        if cos.shape[0] not in (1, batch) or cos.shape[1] != length:
            raise ValueError(
                f"tables with a row for each token must be (batch or 1, length, dim / 2) = ({batch}, {length}, "
                f"{shared.dim // 2}) for {side}, got {tuple(cos.shape)}"
            )
        step = 0 if cos.shape[0] == 1 else length
        cos, sin = cos.flatten(0, 1), sin.flatten(0, 1)
    elif packed and positions is None and cu_seqlens is None:
        raise ValueError(f"a packed {side} needs positions, or cu_seqlens_{side} from whose starts they count")
    if positions is not None:
        positions = positions_of(side, positions, packed, batch, length, tensor.device)
    if cu_seqlens is not None:
        check_cu_seqlens(side, cu_seqlens, packed, positions is not None, tensor.device)
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    offset, offsets = offset_of(offset, sequences, packed and cu_seqlens is None, tensor.device)
    return replace(
        shared, positions=positions, offsets=offsets, cu_seqlens=cu_seqlens, cos=cos, sin=sin, offset=offset, step=step
    )
