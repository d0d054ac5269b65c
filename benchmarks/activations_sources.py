"""Queries, keys and values for `benchmarks/activations.py`: drawn ones, and those of two transformers.

Sinks and outlier channels are what models are known for: Xiao et al. 2024, "Efficient Streaming Language Models with
Attention Sinks" (arXiv 2309.17453, abstract), scores that are high for the first tokens whatever they mean; Liu et al.
2024, "KIVI" (arXiv 2402.02750, abstract), keys whose channels differ so that each is quantised for itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor
from training_cases import Case, Training, draw

from onchip.audit.gpt import ATTENTIONS, GPT, Shape
from onchip.audit.text import Text, draw_windows
from onchip.bench.demo.sentences import load_model

SEED = 0
CHANNELS = 4
"""Outlier channels."""
FACTORS = (10, 30)
"""How much larger than the others they are."""
NATS = (30, 60, 100)
"""How far a sink scores above the mean of the other keys, whose scores are about N(0, 1)."""
PLACES = ("first", "middle", "last")
"""The block of columns that holds a sink."""
LAST_BLOCK = 64
ELEMENT = 16.0
"""What every query has in the channel that makes the sink; a power of two, so that little is rounded."""
RATE, RISE, FALL = 4e-3, 0.1, 0.4
"""Of the training: the largest rate, and the shares of the steps over which it rises and falls, to a tenth."""
TOKENS = 1024
"""Of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One attention.

    Attributes:
        query, key, value: bfloat16 (batch, heads, length, dim).
        causal: a row sees the keys up to its own index; else all.
        seen_from: the first row that sees what the source is about: a sink's column, else 0.
    """

    name: str
    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool = True
    seen_from: int = 0


# Drawn


def drawn(length: int, dims: tuple[int, ...], device: torch.device) -> Iterator[Source]:
    """Normal inputs, outlier channels, and sinks, one head each. They are drawn on the CPU, the same everywhere."""
    generator = Generator().manual_seed(SEED)
    for dim in dims:
        yield normal(f"normal, d{dim}", length, dim, generator, device)
        for scaled in (("key",), ("query", "key")):
            for factor in FACTORS:
                plain = normal(f"{'+'.join(scaled)} x{factor}, d{dim}", length, dim, generator, device)
                yield with_outliers(plain, scaled, factor)
        for nats in NATS:
            for place in PLACES:
                plain = normal(f"sink {nats} {place}, d{dim}", length, dim, generator, device)
                yield with_sink(plain, nats, place)


def normal(name: str, length: int, dim: int, generator: Generator, device: torch.device) -> Source:
    """One head whose entries are all N(0, 1)."""
    query, key, value = (torch.randn(1, 1, length, dim, generator=generator).bfloat16().to(device) for _ in range(3))
    return Source(name=name, query=query, key=key, value=value)


def with_outliers(source: Source, scaled: tuple[str, ...], factor: float) -> Source:
    """The source with the first CHANNELS channels of the tensors named in `scaled` times a factor."""
    factors = torch.ones(source.query.shape[-1], dtype=source.query.dtype, device=source.query.device)
    factors[:CHANNELS] = factor
    tensors: dict[str, Any] = {which: getattr(source, which) * factors for which in scaled}
    return replace(source, **tensors)


def with_sink(source: Source, nats: float, place: str) -> Source:
    """The source with one key that scores `nats` with every query, beside which the scores of the others are as before.

    Its column is 0, the middle of the block in the middle, or the first of the last block, which only the rows of that
    block see. It takes a channel of its own, so the others lose one. There are at least 128 keys.
    """
    length, dim = source.key.shape[-2:]
    column = {"first": 0, "middle": (length + LAST_BLOCK) // 2, "last": length - LAST_BLOCK}[place]
    query, key = source.query.clone(), source.key.clone()
    query[..., 0] = ELEMENT
    key[..., 0] = 0
    key[..., column, :] = 0
    key[..., column, 0] = nats * math.sqrt(dim) / ELEMENT
    return replace(source, query=query, key=key, seen_from=column)


# A GPT trained here


def trained(shape: Shape, text: Text, steps: int, device: torch.device) -> tuple[GPT, list[float]]:
    """A GPT trained on the text's bytes for so many steps, and its losses in nats per byte."""
    case = Case(shape=shape, tokens=TOKENS, dtype="bfloat16" if device.type == "cuda" else "float32")
    training, generator = Training(case, device), Generator().manual_seed(SEED)
    losses = torch.empty(steps, device=device)
    for step in range(steps):
        losses[step] = training.step(ATTENTIONS["sdpa"], draw(case, text, generator, device), rate_at(step, steps))
    return training.model, losses.tolist()


def rate_at(step: int, steps: int) -> float:
    """The learning rate of a step from 0 on: a linear rise, a plateau, a linear fall."""
    return RATE * min(1.0, (step + 1) / (RISE * steps), max(0.1, (steps - step) / (FALL * steps)))


def of_gpt(model: GPT, text: Text, device: torch.device) -> Iterator[Source]:
    """What each layer of a GPT attends with on one window of the text, as long as its context."""
    found: list[tuple[Tensor, Tensor, Tensor]] = []

    def record(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found.append((query, key, value))
        return ATTENTIONS["sdpa"](query, key, value)

    blocks: Any = model.blocks
    for block in blocks:
        block.attention.attend = record
    window = draw_windows(text, 1, model.shape.context, Generator().manual_seed(SEED + 1)).to(device)
    with torch.no_grad():
        model(window)
    for layer, tensors in enumerate(found):
        yield _recorded(f"GPT, layer {layer}", tensors, causal=True)


# A sentence model


def of_sentence_model(text: Text, device: torch.device) -> Iterator[Source]:
    """What each layer of all-MiniLM-L6-v2 attends with on the first tokens of the text, as many as it takes.

    It is an encoder, so every row sees every key. The text is one sequence without padding, so there is no mask.

    Raises:
        ModelMissing: the model or transformers is not installed.
    """
    tokenizer, model = load_model()
    from transformers import AttentionInterface

    found: list[tuple[Tensor, Tensor, Tensor]] = []

    def record(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        found.append((query, key, value))
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2), None

    AttentionInterface.register("recorded", record)
    model.set_attn_implementation("recorded")
    words = bytes(text.data[: 16 * model.config.max_position_embeddings].tolist()).decode("ascii", "replace")
    length = model.config.max_position_embeddings
    tokens = tokenizer(words, truncation=True, max_length=length, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        model.to(device)(input_ids=tokens.to(device))
    for layer, tensors in enumerate(found):
        yield _recorded(f"MiniLM, layer {layer}", tensors, causal=False)


def _recorded(name: str, tensors: tuple[Tensor, Tensor, Tensor], *, causal: bool) -> Source:
    query, key, value = (tensor.detach().bfloat16().contiguous() for tensor in tensors)
    return Source(name=name, query=query, key=key, value=value, causal=causal)
