"""The demo's picture: time and peak memory over the number of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from onchip.bench.demo.lengths import CONTENDERS, Row

STYLE = {"standard": ("#b0413e", "s"), "SDPA": ("#3b6ea8", "o"), "onchip": ("#1d8a5b", "D")}


def plot_rows(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draw both curves of every contender on logarithmic axes and write the picture to `path`.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.6), layout="constrained")
    time_axes, memory_axes = figure.subplots(1, 2)
    ticks = sorted({row.length for row in rows})
    for axes, label in ((time_axes, "time of one forward and backward (ms)"), (memory_axes, "peak memory (MiB)")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ticks, [f"{tick // 1024}k" if tick % 1024 == 0 else str(tick) for tick in ticks])
        axes.set_xlabel("tokens")
        axes.set_ylabel(label)
        axes.grid(True, which="major", alpha=0.3)
    for name in CONTENDERS:
        color, marker = STYLE[name]
        line = {"color": color, "marker": marker, "label": name, "linewidth": 1.8, "markersize": 5}
        timed = [(row.length, row.time_ms) for row in rows if row.contender == name and row.time_ms is not None]
        held = [(row.length, row.peak_bytes / 2**20) for row in rows if row.contender == name and row.peak_bytes]
        time_axes.plot([length for length, _ in timed], [ms for _, ms in timed], **line)
        memory_axes.plot([length for length, _ in held], [mebibytes for _, mebibytes in held], **line)
    time_axes.legend(loc="upper left", frameon=False)
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
