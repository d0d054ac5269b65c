"""The audit's parts: input laws, the reference and the bounds, the drift of a training, and the text it trains on."""

import dataclasses
import gzip
import hashlib
import json
import math
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from onchip.audit import bounds, contenders, drift, gpt, laws, record, reference, text
from tests import oracle

DATA = Path(__file__).parents[2] / "examples" / "data"
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SHAPE = gpt.Shape(layers=2, heads=2, width=16, context=12)


def drawn(law="normal", *, batch=2, heads=2, length=40, dim=8, causal=False, lse_gradient=False, seed=0):
    size = laws.Size(batch=batch, heads=heads, length=length, dim=dim)
    return laws.draw(law, size, causal=causal, lse_gradient=lse_gradient, seed=seed)


def as_problem(inputs):
    leaves = {"query": inputs.query, "key": inputs.key, "value": inputs.value}
    d_lse = torch.zeros(inputs.query.shape[:3]) if inputs.d_lse is None else inputs.d_lse
    return oracle.Problem(leaves, causal=inputs.causal, scale=inputs.scale), inputs.d_out, d_lse


def weights_of(inputs):
    return contenders.eager_scores(
        inputs.query.double(), inputs.key.double(), inputs.scale, causal=inputs.causal
    ).softmax(-1)


# Laws


@pytest.mark.parametrize("law", laws.LAWS)
def test_a_law_draws_the_same_each_time_and_another_with_another_seed(law):
    first, again, other = drawn(law), drawn(law), drawn(law, seed=1)
    for name in ("query", "key", "value", "d_out"):
        assert torch.equal(getattr(first, name), getattr(again, name))
        assert not torch.equal(getattr(first, name), getattr(other, name))


def test_outliers_have_the_moments_of_their_law():
    entries = drawn("outliers", length=2000, dim=64).query
    assert (entries.abs() > 6).float().mean() == pytest.approx(0.001 * math.erfc(6 / 202**0.5), rel=0.2)
    assert entries.var() == pytest.approx(1 + 100 * 0.001, rel=0.05)


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_lie_at_ten_thousand_in_every_dtype(dtype):
    inputs = drawn("logits", length=200, dim=64).to("cpu", dtype)
    scores = contenders.eager_scores(inputs.query.double(), inputs.key.double(), inputs.scale, causal=False)
    beside = scores.abs() - 1e4
    assert beside.abs().max() < 10 and 0.8 < beside.std() < 1.2
    assert 0.4 < (scores > 0).double().mean() < 0.6


@pytest.mark.parametrize("causal", [False, True])
def test_one_hot_rows_have_nearly_all_weight_on_one_key(causal):
    largest = weights_of(drawn("one-hot", length=200, dim=64, causal=causal)).amax(-1)
    assert largest.median() > 0.99


def test_inputs_keep_the_precision_of_the_lse_and_a_sequence_alone_keeps_its_values():
    inputs = drawn(lse_gradient=True).to("cpu", torch.bfloat16)
    assert (inputs.query.dtype, inputs.d_lse.dtype) == (torch.bfloat16, torch.float32)
    alone = inputs.sequence(1)
    for name in ("query", "key", "value", "d_out", "d_lse"):
        assert torch.equal(getattr(alone, name), getattr(inputs, name)[1:])


# Reference, eager attention and bounds


@given(
    law=st.sampled_from(sorted(laws.LAWS)),
    batch=st.integers(1, 2),
    heads=st.integers(1, 2),
    length=st.integers(1, 40),
    dim=st.integers(1, 16),
    causal=st.booleans(),
    lse_gradient=st.booleans(),
    rows=st.integers(1, 50),
    dtype=st.sampled_from(DTYPES),
)
def test_reference_and_bounds_are_those_of_the_oracle(
    law, batch, heads, length, dim, causal, lse_gradient, rows, dtype
):
    sizes = {"batch": batch, "heads": heads, "length": length, "dim": dim}
    inputs = drawn(law, causal=causal, lse_gradient=lse_gradient, **sizes).to("cpu", dtype)
    with mock.patch.object(reference, "BLOCK_BYTES", 8 * batch * heads * length * rows):
        exact = reference.reference(inputs)
    problem, d_out, d_lse = as_problem(inputs)
    expected = dict(oracle.reference(problem, d_out, d_lse).items())
    slacks = oracle.slack(problem, oracle.reference(problem, d_out, d_lse), d_out)
    assert exact.results.keys() == expected.keys()
    for name, tensor in exact.results.items():
        # weights of large scores know no more than the scores' own spacing
        size = max(oracle.largest(expected[name]), exact.terms.get(name, 0.0))
        unit = 1e-15 * max(1.0, oracle.largest(expected["lse"]))
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=50 * unit * size)
        standard = bounds.Error(rmse=0.5, maximum=1.0, relative=0.5)
        share = 1e-12 if dtype == torch.float64 else torch.finfo(dtype).eps
        allowed = share * oracle.largest(expected[name]) + slacks.get(name, 0.0) + 2.0 * (dtype != torch.float64)
        assert bounds.bound(name, exact, standard, dtype) == pytest.approx(allowed, rel=1e-9)


