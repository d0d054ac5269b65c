"""What the Hopper kernels move and compute."""

from __future__ import annotations

from dataclasses import replace

from onchip.gpu import KEYS
from onchip.gpu.counts import Counts, forward_kernel, softcaps
from onchip.model.kernels import Kernel
from onchip.model.traffic import Traffic
from onchip.problem import Problem
from onchip.schedules.hopper.launch import ROWS, Call
from onchip.schedules.hopper.workspace import Workspace
from onchip.schedules.triton.traffic import gradients_of_scores


def kernels(problem: Problem, backward: bool, target: str | None) -> list[Kernel]:
    """Every kernel of a direction. Reads lengths and offsets."""
    rows = (1 if problem.layout == "packed" else problem.batch) * problem.heads_q * problem.length_q
    if rows * problem.dim_v == 0:
        return []
    call = Call(problem, target)
    if not backward:
        return [forward_kernel(call, rows)]
    work = Workspace(call)
    return [_first(call, work, rows), _main(call, work), _last(call, work, rows), *gradients_of_scores(problem, target)]


def _first(call: Call, work: Workspace, rows: int) -> Kernel:
    """Also rows that do not exist, so that nothing need be known of lengths."""
    size = rows * call.problem.dim_v * call.problem.dtype.itemsize
    padded, _, sums, order = work.sizes
    stores = {"base-2 lse": 4 * padded, "delta": 4 * padded, **({"order": 4 * order} if order else {"sums": 4 * sums})}
    traffic = Traffic({"out": size, "d_out": size, "lse": 4 * rows}, stores)
    return Kernel(name="prepare", requested=traffic, compulsory=traffic, precision="float32")


def _main(call: Call, work: Workspace) -> Kernel:
    """Sums of dQ are added to in the L2 cache, which a program asks for as if it stored them."""
    problem = call.problem
    counts = Counts(call, KEYS, problem.heads_q)
    tile, width = counts.tile, counts.width
    owned = counts.owned() * problem.heads_kv
    loaded, touched = counts.others_loaded, counts.others_touched(1)
    counts.add("key", problem.dim_qk * width, owned, owned)
    counts.add("value", problem.dim_v * width, owned, owned)
    counts.add("query", problem.dim_qk * width, loaded, touched)
    counts.add("d_out", problem.dim_v * width, loaded, touched)
    # of whole blocks
    padded = counts.steps * ROWS
    counts.add("base-2 lse", 4, padded, touched)
    counts.add("delta", 4, padded, touched)
    counts.add_sides()
    columns = (1 if call.packed else problem.batch) * problem.length_k * problem.heads_kv
    counts.stores |= {
        "d_key": columns * problem.dim_qk * width,
        "d_value": columns * problem.dim_v * width,
        "sums": 4 * touched * work.width,
    }
    each = tile.rows * tile.columns * (1 + 2 * softcaps(problem))
    made = counts.kernel(KEYS, (3, 2), counts.steps * each)
    requested = replace(made.requested, stores={**made.requested.stores, "sums": 4 * padded * work.width})
    return replace(made, name=work.main, requested=requested)


def _last(call: Call, work: Workspace, rows: int) -> Kernel:
    size = rows * call.problem.dim_qk * call.problem.dtype.itemsize
    traffic = Traffic({"sums": 4 * work.sizes[2]}, {"d_query": size})
    return Kernel(name="finish", requested=traffic, compulsory=traffic, precision="float32")
