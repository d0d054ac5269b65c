"""User functions of scores and masks, as graphs.

A function is traced once to a graph of torch operators. The graph's hash is its name in a spec: it depends on what
the function computes and on nothing of the process, so a compiled graph that was cached on disk finds it again.
Tensors that the function captures become inputs of the graph, in the order in which it first reads them, and so get
gradients.
"""

from __future__ import annotations

import functools
import hashlib
import types
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_GRAPHS: dict[str, Callable[..., Tensor]] = {}
_TRACES: dict[Hashable, tuple[str, tuple[tuple[Hashable, ...], ...]]] = {}

UNTRACED = "fn:untraced"
"""The name of a function that no operator can find."""

INSIDE_COMPILE = (
    "masks.predicate and scores.modify cannot be built inside a compiled region: build the value outside and pass it in"
)


@dataclass(frozen=True, eq=False)
class Traced:
    """A function as a graph: `name` finds it in this process, `tensors` are what it captured."""

    name: str
    tensors: tuple[Tensor, ...]

    def __call__(self, *inputs: Tensor) -> Tensor:
        return _GRAPHS[self.name](*inputs, *self.tensors)

    def over(self, tensors: Sequence[Tensor]) -> Traced:
        """The same function over other captured tensors."""
        return Traced(self.name, tuple(tensors))

    def reads(self, place: int) -> bool:
        """Whether the result depends on the input at a place of the function's own arguments."""
        inputs = [node for node in _GRAPHS[self.name].graph.nodes if node.op == "placeholder"]  # type: ignore[attr-defined]
        return bool(inputs[place].users)


@dataclass(frozen=True, eq=False)
class Untraced:
    """A function under torch.func transforms, where nothing is lowered and torch differentiates it directly."""

    fn: Callable[..., Tensor]
    tensors: tuple[Tensor, ...] = ()
    name: str = UNTRACED

    def __call__(self, *inputs: Tensor) -> Tensor:
        return self.fn(*inputs)

    def over(self, tensors: Sequence[Tensor]) -> Untraced:
        return self

    def reads(self, place: int) -> bool:
        return True


def trace(fn: Callable[..., Tensor], *, takes_score: bool, dtype: torch.dtype = torch.float32) -> Traced | Untraced:
    """Trace `fn(score, b, h, i, j)` or `fn(b, h, i, j)`; equal code over equal closures is traced once.

    `dtype` is that of the score.

    Raises:
        RuntimeError: inside a region that torch.compile traces.
        TypeError: fn is not callable, or does not return a tensor of the right kind.
        ValueError: fn is not plain elementwise torch (control flow on values, fixed shapes).
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(INSIDE_COMPILE)
    if not callable(fn):
        raise TypeError(f"fn must be a function of index tensors, got {type(fn).__name__}")
    if torch._C._are_functorch_transforms_active():
        return Untraced(fn)
    captured = dict(_captured(fn, ()))
    key: Hashable = (takes_score, dtype, _key(fn, set()))
    known = _TRACES.get(key)
    if known is not None and all(path in captured for path in known[1]):
        return Traced(known[0], tuple(captured[path] for path in known[1]))
    device = next((tensor.device for tensor in captured.values()), torch.device("cpu"))
    traced = _trace(fn, takes_score, dtype, device)
    paths = []
    for tensor in traced.tensors:
        found = [path for path, other in captured.items() if other is tensor]
        if not found:
            return traced  # read from somewhere that the key does not describe: trace it again next time
        paths.append(found[0])
    _TRACES[key] = (traced.name, tuple(paths))
    return traced


def _trace(fn: Callable[..., Tensor], takes_score: bool, dtype: torch.dtype, device: torch.device) -> Traced:
    # torch.fx.experimental costs most of a second to import, which only users of functions should pay
    from torch.fx.experimental.proxy_tensor import make_fx

    def examples(shape: tuple[int, int, int, int]) -> list[Tensor]:
        score = [torch.ones(shape, dtype=dtype, device=device)] if takes_score else []
        return score + _index_examples(shape, device)

    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # make_fx counts the parameters of what it traces, defaults included
            module = make_fx(lambda *inputs: fn(*inputs))(*examples((2, 3, 4, 5)))
    except Exception as error:
        raise ValueError(
            "fn must be plain torch on its index tensors (use torch.where instead of if, no .item()); "
            f"tracing it raised {type(error).__name__}: {error}"
        ) from error
    tensors: list[Tensor] = []
    placeholders: dict[int, Any] = {}
    graph = module.graph
    last = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for node in list(graph.nodes):
        if node.op != "get_attr":
            continue
        tensor = getattr(module, node.target)
        if id(tensor) not in placeholders:
            with graph.inserting_after(last):
                last = placeholders[id(tensor)] = graph.placeholder(f"captured_{len(tensors)}")
            tensors.append(tensor)
        node.replace_all_uses_with(placeholders[id(tensor)])
        graph.erase_node(node)
    graph.eliminate_dead_code()
    module.recompile()
    _check(fn, module, tensors, examples, takes_score)
    described = "".join(f"{tensor.dtype},{tensor.dim()};" for tensor in tensors)
    name = "fn:" + hashlib.sha256(f"{takes_score}|{described}|{module.code}".encode()).hexdigest()[:24]
    _GRAPHS.setdefault(name, module)
    return Traced(name, tuple(tensors))


def _index_examples(shape: tuple[int, int, int, int], device: torch.device) -> list[Tensor]:
    indices = []
    for place, size in enumerate(shape):
        view = [1, 1, 1, 1]
        view[place] = size
        # zeros: a captured table may be short
        indices.append(torch.zeros(size, dtype=torch.int64, device=device).reshape(view))
    return indices


class _NoReading(TorchDispatchMode):
    """Refuse to read a number out of a tensor: the graph would keep it, whatever the tensor holds later."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise ValueError("fn must not read numbers out of tensors (.item(), int(), if): use the tensor itself")
        return func(*args, **(kwargs or {}))


