"""What schedules say that their kernels move and compute, held against the kernels and against plain enumeration."""

import bisect
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch
from hypothesis import example, given, settings, strategies
from triton import jit, language

import onchip
from onchip import dispatch, masks, scores
from onchip.attention import _bind
from onchip.gpu.parts import find_slot
from onchip.masks import Band
from onchip.model.eager import Recorder
from onchip.schedules import dense, hopper, tiled, triton
from onchip.schedules.triton.launch import Call
from tests import harness
from tests.machine import INTERPRETED
from tests.problems import COVERING, Spec, build, fitted, specs

FUNCTIONS = ("checkers", "nearby", "wobble", "relative", "gate")
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter: see test_in_the_interpreter")
compiled = pytest.mark.skipif(INTERPRETED, reason="does not run kernels")


def bound(spec, schedule, dtype=torch.float32):
    """Query, key and value, and the problem of a call."""
    described = build(spec, dtype)
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in described.leaves.items()}
    (query, key, value, *offsets), keywords = harness.arguments(described, leaves)
    names = ("causal", "window", "mask", "score", "lengths", "scale", "dropout_p", "dropout_seed")
    given = (keywords.get(name) for name in names)
    return query, key, value, _bind(query, key, *(offsets or (None, None)), value, *given, False, schedule, True)


def call(query, key, value=None, *, cu=(None, None), schedule=None, **keywords):
    """The problem of a call of tensors."""
    options = {"causal": False, "window": None, "mask": None, "score": None, "lengths": None} | keywords
    value = key if value is None else value
    return _bind(query, key, *cu, value, *options.values(), None, 0.0, None, False, schedule, True)


def has_functions(spec):
    return any(name in f"{spec.mask} {spec.score}" for name in FUNCTIONS)


# Triton: its kernels, interpreted


def sides_of(problem):
    """Tensors that masks and scores read, by the name they are counted under."""
    found = {"mask": [], "bias": [], "slopes": []}
    for mask in () if problem.mask is None else triton.leaves(problem.mask):
        if not isinstance(mask, Band):
            found["mask"] += [part for part in vars(mask).values() if isinstance(part, torch.Tensor)]
    for score in problem.scores:
        for name, kind in (("bias", scores.Bias), ("slopes", scores.Alibi)):
            found[name] += [score.parameters[0][0]] if isinstance(score, kind) else []
    return found


def run(spec):
    """The kernels as the interpreter ran them, and as they were counted."""
    from tests.counting import backward, counted, forward

    query, key, value, problem = bound(spec, "triton")
    with torch.no_grad(), counted(sides_of(problem)) as runs:
        out, lse = forward.forward(problem, query, key, value, saves=True)
        tensors = problem.lower()[0]
        needs = [True] * 3 + [tensor.is_floating_point() for tensor in tensors]
        d_out = torch.randn_like(out)
        backward.backward(problem, d_out, None, query, key, value, out, lse, tensors, needs)
    # of two kernels, one that heeds what is hidden and one that does not, one returned at once; without keys some do
    runs = [ran for ran in runs if ran.loads or ran.stores]
    kernels = [
        kernel
        for direction in (False, True)
        for kernel in triton.kernels(problem, direction, None)
        if kernel.requested.total_bytes
    ]
    # sums of gradients are operators of torch
    return runs, [kernel for kernel in kernels if not kernel.name.startswith("sum of")]


def without_zeros(counts):
    return {name: size for name, size in counts.items() if size}


def check(spec):
    runs, kernels = run(spec)
    assert [kernel.name.split()[0] for kernel in kernels] == [ran.name for ran in runs]
    for ran, kernel in zip(runs, kernels, strict=True):
        if ran.name == "finite":
            assert list(without_zeros(kernel.requested.loads).values()) == list(ran.loads.values()), kernel.name
            continue
        assert without_zeros(kernel.requested.loads) == dict(ran.loads), ran.name
        stores = {"total" if ran.name == "gradient" else name: size for name, size in kernel.requested.stores.items()}
        assert without_zeros(stores) == dict(ran.stores), ran.name
        assert kernel.requested.flops == ran.flops, ran.name
        assert kernel.requested.exponentials == ran.exponentials, ran.name
        least, counted = ran.least(), without_zeros(kernel.compulsory.loads)
        # of masks and biases that sequences or packed heads share, or of large blocks, not everything is known
        inexact = ("mask", "bias")
        assert {name: counted[name] for name in counted if name not in inexact} == {
            name: least[name] for name in least if name not in inexact
        }, ran.name
        assert all(counted.get(name, 0) <= least.get(name, 0) for name in inexact), ran.name


