"""Time the forward of both schedules for Hopper GPUs over a grid: `python benchmarks/gpu_choices.py`.

`onchip.choices.HOPPER` follows from what comes out: few queries, many keys, few sequences, grouped heads.
Both run in interleaved rounds of one process, as replays of CUDA graphs, so that the host does not count, back to back
and without a flush of the L2 cache. A graph of `hopper` also sets its counter to zero, which an ordinary call does not.
Before anything is timed the two results are compared. One JSON file holds every point; it is written again and again as
the run goes on, and `--show` prints the table from it, beside what the table of choices takes. `--only` without `--out`
writes nothing: a part must not take the place of the whole.
"""

from __future__ import annotations

import itertools
import json
import math
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from common import application, inference, make_console, say
from gpu_calls import TOLERANCE, WrongResult, difference, fail, replayed
from gpu_cases import CONTIGUOUS, TIMINGS
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

import onchip
from onchip.bench.machine import Machine, read_machine
from onchip.bench.protocol import FORMAT, Commit, Comparison, Failure, Ratio, Result, default_directory, read_commit
from onchip.bench.timing import Contender, compare
from onchip.choices import preferred

SCHEDULES = ("hopper", "triton")
"""Who is timed, in the order in which the dispatcher tries them where no row fits."""
RECORD = "forward-choices.json"
RECORDS = Path("benchmarks/results/nvidia-h200")
"""Whose record `--show` prints on a machine without a GPU."""
ROUNDS, WARMUP, SAMPLE_MS = 5, 2, 3.0
WIDTH = 98

QUERIES, KEYS, BATCHES, DIMS = (1, 16, 64, 512), (512, 4096, 32768), (1, 8, 64), (64, 128)
HEADS, KEY_HEADS = 32, {64: (32, 8), 128: (32, 8)}
SHARED = 64
"""Up to so many queries the heads of a group stand in one tile, in a kernel of its own."""
LARGEST_BYTES, LARGEST_OPERATIONS = 8e9, 3e12
"""Points that need more are left out."""

COMPILE_SECONDS = {"hopper": 7.5, "triton": 2.0}
GROUP_SECONDS, SETUP_SECONDS = 0.3, 0.02
"""Of an estimate: a kernel's compilation; asking for clocks; drawing, comparing and capturing a call."""
SLOW_FLOPS, SLOW_BYTES, SLOW_KEYS = 1.5e14, 2.5e12, 5e7
"""Operations, bytes and keys of one program a second, on an H200, so low that the estimate is not too short."""

app = application()


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Causal attention in bfloat16, the diagonal at the bottom right; keys and values have `heads_key` heads."""

    dim: int
    heads_key: int
    keys: int
    batch: int
    queries: int

    @property
    def name(self) -> str:
        return f"d{self.dim} h{HEADS}/{self.heads_key} k{self.keys} b{self.batch} q{self.queries}"

    @property
    def bytes(self) -> int:
        """Of query, key, value and out."""
        numbers = 2 * (HEADS * self.queries + self.heads_key * self.keys) * self.dim * self.batch
        return numbers * torch.bfloat16.itemsize

    @property
    def operations(self) -> int:
        """Of the products on visible pairs, a multiplication and an addition counted as two."""
        pairs = self.queries * self.keys - self.queries * (self.queries - 1) // 2
        return 4 * pairs * self.dim * HEADS * self.batch

    @property
    def kernel(self) -> tuple[int, int, bool]:
        """What each schedule compiles anew for."""
        return self.dim, self.heads_key, self.heads_key < HEADS and self.queries <= SHARED


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A point with the time of each schedule; `ratio` is the last one's over the first one's, if both ran."""

    point: Point
    results: tuple[Result, ...]
    ratio: Ratio | None
    failures: tuple[Failure, ...]

    def loss(self, schedule: str) -> float:
        """A schedule's median time over that of the faster one."""
        times = {result.name: result.median_ms for result in self.results}
        return times[schedule] / min(times.values())


def points() -> list[Point]:
    """The grid. Groups with more than SHARED queries would be one more kernel for each dim, so they are not in it."""
    every = (
        Point(dim=dim, heads_key=heads_key, keys=keys, batch=batch, queries=queries)
        for dim in DIMS
        for heads_key, keys, batch, queries in itertools.product(KEY_HEADS[dim], KEYS, BATCHES, QUERIES)
        if heads_key == HEADS or queries <= SHARED
    )
    return [point for point in every if point.bytes <= LARGEST_BYTES and point.operations <= LARGEST_OPERATIONS]


def groups(chosen: Sequence[Point]) -> Iterator[list[Point]]:
    """Points that are timed together: to ask a driver for clocks takes as long as to time some points."""
    for _, group in itertools.groupby(chosen, lambda point: (point.dim, point.heads_key, point.keys)):
        yield list(group)


