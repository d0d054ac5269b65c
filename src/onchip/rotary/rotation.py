"""One rotation as a value: which positions, which angles, and how pairs lie in a row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

ARGUMENTS = (
    "Tensor? positions, Tensor? offsets, Tensor? cu_seqlens, Tensor? frequencies, Tensor? cos, Tensor? sin,"
    " SymInt offset, SymInt step, SymInt dim, float base, float scale, bool interleaved, bool inverse, str schedule"
)
"""The fields of a Rotation as an operator takes them."""


@dataclass(frozen=True, eq=False)
class Rotation:
    """The rotation of tensors (batch, heads, length, head_dim), or (tokens, heads, head_dim) if packed.

    Attributes:
        positions: int (batch or 1, length); None counts tokens, from each sequence's start if there are `cu_seqlens`.
        offsets: int (sequences,), added to the positions of each sequence.
        cu_seqlens: int (sequences + 1,), where the sequences of a packed batch start.
        frequencies: (dim / 2,), radians a position; None means base ** (-2 i / dim).
        cos, sin: (rows, dim / 2), read at the positions instead of computing angles.
        offset: added to every position. step: added once more for each sequence of the batch before.
        dim: how many leading numbers of a row are rotated.
        scale: factor of cosines and sines. inverse: rotate by the negative angle.
        interleaved: pairs are neighbours; otherwise number i pairs with i + dim / 2.
        schedule: "torch", "triton", or "" to choose.
    """

    positions: Tensor | None
    offsets: Tensor | None
    cu_seqlens: Tensor | None
    frequencies: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    offset: int
    step: int
    dim: int
    base: float
    scale: float
    interleaved: bool
    inverse: bool
    schedule: str

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.positions, self.offsets, self.cu_seqlens, self.frequencies, self.cos, self.sin

    @property
    def values(self) -> tuple[Any, ...]:
        """The fields behind `tensors`."""
        return (
            *(self.offset, self.step, self.dim, self.base, self.scale),
            *(self.interleaved, self.inverse, self.schedule),
        )

    @property
    def transposed(self) -> Rotation:
        """The transpose of the linear map: the backward."""
        return replace(self, inverse=not self.inverse)

    def positions_of(self, batch: int, length: int, device: torch.device) -> Tensor:
        """Positions, int64 (batch or 1, length)."""
        token = torch.arange(length, device=device)
        sequence: Tensor | None = None
        if self.cu_seqlens is not None:
            starts = self.cu_seqlens.to(torch.int64)
            sequence = (torch.searchsorted(starts, token, right=True) - 1).clamp(min=0)
        if self.positions is not None:
            found = self.positions.to(torch.int64)
        elif self.cu_seqlens is not None:
            found = (token - starts[sequence])[None]
        elif self.step != 0:
            found = token + self.step * torch.arange(batch, device=device)[:, None]
        else:
            found = token[None]
        if self.offsets is not None:
            offsets = self.offsets.to(torch.int64)
            # what lies behind the last sequence has no offset
            found = found + (
                offsets[:, None] if sequence is None else torch.nn.functional.pad(offsets, (0, 1))[sequence]
            )
        return found + self.offset

    def turns_of(self, batch: int, length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines with their scale and sign, (batch or 1, length, dim / 2).

        Angles are products in float64, so that at any position below 2**31 they are right to 1e-6 and relative angles
        do not depend on where a sequence starts.
        """
        positions = self.positions_of(batch, length, device)
        if self.cos is not None:
            assert self.sin is not None
            # on a GPU nothing reads the positions before: what lies outside of the tables takes their ends
            row = positions.clamp(0, self.cos.shape[0] - 1)
            cos, sin = self.cos[row].to(dtype), self.sin[row].to(dtype)
        else:
            angle = positions.to(torch.float64)[..., None] * self._frequencies(device)
            cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        return cos * self.scale, sin * (-self.scale if self.inverse else self.scale)

    def _frequencies(self, device: torch.device) -> Tensor:
        if self.frequencies is not None:
            return self.frequencies.to(torch.float64)
        pair = torch.arange(self.dim // 2, dtype=torch.float64, device=device)
        return self.base ** (pair * (-2 / self.dim))

    def check_values(self, batch: int, length: int) -> None:
        """Validate offsets and positions, which reads them.

        Raises:
            ValueError: cu_seqlens are no offsets of so many tokens, or a position lies outside of the tables.
        """
        if self.cu_seqlens is not None:
            starts = self.cu_seqlens.tolist()
            if starts[0] != 0 or starts[-1] > length or any(a > b for a, b in zip(starts, starts[1:], strict=False)):
                raise ValueError(
                    f"cu_seqlens must rise from 0 to at most the number of tokens, {length}, got "
                    f"{', '.join(map(str, starts[:8]))}{', ...' if len(starts) > 8 else ''}"
                )
        if self.cos is not None and batch * length > 0:
            positions = self.positions_of(batch, length, self.cos.device)
            least, most = positions.min().item(), positions.max().item()
            rows = self.cos.shape[0]
            if least < 0 or most >= rows:
                raise ValueError(f"positions must lie inside the tables' {rows} rows, got {least} to {most}")
