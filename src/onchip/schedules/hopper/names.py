"""Gluon's names, which differ between Triton 3.6 and later ones."""

from triton.experimental.gluon.language.nvidia.hopper import tma

load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
"""(descriptor, coordinates, barrier, shared memory): TMA brings a tile; the barrier counts its bytes."""
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
"""(descriptor, coordinates, shared memory): TMA takes a tile away; `tma.store_wait` waits for it."""
