"""Pictures of the IO model's sweeps."""

from __future__ import annotations

from pathlib import Path

from onchip.model.comparison import PAPER
from onchip.model.sweeps import BOUND, THEOREM, Point, Sweep

COLORS = {
    "textbook": "#b0413e",
    "eager": "#d98880",
    "saved-weights": "#8a5b1d",
    "rabe-staats": "#7d5ba6",
    "flash1": "#3b6ea8",
    PAPER: "#8fb3d9",
    "flash2": "#1d8a5b",
    THEOREM: "#555555",
    BOUND: "#999999",
}


def plot_sweep(sweep: Sweep, title: str, path: Path) -> None:
    """Draw bytes moved and elements held on the chip over x, on logarithmic axes, and write the picture to `path`.

    A hollow marker means that the chip does not hold what the algorithm keeps there.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    moved, held = figure.subplots(1, 2)
    for axes, label in ((moved, "moved (GB)"), (held, "held on the chip (elements)")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel(sweep.over)
        axes.set_ylabel(label)
        axes.grid(True, which="major", alpha=0.3)
    for name, points in sweep.lines.items():
        line = {"color": COLORS[name], "label": name, "linewidth": 1.5}
        if name in (BOUND, THEOREM):
            moved.plot(*_of(points, "moved_bytes", 1e9), linestyle="dotted" if name == BOUND else "dashed", **line)
            continue
        for axes, what, unit in ((moved, "moved_bytes", 1e9), (held, "peak_elements", 1)):
            axes.plot(*_of(points, what, unit), **line)
            for fits, face in ((True, COLORS[name]), (False, "white")):
                some = [point for point, good in zip(points, _fit(sweep, points), strict=True) if good == fits]
                mark = {"marker": "o", "markersize": 4, "linestyle": "none", "markerfacecolor": face}
                axes.plot(*_of(some, what, unit), color=COLORS[name], **mark)
    xs = [point.x for point in sweep.lines[BOUND]]
    (chip,) = held.plot(xs, sweep.chips, color="black", linewidth=1, label="the chip")
    held.legend(handles=[chip], frameon=False, fontsize=8)
    moved.legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _of(points: list[Point], what: str, unit: float) -> tuple[list[int], list[float]]:
    known = [point for point in points if getattr(point, what) is not None]
    return [point.x for point in known], [getattr(point, what) / unit for point in known]


def _fit(sweep: Sweep, points: list[Point]) -> list[bool]:
    return [(point.peak_elements or 0) <= chip for point, chip in zip(points, sweep.chips, strict=True)]
