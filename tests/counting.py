"""What the Triton kernels load, store and compute, counted while Triton's interpreter runs them.

Only where TRITON_INTERPRET=1 is set. It knows nothing of onchip's own counts, which tests hold against it. An
instruction that reads an address many times counts it once, as a GPU's memory does.
"""

import importlib
import inspect
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from unittest import mock

import numpy
import torch
from triton.runtime.interpreter import InterpreterBuilder

# the package has functions of these names
forward, backward, finite = (
    importlib.import_module(f"onchip.schedules.triton.{name}") for name in ("forward", "backward", "finite")
)

NAMES = {"grad_out": "d_out", "grad_query": "d_query", "grad_key": "d_key", "grad_value": "d_value",
         "row_lse": "lse", "row_delta": "delta", "order": "lists", "counts": "lists"}  # fmt: skip
COUNTED = {"tensor", "query", "key", "value", "out", "lse", "delta", "total", *NAMES.values(), "mask", "bias", "slopes"}


@dataclass
class Run:
    """One kernel: bytes of every instruction by name of the tensor, and the addresses that it loads at all."""

    name: str
    loads: Counter = field(default_factory=Counter)
    stores: Counter = field(default_factory=Counter)
    touched: dict = field(default_factory=dict)
    flops: int = 0
    exponentials: int = 0

    def least(self):
        """Bytes of each tensor that are loaded at all."""
        found = Counter()
        for (name, width), addresses in self.touched.items():
            found[name] += width * len(numpy.unique(numpy.concatenate(addresses)))
        return +found


class Counting:
    """Records each kernel that runs inside."""

    def __init__(self, sides):
        self.sides = sides  # name of a tensor of masks or scores -> tensors
        self.runs, self._ranges = [], []

    def start(self, kernel, arguments, keywords):
        bound = inspect.signature(kernel.fn).bind(*arguments, **keywords).arguments
        self.runs.append(Run(kernel.fn.__name__.removesuffix("_kernel")))
        self._ranges = [
            (tensor, NAMES.get(name, name))
            for name, value in bound.items()
            for tensor in (value if isinstance(value, tuple) else (value,))
            if isinstance(tensor, torch.Tensor) and name not in ("given", "weighted")
        ]
        self._ranges += [(tensor, name) for name, tensors in self.sides.items() for tensor in tensors]

    def _name(self, address):
        for tensor, name in self._ranges:
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            first = tensor.data_ptr()
            if name in COUNTED and first <= address < first + (last + 1) * tensor.element_size():
                return name
        return None

    def moved(self, pointers, mask, loads):
        addresses = numpy.unique(pointers.data[numpy.broadcast_to(mask.data, pointers.data.shape)])
        if len(addresses) == 0:
            return
        name = self._name(int(addresses[0]))
        if name is None:
            return
        run, width = self.runs[-1], pointers.get_element_ty().primitive_bitwidth // 8
        (run.loads if loads else run.stores)[name] += width * len(addresses)
        if loads:
            run.touched.setdefault((name, width), []).append(addresses)


class _Hooked:
    def __init__(self, kernel, counting):
        self.kernel, self.counting = kernel, counting

    def __getitem__(self, grid):
        def launch(*arguments, **keywords):
            own = {name: value for name, value in keywords.items() if name not in ("num_warps", "num_stages")}
            self.counting.start(self.kernel, arguments, own)
            self.kernel[grid](*arguments, **keywords)

        return launch


@contextmanager
def counted(sides):
    """Inside, every kernel of the schedule runs and is counted. Gives the list of runs."""
    counting = Counting(sides)
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    dot = InterpreterBuilder.create_dot

    def counted_load(self, pointers, mask, *rest):
        counting.moved(pointers, mask, loads=True)
        return load(self, pointers, mask, *rest)

    def counted_store(self, pointers, value, mask, *rest):
        counting.moved(pointers, mask, loads=False)
        return store(self, pointers, value, mask, *rest)

    def counted_dot(self, a, b, *rest):
        counting.runs[-1].flops += 2 * a.data.shape[0] * a.data.shape[1] * b.data.shape[1]
        return dot(self, a, b, *rest)

    def counted_exponential(operation):
        def evaluate(self, argument):
            counting.runs[-1].exponentials += argument.data.size
            return operation(self, argument)

        return evaluate

    with ExitStack() as patches:
        for name, replacement in (
            ("create_masked_load", counted_load),
            ("create_masked_store", counted_store),
            ("create_dot", counted_dot),
            ("create_exp", counted_exponential(InterpreterBuilder.create_exp)),
            ("create_exp2", counted_exponential(InterpreterBuilder.create_exp2)),
        ):
            patches.enter_context(mock.patch.object(InterpreterBuilder, name, replacement))
        for module in (forward, backward, finite):
            for name in dir(module):
                if name.endswith("_kernel"):
                    hooked = _Hooked(getattr(module, name), counting)
                    patches.enter_context(mock.patch.object(module, name, hooked))
        yield counting.runs
