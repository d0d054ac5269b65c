"""Where the tests run: on which device, and whether compiled kernels are interpreted, which asks for small problems."""

import dataclasses
import os

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Schedules of kernels compiled for CUDA devices. Elsewhere they need an interpreter, and run only where they are named.
COMPILED = ("triton", "hopper")
DEVICE = "cpu"  # that of --device, as conftest.py sets it


def sized(full, short):
    """The size of a problem: `short` where kernels are interpreted."""
    return short if INTERPRETED else full


def moved(value, device):
    """A problem, or any part of one, with its tensors on a device, under the same strides."""
    if isinstance(value, torch.Tensor):
        return value if value.device.type == device else copied(value, device)
    if isinstance(value, tuple):
        return tuple(moved(item, device) for item in value)
    if isinstance(value, dict):
        return {name: moved(item, device) for name, item in value.items()}
    if dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: moved(getattr(value, name), device) for name in fields})
    return value


def copied(tensor, device):
    """The tensor with a storage of its own on the device: `to` would lay out anew what has gaps or is expanded."""
    if tensor.is_contiguous():
        return tensor.to(device, copy=True)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    offset = tensor.storage_offset()
    storage = tensor.as_strided((offset + last + 1,), (1,), 0).to(device, copy=True)
    return storage.as_strided(tensor.shape, tensor.stride(), offset)
