"""The benchmark of flagged rows: its model of the Hopper forward against loops, its sources, record and tables."""

import dataclasses
import importlib
import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from onchip.audit.gpt import Shape
from onchip.audit.text import Text
from onchip.bench.demo.sentences import ModelMissing

FOLDER = Path(__file__).parents[2] / "benchmarks"
CPU = torch.device("cpu")
NAMES = ("", "_policy", "_sources", "_gpu")
LETTERS = torch.arange(97, 123, dtype=torch.uint8).repeat(40)
TEXT = Text("letters", "", LETTERS)
TOP_HALF = 2.0**127 * (2 - 2.0**-8)
"""From here on a weight becomes infinite in bfloat16."""
UNSURE = 0.01
"""Distance in base 2 from a limit at which float32 and float64 may disagree."""


@pytest.fixture(scope="module")
def modules():
    """The script and what it is made of; their folder is no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        found = {name: importlib.import_module(f"activations{name}") for name in NAMES}
        yield SimpleNamespace(**{name.removeprefix("_") or "script": module for name, module in found.items()})


def drawn_source(modules, seed, length, dim, size, heads=2, causal=True, seen_from=0):
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(1, heads, length, dim, generator=generator).bfloat16() for _ in range(3))
    query = (query * size).bfloat16()
    return modules.sources.Source(
        name="drawn", query=query, key=key, value=value, causal=causal, seen_from=min(seen_from, length - 1)
    )


# The model against plain loops


def power(exponent):
    return 2.0**exponent if exponent < 1000 else math.inf


def as_single(value):
    """A float64 number as float32 would hold it, but for its precision."""
    return value if abs(value) < 2.0**128 else math.copysign(math.inf, value)


def walk_row(scores, values, begin, order, width):
    """The sum, whether everything is finite, and how far in base 2 the row is from overflow, of one row's walk."""
    keys = len(scores)
    reference = max(scores[begin * width : (begin + 1) * width])
    total, sums, largest = 0.0, torch.zeros(values.shape[1], dtype=torch.float64), 0.0
    for block in order:
        for column in range(block * width, min((block + 1) * width, keys)):
            weight = as_single(power(scores[column] - reference))
            total = as_single(total + weight)
            rounded = math.inf if weight >= TOP_HALF else weight
            sums = sums + rounded * values[column]
            largest = max(largest, weight, total, sums.abs().max().item() if rounded < math.inf else math.inf)
    finite = math.isfinite(total) and bool((sums.abs() < 2.0**128).all())
    return total, finite, abs(math.log2(largest) - 128) if largest < math.inf else math.inf


def looped(source, policy, limits, groups):
    """Shares by limit from loops over heads, rows, blocks and columns in float64; None with a row too near a limit."""
    batch, heads, length, dim = source.query.shape
    width, flags = policy.width, {name: {} for name in limits}
    seen = [i + 1 if source.causal else length for i in range(length)]
    for b, h, i in ((b, h, i) for b in range(batch) for h in range(heads) for i in range(length)):
        products = source.key[b, h, : seen[i]].double() @ source.query[b, h, i].double()
        scores = (products / math.sqrt(dim) / math.log(2)).tolist()
        last = (seen[i] - 1) // width
        order = range(last + 1) if policy.walk == "first" else range(last, -1, -1)
        total, finite, distance = walk_row(scores, source.value[b, h].double(), order[0], order, width)
        if distance < UNSURE:
            return None
        for name, limit in limits.items():
            if finite and limit < math.inf and abs(math.log2(total / limit)) < UNSURE:
                return None
            flags[name][b, h, i] = not (finite and total <= limit)
    return {name: counted(source, policy, flagged, seen, groups) for name, flagged in flags.items()}


