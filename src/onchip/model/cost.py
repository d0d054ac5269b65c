"""What one pass of an algorithm costs: its traffic, and the chip that it needs."""

from __future__ import annotations

from dataclasses import dataclass

from onchip.model.traffic import Traffic


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a forward or of a backward.

    Attributes:
        traffic: bytes moved by name and operations, of all heads.
        peak_elements: the most elements that one head's blocks take on the chip at once.
    """

    traffic: Traffic
    peak_elements: int
