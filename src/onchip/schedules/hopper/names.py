"""Gluon's names, which differ between Triton 3.6 and later ones."""

from typing import Any

from triton._C.libtriton import ir
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""(descriptor, coordinates, barrier, shared memory): TMA brings a tile; the barrier counts its bytes."""
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
"""(descriptor, coordinates, shared memory): TMA takes a tile away; `tma.store_wait` waits for it."""


@builtin
def _add_tile(desc: Any, at: Any, memory: Any, _semantic: Any = None) -> None:
    at = _semantic._convert_to_ir_values(at, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, at, memory.handle)


add_tile = getattr(tma, "async_atomic_add", None) or _add_tile
"""(descriptor, coordinates, shared memory): TMA adds a tile to what is there; `tma.store_wait` waits for it."""

copy_elements = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
"""(shared memory, pointers, mask=): threads copy, with zeros where the mask is not set."""

barrier = getattr(gl, "thread_barrier", None) or gl.barrier
"""The threads of a partition wait for each other."""


@builtin
def reinterpret(memory: Any, dtype: Any, shape: Any, layout: Any, _semantic: Any = None) -> Any:
    """Shared memory seen with another dtype, shape and layout."""
    method = getattr(memory, "reinterpret", None) or memory._reinterpret
    return method(dtype, shape, layout, _semantic=_semantic)
