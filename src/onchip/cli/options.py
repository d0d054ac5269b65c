"""Options that several commands share, and how their texts are read."""

from __future__ import annotations

import enum

import torch
import typer


class Dtype(str, enum.Enum):
    """The dtypes of the contract."""

    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"
    float64 = "float64"


def read_numbers(text: str, option: str) -> list[int]:
    """The numbers in a list separated by commas, ascending, each once.

    Raises:
        BadParameter: the text is no such list of positive whole numbers.
    """
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"{option} takes positive whole numbers separated by commas: got {text!r}")
    return sorted(set(numbers))


def read_device(text: str) -> str:
    """The name of a device that is here.

    Raises:
        BadParameter: it names neither the CPU nor a CUDA device that torch finds.
    """
    try:
        device = torch.device(text)
    except RuntimeError:
        raise typer.BadParameter(f"--device takes cpu, cuda or cuda:<index>: got {text!r}") from None
    if device.type not in ("cpu", "cuda"):
        raise typer.BadParameter(f"--device takes cpu, cuda or cuda:<index>: got {text!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise typer.BadParameter(f"--device {text}: torch finds {torch.cuda.device_count()} CUDA devices here")
    return text


def goes_to_command(context: typer.Context) -> bool:
    """Whether a command of its own follows a command that can also run alone.

    Raises:
        BadParameter: options of the first were given as well, which nothing would read.
    """
    if context.invoked_subcommand is None:
        return False
    given = [name for name in context.params if str(context.get_parameter_source(name)).endswith("COMMANDLINE")]
    if given:
        raise typer.BadParameter(f"options of {context.invoked_subcommand} stand after its name: got {given[0]}")
    return True
