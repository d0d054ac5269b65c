"""What an algorithm moves between device memory and the chip, and what it computes there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Traffic:
    """Counts of one step, or of the sum of several.

    Attributes:
        loads, stores: bytes read from and written to device memory, by the name of the tensor.
        flops: floating-point operations of the matrix products, a multiplication and an addition counted as two.
        exponentials: evaluations of an exponential.
    """

    loads: Mapping[str, int] = field(default_factory=dict)
    stores: Mapping[str, int] = field(default_factory=dict)
    flops: int = 0
    exponentials: int = 0

    @property
    def read_bytes(self) -> int:
        """Bytes read from device memory."""
        return sum(self.loads.values())

    @property
    def written_bytes(self) -> int:
        """Bytes written to device memory."""
        return sum(self.stores.values())

    @property
    def total_bytes(self) -> int:
        """Bytes moved in either direction."""
        return self.read_bytes + self.written_bytes

    def __add__(self, other: Traffic) -> Traffic:
        return total((self, other))


def total(steps: Iterable[Traffic]) -> Traffic:
    """The sum of steps, tensor by tensor."""
    loads: Counter[str] = Counter()
    stores: Counter[str] = Counter()
    flops = exponentials = 0
    for step in steps:
        loads.update(step.loads)
        stores.update(step.stores)
        flops += step.flops
        exponentials += step.exponentials
    return Traffic(dict(loads), dict(stores), flops, exponentials)
