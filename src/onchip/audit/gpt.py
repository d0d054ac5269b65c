"""A GPT on bytes, small enough to read, whose attention is a parameter.

Pre-norm blocks of attention and a perceptron with learned positions, as GPT-2 has them (Radford et al. 2019, section
2.3), without dropout and without biases of queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onchip
from onchip.audit.contenders import eager_scores

VOCABULARY = 256
AttentionName = Literal["onchip", "eager", "sdpa"]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Causal attention of query, key and value, each (batch, heads, length, dim)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a GPT. `width` is that of a token, a multiple of `heads`; `context` the most tokens that it sees.

    `vocabulary` is at least the 256 bytes; a larger one costs what the vocabulary of a model on words costs.
    """

    layers: int
    heads: int
    width: int
    context: int
    vocabulary: int = VOCABULARY

    def __post_init__(self) -> None:
        """Raises ValueError if the heads do not divide the width, or if the vocabulary does not hold every byte."""
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads: got width {self.width} and {self.heads} heads")
        if self.vocabulary < VOCABULARY:
            raise ValueError(f"vocabulary must be at least {VOCABULARY}: got {self.vocabulary}")


def onchip_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal `onchip.attention`, whichever schedule it chooses."""
    return onchip.attention(query, key, value, causal=True)


def eager_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal matrix product, softmax, matrix product, each rounded to the dtype of the query."""
    return eager_scores(query, key, query.shape[-1] ** -0.5, causal=True).softmax(-1) @ value


def sdpa_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal `F.scaled_dot_product_attention`, whichever kernel it chooses."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


ATTENTIONS: dict[AttentionName, Attend] = {
    "onchip": onchip_attention,
    "eager": eager_attention,
    "sdpa": sdpa_attention,
}


class Attention(nn.Module):
    """Causal self-attention of (batch, length, width)."""

    def __init__(self, shape: Shape, attend: Attend) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attend = attend
        # a bias of the keys moves all scores of a row alike, so its gradient is 0 but for rounding, which Adam enlarges
        self.inputs = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.output = nn.Linear(shape.width, shape.width)

    def forward(self, tokens: Tensor) -> Tensor:
        query, key, value = self.inputs(tokens).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        # autocast would compute an eager softmax in float32, which is not what is asked for
        with torch.autocast(tokens.device.type, enabled=False):
            out = self.attend(query, key, value)  # (batch, heads, length, dim)
        return self.output(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a perceptron, each added to what it reads."""

    def __init__(self, shape: Shape, attend: Attend) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width)
        self.attention = Attention(shape, attend)
        self.perceptron_norm = nn.LayerNorm(shape.width)
        self.perceptron = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width), nn.GELU(), nn.Linear(4 * shape.width, shape.width)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.attention(self.attention_norm(tokens))
        return tokens + self.perceptron(self.perceptron_norm(tokens))


class GPT(nn.Module):
    """Logits of the next byte after each byte.

    Args:
        shape: its sizes.
        attention: how it attends, by name or as a function. It does not change the weights that a seed gives.
        seed: of the weights, which are N(0, 0.02^2), those that write into the residual stream smaller by the root of
            their number, and biases 0. torch's own generators are left as they are.
    """

    def __init__(self, shape: Shape, attention: AttentionName | Attend = "onchip", *, seed: int = 0) -> None:
        super().__init__()
        self.shape = shape
        attend = ATTENTIONS[attention] if isinstance(attention, str) else attention
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.bytes = nn.Embedding(shape.vocabulary, shape.width)
            self.positions = nn.Embedding(shape.context, shape.width)
            self.blocks = nn.ModuleList(Block(shape, attend) for _ in range(shape.layers))
            self.norm = nn.LayerNorm(shape.width)
            self.logits = nn.Linear(shape.width, shape.vocabulary, bias=False)
            for name, parameter in self.named_parameters():
                if name.endswith("bias"):
                    nn.init.zeros_(parameter)
                elif parameter.dim() == 2:
                    writes = name.endswith(("attention.output.weight", "perceptron.2.weight"))
                    nn.init.normal_(parameter, std=0.02 * ((2 * shape.layers) ** -0.5 if writes else 1.0))

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) of bytes as int64, length at most the context, to (batch, length, vocabulary)."""
        hidden = self.bytes(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return self.logits(self.norm(hidden))


def next_byte_loss(model: GPT, windows: Tensor) -> Tensor:
    """Mean cross-entropy, in nats, of each byte but the first of (batch, length + 1), after those before it."""
    logits = model(windows[:, :-1]).float()
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
