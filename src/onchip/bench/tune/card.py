"""A CUDA device that compiles, checks and times tiles.

Candidates are compiled by threads, in `triton.AsyncCompileMode`, which is made for that; only the passes in C++ and the
assembler run at the same time. What fails there is compiled once more, alone. Nothing is launched for it. Each
candidate that is right becomes a CUDA graph, so that what is timed is kernels and not launches; all graphs share one
pool of memory, for nobody reads their results.
The backward's kernels are timed with the sums of rows before them, which are the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onchip.bench.machine import available_cores
from onchip.bench.timing import compare
from onchip.bench.tune.candidates import Limits
from onchip.bench.tune.cases import Case, Inputs, heaviest, timed
from onchip.bench.tune.search import CannotRun, Timing
from onchip.dispatch import schedules
from onchip.gpu import FORWARD, GRADIENT, KEYS, QUERIES
from onchip.schedules.triton.tiles import Tile
from onchip.schedules.triton.tuned import Entry, shared_bytes, substituted

RIGHT = {torch.float16: 1e-2, torch.bfloat16: 3e-2, torch.float32: 1e-4}
"""How far a result may be from the shipped tile's, relative to its largest value: what another order of sums makes."""
SAMPLE_MS = 5.0
WRONG, NO_COMPILE, NO_LAUNCH, SPILLS = "wrong result", "does not compile", "does not launch", "spills"


class DeviceLost(RuntimeError):
    """A candidate left the device in a state in which nothing runs in this process."""


@dataclass(frozen=True, eq=False)
class _Open:
    """A case with what its kernels take."""

    case: Case
    inputs: Inputs
    out: Tensor
    lse: Tensor
    grad_out: Tensor


def limits_of(device: torch.device) -> Limits:
    """What a processor of a CUDA or ROCm device has."""
    properties, amd = torch.cuda.get_device_properties(device), torch.version.hip is not None
    tma = not amd and properties.major == 9
    return Limits(shared_bytes(device), 512 if amd else 255, properties.warp_size, tma)


class Card:
    """A `search.Bench` on a CUDA device."""

    batch = 8
    """Few enough for a row's share of the default time, enough for threads to overlap."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._limits = device, limits_of(device)
        self._workers = available_cores()
        self._open: _Open | None = None
        self._expected: list[Tensor] = []
        self._graphs: dict[Tile, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def open(self, case: Case, shipped: Tile) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        try:
            inputs = timed(case, self._device)
            with self._taking(case, shipped):
                out, lse = _forward(inputs)
                self._open = _Open(case, inputs, out, lse, torch.randn_like(out))
                self._expected = self._run()
            self._capture(shipped)
        except Exception as error:
            self.close()
            self._survive()
            raise CannotRun(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error

    def close(self) -> None:
        self._open, self._pool, self._graphs, self._expected = None, None, {}, []
        torch.cuda.empty_cache()

    def compile(self, tiles: Sequence[Tile]) -> Mapping[Tile, str]:
        made = self._compile(self._opened.case, tiles, self._run)
        # a bound of registers may be worth what it spills
        faults = {tile: self._fault(kernels, spills=tile.registers is None) for tile, kernels in made.items()}
        return {tile: fault for tile, fault in faults.items() if fault is not None}

    def check(self, tile: Tile) -> str | None:
        case = self._opened.case
        try:
            with self._taking(case, tile):
                results = self._run()
                torch.cuda.synchronize(self._device)
            pairs = zip(results, self._expected, strict=True)
            if not all(_close(got, true, RIGHT[case.dtype]) for got, true in pairs):
                return WRONG
            del results, pairs
            self._capture(tile)
        except Exception:
            self._survive(str(tile))
            return NO_LAUNCH
        return None

    def race(self, shipped: Tile, tiles: Sequence[Tile], rounds: int) -> Mapping[Tile, Timing]:
        by_name = {str(tile): tile for tile in (shipped, *tiles)}
        try:
            found = compare(
                {name: self._graphs[tile].replay for name, tile in by_name.items()},
                rounds=rounds, warmup=1, device=self._device, minimum_sample_ms=SAMPLE_MS,
            )  # fmt: skip
        except RuntimeError:
            self._survive(f"one of {', '.join(by_name)}")
            raise
        ratios = {ratio.name: ratio for ratio in found.ratios}
        timings = {}
        for result in found.results:
            ratio = ratios.get(result.name)
            if ratio is not None:
                timings[by_name[result.name]] = Timing(result.median_ms, ratio.median, ratio.upper_quartile)
            elif result.name == str(shipped):
                timings[shipped] = Timing(result.median_ms, 1.0, 1.0)
        return timings

    def serves(self, tile: Tile) -> str | None:
        case = self._opened.case
        for inputs in heaviest(case, self._device):
            made = self._compile(case, [tile], lambda inputs=inputs: _start_all(case, inputs))  # type: ignore[misc]
            if self._fault(made[tile], spills=False) is not None:
                return "too large for others of its row"
        return None

    # One kernel

    @property
    def _opened(self) -> _Open:
        assert self._open is not None, "a case is open"
        return self._open

    def _taking(self, case: Case, tile: Tile) -> Any:
        """Inside, the case's kernel has this tile, and no other kernel of a call is in its place."""
        entry = Entry(
            kernel=case.kernel, dim=case.dim, bits=case.bits, kind=case.kind, tile=tile, shipped=tile,
            ms=1.0, shipped_ms=1.0, ratio=1.0, tuned_on="",
        )  # fmt: skip
        return substituted(self._device, [entry])

    def _run(self) -> list[Tensor]:
        """The case's kernel, with the tile that is taken."""
        opened, inputs = self._opened, self._opened.inputs
        if opened.case.kernel == FORWARD:
            return list(_forward(inputs))
        return _gradients(opened.case.kernel, inputs, opened.grad_out, opened.out, opened.lse)

    def _capture(self, tile: Tile) -> None:
        graph = torch.cuda.CUDAGraph()
        with self._taking(self._opened.case, tile), torch.cuda.graph(graph, pool=self._pool):
            self._run()
        self._graphs[tile] = graph

    def _survive(self, tiles: str = "a candidate") -> None:
        """Raises DeviceLost, which names these tiles, if the device no longer works."""
        try:
            torch.cuda.synchronize(self._device)
            torch.zeros(1, device=self._device).sum().item()
        except Exception as error:
            raise DeviceLost(f"{tiles} stopped the device: {str(error).splitlines()[0]}") from error

    # Compilation

    def _compile(self, case: Case, tiles: Sequence[Tile], run: Callable[[], object]) -> dict[Tile, list[Any]]:
        """What became of the case's kernel with each tile: compiled kernels, or the exceptions in their place."""
        import triton

        with ThreadPoolExecutor(self._workers) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
            pending = {tile: self._started(case, tile, run) for tile in tiles}
        made = {tile: [_awaited(kernel) for kernel in kernels] for tile, kernels in pending.items()}
        for tile, kernels in made.items():
            if any(isinstance(kernel, Exception) for kernel in kernels):
                # Before Python 3.11.8 and 3.12.2 ast.parse may fail for another thread's sake (CPython issue 106905)
                made[tile] = self._started(case, tile, run)
        return made

    def _started(self, case: Case, tile: Tile, run: Callable[[], object]) -> list[Any]:
        """The case's kernels that a run would launch with a tile, as Triton hands them out, or what it raised."""
        from onchip.gpu.start import compiling

        try:
            with self._taking(case, tile), compiling() as held:
                run()
        except Exception as error:
            return [error]
        return [kernel for name, kernel in held if name == case.kernel]

    def _fault(self, kernels: Sequence[Any], spills: bool) -> str | None:
        for kernel in kernels:
            if isinstance(kernel, Exception):
                return NO_COMPILE
            if kernel.metadata.shared > self._limits.shared:
                return NO_LAUNCH
            try:
                # loads the binary, which is when the driver says what it takes
                kernel.run  # noqa: B018
            except Exception:
                self._survive()
                return NO_LAUNCH
            if spills and kernel.n_spills:
                return SPILLS
        return None


