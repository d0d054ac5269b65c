"""`onchip demo` on the terminal: the tables, the progress bar and the picture."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from onchip.bench.demo.lengths import Row, Setting, run_lengths, steps
from onchip.bench.demo.plot import plot_rows
from onchip.bench.demo.sentences import Comparison, ModelMissing, compare_sentences
from onchip.bench.machine import read_machine
from onchip.cli.progress import stepping

LEAST_COSINE = 0.99999


def run_demo(*, tokens: list[int], setting: Setting, output: Path, with_model: bool) -> int:
    """Run both parts and print them; the exit status is 1 if the embeddings differ."""
    console = Console()
    good = True
    if with_model:
        try:
            good = _print_sentences(console, compare_sentences())
        except ModelMissing as missing:
            console.print(f"Left out: {missing}", markup=False, highlight=False)
    _show_lengths(console, tokens, setting, output)
    return 0 if good else 1


def _print_sentences(console: Console, comparison: Comparison) -> bool:
    """Print the table; whether every embedding is the same and onchip computed every layer."""
    sentences = comparison.sentences
    console.print("all-MiniLM-L6-v2 with its own attention and with onchip inside; nearest neighbour by each:")
    table = Table()
    for name in ("", "sentence", "tokens", "cosine", "own", "onchip"):
        table.add_column(name, justify="left" if name == "sentence" else "right", no_wrap=True)
    table.columns[1].max_width = max(20, console.width - 54)
    for number, sentence in enumerate(sentences, start=1):
        table.add_row(
            str(number),
            sentence.text,
            str(sentence.tokens),
            f"{sentence.cosine:.9f}",
            str(sentence.neighbour_before + 1),
            str(sentence.neighbour_after + 1),
        )
    console.print(table)
    same = sum(sentence.neighbour_before == sentence.neighbour_after for sentence in sentences)
    least = min(sentence.cosine for sentence in sentences)
    console.print(
        f"{len(sentences)} sentences in one padded batch, {comparison.layers} layers of {comparison.heads} heads. "
        f"Own attention: {comparison.torch_calls_before} calls of torch's operator. onchip inside: "
        f"{comparison.onchip_calls_after} calls of onchip's operator, {comparison.torch_calls_after} of torch's. "
        f"Smallest cosine {least:.9f}; {same} of {len(sentences)} nearest neighbours are the same.\n",
        highlight=False,
    )
    complete = comparison.onchip_calls_after == comparison.layers and comparison.torch_calls_after == 0
    return complete and same == len(sentences) and least >= LEAST_COSINE


def _show_lengths(console: Console, tokens: list[int], setting: Setting, output: Path) -> None:
    machine = read_machine(setting.device)
    dtype = str(setting.dtype).removeprefix("torch.")
    what = (
        f"forward and backward, batch 1, {setting.heads} heads of {setting.dim}, {dtype}, "
        f"{'causal' if setting.causal else 'not causal'}, on {machine.device_name}"
        + (f", {machine.threads} threads" if machine.device_type == "cpu" else "")
    )
    console.print(f"{what[0].upper()}{what[1:]}:", highlight=False)
    if machine.device_type == "cpu" and machine.load_average and machine.load_average[0] > machine.cores / 2:
        advice = "" if machine.thread_waiting else "; with GOMP_SPINCOUNT=20000 in the environment they suffer less"
        console.print(
            f"This machine is busy (load {machine.load_average[0]} on {machine.cores} cores): times are unreliable"
            f"{advice}.",
            highlight=False,
        )
    rows: list[Row] = []
    start = time.perf_counter()
    with stepping(console, steps(tokens)) as step:
        rows.extend(run_lengths(setting, tokens, step))
    console.print(_table(rows))
    for row in rows:
        if row.left_out is not None:
            console.print(f"{row.contender} at {row.length} tokens: {row.left_out}.", markup=False, highlight=False)
    console.print(
        "Time: median of interleaved rounds. Memory: the most that a call adds to its inputs. Error: the largest "
        "against float64 over the largest value there, of the output and of the worst gradient"
        f"{_heads_note(rows, setting)}. {time.perf_counter() - start:.0f} s in all.",
        highlight=False,
    )
    try:
        plot_rows(rows, f"onchip demo: {what}", output)
    except ModuleNotFoundError:
        console.print("No picture: it needs matplotlib: pip install 'onchip[bench]'", markup=False, highlight=False)
    else:
        console.print(f"Picture: {output}", highlight=False)


def _table(rows: list[Row]) -> Table:
    table = Table()
    for name in ("tokens", "attention", "time (ms)", "rounds", "memory (MiB)", "output error", "gradient error"):
        table.add_column(name, justify="left" if name == "attention" else "right")
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before.length != row.length:
            table.add_section()
        first = str(row.length) if before is None or before.length != row.length else ""
        if row.left_out is not None:
            # The whole reason stands below the table.
            table.add_row(first, row.contender, row.left_out.split(":")[0])
            continue
        assert row.time_ms is not None and row.peak_bytes is not None
        table.add_row(
            first,
            row.contender,
            f"{row.time_ms:,.1f}",
            str(row.rounds),
            f"{row.peak_bytes / 2**20:,.1f}",
            f"{row.out_error:.1e}",
            f"{row.gradient_error:.1e}",
        )
    return table


def _heads_note(rows: list[Row], setting: Setting) -> str:
    """Which lengths have their error from some of the heads only."""
    fewer = {row.length: row.heads_checked for row in rows if 0 < row.heads_checked < setting.heads}
    return "".join(f"; at {length} tokens over {heads} of {setting.heads} heads" for length, heads in fewer.items())
