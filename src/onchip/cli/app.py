"""The commands, their options and how they end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer

from onchip._version import __version__
from onchip.cli import INTERRUPTED, WRONG_USE
from onchip.cli.audit import audit_app
from onchip.cli.io import io_app
from onchip.cli.options import Dtype, read_device, read_numbers
from onchip.model.presets import PRESETS
from onchip.schedules.triton import WIDEST

if TYPE_CHECKING:
    from onchip.bench.tune.cases import Case

app = typer.Typer(
    name="onchip",
    help="Exact attention for PyTorch that keeps its quadratic intermediates on the chip.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.add_typer(audit_app, name="audit")
app.add_typer(io_app, name="io")
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit status."""
    try:
        status = app(args=arguments, prog_name="onchip", standalone_mode=False)
    except UsageError as error:
        # typer says more lines, in a box; one is enough.
        message = " ".join(error.format_message().split())  # type: ignore[attr-defined]
        return _fail(message, WRONG_USE) if message else WRONG_USE
    except (KeyboardInterrupt, typer.Abort):
        status = INTERRUPTED
    if status == INTERRUPTED:
        return _fail("interrupted", INTERRUPTED)
    return int(status or 0)


def _fail(message: str, status: int) -> int:
    print(f"onchip: {message}", file=sys.stderr)
    return status


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"onchip {__version__}")
        raise typer.Exit


@app.callback()
def onchip(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    tokens: Annotated[
        str | None, typer.Option(help="Lengths, separated by commas (default: 1024,2048,4096,8192,16384)")
    ] = None,
    heads: Annotated[int, typer.Option(min=1, help="Attention heads.")] = 4,
    dim: Annotated[int, typer.Option(min=1, max=256, help="Size of a head.")] = 64,
    causal: Annotated[bool, typer.Option(help="Let a token see only itself and those before it.")] = True,
    dtype: Annotated[Dtype, typer.Option(help="Data type of query, key and value.")] = Dtype.float32,
    device: Annotated[str, typer.Option(help="Where to run: cpu, cuda or cuda:<index>.")] = "cpu",
    output: Annotated[Path, typer.Option(help="Where to write the picture.")] = Path("demo.png"),
    quick: Annotated[bool, typer.Option("--quick", help="Only 256 and 512 tokens.")] = False,
    no_model: Annotated[bool, typer.Option("--no-model", help="Leave the sentence model out.")] = False,
) -> int:
    """Run a sentence model with onchip inside, then exact attention on long sequences beside standard attention."""
    from onchip.bench.demo.lengths import Setting
    from onchip.cli.demo import run_demo

    lengths = read_numbers(tokens or ("256,512" if quick else "1024,2048,4096,8192,16384"), "--tokens")
    setting = Setting(heads=heads, dim=dim, causal=causal, dtype=_dtype(dtype), device=read_device(device))
    return run_demo(tokens=lengths, setting=setting, output=output, with_model=not no_model)


