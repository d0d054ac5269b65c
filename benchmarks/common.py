"""What the scripts of this folder share: their command lines, their calls and the records that they read back."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import typer
from rich.console import Console
from torch import Tensor

from onchip.bench.protocol import Record
from onchip.bench.timing import Contender


def application() -> typer.Typer:
    """An empty command line in the style of these scripts."""
    return typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )


def make_console(width: int) -> Console:
    """A console as wide as the terminal; a file or a pipe has no width, and there a table gets `width`."""
    return Console(width=None if sys.stdout.isatty() else width, highlight=False)


def say(line: str) -> None:
    """Tell the progress. A line each, not a bar: its thread would take time from those that are timed."""
    print(line, file=sys.stderr, flush=True)


def read_records(out: Path, pattern: str) -> list[Record]:
    """The records in a folder whose file names match, in the order of the names."""
    return [Record.from_json(path.read_text(encoding="utf-8")) for path in sorted(out.glob(pattern))]


def inference(attend: Callable[[], Tensor]) -> Contender:
    """A call of `attend` that no gradient follows."""

    def call() -> Tensor:
        with torch.no_grad():
            return attend()

    return call


def backward(attend: Callable[[], Tensor], leaves: Sequence[Tensor], gradient: Tensor) -> Contender:
    """The backward alone, of one forward that runs here."""
    return partial(torch.autograd.grad, attend(), tuple(leaves), gradient, retain_graph=True)