TOLD = [
    Spec(((1, 0),)),
    Spec(((40, 70),) * 2, heads=(2, 1), causal=True),
    Spec(((70, 40),), window=(9, 20), dims=(24, 40)),
    Spec(((3, 90),), heads=(6, 2), mask="left"),
    Spec(((25, 33), (9, 34), (30, 40)), layout="padded", causal=True, tail=2),
    Spec(((25, 33), (0, 16), (16, 0)), layout="padded", mask="keys", tail=5),
    Spec(((25, 33), (0, 16), (1, 1), (16, 0)), layout="packed", window=(12, 4), heads=(4, 2), tail=3),
    Spec(((25, 33), (0, 16), (33, 25)), layout="gapped", causal=True, tail=6, mask="documents | keys", score=("bias",)),
    Spec(((33, 40),), mask="diagonals & keys", heads=(2, 1)),
    Spec(((33, 40),) * 2, mask="tensor", score=("bias",), heads=(2, 1), causal=True),
    Spec(((33, 140),), mask="blocks & ~ tensor", heads=(2, 1)),
    Spec(((40, 30),) * 2, mask="documents", score=("bias", "sink"), bias="hk"),
    Spec(((40, 30),), heads=(3, 1), score=("softcap", "alibi", "bias", "sink"), bias="hqk"),
    Spec(((33, 33),) * 2, score=("bias",), bias="q", causal=True),
    Spec(((20, 33),), score=("bias", "alibi"), bias="bk", slopes="bh", dropout_p=0.25),
]


@interpreted
@pytest.mark.parametrize("spec", TOLD, ids=str)
def test_triton_moves_what_it_says(spec):
    check(spec)


@interpreted
@settings(max_examples=4)
@given(specs(36).filter(lambda spec: not has_functions(spec) and spec.layout in ("dense", "packed")))
def test_triton_moves_what_it_says_whatever_is_drawn(spec):
    check(spec)


@interpreted
def test_triton_moves_what_it_says_behind_a_length():
    check(Spec(((1, 1), (33, 70)), layout="padded", causal=True))


