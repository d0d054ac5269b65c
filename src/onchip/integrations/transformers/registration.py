"""Make onchip's attention and its masks known to transformers under a name."""

from __future__ import annotations

import functools
import importlib.metadata
from typing import Any

from onchip.dispatch import ScheduleName, check_name
from onchip.integrations.transformers.attend import attention_function
from onchip.integrations.transformers.pattern import mask_function

OLDEST = 5
"""The first major version of transformers whose mask functions take lengths and offsets by name."""


def register(name: str = "onchip", *, schedule: ScheduleName | None = None) -> None:
    """Let models of transformers take `attn_implementation=name`.

    After it, `from_pretrained(..., attn_implementation=name)` and `model.set_attn_implementation(name)` let attention
    run on `onchip.attention`. Registered are an attention function and the mask function that belongs to it. Calling
    it again changes nothing; calling it with another schedule under the same name replaces the schedule.

    Args:
        name: what models call it. Names of transformers' own implementations are refused, and so are names with
            "flash", "/", "|" or ":", from which transformers concludes something.
        schedule: the name of the schedule that must run, as in `onchip.attention`; None chooses.
    Raises:
        ImportError: transformers is not installed, or older than version 5.
        TypeError, ValueError: the name or the schedule cannot be used.
    """
    attentions, masks, dense = _transformers()
    check_name(schedule)
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, got {type(name).__name__} {name!r}")
    if not name or "flash" in name or any(sign in name for sign in "/|:"):
        raise ValueError(f"name must be a word without 'flash', '/', '|' and ':', got {name!r}")
    attend, mask = _functions(schedule, dense)
    taken = {**attentions._global_mapping, **masks._global_mapping}.get(name)
    if taken is not None and not getattr(taken, "is_onchip", False):
        raise ValueError(f"name {name!r} is that of another implementation in transformers: choose another name")
    attentions.register(name, attend)
    masks.register(name, mask)


@functools.cache
def _functions(schedule: ScheduleName | None, dense: Any) -> tuple[Any, Any]:
    """One pair of function objects per schedule, so that registering again does not recompile compiled models."""
    functions: tuple[Any, Any] = attention_function(schedule), mask_function(dense)
    for function in functions:
        function.is_onchip = True
    return functions


def _transformers() -> tuple[Any, Any, Any]:
    """The two interfaces, and the mask function that makes bool tensors."""
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(
            "register needs transformers, which is not installed: pip install 'transformers>=5'"
        ) from None
    if int(version.split(".")[0]) < OLDEST:
        raise ImportError(f"register needs transformers {OLDEST} or newer, got {version}: pip install -U transformers")
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    return AttentionInterface, AttentionMaskInterface, sdpa_mask
