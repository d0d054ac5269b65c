"""What `benchmarks/gpu.py` measures: the cases, and the calls that compute one.

A call is made only if its results agree with those of the first one, so no time of a wrong result gets into a table.
"""

from __future__ import annotations

import importlib
import itertools
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, cast

import torch
import torch.nn.functional as F
from common import backward, inference
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import onchip
from onchip.bench.machine import installed_version
from onchip.bench.protocol import Workload
from onchip.bench.timing import Contender

TOKENS = 16384
WIDTH = 2048
"""Every case has this many tokens, and this product of heads and dim, as the papers of the field do."""
LAYOUT = "dense (batch, length, heads, dim) seen as (batch, heads, length, dim)"
OURS = "onchip "
"""How the names of onchip's contenders begin; the schedule follows."""
OTHERS = ("sdpa_flash", "sdpa_cudnn", "flex", "fa3", "fa4")
TOLERANCE = 0.05
"""The largest `difference` of results that counts as rounding, with room to spare."""
BLOCK = 128

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of query, key and value, each (batch, heads, length, dim)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Self-attention of TOKENS tokens; its "backward" is the backward alone."""

    direction: str
    dim: int
    length: int
    causal: bool
    dtype: str = "bfloat16"
    tokens: int = TOKENS
    width: int = WIDTH

    @property
    def name(self) -> str:
        return f"{self.direction} d{self.dim} n{self.length} {'causal' if self.causal else 'full'} {self.dtype}"

    @property
    def batch(self) -> int:
        return max(1, self.tokens // self.length)

    @property
    def heads(self) -> int:
        return max(1, self.width // self.dim)

    @property
    def what(self) -> Workload:
        return Workload.attention(
            batch=self.batch,
            heads_query=self.heads,
            length_query=self.length,
            dim_query_key=self.dim,
            dtype=self.dtype,
            direction=self.direction,
            layout=LAYOUT,
            causal=self.causal,
        )


def cases(directions: Sequence[str], dims: Sequence[int], lengths: Sequence[int], dtypes: Sequence[str]) -> list[Case]:
    """Every combination, each without a mask and causal."""
    return [
        Case(direction=direction, dim=dim, length=length, causal=causal, dtype=dtype)
        for dtype, direction, dim, length, causal in itertools.product(dtypes, directions, dims, lengths, (False, True))
    ]


# Contenders: a name, and a function that makes the attention of a case. It may raise, as where a package is missing.

Make = Callable[[Case, torch.device], Attend]


def contenders(schedules: Sequence[str], peers: bool = False, without: Sequence[str] = ()) -> dict[str, Make]:
    """onchip's schedules, PyTorch's attention and, if asked for, that of other packages; names carry their versions."""
    makers: dict[str, Make] = {
        "sdpa_flash": partial(_sdpa, SDPBackend.FLASH_ATTENTION),
        "sdpa_cudnn": partial(_sdpa, SDPBackend.CUDNN_ATTENTION),
        "flex": _flex,
    }
    if peers:
        makers |= {
            "fa3": partial(_flash_attention, ("fa3_fwd_interface", "flash_attn_interface")),
            "fa4": partial(_flash_attention, ("flash_attn.cute",)),
        }
    versions = {"fa3": installed_version("fa3-fwd"), "fa4": installed_version("flash-attn-4")}
    theirs = {
        f"{name} {versions[name]}" if versions.get(name) else name: make
        for name, make in makers.items()
        if name not in without
    }
    return {f"{OURS}{name}": partial(_onchip, name) for name in schedules} | theirs


def _onchip(schedule: str, case: Case, device: torch.device) -> Attend:
    return cast(Attend, partial(cast(Any, onchip.attention), causal=case.causal, schedule=schedule))


def _sdpa(backend: SDPBackend, case: Case, device: torch.device) -> Attend:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, is_causal=case.causal)

    return attend


def _flex(case: Case, device: torch.device) -> Attend:
    # Every case compiles anew, and after eight versions of a function the compiler would leave the next one uncompiled.
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    mask = create_block_mask(_visible, None, None, case.length, case.length, device=device) if case.causal else None
    return cast(Attend, partial(compiled, block_mask=mask))


def _visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def _flash_attention(modules: Sequence[str], case: Case, device: torch.device) -> Attend:
    """`flash_attn_func` of the first of these modules that is there; it takes (batch, length, heads, dim)."""
    function = _import(modules).flash_attn_func

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = function(*(tensor.transpose(1, 2) for tensor in (query, key, value)), causal=case.causal)
        # Some versions return the LSE as well.
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return attend


def _import(modules: Sequence[str]) -> Any:
    *others, last = modules
    for module in others:
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError:
            continue
    return importlib.import_module(last)


# Preparation


class WrongResult(Exception):
    """A contender's results differ from those of the first one."""


