"""How often the Hopper forward must compute tiles twice, and on which inputs: `python benchmarks/activations.py`.

In bfloat16 that kernel takes a row's softmax reference from the first block of keys that it walks; rows whose later
scores leave the range of the numbers are flagged, and their tiles are computed again. A model of it
(activations_policy.py) counts such rows for every source of queries, keys and values (activations_sources.py), for two
first blocks, two widths of a block and several limits. On a Hopper GPU each source is also timed beside normal inputs
of its shape and held against float64. One JSON file holds it all, from which `--show` prints the tables again.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from activations_gpu import NORMAL, Checked, check, is_hopper, time_beside_normal
from activations_policy import GROUP, LIMITS, WALKS, WIDTHS, kernel_tile, measure, policies
from activations_sources import Source, drawn, of_gpt, of_sentence_model, trained
from common import application, make_console, say
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from onchip.audit.gpt import Shape
from onchip.audit.record import stamp, to_json
from onchip.audit.text import read_text
from onchip.bench.demo.sentences import ModelMissing
from onchip.bench.machine import read_machine
from onchip.bench.protocol import Comparison, default_directory
from onchip.cli.options import read_device, read_numbers
from onchip.schedules.hopper import WIDEST

FILE = "activations.json"
SHAPE = {"layers": 2, "heads": 2, "width": 128, "context": 256}
"""Of the GPT."""
LAST = 20
"""Losses whose mean is the last loss."""
ROUNDS = 8
WIDTH = 112
Part = Literal["rows", "seeing", "tiles", "work"]
PARTS: dict[Part, str] = {
    "rows": "rows that are flagged",
    "seeing": "flagged rows, of those that see the sink (without one: of all rows)",
    "tiles": f"tiles of {GROUP} rows with a flagged row",
    "work": "blocks of scores that are computed twice",
}
app = application()


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of a source on a Hopper GPU: its time beside normal inputs, and its error, None where the call failed."""

    comparison: Comparison
    checked: Checked | None


@app.command()
def activations(
    length: Annotated[int, typer.Option(min=128, help="Tokens of what is drawn.")] = 4096,
    dims: Annotated[str, typer.Option(help="Head dims of what is drawn, separated by commas.")] = "64,128",
    steps: Annotated[int, typer.Option(min=0, help="Steps of the GPT's training; 0 leaves the GPT out.")] = 3000,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each time, on a Hopper GPU.")] = ROUNDS,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:<index> (default: a GPU if there is one)")
    ] = None,
    part: Annotated[Part, typer.Option(help="What the table counts.")] = "tiles",
    width: Annotated[
        int | None, typer.Option(help="Columns of a block in the tables: 64 or 128 (default: the kernel's own).")
    ] = None,
    show: Annotated[bool, typer.Option("--show", help="Print what was recorded; measure nothing.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder (default: benchmarks/results/<device>)")] = None,
) -> None:
    """Count the rows and tiles that the Hopper forward's row reference flags; on a Hopper GPU, what they cost."""
    where = torch.device(read_device(device or ("cuda" if torch.cuda.is_available() else "cpu")))
    if width not in (None, *WIDTHS):
        raise typer.BadParameter(f"--width is one of {', '.join(map(str, WIDTHS))}: got {width}")
    numbers = tuple(read_numbers(dims, "--dims"))
    if any(dim % 8 or dim > WIDEST for dim in numbers):
        raise typer.BadParameter(f"--dims takes multiples of 8 up to {WIDEST}, as the kernel does: got {dims}")
    folder = out or default_directory(read_machine(where))
    failed = False
    if not show:
        record, failed = _measure_all(length, numbers, steps, rounds, where)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(to_json(record), encoding="utf-8")
    if not (folder / FILE).exists():
        raise typer.BadParameter(f"there is no {FILE} in {folder}")
    print_record(make_console(WIDTH), json.loads((folder / FILE).read_text(encoding="utf-8")), part, width)
    if failed:
        raise typer.Exit(1)


# Measuring


def _measure_all(
    length: int, dims: tuple[int, ...], steps: int, rounds: int, device: torch.device
) -> tuple[dict[str, Any], bool]:
    """The record, and whether a result of the kernel was wrong or missing."""
    start = time.perf_counter()
    record = stamp("activations", str(device))
    record["protocol"] = {"length": length, "dims": dims, "limits": list(LIMITS), "group_rows": GROUP}
    entries: list[dict[str, Any]] = []
    failed = False
    for source in _sources(record, length, dims, steps, device):
        entry = {
            "name": source.name,
            "shape": list(source.query.shape),
            "causal": source.causal,
            "seen_from": source.seen_from,
            "kernel_width": kernel_tile(source).columns,
            "measured": asdict(measure(source, policies())),
        }
        if is_hopper(device):
            comparison = time_beside_normal(source, rounds)
            cost = Cost(comparison=comparison, checked=None if comparison.failures else check(source))
            failed = failed or cost.checked is None or not cost.checked.holds
            entry["cost"] = asdict(cost)
        entries.append(entry)
        say(f"{time.perf_counter() - start:6.1f} s  {source.name}")
    record["sources"] = entries
    return record, failed