@app.command()
def choices(
    only: Annotated[
        str, typer.Option(metavar="TEXT", help="Only points whose name contains this, as 'd128 h32/8'.")
    ] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each.")] = ROUNDS,
    estimate: Annotated[bool, typer.Option("--estimate", help="Say how long it takes; time nothing.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Print what was recorded; time nothing.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder (default: benchmarks/results/<device>)")] = None,
) -> None:
    """Time the forward of both schedules for Hopper GPUs, and hold the table of choices against the times."""
    chosen = [point for point in points() if only in point.name]
    if not chosen:
        raise typer.BadParameter(f"--only: no point has {only!r} in its name")
    if estimate:
        kernels = len({point.kernel for point in chosen})
        typer.echo(f"{len(chosen)} points, {kernels} kernels of each schedule: about {seconds(chosen, rounds):.0f} s")
        return
    console = make_console(WIDTH)
    machine = _machine()
    folder = out or (default_directory(machine) if machine else RECORDS)
    if show:
        if not (folder / RECORD).exists():
            raise typer.BadParameter(f"no {RECORD} in {folder}")
        print_measured(console, [entry for entry in read(folder / RECORD) if entry.point in chosen])
        return
    if machine is None:
        raise typer.BadParameter("no CUDA device is here; --show prints a record")
    measured, whole = measure_all(chosen, machine, rounds, None if only and out is None else folder / RECORD)
    print_measured(console, measured)
    if not whole or any(entry.failures for entry in measured):
        raise typer.Exit(1)


def _machine() -> Machine | None:
    return read_machine("cuda") if torch.cuda.is_available() else None


def seconds(chosen: Sequence[Point], rounds: int) -> float:
    """An estimate of the run's wall time."""
    total = len({point.kernel for point in chosen}) * sum(COMPILE_SECONDS.get(name, 0.0) for name in SCHEDULES)
    for group in groups(chosen):
        total += GROUP_SECONDS
        for point in group:
            call = max(point.operations / SLOW_FLOPS, point.bytes / SLOW_BYTES, point.keys / SLOW_KEYS)
            samples = (rounds + 1) * max(1.1 * SAMPLE_MS / 1e3, call)
            total += len(SCHEDULES) * (SETUP_SECONDS + (WARMUP + 2) * call + samples)
    return total


# Measuring


def measure_all(
    chosen: Sequence[Point], machine: Machine, rounds: int, path: Path | None
) -> tuple[list[Measured], bool]:
    """What was measured, and whether that is all of it; the file is written after each group of points."""
    commit, created = read_commit(), datetime.now(timezone.utc).isoformat(timespec="seconds")
    device = torch.device(machine.device_type)
    measured: list[Measured] = []
    compared: list[Comparison] = []
    for group in groups(chosen):
        say(f"[{len(measured) + 1} to {len(measured) + len(group)} of {len(chosen)}] {group[0].name} ...")
        try:
            comparison = compare_group(group, device, rounds)
        except RuntimeError as error:
            # What one schedule raises is recorded. After an illegal access nothing runs in this process.
            say(f"stopped: {type(error).__name__}: {str(error).strip()}")
            return measured, False
        compared.append(comparison)
        measured += [part(comparison, point) for point in group]
        if path is not None:
            write(path, measured, commit, created, machine, compared)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return measured, True


def compare_group(group: Sequence[Point], device: torch.device, rounds: int) -> Comparison:
    """Times of every point and schedule of a group, by `label`."""
    calls: dict[str, Contender] = {}
    for batch, members in itertools.groupby(group, lambda point: point.batch):
        key, value = (_drawn(batch, group[0].heads_key, group[0].keys, group[0].dim, device) for _ in range(2))
        for point in members:
            query = _drawn(batch, HEADS, point.queries, point.dim, device)
            calls |= {label(point, name): call for name, call in prepare(query, key, value).items()}
    found = compare(calls, rounds=rounds, warmup=WARMUP, device=device, minimum_sample_ms=SAMPLE_MS)
    timer = TIMINGS["graph"] if device.type == "cuda" else found.method.timer
    return replace(found, method=replace(found.method, timer=timer))


def _drawn(batch: int, heads: int, length: int, dim: int, device: torch.device) -> Tensor:
    return torch.randn(batch, heads, length, dim, device=device, dtype=torch.bfloat16)


def label(point: Point, schedule: str) -> str:
    """The name of a schedule's call at a point."""
    return f"{point.name} {schedule}"


def prepare(query: Tensor, key: Tensor, value: Tensor) -> dict[str, Contender]:
    """The call of each schedule. It has run once, and its result has been compared with the first one's.

    The call of a schedule that failed raises its error again, so that the timer records it.
    """
    calls: dict[str, Contender] = {}
    expected: tuple[str, Tensor] | None = None
    for name in SCHEDULES:
        attend = partial(cast(Any, onchip.attention), query, key, value, causal=True, schedule=name)
        call: Contender = inference(attend)
        try:
            result = cast(Tensor, call())
            if expected is None:
                expected = name, result
            # NaN is not less, so a result with one differs from itself.
            if not (found := difference(result, expected[1])) < TOLERANCE:
                raise WrongResult(f"differs from {expected[0]} by {found:.2g} of the result")
            calls[name] = replayed(call, query.device)
        except Exception as error:
            # What the frames of the failed call hold is memory that the others may need.
            traceback.clear_frames(error.__traceback__)
            calls[name] = partial(fail, error)
    return calls


