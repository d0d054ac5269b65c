"""Checks of arguments that masks and scores share. Messages name the argument, what came and what is accepted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onchip.tile import Diagonal

if TYPE_CHECKING:
    from onchip.problem import Problem


def describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a {value.dtype} tensor of shape {tuple(value.shape)}"
    return f"{type(value).__name__} {value!r}"


def check_bool(name: str, value: Any) -> None:
    if not isinstance(value, Tensor) or value.dtype != torch.bool:
        hint = (
            "; an additive float mask is scores.bias(tensor)"
            if isinstance(value, Tensor) and value.is_floating_point()
            else ""
        )
        raise TypeError(f"{name} must be a bool tensor (True is visible), got {describe(value)}{hint}")


def check_side(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise TypeError(f"window: {name} must be an int or None (unbounded), got {describe(value)}")
    if value < 0:
        raise ValueError(f"window: {name} must be at least 0, or None for unbounded, got {value}")
    return value  # type: ignore[return-value]


def check_diagonal_value(value: Any) -> Diagonal:
    if isinstance(value, str):
        if value not in ("bottom-right", "top-left"):
            raise ValueError(
                f"diagonal must be 'bottom-right', 'top-left', an int or an int tensor (batch,), got {value!r}"
            )
    elif isinstance(value, Tensor):
        if value.dtype not in (torch.int32, torch.int64) or value.dim() != 1:
            raise TypeError(f"a diagonal tensor must be int32 or int64 of shape (batch,), got {describe(value)}")
    elif isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise TypeError(
            f"diagonal must be 'bottom-right', 'top-left', an int or an int tensor (batch,), got {describe(value)}"
        )
    return value


def check_diagonal(diagonal: Diagonal, problem: Problem) -> None:
    if isinstance(diagonal, Tensor):
        problem.check_device("diagonal", diagonal)
        if diagonal.shape[0] != problem.batch:
            raise ValueError(
                f"a diagonal tensor must have one entry for each of {problem.batch} sequences, got {diagonal.shape[0]}"
            )


def check_pairs(
    name: str,
    value: Tensor,
    problem: Problem,
    rows: int | None,
    columns: int | None,
    row_name: str = "length_q",
    column_name: str = "length_k",
) -> None:
    """The tensor must broadcast to (batch, heads_q, rows, columns); None leaves an extent to the values."""
    problem.check_device(name, value)
    wanted = (problem.batch, problem.heads_q, rows, columns)[4 - value.dim() :] if value.dim() else ()
    fits = value.dim() <= 4 and all(
        want is None or have == want or have == 1 for have, want in zip(value.shape, wanted, strict=True)
    )
    if not fits:
        shown = tuple(
            column if want is None else want
            for want, column in zip(
                (problem.batch, problem.heads_q, rows, columns),
                ("batch", "heads_q", row_name, column_name),
                strict=True,
            )
        )
        raise ValueError(
            f"{name} must broadcast to (batch, heads_q, {row_name}, {column_name}) = {shown}, got {tuple(value.shape)}"
        )


def check_vector(name: str, value: Tensor, problem: Problem, side: str) -> None:
    problem.check_device(name, value)
    extent = problem.length_q if side == "query" else problem.length_k
    if problem.layout == "packed":
        if value.dim() != 1 or value.shape[0] != extent:
            raise ValueError(f"{name} must have one entry for each {side} token, ({extent},), got {tuple(value.shape)}")
        return
    if (
        value.dim() not in (1, 2)
        or value.shape[-1] != extent
        or (value.dim() == 2 and value.shape[0] not in (1, problem.batch))
    ):
        raise ValueError(
            f"{name} must be (batch, length) = ({problem.batch}, {extent}) or ({extent},), got {tuple(value.shape)}"
        )
