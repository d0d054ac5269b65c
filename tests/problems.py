"""The problems that the contract tests run: a fixed covering list and a hypothesis strategy over all flags together."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import strategies

from tests.describe import (
    Alibi,
    Bias,
    Blocks,
    Causal,
    Documents,
    Keys,
    Modify,
    Predicate,
    Sink,
    Softcap,
    TensorMask,
    Window,
)
from tests.machine import INTERPRETED, sized
from tests.oracle import Problem

SHORT = 33  # rows and columns where kernels are interpreted: some tiles of 16 or 32, and a tail
LONGEST, SHARED_BLOCK = sized((70, 128), (SHORT, 16))


@dataclass(frozen=True)
class Spec:
    """A problem as plain flags, so that it prints, hashes and shrinks. `build` makes its tensors."""

    lengths: tuple = sized(((100, 100),), ((25, 33),))  # (length_q, length_k) of each sequence
    heads: tuple = (2, 2)  # (heads_q, heads_kv)
    dims: tuple = (16, 16)  # (dim_qk, dim_v)
    layout: str = "dense"  # dense, padded, packed, or gapped: packed with lengths
    causal: bool = False
    window: tuple | None = None
    mask: str | None = None  # an expression over the names of MASKS
    score: tuple = ()  # names of SCORES
    bias: str = "bhqk"  # the dimensions along which the bias is not broadcast
    slopes: str = "h"  # h or bh
    scale: float | None = None
    dropout_p: float = 0.0
    view: str = "contiguous"  # contiguous, transposed, interleaved or stacked
    tail: int = 0  # rows behind every sequence (padded, gapped) or behind the last one (packed)
    seed: int = 0

    def shortened(self, longest):
        """The same features on few heads and sequences of at most `longest` rows and columns, with windows to fit."""
        group, heads_kv = self.heads[0] // self.heads[1], min(self.heads[1], 2)
        heads = (min(group, 3) * heads_kv, heads_kv)
        factor = -(-max((length for pair in self.lengths for length in pair), default=0) // longest)
        if factor <= 1:
            return replace(self, heads=heads)
        window = self.window and tuple(side if side is None else side // factor for side in self.window)
        lengths = tuple(tuple(-(-length // factor) for length in pair) for pair in self.lengths)
        return replace(self, lengths=lengths, heads=heads, window=window)

    def __str__(self):
        default = Spec()
        names = [name for name in self.__dataclass_fields__ if getattr(self, name) != getattr(default, name)]
        return ",".join(f"{name}={getattr(self, name)}" for name in names).replace(" ", "") or "default"


def checkers(b, h, i, j):
    return (i * 3 + j * 5 + h + b) % 4 != 0


def nearby(b, h, i, j):
    return (i - j).abs() < 20 + 10 * h


def wobble(s, b, h, i, j):
    b, h, i, j = (index.to(s.dtype) for index in (b, h, i, j))
    return s * (1 + 0.25 * torch.sin(0.1 * (i - j) + b)) + 0.5 * torch.cos(0.3 * h + 0.2 * j)


def relative(s, b, h, i, j, table):
    """A learned relative position table (heads, 2 * reach + 1), indexed by the clamped distance."""
    reach = table.shape[1] // 2
    return s + table[h, (i - j).clamp(-reach, reach) + reach]


def gate(s, b, h, i, j, gates):
    return s * torch.sigmoid(gates[h])


class Builder:
    """Makes the tensors of one Spec from one generator."""

    def __init__(self, spec, dtype):
        self.spec, self.dtype = spec, dtype
        self.generator = torch.Generator().manual_seed(spec.seed)
        self.batch = len(spec.lengths)
        self.longest_q = max((q for q, _ in spec.lengths), default=0)
        self.longest_k = max((k for _, k in spec.lengths), default=0)
        self.packed = spec.layout in ("packed", "gapped")
        if spec.layout in ("padded", "gapped"):
            self.longest_q, self.longest_k = self.longest_q + spec.tail, self.longest_k + spec.tail
        self.leaves = {}

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def integers(self, high, *shape):
        return torch.randint(0, high, shape, generator=self.generator)

    def coin(self, probability, *shape):
        return torch.rand(shape, generator=self.generator) < probability

    def input(self, heads, dim, side):
        """A query, key or value, with the strides that spec.view names."""
        view = self.spec.view
        if self.packed:
            return restride(self.normal(self.tokens(side), heads, dim), view, order=(1, 0, 2))
        side = (self.longest_q, self.longest_k)[side]
        return restride(self.normal(self.batch, heads, side, dim), view, order=(0, 2, 1, 3))

    def tokens(self, side):
        """How many rows a packed query (side 0) or key (side 1) has."""
        tails = self.batch if self.spec.layout == "gapped" else 1
        return sum(pair[side] for pair in self.spec.lengths) + self.spec.tail * tails

    def each_token(self, draw, side):
        """A per-token tensor: (batch, length), or (tokens,) when packed."""
        if self.packed:
            return draw(self.tokens(side))
        return draw(self.batch, (self.longest_q, self.longest_k)[side])

    def masks(self):
        heads = self.spec.heads[0]
        rows, columns = -(-self.longest_q // 32), -(-self.longest_k // 16)
        full = (self.batch, heads, self.longest_q, self.longest_k)
        return {
            "causal": lambda: Causal(),
            "top_left": lambda: Causal("top-left"),
            "diagonal": lambda: Causal(7),
            "diagonals": lambda: Causal(self.integers(40, self.batch) - 10),
            "window": lambda: Window(17, 5),
            "left": lambda: Window(9, None),
            "right": lambda: Window(None, 3, "top-left"),
            "windows": lambda: Window(30, 12, self.integers(20, self.batch)),
            "keys": lambda: Keys(self.each_token(lambda *shape: self.coin(0.8, *shape), 1)),
            "shared_keys": lambda: Keys(self.coin(0.8, self.tokens(1) if self.packed else self.longest_k)),
            "documents": lambda: Documents(
                self.each_token(lambda *shape: self.integers(3, *shape).sort(-1).values, 0),
                self.each_token(lambda *shape: self.integers(3, *shape).sort(-1).values, 1),
            ),
            "shuffled": lambda: Documents(
                self.each_token(lambda *shape: self.integers(3, *shape).int(), 0),
                self.each_token(lambda *shape: self.integers(3, *shape).int(), 1),
            ),
            "blocks": lambda: Blocks(self.coin(0.6, self.batch, heads, rows, columns), (32, 16)),
            "shared_blocks": lambda: Blocks(
                self.coin(0.6, -(-self.longest_q // SHARED_BLOCK), -(-self.longest_k // SHARED_BLOCK)), SHARED_BLOCK
            ),
            "tensor": lambda: TensorMask(self.coin(0.7, *full)),
            "rows": lambda: TensorMask(self.coin(0.9, self.batch, 1, self.longest_q, 1)),
            "bare": lambda: TensorMask(self.coin(0.5, self.longest_q, self.longest_k), bare=True),
            "checkers": lambda: Predicate(checkers),
            "nearby": lambda: Predicate(nearby),
        }

    def mask(self):
        if self.spec.mask is None:
            return None
        makers = self.masks()
        names = {name: makers[name]() for name in sorted(makers) if name in self.spec.mask.split()}
        return eval(self.spec.mask, {}, names)

    def scores(self):
        heads = self.spec.heads[0]
        exact = torch.float64 if self.dtype == torch.float64 else torch.float32
        terms = []
        for name in self.spec.score:
            if name == "softcap":
                terms.append(Softcap(1.5))
            elif name == "alibi":
                shape = (heads,) if self.spec.slopes == "h" else (self.batch, heads)
                self.leaves["slopes"] = self.normal(*shape).to(exact) * 0.1
                terms.append(Alibi())
            elif name == "bias":
                full = dict(zip("bhqk", (self.batch, heads, self.longest_q, self.longest_k), strict=True))
                shape = [size if letter in self.spec.bias else 1 for letter, size in full.items()]
                self.leaves["bias"] = self.normal(*shape)
                terms.append(Bias())
            elif name == "wobble":
                terms.append(Modify(wobble))
            elif name == "relative":
                self.leaves["table"] = self.normal(heads, 41).to(exact)
                terms.append(Modify(relative, ("table",)))
            elif name == "gate":
                self.leaves["gates"] = self.normal(heads).to(exact)
                terms.append(Modify(gate, ("gates",)))
            elif name == "sink":
                self.leaves["sink"] = self.normal(heads).to(exact)
                terms.append(Sink())
        return tuple(terms)

    def layout(self):
        lengths_q, lengths_k = ([pair[side] for pair in self.spec.lengths] for side in (0, 1))
        if self.spec.layout == "padded":
            return {"query_lengths": torch.tensor(lengths_q), "key_lengths": torch.tensor(lengths_k)}
        if self.spec.layout == "packed":
            return {"cu_query": cumulative(lengths_q), "cu_key": cumulative(lengths_k)}
        if self.spec.layout == "gapped":
            padded = {"query_lengths": torch.tensor(lengths_q), "key_lengths": torch.tensor(lengths_k)}
            lengths_q, lengths_k = ([length + self.spec.tail for length in side] for side in (lengths_q, lengths_k))
            return padded | {"cu_query": cumulative(lengths_q), "cu_key": cumulative(lengths_k)}
        return {}

    def build(self):
        spec = self.spec
        self.leaves["query"] = self.input(spec.heads[0], spec.dims[0], 0)
        self.leaves["key"] = self.input(spec.heads[1], spec.dims[0], 1)
        self.leaves["value"] = self.input(spec.heads[1], spec.dims[1], 1)
        mask, score = self.mask(), self.scores()
        return Problem(
            self.leaves,
            spec.causal,
            spec.window,
            mask,
            score,
            **self.layout(),
            scale=spec.scale,
            dropout_p=spec.dropout_p,
            dropout_seed=1234567890123 + spec.seed if spec.dropout_p else None,
        )


def cumulative(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def restride(plain, view, order):
    """The same values under other strides: heads and length swapped, every second column, a slice of a wider buffer."""
    if view == "transposed":
        return plain.permute(order).contiguous().permute(order)
    if view == "interleaved":
        return torch.stack([plain, plain + 1], dim=-1).flatten(-2)[..., ::2]
    if view == "stacked":
        return torch.stack([plain + 1, plain, plain - 1], dim=-2)[..., 1, :]
    return plain


def build(spec, dtype=torch.float64):
    return Builder(spec, dtype).build()


UNEQUAL = {
    "square": ((100, 100), (100, 100)),
    "wide": ((63, 129), (63, 129)),
    "tall": ((129, 63), (129, 63)),
}
RAGGED = sized(
    ((100, 129), (0, 63), (1, 1), (63, 0), (129, 100)),
    ((25, 33), (0, 16), (1, 1), (16, 0), (33, 25)),
)
SCORES = ("softcap", "alibi", "bias", "wobble", "relative", "gate", "sink")
MASKS = tuple(Builder(Spec(), torch.float32).masks())

SINGLE_FEATURES = [
    Spec(),
    Spec(causal=True),
    Spec(window=(10, 3)),
    Spec(scale=0.3),
    Spec(dropout_p=0.25),
    *[Spec(mask=name, lengths=UNEQUAL["wide"]) for name in MASKS],
    *[Spec(score=(name,), lengths=UNEQUAL["tall"]) for name in SCORES],
]

SIZES = [
    *[Spec(lengths=((n, n),)) for n in (0, 1, 63, 100, 129, 257)],
    *[Spec(lengths=((q, k),), causal=True) for q, k in ((1, 257), (257, 1), (0, 63), (63, 0), (100, 129), (129, 100))],
    *[Spec(lengths=((63, 100),), dims=(dim, dim)) for dim in (1, 16, 40, 64, 80, 96, 256)],
    *[Spec(lengths=((63, 100),), dims=dims) for dims in ((16, 40), (96, 1), (1, 96), (192, 128))],
    *[Spec(lengths=((63, 100),) * 2, heads=heads, causal=True) for heads in ((4, 2), (6, 1), (8, 8))],
    Spec(lengths=()),
    Spec(lengths=(), layout="packed"),
    Spec(lengths=((0, 0), (0, 0)), layout="packed"),
    Spec(lengths=((100, 129),), layout="packed", tail=7),
]

PAIRS = [
    Spec(causal=True, window=(20, None), lengths=UNEQUAL["tall"]),
    Spec(causal=True, mask="documents", lengths=RAGGED, layout="packed", tail=3),
    Spec(causal=True, mask="keys", lengths=RAGGED, layout="padded", tail=5),
    Spec(causal=True, score=("alibi",), slopes="bh", lengths=RAGGED, layout="packed"),
    Spec(causal=True, score=("sink",), lengths=UNEQUAL["tall"], heads=(4, 2)),
    Spec(causal=True, score=("bias",), bias="hqk", heads=(4, 2), lengths=UNEQUAL["wide"]),
    Spec(causal=True, score=("relative",), lengths=RAGGED, layout="padded"),
    Spec(causal=True, dropout_p=0.25, heads=(6, 1), lengths=UNEQUAL["wide"]),
    Spec(window=(12, 4), score=("softcap", "sink"), lengths=RAGGED, layout="packed", heads=(4, 2)),
    Spec(window=(None, 0), mask="tensor", heads=(4, 2), lengths=UNEQUAL["square"]),
    Spec(window=(40, None), dropout_p=0.5, layout="padded", lengths=RAGGED, tail=2),
    Spec(mask="keys & documents", lengths=RAGGED, layout="padded"),
    Spec(mask="documents | window", lengths=RAGGED, layout="packed"),
    Spec(mask="documents | keys", causal=True, lengths=RAGGED, layout="gapped", tail=6, score=("sink", "bias")),
    Spec(window=(30, 10), lengths=RAGGED, layout="gapped", tail=3, dropout_p=0.25, heads=(4, 2)),
    Spec(mask="blocks & ~ tensor", lengths=UNEQUAL["wide"], heads=(4, 2)),
    Spec(mask="~ blocks | causal", lengths=RAGGED, layout="padded"),
    Spec(mask="shared_blocks & checkers", lengths=((257, 300),)),
    Spec(mask="~ ( documents & top_left )", lengths=RAGGED, layout="packed"),
    Spec(mask="nearby & ~ keys", score=("sink",), lengths=RAGGED, layout="packed"),
    Spec(mask="checkers", score=("wobble", "bias"), lengths=RAGGED, layout="packed", bias="hk"),
    Spec(mask="tensor", score=("bias",), lengths=RAGGED, layout="padded", bias="bk", tail=4),
    Spec(mask="rows", dropout_p=0.25, score=("bias", "sink"), lengths=UNEQUAL["square"]),
    Spec(
        score=("softcap", "alibi", "bias", "relative", "sink"),
        causal=True,
        heads=(4, 2),
        lengths=RAGGED,
        layout="packed",
    ),
    Spec(score=("sink", "gate", "bias", "alibi", "softcap"), window=(30, 8), lengths=UNEQUAL["wide"], bias="bh"),
    Spec(score=("wobble", "gate"), dropout_p=0.25, lengths=RAGGED, layout="packed", dims=(16, 40)),
    Spec(score=("softcap",), scale=2.0, heads=(6, 1), dims=(40, 16), lengths=UNEQUAL["square"]),
    Spec(view="transposed", causal=True, heads=(4, 2)),
    Spec(view="interleaved", layout="packed", lengths=RAGGED, mask="documents"),
    Spec(view="stacked", layout="padded", lengths=RAGGED, score=("alibi",)),
]

# Longer than any schedule's tile, so that results are merged over pieces, and pieces are skipped or whole.
LONG_LENGTHS = ((300, 1100),)
LONG_RAGGED = ((290, 1030), (3, 700), (700, 3))
LONG = [
    Spec(LONG_LENGTHS, heads=(12, 12)),
    Spec(LONG_LENGTHS, heads=(16, 1), causal=True),
    Spec(((1100, 300),), causal=True, score=("sink",)),
    Spec(LONG_LENGTHS, window=(200, 30), heads=(4, 2)),
    Spec(LONG_LENGTHS, window=(None, 20), score=("softcap", "alibi"), slopes="bh"),
    Spec(LONG_LENGTHS * 2, mask="diagonals & windows"),
    Spec(LONG_LENGTHS * 2, mask="documents", causal=True, heads=(4, 2)),
    Spec(LONG_LENGTHS, mask="shuffled | top_left"),
    Spec(LONG_LENGTHS * 2, mask="shared_blocks & keys", heads=(4, 2)),
    Spec(LONG_LENGTHS * 2, mask="~ ( blocks | left )", score=("bias", "sink"), bias="hk"),
    Spec(LONG_LENGTHS, mask="tensor", score=("bias",), causal=True),
    Spec(LONG_LENGTHS, mask="nearby | checkers & right", score=("wobble", "gate")),
    Spec(LONG_LENGTHS, dropout_p=0.25, heads=(4, 2), score=("relative", "sink")),
    Spec(LONG_RAGGED, layout="padded", causal=True, tail=9, score=("bias",), bias="bhqk", heads=(4, 2)),
    Spec(LONG_RAGGED, layout="packed", window=(400, 0), tail=9, dropout_p=0.1),
    Spec(LONG_RAGGED, layout="packed", mask="documents & causal", score=("alibi", "relative"), view="transposed"),
    Spec(LONG_RAGGED, layout="gapped", mask="keys | blocks", tail=9, score=("softcap",), heads=(4, 2)),
]

COVERING = SINGLE_FEATURES + SIZES + PAIRS


SMOKE = frozenset(SINGLE_FEATURES + PAIRS[::3])


def fitted(specs):
    """The specs, or where kernels are interpreted those without functions of the user, short and each once."""
    if not INTERPRETED:
        return specs
    functions = ("checkers", "nearby", "wobble", "relative", "gate")
    plain = [spec for spec in specs if not any(name in f"{spec.mask} {spec.score}" for name in functions)]
    return list(dict.fromkeys(spec.shortened(SHORT) for spec in plain))


def named(specs, smoke=frozenset()):
    """Keywords of pytest.mark.parametrize for a list of Specs, with readable test names; those in `smoke` marked so."""
    values = [pytest.param(spec, id=str(spec), marks=[pytest.mark.smoke] * (spec in smoke)) for spec in fitted(specs)]
    return {"argnames": "spec", "argvalues": values}


@strategies.composite
def specs(draw, longest=LONGEST):
    """Any Spec: every flag drawn together."""
    length = strategies.integers(0, longest)
    heads_kv = draw(strategies.sampled_from((1, 2)))
    layout = draw(strategies.sampled_from(("dense", "padded", "packed", "gapped")))
    if layout == "dense":
        lengths = (draw(strategies.tuples(length, length)),) * draw(strategies.integers(1, 2))
    else:
        lengths = tuple(draw(strategies.lists(strategies.tuples(length, length), min_size=1, max_size=4)))
    dim = strategies.sampled_from((1, 4, 8, 24))
    side = strategies.one_of(strategies.none(), strategies.integers(0, 40))
    return Spec(
        lengths=lengths,
        heads=(heads_kv * draw(strategies.sampled_from((1, 2, 3))), heads_kv),
        dims=(draw(dim), draw(dim)),
        layout=layout,
        causal=draw(strategies.booleans()),
        window=draw(strategies.one_of(strategies.none(), strategies.tuples(side, side))),
        mask=draw(strategies.one_of(strategies.none(), mask_expressions())),
        score=tuple(draw(strategies.permutations(SCORES)))[: draw(strategies.integers(0, len(SCORES)))],
        bias="".join(letter for letter in "bhqk" if draw(strategies.booleans())),
        slopes=draw(strategies.sampled_from(("h", "bh"))),
        scale=draw(strategies.sampled_from((None, 0.0, -0.5, 1.0))),
        dropout_p=draw(strategies.sampled_from((0.0, 0.25, 0.1))),
        view=draw(strategies.sampled_from(("contiguous", "transposed", "interleaved", "stacked"))),
        tail=draw(strategies.sampled_from((0, 0, 5))),
        seed=draw(strategies.integers(0, 1000)),
    )


def mask_expressions():
    names = strategies.sampled_from([name for name in MASKS if name != "bare"])

    def grow(inner):
        both = strategies.tuples(inner, strategies.sampled_from("&|"), inner)
        return strategies.one_of(
            both.map(lambda parts: "( {} {} {} )".format(*parts)), inner.map(lambda mask: f"~ {mask}")
        )

    return strategies.recursive(names, grow, max_leaves=4)