@pytest.mark.parametrize("lse_gradient", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_eager_attention_is_the_standard_of_the_oracle(causal, lse_gradient):
    inputs = drawn(causal=causal, lse_gradient=lse_gradient)
    expected = dict(oracle.standard(*as_problem(inputs)).items())
    for name, tensor in contenders.eager(inputs).items():
        torch.testing.assert_close(tensor, expected[name])


def test_eager_attention_stays_in_its_dtype():
    assert {tensor.dtype for tensor in contenders.eager(drawn().to("cpu", torch.bfloat16)).values()} == {torch.bfloat16}


def test_errors_of_known_tensors():
    exact = torch.tensor([0.0, 4.0, -8.0, 2.0], dtype=torch.float64)
    assert bounds.measure(exact.float(), exact) == bounds.Error(0.0, 0.0, 0.0)
    error = bounds.measure(torch.tensor([0.0, 4.0, -8.0, 4.0]), exact)
    assert error == bounds.Error(rmse=1.0, maximum=2.0, relative=0.25)
    zero = torch.zeros(4, dtype=torch.float64)
    assert bounds.measure(zero, zero).relative == 0.0
    assert bounds.measure(exact, zero).relative == math.inf


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_has_an_infinite_error(wrong):
    error = bounds.measure(torch.tensor([1.0, wrong]), torch.ones(2, dtype=torch.float64))
    assert error.maximum == error.rmse == error.relative == math.inf


def test_a_result_of_another_shape_has_no_error():
    with pytest.raises(ValueError, match="must have one shape"):
        bounds.measure(torch.zeros(1, 3), torch.zeros(3, dtype=torch.float64))


def test_same_bits_tells_zeros_apart_and_knows_nan():
    def result(*values):
        return {"out": torch.tensor(values)}

    assert contenders.same_bits(result(math.nan, 1.0), result(math.nan, 1.0))
    assert not contenders.same_bits(result(0.0), result(-0.0))
    assert not contenders.same_bits(result(0.0), {})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_rounded_output_alone_accounts_for_the_gradients_of_nearly_one_hot_rows(dtype):
    """delta = rowsum(dO * O) reads the output as it was rounded: what docs/numerics.md says of flash attention."""
    inputs = drawn("one-hot", length=600, dim=64).to("cpu", dtype)
    exact = reference.reference(inputs).results
    query, key, value, d_out = (part.double() for part in (inputs.query, inputs.key, inputs.value, inputs.d_out))
    weights = weights_of(inputs)

    def gradient_errors(out):
        delta = (d_out * out).sum(-1, keepdim=True)
        d_scores = weights * (d_out @ value.mT - delta) * inputs.scale
        found = {"d_query": d_scores @ key, "d_key": d_scores.mT @ query}
        return [bounds.measure(part.to(dtype), exact[name]).relative for name, part in found.items()]

    rounded = gradient_errors((weights @ value).to(dtype).double())
    tiled = contenders.run_schedule(inputs, "tiled")
    assert [bounds.measure(tiled[name], exact[name]).relative for name in ("d_query", "d_key")] == pytest.approx(
        rounded, rel=0.1
    )
    assert min(rounded) > 5 * max(gradient_errors(weights @ value))


# Wasserstein distance


@given(values=st.lists(st.integers(-50, 50), min_size=1, max_size=30), shift=st.integers(-20, 20), random=st.randoms())
def test_the_distance_to_a_shuffled_and_shifted_tensor_is_the_shift(values, shift, random):
    moved = [value + shift for value in values]
    random.shuffle(moved)
    left, right = torch.tensor(values).double(), torch.tensor(moved).double()
    assert drift.wasserstein(left, right) == drift.wasserstein(right, left) == abs(shift)


def test_the_distance_of_known_distributions():
    assert drift.wasserstein(torch.tensor([0.0, 0.0, 1.0, 1.0]), torch.tensor([[1.0, 1.0], [1.0, 1.0]])) == 0.5
    # uniform on [0, 1] and on [0, 2]: the integral of |x - 2 x| over the quantiles
    grid = torch.arange(1000).double() / 999
    assert drift.wasserstein(grid, 2 * grid) == pytest.approx(0.5)


@pytest.mark.parametrize("sizes", [(3, 4), (0, 0)])
def test_the_distance_needs_as_many_entries(sizes):
    with pytest.raises(ValueError, match="as many entries"):
        drift.wasserstein(*(torch.zeros(size) for size in sizes))


# The model


def test_the_model_sees_no_later_byte():
    model = gpt.GPT(SHAPE)
    tokens = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 7:] = 0
    logits, other = model(tokens), model(changed)
    torch.testing.assert_close(other[:, :7], logits[:, :7])
    assert not torch.equal(other[:, 7:], logits[:, 7:])


