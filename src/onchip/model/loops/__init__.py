"""Loop nests that compute attention in a memory of two levels, forward and backward.

Each is written once and is both: the algorithm, runnable on tensors, and what the simulator counts.
`onchip.model.forms` has a module of the same name for each, which says in closed form what the nest moves.

Every function here is `(memory, shape, blocks) -> None`. It declares the arrays that it makes; a backward finds those
that its forward left in slow memory. Letters follow the papers: S scores, P weights, O out, D delta, and d for a
gradient.
"""

from onchip.model.loops import flash1, flash2, rabe_staats, saved_weights, standard

__all__ = ["flash1", "flash2", "rabe_staats", "saved_weights", "standard"]
