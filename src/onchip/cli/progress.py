"""The progress bar of commands that work in steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def stepping(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    """A bar of `total` steps; call what it gives with a description when a step begins."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=total)
        begun = 0

        def step(description: str) -> None:
            nonlocal begun
            progress.update(task, description=description, completed=begun)
            begun += 1

        yield step
