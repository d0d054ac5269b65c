"""What a model is trained on: the bytes of a text, with the hash that says which text it was."""

from __future__ import annotations

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Generator, Tensor

import onchip

EXCERPT = Path(onchip.__file__).parents[2] / "examples" / "data" / "shakespeare.txt.gz"
"""The repository's text. The package does not hold it; another text would give other figures, so none replaces it."""


@dataclass(frozen=True, slots=True)
class Text:
    """A text: the name of its file, the sha256 of its bytes, and the bytes as a uint8 tensor."""

    name: str
    sha256: str
    data: Tensor


def read_text(path: Path | None, least: int = 1) -> Text:
    """Read a file of bytes, unpacked if its name ends in .gz; the repository's excerpt for None.

    Raises:
        ValueError: there is no such file, it cannot be read or unpacked, or it holds fewer than `least` bytes.
    """
    if path is None and not EXCERPT.exists():
        raise ValueError(
            f"the default text is {EXCERPT.name} in examples/data of the repository, which is not part of an installed "
            "onchip: name a file of text of your own"
        )
    path = EXCERPT if path is None else path
    try:
        raw = path.read_bytes()
        raw = gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if len(raw) < least:
        raise ValueError(f"a window takes {least} bytes: {path} has {len(raw)}")
    return Text(path.name, hashlib.sha256(raw).hexdigest(), torch.frombuffer(bytearray(raw), dtype=torch.uint8))


def draw_windows(text: Text, batch: int, length: int, generator: Generator) -> Tensor:
    """Windows of the text, which is no shorter, at random places, int64 (batch, length), on the CPU."""
    starts = torch.randint(text.data.numel() - length + 1, (batch, 1), generator=generator)
    return text.data[starts + torch.arange(length)].long()
