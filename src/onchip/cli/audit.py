"""`onchip audit`: its commands and their options."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from onchip.cli.options import Dtype, goes_to_command, read_device, read_numbers

audit_app = typer.Typer(invoke_without_command=True)


class DriftDtype(str, enum.Enum):
    """The dtypes that a training's drift is measured in."""

    bfloat16 = "bfloat16"
    float32 = "float32"


class Metric(str, enum.Enum):
    """What the cells of the table of errors show."""

    relative = "relative"
    maximum = "maximum"
    rmse = "rmse"


Device = Annotated[str, typer.Option(help="Where to run: cpu, cuda or cuda:<index>.")]
Json = Annotated[bool, typer.Option("--json", help="Print the record as JSON.")]
Out = Annotated[Path | None, typer.Option(help="Write the record to this file.")]


@audit_app.callback()
def audit(
    context: typer.Context,
    law: Annotated[
        str | None,
        typer.Option(help="Laws of the inputs, separated by commas: normal, outliers, logits, one-hot (default: all)"),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Data types, separated by commas (default: all of the contract)")
    ] = None,
    schedule: Annotated[
        str | None,
        typer.Option(help="Schedules, separated by commas; chosen is what onchip chooses (default: all by name)"),
    ] = None,
    length: Annotated[str, typer.Option(help="Tokens, separated by commas.")] = "1024",
    dim: Annotated[str, typer.Option(help="Sizes of a head, separated by commas.")] = "64",
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 2,
    heads: Annotated[int, typer.Option(min=1, help="Heads.")] = 2,
    causal: Annotated[bool, typer.Option("--causal", help="Let a token see only itself and those before it.")] = False,
    lse_gradient: Annotated[
        bool, typer.Option("--lse-gradient", help="Let a gradient reach the LSE as well as the output.")
    ] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Runs whose bits are compared; 1 compares none.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    device: Device = "cpu",
    metric: Annotated[Metric, typer.Option(help="What the cells of the table show.")] = Metric.relative,
    json: Json = False,
    out: Out = None,
) -> int:
    """Measure the errors of every schedule against float64, beside eager attention, and whether bits repeat.

    Exit status 1 if an error is above the contract's bound, or if bits differ with deterministic=True.
    `onchip audit drift` looks at a training.
    """
    if goes_to_command(context):
        return 0
    from onchip.audit.contenders import CHOSEN
    from onchip.audit.errors import Setting
    from onchip.audit.laws import LAWS
    from onchip.cli.audit_tables import run_audit
    from onchip.dispatch import schedules

    names = list(schedules())
    setting = Setting(
        laws=_choices(law, "--law", list(LAWS)),
        dtypes=tuple(getattr(torch, name) for name in _choices(dtype, "--dtype", [item.value for item in Dtype])),
        schedules=tuple(names) if schedule is None else _choices(schedule, "--schedule", [*names, CHOSEN]),
        lengths=tuple(read_numbers(length, "--length")),
        dims=tuple(read_numbers(dim, "--dim")),
        batch=batch,
        heads=heads,
        causal=causal,
        lse_gradient=lse_gradient,
        repeats=repeats,
        seed=seed,
        device=read_device(device),
    )
    return run_audit(setting=setting, metric=metric.value, as_json=json, out=out)


@audit_app.command()
def drift(
    text: Annotated[
        Path | None, typer.Option(help="Text to train on, may end in .gz (default: the repository's excerpt)")
    ] = None,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 2,
    heads: Annotated[int, typer.Option(min=1, help="Heads of a layer.")] = 4,
    width: Annotated[int, typer.Option(min=1, help="Size of a token; a multiple of --heads.")] = 64,
    context: Annotated[int, typer.Option(min=1, help="Tokens that the model sees.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Windows of the text in a step.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the training.")] = 60,
    every: Annotated[int | None, typer.Option(min=1, help="Steps between measurements (default: a sixth)")] = None,
    rate: Annotated[float, typer.Option(min=0.0, help="Learning rate of AdamW.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the windows.")] = 0,
    dtype: Annotated[DriftDtype, typer.Option(help="Data type of the products.")] = DriftDtype.bfloat16,
    device: Device = "cpu",
    picture: Annotated[Path | None, typer.Option(help="Draw the curves into this file.")] = None,
    json: Json = False,
    out: Out = None,
) -> int:
    """Train a small GPT with eager attention and with onchip's, and measure how far the weights part.

    Beside it: the same training twice, torch's own attention, and bfloat16 against float32.
    """
    from onchip.audit.drift import Training
    from onchip.audit.gpt import Shape
    from onchip.audit.text import read_text
    from onchip.cli.audit_tables import run_drift

    try:
        shape = Shape(layers=layers, heads=heads, width=width, context=context)
    except ValueError as error:
        raise typer.BadParameter(f"--width: {error}") from None
    training = Training(
        shape=shape,
        batch=batch,
        steps=steps,
        every=max(1, steps // 6) if every is None else every,
        rate=rate,
        seed=seed,
        dtype=getattr(torch, dtype.value),
        device=read_device(device),
    )
    try:
        read = read_text(text, context + 1)
    except ValueError as error:
        raise typer.BadParameter(f"--text: {error}") from None
    return run_drift(training=training, text=read, as_json=json, out=out, picture=picture)


def _choices(text: str | None, option: str, allowed: Sequence[str]) -> tuple[str, ...]:
    """The names in a list separated by commas, each once; all that are allowed for None."""
    names = tuple(allowed) if text is None else tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if wrong := [name for name in names if name not in allowed]:
        raise typer.BadParameter(f"{option} takes names among {', '.join(allowed)}: got {wrong[0]!r}")
    return names
