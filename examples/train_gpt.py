"""Train a byte-level GPT whose attention is onchip's: `python examples/train_gpt.py`.

On a CPU the default sizes take a few minutes. `--compare` trains three times from one seed, with onchip, with PyTorch's
scaled_dot_product_attention and with eager attention, and draws the three loss curves into one picture.
"""

from __future__ import annotations

import enum
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from gpt_training import Settings, Trainer, check_attention, split
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import onchip
from onchip.audit.gpt import ATTENTIONS, Shape
from onchip.audit.record import stamp, to_json
from onchip.audit.text import Text, read_text
from onchip.cli.options import read_device

INTERRUPTED = 130
READ_EVERY = 10
"""Steps between two looks at the losses: to read one waits for the device."""
COLORS = {"onchip": "#1d8a5b", "sdpa": "#3b6ea8", "eager": "#b0413e"}

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


class AttentionChoice(str, enum.Enum):
    """How the model attends."""

    onchip = "onchip"
    sdpa = "sdpa"
    eager = "eager"


class DtypeChoice(str, enum.Enum):
    """The dtypes of the products."""

    bfloat16 = "bfloat16"
    float32 = "float32"


@app.command()
def main(
    text: Annotated[
        Path | None, typer.Option(help="Text to train on, may end in .gz (default: examples/data/shakespeare.txt.gz)")
    ] = None,
    attention: Annotated[AttentionChoice | None, typer.Option(help="How the model attends (default: onchip)")] = None,
    schedule: Annotated[str | None, typer.Option(help="Schedule of onchip (default: onchip chooses)")] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Train with each attention from one seed.")] = False,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 4,
    heads: Annotated[int, typer.Option(min=1, help="Heads of a layer.")] = 4,
    width: Annotated[int, typer.Option(min=1, help="Size of a token; a multiple of --heads.")] = 128,
    context: Annotated[int, typer.Option(min=1, help="Bytes that the model sees.")] = 256,
    batch: Annotated[int, typer.Option(min=1, help="Windows of the text in a step.")] = 8,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the training.")] = 500,
    warmup: Annotated[int | None, typer.Option(min=0, help="Steps of the warm-up (default: a tenth)")] = None,
    rate: Annotated[float, typer.Option(min=0.0, help="Largest learning rate of AdamW.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Seed of the weights, the windows and the sample.")] = 0,
    dtype: Annotated[
        DtypeChoice | None, typer.Option(help="Of the products (default: bfloat16 on a GPU, float32 on a CPU)")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda or cuda:<index> (default: a GPU if there is one)")
    ] = None,
    compile: Annotated[bool, typer.Option("--compile/--no-compile", help="Use torch.compile.")] = False,
    every: Annotated[int, typer.Option(min=1, help="Steps between validations and checkpoints.")] = 100,
    checkpoint: Annotated[Path | None, typer.Option(help="Keep the state of the training in this file.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint.")] = False,
    sample: Annotated[int, typer.Option(min=0, help="Bytes to write with the trained model.")] = 200,
    prompt: Annotated[str, typer.Option(help="What the sample follows.", show_default="a new line")] = "\n",
    temperature: Annotated[float, typer.Option(min=0.01, help="Of the sample; 1 draws as the model says.")] = 0.8,
    picture: Annotated[Path | None, typer.Option(help="Draw the losses into this file.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write settings and losses to this file, as JSON.")] = None,
) -> None:
    """Train a byte-level GPT whose attention is onchip's.

    Ctrl-C ends the training after the step at hand, writes the checkpoint if one was named, and exits with 130.
    """
    where = read_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        shape = Shape(layers=layers, heads=heads, width=width, context=context)
    except ValueError as error:
        raise typer.BadParameter(f"--width: {error}") from None
    settings = Settings(
        attention=attention.value if attention else "onchip",
        schedule=schedule,
        shape=shape,
        batch=batch,
        steps=steps,
        warmup=max(1, steps // 10) if warmup is None else warmup,
        rate=rate,
        seed=seed,
        dtype=dtype.value if dtype else "float32" if where == "cpu" else "bfloat16",
        device=where,
        compile=compile,
    )
    _check_options(settings, compare, attention is not None, checkpoint, resume, prompt)
    read = _read(text, context)
    names = list(ATTENTIONS) if compare else [settings.attention]
    console, trainers = Console(highlight=False), []
    with note_interrupt() as interrupted:
        for name in names:
            trainer = Trainer(replace(settings, attention=name), read)
            if resume and checkpoint is not None:
                _load(trainer, checkpoint)
            _introduce(console, trainer)
            run(trainer, console, every, checkpoint, interrupted)
            if interrupted():
                _say_interrupted(trainer, checkpoint)
                raise typer.Exit(INTERRUPTED)
            trainers.append(trainer)
    if compare:
        _print_comparison(console, trainers)
    if picture is not None:
        draw(trainers, picture)
        console.print(f"Picture: {picture}", markup=False)
    if out is not None:
        write_record(trainers, out)
        console.print(f"Record: {out}", markup=False)
    if sample:
        written = trainers[0].sample(prompt.encode(), sample, temperature)
        console.print(f"\n{prompt}{written.decode(errors='replace')}", markup=False)


# Training


@contextmanager
def note_interrupt() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C is noted, so that a step is never left half done; a second one interrupts at once."""
    seen = False

    def note(number: int, frame: object) -> None:
        nonlocal seen
        seen = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: seen
    finally:
        signal.signal(signal.SIGINT, before)


def run(
    trainer: Trainer, console: Console, every: int, checkpoint: Path | None, interrupted: Callable[[], bool]
) -> None:
    """Train to the end or to an interrupt. The checkpoint is written every so many steps, and at the end of both."""
    settings = trainer.settings
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task(settings.attention, total=settings.steps, completed=trainer.steps_done)
        start, since = time.perf_counter(), trainer.steps_done
        while not trainer.finished and not interrupted():
            trainer.step()
            due = trainer.finished or trainer.steps_done % every == 0
            if due or trainer.steps_done % READ_EVERY == 0:
                loss = statistics.fmean(trainer.losses[since:])
                speed = (trainer.steps_done - since) * settings.tokens_per_step / (time.perf_counter() - start)
                words = f"training loss {loss:.3f}, {speed:,.0f} tokens/s"
                progress.update(task, completed=trainer.steps_done, description=f"{settings.attention}: {words}")
                if due:
                    validation = trainer.validate()
                    progress.print(f"step {trainer.steps_done}: {words}, validation loss {validation:.3f}")
                    if checkpoint is not None:
                        trainer.save(checkpoint)
                start, since = time.perf_counter(), trainer.steps_done
    if checkpoint is not None:
        trainer.save(checkpoint)


# What is told


def _introduce(console: Console, trainer: Trainer) -> None:
    settings = trainer.settings
    console.print(
        f"{settings.attention}: {trainer.parameters:,} weights, {settings.tokens_per_step:,} bytes a step, "
        f"{settings.dtype}, {settings.device}"
        + (f"; step {trainer.steps_done} of {settings.steps}" if trainer.steps_done else ""),
        markup=False,
    )


def _say_interrupted(trainer: Trainer, checkpoint: Path | None) -> None:
    kept = (
        "nothing was kept: --checkpoint names a file" if checkpoint is None else f"--resume goes on from {checkpoint}"
    )
    typer.echo(f"interrupted after step {trainer.steps_done} of {trainer.settings.steps}; {kept}", err=True)


def differences(trainers: Sequence[Trainer]) -> list[list[float]]:
    """For every training the distance of each step's loss from that of the first one."""
    first = trainers[0].losses
    return [[abs(loss - other) for loss, other in zip(trainer.losses, first, strict=True)] for trainer in trainers]


def _print_comparison(console: Console, trainers: Sequence[Trainer]) -> None:
    first = trainers[0].settings.attention
    table = Table("attention", "last loss", "validation loss", f"mean distance from {first}", "largest")
    for trainer, apart in zip(trainers, differences(trainers), strict=True):
        distances = ("", "") if trainer is trainers[0] else (f"{statistics.fmean(apart):.1e}", f"{max(apart):.1e}")
        validation = trainer.validation[-1][1]
        table.add_row(trainer.settings.attention, f"{trainer.losses[-1]:.4f}", f"{validation:.4f}", *distances)
    console.print(table)


def draw(trainers: Sequence[Trainer], path: Path) -> None:
    """Draw the loss of every step and the validations; where there are several trainings also how far they part.

    A distance of 0 has no place on a logarithmic axis and is left out.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11 if len(trainers) > 1 else 6.5, 4.4), layout="constrained")
    losses, *rest = figure.subplots(1, 2 if len(trainers) > 1 else 1, squeeze=False)[0]
    for number, (trainer, apart) in enumerate(zip(trainers, differences(trainers), strict=True)):
        name = trainer.settings.attention
        # Curves that agree lie upon each other: the later ones are thinner, so that all of them show.
        line = {"color": COLORS[name], "linewidth": 2 * (len(trainers) - number) - 1}
        steps = range(1, len(trainer.losses) + 1)
        losses.plot(steps, trainer.losses, label=name, **line)
        losses.plot(*zip(*trainer.validation, strict=True), "o--", label=f"{name}, validation", **line)
        for axes in rest:
            shown = [(step, distance) for step, distance in zip(steps, apart, strict=True) if distance]
            if shown:
                axes.plot(*zip(*shown, strict=True), ".", color=COLORS[name], label=name)
    losses.set_ylabel("loss (nats per byte)")
    losses.legend(frameon=False)
    for axes in rest:
        axes.set_ylabel(f"distance from the loss of {trainers[0].settings.attention}")
        axes.set_yscale("log")
        if axes.lines:
            axes.legend(frameon=False)
    for axes in (losses, *rest):
        axes.set_xlabel("step")
        axes.grid(True, alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def write_record(trainers: Sequence[Trainer], path: Path) -> None:
    """Write what was trained, where, and every loss, as JSON."""
    first = trainers[0]
    record: dict[str, Any] = stamp("train-gpt", first.settings.device)
    record["text"] = {"name": first.text.name, "sha256": first.text.sha256}
    record["runs"] = [
        {"settings": asdict(t.settings), "parameters": t.parameters, "losses": t.losses, "validation": t.validation}
        for t in trainers
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_json(record), encoding="utf-8")


# Options


def _check_options(
    settings: Settings, compare: bool, attention: bool, checkpoint: Path | None, resume: bool, prompt: str
) -> None:
    if compare and (attention or checkpoint is not None):
        raise typer.BadParameter(
            "--compare trains with every attention and from the start: it takes neither --attention nor --checkpoint"
        )
    if settings.schedule is not None and settings.attention != "onchip":
        raise typer.BadParameter(f"--schedule is one of onchip's: got it with --attention {settings.attention}")
    if resume and (checkpoint is None or not checkpoint.exists()):
        raise typer.BadParameter(f"--resume needs a --checkpoint that is there: got {checkpoint}")
    if checkpoint is not None and checkpoint.exists() and not resume:
        raise typer.BadParameter(f"--checkpoint: {checkpoint} is there: add --resume, or name another file")
    if not prompt:
        raise typer.BadParameter("--prompt must have at least one byte: got none")
    try:
        check_attention(settings)
    except (ValueError, onchip.Unsupported) as error:
        raise typer.BadParameter(f"--schedule: {error}") from None


def _read(text: Path | None, context: int) -> Text:
    try:
        read = read_text(text)
        split(read, context)
    except ValueError as error:
        raise typer.BadParameter(f"--text: {error}") from None
    return read


def _load(trainer: Trainer, checkpoint: Path) -> None:
    try:
        trainer.load(checkpoint)
    except ValueError as error:
        raise typer.BadParameter(f"--checkpoint: {error}") from None


if __name__ == "__main__":
    app()
