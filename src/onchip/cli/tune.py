"""`onchip tune`: measure tiles on the card at hand; show, print or remove what was measured."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console

from onchip.cli import INTERRUPTED
from onchip.cli.progress import stepping
from onchip.cli.tune_tables import cached_table, candidate_table, measured_table, summary

if TYPE_CHECKING:
    from onchip.bench.tune.candidates import Limits
    from onchip.bench.tune.cases import Case
    from onchip.bench.tune.search import Bench
    from onchip.bench.tune.session import Measured
    from onchip.schedules.triton.tuned import Key


@dataclass(frozen=True, slots=True)
class Target:
    """A card, and where its tiles are kept."""

    device: torch.device
    key: Key
    limits: Limits
    path: Path


def find_target(device: str) -> Target | str:
    """The card that a device names, or a sentence that says why there is none."""
    if torch.device(device).type != "cuda":
        return f"tune measures tiles of GPU kernels, and {_why_none(device)}"
    from onchip.bench.tune.card import limits_of
    from onchip.schedules.triton.tuned import key_of, tuned_path

    index = torch.device(device).index
    found = torch.device("cuda", torch.cuda.current_device() if index is None else index)
    torch.cuda.set_device(found)
    return Target(found, key_of(found), limits_of(found), tuned_path(found))


def _why_none(device: str) -> str:
    if torch.cuda.is_available():
        return f"--device {device} is no GPU"
    return "torch finds no CUDA device here"


def make_bench(target: Target) -> Bench:
    """What compiles and times on a card."""
    from onchip.bench.tune.card import Card

    return Card(target.device)


def run_reset(device: str) -> int:
    """Remove the file of a card."""
    target = find_target(device)
    if isinstance(target, str):
        return _fail(target)
    existed = target.path.exists()
    try:
        target.path.unlink(missing_ok=True)
    except OSError as error:
        return _fail(f"{target.path} cannot be removed: {error.strerror}")
    print(f"removed {target.path}" if existed else f"nothing to remove: {target.path} does not exist")
    return 0


def run_show(device: str, *, as_json: bool) -> int:
    """Print what is cached beside what is shipped; the exit status is 1 if nothing is."""
    target = find_target(device)
    if isinstance(target, str):
        return _fail(target)
    from onchip.schedules.triton.tuned import read

    stored = read(target.path, target.key, target.limits.shared)
    if as_json:
        rows = [dataclasses.asdict(entry) for entry in stored.entries]
        facts = {
            "path": str(target.path),
            "key": dataclasses.asdict(target.key),
            "ignored": stored.reason,
            "rows": rows,
        }
        print(json.dumps(facts, indent=1))
    elif stored.reason is None:
        console = Console()
        console.print(cached_table(stored.entries, target.key))
        console.print(f"from {target.path}", highlight=False, soft_wrap=True)
    if stored.reason is not None:
        return _fail(f"no tiles tuned here, in {target.path}: {stored.reason}")
    return 0


def run_print_table(device: str) -> int:
    """Print what is cached as rows of the shipped table; the exit status is 1 if nothing is."""
    target = find_target(device)
    if isinstance(target, str):
        return _fail(target)
    from onchip.bench.tune.table import rows_of, text_of
    from onchip.schedules.triton.tuned import read

    stored = read(target.path, target.key, target.limits.shared)
    if stored.reason is not None:
        return _fail(f"no tiles tuned here, in {target.path}: {stored.reason}")
    for row in rows_of(stored.entries, target.key):
        print("    " + text_of(row))
    return 0


def run_dry(device: str, todo: Sequence[Case], *, as_json: bool) -> int:
    """Print the candidates of each case, and how many were left out."""
    target = find_target(device)
    if isinstance(target, str):
        return _fail(target)
    from onchip.bench.tune.candidates import candidates
    from onchip.schedules.triton.tiles import tile_of

    rows = []
    for case in todo:
        shipped = tile_of(target.key.architecture, case.kernel, case.dim, case.bits, case.kind)
        rows.append((case, shipped, candidates(case, shipped, target.limits)))
    if as_json:
        facts = [
            {**_facts(case), "shipped": dataclasses.asdict(shipped), **dataclasses.asdict(found)}
            for case, shipped, found in rows
        ]
        print(json.dumps({"key": dataclasses.asdict(target.key), "rows": facts}, indent=1))
        return 0
    console = Console()
    console.print(candidate_table(rows))
    count = sum(len(found.tiles) for _, _, found in rows)
    console.print(f"{count} candidates for {len(rows)} rows; nothing was measured", highlight=False)
    return 0


def run_tune(device: str, todo: Sequence[Case], *, budget: float, as_json: bool) -> int:
    """Measure, store after each case, and print; the exit status is 1 if that was not possible."""
    target = find_target(device)
    if isinstance(target, str):
        return _fail(target)
    from onchip.bench.tune.session import tune
    from onchip.schedules.triton.tuned import forget

    console = Console(stderr=as_json)
    measured: list[Measured] = []
    status, failure = 0, None
    try:
        with stepping(console, len(todo)) as step:
            for each in tune(
                make_bench(target), todo,
                key=target.key, limits=target.limits, path=target.path, budget=budget, step=step,
            ):  # fmt: skip
                measured.append(each)
    except KeyboardInterrupt:
        status = INTERRUPTED
    except OSError as error:
        failure = f"{target.path} cannot be written: {error.strerror}"
    except RuntimeError as error:
        failure = f"measuring stopped after {len(measured)} of {len(todo)} rows: {str(error).splitlines()[0]}"
    finally:
        forget()
    if as_json:
        facts = [
            {**_facts(each.case), "found": each.found and dataclasses.asdict(each.found), "not_run": each.reason}
            for each in measured
        ]
        key = dataclasses.asdict(target.key)
        print(json.dumps({"path": str(target.path), "key": key, "asked": len(todo), "rows": facts}, indent=1))
    elif measured:
        console.print(measured_table(measured, target.key.device))
        console.print(summary(measured, len(todo)), highlight=False)
        if status == 0 and failure is None and len(measured) < len(todo):
            console.print("The time was over before the rest; tune again, and they come first.", highlight=False)
        console.print(f"Calls use these tiles from now on: {target.path}", highlight=False, soft_wrap=True)
    if failure is not None:
        return _fail(failure)
    return status


def _facts(case: Case) -> dict[str, Any]:
    dtype = str(case.dtype).removeprefix("torch.")
    return {"kernel": case.kernel, "dim": case.dim, "dtype": dtype, "kind": case.kind}


def _fail(message: str) -> int:
    print(f"onchip: {message}", file=sys.stderr)
    return 1
