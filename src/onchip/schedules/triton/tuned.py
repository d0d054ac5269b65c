"""Tiles that `onchip tune` measured on a card of this machine: they win over the shipped table.

One JSON file for each card, in the user's cache folder. It says of which card, versions and kernels it is; a file of
others is ignored, for there nobody knows whether a tile launches, or is fast. It is read once in a process, by the
first call on a card. ONCHIP_TUNED=0 in the environment ignores it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

import torch

from onchip.gpu.call import architecture
from onchip.model.cache import cache_path, write_whole
from onchip.model.hardware import device_name
from onchip.schedules.triton.limits import is_tile, least_shared
from onchip.schedules.triton.tiles import INTERPRETED, KINDS, Tile, row_dim, row_of

FORMAT = 1
"""Of the stored file. A file of another format is ignored."""
SWITCH = "ONCHIP_TUNED"
WIDEST = 256
_KERNELS = ("schedules/triton/forward.py", "schedules/triton/backward.py", "gpu/parts.py", "gpu/source.py")
"""What decides what a tile costs, below the package's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What tiles were measured on.

    Attributes:
        device: the card's name.
        architecture: "sm_90", "gfx942" and the like.
        kernels: a digest of the kernels' source.
    """

    device: str
    architecture: str
    torch: str
    triton: str
    kernels: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What came out for one row.

    Attributes:
        kernel, kind: see tiles.Row. dim: the head dim of the problem. bits: of an element.
        tile: the fastest, which may be the shipped one.
        shipped: the tile that it was compared with.
        ms, shipped_ms: medians, in milliseconds of a call.
        ratio: its time over the shipped tile's, the median of interleaved rounds.
        tuned_on: the date, YYYY-MM-DD.
    """

    kernel: str
    dim: int
    bits: int
    kind: str
    tile: Tile
    shipped: Tile
    ms: float
    shipped_ms: float
    ratio: float
    tuned_on: str

    @property
    def row(self) -> tuple[str, int, int, str]:
        """What it is the entry of: kernel, bits, dim, kind."""
        return self.kernel, self.bits, self.dim, self.kind


@dataclass(frozen=True, slots=True)
class Stored:
    """What a file holds for a key: its entries, or the reason why there are none.

    `broken` tells a file that cannot be read from one that is absent or of another key.
    """

    entries: tuple[Entry, ...] = ()
    reason: str | None = None
    broken: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """A tile, and where it comes from, in words."""

    tile: Tile
    source: str


# The file


def tuned_path(device: torch.device) -> Path:
    """Where tiles of a card are kept, see `cache_path`."""
    return cache_path("tiles", device_name(device))


def key_of(device: torch.device) -> Key:
    """The key of a CUDA device now."""
    import triton

    return Key(
        device=device_name(device),
        architecture=architecture(device),
        torch=torch.__version__,
        triton=triton.__version__,
        kernels=_digest(),
    )


@lru_cache(maxsize=1)
def _digest() -> str:
    folder = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for name in _KERNELS:
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()[:16]


def shared_bytes(device: torch.device) -> int:
    """Bytes of shared memory that one program may take on a CUDA device."""
    from triton.runtime import driver

    index = torch.cuda.current_device() if device.index is None else device.index
    return int(driver.active.utils.get_device_properties(index)["max_shared_mem"])


def write(path: Path, key: Key, entries: Iterable[Entry]) -> None:
    """Store entries; the file appears whole or not at all.

    Raises:
        OSError: the folder cannot be written.
    """
    rows = [dataclasses.asdict(entry) for entry in sorted(entries, key=lambda entry: entry.row)]
    write_whole(path, json.dumps({"format": FORMAT, "key": dataclasses.asdict(key), "rows": rows}, indent=1) + "\n")


