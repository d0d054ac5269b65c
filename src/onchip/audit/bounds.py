"""Errors, and what the contract allows them to be."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from onchip.audit.reference import Reference, Results, largest


@dataclass(frozen=True, slots=True)
class Error:
    """The error of a tensor against its reference; infinite where the tensor is not finite.

    Attributes:
        rmse: root of the mean square. maximum: the largest absolute value. relative: that over the largest |reference|.
    """

    rmse: float
    maximum: float
    relative: float


def measure(tensor: Tensor, reference: Tensor) -> Error:
    """The error of a tensor of any dtype against a finite reference in float64 of the same shape.

    Raises:
        ValueError: the shapes differ.
    """
    if tensor.shape != reference.shape:
        raise ValueError(f"a result and its reference must have one shape: got {tensor.shape} and {reference.shape}")
    difference = (tensor.double() - reference).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    maximum, size = difference.max().item(), largest(reference)
    relative = maximum / size if size else (math.inf if maximum else 0.0)
    return Error(difference.square().mean().sqrt().item(), maximum, relative)


def measure_all(results: Results, reference: Reference) -> dict[str, Error]:
    """The error of each tensor that there is."""
    return {name: measure(tensor, reference.results[name]) for name, tensor in results.items()}


def bound(name: str, reference: Reference, standard: Error, dtype: torch.dtype) -> float:
    """The largest absolute error that clause 12 of the contract allows the tensor `name`.

    `2 max|std - ref| + eps(dtype) max|ref|`, in float64 1e-12 max|ref|, and on top what that does not see: the rounding
    of the terms of a sum, a unit of float32 for the exponential in out and d_value, and in gradients the relative
    error that a float32 LSE brings into every weight. Source: docs/contract.md, clause 12.

    Args:
        standard: the error of eager attention in the same dtype. If it is infinite, so is the bound.
    """
    results, terms = reference.results, reference.terms.get(name, 0.0)
    size = largest(results[name])
    if dtype == torch.float64:
        return 1e-12 * (size + terms)
    single, eps = torch.finfo(torch.float32).eps, torch.finfo(dtype).eps
    allowed = 2 * standard.maximum + eps * (size + terms)
    if name in ("out", "d_value"):
        allowed += single * terms
    if name.startswith("d_"):
        allowed += single / 2 * largest(results["lse"]) * size
    return allowed
