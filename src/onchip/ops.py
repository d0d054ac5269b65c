"""The operators `onchip::attention` and `onchip::attention_backward`: schema, fake kernels, autograd, vmap.

A call travels as (query, key, value, tensors, spec, ints, floats) (lowering.py). Inside, the problem is lifted, its
values are checked where they can be read, and a schedule runs. Registration is by hand rather than by
`torch.library.custom_op`, which costs twice as much per call and breaks `torch.func`.

    attention            Autograd key -> _Attention          -> attention_backward
    attention_backward   Autograd key -> _AttentionBackward  -> the total derivative of dense
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from onchip import dispatch
from onchip.functions import UNTRACED
from onchip.problem import Problem
from onchip.schedules import dense
from onchip.strides import empty_ordered

_CHECKED: ContextVar[bool] = ContextVar("onchip_checked", default=False)

# asked once: in torch 2.11 the question is a graph break
_AUTOCAST_TYPES = frozenset(
    kind for kind in ("cpu", "cuda", "xpu", "mps", "mtia") if torch.amp.is_autocast_available(kind)
)

_LIBRARY = torch.library.Library("onchip", "DEF")
_LIBRARY.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor[] tensors, str spec, SymInt[] ints, float[] floats)"
    " -> (Tensor out, Tensor lse)"
)
_LIBRARY.define(
    "attention_backward(Tensor? grad_out, Tensor? grad_lse, Tensor query, Tensor key, Tensor value, Tensor out,"
    " Tensor lse, Tensor[] tensors, str spec, SymInt[] ints, float[] floats, bool[] needs) -> Tensor[]"
)

_attention = torch.ops.onchip.attention.default
_attention_backward = torch.ops.onchip.attention_backward.default


@contextmanager
def checked() -> Iterator[None]:
    """Inside, values that stand on a GPU (cu_seqlens, lengths) are validated as they are on a CPU.

    Each call then waits for the device. Without it kernels never read out of bounds, but a wrong length gives a wrong
    result instead of an error.
    """
    token = _CHECKED.set(True)
    try:
        yield
    finally:
        _CHECKED.reset(token)


def check_values(problem: Problem) -> None:
    """Validate lengths and offsets where they can be read for free, or on request."""
    if reads_values(problem.device):
        problem.check_values()


def reads_values(device: torch.device) -> bool:
    """Whether values on the device are validated: where they can be read for free, or on request."""
    return device.type == "cpu" or _CHECKED.get()


def autocasts(device: torch.device) -> bool:
    """Whether torch.autocast is on for the device."""
    return device.type in _AUTOCAST_TYPES and torch.is_autocast_enabled(device.type)


def narrows(device: torch.device) -> bool:
    """`autocasts` for code that no compiler traces: one question while autocast is off everywhere."""
    return torch._C._is_any_autocast_enabled() and autocasts(device)


def _full_precision(device: torch.device) -> AbstractContextManager[None]:
    """The public functions have cast the inputs; autocast must not narrow the products inside as well."""
    if autocasts(device):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


# Kernels


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tensors: Sequence[Tensor],
    spec: str,
    ints: Sequence[int],
    floats: Sequence[float],
) -> tuple[Tensor, Tensor]:
    problem = Problem.lift(query, key, value, tensors, spec, ints, floats)
    check_values(problem)
    return _compute(dispatch.Ready(problem), query, key, value, saves=True)


def _compute(ready: dispatch.Ready, query: Tensor, key: Tensor, value: Tensor, *, saves: bool) -> tuple[Tensor, Tensor]:
    if narrows(query.device):
        with torch.autocast(query.device.type, enabled=False):
            return _compute(ready, query, key, value, saves=saves)
    done: tuple[Tensor, Tensor, Tensor] | None = None
    for schedule in ready.forward:
        assert schedule.forward is not None, "a composite schedule does not run inside an operator"
        found = schedule.forward(ready.problem, query, key, value, saves=saves)
        if done is None and len(found) == 2:
            return found
        out, lse, *lost = found
        if done is not None:
            rows = done[2].mT if ready.problem.layout == "packed" else done[2]
            out, lse = torch.where(rows[..., None], out, done[0]), torch.where(done[2], lse, done[1])
            lost = [done[2] & part for part in lost]
        if not lost or not lost[0].any():
            return out, lse
        done = (out, lse, lost[0])
    raise dispatch.exhausted(ready.problem)


def _backward(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    tensors: Sequence[Tensor],
    spec: str,
    ints: Sequence[int],
    floats: Sequence[float],
    needs: Sequence[bool],
) -> list[Tensor]:
    problem = Problem.lift(query, key, value, tensors, spec, ints, floats)
    ready = dispatch.Ready(problem)
    gradients = _differentiate(ready, grad_out, grad_lse, query, key, value, out, lse, tensors, needs)
    return [gradient for gradient in gradients if gradient is not None]


def _differentiate(
    ready: dispatch.Ready,
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    tensors: Sequence[Tensor],
    needs: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of query, key, value and of each of `tensors`, None where not needed."""
    if narrows(query.device):
        with torch.autocast(query.device.type, enabled=False):
            return _differentiate(ready, grad_out, grad_lse, query, key, value, out, lse, tensors, needs)
    for schedule in ready.backward:
        assert schedule.backward is not None, "a composite schedule does not run inside an operator"
        gradients = schedule.backward(ready.problem, grad_out, grad_lse, query, key, value, out, lse, tensors, needs)
        if gradients is not None:
            return gradients + [None] * (len(needs) - len(gradients))
    raise dispatch.exhausted(ready.problem)


