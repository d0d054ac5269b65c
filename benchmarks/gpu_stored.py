"""What benchmarks/traffic.py recorded of the quantities that `benchmarks/gpu.py` judges."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FIGURE_2 = {"batch": 64, "heads": 16, "length": 1024, "dim": 64, "dtype": "float16", "causal": False, "tile": None}


def figure_2_bytes(folder: Path, contender: str) -> float | None:
    """Bytes that a forward and backward at Figure 2's shape read and write in device memory; None if not recorded."""
    found = {
        case["direction"]: sum(
            kernel["device_read_bytes"] + kernel["device_written_bytes"] for kernel in case["kernels"]
        )
        for case in _cases(folder, "traffic.json")
        if case["contender"] == contender and all(case[name] == value for name, value in FIGURE_2.items())
    }
    return float(sum(found.values())) if found.keys() == {"forward", "backward"} else None


def table_21_peaks(folder: Path, contender: str) -> dict[int, float]:
    """Peak bytes of a forward and backward above its inputs, by length, at the sizes of Table 21 of Dao et al. 2022."""
    recorded = _cases(folder, "memory-table-21.json")
    return {case["length"]: float(case["peak_bytes"]) for case in recorded if case["contender"] == contender}


def _cases(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / name
    if not path.exists():
        return []
    recorded: dict[str, list[dict[str, Any]]] = json.loads(path.read_text(encoding="utf-8"))
    return recorded["cases"]
