"""The record of a measurement: what was computed, where, how, and what came out. One JSON file per record.

Every number carries its unit in its name. The order of the keys is that of the fields below.
"""

from __future__ import annotations

import dataclasses
import json
import re
import statistics
import subprocess
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from onchip.bench.machine import GpuState, Machine

FORMAT = 1
DIRECTIONS = {"forward": (1, 1), "backward": (5, 2), "forward+backward": (7, 2)}
"""Operations of each direction as a multiple (numerator, denominator) of those of the forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What was computed. Use `Workload.attention` to have the operations counted.

    `visible_pairs` counts the (query, key) pairs that are computed, over the batch and the query heads.
    """

    batch: int
    heads_query: int
    heads_key: int
    length_query: int
    length_key: int
    dim_query_key: int
    dim_value: int
    dtype: str
    layout: str
    mask: str
    direction: str
    visible_pairs: int
    operations_flops: int

    @classmethod
    def attention(
        cls,
        *,
        batch: int,
        heads_query: int,
        length_query: int,
        dim_query_key: int,
        dtype: str,
        direction: str,
        heads_key: int | None = None,
        length_key: int | None = None,
        dim_value: int | None = None,
        layout: str = "dense (batch, heads, length, dim)",
        causal: bool = False,
        mask: str | None = None,
        visible_pairs: int | None = None,
    ) -> Workload:
        """Count the operations of attention by the convention of the field.

        A pair costs 2 * (dim_query_key + dim_value) operations in the forward; causal counts half of the pairs; the
        backward counts 2.5 times the forward. Heads, length and dim of the key default to those of the query. For any
        other mask, or packed sequences, give `mask` in words and `visible_pairs`.

        Raises:
            ValueError: the direction is unknown, or a mask is named and its visible pairs are not given.
        """
        if direction not in DIRECTIONS:
            raise ValueError(f"direction must be one of {', '.join(DIRECTIONS)}: got {direction!r}")
        if mask is not None and visible_pairs is None:
            raise ValueError(f"a mask needs the count of its visible pairs: got mask {mask!r} and visible_pairs None")
        length_key = length_query if length_key is None else length_key
        dim_value = dim_query_key if dim_value is None else dim_value
        if visible_pairs is None:
            visible_pairs = batch * heads_query * length_query * length_key // (2 if causal else 1)
        numerator, denominator = DIRECTIONS[direction]
        return cls(
            batch=batch,
            heads_query=heads_query,
            heads_key=heads_query if heads_key is None else heads_key,
            length_query=length_query,
            length_key=length_key,
            dim_query_key=dim_query_key,
            dim_value=dim_value,
            dtype=dtype.removeprefix("torch."),
            layout=layout,
            mask=mask or ("causal" if causal else "none"),
            direction=direction,
            visible_pairs=visible_pairs,
            operations_flops=2 * visible_pairs * (dim_query_key + dim_value) * numerator // denominator,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """How it was measured. `flush_bytes` is written between calls to empty the L2 cache; 0 means no flush."""

    rounds: int
    warmup_calls: int
    order: str
    timer: str
    minimum_sample_ms: float
    flush_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The time of one call of one contender, over the rounds. A sample is the mean of `calls_per_sample` calls."""

    name: str
    median_ms: float
    lower_quartile_ms: float
    upper_quartile_ms: float
    minimum_ms: float
    calls_per_sample: int
    samples_ms: tuple[float, ...]

    @classmethod
    def of(cls, name: str, samples_ms: Sequence[float], calls_per_sample: int) -> Result:
        """Summarise the samples of one contender; at least one."""
        lower, median, upper = quartiles(samples_ms)
        return cls(
            name=name,
            median_ms=median,
            lower_quartile_ms=lower,
            upper_quartile_ms=upper,
            minimum_ms=min(samples_ms),
            calls_per_sample=calls_per_sample,
            samples_ms=tuple(samples_ms),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Time of `name` over time of `reference`, each pair taken in the same round: above 1 is slower than it."""

    name: str
    reference: str
    median: float
    lower_quartile: float
    upper_quartile: float
    rounds: int

    @classmethod
    def of(cls, name: str, reference: str, ratios: Sequence[float]) -> Ratio:
        """Summarise the ratios of the rounds; at least one."""
        lower, median, upper = quartiles(ratios)
        return cls(
            name=name,
            reference=reference,
            median=median,
            lower_quartile=lower,
            upper_quartile=upper,
            rounds=len(ratios),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A contender that raised: its error in one line and its traceback as text; an exception would hold tensors."""

    name: str
    error: str
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What came out: one result or failure per contender, in the order given, and the ratios to the reference."""

    method: Method
    reference: str
    results: tuple[Result, ...]
    ratios: tuple[Ratio, ...]
    failures: tuple[Failure, ...]
    gpu_before: GpuState | None
    gpu_after: GpuState | None

    def result(self, name: str) -> Result:
        """The result of a contender.

        Raises:
            KeyError: it failed (the message carries its error) or was not compared.
        """
        for result in self.results:
            if result.name == name:
                return result
        for failure in self.failures:
            if failure.name == name:
                raise KeyError(f"{name} failed: {failure.error}")
        raise KeyError(f"{name} was not compared")

    def without_samples(self) -> Comparison:
        """The same without the single samples, for a shorter file."""
        results = tuple(dataclasses.replace(result, samples_ms=()) for result in self.results)
        return dataclasses.replace(self, results=results)


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The commit of the source that ran; `modified` if tracked files differed from it."""

    hash: str
    modified: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One measurement. Build it with `Record.of`."""

    format: int
    suite: str
    created: str
    commit: Commit | None
    what: Workload
    where: Machine
    comparison: Comparison

    @classmethod
    def of(cls, suite: str, what: Workload, where: Machine, comparison: Comparison) -> Record:
        """Join the parts and stamp them with the time (UTC) and the commit of this source, if it is in a repository."""
        created = datetime.now(timezone.utc).isoformat(timespec="seconds")
        return cls(
            format=FORMAT,
            suite=suite,
            created=created,
            commit=read_commit(),
            what=what,
            where=where,
            comparison=comparison,
        )

    def speed_tflops(self, name: str) -> float:
        """Counted operations over the median time of a contender, in 10^12 operations a second."""
        return self.what.operations_flops / self.comparison.result(name).median_ms / 1e9

    def to_json(self) -> str:
        """The record as JSON text; equal records give equal text."""
        return json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Record:
        """Read what `to_json` wrote.

        Raises:
            ValueError: a key is missing or unknown, a value has the wrong type, or the format is another one.
        """
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise ValueError(f"a record has format {FORMAT}: got {found!r}")
        return typing.cast(Record, _decode(cls, data, "record"))

    def file_name(self) -> str:
        """A name made of what was computed, so that measuring the same again replaces the file."""
        what = self.what
        lengths = _joined(what.length_query, "x", what.length_key)
        heads = _joined(what.heads_query, "of", what.heads_key)
        dims = _joined(what.dim_query_key, "x", what.dim_value)
        layout = what.layout.split()[0]
        parts = (self.suite, what.direction, f"b{what.batch}", f"h{heads}", f"n{lengths}", f"d{dims}")
        return "-".join(slug(part) for part in (*parts, what.dtype, layout, f"mask-{what.mask}")) + ".json"

    def write(self, directory: Path | str) -> Path:
        """Write the record into `directory`, made if it is not there, and return the path of the file."""
        path = Path(directory) / self.file_name()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json(), encoding="utf-8")
        return path


def default_directory(machine: Machine) -> Path:
    """Where this project keeps records of a device: benchmarks/results/<device>, relative to the repository."""
    return Path("benchmarks") / "results" / slug(machine.device_name)


def slug(text: str) -> str:
    """Lower-case words of letters and digits joined by "-", fit for a file name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile; all three are the value itself when there is only one."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, median, upper


def read_commit() -> Commit | None:
    """The commit of the repository that tracks this file; None for an installed package or without git."""
    here = Path(__file__).resolve()

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()

    try:
        # An environment inside some other repository must not borrow its commit.
        git("ls-files", "--error-unmatch", here.name)
        return Commit(hash=git("rev-parse", "HEAD"), modified=bool(git("status", "--porcelain", "-uno")))
    except (OSError, subprocess.SubprocessError):
        return None


def _joined(first: int, word: str, second: int) -> str:
    """Both numbers, or one if they are the same."""
    return f"{first}" if first == second else f"{first}{word}{second}"


def _decode(kind: Any, value: Any, path: str) -> Any:
    """`value`, read from JSON, as the annotated type `kind`; `path` names it in errors."""
    origin = typing.get_origin(kind)
    if origin in (types.UnionType, typing.Union):
        inner = [choice for choice in typing.get_args(kind) if choice is not types.NoneType]
        return None if value is None else _decode(inner[0], value, path)
    if origin is tuple and isinstance(value, list):
        inner_kind = typing.get_args(kind)[0]
        return tuple(_decode(inner_kind, item, f"{path}[{index}]") for index, item in enumerate(value))
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = typing.get_type_hints(kind)
        if set(value) != set(hints):
            missing, unknown = sorted(set(hints) - set(value)), sorted(set(value) - set(hints))
            raise ValueError(f"{path} must have exactly its fields: missing {missing}, unknown {unknown}")
        return typing.cast(type, kind)(**{key: _decode(hints[key], value[key], f"{path}.{key}") for key in hints})
    if kind is float and type(value) in (int, float):
        return float(value)
    if type(value) is kind:
        return value
    raise ValueError(f"{path} must be {getattr(kind, '__name__', kind)}: got {value!r}")
