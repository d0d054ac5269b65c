"""Who computes the cases of `benchmarks/gpu.py`: onchip's schedules, PyTorch's attention and other packages."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from gpu_cases import Case
from gpu_inputs import Inputs
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import onchip
from onchip.bench.machine import installed_version

OURS = "onchip "
"""How the names of onchip's contenders begin; the schedule follows, and for a part or a variant ": " and its name."""
PLAIN, PREPARATION = "plain", "preparation"
"""A variant: the same schedule on `Case.plain`. A part: what the schedule makes of the mask before its kernel."""
OTHERS = ("sdpa_flash", "sdpa_cudnn", "sdpa_efficient", "flex", "fa3", "fa3ts", "fa4", "fastflash")
INSTALLED = ("sdpa_flash", "sdpa_cudnn", "flex")
PEERS = ("fa3", "fa4")
"""Contenders of the plain table: those of PyTorch, and what `--peers` adds."""
PACKAGES = {
    "fa3": "fa3-fwd",
    "fa3ts": "tokenspeed-fa3",
    "fa4": "flash-attn-4",
    "fastflash": "fastflash-attention",
}
TAKES = {
    "sdpa_flash": {"grouped", "dropout", "packed"},
    "sdpa_cudnn": {"grouped", "dropout"},
    "sdpa_efficient": {"bias", "dropout"},
    "flex": {"grouped", "window", "documents"},
    "fa3": {"grouped", "softcap", "packed"},
    "fa3ts": {"grouped", "window", "softcap", "packed"},
    "fa4": {"grouped", "window", "softcap", "packed", "deterministic"},
    "fastflash": set[str](),
}
"""Which of `Case.features` each can be asked for here."""

Attend = Callable[[], Tensor]
Make = Callable[[Case, Inputs], Attend]
"""Makes the attention of a case on its tensors. It may raise, as where a package is missing."""


class Unfit(Exception):
    """The contender has no such problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """Who is timed in a case.

    Attributes:
        plain: it runs on `Case.plain` instead, with tensors of its own.
        compared: its results must be those of the first contestant.
    """

    name: str
    make: Make
    plain: bool = False
    compared: bool = True


def contestants(schedules: Sequence[str], others: Iterable[str], ours: Iterable[str] = ()) -> list[Contestant]:
    """onchip's schedules, variants and parts of the first one (`ours`), and the others, by name and version."""
    first = f"{OURS}{schedules[0]}"
    own = [Contestant(name=f"{OURS}{name}", make=partial(_onchip, name)) for name in schedules]
    for part in ours:
        make = partial(_preparation if part == PREPARATION else _onchip, schedules[0])
        own.append(Contestant(name=f"{first}: {part}", make=make, plain=part == PLAIN, compared=False))
    return own + [Contestant(name=_versioned(name), make=MAKERS[name]) for name in OTHERS if name in set(others)]


def word(name: str) -> str:
    """What a contender's name says without its version or schedule: one of OTHERS, PLAIN, PREPARATION, or "onchip"."""
    first, _, part = name.partition(": ")
    return part or first.split()[0]


def _versioned(name: str) -> str:
    version = installed_version(PACKAGES[name]) if name in PACKAGES else None
    return f"{name} {version}" if version else name


# onchip


def _onchip(schedule: str, case: Case, inputs: Inputs) -> Attend:
    if inputs.offsets is None:
        return cast(Attend, partial(cast(Any, onchip.attention), *inputs.tensors, **_options(schedule, case, inputs)))
    function = cast(Any, onchip.attention_varlen)
    return cast(Attend, partial(function, *inputs.tensors, inputs.offsets, **_options(schedule, case, inputs)))


def _options(schedule: str, case: Case, inputs: Inputs) -> dict[str, Any]:
    options: dict[str, Any] = {"causal": case.causal, "schedule": schedule}
    if case.window is not None:
        options["window"] = (case.window, 0)
    if inputs.ids is not None:
        options["mask"] = onchip.masks.documents(inputs.ids)
    if case.softcap is not None:
        options["score"] = onchip.scores.softcap(case.softcap)
    if inputs.bias is not None:
        options["score"] = onchip.scores.bias(inputs.bias)
    if case.dropout:
        options["dropout_p"] = case.dropout
    if case.deterministic:
        options["deterministic"] = True
    return options


def _preparation(schedule: str, case: Case, inputs: Inputs) -> Attend:
    """What `triton` does before its forward kernel where a mask is more than a band: its lists of blocks."""
    if schedule != "triton":
        raise Unfit(f"a preparation of its own is known of triton alone, got {schedule}")
    launch, gpu = importlib.import_module("onchip.schedules.triton.launch"), importlib.import_module("onchip.gpu")
    # The plan binds the arguments and runs nothing; a named schedule would refuse a device that it does not run on.
    problem = onchip.plan(*inputs.tensors, **{**_options(schedule, case, inputs), "schedule": None}).problem

    def prepare() -> Tensor:
        return cast(Tensor, launch.Call(problem).lists_for(gpu.FORWARD)[0])

    return prepare


# PyTorch


