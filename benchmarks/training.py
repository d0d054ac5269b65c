"""Train a GPT the size of GPT-2's smallest with onchip's attention and with others: `python benchmarks/training.py`.

For every context: tokens per second of a step (forward, backward, clipping, AdamW), its peak memory, and what share of
it attention takes. Then the losses of the first steps from one seed. `show` prints the record again.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import torch
import typer
from common import application, make_console, say
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from training_cases import (
    BETAS,
    LARGEST_NORM,
    OTHERS,
    OURS,
    RATE,
    RISE,
    SEED,
    VOCABULARY,
    Case,
    Share,
    Training,
    attention_share,
    contenders,
    draw,
    losses,
)

from onchip.audit.gpt import Attend, Shape
from onchip.audit.record import stamp, to_json
from onchip.audit.text import Text, read_text
from onchip.bench.machine import read_machine
from onchip.bench.protocol import default_directory
from onchip.bench.timing import compare, measure_peak_memory
from onchip.cli.options import goes_to_command, read_device, read_numbers
from onchip.dispatch import schedules

RECORDS = Path("benchmarks/results/nvidia-h200")
"""Whose record `show` prints on a machine without a GPU."""
FILE = "training.json"
ROUNDS = 8
"""So many that four contenders have had every place equally often, in both directions."""
WARMUP = 3
SHARES = 3
LAST = 10
WIDTH = 100
Figure = TypeVar("Figure")

app = application()
Out = Annotated[Path | None, typer.Option(help="Folder of the record (default: benchmarks/results/<device>)")]


@app.callback(invoke_without_command=True)
def measure(
    command: typer.Context,
    context: Annotated[str, typer.Option(help="Contexts, separated by commas.")] = "1024,4096,16384",
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a step; the batch makes them.")] = 16384,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 12,
    heads: Annotated[int, typer.Option(min=1, help="Heads of a layer.")] = 12,
    width: Annotated[int, typer.Option(min=1, help="Size of a token; a multiple of --heads.")] = 768,
    vocabulary: Annotated[int, typer.Option(min=256, help="Logits of a token.")] = VOCABULARY,
    dtype: Annotated[str, typer.Option(help="Of the products: bfloat16 or float32.")] = "bfloat16",
    schedule: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A schedule of onchip, beside its own choice; repeatable.")
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=f"Leave out, of {', '.join(OTHERS)}; repeatable.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each.")] = ROUNDS,
    curve_steps: Annotated[int, typer.Option(min=0, help="Steps of the loss curves; 0 leaves them out.")] = 100,
    curve_context: Annotated[int, typer.Option(min=1, help="Context of the loss curves.")] = 1024,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:<index> (default: a GPU if there is one)")
    ] = None,
    out: Out = None,
) -> None:
    """Measure training steps with onchip's attention and with others, and write the record."""
    if goes_to_command(command):
        return
    where = torch.device(read_device(device or ("cuda" if torch.cuda.is_available() else "cpu")))
    if dtype not in ("bfloat16", "float32"):
        raise typer.BadParameter(f"--dtype is bfloat16 or float32: got {dtype!r}")
    attends = contenders(_known("--schedule", schedule, schedules()), _known("--without", without, OTHERS))
    start = time.perf_counter()

    def case(length: int) -> Case:
        try:
            shape = Shape(layers=layers, heads=heads, width=width, context=length, vocabulary=vocabulary)
        except ValueError as error:
            raise typer.BadParameter(f"--width: {error}") from None
        return Case(shape=shape, tokens=tokens, dtype=dtype)

    cases = [case(length) for length in read_numbers(context, "--context")]
    text = read_text(None, 1 + max(curve_context, *(one.shape.context for one in cases)))
    record = stamp("training", str(where))
    record["protocol"] = {
        "step": "forward, backward, clipping and AdamW, not compiled; weights float32, products by autocast",
        "peak_bytes": "of a step, above the weights and AdamW's two moments",
        "attention": f"median of {SHARES} steps with marks around every attention",
    }
    record["cases"] = [measure_case(one, attends, text, rounds, where) for one in cases]
    if curve_steps:
        record["curves"] = measure_curves(case(curve_context), attends, text, curve_steps, where)
    folder = out or default_directory(read_machine(where))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(to_json(record), encoding="utf-8")
    say(f"{time.perf_counter() - start:.0f} s in all: {folder / FILE}")
    show(folder)
    if _ours_failed(json.loads((folder / FILE).read_text(encoding="utf-8"))):
        raise typer.Exit(1)


@app.command()
def show(out: Out = None) -> None:
    """Print what was recorded; measure nothing."""
    folder = out or (default_directory(read_machine("cuda")) if torch.cuda.is_available() else RECORDS)
    if not (folder / FILE).exists():
        raise typer.BadParameter(f"there is no {FILE} in {folder}")
    record = json.loads((folder / FILE).read_text(encoding="utf-8"))
    console = make_console(WIDTH)
    print_cases(console, record)
    if "curves" in record:
        print_curves(console, record["curves"])
    where = record["where"]
    console.print(
        f"{where['device_name']}, torch {where['torch_version']}, triton {where['triton_version']}", markup=False
    )


# Measuring


