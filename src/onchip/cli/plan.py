"""`onchip plan`: how a problem described by options would run."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import torch
import typer

import onchip
from onchip.model.presets import PRESETS
from onchip.model.roofline import Roofline


def run_plan(
    *,
    batch: int,
    heads: int,
    kv_heads: int,
    length: int,
    key_length: int,
    dim: int,
    dim_value: int,
    dtype: torch.dtype,
    device: str,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    softcap: float | None,
    scale: float | None,
    dropout: float,
    deterministic: bool | None,
    schedule: str | None,
    hardware: str | None,
    as_json: bool,
) -> int:
    """Print the plan; the exit status is 1 if no schedule that was asked for runs the problem.

    Args:
        hardware: a name of PRESETS, to plan for that device instead of one that is here.
    """
    if hardware is not None and hardware not in PRESETS:
        raise typer.BadParameter(f"--hardware takes one of {', '.join(PRESETS)}: got {hardware!r}")
    # One element, seen as the whole tensor: a plan reads shapes, so a problem of any size takes no memory.
    element = torch.zeros((), dtype=dtype, device=device)
    try:
        plan = onchip.plan(
            element.expand(batch, heads, length, dim),
            element.expand(batch, kv_heads, key_length, dim),
            element.expand(batch, kv_heads, key_length, dim_value),
            causal=causal,
            window=window,
            score=None if softcap is None else onchip.scores.softcap(softcap),
            scale=scale,
            dropout_p=dropout,
            deterministic=deterministic,
            schedule=None if hardware else schedule,  # type: ignore[arg-type]
        )
        if hardware is not None:
            plan = plan.on(PRESETS[hardware], schedule)
    except onchip.Unsupported as refusal:
        print(f"onchip: {refusal}", file=sys.stderr)
        return 1
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(str(error)) from None
    print(json.dumps(_facts(plan), indent=1) if as_json else plan)
    return 0


def _facts(plan: onchip.Plan) -> dict[str, Any]:
    hardware = plan.hardware
    return {
        "problem": plan.problem.describe(),
        "forward": plan.forward,
        "backward": plan.backward,
        "second_derivative": plan.second_derivative,
        "not_chosen": plan.reasons,
        "computed_pairs": plan.pairs,
        "backward_computed_pairs": plan.backward_pairs,
        "forward_flops": plan.flops,
        "backward_flops": plan.backward_flops,
        "minimum_backward_flops": plan.minimum_backward_flops,
        "minimum_bytes": plan.minimum_bytes,
        "workspace_bytes": plan.workspace_bytes,
        "backward_workspace_bytes": plan.backward_workspace_bytes,
        "kernels": {
            "forward": [asdict(kernel) for kernel in plan.kernels],
            "backward": [asdict(kernel) for kernel in plan.backward_kernels],
        },
        "hardware": None if hardware is None else {"name": hardware.name, "measured": hardware.measured},
        "roofline": {"forward": _bound(plan.roofline), "backward": _bound(plan.backward_roofline)},
        "notes": list(plan.notes),
    }


def _bound(roofline: Roofline | None) -> dict[str, Any] | None:
    if roofline is None:
        return None
    return {
        "bound_us": roofline.bound_us,
        "binding": roofline.binding,
        "times_us": dict(roofline.times_us),
        "launch_us": roofline.launch_us,
    }
