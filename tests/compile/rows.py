"""What is compiled: problems whose kernels cover every feature, and the whole product of what tiles are chosen by."""

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from tests.compile import aot
from tests.problems import RAGGED, Spec

HEAD_DIMS = ((16, 16), (40, 40), (64, 64), (80, 80), (96, 96), (128, 128), (192, 192), (192, 128), (256, 256))
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# How the rows of the table of tiles tell problems apart, where "changed" is two of them.
KINDS = {
    "plain": Spec(),
    "band": Spec(((1100, 1100),), causal=True),
    "short": Spec(causal=True),
    "masked": Spec(causal=True, mask="documents", lengths=((100, 100),) * 2),
    "scored": Spec(causal=True, score=("softcap", "alibi", "bias")),
    "dropped": Spec(causal=True, dropout_p=0.25),
    "few": Spec(causal=True, heads=(8, 2), lengths=((7, 100),)),
}


TWO = ((100, 100),) * 2

# As many as there are head dims, so that a rotation shows every kernel every one of them at every target.
FEATURES = {
    "causal": Spec(((1100, 1100),), causal=True),
    "window-sink": Spec(window=(20, 5), score=("sink",)),
    "diagonals-padded": Spec(TWO, mask="diagonals", layout="padded", tail=3),
    "documents": Spec(TWO, mask="documents", causal=True, heads=(4, 2)),
    "packed-softcap": Spec(RAGGED, layout="packed", causal=True, score=("softcap", "sink"), heads=(4, 2)),
    "alibi": Spec(score=("alibi",), causal=True),
    "bias-dropout": Spec(score=("bias",), dropout_p=0.25),
    "few": Spec(((7, 100),), heads=(8, 2), causal=True),
    "irregular-tensor": Spec(mask="tensor", view="interleaved"),
}
# Where a step has a gradient of its own: over pairs, over heads, and over what a bias does not broadcast along.
WITH_GRADIENTS = {
    "alibi": FEATURES["alibi"],
    "bias-dropout": FEATURES["bias-dropout"],
    "bias-rows": Spec(TWO, score=("softcap", "bias"), bias="hq", layout="padded", view="interleaved"),
    "packed-alibi": Spec(RAGGED, layout="packed", window=(20, 5), score=("alibi",), slopes="bh", heads=(4, 2)),
    "bias-columns": Spec(TWO, score=("bias",), bias="bk", mask="documents"),
}
OF_DELTA = {
    "causal": FEATURES["causal"],
    "packed": Spec(RAGGED, layout="packed"),
    "irregular": Spec(view="interleaved"),
}


@dataclass(frozen=True)
class Row:
    """One compilation: the kernel of this name that a problem launches, the last one of it if there are several."""

    kernel: str
    dims: tuple
    dtype: torch.dtype
    target: str
    feature: str
    spec: Spec

    @property
    def dim(self):
        return "x".join(map(str, self.dims)) if self.dims[0] != self.dims[1] else str(self.dims[0])

    @property
    def fields(self):
        """What tells a row from others, as text."""
        return self.kernel, self.dim, str(self.dtype).removeprefix("torch."), self.target, self.feature

    def __str__(self):
        return "-".join(self.fields)

    def launches(self):
        """Of the kernel: one, or where keys may be hidden one that heeds it and one that does not."""
        every = _launches(replace(self.spec, dims=self.dims), self.dtype, self.target)
        return sorted(
            (launch for launch in every if launch.name == self.kernel),
            key=lambda launch: not launch.keywords.get("CAREFUL"),
        )

    def launch(self):
        return self.launches()[-1]

    def compile(self):
        return [aot.compile_launch(launch, self.target) for launch in self.launches()]


@lru_cache(maxsize=16)
def _launches(spec, dtype, target):
    return aot.launches_of(spec, dtype, target)


def product():
    """Kernels by head dims, dtypes, targets and kinds. Masks and scores do not reach delta, nor is a bias few rows."""
    return [
        Row(kernel, dims, dtype, target, kind, spec)
        for dims in HEAD_DIMS
        for dtype in DTYPES
        for target in ("sm_80", "sm_90", "gfx942")
        for kind, spec in KINDS.items()
        for kernel in ("forward", "keys", "queries", "gradient", "delta")
        if {"gradient": kind == "scored", "delta": kind == "plain", "forward": True}.get(kernel, kind != "short")
    ]


def covering():
    """Every kernel for every head dim and target, where features and dtypes rotate; and the smallest shared memory."""
    rows = []
    for shift, target in enumerate(("sm_80", "sm_90", "gfx942")):
        for order, (kernel, features) in enumerate(
            {
                "forward": FEATURES,
                "keys": FEATURES,
                "queries": FEATURES,
                "gradient": WITH_GRADIENTS,
                "delta": OF_DELTA,
            }.items()
        ):
            names = list(features)
            for place, dims in enumerate(HEAD_DIMS):
                name = names[(place + 3 * shift + 2 * order) % len(names)]
                dtype = DTYPES[(place + shift + order) % len(DTYPES)]
                rows.append(Row(kernel, dims, dtype, target, name, features[name]))
    for kernel in ("forward", "keys", "queries"):
        for dims in ((64, 64), (128, 128), (256, 256)):
            for dtype in (torch.float16, torch.float32):
                rows.append(Row(kernel, dims, dtype, "sm_86", "documents", FEATURES["documents"]))
    return rows
