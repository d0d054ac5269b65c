"""Files that onchip keeps about a device, in the user's cache folder."""

from __future__ import annotations

import os
import re
from pathlib import Path


def cache_path(kind: str, device_name: str) -> Path:
    """Where a file about a device is kept: in $ONCHIP_CACHE, or else in "onchip" in $XDG_CACHE_HOME or ~/.cache.

    Args:
        kind: the folder in it, such as "hardware".
        device_name: as the driver or the processor says it.
    """
    own = os.environ.get("ONCHIP_CACHE")
    root = Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "onchip"
    name = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return root / kind / f"{name}.json"


def write_whole(path: Path, text: str) -> None:
    """Write a file that appears whole or not at all, so that a reader never meets half of it.

    Raises:
        OSError: the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)