def test_attention_changes_neither_the_weights_nor_what_they_mean():
    models = {name: gpt.GPT(SHAPE, name, seed=3) for name in gpt.ATTENTIONS}
    windows = torch.randint(256, (2, 13), generator=torch.Generator().manual_seed(0))
    losses = {name: gpt.next_byte_loss(model, windows).item() for name, model in models.items()}
    first = models["eager"].state_dict()
    for name, model in models.items():
        assert all(torch.equal(first[key], weights) for key, weights in model.state_dict().items())
        assert losses[name] == pytest.approx(losses["eager"], abs=1e-5)
    assert losses["eager"] == pytest.approx(math.log(256), abs=0.1)


def test_the_loss_is_that_of_the_next_byte():
    def counts(tokens):
        """Sure that a byte is followed by the next number."""
        return 100.0 * torch.nn.functional.one_hot(tokens + 1, 256)

    windows = torch.arange(20).view(2, 10)
    assert gpt.next_byte_loss(counts, windows) == 0
    assert gpt.next_byte_loss(counts, windows.flip(1)) == pytest.approx(100)


def test_a_model_leaves_the_generator_alone():
    before = torch.get_rng_state()
    gpt.GPT(SHAPE, seed=5)
    assert torch.equal(torch.get_rng_state(), before)


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="multiple of heads: got width 16 and 3 heads"):
        dataclasses.replace(SHAPE, heads=3)


# The training


