"""How train_gpt.py trains: the settings, one step, the validation loss, and a checkpoint from which a run goes on.

The model is `onchip.audit.gpt.GPT`. All that it needs of onchip is in `attention`: a function of query, key and value.
"""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import onchip
from onchip.audit.gpt import ATTENTIONS, GPT, Attend, AttentionName, Shape, next_byte_loss
from onchip.audit.text import Text, draw_windows

BETAS, WEIGHT_DECAY, LARGEST_NORM, LAST_RATE = (0.9, 0.95), 0.1, 1.0, 0.1
"""As GPT-3 was trained: Brown et al. 2020, Language Models are Few-Shot Learners, appendix B."""
VALIDATION_SHARE = 10
"""One byte in so many is kept from training: those at the end of the text."""
VALIDATION_BATCHES = 8
SHORT = 64
"""Tokens that show whether a schedule runs here."""
HOW = ("attention", "schedule", "device", "compile")
"""Settings that say how a training is computed and not which one it is: a resumed run may change them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One training. `dtype` is that of the products; weights, their gradients and sums are float32."""

    attention: AttentionName
    schedule: str | None
    shape: Shape
    batch: int
    steps: int
    warmup: int
    rate: float
    seed: int
    dtype: str
    device: str
    compile: bool

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.shape.context


def attention(settings: Settings) -> Attend:
    """The attention of the model: `onchip.attention` with its schedule, or one of those that it is compared with."""
    if settings.attention != "onchip":
        return ATTENTIONS[settings.attention]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        schedule: Any = settings.schedule
        return onchip.attention(query, key, value, causal=True, schedule=schedule)

    return attend


def check_attention(settings: Settings) -> None:
    """Run the attention once, forward and backward, on a short sequence in heads and dtype of the training.

    Raises:
        onchip.Unsupported: the schedule that was asked for cannot run it here.
        ValueError: there is no such schedule.
    """
    shape = settings.shape
    size = (1, shape.heads, min(shape.context, SHORT), shape.width // shape.heads)
    query = torch.zeros(size, dtype=getattr(torch, settings.dtype), device=settings.device, requires_grad=True)
    attention(settings)(query, query, query).sum().backward()


def split(text: Text, context: int) -> tuple[Text, Text]:
    """The bytes to train on, and the last tenth, to validate on.

    Raises:
        ValueError: a part is shorter than the `context + 1` bytes of a window.
    """
    held_out = text.data.numel() // VALIDATION_SHARE
    if held_out <= context:
        raise ValueError(
            f"{text.name} must have at least {VALIDATION_SHARE * (context + 1)} bytes for windows of {context + 1} in "
            f"its last tenth: got {text.data.numel()}"
        )
    cut = text.data.numel() - held_out
    return replace(text, data=text.data[:cut]), replace(text, data=text.data[cut:])


def rate_at(settings: Settings, step: int) -> float:
    """The learning rate of a step from 0 on: a linear warm-up, then half a cosine down to a tenth of the rate.

    Source: Loshchilov and Hutter 2017, SGDR, equation 5, without restarts.
    """
    if step < settings.warmup:
        return settings.rate * (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return settings.rate * (LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * done)))