def counted(source, policy, flagged, seen, groups):
    batch, heads, length, _ = source.query.shape
    tiles = [(b, h, range(t, min(t + 64, length))) for b in range(batch) for h in range(heads)
             for t in range(0, length, 64)]  # fmt: skip
    hit = {(b, h, rows.start): any(flagged[b, h, i] for i in rows) for b, h, rows in tiles}
    blocks = {(b, h, rows.start): math.ceil(seen[rows[-1]] / policy.width) for b, h, rows in tiles}
    program = 64 * groups
    again = {(b, h, start // program) for (b, h, start), any_row in hit.items() if any_row}
    twice = sum(count for (b, h, start), count in blocks.items() if (b, h, start // program) in again)
    behind = [value for (_, _, i), value in flagged.items() if i >= source.seen_from]
    return {
        "rows": sum(flagged.values()) / len(flagged),
        "seeing": sum(behind) / len(behind),
        "tiles": sum(hit.values()) / len(hit),
        "work": twice / sum(blocks.values()),
    }


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    length=st.integers(1, 150),
    dim=st.sampled_from([8, 72]),
    size=st.sampled_from([1.0, 10.0, 40.0, 200.0]),
    walk=st.sampled_from(["first", "last"]),
    width=st.sampled_from([16, 64, 128]),
    causal=st.booleans(),
    seen_from=st.integers(0, 149),
    chunk=st.sampled_from([29, 64, 768]),
)
def test_the_model_counts_what_loops_count(modules, seed, length, dim, size, walk, width, causal, seen_from, chunk):
    source = drawn_source(modules, seed, length, dim, size, heads=1, causal=causal, seen_from=seen_from)
    policy = modules.policy.Policy(walk=walk, width=width)
    expected = looped(source, policy, modules.policy.LIMITS, groups=3 if dim <= 64 else 2)
    assume(expected is not None)
    with mock.patch.object(modules.policy, "CHUNK", chunk):
        (outcome,) = modules.policy.measure(source, [policy]).outcomes
    for name, shares in expected.items():
        assert dataclasses.asdict(outcome.flagged[name]) == pytest.approx(shares, abs=1e-6), name


def test_large_values_overflow_where_the_sum_does_not(modules):
    """The accumulator is of weights times values, so a row may be flagged by its values alone."""
    source = modules.sources.with_sink(drawn_source(modules, 0, 256, 64, 1.0), 80, "middle")
    large = dataclasses.replace(source, value=source.value * 2.0**20)
    policy = modules.policy.Policy(walk="first", width=64)
    for which, share in ((source, 0.0), (large, 1.0)):
        (outcome,) = modules.policy.measure(which, [policy]).outcomes
        assert outcome.flagged["2^120"].seeing == outcome.flagged["finite"].seeing == share
    assert outcome.flagged["finite"].rows == pytest.approx((256 - 160) / 256)


@pytest.mark.parametrize(("exponent", "finite"), [(127.9, True), (127.999, False)])
def test_a_weight_may_overflow_as_it_is_rounded(modules, exponent, finite):
    """bfloat16 ends below float32: the sum of the weights is finite, and the values' weights are not."""
    scores, value = torch.tensor([[[0.0, exponent]]]), torch.full((1, 2, 1), 0.5)
    end = modules.policy.walk(scores, value, 1, modules.policy.Policy(walk="first", width=1), True)
    assert end.total.isfinite().all() and bool(end.accumulated.isfinite().all()) is finite


@pytest.mark.parametrize(("dim", "twice"), [(64, range(3)), (128, range(2, 4))])
def test_a_program_computes_its_whole_tile_again(modules, dim, twice):
    """One row of the third tile: the three warpgroups of a narrow head, or the two of a wide one, go again."""
    source = drawn_source(modules, 9, 430, dim, 1.0, heads=1, seen_from=130)
    flagged = torch.zeros(1, 430, dtype=torch.bool)
    flagged[0, 140] = True
    shares = modules.policy.share(source, modules.policy.Policy(walk="first", width=64), flagged)
    blocks = range(1, 8)
    assert shares.work == pytest.approx(sum(blocks[tile] for tile in twice) / sum(blocks))
    assert (shares.rows, shares.seeing, shares.tiles) == pytest.approx((1 / 430, 1 / 300, 1 / 7))


@pytest.mark.parametrize("walk", ["first", "last"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1.0, 30.0, 100.0])
def test_a_row_that_is_not_flagged_has_lost_nothing(modules, walk, causal, size):
    """Whatever the reference, out is right to the rounding of the weights to bfloat16, up to the edge of overflow."""
    source = drawn_source(modules, 1, 200, 16, size, causal=causal)
    scores = (source.query.double() @ source.key.double().mT)[0] * 16**-0.5
    if causal:
        scores.masked_fill_(torch.ones(200, 200).triu(1).bool(), -math.inf)
    weights, value = scores.softmax(-1), source.value[0].double()
    policy = modules.policy.Policy(walk=walk, width=64)
    end = modules.policy.walk((scores / math.log(2)).float(), value.float(), 0, policy, causal)
    right = end.total.isfinite() & end.accumulated.isfinite().all(-1)
    assert right.any() and (size < 100 or not right.all())
    error = (end.accumulated.double() / end.total.double()[..., None] - weights @ value).abs()
    assert (error <= 2.0**-8 * (weights @ value.abs()))[right].all()


# Sources


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("nats", [30, 60, 100])
def test_a_sink_scores_so_far_above_the_others(modules, dim, nats):
    plain = drawn_source(modules, 2, 320, dim, 1.0, heads=1)
    for place, column in (("first", 0), ("middle", 192), ("last", 256)):
        source = modules.sources.with_sink(plain, nats, place)
        scores = (source.query.double() @ source.key.double().mT)[0, 0] * dim**-0.5
        others = torch.cat([scores[:, :column], scores[:, column + 1 :]], dim=1)
        assert scores[:, column].sub(nats).abs().max() < nats / 256
        assert others.mean().abs() < 0.1 and 0.8 < others.std() < 1.2
        assert source.seen_from == column


@pytest.mark.parametrize(("nats", "limit", "flags"), [(60, "2^64", True), (60, "2^100", False), (100, "finite", True)])
def test_the_walk_that_begins_at_the_sink_flags_nothing(modules, nats, limit, flags):
    source = modules.sources.with_sink(drawn_source(modules, 3, 512, 64, 1.0), nats, "first")
    first, last = (
        modules.policy.measure(source, [modules.policy.Policy(walk=walk, width=64)]).outcomes[0]
        for walk in ("first", "last")
    )
    assert all(flagged.rows == 0 for flagged in first.flagged.values()) and first.gap[2] == 0
    # all but the rows whose last block is the sink's
    assert last.flagged[limit].rows == (448 / 512 if flags else 0)
    assert last.gap[0] == pytest.approx(nats, abs=4)


def test_outlier_channels_are_larger_than_the_others(modules):
    plain = drawn_source(modules, 4, 500, 16, 1.0)
    source = modules.sources.with_outliers(plain, ("key",), 30)
    sizes = source.key[0].double().square().mean(1).sqrt()  # (heads, dim)
    assert (sizes[:, :4] > 25).all() and (sizes[:, 4:] < 2).all()
    outlier = (sizes.amax(1) / sizes.median(1).values).max().item()
    assert modules.policy.measure(source, []).outlier == pytest.approx(outlier, rel=1e-5)
    assert torch.equal(source.query, plain.query) and torch.equal(source.value, plain.value)


def test_the_drawn_sources_are_the_same_every_time(modules):
    once, again = (list(modules.sources.drawn(128, (8, 16), CPU)) for _ in range(2))
    assert len({source.name for source in once}) == len(once) == 2 * (1 + 4 + 9)
    for left, right in zip(once, again, strict=True):
        assert all(torch.equal(getattr(left, name), getattr(right, name)) for name in ("query", "key", "value"))


def test_the_weight_of_the_first_key_is_its_mean_weight_behind_the_first_tile(modules):
    source = drawn_source(modules, 5, 150, 8, 2.0)
    scores = (source.query.double() @ source.key.double().mT) * 8**-0.5
    weights = scores.masked_fill(torch.ones(150, 150).triu(1).bool(), -math.inf).softmax(-1)
    measured = modules.policy.measure(source, [])
    assert measured.first_key == pytest.approx(weights[:, :, 64:, 0].mean().item(), rel=1e-4)


def test_a_gpt_learns_and_tells_what_its_layers_attend_with(modules):
    shape = Shape(layers=2, heads=2, width=16, context=32)
    model, losses = modules.sources.trained(shape, TEXT, 30, CPU)
    assert len(losses) == 30 and losses[-1] < losses[0] - 0.3
    sources = list(modules.sources.of_gpt(model, TEXT, CPU))
    assert [tuple(source.query.shape) for source in sources] == [(1, 2, 32, 8)] * 2
    assert all(source.causal and source.key.dtype == torch.bfloat16 for source in sources)
    # the letters follow each other, so one value of a layer tells which window it was
    block = model.blocks[0]
    windows = torch.stack([LETTERS[start : start + 32].long() for start in range(26)])
    hidden = block.attention_norm(model.bytes(windows) + model.positions.weight)
    keys = block.attention.inputs(hidden).unflatten(-1, (3, 2, -1))[:, :, 1].transpose(1, 2).bfloat16()
    assert any(torch.equal(key, sources[0].key[0]) for key in keys)


def test_the_rate_rises_stays_and_falls(modules):
    rates = [modules.sources.rate_at(step, 100) for step in range(100)]
    top = modules.sources.RATE
    assert rates[0] == pytest.approx(top / 10) and rates[9:60] == [pytest.approx(top)] * 51
    assert rates[60:] == sorted(rates[60:], reverse=True) and rates[-1] == pytest.approx(top / 10)


def test_the_sentence_model_attends_with_what_is_recorded(modules, monkeypatch):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=24,
    )  # fmt: skip
    model = transformers.BertModel(config).eval()
    tokens = torch.randint(50, (1, 24))

    def tokenizer(words, truncation, max_length, return_tensors):
        assert words.startswith("abc") and truncation and max_length == 24
        return {"input_ids": tokens}

    monkeypatch.setattr(modules.sources, "load_model", lambda: (tokenizer, model))
    with torch.no_grad():
        expected = model(input_ids=tokens, output_hidden_states=True).hidden_states
    sources = list(modules.sources.of_sentence_model(TEXT, CPU))
    assert len(sources) == 2 and not any(source.causal for source in sources)
    for layer, source in enumerate(sources):
        attention = model.encoder.layer[layer].attention
        out = F.scaled_dot_product_attention(source.query.float(), source.key.float(), source.value.float())
        found = attention.output(out.transpose(1, 2).flatten(2), expected[layer])
        with torch.no_grad():
            assert (found - attention(expected[layer])[0]).abs().max() < 0.05


# Times and errors, on another schedule


def test_results_are_held_against_float64(modules, monkeypatch):
    for causal in (False, True):
        source = drawn_source(modules, 6, 130, 16, 20.0, causal=causal, seen_from=100)
        checked = modules.gpu.check(source, "tiled")
        assert checked.holds and 0 < checked.error <= checked.allowed < 0.6
    attend = modules.gpu.attend
    for wrong in (lambda out: out + 1, lambda out: out.index_fill(2, torch.tensor([129]), math.nan)):
        monkeypatch.setattr(modules.gpu, "attend", lambda *call, wrong=wrong: wrong(attend(*call)))
        assert not modules.gpu.check(source, "tiled").holds


def test_a_source_is_timed_beside_normal_inputs(modules):
    source = drawn_source(modules, 7, 64, 16, 1.0)
    comparison = modules.gpu.time_beside_normal(source, 2, "tiled", rows=4 * 64)
    assert [result.name for result in comparison.results] == ["normal", "drawn"] and not comparison.failures
    assert [(ratio.name, ratio.reference) for ratio in comparison.ratios] == [("drawn", "normal")]
    assert not modules.gpu.is_hopper(CPU)


# The command


@pytest.fixture
def script(modules, monkeypatch):
    """The script with a small GPT, and without the sentence model."""

    def missing(text, device):
        raise ModelMissing("the sentence model is not installed: pip install it")
        yield

    monkeypatch.setitem(modules.script.SHAPE, "context", 32)
    monkeypatch.setitem(modules.script.SHAPE, "width", 16)
    monkeypatch.setattr(modules.script, "of_sentence_model", missing)
    monkeypatch.setattr(modules.script, "read_text", lambda path, least: TEXT)
    return modules.script


SMALL = ("--device", "cpu", "--length", "128", "--dims", "16", "--steps", "2")


def run(script, *arguments, status=0):
    result = CliRunner().invoke(script.app, [str(argument) for argument in arguments])
    assert result.exit_code == status, result.output
    return result.output if status else result.stdout


def row(text, name):
    """The cells of the last row of that name."""
    return [line for line in text.splitlines() if line.startswith(name)][-1].removeprefix(name).split()


def test_a_run_is_recorded_and_shown_again(script, tmp_path):
    printed = run(script, *SMALL, "--out", tmp_path)
    assert run(script, "--device", "cpu", "--show", "--out", tmp_path) == printed
    record = json.loads((tmp_path / "activations.json").read_text())
    assert len(record["sources"]) == 2 + 14 and record["gpt"]["steps"] == 2
    assert "left out: MiniLM: the sentence model is not installed" in printed and "GPT: 2 layers" in printed
    # 128 rows are two tiles; the second one begins its walk at the diagonal, and meets the sink last
    assert row(printed, "sink 100 first, d16") == ["0"] * 6 + ["50.0"] * 6
    assert row(printed, "sink 60 first, d16") == ["0"] * 6 + ["50.0"] * 3 + ["0"] * 3
    assert row(printed, "normal, d16") == ["0"] * 12
    work = run(script, "--device", "cpu", "--show", "--out", tmp_path, "--part", "work")
    # three warpgroups share a tile, which here is all of the rows
    assert row(work, "sink 100 first, d16") == ["0"] * 6 + ["100"] * 6
    wide = run(script, "--device", "cpu", "--show", "--out", tmp_path, "--width", "128")
    assert row(wide, "sink 100 first, d16") == ["0"] * 12
    last = run(script, "--device", "cpu", "--show", "--out", tmp_path, "--part", "seeing")
    assert row(last, "sink 100 last, d16") == ["100"] * 6 + ["0"] * 6


@pytest.fixture
def timed(modules, script, monkeypatch):
    """The script with a processor for its GPU."""
    times = partial(modules.gpu.time_beside_normal, schedule="tiled", rows=128)
    monkeypatch.setattr(script, "is_hopper", lambda device: True)
    monkeypatch.setattr(script, "time_beside_normal", times)
    monkeypatch.setattr(script, "check", partial(modules.gpu.check, schedule="tiled"))
    monkeypatch.setattr(script, "drawn", lambda *sizes: [drawn_source(modules, 8, 128, 16, 1.0)])
    return script


COSTLY = ("--device", "cpu", "--steps", "0", "--rounds", "1")


def test_on_a_hopper_gpu_times_and_errors_are_part_of_it(timed, tmp_path):
    printed = run(timed, *COSTLY, "--out", tmp_path)
    assert "beside normal inputs" in printed
    milliseconds, plain, ratio, used = map(float, row(printed, "drawn"))
    assert milliseconds > 0 and plain > 0 and ratio > 0 and 0 < used <= 1


def test_a_wrong_result_is_the_exit_status(modules, timed, monkeypatch, tmp_path):
    monkeypatch.setattr(timed, "check", lambda source: modules.gpu.Checked(error=math.inf, allowed=0.1))
    assert "not finite" in run(timed, *COSTLY, "--out", tmp_path, status=1)


def test_a_call_that_fails_is_told_and_is_the_exit_status(timed, modules, monkeypatch, tmp_path):
    monkeypatch.setattr(timed, "time_beside_normal", modules.gpu.time_beside_normal)
    printed = run(timed, *COSTLY, "--out", tmp_path, status=1)
    assert "failed: Unsupported" in printed


@pytest.mark.parametrize(
    ("share", "text"),
    [(0.0, "0"), (1.0, "100"), (1e-5, "<0.1"), (0.99999, ">99.9"), (0.5, "50.0"), (0.001, "0.1"), (0.999, "99.9")],
)
def test_a_share_is_0_or_100_only_where_it_is(modules, share, text):
    assert modules.script.percent(share) == text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--width", "100"), "--width is one of 64, 128: got 100"),
        (("--part", "all"), "'all' is not one of"),
        (("--dims", "x"), "--dims takes positive whole numbers"),
        (("--dims", "64,20"), "--dims takes multiples of 8 up to 256, as the kernel does: got 64,20"),
        (("--dims", "264"), "--dims takes multiples of 8 up to 256, as the kernel does: got 264"),
        (("--device", "tpu"), "--device takes cpu"),
    ],
)
def test_wrong_options_are_said_in_words(script, options, words):
    assert words in " ".join(run(script, *options, status=2).split())


def test_show_says_where_it_found_nothing(script, tmp_path):
    assert "there is no activations.json" in run(script, "--device", "cpu", "--show", "--out", tmp_path, status=2)