def _awaited(kernel: Any) -> Any:
    """A compiled kernel, or the exception that compiling it raised."""
    if isinstance(kernel, Exception) or not hasattr(kernel, "result"):
        return kernel
    try:
        return kernel.result()
    except Exception as error:
        return error


# By way of the dispatcher: in the package, modules take the place of functions of their names once they are imported.


def _forward(inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Out and LSE."""
    forward = schedules()["triton"].forward
    assert forward is not None
    out, lse, *_ = forward(inputs.problem, inputs.query, inputs.key, inputs.value, saves=True)
    return out, lse


def _gradients(kernel: str, inputs: Inputs, grad_out: Tensor, out: Tensor, lse: Tensor) -> list[Tensor]:
    """What one kernel of the backward gives."""
    tensors = inputs.tensors
    wanted = [tensor.is_floating_point() and tensor.requires_grad and kernel == GRADIENT for tensor in tensors]
    needs = [kernel == QUERIES, kernel == KEYS, kernel == KEYS, *wanted]
    query, key, value = inputs.query, inputs.key, inputs.value
    backward = schedules()["triton"].backward
    assert backward is not None
    found = backward(inputs.problem, grad_out, None, query, key, value, out, lse, tensors, needs)
    return [gradient for gradient in found or () if gradient is not None]


def _start_all(case: Case, inputs: Inputs) -> None:
    """Start the case's kernel on a problem whose results nobody reads."""
    out, lse = _forward(inputs)
    if case.kernel != FORWARD:
        _gradients(case.kernel, inputs, torch.zeros_like(out), out, lse)


def _close(got: Tensor, true: Tensor, tolerance: float) -> bool:
    """Whether the largest difference is small beside the largest value; infinite values must agree, NaN is wrong."""
    got, true = got.float(), true.float()
    finite = true.isfinite()
    if not torch.equal(got[~finite], true[~finite]):
        return False
    if not finite.any():
        return True
    return bool((got[finite] - true[finite]).abs().max() <= tolerance * true[finite].abs().max())
