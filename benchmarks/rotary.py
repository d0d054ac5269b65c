"""Time rotary embeddings beside those of transformers: `python benchmarks/rotary.py`.

All contenders of a case are timed in interleaved rounds of one process. One JSON file holds every case, from which
`--show` prints the table again. Speeds are bytes that must move at least (each number of query and key read and written
once, in the backward as well) over the time. Transformers' time leaves out its tables of cosines and sines, which a
model makes once for all layers; "onchip" computes its own, "onchip tables" reads theirs.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from common import application, inference, make_console, say
from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding, apply_rotary_pos_emb

import onchip
from onchip.bench.machine import read_machine
from onchip.bench.protocol import default_directory, read_commit
from onchip.bench.timing import Contender, compare

RECORD = "rotary.json"
RECORDS = Path("benchmarks/results/nvidia-h200")
"""Whose record `--show` prints on a machine without a GPU."""
ROUNDS = 12
WIDTH = 98
DIRECTIONS = ("forward", "forward+backward")
TOLERANCE = 0.05
"""The largest difference from the first contender, over the largest result, that counts as rounding in bfloat16."""

Rotate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
app = application()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Queries and keys in bfloat16, (batch, length, heads, dim) seen as (batch, heads, length, dim)."""

    direction: str
    batch: int
    heads_query: int
    heads_key: int
    length: int
    dim: int

    @property
    def name(self) -> str:
        return f"{self.direction} b{self.batch} h{self.heads_query}/{self.heads_key} n{self.length} d{self.dim}"

    @property
    def compulsory_bytes(self) -> int:
        """Bytes of query and key, read and written, as often as the direction says."""
        numbers = self.batch * (self.heads_query + self.heads_key) * self.length * self.dim
        return 2 * numbers * torch.bfloat16.itemsize * (1 if self.direction == "forward" else 2)


@app.command()
def rotary(
    lengths: Annotated[str, typer.Option(help="Lengths, separated by commas.")] = "4096,8192",
    dims: Annotated[str, typer.Option(help="Head dims, separated by commas.")] = "128,64",
    batch: Annotated[int, typer.Option(min=1)] = 2,
    heads: Annotated[str, typer.Option(help="Heads of query and key, as 32/8.")] = "32/8",
    device: Annotated[str, typer.Option(help="cuda or cpu (default: cuda where it is).")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each.")] = ROUNDS,
    show: Annotated[bool, typer.Option("--show", help="Print what was recorded; time nothing.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder (default: benchmarks/results/<device>)")] = None,
) -> None:
    """Time rotary embeddings beside transformers' apply_rotary_pos_emb, eager and compiled."""
    here = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if show:
        folder = out or (default_directory(read_machine("cuda")) if here == "cuda" else RECORDS)
        if not (folder / RECORD).exists():
            raise typer.BadParameter(f"no {RECORD} in {folder}")
        _print(json.loads((folder / RECORD).read_text(encoding="utf-8")))
        return
    machine = read_machine(here)
    heads_query, heads_key = map(int, heads.split("/"))
    cases = [
        Case(direction=direction, batch=batch, heads_query=heads_query, heads_key=heads_key, length=length, dim=dim)
        for dim, length, direction in itertools.product(_numbers(dims), _numbers(lengths), DIRECTIONS)
    ]
    entries = []
    for number, case in enumerate(cases, start=1):
        say(f"[{number}/{len(cases)}] {case.name}")
        comparison = compare(
            _contenders(case, torch.device(here)), rounds=rounds, device=here, flush_l2=here == "cuda"
        ).without_samples()
        entries.append({**asdict(case), "compulsory_bytes": case.compulsory_bytes, "comparison": asdict(comparison)})
    commit = read_commit()
    record = {"commit": asdict(commit) if commit else None, "where": asdict(machine), "cases": entries}
    path = (out or default_directory(machine)) / RECORD
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    _print(json.loads(path.read_text(encoding="utf-8")))
    if any(failure["name"].startswith("onchip") for entry in entries for failure in entry["comparison"]["failures"]):
        raise typer.Exit(1)


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


# Contenders


def _contenders(case: Case, device: torch.device) -> dict[str, Contender]:
    """The calls of a case; each has shown the results of the first."""
    config = LlamaConfig(num_attention_heads=1, hidden_size=case.dim, head_dim=case.dim)
    embedding = LlamaRotaryEmbedding(config).to(device)
    query, key, *gradients = (
        torch.randn(case.batch, case.length, heads, case.dim, device=device, dtype=torch.bfloat16).transpose(1, 2)
        for heads in (case.heads_query, case.heads_key) * 2
    )
    cos, sin = embedding(query, torch.arange(case.length, device=device)[None])
    tables = cos[0, :, : case.dim // 2].contiguous(), sin[0, :, : case.dim // 2].contiguous()
    # every case compiles anew, and after eight versions of a function the compiler would leave the next one uncompiled
    torch.compiler.reset()
    theirs = torch.compile(apply_rotary_pos_emb, dynamic=False, fullgraph=True)
    rotations: dict[str, Rotate] = {
        "onchip": cast(Rotate, partial(cast(Any, onchip.rotary), frequencies=embedding.inv_freq)),
        "onchip tables": cast(Rotate, partial(cast(Any, onchip.rotary), tables=tables)),
        "transformers": partial(apply_rotary_pos_emb, cos=cos, sin=sin),
        "transformers compiled": partial(theirs, cos=cos, sin=sin),
    }
    backward = case.direction != "forward"
    leaves = [part.requires_grad_(backward) for part in (query, key)]
    calls: dict[str, Contender] = {}
    expected: tuple[Tensor, ...] | None = None
    for name, rotate in rotations.items():
        step = partial(_step, rotate, leaves, gradients)
        results = step() if backward else rotate(query, key)
        expected = expected or results
        for got, want in zip(results, expected, strict=True):
            difference = (got - want).abs().max() / want.abs().max()
            if not difference <= TOLERANCE:
                raise RuntimeError(f"{name} differs from the first contender by {difference:.2g}")
        calls[name] = step if backward else inference(cast(Any, partial(rotate, query, key)))
    return calls


def _step(rotate: Rotate, leaves: list[Tensor], gradients: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(rotate(*leaves), leaves, gradients)


# The table


def _print(record: dict[str, Any]) -> None:
    """A row for every case: each contender's speed, and its time over onchip's."""
    console = make_console(WIDTH)
    names = list(dict.fromkeys(entry["name"] for case in record["cases"] for entry in case["comparison"]["results"]))
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("GB/s", no_wrap=True)
    for name in names:
        table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    for case in record["cases"]:
        fields = {name: case[name] for name in Case.__dataclass_fields__}
        table.add_row(Case(**fields).name, *(_cell(case, name) for name in names))
    console.print(table)
    where = record["where"]
    console.print(
        f"{where['device_name']}, torch {where['torch_version']}; 2.00x: onchip takes half the time", markup=False
    )
    for failure in (failure for case in record["cases"] for failure in case["comparison"]["failures"]):
        console.print(f"{failure['name']} failed: {failure['error']}", markup=False)


def _cell(case: dict[str, Any], name: str) -> str:
    comparison = case["comparison"]
    time = next((entry["median_ms"] for entry in comparison["results"] if entry["name"] == name), None)
    if time is None:
        return "failed"
    ratio = next((entry["median"] for entry in comparison["ratios"] if entry["name"] == name), None)
    text = f"{case['compulsory_bytes'] / time / 1e6:.0f}"
    return text if ratio is None else f"{text} {ratio:.2f}x"


if __name__ == "__main__":
    app()
