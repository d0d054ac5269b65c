"""`onchip audit` on the terminal: tables of errors, and of how a training drifts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from onchip.audit.drift import Pair, Trained, Training, pairs, train
from onchip.audit.errors import EAGER, Case, Measured, Setting, audit
from onchip.audit.laws import LAWS
from onchip.audit.plot import plot_drift
from onchip.audit.record import stamp, to_json
from onchip.audit.text import Text
from onchip.bench.machine import available_memory_bytes, read_machine

TENSORS = {"out": "out", "lse": "LSE", "d_query": "dQ", "d_key": "dK", "d_value": "dV"}
METRICS = {
    "relative": "largest error over the largest reference",
    "maximum": "largest error",
    "rmse": "root of the mean square error",
}


def run_audit(*, setting: Setting, metric: str, as_json: bool, out: Path | None) -> int:
    """Audit and print; the exit status is 1 if the contract is broken, or if no schedule ran."""
    free = available_memory_bytes(setting.device)
    if free is not None and setting.peak_bytes > free:
        raise typer.BadParameter(
            f"--length: eager attention on {max(setting.lengths)} tokens takes about {setting.peak_bytes / 2**30:.1f} "
            f"GiB, {free / 2**30:.1f} are available"
        )
    with _progress(setting.steps) as step:
        cases = list(audit(setting, step))
    audited = [case for case in cases if case.contender != EAGER]
    ran = [case for case in audited if not case.declined]
    good = bool(ran) and not any(case.fails for case in ran)
    record = {**stamp("audit", setting.device), "setting": setting, "good": good, "cases": cases}
    _keep(record, as_json, out)
    if not as_json:
        _print_cases(Console(), setting, metric, cases)
    return 0 if good else 1


def run_drift(*, training: Training, text: Text, as_json: bool, out: Path | None, picture: Path | None) -> int:
    """Train, compare and print; the exit status is 1 if a loss is not finite."""
    with _progress(training.steps) as step:
        trained = train(training, text, step)
    finite = all(abs(loss) < float("inf") for losses in trained.losses.values() for loss in losses)
    compared = pairs(training.dtype)
    record = {
        **stamp("audit-drift", training.device),
        "setting": training,
        "text": {"name": text.name, "sha256": text.sha256, "bytes": text.data.numel()},
        "pairs": compared,
        "losses": trained.losses,
        "drifts": trained.drifts,
    }
    _keep(record, as_json, out)
    if not as_json:
        _print_drift(Console(), training, text, trained)
    if picture is not None:
        try:
            plot_drift(trained, compared, f"onchip audit drift: {_training_words(training)}", picture)
        except ModuleNotFoundError:
            Console(stderr=True).print("No picture: it needs matplotlib: pip install 'onchip[bench]'", markup=False)
    return 0 if finite else 1


@contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar on standard error, if that is a terminal, and what moves it on by a step."""
    columns = (
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        yield lambda description: progress.update(task, description=description, advance=1)


def _keep(record: dict[str, Any], as_json: bool, out: Path | None) -> None:
    text = to_json(record)
    if as_json:
        print(text, end="")
    if out is not None:
        try:
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(text, encoding="utf-8")
        except OSError as error:
            raise typer.BadParameter(f"--out: {error}") from None


def _print_cases(console: Console, setting: Setting, metric: str, cases: list[Case]) -> None:
    mask = "causal" if setting.causal else "not causal"
    console.print(
        f"Batch {setting.batch}, {setting.heads} heads, {mask}, seed {setting.seed}, on "
        f"{read_machine(setting.device).device_name}. Gradients come back to the output"
        f"{' and the LSE' if setting.lse_gradient else ''}.",
        highlight=False,
    )
    for law in setting.laws:
        shown = [case for case in cases if case.point.law == law and not case.declined]
        console.print(f"\n{law}: {LAWS[law].summary}", highlight=False, markup=False)
        console.print(_table(shown, metric))
    console.print(
        f"Cells: the {METRICS[metric]}, against float64 on the same rounded inputs, and its ratio to eager's. "
        "bound: the largest error as a share of what clause 12 of the contract allows. bits: whether all runs gave the "
        "same (asked: only with deterministic=True). alone: whether a sequence gives the same bits outside its batch, "
        "which is not promised.",
        highlight=False,
    )
    for sentence in _refusals(cases):
        console.print(sentence, highlight=False, markup=False)
    console.print(_verdict(cases), highlight=False, markup=False)


def _table(cases: list[Case], metric: str) -> Table:
    # without lines it fits into 80 columns, cells on two lines
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("tokens x dim", no_wrap=True)
    for name in TENSORS.values():
        table.add_column(name, justify="right", min_width=7)
    for name in ("bound", "bits", "alone"):
        table.add_column(name, justify="right", no_wrap=True)
    before = None
    for case in cases:
        if case.point != before:
            table.add_row(f"{case.point.dtype} {case.point.length}x{case.point.dim}")
        before = case.point
        by_name = {tensor.name: tensor for tensor in case.tensors}
        cells = [_cell(by_name.get(name), case.contender, metric) for name in TENSORS]
        table.add_row(f"  {case.contender}", *cells, _bound(case), _bits(case), _words(case.alone_equal))
    return table


def _cell(tensor: Measured | None, contender: str, metric: str) -> str:
    if tensor is None:
        return "none"
    text = f"{getattr(tensor.error, metric):.1e}"
    if contender == EAGER:
        return f"{text}     "
    times = tensor.times_eager_rmse if metric == "rmse" else tensor.times_eager
    return f"{text}    -" if times is None else f"{text} {times:4.2f}"


def _bound(case: Case) -> str:
    shares = [tensor.error.maximum / tensor.allowed for tensor in case.tensors if tensor.allowed]
    if not shares:
        return "-"
    missed = "" if all(tensor.holds for tensor in case.tensors) else "MISSED "
    return f"{missed}{max(shares):.2f}"


def _bits(case: Case) -> str:
    if case.deterministic_equal is False:
        return "DIFFER"
    if case.repeats_equal is False:
        return "asked" if case.deterministic_equal else "differ"
    return _words(case.repeats_equal)


def _words(equal: bool | None) -> str:
    return "-" if equal is None else "equal" if equal else "differ"


def _refusals(cases: list[Case]) -> Iterator[str]:
    """One sentence for each schedule and reason, with the dtypes that it concerns."""
    found: dict[tuple[str, str, tuple[str, ...]], list[str]] = {}
    for case in cases:
        for verb, reasons in (("declines", case.declined), ("has no gradients in", case.no_gradients)):
            if reasons:
                found.setdefault((case.contender, verb, reasons), []).append(case.point.dtype)
    for (contender, verb, reasons), dtypes in found.items():
        yield f"{contender} {verb} {', '.join(dict.fromkeys(dtypes))}: {'; '.join(reasons)}."


def _verdict(cases: list[Case]) -> str:
    tensors = [(case, tensor) for case in cases for tensor in case.tensors if tensor.allowed is not None]
    if not tensors:
        return "No schedule ran."
    lines = [
        f"{case.contender}, {case.point.law}, {case.point.dtype}, {case.point.length} tokens, dim {case.point.dim}: "
        f"the error of {TENSORS[tensor.name]} is {tensor.error.maximum:.2e}, the bound {tensor.allowed:.2e}."
        for case, tensor in tensors
        if not tensor.holds
    ]
    lines += [
        f"{case.contender}, {case.point.law}, {case.point.dtype}: deterministic=True gave different bits."
        for case in cases
        if case.deterministic_equal is False
    ]
    kept = sum(tensor.holds for _, tensor in tensors)
    return "\n".join([*lines, f"{kept} of {len(tensors)} bounds hold."])


def _training_words(training: Training) -> str:
    shape = training.shape
    dtype = str(training.dtype).removeprefix("torch.")
    return (
        f"{shape.layers} layers, {shape.heads} heads, width {shape.width}, context {shape.context}, {training.steps} "
        f"steps of {training.batch} windows, rate {training.rate:g}, {dtype}, seed {training.seed}"
    )


def _print_drift(console: Console, training: Training, text: Text, trained: Trained) -> None:
    console.print(
        f"{_training_words(training)}, on {read_machine(training.device).device_name}; {text.name}, "
        f"{text.data.numel()} bytes, sha256 {text.sha256[:12]}.",
        highlight=False,
        markup=False,
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("step", justify="right")
    table.add_column("compared", no_wrap=True)
    for name in ("loss", "difference", "largest weight", "W1 largest", "W1 mean"):
        table.add_column(name, justify="right", no_wrap=True)
    compared = {pair.name: pair for pair in pairs(training.dtype)}
    before = 0
    for drift in trained.drifts:
        if before and drift.step != before:
            table.add_section()
        loss = trained.losses[compared[drift.pair].second][drift.step - 1]
        table.add_row(
            str(drift.step) if drift.step != before else "",
            drift.pair,
            f"{loss:.4f}",
            f"{drift.loss_difference:+.1e}" if drift.loss_difference else "0",
            *(_number(value) for value in (drift.largest, drift.wasserstein_largest, drift.wasserstein_mean)),
        )
        before = drift.step
    console.print(table)
    for pair in compared.values():
        console.print(_explain(pair), highlight=False, markup=False)
    console.print(
        "loss: of the first that is named, in nats per byte. difference: that less the other's. largest weight: the "
        "largest difference of two weights. W1: the Wasserstein-1 distance of a tensor's weights, over the tensors.",
        highlight=False,
    )


def _number(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _explain(pair: Pair) -> str:
    return f"{pair.name}: {pair.second} beside {pair.first}; {pair.shows}."
