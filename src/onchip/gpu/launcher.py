"""Launches of kernels again and again, without what Triton does for the first one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver

from onchip.gpu.descriptors import moved
from onchip.gpu.start import is_held, start
from onchip.problem import Problem

ALIGNED = 16
"""Triton compiles for addresses that are multiples of so many bytes, and once more for others."""

Kept = TypeVar("Kept")
Maps = tuple[tuple[Any, int], ...]
"""Descriptors, or None, each with the place of its tensor."""


class Launcher:
    """A kernel with its grid and all of its arguments but the tensors that a call brings.

    Triton binds the arguments of every launch, looks at each of them and searches for the kernel that was compiled for
    such ones. Where nothing but addresses changes, and all of them are aligned, it finds the same one each time: it is
    kept, and launched at once. Any other launch is Triton's own, and so is each one that hooks want to see.

    Args:
        kernel: a function of Triton's, or what takes the place of one in a test.
        rest: arguments behind the tensors. constants: arguments behind those by name, and options of the compiler.
        maps: descriptors before the tensors, or None, and of which tensor each is: one of those that a call brings.

    Attributes:
        kernels: the kernel alone, as a Series has several.
        found: what later launches repeat, as soon as there is such a thing.
    """

    def __init__(
        self, kernel: Any, programs: int, rest: tuple[Any, ...], constants: dict[str, Any], maps: Maps = ()
    ) -> None:
        self.kernel, self._programs, self._rest, self._constants = kernel, programs, rest, constants
        self.maps = maps
        self.kernels = (kernel,)
        self.found: _Found | None = None

    def __call__(self, *tensors: Tensor | None, descriptors: tuple[Any, ...] = ()) -> None:
        """Launch on the current device, which must be the same each time, and its current stream.

        Args:
            tensors: dtypes, and which are None, must be those of the first launch.
            descriptors: arguments before the tensors, where the launcher has no maps.
        """
        addresses, aligned = _addresses(tensors)
        descriptors = descriptors or _described(self.maps, tensors)
        found = self.found
        if found is not None and aligned and found.settings == _settings() and _is_unobserved(self.kernel):
            found.launch(driver.active.get_current_stream(found.device), (*descriptors, *addresses))
            return
        compiled = start(self.kernel, self._programs)(*descriptors, *tensors, *self._rest, **self._constants)
        if aligned and isinstance(compiled, CompiledKernel):
            names = self.kernel.arg_names[len(descriptors) + len(tensors) + len(self._rest) :]
            tail = (*self._rest, *(self._constants[name] for name in names))
            # no metadata, and no hooks that would want it
            head = compiled.function, compiled.packed_metadata, None, None, None
            run, head = _innermost(compiled.run, head, len(addresses) + len(descriptors), tail)
            device = driver.active.get_current_device()
            self.found = _Found(compiled, run, self._programs, device, head, tail, _settings())


class Series:
    """Launches one behind the other, over tensors of one list: what they share is asked for once.

    Args:
        launches: a launcher each, and the places in the list, two at least, of the tensors that it takes.
    """

    def __init__(self, *launches: tuple[Launcher, tuple[int, ...]]) -> None:
        self._launches = launches
        self.kernels = tuple(launcher.kernel for launcher, _ in launches)
        self._found: tuple[tuple[_Found, Maps, Callable[[Any], tuple[Any, ...]]], ...] = ()

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch all of them, as each launcher would."""
        addresses, aligned = _addresses(tensors)
        found = self._found
        if found and aligned and found[0][0].settings == _settings() and _is_unobserved(*self.kernels):
            stream = driver.active.get_current_stream(found[0][0].device)
            for one, maps, pick in found:
                one.launch(stream, (*_described(maps, tensors), *pick(addresses)))
            return
        self._found, every = (), []
        for launcher, places in self._launches:
            launcher(*(tensors[place] for place in places))
            if launcher.found is not None:
                maps = tuple((one, places[place]) for one, place in launcher.maps)
                every.append((launcher.found, maps, itemgetter(*places)))
        if len(every) == len(self._launches) and len({one.settings for one, *_ in every}) == 1:
            self._found = tuple(every)


def _described(maps: Maps, tensors: Sequence[Tensor | None]) -> tuple[Any, ...]:
    """Descriptors of these tensors, or None."""
    return tuple(None if one is None else moved(one, tensors[place]) for one, place in maps)


def _addresses(tensors: Sequence[Tensor | None]) -> tuple[list[int | None], bool]:
    """Where tensors start, and whether all of them start at multiples of ALIGNED."""
    addresses: list[int | None] = []
    together = 0
    for tensor in tensors:
        if tensor is None:
            addresses.append(None)
        else:
            address = tensor.data_ptr()
            addresses.append(address)
            together |= address
    return addresses, together % ALIGNED == 0


@dataclass(frozen=True)
class _Found:
    """What a launch came to, on which device, and Triton's settings then.

    `run` is Triton's function for the kernel. It takes the grid and the stream, then head, then all arguments of the
    kernel, constants included. The kernel itself is held because Triton unloads it otherwise.
    """

    kernel: CompiledKernel
    run: Callable[..., Any]
    programs: int
    device: int
    head: tuple[Any, ...]
    tail: tuple[Any, ...]
    settings: tuple[bool, str]

    def launch(self, stream: int, first: Sequence[Any]) -> None:
        """Launch with these for the first arguments: descriptors and addresses."""
        self.run(self.programs, 1, 1, stream, *self.head, *first, *self.tail)


def _innermost(
    run: Callable[..., Any], head: tuple[Any, ...], count: int, tail: tuple[Any, ...]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function in C that Triton's function for a kernel calls, and what it passes to it before the arguments.

    Between the two there is Python that allocates scratch memory, and takes as long as the rest where a kernel needs
    none. What it passes on is seen when it launches marks, `count` of them before `tail`, on a function that only keeps
    them. Where it passes on anything else than grid, stream, a head, and these, `run` and `head` remain.
    """
    launch, sizes = getattr(run, "launch", None), ("global_scratch_size", "profile_scratch_size")
    if launch is None or any(getattr(run, size, None) != 0 for size in sizes):
        return run, head
    passed: list[tuple[Any, ...]] = []
    probe: Any = copy(run)
    probe.launch = lambda *given: passed.append(given)
    before, behind = (1, 1, 1, object()), (*(object() for _ in range(count)), *tail)
    probe(*before, *head, *behind)
    (given,) = passed
    place = len(given) - len(behind)
    same = (one is other for one, other in zip(given[:4] + given[place:], before + behind, strict=True))
    return (launch, given[4:place]) if place >= 4 and all(same) else (run, head)


def _settings() -> tuple[bool, str]:
    """What Triton looks kernels up by beside arguments and constants."""
    return knobs.runtime.debug, knobs.compilation.instrumentation_mode


def _is_unobserved(*kernels: Any) -> bool:
    """Whether nobody wants to see launches or compilations of these."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    # a hook may also stand there without a chain
    if getattr(enter, "calls", enter) or getattr(leave, "calls", leave) or runtime.add_stages_inspection_hook:
        return False
    for kernel in kernels:
        if kernel.pre_run_hooks:
            return False
    return not is_held()


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
