"""What can go wrong, and whose fault it is.

    ValueError, TypeError      the caller's: the message says what must hold, what came and what to do
    NotImplementedError
      Unsupported              a named schedule, or every schedule, refuses the problem; it lists each reason

`assert` is for defects of onchip itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class Unsupported(NotImplementedError):
    """No schedule that was asked for can run the problem.

    Attributes:
        reasons: schedule name -> sentences, why it refuses.
    """

    def __init__(self, problem: str, reasons: Mapping[str, Sequence[str]], nearest: str) -> None:
        self.reasons = {name: list(sentences) for name, sentences in reasons.items()}
        lines = [f"no schedule that was asked for runs this problem: {problem}"]
        lines += [f"  {name}: {sentence}" for name, sentences in self.reasons.items() for sentence in sentences]
        super().__init__("\n".join([*lines, f"  nearest: {nearest}"]))
