"""What `benchmarks/gpu.py` measures: problems as data. gpu_inputs.py draws their tensors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from onchip.bench.protocol import Workload, slug

TOKENS = 16384
WIDTH = 2048
"""Unless a case says otherwise it has this many tokens, and this product of heads and dim, as the papers of the field
do."""
LAYOUT = "dense (batch, length, heads, dim) seen as (batch, heads, length, dim)"
CONTIGUOUS = "dense (batch, heads, length, dim)"
PACKED = "packed (tokens, heads, dim)"
TIMINGS = {
    "eager": "torch.cuda.Event",
    "graph": "torch.cuda.Event around replays of a CUDA graph",
    "host": "time.perf_counter until the launches are queued",
}
"""How a case is timed, and what its record calls that."""
DTYPES = {"bfloat16": "", "float16": " fp16", "float32": " fp32"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Self-attention; its "backward" is the backward alone.

    Attributes:
        tokens, width: batch * length, and heads * dim; both give way to a batch or a head that would not be whole.
        dim_value: head dim of value, if not dim. heads_kv: heads of key and value, if not those of query.
        contiguous: tensors lie as (batch, heads, length, dim) instead of LAYOUT.
        window: keys before its own that a causal row sees. softcap: the cap. dropout: the share of weights removed.
        bias: scores have a bias (1, heads, length, length) that takes a gradient.
        deterministic: equal bits over repeats are asked for.
        flagged: the first keys score far above all others, so that a row's maximum is not where a walk from the
            diagonal or from the last key down begins (see gpu_inputs.draw).
        recorded: a forward's inputs take a gradient, so that the call keeps what a backward needs.
        sequences: lengths of packed sequences, which are then the batch; `length` is the longest.
        documents: lengths of the documents that one sequence is made of.
        timing: one of TIMINGS.
    """

    direction: str
    dim: int
    length: int
    causal: bool
    dtype: str = "bfloat16"
    tokens: int = TOKENS
    width: int = WIDTH
    dim_value: int | None = None
    heads_kv: int | None = None
    contiguous: bool = False
    window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0
    bias: bool = False
    deterministic: bool = False
    flagged: bool = False
    recorded: bool = False
    sequences: tuple[int, ...] = ()
    documents: tuple[int, ...] = ()
    timing: str = "eager"

    @property
    def batch(self) -> int:
        return len(self.sequences) or max(1, self.tokens // self.length)

    @property
    def heads(self) -> int:
        return max(1, self.width // self.dim)

    @property
    def features(self) -> dict[str, str]:
        """What is beyond plain self-attention, by the names that gpu_contenders.TAKES uses; in words."""
        found = {
            "grouped": f"h{self.heads}/{self.heads_kv}" if self.heads_kv else "",
            "window": f"window {self.window}" if self.window is not None else "",
            "softcap": f"softcap {self.softcap:g}" if self.softcap is not None else "",
            "dropout": f"dropout {self.dropout:g}" if self.dropout else "",
            "bias": "bias" if self.bias else "",
            "deterministic": "deterministic" if self.deterministic else "",
            "packed": f"{len(self.sequences)} sequences" if self.sequences else "",
            "documents": f"{len(self.documents)} documents" if self.documents else "",
        }
        return {name: words for name, words in found.items() if words}

    @property
    def name(self) -> str:
        dims = f"d{self.dim}" + (f"/{self.dim_value}" if self.dim_value else "")
        words = [self.direction, dims, f"n{self.length}", "causal" if self.causal else "full", self.dtype]
        words += self.features.values()
        words += ["flagged"] * self.flagged + ["contiguous"] * self.contiguous + ["recorded"] * self.recorded
        return " ".join([*words, *([] if self.timing == "eager" else [self.timing])])

    @property
    def suite(self) -> str:
        """What the name of a record's file would not tell otherwise, as the end of the suite's name."""
        said = {"grouped", "window", "packed", "documents"}
        words = [words for name, words in self.features.items() if name not in said]
        words += ["flagged"] * self.flagged + ["contiguous"] * self.contiguous + ["recorded"] * self.recorded
        words += [] if self.timing == "eager" else [self.timing]
        return slug(" ".join(words))

    @property
    def plain(self) -> Case:
        """The case that one with a burden is compared with: as many query heads, each with its own keys, and nothing
        removed, asked for or adverse."""
        return replace(self, heads_kv=None, dropout=0.0, deterministic=False, flagged=False)

    @property
    def what(self) -> Workload:
        mask, pairs = self._visible()
        return Workload.attention(
            batch=self.batch,
            heads_query=self.heads,
            heads_key=self.heads_kv,
            length_query=self.length,
            dim_query_key=self.dim,
            dim_value=self.dim_value,
            dtype=self.dtype,
            direction=self.direction,
            layout=f"{PACKED}, {self._extent()}" if self.sequences else CONTIGUOUS if self.contiguous else LAYOUT,
            causal=self.causal,
            mask=mask,
            visible_pairs=pairs,
        )

    def _extent(self) -> str:
        return f"{len(self.sequences)} sequences of {min(self.sequences)} to {max(self.sequences)}"

    def _visible(self) -> tuple[str | None, int | None]:
        """The mask in words and its pairs over the batch and the query heads, where Workload cannot count them."""
        repeats = self.batch * self.heads
        if self.window is not None:
            # The first rows see what there is before them, the others the whole window.
            width = min(self.window + 1, self.length)
            return f"causal window ({self.window}, 0)", repeats * (width * self.length - width * (width - 1) // 2)
        if lengths := self.sequences or self.documents:
            repeats = self.heads * (1 if self.sequences else self.batch)
            pairs = repeats * sum(length**2 for length in lengths) // (2 if self.causal else 1)
            words = ["causal"] * self.causal + [f"{len(self.documents)} documents"] * bool(self.documents)
            return ", ".join(words) or "none", pairs
        return None, None


def cases(directions: Sequence[str], dims: Sequence[int], lengths: Sequence[int], dtypes: Sequence[str]) -> list[Case]:
    """Every combination, each without a mask and causal."""
    return [
        Case(direction=direction, dim=dim, length=length, causal=causal, dtype=dtype)
        for dtype, direction, dim, length, causal in itertools.product(dtypes, directions, dims, lengths, (False, True))
    ]


def label(case: Case) -> str:
    """A case in few letters."""
    short = case.name.replace("forward", "fwd").replace("backward", "bwd")
    return short.replace(f" {case.dtype}", DTYPES[case.dtype])
