"""What one transformer layer costs as a document grows: `python examples/long_document.py --picture long.png`.

Time and peak memory of a forward and backward of one GPT layer over 512 to 16k tokens, with onchip, with PyTorch's
scaled_dot_product_attention, and with eager attention, which stops where its scores no longer fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor

import onchip
from onchip.audit.gpt import ATTENTIONS, Attend, Block, Shape
from onchip.audit.record import stamp, to_json
from onchip.bench.demo.lengths import Row
from onchip.bench.demo.plot import plot_rows
from onchip.bench.machine import available_memory_bytes, read_machine
from onchip.bench.timing import compare, measure_peak_memory
from onchip.cli.options import Dtype, read_device, read_numbers
from onchip.cli.progress import stepping

STANDARD = "standard"
TOKENS = {"cpu": "512,1024,2048,4096", "cuda": "512,1024,2048,4096,8192,16384"}
MEMORY_SHARE = 0.8
"""Of the memory that is free, what eager attention may take unless --limit-gib says otherwise."""
SHORT = 64
"""Tokens of the call that starts thread pools and loads kernels before memory is measured."""

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


@app.command()
def main(
    tokens: Annotated[
        str | None, typer.Option(help="Lengths, separated by commas (default: 512 to 4096, to 16384 on a GPU)")
    ] = None,
    width: Annotated[int, typer.Option(min=1, help="Size of a token; a multiple of --heads.")] = 256,
    heads: Annotated[int, typer.Option(min=1, help="Heads of the layer.")] = 4,
    dtype: Annotated[Dtype | None, typer.Option(help="Default: bfloat16 on a GPU, float32 on a CPU")] = None,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda or cuda:<index>.")] = "cpu",
    schedule: Annotated[str | None, typer.Option(help="Schedule of onchip (default: onchip chooses)")] = None,
    limit_gib: Annotated[
        float | None,
        typer.Option(min=0.0, help="Memory that eager attention may take, in GiB (default: 80% of what is free)"),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each time.")] = 5,
    picture: Annotated[Path | None, typer.Option(help="Draw the curves into this file.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the figures to this file, as JSON.")] = None,
) -> None:
    """Time and peak memory of one transformer layer, forward and backward, as a document grows."""
    where = read_device(device)
    kind = torch.device(where).type
    lengths = read_numbers(tokens or TOKENS[kind], "--tokens")
    number_type = getattr(torch, dtype.value if dtype else "float32" if kind == "cpu" else "bfloat16")
    try:
        shape = Shape(layers=1, heads=heads, width=width, context=max(lengths))
    except ValueError as error:
        raise typer.BadParameter(f"--width: {error}") from None
    limit = memory_limit(limit_gib, where)
    contenders = attentions(schedule)
    try:
        for attend in contenders.values():
            step(*prepare(attend, shape, SHORT, number_type, where))
    except (ValueError, onchip.Unsupported) as error:
        raise typer.BadParameter(f"--schedule: {error}") from None

    machine, console = read_machine(where), Console(highlight=False)
    name = str(number_type).removeprefix("torch.")
    title = f"one layer, width {width}, {heads} heads, causal, {name}, on {machine.device_name}"
    rows: list[Row] = []
    with stepping(console, len(lengths)) as tell:
        for length in lengths:
            tell(f"{length} tokens")
            rows.extend(measure(contenders, shape, length, number_type, where, limit, rounds))
    console.print(f"Forward and backward of {title}:", markup=False)
    print_rows(console, rows)
    if picture is not None:
        plot_rows(rows, title, picture)
        console.print(f"Picture: {picture}", markup=False)
    if out is not None:
        setting = {"shape": shape, "dtype": number_type, "schedule": schedule, "limit_bytes": limit, "rounds": rounds}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(to_json({**stamp("long-document", where), "setting": setting, "rows": rows}), encoding="utf-8")
        console.print(f"Record: {out}", markup=False)


def attentions(schedule: str | None) -> dict[str, Attend]:
    """The three ways to attend; onchip's comes last and runs the schedule."""
    chosen: Any = partial(onchip.attention, causal=True, schedule=schedule)  # type: ignore[arg-type]
    return {STANDARD: ATTENTIONS["eager"], "SDPA": ATTENTIONS["sdpa"], "onchip": chosen}