@interpreted
@settings(max_examples=10)
@given(
    strategies.lists(strategies.integers(0, 40), max_size=70),
    strategies.integers(0, 30),
    strategies.sampled_from((1, 3)),
)
@example([1, 0, 17] * 370, 5, 1)
def test_slots_are_found_among_any_number_of_sequences(lengths, tail, pack):
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    batch, tokens, block = len(lengths), sum(lengths) + tail, 16
    firsts = [int(offset) * pack // block + number for number, offset in enumerate(cu)]
    wanted = []
    for slot in range(tokens * pack // block + batch + 1):
        sequence = bisect.bisect_right(firsts, slot) - 1
        wanted.append((sequence, slot - firsts[sequence]))
    found = torch.full((len(wanted), 2), -1)
    slots_kernel[(len(wanted),)](cu, found, tokens, batch, pack, block)
    assert found.tolist() == [list(pair) for pair in wanted]


@jit
def slots_kernel(
    cu, found, tokens: language.int32, batch: language.int32, PACK: language.constexpr, BLOCK: language.constexpr
):
    slot = language.program_id(0)
    sequence, tile = find_slot(slot, cu, tokens, batch, PACK, BLOCK)
    language.store(found + 2 * slot, sequence)
    language.store(found + 2 * slot + 1, tile)


@compiled
@pytest.mark.slow
def test_in_the_interpreter():
    """Triton reads TRITON_INTERPRET when it is imported, so this takes another process."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", "triton_moves"]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert f"{len(TOLD) + 2} passed" in ended.stdout


# Triton: tiles of the Hopper table, enumerated one by one


LENGTH = strategies.integers(0, 300)


@compiled
@given(
    lengths=strategies.lists(strategies.tuples(LENGTH, LENGTH), min_size=1, max_size=3),
    layout=strategies.sampled_from(("dense", "padded", "packed")),
    sides=strategies.tuples(*[strategies.none() | strategies.integers(0, 200)] * 2),
    heads=strategies.sampled_from(((2, 2), (4, 2), (3, 1))),
    dims=strategies.sampled_from(((64, 64), (128, 80), (200, 256))),
)  # fmt: skip
@example([(256, 256)], "dense", (65, 1), (2, 2), (64, 64))
@example([(256, 256)], "padded", (1, 65), (2, 2), (128, 80))
def test_bands_on_hopper_are_walked_tile_by_tile(lengths, layout, sides, heads, dims):
    lengths = lengths[:1] * 2 if layout == "dense" else lengths
    (heads_q, heads_kv), (dim, dim_v) = heads, dims
    longest_q, longest_k = (max(pair[side] for pair in lengths) for side in (0, 1))
    window = None if sides == (None, None) else sides
    like = torch.zeros((), dtype=torch.bfloat16)
    if layout == "packed":
        tokens = [sum(pair[side] for pair in lengths) for side in (0, 1)]
        cu = tuple(torch.tensor([0, *[pair[side] for pair in lengths]]).cumsum(0).int() for side in (0, 1))
        shapes = (tokens[0], heads_q, dim), (tokens[1], heads_kv, dim), (tokens[1], heads_kv, dim_v)
        problem = call(*(like.expand(shape) for shape in shapes), cu=cu, window=window)
    else:
        batch = len(lengths)
        shapes = (
            (batch, heads_q, longest_q, dim),
            (batch, heads_kv, longest_k, dim),
            (batch, heads_kv, longest_k, dim_v),
        )
        given = tuple(torch.tensor([pair[side] for pair in lengths]) for side in (0, 1)) if layout == "padded" else None
        problem = call(*(like.expand(shape) for shape in shapes), window=window, lengths=given)
    if problem.heads_q * problem.length_q == 0:
        assert triton.kernels(problem, False, "sm_90") == []
        return
    found = {k.name: k for direction in (False, True) for k in triton.kernels(problem, direction, "sm_90")}
    total = problem.batch if layout == "packed" else 1
    few = problem.length_q <= 64 * total and heads_q > heads_kv
    for name in ("forward", "queries"):
        expected = enumerate_band(lengths, sides, found[name].tile, heads_q // heads_kv if few else 1)
        kernel, units = found[name], heads_kv if few else heads_q
        assert kernel.requested.loads["key"] == expected["loaded"] * units * dim * 2
        assert kernel.requested.loads["value"] == expected["loaded"] * units * dim_v * 2
        assert kernel.requested.loads["query"] == expected["own"] * units * dim * 2
        assert kernel.compulsory.loads["key"] == expected["touched"] * heads_kv * dim * 2
        assert kernel.pairs == expected["pairs"] * units
        products = {"forward": wide(dim) + wide(dim_v), "queries": 2 * wide(dim) + wide(dim_v)}[name]
        area = kernel.tile[0] * kernel.tile[1]
        assert kernel.requested.flops == 2 * expected["steps"] * units * area * products
    turned = [(q, k)[::-1] for q, k in lengths], sides[::-1], found["keys"].tile[::-1]
    expected, kernel = enumerate_band(*turned, 1), found["keys"]
    assert kernel.requested.loads["query"] == expected["loaded"] * heads_q * dim * 2
    values = expected["steps"] * kernel.tile[0] if Call(problem).sees_every_row else expected["loaded"]
    assert kernel.requested.loads["lse"] == kernel.requested.loads["delta"] == values * heads_q * 4
    assert kernel.requested.loads["key"] == expected["own"] * heads_kv * dim * 2
    assert kernel.compulsory.loads["d_out"] == expected["touched"] * heads_q * dim_v * 2
    assert kernel.pairs == expected["pairs"] * heads_q
    area = kernel.tile[0] * kernel.tile[1]
    assert kernel.requested.flops == 2 * expected["steps"] * heads_q * area * 2 * (wide(dim) + wide(dim_v))
    assert_hopper_backward(problem, lengths, sides)


@compiled
@given(*2 * [strategies.integers(1, 40)], *2 * [strategies.none() | strategies.integers(0, 50)], strategies.booleans())
def test_rows_that_see_nothing_are_known_by_shapes(length_q, length_k, left, right, causal):
    query, key = torch.zeros(1, 1, length_q, 16), torch.zeros(1, 1, length_k, 16)
    window = None if causal or left is right is None else (left, right)
    lse = onchip.attention_with_lse(query, key, key, causal=causal, window=window, schedule="dense").lse
    problem = call(query, key, causal=causal, window=window)
    assert Call(problem).sees_every_row == bool((lse > float("-inf")).all())
    for given_lengths in (torch.tensor([length_q]), torch.tensor([length_k])), (None, torch.tensor([length_k])):
        assert not Call(call(query, key, causal=causal, window=window, lengths=given_lengths)).sees_every_row


def assert_hopper_backward(problem, lengths, sides):
    """Its kernel of columns has its own tile, makes dQ too, and adds whole blocks of it to sums."""
    first, kernel, last = hopper.kernels(problem, True, "sm_90")
    heads, dim, dim_v = problem.heads_q, problem.dim_qk, problem.dim_v
    rows, columns = kernel.tile
    expected = enumerate_band([(q, k)[::-1] for q, k in lengths], sides[::-1], (columns, rows), 1)
    assert kernel.requested.loads["query"] == expected["loaded"] * heads * dim * 2
    assert kernel.requested.loads["delta"] == expected["steps"] * rows * heads * 4
    assert kernel.requested.stores["sums"] == expected["steps"] * rows * heads * max(64, wide(dim), wide(dim_v)) * 4
    assert kernel.requested.flops == 2 * expected["steps"] * heads * rows * columns * (3 * wide(dim) + 2 * wide(dim_v))
    assert first.requested.stores["delta"] * max(64, wide(dim), wide(dim_v)) == last.requested.loads["sums"]
    assert last.requested.loads["sums"] < hopper.workspace_bytes(problem, True)


def wide(dim):
    return max(16, 1 << (dim - 1).bit_length())


def enumerate_band(lengths, sides, tile, pack):
    """Counts of programs that own rows and walk over columns, by looking at each tile of scores."""
    counts = Counter()
    left, right = sides
    for own, other in lengths:
        shift, touched = other - own, set()
        for first in range(0, own * pack, tile[0]):
            rows = range(first, min(first + tile[0], own * pack))
            counts["own"] += len(rows)
            low = -(10**9) if left is None else rows[0] // pack + shift - left
            high = 10**9 if right is None else rows[-1] // pack + shift + right
            for column in range(0, other, tile[1]):
                columns = range(column, min(column + tile[1], other))
                # a walk ends with the last visible column, and begins with the tile of the first
                if column <= high and column + tile[1] > low:
                    counts["steps"] += 1
                    counts["loaded"] += len(columns)
                    counts["pairs"] += len(rows) * len(columns)
                    touched.update(columns)
        counts["touched"] += len(touched)
    return counts


@compiled
@given(
    lengths=strategies.tuples(strategies.integers(1, 400), strategies.integers(1, 400)),
    seed=strategies.integers(0, 99),
    by_head=strategies.booleans(),
)
def test_lists_on_hopper_name_every_block_that_is_not_empty(lengths, seed, by_head):
    length_q, length_k = lengths
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-length_q // 128), -(-length_k // 128)
    kept = torch.rand(4 if by_head else 1, *blocks, generator=generator) < 0.5
    query, key = (torch.zeros((), dtype=torch.float16).expand(1, 4, length, 64) for length in lengths)
    problem = call(query, key, mask=masks.blocks(kept[None]))
    (forward,) = triton.kernels(problem, False, "sm_90")
    keys = {kernel.name: kernel for kernel in triton.kernels(problem, True, "sm_90")}["keys"]
    expected = Counter()
    for _head, row, column in torch.nonzero(kept.expand(4, -1, -1)).tolist():
        rows, columns = min(128, length_q - 128 * row), min(128, length_k - 128 * column)
        tiles = -(-rows // forward.tile[0])
        expected["key"] += tiles * columns * 64 * 2
        expected["pairs"] += rows * columns
        expected["flops"] += 2 * tiles * forward.tile[0] * 128 * (64 + 64)
        tiles = -(-columns // keys.tile[1])
        expected["query"] += tiles * rows * 64 * 2
        expected["flops of keys"] += 2 * tiles * keys.tile[1] * 128 * 4 * 64
    seen = kept.expand(4, -1, -1).any(-2)
    least = sum(min(128, length_k - 128 * column) * 64 * 2 for _, column in torch.nonzero(seen).tolist())
    assert forward.requested.loads["key"] == expected["key"]
    assert forward.compulsory.loads["key"] == least
    assert (forward.pairs, forward.requested.flops) == (expected["pairs"], expected["flops"])
    assert keys.requested.loads.get("query", 0) == expected["query"]
    assert (keys.pairs, keys.requested.flops) == (expected["pairs"], expected["flops of keys"])


@compiled
def test_gradients_of_a_bias_and_slopes_are_kernels_where_they_are_wanted():
    query = torch.zeros(2, 4, 100, 64, dtype=torch.float16)
    bias, slopes = torch.zeros(4, 100, 100, requires_grad=True), torch.zeros(4)
    problem = call(query, query, score=(scores.bias(bias), scores.alibi(slopes)))
    names = [kernel.name for kernel in triton.kernels(problem, True, "sm_90")]
    sought = [f"finite {name}" for name in ("query", "key", "value", "d_out")]
    assert names == ["delta", *sought, "keys", "queries", "gradient of bias"]
    slopes.requires_grad_()
    names = [kernel.name for kernel in triton.kernels(problem, True, "sm_90")]
    assert names[7:] == ["gradient of slopes", "sum of d_slopes", "gradient of bias"]


# Operators of torch


@compiled
def test_a_recorder_counts_operands_and_results():
    left, right = torch.zeros(2, 3, 4), torch.zeros(1, 4, 5).expand(2, -1, -1)
    with Recorder({"left": left, "right": right}, "float32") as recorder:
        product = torch.bmm(left, right)
        product.mT.exp_().add_(left[:, :, :1].mT)
    multiply, exponential, add = recorder.kernels
    assert multiply.requested.loads == {"left": 2 * 3 * 4 * 4, "right": 4 * 5 * 4}
    (name,) = multiply.requested.stores
    assert multiply.requested.stores[name] == 2 * 3 * 5 * 4 and multiply.requested.flops == 2 * 2 * 3 * 4 * 5
    assert exponential.requested.loads == exponential.requested.stores == {name: 120}
    assert exponential.requested.exponentials == 30
    assert add.requested.loads == {name: 120, "left": 2 * 3 * 4}


@compiled
@pytest.mark.parametrize("spec", [Spec(), Spec(causal=True, score=("softcap", "bias")), Spec(layout="packed")], ids=str)
def test_dense_says_what_its_operators_do(spec):
    """A run on tensors with data does what tensors without data told."""
    query, key, value, problem = bound(spec, "dense")
    names = {"query": query, "key": key, "value": value}
    with torch.enable_grad(), Recorder(names, "float32") as recorder:
        out, lse = dense.attend(problem, query, key, value, reads=False)
    told = dense.kernels(problem, False, None)
    assert [kernel.name for kernel in told] == [kernel.name for kernel in recorder.kernels]
    moved = [(kernel.requested.read_bytes, kernel.requested.written_bytes) for kernel in recorder.kernels]
    assert [(kernel.requested.read_bytes, kernel.requested.written_bytes) for kernel in told] == moved
    leaves = [query, key, value, *(part for part in problem.lower()[0] if part.requires_grad)]
    d_out = torch.ones_like(out)
    with Recorder({}, "float32") as recorder:
        torch.autograd.grad(out, leaves, d_out)
    assert sum(kernel.requested.total_bytes for kernel in dense.kernels(problem, True, None)) == sum(
        kernel.requested.total_bytes for kernel in recorder.kernels
    )


@compiled
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_tiled_says_what_its_products_and_passes_do(causal, backward):
    query, key, value = torch.randn(2, 4, 600, 16), torch.randn(2, 4, 512, 16), torch.randn(2, 4, 512, 8)
    problem = call(query, key, value, causal=causal, schedule="tiled")
    with torch.no_grad():
        out, lse = tiled.forward(problem, query, key, value, saves=True)
        names = {"query": query, "key": key, "value": value, "d_out": torch.ones_like(out)}
        with Recorder(names, "float32") as recorder:
            if backward:
                tiled.backward(problem, names["d_out"], None, query, key, value, out, lse, [], [True] * 3)
            else:
                tiled.forward(problem, query, key, value, saves=True)
    (kernel,) = tiled.kernels(problem, backward, None)
    products = [ran for ran in recorder.kernels if ran.requested.flops]
    assert kernel.requested.flops == sum(ran.requested.flops for ran in products)
    # the tiles of scores are the results of products of inputs, in memory that others use again
    inputs = ("key", "value") if backward else ("key",)
    tiles = {name for ran in products if set(ran.requested.loads) & set(inputs) for name in ran.requested.stores}
    tiles = {name for name in tiles if name.startswith("bmm") and name in passes_over(recorder.kernels)}
    counted = sum(kernel.requested.loads[name] for name in ("scores", "d_scores") if name in kernel.requested.loads)
    ran = sum(size for ran in recorder.kernels for name, size in ran.requested.loads.items() if name in tiles)
    assert counted == ran
    for name in ("key", "value"):
        assert kernel.requested.loads[name] >= sum(ran.requested.loads.get(name, 0) for ran in products)


def passes_over(kernels):
    """Names of tensors that are exponentiated in place, or multiplied by one that is."""
    weights = {name for kernel in kernels if kernel.name == "exp2_" for name in kernel.requested.stores}
    return weights | {name for kernel in kernels if kernel.name == "mul_" and weights & set(kernel.requested.loads)
                      for name in kernel.requested.stores}  # fmt: skip


@compiled
@given(strategies.integers(1, 900), strategies.booleans())
def test_aten_walks_tile_by_tile(length, causal):
    query = torch.zeros(()).expand(2, 3, length, 16)
    problem = call(query, query, causal=causal, schedule="aten")
    for backward in (False, True):
        (kernel,) = dispatch.schedules()["aten"].kernels(problem, backward, None)
        rows, area, columns = kernel.tile[0], 0, 0
        for first in range(0, length, rows):
            seen = min(first + rows, length) if causal else length
            area, columns = area + min(rows, length - first) * seen, columns + seen
        assert kernel.pairs == 6 * area
        assert kernel.requested.flops == kernel.compulsory.flops == (5 if backward else 2) * 2 * 6 * area * 16
        assert kernel.requested.loads["key"] == 6 * columns * 16 * 4
        assert kernel.compulsory.loads["key"] == 6 * length * 16 * 4


# Every schedule


@compiled
@pytest.mark.parametrize("name", dispatch.schedules())
def test_nothing_is_touched_that_is_not_asked_for(name):
    schedule = dispatch.schedules()[name]
    for spec in fitted(COVERING):
        if name == "triton" and has_functions(spec):
            continue
        *_, problem = bound(spec, name)
        for backward in (False, True):
            reasons = schedule.unsupported_backward(problem) if backward else schedule.unsupported(problem)
            if reasons and name != "triton":
                continue
            for kernel in schedule.kernels(problem, backward, "sm_90"):
                asked = kernel.requested.loads
                assert all(size <= asked.get(part, 0) for part, size in kernel.compulsory.loads.items()), (spec, kernel)
                assert kernel.compulsory.flops <= kernel.requested.flops, (spec, kernel)


@compiled
@pytest.mark.parametrize("name", ["aten", "triton", "tiled"])
def test_a_plain_forward_must_move_each_tensor_once(name):
    query, key = torch.zeros(()).expand(2, 4, 300, 64), torch.zeros(()).expand(2, 2, 700, 64)
    plan = onchip.plan(query, key, key)
    (kernel,) = dispatch.schedules()[name].kernels(plan.problem, False, "sm_90")
    assert kernel.compulsory.total_bytes == plan.minimum_bytes
    assert kernel.compulsory.flops == 4 * 64 * 2 * 4 * 300 * 700


@compiled
def test_a_plan_names_the_pairs_and_tiles_of_both_directions():
    from onchip.model.presets import PRESETS

    query = torch.zeros((), dtype=torch.bfloat16).expand(1, 16, 4096, 128)
    plan = onchip.plan(query, query, query, causal=True).on(PRESETS["h200"], "triton")
    assert plan.tiles == (64, 64)
    assert plan.backward_tiles == {"keys": (32, 128), "queries": (128, 64)}
    assert set(plan.backward_pairs) == {"keys", "queries"}
    needed, pairs = plan.minimum_backward_flops, plan.backward_pairs
    assert needed == 2 * 5 * 128 * plan.pairs
    # four products in one kernel and three in the other
    assert plan.backward_flops == 2 * 128 * (4 * pairs["keys"] + 3 * pairs["queries"]) > 1.35 * needed
