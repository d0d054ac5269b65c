"""Launches of one kernel again and again, without what Triton does for the first one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

from onchip.gpu.start import is_held, start
from onchip.problem import Problem

ALIGNED = 16
"""Triton compiles for addresses that are multiples of so many bytes, and once more for others."""

Kept = TypeVar("Kept")


class Launcher:
    """A kernel with its grid and all of its arguments but the tensors that a call brings.

    Triton binds the arguments of every launch, looks at each of them and searches for the kernel that was compiled for
    such ones. Where nothing but addresses changes, and all of them are aligned, it finds the same one each time: it is
    kept, and launched at once. Any other launch is Triton's own, and so is each one that hooks want to see.

    Args:
        kernel: a function of Triton's, or what takes the place of one in a test.
        rest: arguments behind the tensors. constants: arguments behind those by name, and options of the compiler.
    """

    def __init__(self, kernel: Any, programs: int, rest: tuple[Any, ...], constants: dict[str, Any]) -> None:
        self.kernel, self._programs, self._rest, self._constants = kernel, programs, rest, constants
        self._found: _Found | None = None

    def __call__(self, *tensors: Tensor | None, descriptors: tuple[Any, ...] = ()) -> None:
        """Launch on the current device, which must be the same each time, and its current stream.

        Args:
            tensors: dtypes, and which are None, must be those of the first launch.
            descriptors: arguments before the tensors.
        """
        addresses, together = [], 0
        for tensor in tensors:
            address = None if tensor is None else tensor.data_ptr()
            addresses.append(address)
            together |= address or 0
        found, aligned = self._found, together % ALIGNED == 0
        if found is not None and aligned and found.settings == _settings() and self._is_unobserved():
            stream = driver.active.get_current_stream(found.device)
            found.run(self._programs, 1, 1, stream, *found.head, *descriptors, *addresses, *found.tail)
            return
        compiled = start(self.kernel, self._programs)(*descriptors, *tensors, *self._rest, **self._constants)
        if aligned and isinstance(compiled, CompiledKernel):
            names = self.kernel.arg_names[len(descriptors) + len(tensors) + len(self._rest) :]
            tail = (*self._rest, *(self._constants[name] for name in names))
            # no metadata, and no hooks that would want it
            head = compiled.function, compiled.packed_metadata, None, None, None
            device = driver.active.get_current_device()
            self._found = _Found(compiled, compiled.run, device, head, tail, _settings())

    def _is_unobserved(self) -> bool:
        """Whether nobody wants to see launches or compilations."""
        runtime = knobs.runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        # a hook may also stand there without a chain
        hooks = self.kernel.pre_run_hooks or getattr(enter, "calls", enter) or getattr(leave, "calls", leave)
        return not hooks and not runtime.add_stages_inspection_hook and not is_held()


@dataclass(frozen=True)
class _Found:
    """What a launch came to, on which device, and Triton's settings then.

    `run` is Triton's function for the kernel. It takes the grid and the stream, then head, then all arguments of the
    kernel, constants included. The kernel itself is held because Triton unloads it otherwise.
    """

    kernel: CompiledKernel
    run: Callable[..., Any]
    device: int
    head: tuple[Any, ...]
    tail: tuple[Any, ...]
    settings: tuple[bool, str]


def _settings() -> tuple[bool, str]:
    """What Triton looks kernels up by beside arguments and constants."""
    return knobs.runtime.debug, knobs.compilation.instrumentation_mode


class PerProblem(Generic[Kept]):
    """What was prepared for problems, kept while they live."""

    def __init__(self) -> None:
        self._found: WeakKeyDictionary[Problem, dict[Any, Kept]] = WeakKeyDictionary()

    def of(self, problem: Problem) -> dict[Any, Kept]:
        """What was prepared for one problem by facts that its calls may differ in, to read and to add to."""
        found = self._found.get(problem)
        if found is None:
            found = self._found[problem] = {}
        return found