def _sources(
    record: dict[str, Any], length: int, dims: tuple[int, ...], steps: int, device: torch.device
) -> Iterator[Source]:
    """Every source in turn. What was trained, and what is not installed here, is noted in the record."""
    text = read_text(None, SHAPE["context"] + 1)
    if steps:
        say(f"training the GPT, {steps} steps")
        shape = Shape(**SHAPE)
        model, losses = trained(shape, text, steps, device)
        record["gpt"] = {
            "shape": shape,
            "text_sha256": text.sha256,
            "steps": steps,
            "first_loss": losses[0],
            "last_loss": statistics.fmean(losses[-LAST:]),
        }
        yield from of_gpt(model, text, device)
    try:
        yield from of_sentence_model(text, device)
    except ModelMissing as error:
        record["left_out"] = f"MiniLM: {error}"
    yield from drawn(length, dims, device)


# Tables


def print_record(console: Console, record: dict[str, Any], part: Part, width: int | None) -> None:
    """What the sources are, then a row of shares for each; on a Hopper GPU also what they cost.

    `width` chooses among what was measured; None is for each source the width that the kernel has.
    """
    blocks = "blocks as wide as the kernel's" if width is None else f"blocks of {width} columns"
    console.print(f"Largest score less the reference, in nats, over the rows, {blocks}:")
    _print_sources(console, record, width)
    console.print(f"\n{PARTS[part]}, in percent, {blocks}:")
    table = _table("")
    for walk in WALKS:
        for limit in LIMITS:
            table.add_column(f"{walk}\n{limit}", justify="right", no_wrap=True)
    for source in record["sources"]:
        cells = [percent(outcome["flagged"][limit][part]) for outcome in _outcomes(source, width) for limit in LIMITS]
        table.add_row(source["name"], *cells)
    console.print(table)
    console.print(
        "first, last: the block of keys that gives a row its reference. 2^n: the largest sum of weights that is no "
        "flag. finite: only what is not finite is one. key 0: its mean weight, in percent. outlier channel: "
        "of the keys, the largest over the median one."
    )
    if any("cost" in source for source in record["sources"]):
        _print_costs(console, record)
    if "gpt" in record:
        gpt, shape = record["gpt"], record["gpt"]["shape"]
        console.print(
            f"GPT: {shape['layers']} layers, {shape['heads']} heads, width {shape['width']}, {gpt['steps']} steps, "
            f"loss {gpt['first_loss']:.2f} to {gpt['last_loss']:.2f} nats per byte.",
            markup=False,
        )
    if "left_out" in record:
        console.print(f"left out: {record['left_out']}", markup=False)
    where = record["where"]
    console.print(f"{where['device_name']}, torch {where['torch_version']}", markup=False)


def percent(share: float) -> str:
    """A share from 0 to 1 in percent: "0" and "100" only where it is exactly that."""
    if share in (0.0, 1.0):
        return f"{share:.0%}"[:-1]
    return "<0.1" if share < 0.001 else ">99.9" if share > 0.999 else f"{100 * share:.1f}"


def _print_sources(console: Console, record: dict[str, Any], width: int | None) -> None:
    """Shape, sink and outlier channel, and how far scores rise above each reference."""
    table = _table("")
    for head in ("heads", "length", "dim", "key 0\n%", "outlier\nchannel"):
        table.add_column(head, justify="right", no_wrap=True)
    for walk in WALKS:
        for quantile in ("median", "99 %", "most"):
            table.add_column(f"{walk}\n{quantile}", justify="right", no_wrap=True)
    for source in record["sources"]:
        batch, heads, length, dim = source["shape"]
        gaps = [f"{value:.1f}" for outcome in _outcomes(source, width) for value in outcome["gap"]]
        facts = percent(source["measured"]["first_key"]), f"{source['measured']['outlier']:.1f}"
        table.add_row(source["name"], str(batch * heads), str(length), str(dim), *facts, *gaps)
    console.print(table)


def _print_costs(console: Console, record: dict[str, Any]) -> None:
    console.print("\nOn this GPU, beside normal inputs of the same shape:")
    table = _table("")
    for head in ("ms", "normal, ms", "time / normal", "error / allowed"):
        table.add_column(head, justify="right", no_wrap=True)
    for source in record["sources"]:
        name, comparison, checked = source["name"], source["cost"]["comparison"], source["cost"]["checked"]
        times = {result["name"]: result["median_ms"] for result in comparison["results"]}
        ratios = {ratio["name"]: ratio["median"] for ratio in comparison["ratios"]}
        cells = [f"{times[key]:.3f}" if key in times else "failed" for key in (name, NORMAL)]
        table.add_row(name, *cells, f"{ratios[name]:.2f}" if name in ratios else "", _error(checked))
    console.print(table)
    for failure in (failure for source in record["sources"] for failure in source["cost"]["comparison"]["failures"]):
        console.print(f"{failure['name']} failed: {failure['error']}", markup=False)


def _error(checked: dict[str, Any] | None) -> str:
    """The error over what is allowed; JSON has null for what is not finite."""
    if checked is None:
        return ""
    return "not finite" if checked["error"] is None else f"{checked['error'] / checked['allowed']:.2f}"


def _outcomes(source: dict[str, Any], width: int | None) -> list[dict[str, Any]]:
    """Those of a width, in the order of WALKS; None is the kernel's own."""
    wanted = width or source["kernel_width"]
    outcomes = [outcome for outcome in source["measured"]["outcomes"] if outcome["policy"]["width"] == wanted]
    return sorted(outcomes, key=lambda outcome: WALKS.index(outcome["policy"]["walk"]))


def _table(first: str) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(first, no_wrap=True)
    return table


if __name__ == "__main__":
    app()
