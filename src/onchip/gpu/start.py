"""How a kernel starts: by a launch, or by its compilation alone, while tiles are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_HELD: ContextVar[list[tuple[str, Any]] | None] = ContextVar("held", default=None)


def is_held() -> bool:
    """Whether kernels are compiled and not launched, see `compiling`."""
    return _HELD.get() is not None


def start(kernel: Any, programs: int) -> Callable[..., Any]:
    """What starts a kernel with so many programs, when it is called with the kernel's arguments."""
    held = _HELD.get()
    if held is None:
        launch: Callable[..., Any] = kernel[(programs,)]
        return launch

    def hold(*arguments: Any, **keywords: Any) -> None:
        held.append((kernel.__name__.removesuffix("_kernel"), kernel.warmup(*arguments, grid=(programs,), **keywords)))

    return hold


@contextmanager
def compiling() -> Iterator[list[tuple[str, Any]]]:
    """Inside, kernels are compiled and not launched, so that results hold nothing.

    The list gets the name of each kernel ("forward", "keys", ...) and what Triton made of it; inside
    `triton.AsyncCompileMode` that is a future.
    """
    held: list[tuple[str, Any]] = []
    token = _HELD.set(held)
    try:
        yield held
    finally:
        _HELD.reset(token)