# The layer. These are sent to another process, where memory is measured on a CPU.


def prepare(attend: Attend, shape: Shape, length: int, dtype: torch.dtype, device: str) -> tuple[Block, Tensor]:
    """A layer, the same one for every way to attend, and what it reads: (1, length, width)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer, hidden = Block(shape, attend), torch.randn(1, length, shape.width)
    return layer.to(device, dtype), hidden.to(device, dtype).requires_grad_()


def prepare_warm(attend: Attend, shape: Shape, length: int, dtype: torch.dtype, device: str) -> tuple[Block, Tensor]:
    """The same, after a short call."""
    step(*prepare(attend, shape, SHORT, dtype, device))
    return prepare(attend, shape, length, dtype, device)


def step(layer: Block, hidden: Tensor) -> tuple[Tensor, ...]:
    """Forward and backward: the gradients of what the layer reads and of its weights."""
    return torch.autograd.grad(layer(hidden).sum(), (hidden, *layer.parameters()))


# Measuring


def memory_limit(limit_gib: float | None, device: str) -> float | None:
    """Bytes that eager attention may take; None where nothing was said and the system does not tell what is free."""
    if limit_gib is not None:
        return limit_gib * 2**30
    free = available_memory_bytes(device)
    return None if free is None else MEMORY_SHARE * free


def eager_bytes(shape: Shape, length: int, dtype: torch.dtype) -> int:
    """What eager attention holds at the peak of its backward: weights, two gradients of their size, and the mask."""
    return length**2 * (3 * shape.heads * dtype.itemsize + 1)


def measure(
    contenders: dict[str, Attend],
    shape: Shape,
    length: int,
    dtype: torch.dtype,
    device: str,
    limit: float | None,
    rounds: int,
) -> Iterator[Row]:
    """A row for each contender; one that is left out or fails says why in its row."""
    rows = {name: Row(length=length, contender=name) for name in contenders}
    needed = eager_bytes(shape, length, dtype)
    if limit is not None and needed > limit:
        reason = f"would take {needed / 2**30:.2f} GiB, the limit is {limit / 2**30:.2f} GiB"
        rows[STANDARD] = replace(rows[STANDARD], left_out=reason)
    calls = {
        name: partial(step, *prepare(contenders[name], shape, length, dtype, device))
        for name, row in rows.items()
        if row.left_out is None
    }
    comparison = compare(calls, rounds=rounds, warmup=1, device=device)
    for result in comparison.results:
        rows[result.name] = replace(rows[result.name], time_ms=result.median_ms, rounds=rounds)
    for failure in comparison.failures:
        rows[failure.name] = replace(rows[failure.name], left_out=failure.error)
    calls.clear()
    for name, row in rows.items():
        if row.left_out is None:
            setup = partial(prepare_warm, contenders[name], shape, length, dtype, device)
            peak = measure_peak_memory(step, setup=setup, warmup=0, device=device)
            row = replace(row, peak_bytes=peak.peak_bytes)
        yield row


def print_rows(console: Console, rows: Sequence[Row]) -> None:
    """Print a line for every length and contender."""
    table = Table()
    for column in ("tokens", "attention", "time (ms)", "tokens/s", "memory (MiB)"):
        table.add_column(column, justify="left" if column == "attention" else "right")
    for row in rows:
        figures = ("left out", "", "")
        if row.time_ms is not None and row.peak_bytes is not None:
            speed = row.length / row.time_ms * 1e3
            figures = (f"{row.time_ms:,.1f}", f"{speed:,.0f}", f"{row.peak_bytes / 2**20:,.1f}")
        table.add_row(str(row.length), row.contender, *figures, end_section=row.contender == "onchip")
    console.print(table)
    for row in rows:
        if row.left_out is not None:
            console.print(f"{row.contender} at {row.length} tokens: {row.left_out}.", markup=False)
    console.print(
        "Time: median of interleaved rounds. Memory: the most that a call adds to the layer and its input.",
        markup=False,
    )


if __name__ == "__main__":
    # By its own name the module can be found by the process in which memory is measured; __main__ cannot.
    from long_document import app as importable

    importable()