def _check(
    fn: Callable[..., Tensor],
    module: Callable[..., Tensor],
    tensors: list[Tensor],
    examples: Callable[[tuple[int, int, int, int]], list[Tensor]],
    takes_score: bool,
) -> None:
    """The graph must mean the same on tiles of another shape, and return what its place needs."""
    for shape in ((1, 1, 3, 2), (3, 2, 1, 6)):
        inputs = examples(shape)
        with torch.no_grad():
            with _NoReading():
                expected = fn(*inputs)
            if not isinstance(expected, Tensor):
                raise TypeError(f"fn must return a tensor, got {type(expected).__name__}")
            if not takes_score and expected.dtype != torch.bool:
                raise TypeError(f"a predicate must return a bool tensor, got {expected.dtype}")
            if takes_score and not expected.dtype.is_floating_point:
                raise TypeError(f"a score function must return a floating tensor, got {expected.dtype}")
            try:
                same = torch.allclose(module(*inputs, *tensors), expected, rtol=0, atol=0, equal_nan=True)
            except RuntimeError:
                same = False
        if not same:
            raise ValueError(
                "fn must be elementwise in its index tensors: its graph fixes a shape, or it is not a pure function"
            )
        if expected.dim() > 4 or torch.broadcast_shapes(expected.shape, shape) != shape:
            raise ValueError(f"fn must return a tensor that broadcasts to {shape}, got {tuple(expected.shape)}")


def _parts(fn: Any) -> Iterator[tuple[Hashable, Any]]:
    """What a callable reads besides its arguments, each under a name."""
    if isinstance(fn, functools.partial):
        yield "func", fn.func
        yield from ((("args", place), value) for place, value in enumerate(fn.args))
        yield from ((("keywords", name), value) for name, value in sorted(fn.keywords.items()))
    elif isinstance(fn, types.MethodType):
        yield "function", fn.__func__
        yield "self", fn.__self__
    elif isinstance(fn, types.FunctionType):
        code = fn.__code__
        for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
            try:
                yield ("cell", name), cell.cell_contents
            except ValueError:
                yield ("cell", name), None
        yield from ((("global", name), fn.__globals__[name]) for name in code.co_names if name in fn.__globals__)
        yield from ((("default", place), value) for place, value in enumerate(fn.__defaults__ or ()))
        yield from ((("keyword", name), value) for name, value in sorted((fn.__kwdefaults__ or {}).items()))


def _captured(value: Any, path: tuple[Hashable, ...]) -> Iterator[tuple[tuple[Hashable, ...], Tensor]]:
    """Tensors reachable through closures, with the path to each."""
    if len(path) > 6:
        return
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, tuple | list):
        for place, item in enumerate(value):
            yield from _captured(item, (*path, place))
    else:
        for name, part in _parts(value):
            yield from _captured(part, (*path, name))


class _Unique:
    """A key that equals nothing but itself: what cannot be described is traced each time."""


def _key(value: Any, seen: set[int]) -> Hashable:
    """What a value contributes to a trace: tensors by dtype and rank, functions by code, plain values by themselves."""
    if isinstance(value, Tensor):
        return ("tensor", value.dtype, value.dim(), value.device.type, type(value).__name__)
    if isinstance(value, bool | int | float | complex | str | bytes | type(None) | torch.dtype | torch.device):
        return (type(value), repr(value))
    if isinstance(value, types.ModuleType | types.BuiltinFunctionType | type):
        return (type(value), getattr(value, "__module__", ""), value.__name__)
    if id(value) in seen:
        return "again"
    seen = seen | {id(value)}
    if isinstance(value, tuple | list):
        return (type(value), tuple(_key(item, seen) for item in value))
    if isinstance(value, types.FunctionType):
        if getattr(value, "__module__", "").split(".")[0] == "torch":
            return ("torch", value.__module__, value.__qualname__)
        parts = tuple((name, _key(part, seen)) for name, part in _parts(value))
        # constants hold nested code objects, which compare by what they do
        return (value.__code__, parts)
    if isinstance(value, functools.partial):
        return (functools.partial, tuple((name, _key(part, seen)) for name, part in _parts(value)))
    return _Unique()


def by_name(name: str, tensors: tuple[Tensor, ...]) -> Traced:
    """The graph that a spec names.

    Raises:
        RuntimeError: nothing in this process traced it: a saved graph was loaded without building its values.
    """
    if name not in _GRAPHS:
        raise RuntimeError(
            f"{name} is not known in this process: build its masks.predicate or scores.modify value first"
        )
    return Traced(name, tensors)
