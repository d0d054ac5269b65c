"""`onchip io`: its commands and their options."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer

from onchip.cli.options import Dtype, goes_to_command
from onchip.model.figure2 import CHIP_BYTES

if TYPE_CHECKING:
    from onchip.model.shape import Blocks, Shape

io_app = typer.Typer(invoke_without_command=True)


class Direction(str, enum.Enum):
    """Which passes are counted."""

    forward = "forward"
    backward = "backward"
    both = "both"


class Over(str, enum.Enum):
    """What a sweep changes."""

    memory = "memory"
    block = "block"
    length = "length"


Batch = Annotated[int, typer.Option(min=0, help="Sequences.")]
Heads = Annotated[int, typer.Option(min=0, help="Attention heads.")]
Length = Annotated[int, typer.Option(min=0, help="Tokens of the query.")]
KeyLength = Annotated[
    int | None, typer.Option(min=0, help="Tokens of key and value (default: as --length)", show_default=False)
]
Dim = Annotated[int, typer.Option(min=1, help="Size of a head in query and key.")]
DimValue = Annotated[
    int | None, typer.Option(min=1, help="Size of a head in value (default: as --dim)", show_default=False)
]
Elements = Annotated[Dtype, typer.Option("--dtype", help="Data type of the tensors.")]
ChipBytes = Annotated[int, typer.Option(min=1, help="On-chip memory of one head's program, in bytes.")]
BlockRows = Annotated[
    int | None, typer.Option(min=1, help="Query rows of a block (default: what fits on the chip)", show_default=False)
]
BlockColumns = Annotated[
    int | None, typer.Option(min=1, help="Key rows of a block (default: what fits on the chip)", show_default=False)
]
Passes = Annotated[Direction, typer.Option("--direction", help="The passes to count.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@io_app.callback()
def io(
    context: typer.Context,
    batch: Batch = 64,
    heads: Heads = 16,
    length: Length = 1024,
    key_length: KeyLength = None,
    dim: Dim = 64,
    dim_value: DimValue = None,
    dtype: Elements = Dtype.float16,
    chip_bytes: ChipBytes = CHIP_BYTES,
    block_rows: BlockRows = None,
    block_columns: BlockColumns = None,
    fraction: Annotated[
        float | None,
        typer.Option(min=0.0, max=1.0, help="Also a block-sparse flash1 that visits this fraction of its blocks."),
    ] = None,
    direction: Passes = Direction.both,
    json: Json = False,
) -> int:
    """Count what attention algorithms move between device memory and the chip, in closed form.

    The default is the shape of FlashAttention's Figure 2. `onchip io sweep` varies it, `onchip io simulate` runs the
    loop nests and checks the counts, `onchip io communication` counts what several devices send each other.
    """
    if goes_to_command(context):
        return 0
    from onchip.cli.io_tables import run_compare

    return run_compare(
        shape=_shape(batch, heads, length, key_length, dim, dim_value, dtype),
        chip_elements=_chip(chip_bytes, dtype),
        blocks=_blocks(block_rows, block_columns),
        fraction=fraction,
        direction=direction.value,
        as_json=json,
    )


@io_app.command()
def sweep(
    over: Annotated[Over | None, typer.Option(help="What to vary (default: each of them)", show_default=False)] = None,
    batch: Batch = 64,
    heads: Heads = 16,
    length: Length = 1024,
    key_length: KeyLength = None,
    dim: Dim = 64,
    dim_value: DimValue = None,
    dtype: Elements = Dtype.float16,
    chip_bytes: ChipBytes = CHIP_BYTES,
    direction: Passes = Direction.forward,
    output: Annotated[
        Path | None, typer.Option(help="Draw into this file, or one file for each sweep into this folder.")
    ] = None,
    json: Json = False,
) -> int:
    """Vary the chip's memory from d to N d elements, the block from 16 to N rows, or the length from 128 to 131072."""
    from onchip.cli.io_tables import run_sweeps

    shape = _shape(batch, heads, length, key_length, dim, dim_value, dtype)
    if min(shape.length_q, shape.length_k) < 1:
        raise typer.BadParameter("--length: a sweep needs at least one token")
    chosen = list(Over) if over is None else [over]
    if output is not None and output.suffix and len(chosen) > 1:
        raise typer.BadParameter(f"--output: {output} is one file; name a folder, or one sweep with --over")
    return run_sweeps(
        shape=shape,
        chip_elements=_chip(chip_bytes, dtype),
        direction=direction.value,
        over=[one.value for one in chosen],
        output=output,
        as_json=json,
    )