def _forward_fake(
    query: Tensor, key: Tensor, value: Tensor, tensors: Any, spec: str, ints: Any, floats: Any
) -> tuple[Tensor, Tensor]:
    packed = spec.startswith("('packed'")
    out = empty_ordered((*query.shape[:-1], value.shape[-1]), query, query.dtype)
    lse_shape = (query.shape[1], query.shape[0]) if packed else query.shape[:-1]
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    return out, query.new_empty(lse_shape, dtype=dtype)


def _backward_fake(
    grad_out: Any,
    grad_lse: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Any,
    lse: Any,
    tensors: Sequence[Tensor],
    spec: Any,
    ints: Any,
    floats: Any,
    needs: Sequence[bool],
) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor, need in zip((query, key, value, *tensors), needs, strict=True) if need]


# Autograd


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, rest: tuple[Any, ...], *tensors: Tensor) -> Any:
        with torch._C._AutoDispatchBelowADInplaceOrView():
            out, lse = _attention(query, key, value, list(tensors), *rest)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, out, lse, *tensors)
        ctx.rest = rest
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        query, key, value, out, lse, *tensors = ctx.saved_tensors
        needs = [*ctx.needs_input_grad[:3], *ctx.needs_input_grad[4:]]
        if (grad_out is None and grad_lse is None) or not any(needs):
            return (None,) * (4 + len(tensors))
        found = iter(_attention_backward(grad_out, grad_lse, query, key, value, out, lse, tensors, *ctx.rest, needs))
        gradients = [next(found) if need else None for need in needs]
        return (*gradients[:3], None, *gradients[3:])