@app.command()
def plan(
    batch: Annotated[int, typer.Option(min=0, help="Sequences.")] = 1,
    heads: Annotated[int, typer.Option(min=0, help="Heads of the query.")] = 8,
    kv_heads: Annotated[int | None, typer.Option(help="Heads of key and value (default: as --heads)")] = None,
    length: Annotated[int, typer.Option(min=0, help="Tokens of the query.")] = 4096,
    key_length: Annotated[int | None, typer.Option(help="Tokens of key and value (default: as --length)")] = None,
    dim: Annotated[int, typer.Option(min=1, help="Size of a head in query and key.")] = 64,
    dim_value: Annotated[int | None, typer.Option(help="Size of a head in value (default: as --dim)")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Data type of query, key and value.")] = Dtype.float32,
    device: Annotated[str, typer.Option(help="Where it would run: cpu, cuda or cuda:<index>.")] = "cpu",
    causal: Annotated[bool, typer.Option("--causal", help="Bottom-right causal mask.")] = False,
    window: Annotated[
        str | None, typer.Option(metavar="LEFT,RIGHT", help="Inclusive window, as 127,0; an empty side has no bound.")
    ] = None,
    softcap: Annotated[float | None, typer.Option(help="Cap the scores: cap * tanh(score / cap).")] = None,
    scale: Annotated[float | None, typer.Option(help="Scale of the scores (default: dim ** -0.5)")] = None,
    dropout: Annotated[float, typer.Option(help="Probability that a weight is dropped.")] = 0.0,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="Ask for equal bits over repeats.")] = False,
    schedule: Annotated[str | None, typer.Option(help="Ask for this schedule (default: onchip chooses)")] = None,
    hardware: Annotated[
        str | None,
        typer.Option(help=f"Plan for a device that need not be here: {', '.join(PRESETS)} (default: that of --device)"),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Print how onchip would run a problem, and why not otherwise. Computes nothing."""
    from onchip.cli.plan import run_plan

    return run_plan(
        batch=batch,
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        length=length,
        key_length=length if key_length is None else key_length,
        dim=dim,
        dim_value=dim if dim_value is None else dim_value,
        dtype=_dtype(dtype),
        device=read_device(device),
        causal=causal,
        window=_window(window),
        softcap=softcap,
        scale=scale,
        dropout=dropout,
        deterministic=deterministic or None,
        schedule=schedule,
        hardware=hardware,
        as_json=json,
    )


@app.command()
def doctor(
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure what a device can do at most, and store it for plans. Half a minute."),
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="What to measure: cpu, cuda or cuda:<index> (default: a GPU if there is one)")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Say what runs on this machine and, for what does not, why. Exit status 1 if a schedule gives a wrong result."""
    from onchip.cli.doctor import run_doctor, run_measure

    if measure:
        return run_measure(device=None if device is None else read_device(device), as_json=json)
    if device is not None:
        raise typer.BadParameter("--device goes with --measure: without it every device is tried")
    return run_doctor(as_json=json)


@app.command()
def tune(
    budget: Annotated[float, typer.Option(min=1, help="About how many seconds it may take.")] = 600.0,
    only: Annotated[
        str | None,
        typer.Option(help="Kernels, kinds or pairs, as forward,keys:band (default: all). See docs/tuning.md."),
    ] = None,
    dims: Annotated[str, typer.Option(help="Head dims, separated by commas, up to 256.")] = "64,128,256",
    dtypes: Annotated[
        str, typer.Option(help="Of bfloat16, float16 and float32, one of each width.")
    ] = "bfloat16,float32",
    device: Annotated[
        str | None, typer.Option(help="The card: cuda or cuda:<index> (default: the current one)")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the candidates and measure nothing.")] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Print what was measured before, beside what is shipped.")
    ] = False,
    print_table: Annotated[
        bool, typer.Option("--print-table", help="Print what was measured before as rows of the shipped table.")
    ] = False,
    reset: Annotated[bool, typer.Option("--reset", help="Remove what was measured before.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Measure which tiles of the portable kernels are the fastest on this GPU, and use them from now on."""
    from onchip.cli import tune as command

    chosen = [name for name, given in {"--dry-run": dry_run, "--show": show, "--print-table": print_table,
                                       "--reset": reset}.items() if given]  # fmt: skip
    if len(chosen) > 1:
        raise typer.BadParameter(f"one of --dry-run, --show, --print-table and --reset, got {' and '.join(chosen)}")
    if json and (reset or print_table):
        raise typer.BadParameter(f"--json does not go with {chosen[0]}")
    device = read_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if reset:
        return command.run_reset(device)
    if show:
        return command.run_show(device, as_json=json)
    if print_table:
        return command.run_print_table(device)
    todo = _cases(only, dims, dtypes)
    if dry_run:
        return command.run_dry(device, todo, as_json=json)
    return command.run_tune(device, todo, budget=budget, as_json=json)


def _cases(only: str | None, dims: str, dtypes: str) -> list[Case]:
    from onchip.bench.tune.cases import cases

    heads = read_numbers(dims, "--dims")
    if heads[-1] > WIDEST:
        raise typer.BadParameter(f"--dims takes head dims up to {WIDEST}: got {heads[-1]}")
    names = [name.strip() for name in dtypes.split(",")]
    allowed = [Dtype.bfloat16.value, Dtype.float16.value, Dtype.float32.value]
    if not set(names) <= set(allowed):
        raise typer.BadParameter(f"--dtypes takes {', '.join(allowed)}, separated by commas: got {dtypes!r}")
    wanted = [] if only is None else [name.strip() for name in only.split(",")]
    try:
        return cases(wanted, heads, [_dtype(Dtype(name)) for name in dict.fromkeys(names)])
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _window(text: str | None) -> tuple[int | None, int | None] | None:
    if text is None:
        return None
    try:
        left, right = (int(side) if side.strip() else None for side in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"--window takes two whole numbers, LEFT,RIGHT: got {text!r}") from None
    return left, right


def _dtype(dtype: Dtype) -> torch.dtype:
    return getattr(torch, dtype.value)