@io_app.command()
def simulate(
    algorithm: Annotated[
        str | None, typer.Option(help="Algorithms, separated by commas (default: all)", show_default=False)
    ] = None,
    batch: Batch = 64,
    heads: Heads = 16,
    length: Length = 1024,
    key_length: KeyLength = None,
    dim: Dim = 64,
    dim_value: DimValue = None,
    dtype: Elements = Dtype.float16,
    chip_bytes: ChipBytes = CHIP_BYTES,
    block_rows: BlockRows = None,
    block_columns: BlockColumns = None,
    values: Annotated[
        bool, typer.Option("--values", help="Compute one head in float64 and compare it with dense attention.")
    ] = False,
    json: Json = False,
) -> int:
    """Run the loop nests in a simulated memory and compare what they move with the closed forms.

    Exit status 1 if a count, or with --values a result, differs.
    """
    from onchip.cli.io_runs import run_simulations
    from onchip.model.io import ALGORITHMS

    names = list(ALGORITHMS) if algorithm is None else [name.strip() for name in algorithm.split(",")]
    if wrong := [name for name in names if name not in ALGORITHMS]:
        raise typer.BadParameter(f"--algorithm takes names among {', '.join(ALGORITHMS)}: got {wrong[0]!r}")
    return run_simulations(
        names=names,
        shape=_shape(batch, heads, length, key_length, dim, dim_value, dtype),
        chip_elements=_chip(chip_bytes, dtype),
        blocks=_blocks(block_rows, block_columns),
        with_values=values,
        as_json=json,
    )


@io_app.command()
def communication(
    devices: Annotated[int, typer.Option(min=1, help="Devices that share a sequence.")] = 8,
    batch: Batch = 1,
    heads: Heads = 32,
    kv_heads: Annotated[
        int | None, typer.Option(min=1, help="Heads of key and value (default: as --heads)", show_default=False)
    ] = None,
    length: Annotated[int, typer.Option(min=0, help="Tokens of the whole sequence.")] = 131072,
    dim: Dim = 128,
    dim_value: DimValue = None,
    dtype: Elements = Dtype.bfloat16,
    causal: Annotated[bool, typer.Option(help="Let a token see only itself and those before it.")] = True,
    json: Json = False,
) -> int:
    """Count what ring, zigzag ring and all-to-all (Ulysses) sharding send, and how evenly they divide the work."""
    from onchip.cli.io_runs import run_communication
    from onchip.model.communication import Sharding

    element, _ = _bytes(dtype)
    try:
        sharding = Sharding(
            devices=devices,
            batch=batch,
            heads=heads,
            kv_heads=heads if kv_heads is None else kv_heads,
            length=length,
            dim=dim,
            dim_v=dim if dim_value is None else dim_value,
            element_bytes=element,
            gradient_bytes=max(4, element),
            causal=causal,
        )
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return run_communication(sharding, as_json=json)


def _shape(
    batch: int, heads: int, length: int, key_length: int | None, dim: int, dim_value: int | None, dtype: Dtype
) -> Shape:
    from onchip.model.shape import Shape

    element, statistic = _bytes(dtype)
    return Shape(
        batch=batch,
        heads=heads,
        length_q=length,
        length_k=length if key_length is None else key_length,
        dim=dim,
        dim_v=dim if dim_value is None else dim_value,
        element_bytes=element,
        statistic_bytes=statistic,
    )


def _bytes(dtype: Dtype) -> tuple[int, int]:
    """Bytes of an element and of a statistic, which is float32 or float64."""
    size = getattr(torch, dtype.value).itemsize
    return size, max(4, size)


def _chip(chip_bytes: int, dtype: Dtype) -> int:
    elements = chip_bytes // _bytes(dtype)[0]
    if elements < 1:
        raise typer.BadParameter(f"--chip-bytes: {chip_bytes} bytes hold no element of {dtype.value}")
    return elements


def _blocks(rows: int | None, columns: int | None) -> Blocks | None:
    from onchip.model.shape import Blocks

    if rows is None and columns is None:
        return None
    if rows is None or columns is None:
        raise typer.BadParameter("--block-rows and --block-columns go together: got one of them")
    return Blocks(rows, columns)
