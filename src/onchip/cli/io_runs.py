"""`onchip io simulate` and `onchip io communication` on the terminal."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from onchip.cli.io_tables import cost_facts
from onchip.model.communication import SCHEMES, Communication, Sharding
from onchip.model.cost import Cost
from onchip.model.io import ALGORITHMS, Algorithm, Sizes, largest_blocks
from onchip.model.shape import Blocks, Shape
from onchip.model.simulation import Simulation, random_values, simulate

LARGEST_ERROR = 1e-10
MOST_PAIRS = 2**26
"""Scores of one head that are computed in float64: half a GiB a matrix."""


@dataclass(frozen=True, slots=True)
class Run:
    """A simulation beside the closed forms, and the largest error of its results, relative to the largest value."""

    algorithm: Algorithm
    sizes: Sizes
    simulation: Simulation
    forms: tuple[Cost, Cost]
    error: float | None

    @property
    def counts_agree(self) -> bool:
        """Whether bytes by name, operations and the peak are the same."""
        return self.forms == (self.simulation.forward, self.simulation.backward)

    @property
    def good(self) -> bool:
        """Whether nothing differs."""
        return self.counts_agree and (self.error is None or self.error <= LARGEST_ERROR)


def run_simulations(
    *, names: list[str], shape: Shape, chip_elements: int, blocks: Blocks | None, with_values: bool, as_json: bool
) -> int:
    """Run, compare and print; the exit status is 1 if something differs."""
    if with_values:
        if shape.length_q * shape.length_k > MOST_PAIRS:
            raise typer.BadParameter(
                f"--values: {shape.length_q} x {shape.length_k} scores are too many to compute; at most {MOST_PAIRS}"
            )
        shape = dataclasses.replace(shape, batch=1, heads=1)
    runs = []
    columns = (BarColumn(), TextColumn("{task.percentage:>3.0f}%"), TimeElapsedColumn())
    text = TextColumn("{task.description}")
    terminal = Console(stderr=True)
    with Progress(*columns, text, console=terminal, transient=True, disable=not terminal.is_terminal) as progress:
        task = progress.add_task("", total=len(names))
        for name in names:
            progress.update(task, description=name)
            runs.append(_run(ALGORITHMS[name], shape, chip_elements, blocks, with_values))
            progress.advance(task)
    if as_json:
        facts = {
            "shape": dataclasses.asdict(shape),
            "chip_elements": chip_elements,
            "runs": [_facts(run) for run in runs],
            "good": all(run.good for run in runs),
        }
        print(json.dumps(facts, indent=1))
    else:
        _print(Console(), shape, runs)
    return 0 if all(run.good for run in runs) else 1


def _run(algorithm: Algorithm, shape: Shape, chip_elements: int, blocks: Blocks | None, with_values: bool) -> Run:
    sizes = Sizes(blocks, blocks) if blocks is not None else largest_blocks(algorithm, shape, chip_elements)
    # what does not fit on the chip is run in its smallest form
    forward = sizes.forward or algorithm.forward.sized(1, shape.dim)
    backward = sizes.backward or algorithm.backward.sized(1, shape.dim)
    values = random_values(shape) if with_values else None
    simulation = simulate(algorithm, shape, forward, backward_blocks=backward, values=values)
    forms = algorithm.forward.cost(shape, forward), algorithm.backward.cost(shape, backward)
    error = None if values is None else _largest_error(shape, values, simulation)
    return Run(algorithm, Sizes(forward, backward), simulation, forms, error)


def _largest_error(shape: Shape, values: dict[str, Tensor], simulation: Simulation) -> float:
    """Against dense attention and its gradients by autograd."""
    query, key, value = (values[name].clone().requires_grad_() for name in ("query", "key", "value"))
    out = torch.softmax(query @ key.mT * shape.scale, -1) @ value
    gradients = torch.autograd.grad(out, (query, key, value), values["d_out"])
    expected = dict(zip(("out", "d_query", "d_key", "d_value"), (out.detach(), *gradients), strict=True))
    errors = [
        ((simulation.results[name] - true).abs().max() / true.abs().max().clamp(min=1e-300)).item()
        for name, true in expected.items()
        if true.numel()
    ]
    # a NaN is the largest error of all, which max() does not know
    return max((error if error == error else float("inf") for error in errors), default=0.0)


def _facts(run: Run) -> dict[str, Any]:
    return {
        "name": run.algorithm.name,
        "forward_blocks": None if run.sizes.forward is None else [run.sizes.forward.rows, run.sizes.forward.columns],
        "backward_blocks": None
        if run.sizes.backward is None
        else [run.sizes.backward.rows, run.sizes.backward.columns],
        "forward": cost_facts(run.simulation.forward),
        "backward": cost_facts(run.simulation.backward),
        "counts_agree": run.counts_agree,
        "largest_relative_error": run.error,
    }


def _print(console: Console, shape: Shape, runs: list[Run]) -> None:
    table = Table()
    for name in ("algorithm", "forward MB", "backward MB", "on chip forward", "on chip backward", "counts", "error"):
        table.add_column(name, justify="left" if name == "algorithm" else "right")
    for run in runs:
        forward, backward = run.simulation.forward, run.simulation.backward
        table.add_row(
            run.algorithm.name,
            f"{forward.traffic.total_bytes / 1e6:,.3f}",
            f"{backward.traffic.total_bytes / 1e6:,.3f}",
            str(forward.peak_elements),
            str(backward.peak_elements),
            "equal" if run.counts_agree else "differ",
            "-" if run.error is None else f"{run.error:.0e}",
        )
    console.print(table)
    console.print(
        f"Heads: {shape.copies}; tokens: {shape.length_q} x {shape.length_k}. Counts: bytes of each tensor, operations "
        "and the peak of the loop nest that ran, against the closed form. Error: the largest of the output and the "
        "gradients against dense attention in float64, relative to the largest value.",
        highlight=False,
    )


def run_communication(sharding: Sharding, *, as_json: bool) -> int:
    """Print what each scheme sends; one that cannot shard this is named with its reason."""
    found: dict[str, Communication] = {}
    reasons: dict[str, str] = {}
    for name, scheme in SCHEMES.items():
        try:
            found[name] = scheme(sharding)
        except ValueError as error:
            reasons[name] = str(error)
    if as_json:
        facts = {
            "sharding": dataclasses.asdict(sharding),
            "schemes": {
                name: dataclasses.asdict(one)
                | {"total_sent": one.total_sent, "imbalance": one.imbalance, "efficiency": one.efficiency}
                for name, one in found.items()
            },
            "not_possible": reasons,
        }
        print(json.dumps(facts, indent=1))
        return 0
    console = Console()
    table = Table()
    for name in ("scheme", "forward MB", "backward MB", "total GB", "busiest / mean", "efficiency"):
        table.add_column(name, justify="left" if name == "scheme" else "right")
    for name, one in found.items():
        table.add_row(
            name,
            f"{max(one.forward_sent) / 1e6:,.1f}",
            f"{max(one.backward_sent) / 1e6:,.1f}",
            f"{one.total_sent / 1e9:.3f}",
            f"{one.imbalance:.3f}",
            f"{one.efficiency:.3f}",
        )
    mask = "causal" if sharding.causal else "not causal"
    console.print(
        f"{sharding.devices} devices, batch {sharding.batch}, {sharding.length} tokens, {sharding.heads} heads and "
        f"{sharding.kv_heads} of key and value, {sharding.dim} and {sharding.dim_v} wide, {mask}:",
        highlight=False,
    )
    console.print(table)
    console.print(
        "Forward and backward: what the device that sends most hands to others; total: of all devices. Busiest / mean: "
        "visible pairs of the busiest device. Efficiency: the part of the time that devices compute if each step waits "
        f"for its busiest device. The rings send sums of dK and dV with {sharding.gradient_bytes} bytes an element.",
        highlight=False,
    )
    for name, reason in reasons.items():
        console.print(f"{name}: {reason}.", highlight=False, markup=False)
    return 0
