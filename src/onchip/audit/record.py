"""What an audit keeps: its setting and results, with where, when and from which source they come."""

from __future__ import annotations

import json
import math
from datetime import datetime, timezone
from typing import Any

import torch

from onchip._version import __version__
from onchip.bench.machine import read_machine
from onchip.bench.protocol import read_commit

FORMAT = 1


def stamp(suite: str, device: str) -> dict[str, Any]:
    """The head of a record: format, suite, versions, time (UTC), commit (None outside the repository) and machine."""
    return {
        "format": FORMAT,
        "suite": suite,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "onchip": __version__,
        "commit": read_commit(),
        "where": read_machine(device),
    }


def to_json(record: dict[str, Any]) -> str:
    """The record as JSON text. Dataclasses become objects, a dtype its name, a number that is not finite null."""
    return json.dumps(_plain(record), indent=1, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if hasattr(value, "__dataclass_fields__"):
        return {name: _plain(getattr(value, name)) for name in value.__dataclass_fields__}
    return value
