"""Checks of the arguments of `rotary`, of what shapes and dtypes can tell."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from onchip.checks import describe
from onchip.problem import DTYPES, check_number

BASE = 10000.0
_INTS = (torch.int32, torch.int64)


def check_inputs(query: Any, key: Any) -> None:
    for name, tensor in (("query", query), ("key", key)):
        if name == "key" and tensor is None:
            continue
        if not isinstance(tensor, Tensor):
            accepted = "a tensor or None" if name == "key" else "a tensor"
            raise TypeError(f"{name} must be {accepted}, got {type(tensor).__name__}")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}")
        if tensor.dim() not in (3, 4):
            raise ValueError(
                f"{name} must be (batch, heads, length, head_dim) or packed (tokens, heads, head_dim), got "
                f"{tuple(tensor.shape)}"
            )
    if key is None:
        return
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}"
    if query.device != key.device:
        raise ValueError(f"query and key must be on one device, got {query.device} and {key.device}")
    if query.dim() != key.dim():
        raise ValueError(f"query and key must both be packed or neither, got {shapes}")
    if query.dim() == 4 and query.shape[0] != key.shape[0]:
        raise ValueError(f"query and key must have one batch size, got {shapes}")
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must have one head dim, got {shapes}")


def check_start(query: Tensor, key: Tensor, cu_query: Tensor | None, cu_key: Tensor | None) -> None:
    length = 0 if query.dim() == 3 else 2
    if query.shape[length] != key.shape[length] or cu_query is not cu_key:
        came = "other cu_seqlens" if cu_query is not cu_key else f"{query.shape[length]} and {key.shape[length]}"
        raise ValueError(
            f"query and key of different lengths need positions, or offset=(query's, key's), got lengths {came}; "
            "(length_k - length_q, 0) ends both at the same position"
        )


def pair_of(name: str, given: Any) -> tuple[Any, Any]:
    """What is given for query and for key."""
    if not isinstance(given, tuple | list):
        return given, given
    if len(given) != 2:
        raise ValueError(f"{name} must be one for both or a pair (query's, key's), got {len(given)} values")
    return given[0], given[1]


def angles_of(query: Tensor, dim: Any, base: Any, frequencies: Any, tables: Any) -> tuple[Any, float]:
    """How many numbers are rotated, and the base."""
    given = {"base": base, "frequencies": frequencies, "tables": tables}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise ValueError(f"at most one of base, frequencies and tables may be given, got {' and '.join(named)}")
    if base is not None:
        base = float(check_number("base", base, 0.0, math.inf, "a finite number above 0"))
        if base == 0.0:
            raise ValueError("base must be a finite number above 0, got 0")
    pairs = None
    if frequencies is not None:
        _check_floating("frequencies", frequencies, query.device, (torch.float32, torch.float64))
        if frequencies.dim() != 1:
            raise ValueError(f"frequencies must have shape (dim / 2,), got {tuple(frequencies.shape)}")
        pairs = frequencies.shape[0]
    if tables is not None:
        pairs = _check_tables(query, tables)
    if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int | torch.SymInt)):
        raise TypeError(f"dim must be an even int or None, got {describe(dim)}")
    head_dim = query.shape[-1]
    found = dim if dim is not None else head_dim if pairs is None else 2 * pairs
    if pairs is not None and found != 2 * pairs:
        raise ValueError(f"dim must be twice the {pairs} columns of {named[0]}, got {found}")
    if found < 2 or found % 2 != 0 or found > head_dim:
        raise ValueError(f"dim must be even, from 2 to the head dim {head_dim}, got {found}")
    return found, BASE if base is None else base


def _check_tables(query: Tensor, tables: Any) -> int:
    """The columns of both tables."""
    if not isinstance(tables, tuple | list) or len(tables) != 2:
        raise TypeError(f"tables must be a pair (cos, sin), got {describe(tables)}")
    for name, table in zip(("tables: cos", "tables: sin"), tables, strict=True):
        _check_floating(name, table, query.device, DTYPES)
    cos, sin = tables
    shapes = f"{tuple(cos.shape)} and {tuple(sin.shape)}"
    if cos.shape != sin.shape or cos.dim() not in (2, 3):
        raise ValueError(f"tables must both be (rows, dim / 2) or (batch or 1, length, dim / 2), got {shapes}")
    if cos.shape[-2] == 0 and query.numel() > 0:
        raise ValueError(f"tables must have at least one row, got {shapes}")
    return cos.shape[-1]


def _check_floating(name: str, value: Any, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    if not isinstance(value, Tensor) or value.dtype not in dtypes:
        accepted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} must be a tensor of {accepted}, got {describe(value)}")
    if value.device != device:
        raise ValueError(f"{name} must be on the query's device {device}, got {value.device}")
    if value.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} must not require a gradient: rotary has none for it; pass {name.split()[-1]}.detach()"
        )


def positions_of(side: str, positions: Any, packed: bool, batch: int, length: int, device: torch.device) -> Tensor:
    """The positions with two dimensions."""
    if not isinstance(positions, Tensor) or positions.dtype not in _INTS:
        raise TypeError(f"positions must be an int32 or int64 tensor, got {describe(positions)}")
    if positions.device != device:
        raise ValueError(f"positions must be on the query's device {device}, got {positions.device}")
    shape = positions.shape
    if positions.dim() == 1 and shape[0] == length:
        return positions[None]
    if not packed and positions.dim() == 2 and shape[0] in (1, batch) and shape[1] == length:
        return positions
    accepted = f"({length},)" if packed else f"({length},) or ({batch}, {length})"
    raise ValueError(f"positions of {side} must have shape {accepted}, got {tuple(shape)}")


def check_cu_seqlens(side: str, cu_seqlens: Any, packed: bool, placed: bool, device: torch.device) -> None:
    name = f"cu_seqlens_{side}"
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in _INTS:
        raise TypeError(f"{name} must be an int32 or int64 tensor, got {describe(cu_seqlens)}")
    if not packed:
        raise ValueError(f"{name} is for packed tensors (tokens, heads, head_dim), got a {side} of four dimensions")
    if placed:
        raise ValueError(f"{name} and positions may not both be given: each says where tokens stand")
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
        raise ValueError(f"{name} must have shape (sequences + 1,), got {tuple(cu_seqlens.shape)}")
    if cu_seqlens.device != device:
        raise ValueError(f"{name} must be on the query's device {device}, got {cu_seqlens.device}")


def offset_of(offset: Any, sequences: int, unknown: bool, device: torch.device) -> tuple[int, Tensor | None]:
    """The offset as an int and as one int for each sequence."""
    if isinstance(offset, bool) or not isinstance(offset, int | torch.SymInt | Tensor):
        raise TypeError(f"offset must be an int or an int tensor, got {describe(offset)}")
    if not isinstance(offset, Tensor):
        return offset, None  # type: ignore[return-value]
    if offset.dtype not in _INTS:
        raise TypeError(f"offset must be an int32 or int64 tensor, got {describe(offset)}")
    if offset.device != device:
        raise ValueError(f"offset must be on the query's device {device}, got {offset.device}")
    if offset.dim() == 0 or (offset.dim() == 1 and offset.shape[0] == 1):
        return 0, offset.reshape(1).expand(sequences)
    if unknown:
        raise ValueError("an offset for each packed sequence needs cu_seqlens, or add it to positions")
    if offset.dim() != 1 or offset.shape[0] != sequences:
        raise ValueError(f"offset must have one element or shape ({sequences},), got {tuple(offset.shape)}")
    return 0, offset