def make_text(size=2000):
    data = torch.randint(97, 105, (size,), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    return text.Text("made", "0" * 64, data)


def training(**changes):
    plain = drift.Training(
        shape=SHAPE, batch=2, steps=5, every=2, rate=1e-2, seed=0, dtype=torch.bfloat16, device="cpu"
    )
    return dataclasses.replace(plain, **changes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_eager_attention_does_not_drift_from_itself(dtype):
    told = []
    trained = drift.train(training(dtype=dtype), make_text(), told.append)
    assert len(told) == 5
    assert trained.losses["eager"] == trained.losses["eager again"]
    by_pair = {pair.name: [d for d in trained.drifts if d.pair == pair.name] for pair in drift.pairs(dtype)}
    for drifts in by_pair.values():
        assert [one.step for one in drifts] == [2, 4, 5]
    for one in by_pair["repeat"]:
        assert (one.loss_difference, one.largest, one.wasserstein_largest, one.wasserstein_mean) == (0, 0, 0, 0)
    for one in by_pair["low precision"]:
        # a distribution cannot move further than its entries do
        assert 0 < one.wasserstein_mean <= one.wasserstein_largest <= one.largest


def test_each_attention_is_the_one_that_its_run_names(monkeypatch):
    """Attention that halves its output must show in the drift of its own pairs, and in no other."""
    clean = drift.train(training(), make_text(), lambda words: None)
    wrong = {**gpt.ATTENTIONS, "onchip": lambda q, k, v: gpt.onchip_attention(q, k, v) / 2}
    monkeypatch.setattr(gpt, "ATTENTIONS", wrong)
    changed = drift.train(training(), make_text(), lambda words: None)
    moved = {a.pair for a, b in zip(clean.drifts, changed.drifts, strict=True) if a != b}
    assert moved == {"onchip", "both"}
    assert {name for name in clean.losses if clean.losses[name] != changed.losses[name]} == {"onchip"}


def test_training_learns_and_restores_torchs_switch():
    trained = drift.train(training(steps=30, every=30), make_text(), lambda words: None)
    assert all(losses[-1] < losses[0] - 1 for losses in trained.losses.values())
    assert not torch.are_deterministic_algorithms_enabled()


def test_products_are_in_the_dtype_of_the_run(monkeypatch):
    seen = []

    def watch(query, key, value):
        seen.append((query.dtype, torch.is_autocast_enabled("cpu")))
        return gpt.eager_attention(query, key, value)

    monkeypatch.setattr(gpt, "ATTENTIONS", dict.fromkeys(gpt.ATTENTIONS, watch))
    drift.train(training(steps=1, every=1), make_text(), lambda words: None)
    layers = SHAPE.layers
    assert seen == [(torch.bfloat16, False)] * 4 * layers + [(torch.float32, False)] * layers


# The text


def test_the_excerpt_is_the_one_that_its_files_describe():
    read = text.read_text(None)
    assert read.sha256 == hashlib.sha256(bytes(read.data.tolist())).hexdigest()
    hashes = {
        name: re.findall(r"\b[0-9a-f]{64}\b", (DATA / name).read_text())
        for name in ("README.md", "make_shakespeare.py")
    }
    assert len(hashes["README.md"]) == 2 and sorted(hashes["README.md"]) == sorted(hashes["make_shakespeare.py"])
    assert read.sha256 in hashes["README.md"]
    assert f"{read.data.numel():,} bytes" in (DATA / "README.md").read_text()
    words = bytes(read.data.tolist()).decode("ascii").lower()
    assert "to be, or not to be" in words
    assert not [word for word in ("gutenberg", "etext", "copyright", "www.") if word in words]


def test_a_text_is_read_plain_and_packed(tmp_path):
    raw = b"some bytes\x00\xff"
    (tmp_path / "plain.txt").write_bytes(raw)
    (tmp_path / "packed.txt.gz").write_bytes(gzip.compress(raw))
    for name in ("plain.txt", "packed.txt.gz"):
        read = text.read_text(tmp_path / name)
        assert (read.name, bytes(read.data.tolist())) == (name, raw)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.txt", None, "cannot be read"),
        ("broken.gz", b"no archive", "cannot be read"),
        ("half.gz", gzip.compress(bytes(100))[:-9], "cannot be read"),
        ("short.txt", b"abc", "a window takes 4 bytes: .* has 3"),
    ],
    # an archive holds the time: as part of a name it would tell workers apart
    ids=["missing", "broken", "half", "short"],
)
def test_what_cannot_be_read_is_named(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        text.read_text(tmp_path / name, 4)


@given(size=st.integers(1, 60), length=st.integers(1, 60), seed=st.integers(0, 99))
def test_windows_are_pieces_of_the_text(size, length, seed):
    length = min(size, length)
    counting = text.Text("counting", "", torch.arange(size, dtype=torch.uint8))
    windows = text.draw_windows(counting, 5, length, torch.Generator().manual_seed(seed))
    assert windows.shape == (5, length) and windows.dtype == torch.int64
    assert torch.equal(windows, windows[:, :1] + torch.arange(length))
    assert windows.max() < size


# The record


def test_a_record_is_plain_json():
    @dataclasses.dataclass(frozen=True)
    class Part:
        dtype: torch.dtype
        values: tuple

    written = record.to_json({"part": Part(torch.bfloat16, (1, math.inf, math.nan, 0.5, None, True))})
    assert json.loads(written) == {"part": {"dtype": "bfloat16", "values": [1, None, None, 0.5, None, True]}}


def test_a_record_says_where_it_comes_from():
    head = json.loads(record.to_json(record.stamp("suite", "cpu")))
    assert head["suite"] == "suite" and head["where"]["torch_version"] == torch.__version__
    assert set(head) == {"format", "suite", "created", "onchip", "commit", "where"}