class Trainer:
    """A training and its state.

    Attributes:
        steps_done: steps so far. validation: (steps done, loss) of each validation so far, in nats per byte.
        parameters: how many weights the model has.
    """

    def __init__(self, settings: Settings, text: Text) -> None:
        self.settings, self.text = settings, text
        self.steps_done = 0
        self.validation: list[tuple[int, float]] = []
        self._training_text, self._validation_text = split(text, settings.shape.context)
        self.model = GPT(settings.shape, attention(settings), seed=settings.seed).to(settings.device)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self._forward: Any = torch.compile(self.model) if settings.compile else self.model
        # A norm's weight and a bias have no size that should be small.
        matrices = [parameter for parameter in self.model.parameters() if parameter.dim() > 1]
        others = [parameter for parameter in self.model.parameters() if parameter.dim() <= 1]
        groups: list[dict[str, Any]] = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(
            groups, lr=settings.rate, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=settings.device != "cpu"
        )
        self._windows = torch.Generator().manual_seed(settings.seed)
        self._losses: list[float] = []
        self._unread: list[Tensor] = []

    @property
    def finished(self) -> bool:
        return self.steps_done >= self.settings.steps

    @property
    def losses(self) -> list[float]:
        """The loss of every step so far, in nats per byte. To read it waits for the device."""
        if self._unread:
            self._losses += torch.stack(self._unread).tolist()
            self._unread.clear()
        return self._losses

    def step(self) -> None:
        """One step. It does not wait for the device."""
        windows = self._draw(self._training_text, self._windows)
        for group in self._optimizer.param_groups:
            group["lr"] = rate_at(self.settings, self.steps_done)
        loss = self._loss(windows)
        self._optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_NORM)
        self._optimizer.step()
        self._unread.append(loss.detach())
        self.steps_done += 1

    def validate(self) -> float:
        """The mean loss of windows of the text's last tenth, the same ones every time; it is kept in `validation`."""
        windows = torch.Generator().manual_seed(self.settings.seed)
        with torch.no_grad():
            losses = [self._loss(self._draw(self._validation_text, windows)) for _ in range(VALIDATION_BATCHES)]
        loss = torch.stack(losses).mean().item()
        self.validation.append((self.steps_done, loss))
        return loss

    def save(self, path: Path) -> None:
        """Write all that the next step depends on. The file is replaced as a whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + ".unfinished")
        on_cuda = self.settings.device != "cpu"
        state = {
            "settings": asdict(self.settings),
            "text": self.text.sha256,
            "steps_done": self.steps_done,
            "losses": self.losses,
            "validation": self.validation,
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "windows": self._windows.get_state(),
            # This model draws nothing, but one with dropout would.
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state(self.settings.device) if on_cuda else None,
        }
        torch.save(state, unfinished)
        os.replace(unfinished, path)

    def load(self, path: Path) -> None:
        """Go on where the run that wrote `path` was. On a CPU the next losses are those of a run without a break.

        Raises:
            ValueError: the file is no checkpoint of this script, or that of another training; says what differs.
        """
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
            theirs, ours = state["settings"], asdict(self.settings)
        except Exception as error:
            raise ValueError(f"{path} is no checkpoint of train_gpt.py: {str(error).splitlines()[0]}") from None
        for name in (field.name for field in fields(Settings) if field.name not in HOW):
            if theirs[name] != ours[name]:
                raise ValueError(f"{path} is of another training: {name} was {theirs[name]} and is {ours[name]}")
        if state["text"] != self.text.sha256:
            raise ValueError(f"{path} is of another training: its text was not {self.text.name}")
        self.steps_done, self._losses = state["steps_done"], state["losses"]
        self.validation = [tuple(entry) for entry in state["validation"]]
        self.model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._windows.set_state(state["windows"])
        torch.set_rng_state(state["random"])
        if state["random_cuda"] is not None and self.settings.device != "cpu":
            torch.cuda.set_rng_state(state["random_cuda"], self.settings.device)

    def sample(self, prompt: bytes, count: int, temperature: float) -> bytes:
        """`count` bytes after the prompt, drawn one by one. Nothing is kept between them, so a byte costs a forward."""
        generator = torch.Generator(self.settings.device).manual_seed(self.settings.seed)
        tokens = torch.tensor([list(prompt)], device=self.settings.device)
        with torch.no_grad(), self._autocast():
            for _ in range(count):
                logits = self.model(tokens[:, -self.settings.shape.context :])[:, -1].float()
                # the padding of a larger vocabulary is no byte
                weights = (logits[:, :256] / temperature).softmax(-1)
                tokens = torch.cat([tokens, torch.multinomial(weights, 1, generator=generator)], dim=1)
        return bytes(tokens[0, len(prompt) :].tolist())

    def _draw(self, text: Text, generator: torch.Generator) -> Tensor:
        windows = draw_windows(text, self.settings.batch, self.settings.shape.context + 1, generator)
        return windows.to(self.settings.device, non_blocking=True)

    def _loss(self, windows: Tensor) -> Tensor:
        with self._autocast():
            return next_byte_loss(self._forward, windows)

    def _autocast(self) -> torch.autocast:
        enabled = self.settings.dtype != "float32"
        return torch.autocast(
            torch.device(self.settings.device).type, dtype=getattr(torch, self.settings.dtype), enabled=enabled
        )