def _sdpa(name: str, backend: SDPBackend, case: Case, inputs: Inputs) -> Attend:
    _check_fits(name, case)
    options: dict[str, Any] = {"is_causal": case.causal, "dropout_p": case.dropout}
    if case.heads_kv:
        options["enable_gqa"] = True
    if inputs.bias is not None:
        options["attn_mask"] = inputs.bias
    if case.timing == "host":
        # To choose a kernel in each call would take as long as the call: whoever times it chooses for all of them.
        if backend is not SDPBackend.FLASH_ATTENTION:
            raise Unfit("the host time of sdpa_flash alone is taken")
        return cast(Attend, partial(F.scaled_dot_product_attention, *inputs.tensors, **options))

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, **options)

    if inputs.offsets is None:
        return partial(attend, *inputs.tensors)
    bounds: dict[str, Any] = {"min_seqlen": min(case.sequences), "max_seqlen": max(case.sequences)}

    def jagged() -> Tensor:
        # Made in the call, for in a backward the leaves are the packed tensors.
        nested = (
            torch.nested.nested_tensor_from_jagged(tensor, inputs.offsets, **bounds).transpose(1, 2)
            for tensor in inputs.tensors
        )
        return attend(*nested).transpose(1, 2).values()

    return jagged


def _flex(case: Case, inputs: Inputs) -> Attend:
    _check_fits("flex", case)
    # Every case compiles anew, and after eight versions of a function the compiler would leave the next one uncompiled.
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    mask, device = None, inputs.query.device
    if visible := _visible(case, inputs):
        mask = create_block_mask(visible, None, None, case.length, case.length, device=device)
    options: dict[str, Any] = {"enable_gqa": True} if case.heads_kv else {}
    return cast(Attend, partial(compiled, *inputs.tensors, block_mask=mask, **options))


def _visible(case: Case, inputs: Inputs) -> Callable[..., Tensor] | None:
    """FlexAttention's form of the mask; its block mask is made before the timing."""
    ids, window = inputs.ids, case.window

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        keep = query >= key
        if window is not None:
            keep = keep & (query - key <= window)
        return keep if ids is None else keep & (ids[query] == ids[key])

    return visible if case.causal else None


# Other packages


def _flash_attention(name: str, modules: Sequence[str], case: Case, inputs: Inputs) -> Attend:
    """flash_attn_func of the first of these modules that is there, or flash_attn_varlen_func; they take (batch, length,
    heads, dim), or (tokens, heads, dim)."""
    _check_fits(name, case)
    module = _import(modules)
    options: dict[str, Any] = {"causal": case.causal}
    if case.window is not None:
        options["window_size"] = (case.window, 0)
    if case.softcap is not None:
        options["softcap"] = case.softcap
    if case.deterministic:
        options["deterministic"] = True
    if inputs.offsets is not None:
        longest = max(case.sequences)
        offsets = {"cu_seqlens_q": inputs.offsets, "cu_seqlens_k": inputs.offsets}
        longests = {"max_seqlen_q": longest, "max_seqlen_k": longest}
        packed = partial(module.flash_attn_varlen_func, *inputs.tensors, **offsets, **longests, **options)
        return lambda: _first(packed())

    def attend() -> Tensor:
        views = (tensor.transpose(1, 2) for tensor in inputs.tensors)
        return _first(module.flash_attn_func(*views, **options)).transpose(1, 2)

    return attend


def _first(result: Any) -> Tensor:
    """The output: some versions return the LSE as well."""
    return cast(Tensor, result[0] if isinstance(result, tuple) else result)


def _fastflash(case: Case, inputs: Inputs) -> Attend:
    _check_fits("fastflash", case)
    function = importlib.import_module("fastflash_attention").fast_attention
    return cast(Attend, partial(function, *inputs.tensors, is_causal=case.causal))


def _import(modules: Sequence[str]) -> Any:
    *others, last = modules
    for module in others:
        try:
            return importlib.import_module(module)
        except ModuleNotFoundError:
            continue
    return importlib.import_module(last)


def _check_fits(name: str, case: Case) -> None:
    for feature, words in case.features.items():
        if feature not in TAKES[name]:
            raise Unfit(f"{name} is not asked for {words}")
    if name == "flex" and case.features.keys() & {"window", "documents"} and not case.causal:
        raise Unfit("flex is asked for windows and documents under a causal mask only")


MAKERS: dict[str, Make] = {
    "sdpa_flash": partial(_sdpa, "sdpa_flash", SDPBackend.FLASH_ATTENTION),
    "sdpa_cudnn": partial(_sdpa, "sdpa_cudnn", SDPBackend.CUDNN_ATTENTION),
    "sdpa_efficient": partial(_sdpa, "sdpa_efficient", SDPBackend.EFFICIENT_ATTENTION),
    "flex": _flex,
    "fa3": partial(_flash_attention, "fa3", ("fa3_fwd_interface", "flash_attn_interface")),
    # FA3 as tokenspeed builds it, with local attention; its module has FA3's own name.
    "fa3ts": partial(_flash_attention, "fa3ts", ("flash_attn_interface",)),
    "fa4": partial(_flash_attention, "fa4", ("flash_attn.cute",)),
    "fastflash": _fastflash,
}
