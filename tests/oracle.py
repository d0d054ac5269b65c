"""Attention as the contract states it: one dense sequence at a time, in plain torch. Shares no code with onchip."""

from dataclasses import dataclass, replace

import torch

from tests import philox_reference
from tests.describe import Causal, Mask, Sequence, Sink, Window
from tests.machine import INTERPRETED

NEGATIVE_INFINITY = float("-inf")


@dataclass(frozen=True)
class Problem:
    """What to compute. `leaves` holds every tensor that may need a gradient; scores name theirs."""

    leaves: dict[str, torch.Tensor]
    causal: bool = False
    window: tuple | None = None
    mask: Mask | None = None
    score: tuple = ()
    query_lengths: torch.Tensor | None = None
    key_lengths: torch.Tensor | None = None
    cu_query: torch.Tensor | None = None
    cu_key: torch.Tensor | None = None
    scale: float | None = None
    dropout_p: float = 0.0
    dropout_seed: int | None = None

    @property
    def packed(self):
        return self.cu_query is not None

    @property
    def dtype(self):
        return self.leaves["query"].dtype

    @property
    def factor(self):
        return self.leaves["query"].shape[-1] ** -0.5 if self.scale is None else self.scale

    def rows(self, sequence):
        """How many rows of the output stand from the start of a sequence to that of the next."""
        query = self.leaves["query"]
        if not self.packed:
            return query.shape[2]
        last = sequence.number == sequence.batch - 1
        return (query.shape[0] if last else int(self.cu_query[sequence.number + 1])) - sequence.start_q

    def sequences(self):
        query, key = self.leaves["query"], self.leaves["key"]
        if self.packed:
            starts_q = self.cu_query.tolist()
            starts_k = starts_q if self.cu_key is None else self.cu_key.tolist()
            count = len(starts_q) - 1
            for n in range(count):
                rows, columns = starts_q[n + 1] - starts_q[n], starts_k[n + 1] - starts_k[n]
                rows = rows if self.query_lengths is None else int(self.query_lengths[n])
                columns = columns if self.key_lengths is None else int(self.key_lengths[n])
                yield Sequence(n, count, query.shape[1], rows, columns, starts_q[n], starts_k[n], packed=True)
            return
        batch, heads, length_q, _ = query.shape
        for n in range(batch):
            rows = length_q if self.query_lengths is None else int(self.query_lengths[n])
            columns = key.shape[2] if self.key_lengths is None else int(self.key_lengths[n])
            yield Sequence(n, batch, heads, rows, columns)

    def visible(self, sequence):
        """Bool (heads, rows, columns): the pairs that causal, window and mask keep together."""
        keep = torch.ones(sequence.heads, sequence.length_q, sequence.length_k, dtype=torch.bool)
        if self.causal:
            keep &= Causal().keep(sequence)
        if self.window is not None:
            keep &= Window(*self.window).keep(sequence)
        if self.mask is not None:
            keep &= self.mask.keep(sequence)
        return keep

    def with_leaves(self, **leaves):
        return replace(self, leaves=self.leaves | leaves)

    def to(self, dtype):
        return replace(self, leaves={name: leaf.detach().to(dtype) for name, leaf in self.leaves.items()})


@dataclass
class Result:
    out: torch.Tensor
    lse: torch.Tensor
    gradients: dict[str, torch.Tensor]

    def items(self):
        yield "out", self.out
        yield "lse", self.lse
        yield from (("d_" + name, gradient) for name, gradient in self.gradients.items())


