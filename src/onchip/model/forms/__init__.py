"""Closed forms of what the loop nests of the same names in `onchip.model.loops` cost. Whole numbers, tails included.

Every function here is `(shape, blocks) -> Cost`. `n`, `m`, `d` and `dv` are the lengths and head dims of `shape`; `r`
and `c` are the rows and columns of the largest block. `peak_elements` is exact where no length is 0, and not too small
elsewhere.
"""

from onchip.model.forms import flash1, flash2, rabe_staats, saved_weights, standard

__all__ = ["flash1", "flash2", "rabe_staats", "saved_weights", "standard"]
