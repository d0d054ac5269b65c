"""What `benchmarks/training.py` measures: a GPT the size of GPT-2's smallest, its training step, and its attention."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import clip_grad_norm_

import onchip
from onchip.audit.gpt import ATTENTIONS, GPT, Attend, Shape, next_byte_loss
from onchip.audit.text import Text, draw_windows

OURS = "onchip"
SEED = 0
RATE = 3e-4
BETAS, LARGEST_NORM, RISE = (0.9, 0.95), 1.0, 0.2
"""A recipe that is stable: GPT-3's moments and clipping (Brown et al. 2020, appendix B), and the share of the steps
over which the rate rises. Without them the losses jump, and by how much tells nothing of an attention."""
VOCABULARY = 50304
"""GPT-2's 50257 tokens, padded to a multiple of 128. The text is bytes, but a step then costs what GPT-2's costs: with
256 logits a token, attention would have a larger share of it than in a model that anybody trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A training whose step has `tokens` tokens, in windows of shape.context. Weights are float32, products `dtype`."""

    shape: Shape
    tokens: int
    dtype: str

    @property
    def batch(self) -> int:
        return max(1, self.tokens // self.shape.context)

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.shape.context


# Contenders


def sdpa_flash(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """PyTorch's own FlashAttention kernel."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def sdpa_cudnn(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """cuDNN's kernel, through PyTorch. There is none on a CPU."""
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


OTHERS: dict[str, Attend] = {
    "sdpa_flash": sdpa_flash,
    "sdpa_cudnn": sdpa_cudnn,
    "eager": ATTENTIONS["eager"],
}


def contenders(schedules: Sequence[str] = (), without: Sequence[str] = ()) -> dict[str, Attend]:
    """Causal attention by name: onchip's own choice, the schedules asked for, and what it is compared with.

    All of them can be sent to another process, where memory is measured on a CPU.
    """
    ours: dict[str, Attend] = {
        name: partial(onchip.attention, causal=True, schedule=schedule)  # type: ignore[arg-type]
        for name, schedule in ((OURS, None), *((f"{OURS} {name}", name) for name in schedules))
    }
    return ours | {name: attend for name, attend in OTHERS.items() if name not in without}


# The step


class Training:
    """A model and its optimiser, whose attention is given step by step: what a step costs depends on nothing else."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        self.model = GPT(case.shape, seed=SEED).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, betas=BETAS, fused=device.type == "cuda")

    def step(self, attend: Attend, windows: Tensor, rate: float = RATE) -> Tensor:
        """Forward, backward and AdamW on (batch, context + 1) bytes; the loss, which is not waited for."""
        blocks: Any = self.model.blocks
        for block in blocks:
            block.attention.attend = attend
        dtype = getattr(torch, self.case.dtype)
        with torch.autocast(self.device.type, dtype=dtype, enabled=dtype != torch.float32):
            loss = next_byte_loss(self.model, windows)
        self.optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(self.model.parameters(), LARGEST_NORM)
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        return loss.detach()


def draw(case: Case, text: Text, generator: torch.Generator, device: torch.device) -> Tensor:
    """Windows for one step, int64 (batch, context + 1)."""
    return draw_windows(text, case.batch, case.shape.context + 1, generator).to(device, non_blocking=True)


def losses(case: Case, attend: Attend, text: Text, steps: int, device: torch.device) -> list[float]:
    """The loss of each of so many steps, in nats per byte: the same weights and windows for every attention."""
    training, generator = Training(case, device), torch.Generator().manual_seed(SEED)
    rates = [RATE * min(1.0, (step + 1) / (RISE * steps)) for step in range(steps)]
    found = [training.step(attend, draw(case, text, generator, device), rate) for rate in rates]
    return torch.stack(found).tolist()


# Attention's share of a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Milliseconds of one step, and of attention in it: the forwards and backwards of all layers."""

    step_ms: float
    attention_ms: float


def attention_share(training: Training, attend: Attend, windows: Tensor) -> Share:
    """Time a step with marks before and after the forward and the backward of every attention.

    The marks are CUDA events in the stream of the work (on a CPU, readings of a clock), so a span holds all that runs
    from the attention's inputs to its output, and from the gradient of its output to those of its inputs; if the
    device waits for a launch in between, the wait too.
    """
    marks: list[Any] = []
    mark = partial(_mark, marks, training.device)

    def marked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = _MarkBackward.apply(mark, query, key, value)
        mark()
        out = attend(query, key, value)
        mark()
        return _MarkBackward.apply(mark, out)[0]

    mark()
    training.step(marked, windows)
    mark()
    if training.device.type == "cuda":
        torch.cuda.synchronize(training.device)
    first, *inner, last = marks
    spans = zip(inner[::2], inner[1::2], strict=True)
    return Share(step_ms=_span_ms(first, last), attention_ms=sum(_span_ms(start, end) for start, end in spans))


class _MarkBackward(torch.autograd.Function):
    """The tensors as they are; calls `mark` when the backward has all of their gradients."""

    @staticmethod
    def forward(ctx: Any, mark: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.mark = mark
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.mark()
        return None, *gradients


def _mark(marks: list[Any], device: torch.device) -> None:
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        marks.append(event)
    else:
        marks.append(time.perf_counter())


def _span_ms(start: Any, end: Any) -> float:
    return (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end)
