"""The operator `onchip::rotary` and its direct way, as ops.py has them for attention.

The map is linear, so its backward is itself with the transposed rotation, and so is every further derivative.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from onchip import ops
from onchip.errors import Unsupported
from onchip.rotary import plain
from onchip.rotary.rotation import ARGUMENTS, Rotation
from onchip.strides import empty_ordered

ScheduleName = Literal["torch", "triton"]
SCHEDULES: tuple[ScheduleName, ...] = ("torch", "triton")
WIDEST = 1024
"""The largest head dim of the Triton kernel."""

_HAS_TRITON = importlib.util.find_spec("triton") is not None

_LIBRARY = torch.library.Library("onchip", "FRAGMENT")
_LIBRARY.define(f"rotary(Tensor[] inputs, {ARGUMENTS}) -> Tensor[]")
_rotary = torch.ops.onchip.rotary.default


def run(inputs: Sequence[Tensor], rotation: Rotation) -> list[Tensor]:
    """The rotated tensors: directly in plain eager code, else by the operator or as composite torch."""
    if ops.is_observed(*inputs, *(tensor for tensor in rotation.tensors if tensor is not None)):
        if _transformed():
            if rotation.schedule == "triton":
                raise Unsupported(
                    "rotary",
                    {"triton": ["torch.func transforms and forward-mode AD go through torch"]},
                    "schedule=None",
                )
            return plain.composite(inputs, rotation)
        return list(_rotary(list(inputs), *rotation.tensors, *rotation.values))
    if any(torch._C._functorch.is_legacy_batchedtensor(tensor) for tensor in inputs):
        # the gradients of torch.autograd.grad(is_grads_batched=True), whose vmap leaves no other trace
        return plain.composite(inputs, rotation)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        return list(_Rotary.apply(True, rotation.values, len(inputs), *inputs, *rotation.tensors))
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return _compute(inputs, rotation)


def unsupported(inputs: Sequence[Tensor], rotation: Rotation) -> list[str]:
    """Reasons why the Triton kernel cannot run the rotation."""
    device = inputs[0].device.type
    if not _HAS_TRITON:
        return ["Triton is not installed"]
    if device == "cpu":
        if os.environ.get("TRITON_INTERPRET") != "1":
            return ["it runs on GPUs; on a CPU only for tests, interpreted, where TRITON_INTERPRET=1 is set"]
        if rotation.schedule != "triton":
            return ["interpreted on a CPU it serves tests: name it to run it"]
    elif device != "cuda":
        return [f"it runs on CUDA and ROCm devices, got {device}"]
    reasons = []
    if any(tensor.dtype == torch.float64 for tensor in inputs):
        reasons.append("it has no float64")
    if inputs[0].shape[-1] > WIDEST:
        reasons.append(f"its tiles hold head dims up to {WIDEST}, got {inputs[0].shape[-1]}")
    return reasons


def _compute(inputs: Sequence[Tensor], rotation: Rotation) -> list[Tensor]:
    if ops.reads_values(inputs[0].device):
        batch, _, length, _ = plain.as_batch(inputs[0]).shape
        rotation.check_values(batch, length)
    if rotation.schedule != "torch":
        reasons = unsupported(inputs, rotation)
        if not reasons:
            from onchip.rotary.launch import rotate

            return rotate(inputs, rotation)
        if rotation.schedule == "triton":
            raise Unsupported(f"rotary of {tuple(inputs[0].shape)}", {"triton": reasons}, "schedule=None")
    return plain.rotate(inputs, rotation)


def _transformed() -> bool:
    return torch._C._are_functorch_transforms_active() or (
        not torch.compiler.is_compiling() and torch.autograd.forward_ad._current_level >= 0
    )


class _Rotary(torch.autograd.Function):
    """`count` inputs and the tensors of a rotation; `directly` does without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, directly: bool, values: tuple[Any, ...], count: int, *tensors: Any) -> Any:
        inputs, others = tensors[:count], tensors[count:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*others)
        ctx.values, ctx.count = values, count
        with torch._C._AutoDispatchBelowADInplaceOrView():
            if directly:
                return tuple(_compute(inputs, Rotation(*others, *values)))
            return tuple(_rotary(list(inputs), *others, *values))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        rotation = Rotation(*ctx.saved_tensors, *ctx.values).transposed
        places = [
            place
            for place, gradient in enumerate(gradients)
            if gradient is not None and ctx.needs_input_grad[3 + place]
        ]
        found: list[Tensor | None] = [None] * ctx.count
        if places:
            rotated = run([gradient for place in places if (gradient := gradients[place]) is not None], rotation)
            for place, gradient in zip(places, rotated, strict=True):
                found[place] = gradient
        return (None, None, None, *found, *[None] * len(rotation.tensors))


def _forward(inputs: Sequence[Tensor], *arguments: Any) -> list[Tensor]:
    return _compute(inputs, Rotation(*arguments))


def _fake(inputs: Sequence[Tensor], *arguments: Any) -> list[Tensor]:
    return [empty_ordered(tuple(tensor.shape), tensor, tensor.dtype) for tensor in inputs]


def _autograd(inputs: Sequence[Tensor], *arguments: Any) -> list[Tensor]:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
        return list(_Rotary.apply(False, arguments[6:], len(inputs), *inputs, *arguments[:6]))
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return _rotary(list(inputs), *arguments)


def _vmap(info: Any, in_dims: Any, inputs: Sequence[Tensor], *arguments: Any) -> Any:
    """One example at a time: each may stand elsewhere. The public function is composite under vmap."""
    places, *others = in_dims
    examples = [
        _rotary(
            [_example(tensor, place, number) for tensor, place in zip(inputs, places, strict=True)],
            *(_example(value, place, number) for value, place in zip(arguments, others, strict=True)),
        )
        for number in range(info.batch_size)
    ]
    results = [torch.stack(parts) for parts in zip(*examples, strict=True)]
    return results, [0] * len(results)


def _example(value: Any, place: int | None, number: int) -> Any:
    return value if place is None else value.select(place, number)


_LIBRARY.impl("rotary", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("rotary", _autograd, "Autograd")
torch.library.register_fake("onchip::rotary", _fake, lib=_LIBRARY)
torch.library.register_vmap("onchip::rotary", _vmap, lib=_LIBRARY)