def read(path: Path, key: Key, shared: int) -> Stored:
    """What `write` stored for a key.

    Args:
        shared: bytes of shared memory that a program may take; a file with a tile that needs more is broken.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return Stored(reason="there is none")
    except (OSError, ValueError) as error:
        return Stored(reason=f"it cannot be read: {error}", broken=True)
    try:
        stored = json.loads(text)
        if stored["format"] != FORMAT:
            return Stored(reason="it is of another format")
        found = Key(**stored["key"])
        if found != key:
            return Stored(reason=_difference(found, key))
        entries = tuple(_entry(fields, shared) for fields in stored["rows"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return Stored(reason=f"it is broken: {type(error).__name__}: {error}", broken=True)
    return Stored(entries)


def _difference(found: Key, key: Key) -> str:
    pairs = ((name, getattr(found, name), getattr(key, name)) for name in Key.__slots__)
    return "it is of " + ", ".join(f"{name} {old}, here {new}" for name, old, new in pairs if old != new)


def _entry(fields: Mapping[str, Any], shared: int) -> Entry:
    """Raises ValueError, KeyError or TypeError for anything that is not the entry of a tile that may be launched."""
    tiles = {name: Tile(**fields[name]) for name in ("tile", "shipped")}
    entry = Entry(**{**fields, **tiles})
    if entry.kernel not in KINDS or entry.kind not in KINDS[entry.kernel]:
        raise ValueError(f"no kernel {entry.kernel!r} meets problems of kind {entry.kind!r}")
    if type(entry.dim) is not int or not 1 <= entry.dim <= WIDEST or entry.bits not in (16, 32):
        raise ValueError(f"no tile holds heads of {entry.dim!r} times {entry.bits!r} bits")
    if not all(is_tile(tile) for tile in tiles.values()):
        raise ValueError(f"no kernel can have {entry.tile} or {entry.shipped}")
    if least_shared(entry.tile, entry.kernel, entry.dim, entry.bits) > shared:
        raise ValueError(f"{entry.tile} takes more than {shared} bytes of shared memory")
    if not all(0 < float(number) < math.inf for number in (entry.ms, entry.shipped_ms, entry.ratio)):
        raise ValueError("times are positive and finite")
    if not isinstance(entry.tuned_on, str):
        raise TypeError("a date is text")
    return entry


# The choice

Table = Mapping[tuple[str, int, str], tuple[Entry, ...]]
"""Entries by kernel, bits and kind, by ascending head dim."""
_TABLES: dict[torch.device, Table] = {}


_changes = count()
_generation = next(_changes)


def generation() -> int:
    """Another number whenever `choose` may answer otherwise than before."""
    return _generation


def _ask_again() -> None:
    global _generation
    choose.cache_clear()
    _generation = next(_changes)


@lru_cache(maxsize=4096)
def choose(device: torch.device | None, target: str, kernel: str, dim: int, bits: int, kind: str) -> Choice:
    """The tile of a kernel.

    Args:
        device: the CUDA device that it will run on; what was tuned there is taken. None takes what is shipped.
        target: "sm_90", "gfx942" and the like, or "interpreter".
        dim: the larger head dim. bits: of an element. kind: see tiles.Row.
    """
    if target == "interpreter":
        return Choice(INTERPRETED, "of the interpreter")
    if device is not None and device.type == "cuda":
        entry = entry_for(_table(device), kernel, dim, bits, kind)
        if entry is not None:
            return Choice(entry.tile, f"tuned here on {entry.tuned_on}")
    return Choice(row_of(target, kernel, dim, bits, kind).tile, "shipped")


def _table(device: torch.device) -> Table:
    found = _TABLES.get(device)
    if found is None:
        found = _TABLES[device] = _load(device)
    return found


def _load(device: torch.device) -> Table:
    path = tuned_path(device)
    if os.environ.get(SWITCH) == "0" or not path.exists():
        return {}
    stored = read(path, key_of(device), shared_bytes(device))
    if stored.broken:
        warnings.warn(
            f"{path} is ignored, and shipped tiles are used: {stored.reason}. `onchip tune --reset` removes it.",
            stacklevel=2,
        )
    return table_of(stored.entries)


def table_of(entries: Iterable[Entry]) -> Table:
    """Entries as `choose` looks them up."""
    table: dict[tuple[str, int, str], tuple[Entry, ...]] = {}
    for entry in sorted(entries, key=lambda entry: entry.dim):
        place = entry.kernel, entry.bits, entry.kind
        table[place] = (*table.get(place, ()), entry)
    return table


def entry_for(table: Table, kernel: str, dim: int, bits: int, kind: str) -> Entry | None:
    """The entry of the smallest head dim that holds this one, of those that the same shipped row would hold."""
    fitting = (entry for entry in table.get((kernel, bits, kind), ()) if dim <= entry.dim)
    return next((entry for entry in fitting if row_dim(dim) == row_dim(entry.dim)), None)


def forget() -> None:
    """Read the files again at the next call."""
    _TABLES.clear()
    _ask_again()


@contextmanager
def substituted(device: torch.device, entries: Iterable[Entry]) -> Iterator[None]:
    """Inside, the process takes these tiles on a device, and beside them what is shipped."""
    before = _TABLES.get(device)
    _TABLES[device] = table_of(entries)
    _ask_again()
    try:
        yield
    finally:
        if before is None:
            del _TABLES[device]
        else:
            _TABLES[device] = before
        _ask_again()
