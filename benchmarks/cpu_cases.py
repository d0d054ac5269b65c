"""What `benchmarks/cpu.py` measures: the cases with their goals, and the grid of schedules.

Nothing is computed here. A case or a point says what to compare, and makes its tensors when it is asked for its calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from common import backward, inference
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import onchip
from onchip.bench.demo.sentences import SENTENCES, load_model
from onchip.bench.protocol import Workload
from onchip.bench.timing import Contender
from onchip.dispatch import ScheduleName, schedules

HEADS = 8
DIRECTIONS = ("forward", "forward+backward")
WINDOW = 256
GRID_PAIRS = 2**26
"""The grid's largest problem: with more scores a point takes minutes and shows nothing new."""
DENSE_PAIRS = 2**26
"""Beyond this many scores dense is left out of the grid: its matrices would not fit into a small machine's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What is computed, and onchip's and PyTorch's call that computes it."""

    what: Workload
    ours: Contender
    theirs: Contender


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One comparison with PyTorch.

    Attributes:
        goal, floor: the number to reach and the one not to fall short of. The number is PyTorch's time over onchip's,
            more is better; or, if `difference`, onchip's time minus PyTorch's in microseconds, less is better.
        prepare: makes the tensors and the calls.
        group: cases of one group also have their median compared with the goal.
    """

    name: str
    direction: str
    goal: float
    floor: float
    prepare: Callable[[], Prepared]
    group: str | None = None
    difference: bool = False


def cases(quick: bool = False) -> list[Case]:
    """Every case; `quick` divides the lengths by 8."""
    found = [
        *_grid("float32", DIRECTIONS, torch.float32, None, 1.0, 0.95, quick),
        *_grid("tiled", DIRECTIONS, torch.float32, "tiled", 0.85, 0.75, quick),
        *_grid("bfloat16", DIRECTIONS[1:], torch.bfloat16, None, 3.0, 2.0, quick),
        # shorter, for PyTorch takes seconds
        *_grid("float16", DIRECTIONS[1:], torch.float16, None, 3.0, 2.0, quick, lengths=(2048,)),
    ]

    def add(name: str, direction: str, goal: float, floor: float, prepare: Callable[[], Prepared]) -> None:
        found.append(Case(name=name, direction=direction, goal=goal, floor=floor, prepare=prepare))

    for direction, goal, floor in zip(DIRECTIONS, (8.0, 4.0), (6.0, 3.5), strict=True):
        add("window", direction, goal, floor, partial(_window, direction, _shorter(8192, quick)))
    lengths = torch.linspace(_shorter(128, quick), _shorter(2048, quick), 16).round().int().tolist()
    for direction in DIRECTIONS:
        add("ragged", direction, 2.2, 1.9, partial(_ragged, direction, lengths))
    add("bias", "forward+backward", 1.2, 1.0, partial(_bias, _shorter(2048, quick)))
    add("dropout", "forward+backward", 1.3, 1.0, partial(_dropout, _shorter(2048, quick)))
    add("minilm", "forward", 1.0, 0.97, partial(_minilm, _shorter(100, quick)))
    found += [
        Case(
            name="eager",
            direction=direction,
            goal=goal,
            floor=floor,
            prepare=partial(_plain, direction, 16, 16, heads=1),
            difference=True,
        )
        for direction, goal, floor in zip(DIRECTIONS, (40.0, 70.0), (60.0, 100.0), strict=True)
    ]
    return found


KINDS = ("plain", "causal", "window", "padding", "packed", "scores", "dropout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A problem that every schedule is timed on. Its "backward" is the backward alone.

    `kind` is one of KINDS: the mask, layout or score beside plain attention. A window is a quarter of the length,
    padding a bool tensor that hides a third of the keys, packed the same lengths without padding, scores ALiBi.
    """

    direction: str
    dtype: str
    batch: int
    heads: int
    length: int
    dim: int
    kind: str

    def __str__(self) -> str:
        return f"{self.direction} {self.dtype} b{self.batch} h{self.heads} n{self.length} d{self.dim} {self.kind}"

    def contenders(self) -> dict[str, Contender]:
        """A call for every schedule that runs the problem, by its name. Each has run once."""
        dtype, alone = getattr(torch, self.dtype), self.direction == "backward"
        lengths = torch.linspace(self.length / 3, self.length, self.batch).round().int()
        packed = self.kind == "packed"
        shape: tuple[int, ...] = (self.batch, self.heads, self.length, self.dim)
        if packed:
            shape = (int(lengths.sum()), self.heads, self.dim)
        query, key, value, gradient = _random(shape, dtype, alone)
        options: dict[str, Any] = {
            "causal": {"causal": True},
            "window": {"causal": True, "window": (self.length // 4, 0)},
            "padding": {"mask": (torch.arange(self.length) < lengths[:, None])[:, None, None, :]},
            "scores": {"score": onchip.scores.alibi(torch.linspace(0.1, 1.0, self.heads))},
            "dropout": {"dropout_p": 0.1, "dropout_seed": 1},
        }.get(self.kind, {})
        inputs = [query, key, value, *([F.pad(lengths.cumsum(0), (1, 0)).int()] if packed else [])]
        function = onchip.attention_varlen if packed else onchip.attention
        calls: dict[str, Contender] = {}
        for name in schedules():
            if (
                name == "dense"
                and query.numel() // self.dim * (query.shape[0] if packed else self.length) > DENSE_PAIRS
            ):
                continue
            attend: Callable[[], Tensor] = partial(cast(Any, function), *inputs, schedule=name, **options)
            try:
                call = backward(attend, (query, key, value), gradient) if alone else inference(attend)
                call()
            except onchip.Unsupported:
                continue
            calls[name] = call
        return calls


def points(quick: bool = False) -> list[Point]:
    """The grid that the dispatcher's choice is derived from; `quick` divides the lengths by 8."""
    lengths = dict.fromkeys(_shorter(length, quick) for length in (16, 128, 512, 2048))
    grid = itertools.product(("forward", "backward"), ("float32", "bfloat16"), ((1, 1), (1, 8), (8, 8)), lengths, KINDS)
    return [
        Point(direction=direction, dtype=dtype, batch=batch, heads=heads, length=length, dim=64, kind=kind)
        for direction, dtype, (batch, heads), length, kind in grid
        if batch * heads * length**2 <= GRID_PAIRS and (batch > 1 or kind not in ("padding", "packed"))
    ]


def sentences(count: int, longest: int) -> list[str]:
    """`count` texts of 1 to `longest` words, cut from the demo's sentences joined into one text that repeats."""
    words = " ".join(SENTENCES).split()
    texts = []
    for number in range(count):
        length = 1 + round((longest - 1) * number / (count - 1))
        # Steps of 7 words start every text at another place.
        texts.append(" ".join(words[(7 * number + place) % len(words)] for place in range(length)))
    return texts


# Preparation


def _grid(
    group: str,
    directions: Sequence[str],
    dtype: torch.dtype,
    schedule: ScheduleName | None,
    goal: float,
    floor: float,
    quick: bool,
    lengths: Sequence[int] = (2048, 4096),
) -> list[Case]:
    lengths = [_shorter(length, quick) for length in lengths]
    return [
        Case(
            name=f"{group} n{length} d{dim} {'causal' if causal else 'full'}",
            direction=direction,
            goal=goal,
            floor=floor,
            prepare=partial(_plain, direction, length, dim, causal=causal, dtype=dtype, schedule=schedule),
            group=group,
        )
        for length, dim, causal, direction in itertools.product(lengths, (64, 128), (False, True), directions)
    ]


def _plain(
    direction: str,
    length: int,
    dim: int,
    *,
    heads: int = HEADS,
    causal: bool = False,
    dtype: torch.dtype = torch.float32,
    schedule: ScheduleName | None = None,
) -> Prepared:
    query, key, value, gradient = _random((1, heads, length, dim), dtype, direction != "forward")
    inputs = (query, key, value)
    ours = partial(onchip.attention, query, key, value, causal=causal, schedule=schedule)
    theirs = partial(F.scaled_dot_product_attention, query, key, value, is_causal=causal)
    return Prepared(
        what=_what(direction, length, dim, heads_query=heads, causal=causal, dtype=str(dtype)),
        ours=_call(direction, ours, inputs, gradient),
        theirs=_call(direction, theirs, inputs, gradient),
    )


def _window(direction: str, length: int) -> Prepared:
    query, key, value, gradient = _random((1, HEADS, length, 64), torch.float32, direction != "forward")
    inputs = (query, key, value)
    keep = torch.ones(length, length, dtype=torch.bool).tril().triu(-WINDOW)
    ours = partial(onchip.attention, query, key, value, causal=True, window=(WINDOW, 0))
    theirs = partial(F.scaled_dot_product_attention, query, key, value, attn_mask=keep)
    pairs = HEADS * int(keep.sum())
    return Prepared(
        what=_what(direction, length, 64, mask=f"causal window ({WINDOW}, 0)", visible_pairs=pairs),
        ours=_call(direction, ours, inputs, gradient),
        theirs=_call(direction, theirs, inputs, gradient),
    )


def _ragged(direction: str, lengths: list[int]) -> Prepared:
    longest, sizes = max(lengths), torch.tensor(lengths)
    query, key, value, gradient = _random((sum(lengths), HEADS, 64), torch.float32, False)
    exists = torch.arange(longest) < sizes[:, None]
    keep = exists[:, None, None, :] & torch.ones(longest, longest, dtype=torch.bool).tril()
    offsets = F.pad(sizes.cumsum(0), (1, 0)).int()

    def pad(tensor: Tensor) -> Tensor:
        batch = torch.zeros(len(lengths), longest, HEADS, 64)
        batch[exists] = tensor
        return batch.transpose(1, 2).contiguous()

    padded_query, padded_key, padded_value = pad(query), pad(key), pad(value)
    inputs, padded = (query, key, value), (padded_query, padded_key, padded_value)
    for tensor in (*inputs, *padded):
        tensor.requires_grad_(direction != "forward")
    ours = partial(onchip.attention_varlen, query, key, value, offsets, causal=True)
    theirs = partial(F.scaled_dot_product_attention, padded_query, padded_key, padded_value, attn_mask=keep)
    what = _what(
        direction,
        longest,
        64,
        batch=len(lengths),
        layout=f"packed (tokens, heads, dim), {len(lengths)} sequences of {min(lengths)} to {longest}",
        mask="causal",
        visible_pairs=HEADS * sum(length**2 for length in lengths) // 2,
    )
    return Prepared(
        what=what,
        ours=_call(direction, ours, inputs, gradient),
        theirs=_call(direction, theirs, padded, pad(gradient)),
    )


def _bias(length: int) -> Prepared:
    query, key, value, gradient = _random((1, HEADS, length, 64), torch.float32, True)
    bias = torch.randn(1, HEADS, length, length, generator=torch.Generator().manual_seed(1)).requires_grad_()
    leaves = [query, key, value, bias]

    def ours() -> Tensor:
        return onchip.attention(query, key, value, score=onchip.scores.bias(bias))

    theirs = partial(_math, query, key, value, attn_mask=bias)
    return Prepared(
        what=_what("forward+backward", length, 64),
        ours=_call("forward+backward", ours, leaves, gradient),
        theirs=_call("forward+backward", theirs, leaves, gradient),
    )


def _dropout(length: int) -> Prepared:
    query, key, value, gradient = _random((1, HEADS, length, 64), torch.float32, True)
    inputs = (query, key, value)
    ours = partial(onchip.attention, query, key, value, dropout_p=0.1)
    theirs = partial(_math, query, key, value, dropout_p=0.1)
    return Prepared(
        what=_what("forward+backward", length, 64),
        ours=_call("forward+backward", ours, inputs, gradient),
        theirs=_call("forward+backward", theirs, inputs, gradient),
    )


def _minilm(longest: int) -> Prepared:
    """The whole model on 64 sentences; only the operations of its attention are counted."""
    tokenizer, model = load_model()
    batch = tokenizer(sentences(64, longest), padding=True, return_tensors="pt")
    count, length = batch["input_ids"].shape
    config = model.config
    pairs = config.num_hidden_layers * config.num_attention_heads * length * int(batch["attention_mask"].sum())

    def ours() -> object:
        with torch.no_grad(), onchip.replace_sdpa():
            return model(**batch)

    def theirs() -> object:
        with torch.no_grad():
            return model(**batch)

    what = _what(
        "forward",
        length,
        config.hidden_size // config.num_attention_heads,
        batch=count,
        heads_query=config.num_attention_heads,
        layout=f"model all-MiniLM-L6-v2, {config.num_hidden_layers} layers",
        mask="padding",
        visible_pairs=pairs,
    )
    return Prepared(what=what, ours=ours, theirs=theirs)


def _math(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0) -> Tensor:
    """Torch's attention with every score in memory; on a CPU only it takes dropout, or a bias that needs a gradient."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, dropout_p=dropout_p)


def _call(direction: str, attend: Callable[[], Tensor], leaves: Sequence[Tensor], gradient: Tensor) -> Contender:
    return inference(attend) if direction == "forward" else partial(_step, attend, leaves, gradient)


def _step(attend: Callable[[], Tensor], leaves: Sequence[Tensor], gradient: Tensor) -> None:
    for leaf in leaves:
        leaf.grad = None
    attend().backward(gradient)


def _random(shape: tuple[int, ...], dtype: torch.dtype, requires_grad: bool) -> list[Tensor]:
    """Query, key, value and the gradient of the output; the same for every call."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for _ in range(4)]
    for tensor in tensors[:3]:
        tensor.requires_grad_(requires_grad)
    return tensors


def _what(direction: str, length: int, dim: int, **options: Any) -> Workload:
    defaults: dict[str, Any] = {"batch": 1, "heads_query": HEADS, "dtype": "float32"}
    return Workload.attention(direction=direction, length_query=length, dim_query_key=dim, **(defaults | options))


def _shorter(length: int, quick: bool) -> int:
    """An eighth where it is quick, but no shorter than the eager call."""
    return max(16, length // 8) if quick else length