class _Direct(torch.autograd.Function):
    """`_Attention` without the dispatcher. `rest` is None for a problem that holds no tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ready: dispatch.Ready,
        rest: Any,
        *tensors: Tensor,
    ) -> Any:
        if rest is None and ready.launch is not None:
            out, lse = ready.launch(ready.problem, query, key, value, saves=True)
        else:
            with torch._C._AutoDispatchBelowADInplaceOrView():
                out, lse = _compute(ready, query, key, value, saves=True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(query, key, value, out, lse, *tensors)
        ctx.ready, ctx.rest = ready if rest is None else None, rest
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        query, key, value, out, lse, *tensors = ctx.saved_tensors
        every = ctx.needs_input_grad
        needs = [*every[:3], *every[5:]]
        if (grad_out is None and grad_lse is None) or not any(needs):
            return (None,) * (5 + len(tensors))
        gradients: Sequence[Tensor | None]
        if torch.is_grad_enabled() or is_observed(query, key, value):
            rest = ctx.ready.problem.lower()[1:] if ctx.rest is None else ctx.rest
            found = iter(_attention_backward(grad_out, grad_lse, query, key, value, out, lse, tensors, *rest, needs))
            gradients = [next(found) if need else None for need in needs]
        elif ctx.rest is None and ctx.ready.launch_backward is not None:
            ready = ctx.ready
            gradients = ready.launch_backward(
                ready.problem, grad_out, grad_lse, query, key, value, out, lse, tensors, needs
            )
        else:
            ready = ctx.ready or dispatch.Ready(Problem.lift(query, key, value, tensors, *ctx.rest))
            with torch._C._AutoDispatchBelowADInplaceOrView():
                gradients = _differentiate(ready, grad_out, grad_lse, query, key, value, out, lse, tensors, needs)
        return (*gradients[:3], None, None, *gradients[3:])


# What Function.apply comes to where no transform of torch.func is active, which `is_observed` has found out; it asks
# again, in Python. It unwraps, too, what a transform has left behind.
_apply_directly: Any = super(torch.autograd.Function, _Direct).apply
_alive = torch._C._functorch.unwrap_if_dead


class _AttentionBackward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        grad_out: Tensor | None,
        grad_lse: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        rest: tuple[Any, ...],
        needs: list[bool],
        *tensors: Tensor,
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(grad_out, grad_lse, query, key, value, *tensors)
        ctx.rest, ctx.needs = rest, needs
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return tuple(
                _attention_backward(grad_out, grad_lse, query, key, value, out, lse, list(tensors), *rest, needs)
            )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        grad_out, grad_lse, *inputs = ctx.saved_tensors
        found = _second_derivative(grad_out, grad_lse, inputs, ctx.rest, ctx.needs, gradients)
        return (*found[:5], None, None, None, None, *found[5:])


def _second_derivative(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    inputs: Sequence[Tensor],
    rest: tuple[Any, ...],
    needs: Sequence[bool],
    gradients: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Derivatives of sum(gradient * input's gradient) by (grad_out, grad_lse, *inputs): the total derivative of dense.

    Out and LSE are functions of the inputs, so nothing is due to them as saved tensors.
    """
    again = torch.is_grad_enabled()

    def variable(tensor: Tensor) -> Tensor:
        # a third derivative goes on through this graph; otherwise it ends here
        if not tensor.is_floating_point() or (again and tensor.requires_grad):
            return tensor
        return tensor.detach().requires_grad_()

    with torch.enable_grad():
        grads = [None if grad is None else variable(grad) for grad in (grad_out, grad_lse)]
        variables = [variable(tensor) for tensor in inputs]
        query, key, value, *tensors = variables
        results = composite(Problem.lift(query, key, value, tensors, *rest), query, key, value)
        due = [(result, grad) for result, grad in zip(results, grads, strict=True) if grad is not None]
        wanted = [tensor for tensor, need in zip(variables, needs, strict=True) if need]
        first = torch.autograd.grad(
            [result for result, _ in due], wanted, [grad for _, grad in due], create_graph=True, allow_unused=True
        )
        products = [
            (one * other).sum()
            for one, other in zip(first, gradients, strict=True)
            if one is not None and other is not None
        ]
        every = [*grads, *variables]
        sought = [(place, tensor) for place, tensor in enumerate(every) if tensor is not None and tensor.requires_grad]
        found: list[Tensor | None] = [None] * len(every)
        if products and (total := torch.stack(products).sum()).requires_grad:
            second = torch.autograd.grad(total, [tensor for _, tensor in sought], create_graph=again, allow_unused=True)
            for (place, _), gradient in zip(sought, second, strict=True):
                found[place] = gradient
    return found


def _forward_autograd(
    query: Tensor, key: Tensor, value: Tensor, tensors: list[Tensor], spec: str, ints: Any, floats: Any
) -> Any:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value, *tensors)):
        return _Attention.apply(query, key, value, (spec, ints, floats), *tensors)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return _attention(query, key, value, tensors, spec, ints, floats)


def _backward_autograd(
    grad_out: Tensor | None,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    tensors: list[Tensor],
    spec: str,
    ints: Any,
    floats: Any,
    needs: list[bool],
) -> list[Tensor]:
    rest = (spec, ints, floats)
    variables = [tensor for tensor in (grad_out, grad_lse, query, key, value, *tensors) if tensor is not None]
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in variables):
        return list(_AttentionBackward.apply(grad_out, grad_lse, query, key, value, out, lse, rest, needs, *tensors))
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return _attention_backward(grad_out, grad_lse, query, key, value, out, lse, tensors, *rest, needs)


# vmap


def _forward_vmap(
    info: Any,
    in_dims: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tensors: list[Tensor],
    spec: str,
    ints: Any,
    floats: Any,
) -> Any:
    """Fold the mapped dimension into the batch; what depends on the sequence's number goes one example at a time."""
    count, inputs = info.batch_size, (query, key, value)
    if spec.startswith("('dense'") and not tensors:
        folded = [_fold(tensor, place, count) for tensor, place in zip(inputs, in_dims[:3], strict=True)]
        results = _attention(*folded, tensors, spec, ints, floats)
        return tuple(result.unflatten(0, (count, -1)) for result in results), (0, 0)
    examples = [
        _attention(
            *(_example(tensor, place, number) for tensor, place in zip(inputs, in_dims[:3], strict=True)),
            [_example(tensor, place, number) for tensor, place in zip(tensors, in_dims[3], strict=True)],
            spec,
            ints,
            floats,
        )
        for number in range(count)
    ]
    return tuple(torch.stack(results) for results in zip(*examples, strict=True)), (0, 0)