def measure_case(
    case: Case, attends: dict[str, Attend], text: Text, rounds: int, device: torch.device
) -> dict[str, Any]:
    """Times, memory and attention's share of one context; what failed, as where memory ran out, is in the record."""
    say(f"context {case.shape.context}: {case.batch} windows, {', '.join(attends)}")
    _free(device)
    training = Training(case, device)
    windows = draw(case, text, torch.Generator().manual_seed(SEED), device)
    calls = {name: partial(training.step, attend, windows) for name, attend in attends.items()}
    comparison = compare(calls, rounds=rounds, warmup=WARMUP, minimum_sample_ms=0, device=device)
    failures = [{"name": failure.name, "error": failure.error} for failure in comparison.failures]

    def peak(name: str) -> int:
        return measure_peak_memory(calls[name], device=device).peak_bytes

    def share(name: str) -> Share:
        several = [attention_share(training, attends[name], windows) for _ in range(SHARES)]
        return sorted(several, key=lambda one: one.attention_ms / one.step_ms)[SHARES // 2]

    peaks = _each([result.name for result in comparison.results], peak, failures, device)
    # After the peaks, for the marks of the shares could not be sent to another process.
    shares = _each(peaks, share, failures, device)
    return {
        "case": case,
        "tokens_per_step": case.tokens_per_step,
        "comparison": comparison,
        "peak_bytes": peaks,
        "attention": shares,
        "failures": failures,
    }


def measure_curves(
    case: Case, attends: dict[str, Attend], text: Text, steps: int, device: torch.device
) -> dict[str, Any]:
    """The losses of every contender's first steps, from the same weights and on the same windows."""
    failures: list[dict[str, str]] = []

    def curve(name: str) -> list[float]:
        say(f"{steps} steps at context {case.shape.context}: {name}")
        return losses(case, attends[name], text, steps, device)

    found = _each(attends, curve, failures, device)
    recipe = {"rate": RATE, "rise": RISE, "betas": BETAS, "largest_norm": LARGEST_NORM, "seed": SEED}
    return {"case": case, **recipe, "losses": found, "failures": failures}


def _each(
    names: Iterable[str], measured: Callable[[str], Figure], failures: list[dict[str, str]], device: torch.device
) -> dict[str, Figure]:
    """What `measured` gives for each name; what it raises, as where memory runs out, goes to the failures."""
    found = {}
    for name in names:
        _free(device)
        try:
            found[name] = measured(name)
        except RuntimeError as error:
            # What the frames of the failed call hold is memory that the others may need.
            traceback.clear_frames(error.__traceback__)
            line = (str(error).strip() or "no message").splitlines()[0]
            failures.append({"name": name, "error": f"{type(error).__name__}: {line}"})
    _free(device)
    return found


def _free(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


# Tables


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="left" if column == "attention" else "right", no_wrap=True)
    return table


def print_cases(console: Console, record: dict[str, Any]) -> None:
    """A row for every context and contender."""
    table = _table("context", "attention", "ms a step", "tokens/s", f"time / {OURS}'s", "peak GiB", "attention's share")
    failures = []
    for case in record["cases"]:
        length, ratios = case["case"]["shape"]["context"], {r["name"]: r for r in case["comparison"]["ratios"]}
        for result in case["comparison"]["results"]:
            name, milliseconds = result["name"], result["median_ms"]
            peak, share = case["peak_bytes"].get(name), case["attention"].get(name)
            table.add_row(
                str(length),
                name,
                f"{milliseconds:.1f}",
                f"{case['tokens_per_step'] / milliseconds * 1e3:,.0f}",
                f"{ratios[name]['median']:.2f}" if name in ratios else "",
                "" if peak is None else f"{peak / 2**30:.3g}",
                "" if share is None else f"{share['attention_ms'] / share['step_ms']:.0%}",
            )
        failures += [(f"{failure['name']} at context {length}", failure["error"]) for failure in case["failures"]]
    console.print(table)
    _print_failures(console, failures)
    shape = record["cases"][0]["case"]["shape"]
    console.print(
        f"{shape['layers']} layers, {shape['heads']} heads, width {shape['width']}, vocabulary {shape['vocabulary']}, "
        f"{record['cases'][0]['case']['dtype']}. Peak: {record['protocol']['peak_bytes']}.",
        markup=False,
    )


def print_curves(console: Console, curves: dict[str, Any]) -> None:
    """The losses of every contender, and how far they are from eager attention's, or else from the first one's."""
    found = curves["losses"]
    if found:
        reference = "eager" if "eager" in found else next(iter(found))
        steps = len(found[reference])
        mean, largest = f"mean distance from {reference}", "largest"
        table = _table("attention", "first loss", f"loss of the last {min(LAST, steps)} steps", mean, largest)
        for name, values in found.items():
            apart = [abs(value - other) for value, other in zip(values, found[reference], strict=True)]
            distances = ("", "") if name == reference else (f"{statistics.fmean(apart):.1e}", f"{max(apart):.1e}")
            table.add_row(name, f"{values[0]:.4f}", f"{statistics.fmean(values[-LAST:]):.4f}", *distances)
        console.print(f"\n{steps} steps from one seed at context {curves['case']['shape']['context']}, nats per byte:")
        console.print(table)
    _print_failures(console, [(failure["name"], failure["error"]) for failure in curves["failures"]])


def _print_failures(console: Console, failures: list[tuple[str, str]]) -> None:
    """A line each, cut to the width: the record holds the whole."""
    for name, error in failures:
        console.print(f"{name} failed: {error}", markup=False, no_wrap=True, overflow="ellipsis")


def _ours_failed(record: dict[str, Any]) -> bool:
    parts = [*record["cases"], *([record["curves"]] if "curves" in record else [])]
    return any(failure["name"].startswith(OURS) for part in parts for failure in part["failures"])


def _known(option: str, names: list[str] | None, known: Iterable[str]) -> list[str]:
    for name in names or ():
        if name not in known:
            raise typer.BadParameter(f"{option}: {name!r} is not one of {', '.join(known)}")
    return names or []


if __name__ == "__main__":
    app()
