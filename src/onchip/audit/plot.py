"""The picture of a training's drift: the losses, and how far the weights part."""

from __future__ import annotations

from pathlib import Path

from onchip.audit.drift import Pair, Trained

COLORS = {
    "repeat": "#7f7f7f",
    "onchip": "#1d8a5b",
    "SDPA": "#3b6ea8",
    "low precision": "#b0413e",
    "both": "#8a5b1d",
}


def plot_drift(trained: Trained, pairs: tuple[Pair, ...], title: str, path: Path) -> None:
    """Draw the losses and, on logarithmic axes, the drift of every pair, and write the picture to `path`.

    A drift of exactly 0 has no place on such an axis; the legend says so.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.4), layout="constrained")
    losses, largest, distance = figure.subplots(1, 3)
    for name, values in trained.losses.items():
        losses.plot(range(1, len(values) + 1), values, label=name, linewidth=1.2)
    for pair in pairs:
        drifts = [drift for drift in trained.drifts if drift.pair == pair.name]
        label = pair.name if any(drift.largest for drift in drifts) else f"{pair.name} (0 throughout)"
        line = {"color": COLORS[pair.name], "label": label, "marker": "o", "markersize": 3, "linewidth": 1.5}
        steps = [drift.step for drift in drifts if drift.largest]
        largest.plot(steps, [drift.largest for drift in drifts if drift.largest], **line)
        distance.plot(steps, [drift.wasserstein_mean for drift in drifts if drift.largest], **line)
    labels = ("loss (nats per byte)", "largest difference of a weight", "mean Wasserstein-1 distance")
    for axes, label in zip((losses, largest, distance), labels, strict=True):
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.grid(True, alpha=0.3)
        axes.legend(frameon=False, fontsize=8)
    for axes in (largest, distance):
        axes.set_yscale("log")
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