def prepare(case: Case, makers: dict[str, Make], device: torch.device) -> dict[str, Contender]:
    """A call for every contender. Each has run once, and so is compiled, and its results have been compared.

    The call of a contender that failed raises its error again, so that the timer records it.
    """
    *inputs, gradient = _random(case, device)
    calls: dict[str, Contender] = {}
    expected: tuple[str, tuple[Tensor, ...]] | None = None
    for name, make in makers.items():
        try:
            attend = partial(make(case, device), *inputs)
            if case.direction == "forward":
                call = inference(attend)
            elif case.direction == "backward":
                call = backward(attend, inputs, gradient)
            else:
                call = partial(_step, attend, inputs, gradient)
            results = call()
            results = results if isinstance(results, tuple) else (results,)
            if expected is None:
                _check_finite(results)
                expected = name, results
            else:
                _check(results, *expected)
        except Exception as error:
            # What the frames of the failed call hold is memory that the others may need.
            traceback.clear_frames(error.__traceback__)
            call = partial(_fail, error)
        calls[name] = call
    return calls


def _random(case: Case, device: torch.device) -> list[Tensor]:
    """Query, key, value and the gradient of the output, in the memory layout of LAYOUT."""
    shape = (case.batch, case.length, case.heads, case.dim)
    dtype = getattr(torch, case.dtype)
    tensors = [torch.randn(shape, device=device).to(dtype).transpose(1, 2) for _ in range(4)]
    for tensor in tensors[:3]:
        tensor.requires_grad_(case.direction != "forward")
    return tensors


def _step(attend: Callable[[], Tensor], inputs: Sequence[Tensor], gradient: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(attend(), tuple(inputs), gradient)


def _fail(error: Exception) -> NoReturn:
    raise error


def _check_finite(results: Sequence[Tensor]) -> None:
    if not all(bool(result.isfinite().all()) for result in results):
        raise WrongResult("a result is not finite")


def _check(results: Sequence[Tensor], reference: str, expected: Sequence[Tensor]) -> None:
    for result, wanted in zip(results, expected, strict=True):
        found = difference(result, wanted)
        # Not a number is not less, either.
        if not found < TOLERANCE:
            raise WrongResult(f"differs from {reference} by {found:.2g} of the result; at most {TOLERANCE:g} is right")


def difference(result: Tensor, expected: Tensor) -> float:
    """The largest difference in any BLOCK rows of a head, relative to those rows; nan if a value is nan.

    Rows are grouped, for single rows of a gradient are all but zero, and not taken together, for under a causal mask
    the late rows are so small that an error there would not show.
    """
    if result.shape != expected.shape:
        raise WrongResult(f"the shape is {tuple(result.shape)} and not {tuple(expected.shape)}")

    def norms(tensor: Tensor) -> Tensor:
        squares = tensor.float().square().sum(-1)
        return F.pad(squares, (0, -squares.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK)).sum(-1).sqrt()

    with torch.no_grad():
        return float((norms(result - expected) / norms(expected).clamp_min(1e-30)).max())
