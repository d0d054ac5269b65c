"""Training drift: one model trained several times from one seed on the same batches, with different attention.

After Golden et al. 2024, "Is Flash Attention Stable?" (arXiv 2405.02803): what a way to compute attention does to the
weights is set beside what low precision does to them. The runs go in step, so that no history of weights is kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from onchip.audit.gpt import GPT, AttentionName, Shape, next_byte_loss
from onchip.audit.text import Text, draw_windows


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How the models are trained.

    Attributes:
        batch: windows of shape.context + 1 bytes a step. rate: AdamW's learning rate; the rest is torch's default.
        every: steps between two measurements of the weights; the last step is measured in any case.
        dtype: float32 or bfloat16, that of every product. Weights and their sums stay in float32 (autocast).
    """

    shape: Shape
    batch: int
    steps: int
    every: int
    rate: float
    seed: int
    dtype: torch.dtype
    device: str


@dataclass(frozen=True, slots=True)
class Run:
    """One training."""

    name: str
    attention: AttentionName
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Pair:
    """Two trainings whose weights are compared, by their names, and what the second has for what of the first."""

    name: str
    first: str
    second: str
    shows: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """How far apart the two models of a pair are after a step.

    Attributes:
        pair: its name. loss_difference: of the step's losses, second less first, in nats.
        largest, largest_in: the largest absolute difference of two weights, and the tensor that holds them, "" if it
            is 0.
        wasserstein_largest, wasserstein_mean: Wasserstein-1 distance of the weights' distributions, over the tensors.
    """

    step: int
    pair: str
    loss_difference: float
    largest: float
    largest_in: str
    wasserstein_largest: float
    wasserstein_mean: float


@dataclass(frozen=True, slots=True)
class Trained:
    """The loss of every step of every run, in nats, and the drift of every pair."""

    losses: dict[str, list[float]]
    drifts: list[Drift]

    def last(self, pair: str) -> Drift:
        """A pair's drift after the last step."""
        return [drift for drift in self.drifts if drift.pair == pair][-1]


def runs(dtype: torch.dtype) -> tuple[Run, ...]:
    """The trainings: eager attention twice, onchip's and torch's in `dtype`, and eager in the other precision."""
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    return (
        Run("eager", "eager", dtype),
        Run("eager again", "eager", dtype),
        Run("onchip", "onchip", dtype),
        Run("SDPA", "sdpa", dtype),
        Run(f"eager {str(other).removeprefix('torch.')}", "eager", other),
    )


def pairs(dtype: torch.dtype) -> tuple[Pair, ...]:
    """What is compared: each way to attend with eager attention in `dtype`, and bfloat16 with float32."""
    other = runs(dtype)[-1].name
    same = (
        Pair("repeat", "eager", "eager again", "nothing but the time differs"),
        Pair("onchip", "eager", "onchip", "onchip's attention for eager attention"),
        Pair("SDPA", "eager", "SDPA", "torch's scaled_dot_product_attention for eager attention"),
    )
    if dtype == torch.float32:
        return *same, Pair("low precision", "eager", other, "bfloat16 for float32, with eager attention")
    return (
        *same,
        Pair("low precision", other, "eager", "bfloat16 for float32, with eager attention"),
        Pair("both", other, "onchip", "bfloat16 and onchip's attention for float32 and eager attention"),
    )


def train(training: Training, text: Text, step: Callable[[str], None]) -> Trained:
    """Train every run in step on the same batches, and measure how their weights part.

    Args:
        text: at least shape.context + 1 bytes.
        step: told what was done, `training.steps` times.
    """
    generator = torch.Generator().manual_seed(training.seed)
    all_runs, device = runs(training.dtype), training.device
    losses: dict[str, list[float]] = {run.name: [] for run in all_runs}
    drifts: list[Drift] = []
    with _deterministic():
        models = {
            run.name: GPT(training.shape, run.attention, seed=training.seed).to(training.device) for run in all_runs
        }
        optimizers = {name: torch.optim.AdamW(model.parameters(), lr=training.rate) for name, model in models.items()}
        for number in range(1, training.steps + 1):
            windows = draw_windows(text, training.batch, training.shape.context + 1, generator).to(device)
            for run in all_runs:
                loss = _advance(models[run.name], optimizers[run.name], windows, run.dtype)
                losses[run.name].append(loss)
            if number % training.every == 0 or number == training.steps:
                for pair in pairs(training.dtype):
                    drifts.append(_compare(number, pair, models, losses))
            step(f"step {number}, loss {losses['eager'][-1]:.3f}")
    return Trained(losses, drifts)


def wasserstein(left: Tensor, right: Tensor) -> float:
    """Wasserstein-1 distance between the distributions of two tensors' entries, of one number of entries.

    In one dimension the best plan keeps the order, so it is the mean distance of the sorted entries. Source: Peyre and
    Cuturi 2019, Computational Optimal Transport, section 2.6.

    Raises:
        ValueError: the numbers of entries differ, or are 0.
    """
    if left.numel() != right.numel() or not left.numel():
        raise ValueError(f"two tensors of as many entries are compared: got {left.numel()} and {right.numel()}")
    first, second = left.detach().flatten().sort().values, right.detach().flatten().sort().values
    return (first.double() - second.double()).abs().mean().item()


def _advance(model: GPT, optimizer: torch.optim.Optimizer, windows: Tensor, dtype: torch.dtype) -> float:
    optimizer.zero_grad()
    with torch.autocast(windows.device.type, dtype=dtype, enabled=dtype != torch.float32):
        loss = next_byte_loss(model, windows)
    loss.backward()
    optimizer.step()
    return loss.item()


def _compare(step: int, pair: Pair, models: dict[str, GPT], losses: dict[str, list[float]]) -> Drift:
    second = dict(models[pair.second].named_parameters())
    both = [(name, weights.detach(), second[name].detach()) for name, weights in models[pair.first].named_parameters()]
    largest, largest_in = max(((left - right).abs().max().item(), name) for name, left, right in both)
    distances = [wasserstein(left, right) for _, left, right in both]
    return Drift(
        step=step,
        pair=pair.name,
        loss_difference=losses[pair.second][-1] - losses[pair.first][-1],
        largest=largest,
        largest_in=largest_in if largest else "",
        wasserstein_largest=max(distances),
        wasserstein_mean=sum(distances) / len(distances),
    )


@contextmanager
def _deterministic() -> Iterator[None]:
    """Equal bits over repeats wherever torch has an algorithm that gives them, and a warning where not."""
    # cuBLAS reads it at its first call
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