def part(comparison: Comparison, point: Point) -> Measured:
    """Of the comparison of a group what belongs to one point, by the schedules' own names and without samples."""
    names = {label(point, name): name for name in SCHEDULES}
    found = {names[result.name]: result for result in comparison.results if result.name in names}
    ratio = None
    if len(found) == len(SCHEDULES):
        theirs, ours = (found[name].samples_ms for name in SCHEDULES)
        quotients = [our / their for our, their in zip(ours, theirs, strict=True)]
        ratio = Ratio.of(SCHEDULES[-1], SCHEDULES[0], quotients)
    return Measured(
        point=point,
        results=tuple(replace(result, name=name, samples_ms=()) for name, result in found.items()),
        ratio=ratio,
        failures=tuple(replace(fail, name=names[fail.name]) for fail in comparison.failures if fail.name in names),
    )


# The record


def write(
    path: Path,
    measured: Sequence[Measured],
    commit: Commit | None,
    created: str,
    machine: Machine,
    compared: Sequence[Comparison],
) -> None:
    """Write the record: what was timed where, when and how, and a line for each point."""
    first, last = compared[0], compared[-1]
    head = {
        "format": FORMAT,
        "created": created,
        "commit": asdict(commit) if commit else None,
        "where": asdict(machine),
        "what": {"direction": "forward", "dtype": "bfloat16", "heads_query": HEADS, "mask": "causal, bottom right",
                 "layout": CONTIGUOUS},
        "method": asdict(first.method),
        "gpu_before": asdict(first.gpu_before) if first.gpu_before else None,
        "gpu_after": asdict(last.gpu_after) if last.gpu_after else None,
    }  # fmt: skip
    lines = ",\n".join(json.dumps(asdict(entry), allow_nan=False) for entry in measured)
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(head, indent=1, allow_nan=False).removesuffix("\n}")
    path.write_text(f'{text},\n "points": [\n{lines}\n]\n}}\n', encoding="utf-8")


def read(path: Path) -> list[Measured]:
    """The points of a record."""
    return [
        Measured(
            point=Point(**entry["point"]),
            results=tuple(Result(**{**fields, "samples_ms": ()}) for fields in entry["results"]),
            ratio=Ratio(**entry["ratio"]) if entry["ratio"] else None,
            failures=tuple(Failure(**fields) for fields in entry["failures"]),
        )
        for entry in json.loads(path.read_text(encoding="utf-8"))["points"]
    ]


# The table


def taken(point: Point) -> str:
    """Which of the schedules the table of choices takes on a Hopper GPU."""
    shapes = ((HEADS, point.queries), (point.heads_key, point.keys), (point.heads_key, point.keys))
    inputs = (
        torch.empty(point.batch, heads, length, point.dim, device="meta", dtype=torch.bfloat16)
        for heads, length in shapes
    )
    problem = replace(onchip.plan(*inputs, causal=True).problem, device=torch.device("cuda"))
    return next(name for name in (*preferred(problem, False), *SCHEDULES) if name in SCHEDULES)


def mean_loss(losses: Sequence[float]) -> float:
    """The geometric mean; at least one."""
    return math.exp(sum(map(math.log, losses)) / len(losses))


def print_measured(console: Console, measured: Sequence[Measured]) -> None:
    """Print both times of each point, what the table takes and how much slower that is, and the sums of it."""
    first, last = SCHEDULES
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("point", no_wrap=True)
    for name in (f"{first} us", f"{last} us", f"{last}/{first}", "quartiles", "takes", "loses"):
        table.add_column(name, justify="left" if name == "takes" else "right", no_wrap=True)
    losses: dict[str, list[float]] = {"the table": [], **{f"{name} alone": [] for name in SCHEDULES}}
    for entry in measured:
        times = {result.name: f"{result.median_ms * 1e3:,.1f}" for result in entry.results}
        choice = taken(entry.point)
        row = [entry.point.name, *(times.get(name, "failed") for name in SCHEDULES)]
        if entry.ratio is None:
            table.add_row(*row, "", "", choice, "")
            continue
        losses["the table"].append(entry.loss(choice))
        for name in SCHEDULES:
            losses[f"{name} alone"].append(entry.loss(name))
        spread = f"{entry.ratio.lower_quartile:.2f} to {entry.ratio.upper_quartile:.2f}"
        lost = f"{entry.loss(choice):.2f}x" if entry.loss(choice) > 1 else ""
        table.add_row(*row, f"{entry.ratio.median:.2f}", spread, choice, lost)
    console.print(table)
    for name, found in losses.items():
        if found:
            slower = sum(loss > 1 for loss in found)
            console.print(
                f"{name}: {mean_loss(found):.3f} times the faster one's time in the geometric mean of {len(found)} "
                f"{'point' if len(found) == 1 else 'points'}, {max(found):.2f} at worst, slower at {slower}",
                markup=False,
                soft_wrap=True,
            )
    for entry in measured:
        for failure in entry.failures:
            console.print(f"{label(entry.point, failure.name)} failed: {failure.error}", markup=False, soft_wrap=True)


if __name__ == "__main__":
    app()
