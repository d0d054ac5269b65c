"""Forward and backward over growing lengths: time, peak memory and error of standard attention, SDPA and onchip."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from onchip.attention import attention
from onchip.bench.demo.reference import Gradients, reference_attention
from onchip.bench.machine import available_memory_bytes
from onchip.bench.protocol import Comparison
from onchip.bench.timing import compare, measure_peak_memory

PILOT_LENGTH = 512
REFERENCE_PAIRS = 4 * 4096**2
"""Beyond this many pairs the error is taken over the first heads only, so that float64 takes seconds, not minutes."""
ROUNDS_S = 4.0
MEMORY_SHARE = 0.8

Attention = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


def standard_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """Matrix product, softmax, matrix product: every score is written to memory."""
    scores = query * query.shape[-1] ** -0.5 @ key.transpose(-2, -1)
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
        scores = scores.masked_fill(future, -torch.inf)
    return scores.softmax(-1) @ value


def torch_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """`F.scaled_dot_product_attention`, whichever kernel it chooses."""
    return F.scaled_dot_product_attention(query, key, value, is_causal=causal)


def onchip_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """`onchip.attention`, whichever schedule it chooses."""
    return attention(query, key, value, causal=causal)


CONTENDERS: dict[str, Attention] = {
    "standard": standard_attention,
    "SDPA": torch_attention,
    "onchip": onchip_attention,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The shape of the demo's problems, (1, heads, length, dim), and where they run."""

    heads: int = 4
    dim: int = 64
    causal: bool = True
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    call_limit_s: float = 30.0

    def inputs(self, length: int) -> tuple[Tensor, ...]:
        """Query, key and value, which require gradients, and the gradient of the output; the same for every call."""
        generator = torch.Generator().manual_seed(length)
        query, key, value, d_out = (
            torch.randn(1, self.heads, length, self.dim, generator=generator).to(self.device, self.dtype)
            for _ in range(4)
        )
        return query.requires_grad_(), key.requires_grad_(), value.requires_grad_(), d_out

    def standard_bytes(self, length: int) -> int:
        """Memory that standard attention needs at its peak: weights, their gradient, that of the scores, the mask."""
        pairs = length * length
        return 3 * self.heads * pairs * self.dtype.itemsize + (pairs if self.causal else 0)

    def heads_checked(self, length: int) -> int:
        """How many heads the error is taken over."""
        return max(1, min(self.heads, REFERENCE_PAIRS // length**2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One contender at one length. `left_out` says in words why the figures are missing, if they are."""

    length: int
    contender: str
    time_ms: float | None = None
    rounds: int = 0
    peak_bytes: int | None = None
    out_error: float | None = None
    gradient_error: float | None = None
    heads_checked: int = 0
    left_out: str | None = None


def forward_backward(attend: Attention, causal: bool, *inputs: Tensor) -> Gradients:
    """The output and the gradients of query, key and value."""
    query, key, value, d_out = inputs
    out = attend(query, key, value, causal)
    return Gradients(out.detach(), *torch.autograd.grad(out, (query, key, value), d_out))


def steps(tokens: Sequence[int]) -> int:
    """How many times `run_lengths` reports a step."""
    return 1 + len(tokens) * (2 + 2 * len(CONTENDERS))


def run_lengths(setting: Setting, tokens: Sequence[int], step: Callable[[str], None]) -> Iterator[Row]:
    """Measure every contender at every length and yield the rows as they are done.

    A contender is left out, with the reason in its row, where its scores would not fit into available memory, where one
    call would take longer than `setting.call_limit_s`, and where it raises.

    Args:
        setting: the shape of the problems.
        tokens: the lengths, in tokens.
        step: called with a description before each piece of work, `steps(tokens)` times.
    """
    step(f"warming up at {PILOT_LENGTH} tokens")
    pilot = setting.inputs(PILOT_LENGTH)
    last_call: dict[str, _Call] = {}
    for name, attend in CONTENDERS.items():
        call = partial(forward_backward, attend, setting.causal, *pilot)
        call()
        last_call[name] = _Call(PILOT_LENGTH, _timed(call, setting.device)[1])
    for length in tokens:
        yield from _run_length(setting, length, last_call, step)


@dataclass(frozen=True, slots=True)
class _Call:
    length: int
    seconds: float


def _run_length(
    setting: Setting, length: int, last_call: dict[str, _Call], step: Callable[[str], None]
) -> Iterator[Row]:
    step(f"{length} tokens: float64 reference")
    inputs = setting.inputs(length)
    heads = setting.heads_checked(length)
    query, key, value, d_out = (tensor[:, :heads] for tensor in inputs)
    expected = reference_attention(query, key, value, d_out, causal=setting.causal)

    rows = {name: Row(length=length, contender=name) for name in CONTENDERS}
    calls = {name: partial(forward_backward, attend, setting.causal, *inputs) for name, attend in CONTENDERS.items()}
    for name in CONTENDERS:
        step(f"{length} tokens: {name}, error")
        left_out = _reason_to_leave_out(setting, length, name, last_call[name])
        if left_out is None:
            try:
                got, seconds = _timed(calls[name], setting.device)
            except (RuntimeError, NotImplementedError, MemoryError) as error:
                left_out = _first_line(error)
            else:
                last_call[name] = _Call(length, seconds)
                out_error, gradient_error = _errors(got, expected, heads)
                rows[name] = replace(
                    rows[name], out_error=out_error, gradient_error=gradient_error, heads_checked=heads
                )
                del got
        if left_out is not None:
            rows[name] = replace(rows[name], left_out=left_out)
            del calls[name]

    step(f"{length} tokens: timing {', '.join(calls)}")
    if calls:
        comparison = _time(calls, setting, sum(last_call[name].seconds for name in calls))
        for result in comparison.results:
            rows[result.name] = replace(rows[result.name], time_ms=result.median_ms, rounds=comparison.method.rounds)
        for failure in comparison.failures:
            rows[failure.name] = replace(rows[failure.name], left_out=failure.error)
    for name, row in rows.items():
        step(f"{length} tokens: {name}, memory")
        yield row if row.left_out is not None else replace(row, peak_bytes=_peak_bytes(setting, length, name))


def _time(calls: Mapping[str, Callable[[], object]], setting: Setting, round_s: float) -> Comparison:
    """Compare as many rounds as fit into ROUNDS_S, at least one and at most nine."""
    rounds = max(1, min(9, int(ROUNDS_S / round_s)))
    # The calls that gave the errors have warmed these up, and long calls need no repetition.
    minimum_sample_ms = 20.0 if rounds > 1 else 0.0
    return compare(calls, rounds=rounds, warmup=0, minimum_sample_ms=minimum_sample_ms, device=setting.device)


def _peak_bytes(setting: Setting, length: int, name: str) -> int:
    call = partial(forward_backward, CONTENDERS[name], setting.causal)
    setup = partial(_warm_inputs, setting, length, name)
    return measure_peak_memory(call, setup=setup, warmup=0, device=setting.device).peak_bytes


def _reason_to_leave_out(setting: Setting, length: int, name: str, last_call: _Call) -> str | None:
    if name == "standard":
        needed, available = setting.standard_bytes(length), available_memory_bytes(setting.device)
        if available is not None and needed > MEMORY_SHARE * available:
            return f"does not fit: needs {needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are available"
    predicted_s = last_call.seconds * (length / last_call.length) ** 2
    if predicted_s > setting.call_limit_s:
        return f"too slow: about {predicted_s:.0f} s a call, more than {setting.call_limit_s:.0f} s"
    return None


def _errors(got: Gradients, expected: Gradients, heads: int) -> tuple[float, float]:
    """Largest error over largest magnitude, for the output and for the worst of the three gradients."""
    errors = [
        ((mine[:, :heads].double() - true).abs().max() / true.abs().max()).item()
        for mine, true in zip(got, expected, strict=True)
    ]
    return errors[0], max(errors[1:])


def _warm_inputs(setting: Setting, length: int, name: str) -> tuple[Tensor, ...]:
    """The inputs, after a short call that leaves thread pools and libraries' buffers in place."""
    forward_backward(CONTENDERS[name], setting.causal, *setting.inputs(64))
    return setting.inputs(length)


def _timed(call: Callable[[], Gradients], device: str) -> tuple[Gradients, float]:
    """What the call returns, and its seconds."""
    start = time.perf_counter()
    got = call()
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    return got, time.perf_counter() - start


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip() or 'no message').splitlines()[0]}"
