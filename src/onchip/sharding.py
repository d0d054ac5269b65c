"""DTensors: attention on the shards of a device mesh, over batch and heads.

Attention of one sequence and one head needs no other, so each device computes its own with what it has, and nothing is
sent for query, key and value that are sharded alike. What hangs on the problem (slopes, sinks, masks, lengths) is cut
to the sequences and heads of the device, whether it is a DTensor or a plain tensor that every device holds.

    query      key, value       computed as
    Shard(b)   Shard(b)         sharded over the batch
    Shard(h)   Shard(h)         sharded over heads; fewer key heads than devices are gathered, and each takes its own
    any        Replicate        as the query is
    Partial                     summed first
    a shard of the length       refused: the other devices' keys would be missing
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onchip import dispatch, masks, ops
from onchip.problem import Problem
from onchip.scores import Modify
from onchip.strides import empty_ordered

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

Axes = tuple[int | None, int | None]
"""Where the batch and the heads stand in a tensor, None where it has no such dimension."""

BATCH, HEADS = 0, 1


def is_given(*tensors: Any) -> bool:
    """Whether any of the inputs is a DTensor. By name: importing torch.distributed.tensor takes its time."""
    return any(
        type(tensor).__name__ == "DTensor" and type(tensor).__module__.startswith("torch.distributed")
        for tensor in tensors
    )


def run(problem: Problem, query: Any, key: Any, value: Any) -> tuple[Tensor, Tensor]:
    """Output and LSE as DTensors, sharded as the query is computed.

    Raises:
        TypeError: some of the inputs are DTensors and some are not.
        ValueError: different meshes; one mesh dimension that shards batch and heads; heads that cannot be divided.
        NotImplementedError: a shard of the length or of the head dim; dropout or a function of the sharded index.
    """
    from torch.distributed.tensor import DTensor

    inputs = {"query": query, "key": key, "value": value}
    for name, tensor in inputs.items():
        if not isinstance(tensor, DTensor):
            raise TypeError(
                f"query, key and value must all be DTensors if one is, got {name} as {type(tensor).__name__}"
            )
    mesh = query.device_mesh
    if not mesh == key.device_mesh == value.device_mesh:
        raise ValueError(
            f"query, key and value must be on one mesh, got {mesh}, {key.device_mesh}, {value.device_mesh}"
        )
    packed = problem.layout == "packed"
    kinds = [_kind(problem, inputs, place) for place in range(mesh.ndim)]
    _check_indices(problem, kinds)
    shards = _Shards(mesh, kinds)
    ours: Axes = (None, 1) if packed else (0, 1)
    q = shards.take(query, ours)
    k, v = _own_heads(problem, shards, key, value, ours)
    tensors, spec, ints, floats = problem.lower()
    axes = _axes(problem)
    taken = [shards.take(tensor, axes.get(id(tensor), (None, None))) for tensor in tensors]
    if torch.compiler.is_compiling() and problem.schedule not in dispatch.COMPOSITE:
        # a compiler cannot read a spec
        out, lse = torch.ops.onchip.attention(q, k, v, taken, spec, ints, floats)
    else:
        out, lse = ops.run(Problem.lift(q, k, v, taken, spec, ints, floats), q, k, v)
    lse_shape = (problem.heads_q, problem.length_q) if packed else query.shape[:-1]
    return (
        shards.give(out, ours, (*query.shape[:-1], problem.dim_v)),
        shards.give(lse, (None, 0) if packed else ours, lse_shape),
    )


def _kind(problem: Problem, inputs: dict[str, Any], place: int) -> int | None:
    """What one dimension of the mesh shards: BATCH, HEADS, or nothing."""
    from torch.distributed.tensor import Shard

    names = ("length", "heads", "dim") if problem.layout == "packed" else ("batch", "heads", "length", "dim")
    found = set()
    for name, tensor in inputs.items():
        placement = tensor.placements[place]
        if placement.is_replicate() or placement.is_partial():
            continue
        where = names[placement.dim % len(names)] if type(placement) is Shard else str(placement)
        if where == "length":
            raise NotImplementedError(
                f"{name} is sharded over its length on dimension {place} of the mesh: each device would miss the "
                "others' tokens, and onchip does not pass keys round; shard batch or heads, or redistribute the length"
            )
        if where not in ("batch", "heads"):
            raise NotImplementedError(
                f"{name} must be sharded over batch or heads, got {placement} on dimension {place} of the mesh: "
                "redistribute it"
            )
        found.add(where)
    if len(found) == 2:
        raise ValueError(
            f"dimension {place} of the mesh shards the batch of one of query, key and value and the heads of another: "
            "redistribute them alike"
        )
    return None if not found else BATCH if "batch" in found else HEADS


def _check_indices(problem: Problem, kinds: Sequence[int | None]) -> None:
    """What counts sequences or heads would count those of the shard."""
    functions = [(score.function, 1) for score in problem.scores if isinstance(score, Modify)]
    leaves = [] if problem.mask is None else masks.leaves(problem.mask)
    functions += [(leaf.function, 0) for leaf in leaves if isinstance(leaf, masks.Predicate)]
    for kind, name in ((BATCH, "batch"), (HEADS, "heads")):
        if kind not in kinds:
            continue
        if problem.seed is not None:
            raise NotImplementedError(
                f"dropout_p must be 0 where {name} are sharded: dropout counts sequences and heads, and those of a "
                "shard would start at 0 on every device"
            )
        if any(function.reads(first + kind) for function, first in functions):
            raise NotImplementedError(
                f"a function of masks.predicate or scores.modify must not read its index of {name} where {name} are "
                "sharded: those of a shard start at 0 on every device"
            )


class _Shards:
    """Which dimension of a mesh shards what."""

    def __init__(self, mesh: Any, kinds: Sequence[int | None]) -> None:
        self._mesh, self._kinds = mesh, kinds

    def heads(self) -> tuple[int, int]:
        """Into how many parts heads are cut, and which of them is this device's."""
        count, number = 1, 0
        for place, kind in enumerate(self._kinds):
            if kind == HEADS:
                size = self._mesh.size(place)
                count, number = count * size, number * size + self._mesh.get_local_rank(place)
        return count, number

    def placements(self, axes: Axes) -> tuple[list[Placement], list[Placement]]:
        """Of a tensor whose batch and heads stand at `axes`, and of its gradient, which shards add to that share it."""
        from torch.distributed.tensor import Partial, Replicate, Shard

        values: list[Placement] = []
        gradients: list[Placement] = []
        for kind in self._kinds:
            axis = None if kind is None else axes[kind]
            values.append(Replicate() if axis is None else Shard(axis))
            gradients.append(Partial() if kind is not None and axis is None else values[-1])
        return values, gradients

    def take(self, tensor: Tensor, axes: Axes) -> Tensor:
        """This device's part of a DTensor, or of a plain tensor that every device holds."""
        from torch.distributed.tensor import DTensor, Replicate

        if not isinstance(tensor, DTensor):
            tensor = DTensor.from_local(tensor, self._mesh, [Replicate()] * self._mesh.ndim, run_check=False)
        values, gradients = self.placements(axes)
        return tensor.redistribute(placements=values).to_local(grad_placements=gradients)

    def give(self, part: Tensor, axes: Axes, shape: tuple[int, ...]) -> DTensor:
        """The DTensor of a shape of which each device has a part, with dimensions in memory as the part has them."""
        from torch.distributed.tensor import DTensor

        like = torch.empty_strided(part.shape, part.stride(), device="meta")
        stride = empty_ordered(shape, like, part.dtype).stride()
        placements = self.placements(axes)[0]
        return DTensor.from_local(part, self._mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _own_heads(problem: Problem, shards: _Shards, key: Any, value: Any, ours: Axes) -> tuple[Tensor, Tensor]:
    """The key heads that this device's query heads share."""
    count, number = shards.heads()
    if problem.heads_q % count:
        raise ValueError(f"the query's {problem.heads_q} heads must be a multiple of the {count} parts of the mesh")
    if problem.heads_kv % count == 0:
        return shards.take(key, ours), shards.take(value, ours)
    own = problem.heads_q // count
    if problem.group % own:
        raise ValueError(
            f"{problem.heads_q} query heads and {problem.heads_kv} key heads cannot be cut into {count} parts: the "
            f"{own} query heads of a part would share key heads unevenly"
        )
    first = number * own // problem.group
    key, value = (shards.take(tensor, (ours[BATCH], None)).narrow(1, first, 1) for tensor in (key, value))
    return key, value


def _axes(problem: Problem) -> dict[int, Axes]:
    """Batch and heads of each tensor that hangs on the problem, by id; offsets and the seed have none."""
    found: dict[int, Axes] = {}

    def note(tensor: Tensor, axes: Axes) -> None:
        if found.setdefault(id(tensor), axes) != axes:
            raise ValueError(
                f"one tensor of shape {tuple(tensor.shape)} stands in places that are sharded differently: clone it"
            )

    for tensor in (problem.query_lengths, problem.key_lengths, *problem.diagonals()):
        if isinstance(tensor, Tensor):
            note(tensor, (0, None))
    for score in problem.scores:
        for tensor, per in score.parameters:
            if per == "head":
                note(tensor, (None, 0) if tensor.dim() == 1 else (0, 1))
            else:
                note(tensor, _pair_axes(tensor) if per == "pair" else (None, None))
    if problem.mask is not None:
        for _, tensor, _, _ in problem.mask.pair_tensors():
            note(tensor, _pair_axes(tensor))
        for leaf in masks.leaves(problem.mask):
            if isinstance(leaf, masks.Predicate):
                for tensor in leaf.function.tensors:
                    note(tensor, (None, None))
            for tensor in _token_tensors(leaf):
                note(tensor, (0, None) if tensor.dim() == 2 else (None, None))
    return found


def _token_tensors(leaf: masks.Mask) -> tuple[Tensor, ...]:
    """(batch, length) or (length,); (tokens,) in a packed batch."""
    if isinstance(leaf, masks.Keys):
        return (leaf.kept,)
    return (leaf.query_ids, leaf.key_ids) if isinstance(leaf, masks.Documents) else ()


def _pair_axes(tensor: Tensor) -> Axes:
    """Of a tensor that broadcasts to (batch, heads, rows, columns)."""
    shape = (1,) * (4 - tensor.dim()) + tuple(tensor.shape)
    missing = 4 - tensor.dim()
    return (None if shape[0] == 1 else 0 - missing, None if shape[1] == 1 else 1 - missing)