def scores(problem, sequence, query, key):
    """Scores with the sink as last column, (heads, rows, columns + 1), minus infinity where hidden."""
    key = key.repeat_interleave(query.shape[0] // max(key.shape[0], 1), 0)
    s = (query @ key.transpose(1, 2)) * problem.factor  # (heads, rows, columns)
    sink = query.new_full((query.shape[0],), NEGATIVE_INFINITY)
    for term in sorted(problem.score, key=lambda term: term.rank):
        leaves = [problem.leaves[name] for name in term.leaves]
        if isinstance(term, Sink):
            sink = leaves[0]
        else:
            s = term.apply(s, sequence, *leaves).to(query.dtype)
    s = s.masked_fill(~problem.visible(sequence), NEGATIVE_INFINITY)
    return torch.cat([s, sink[:, None, None].expand(-1, s.shape[1], 1)], dim=2)


def softmax(s):
    """Weights without the sink's column, and LSE; 0 and minus infinity for rows without any finite score."""
    empty = (s == NEGATIVE_INFINITY).all(dim=2, keepdim=True)
    filled = torch.where(empty, torch.zeros_like(s), s)
    weights = torch.where(empty, torch.zeros_like(s), torch.softmax(filled, dim=2))[..., :-1]
    lse = torch.where(empty, torch.full_like(s[..., :1], NEGATIVE_INFINITY), filled.logsumexp(2, keepdim=True))
    return weights, lse[..., 0]


def dropped(problem, sequence, weights):
    """What dropout makes of the weights."""
    if not problem.dropout_p:
        return weights
    keep = philox_reference.keep(problem.dropout_p, problem.dropout_seed, sequence.number, *weights.shape)
    kept_scale = 1 / (1 - philox_reference.threshold(problem.dropout_p) / 65536)
    return torch.where(torch.from_numpy(keep), weights * kept_scale, torch.zeros_like(weights))


def attend(problem, sequence, query, key, value):
    """Out (heads, rows, dim_v) and LSE (heads, rows) of one sequence; query (heads, rows, dim), key (heads_kv, ...)."""
    weights, lse = softmax(scores(problem, sequence, query, key))
    value = value.repeat_interleave(query.shape[0] // max(value.shape[0], 1), 0)
    return dropped(problem, sequence, weights) @ value, lse


def forward(problem):
    """Out and LSE in the layout of the contract. Rows that do not exist have output 0 and LSE minus infinity."""
    query, key, value = (problem.leaves[name] for name in ("query", "key", "value"))
    dim_v = value.shape[-1]
    outs, lses = [], []
    for sequence in problem.sequences():
        parts = (rows_of(query, problem, sequence), *(rows_of(leaf, problem, sequence, "key") for leaf in (key, value)))
        out, lse = attend(problem, sequence, *parts)
        tail = problem.rows(sequence) - sequence.length_q
        outs.append(torch.cat([out, out.new_zeros(out.shape[0], tail, dim_v)], dim=1))
        lses.append(torch.cat([lse, lse.new_full((lse.shape[0], tail), NEGATIVE_INFINITY)], dim=1))
    if problem.packed:
        nothing = query.new_zeros(query.shape[1], 0, dim_v)
        return torch.cat([nothing, *outs], dim=1).transpose(0, 1), torch.cat([nothing[..., 0], *lses], dim=1)
    if not outs:
        return query.new_zeros(*query.shape[:3], dim_v), query.new_zeros(query.shape[:3])
    return torch.stack(outs), torch.stack(lses)


def rows_of(tensor, problem, sequence, side="query"):
    """The existing rows (heads, rows, dim) of one sequence of a query or output, or of a key or value."""
    start, length = sequence.start_q, sequence.length_q
    if side == "key":
        start, length = sequence.start_k, sequence.length_k
    if problem.packed:
        return tensor[start : start + length].transpose(0, 1)
    return tensor[sequence.number, :, :length]


def cotangents(problem, seed=1):
    """The incoming gradients of out (working dtype) and LSE (float32, or float64) that every comparison uses."""
    query, value = problem.leaves["query"], problem.leaves["value"]
    generator = torch.Generator().manual_seed(seed)
    d_out = torch.randn(*query.shape[:-1], value.shape[-1], generator=generator, dtype=torch.float64)
    shape = query.shape[:2][::-1] if problem.packed else query.shape[:3]
    d_lse = torch.randn(shape, generator=generator, dtype=torch.float64)
    exact = torch.float64 if problem.dtype == torch.float64 else torch.float32
    return d_out.to(problem.dtype), d_lse.to(exact)


def evaluate(problem, dtype, d_out, d_lse):
    """Out, LSE and the gradient of every leaf, computed densely in `dtype`."""
    cast = problem.to(dtype)
    leaves = {name: leaf.requires_grad_() for name, leaf in cast.leaves.items()}
    out, lse = forward(cast)
    incoming = (d_out.to(dtype), d_lse.to(dtype))
    found = [None] * len(leaves)
    if out.requires_grad:  # it does not if there is no sequence at all
        found = torch.autograd.grad((out, lse), list(leaves.values()), incoming, allow_unused=True)
    gradients = {
        name: torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), found, strict=True)
    }
    return Result(out.detach(), lse.detach(), gradients)


def reference(problem, d_out, d_lse):
    """The dense float64 result on the same rounded inputs."""
    return evaluate(problem, torch.float64, d_out, d_lse)


def standard(problem, d_out, d_lse):
    """The eager matmul-softmax-matmul in the working dtype: the error that clause 12 measures against."""
    return evaluate(problem, problem.dtype, d_out, d_lse)