def _backward_vmap(info: Any, in_dims: Any, *arguments: Any) -> Any:
    examples = []
    for number in range(info.batch_size):
        taken = [
            [_example(item, each, number) for item, each in zip(argument, place, strict=True)]
            if isinstance(argument, list) and argument and isinstance(argument[0], Tensor)
            else _example(argument, place, number)
            for argument, place in zip(arguments, in_dims, strict=True)
        ]
        examples.append(_attention_backward(*taken))
    stacked = [torch.stack(results) for results in zip(*examples, strict=True)]
    return stacked, [0] * len(stacked)


def _fold(tensor: Tensor, place: int | None, count: int) -> Tensor:
    moved = tensor.expand(count, *tensor.shape) if place is None else tensor.movedim(place, 0)
    return moved.flatten(0, 1)


def _example(value: Any, place: Any, number: int) -> Any:
    return value.select(place, number) if isinstance(value, Tensor) and isinstance(place, int) else value


# Registration

_LIBRARY.impl("attention", _forward, "CompositeExplicitAutograd")
_LIBRARY.impl("attention_backward", _backward, "CompositeExplicitAutograd")
_LIBRARY.impl("attention", _forward_autograd, "Autograd")
_LIBRARY.impl("attention_backward", _backward_autograd, "Autograd")
torch.library.register_fake("onchip::attention", _forward_fake, lib=_LIBRARY)
torch.library.register_fake("onchip::attention_backward", _backward_fake, lib=_LIBRARY)
torch.library.register_vmap("onchip::attention", _forward_vmap, lib=_LIBRARY)
torch.library.register_vmap("onchip::attention_backward", _backward_vmap, lib=_LIBRARY)


# Running a problem


def run(problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output and LSE of a problem: directly in plain eager code, else by the operator or as composite torch.

    The operator's way through the dispatcher costs more than a small problem; it is there for what looks at operators.
    """
    tensors, spec, ints, floats = problem.lower()
    if not is_observed(query, key, value, *tensors) and UNTRACED not in spec:
        check_values(problem)
        if dispatch.goes_composite(problem):
            return composite(problem, query, key, value)
        return run_directly(dispatch.Ready(problem), query, key, value, (spec, ints, floats), tensors)
    schedule, _ = dispatch.choose(problem, transformed=_transformed() or UNTRACED in spec, measured=False)
    if schedule.composite:
        return composite(problem, query, key, value)
    return _attention(query, key, value, tensors, spec, ints, floats)


def run_directly(
    ready: dispatch.Ready,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rest: tuple[str, Sequence[int], Sequence[float]] | None = None,
    tensors: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor]:
    """`run` where nothing observes; `rest` and `tensors` may be left out for a problem that holds no tensors."""
    if torch.is_grad_enabled() and (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (tensors and any(tensor.requires_grad for tensor in tensors))
    ):
        # a named schedule that has no backward says so now
        assert ready.backward
        return _apply_directly(_alive(query), _alive(key), _alive(value), ready, rest, *map(_alive, tensors))
    if rest is None and ready.launch is not None:
        return ready.launch(ready.problem, query, key, value, saves=False)
    with torch._C._AutoDispatchBelowADInplaceOrView():
        return _compute(ready, query, key, value, saves=False)


_PLAIN = (Tensor, torch.nn.Parameter)


def is_observed(*tensors: Tensor) -> bool:
    """Whether something wants to see or replace operators: a compiler, a tracer, a transform, a mode, a subclass."""
    if torch.compiler.is_compiling():
        return True
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            return True
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
    )


def composite(problem: Problem, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Output and LSE by dense torch, which autograd and every transform go through."""
    reads = not torch.compiler.is_compiling() and not torch._C._are_functorch_transforms_active()
    reads = reads and problem.device.type == "cpu"
    if reads:
        check_values(problem)
    with _full_precision(problem.device):
        return dense.attend(problem, query, key, value, reads=reads)


def _transformed() -> bool:
    """Whether a torch.func transform differentiates, or forward-mode AD is on: the operator has no rule for these."""
    if torch.compiler.is_compiling():
        # here the kinds of transforms cannot be told apart, so all of them go composite
        return torch._C._are_functorch_transforms_active()
    if torch.autograd.forward_ad._current_level >= 0:
        return True
    stack = torch._C._functorch.get_interpreter_stack()
    return stack is not None and any(layer.key() != torch._C._functorch.TransformType.Vmap for layer in stack)


def plan(problem: Problem, notes: tuple[str, ...]) -> dispatch.Plan:
    """What `run` would do; the values of lengths and offsets are checked as in a call."""
    check_values(problem)
    transformed = _transformed()
    schedule, reasons = dispatch.choose(problem, transformed=transformed)
    backward = dispatch.backward_of(problem, schedule)
    return dispatch.Plan(problem, schedule.name, backward, dense.NAME, reasons, notes)
