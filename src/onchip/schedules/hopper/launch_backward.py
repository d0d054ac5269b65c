"""What the backward kernels for Hopper are given, and their launches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from onchip.gpu.call import on_device
from onchip.gpu.descriptors import moved
from onchip.gpu.launcher import Launcher, PerProblem
from onchip.problem import Problem
from onchip.schedules.hopper.backward import finish_kernel, narrow_kernel, prepare_kernel, wide_kernel
from onchip.schedules.hopper.launch import PANEL, ROWS, VECTOR, Call, described, expressible, width
from onchip.schedules.hopper.tiles import BACKWARD
from onchip.schedules.hopper.widest import widest_kernel
from onchip.schedules.hopper.workspace import SUM_COLUMNS, Workspace
from onchip.schedules.triton.backward import backward as portable_backward

SECTION_ROWS = 32768
"""Keys of the heads that are worked on at one time under a band that ends at the diagonal."""
ORDERED_HEADS = 8
"""Heads that are worked on at one time where programs add to dQ in order, each one block behind another."""
FLAT = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
SUMS = NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


@dataclass(frozen=True, eq=False)
class Prepared:
    """The launches of a backward but for the addresses.

    Attributes:
        inputs: descriptors of tensors like query, grad_out, key and value.
        results: of tensors like the gradients of key and value.
    """

    workspace: Workspace
    first: Launcher
    main: Launcher
    last: Launcher
    inputs: tuple[TensorDescriptor, ...]
    rows: TensorDescriptor
    sums: TensorDescriptor
    results: tuple[TensorDescriptor, ...]

    def run(
        self, grad_lse: Tensor | None, inputs: Sequence[Tensor], out: Tensor, lse: Tensor, results: Sequence[Tensor]
    ) -> None:
        """Launch the kernels on tensors with the shapes and strides of those that they were prepared for.

        Args:
            inputs: query, grad_out, key, value. results: gradients of query, key and value, yet to be written.
        """
        rows, delta, sums, order = self.workspace.allocate(out.device)
        self.first(out, inputs[1], lse, grad_lse, rows, delta, sums, order)
        descriptors = (
            *(moved(one, tensor) for one, tensor in zip(self.inputs, inputs, strict=True)),
            moved(self.rows, rows), moved(self.rows, delta), moved(self.sums, sums),
            *(moved(one, tensor) for one, tensor in zip(self.results, results[1:], strict=True)),
        )  # fmt: skip
        self.main(*inputs, *results[1:], order, descriptors=descriptors)
        self.last(sums, order, results[0])


def prepare(
    problem: Problem, grad_lse: Tensor | None, inputs: Sequence[Tensor], out: Tensor, results: Sequence[Tensor]
) -> Prepared:
    """The launches for tensors that TMA can read."""
    call = Call(problem)
    query, grad_out, key, value = inputs
    work = Workspace(call)
    sequences = 1 if call.packed else problem.batch
    tiles = call.count(problem.length_k, 1, BACKWARD.columns)

    kernel = {"narrow": narrow_kernel, "wide": wide_kernel, "widest": widest_kernel}[work.main]
    columns = PANEL if kernel is widest_kernel else work.width

    def like(tensor: Tensor) -> TensorDescriptor:
        return described(tensor, call.packed, ROWS, columns)

    dlse: tuple[int, ...] = (0, 0, 0)
    if grad_lse is not None:
        dlse = (0, *grad_lse.stride()) if call.packed else grad_lse.stride()
    heads = problem.batch, problem.heads_q, problem.length_q, work.slots
    cu_q, _, used_q, _ = call.layout
    first = (
        *(stride for tensor in (out, grad_out) for stride in call.strides(tensor, VECTOR)[:3]), *call.lse_strides,
        *dlse, *heads, cu_q, used_q,
    )  # fmt: skip
    main = (
        *(stride for tensor in (*inputs, *results[1:]) for stride in call.strides(tensor, VECTOR)[:3]),
        problem.batch, problem.heads_kv, problem.length_q, problem.length_k, tiles,
        _section(call, sequences * problem.heads_kv), work.slots,
        *call.layout, *call.band.arguments, call.scale, problem.scale, call.given(call.semantics.reads), *call.dropout,
    )  # fmt: skip
    last = (*call.strides(results[0], VECTOR)[:3], *heads, cu_q, used_q, problem.scale)
    constants = {
        "change": call.semantics.change, "differentiate": call.semantics.differentiate, "LOW": call.band.has_low,
        "HIGH": call.band.has_high, "ORDERED": problem.deterministic, "GROUP": problem.group, "DIM": problem.dim_qk,
        "DV": problem.dim_v, "D": work.width,
        "ALONE": not call.packed and problem.key_lengths is None and problem.query_lengths is None, "num_warps": 4,
    }  # fmt: skip
    rows = work.blocks * ROWS
    around = {"D": work.width, "num_warps": 4}
    before = around | {"DV": problem.dim_v, "BLOCK_DV": width(problem.dim_v)}
    return Prepared(
        work,
        Launcher(prepare_kernel, work.blocks, first, before),
        Launcher(kernel, tiles * sequences * problem.heads_kv, main, constants),
        Launcher(finish_kernel, work.blocks, last, around | {"DIM": problem.dim_qk}),
        tuple(like(tensor) for tensor in inputs),
        _unbound([rows], [1], [ROWS], FLAT, out),
        _unbound([rows * work.width // SUM_COLUMNS, SUM_COLUMNS], [SUM_COLUMNS, 1], [2 * columns, SUM_COLUMNS],
                 SUMS, out),
        tuple(like(tensor) for tensor in results[1:]),
    )  # fmt: skip


def _section(call: Call, heads: int) -> int:
    """Heads in a row whose columns are taken before those of others."""
    problem = call.problem
    if call.band.has_high or call.band.has_low:
        return max(1, min(heads, SECTION_ROWS // max(1, problem.length_k)))
    return min(heads, ORDERED_HEADS) if problem.deterministic else 1


def _unbound(
    shape: list[int], strides: list[int], box: list[int], layout: NVMMASharedLayout, like: Tensor
) -> TensorDescriptor:
    """A descriptor of float32 memory that is yet to be allocated."""
    made = TensorDescriptor(torch.empty(0, dtype=torch.float32, device=like.device), shape, strides, box, layout)
    made.base = None
    return made


def backward(
    problem: Problem,
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
    """Gradients of query, key, value and of each of `tensors`, None where not needed.

    Those of sinks and slopes are the portable kernels'.
    """
    found: list[Tensor | None] = [None] * len(needs)
    if any(needs[3:]):
        only = [False, False, False, *needs[3:]]
        found = portable_backward(problem, grad_out, grad_lse, query, key, value, out, lse, tensors, only)
    if not any(needs[:3]):
        return found
    if out.numel() == 0 or key.numel() == 0:
        made = [torch.zeros_like(tensor) for tensor in (query, key, value)]
    else:
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        made = _gradients(problem, grad_out, grad_lse, query, key, value, out, lse)
    return [*(one if need else None for one, need in zip(made, needs, strict=False)), *found[3:]]


def _gradients(
    problem: Problem, grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, value: Tensor, out: Tensor,
    lse: Tensor,
) -> list[Tensor]:  # fmt: skip
    given = query, grad_out, key, value, out
    facts = (*(tensor.stride() for tensor in given), None if grad_lse is None else grad_lse.stride())
    known = _PREPARED.of(problem)
    ready = known.get(facts)
    with on_device(query.device):
        read: tuple[Tensor, ...] = given
        together = query.data_ptr() | grad_out.data_ptr() | key.data_ptr() | value.data_ptr() | out.data_ptr()
        if ready is None or together % 16:
            read = tuple(expressible(tensor) for tensor in given)
            ready = None
        *inputs, out = read
        results = [torch.empty_like(tensor) for tensor in (inputs[0], inputs[2], inputs[3])]
        if ready is None:
            ready = prepare(problem, grad_lse, inputs, out, results)
            if all(one is other for one, other in zip(read, given, strict=True)):
                known[facts] = ready
        ready.run(grad_lse, inputs, out, lse.contiguous(), results)
    return results


_PREPARED: PerProblem[Prepared] = PerProblem()
"""Launches by problem, and by strides."""