def largest(tensor):
    finite = tensor[tensor.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def term_sizes(problem, d_out):
    """How large the terms are that each result is a sum of, where they may cancel: by name, as in `Result.items`.

    out sums weight * |V|, dV sums weight * |dO|. The gradient of a score is weight * (dP - delta), delta being the mean
    of dP in its row: with one visible key it is 0, the difference of two dot products, whose terms are |dO| . |V|.
    Biases, slopes and captured tensors add up many rows, whose errors grow like a random walk.
    """
    exact = problem.to(torch.float64)
    query, key, value = (exact.leaves[name] for name in ("query", "key", "value"))
    sizes = {"out": 0.0, "d_value": 0.0}
    row, rows, distance = 0.0, 0, 0
    for sequence in exact.sequences():
        q, d = (rows_of(tensor, exact, sequence) for tensor in (query, d_out.double()))
        k, v = (rows_of(tensor, exact, sequence, "key") for tensor in (key, value))
        weights = dropped(exact, sequence, softmax(scores(exact, sequence, q, k))[0])
        d, v = d.abs(), v.abs().repeat_interleave(q.shape[0] // max(v.shape[0], 1), 0)
        sizes["out"] = max(sizes["out"], largest(weights @ v))
        sizes["d_value"] = max(sizes["d_value"], largest(weights.transpose(1, 2) @ d))
        row = max(row, largest((weights * (d @ v.transpose(1, 2))).sum(-1)))
        rows += sequence.heads * sequence.length_q
        distance = max(distance, sequence.length_q, sequence.length_k)
    along = {name: largest(other) * abs(problem.factor) for name, other in (("query", key), ("key", query))}
    along |= {"slopes": distance * rows**0.5}
    return {"d_" + name: row * along.get(name, rows**0.5) for name in exact.leaves} | sizes


def slack(problem, ref, d_out):
    """What rounding adds to clause 12, whoever computes: three things that its bound does not see.

    The terms of a sum round by eps, however small the sum (`term_sizes`). The exponential of a vector library errs by
    a unit of float32, where that of the standard computation may happen to be exact on few scores. And a backward that
    stores only the LSE, as float32 rounds it, recomputes every weight with a relative error of half the spacing of that
    number. Triton's interpreter adds as much again: it rounds a scaled score before the LSE is subtracted, which a GPU
    does at once.
    """
    eps = 1e-12 if problem.dtype == torch.float64 else torch.finfo(problem.dtype).eps
    sizes = term_sizes(problem, d_out)
    slacks = {name: eps * size for name, size in sizes.items()}
    if problem.dtype != torch.float64:
        for name in ("out", "d_value"):
            slacks[name] += torch.finfo(torch.float32).eps * sizes[name]
        weight = torch.finfo(torch.float32).eps / 2 * largest(ref.lse) * (2 if INTERPRETED else 1)
        for name, gradient in ref.gradients.items():
            slacks["d_" + name] += weight * largest(gradient)
    return slacks


def assert_within_contract(name, x, ref, std, dtype, slack=0.0):
    """Clause 12 for one tensor. Infinities and NaN must stand in the same places with the same sign."""
    assert x.shape == ref.shape, f"{name}: shape {tuple(x.shape)}, expected {tuple(ref.shape)}"
    x = x.detach().double()
    finite = ref.isfinite()
    wrong = int((x.isfinite() != finite).sum())
    assert not wrong, f"{name}: {wrong} entries differ in finiteness"
    torch.testing.assert_close(x[~finite], ref[~finite], rtol=0, atol=0, equal_nan=True)
    if dtype == torch.float64:
        bound = 1e-12 * largest(ref)
    else:
        assert torch.equal(std.isfinite(), finite), f"{name}: the standard computation overflows, so it bounds nothing"
        bound = 2 * largest((std.double() - ref)[finite]) + torch.finfo(dtype).eps * largest(ref)
    error, size = largest((x - ref)[finite]), largest(ref)
    assert error <= bound + slack, f"{name}: error {error:.3e} is above {bound:.3e} + {slack:.3e} (largest {size:.3e})"


def assert_all_within_contract(got, problem, d_out, d_lse):
    """Clause 12 for out, LSE and every gradient of a result, which may hold none."""
    ref = reference(problem, d_out, d_lse)
    std = ref if problem.dtype == torch.float64 else standard(problem, d_out, d_lse)
    slacks = slack(problem, ref, d_out)
    assert got.gradients.keys() in (ref.gradients.keys(), set())
    for (name, x), (_, expected), (_, plain) in zip(got.items(), ref.items(), std.items(), strict=bool(got.gradients)):
        assert_within_contract(name, x, expected, plain, problem.dtype, slacks.get(name, 0.0))
