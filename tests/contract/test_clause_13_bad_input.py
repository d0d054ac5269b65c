"""Clause 13: bad input says what must hold, what came (names, shapes, values), and what to do."""

import re
from contextlib import contextmanager, nullcontext

import pytest
import torch

import onchip
from tests import harness
from tests.machine import moved

OFFSETS = torch.tensor([0, 4, 10], dtype=torch.int32)


def tensors(heads=(4, 4), length_q=6, length_k=8, dim=16, dtype=torch.float32):
    return (
        torch.randn(2, heads[0], length_q, dim, dtype=dtype),
        torch.randn(2, heads[1], length_k, dim, dtype=dtype),
        torch.randn(2, heads[1], length_k, dim, dtype=dtype),
    )


def packed(tokens=10):
    return torch.randn(3, tokens, 4, 16).unbind()


@contextmanager
def values_checked(device):
    """Values on a CPU are checked in any case, those on a GPU on request."""
    with nullcontext() if device == "cpu" else onchip.checked():
        yield


def refuses(words, function, *positional, error=(ValueError, TypeError), **keywords):
    """The call raises, and its message holds every one of the words."""
    with pytest.raises(error) as caught:
        function(*positional, **keywords)
    message = str(caught.value)
    missing = [word for word in words if not re.search(word, message, re.IGNORECASE)]
    assert not missing, f"the message lacks {missing}: {message}"


def test_wrong_rank():
    query, key, value = tensors()
    refuses([r"query", r"\(2, 4, 96\)", r"length"], onchip.attention, query.flatten(2), key, value)
    refuses([r"key", r"\(4, 8, 16\)", r"length"], onchip.attention, query, key[0], value)
    refuses([r"query", r"\(2, 4, 6, 16\)", r"tokens"], onchip.attention_varlen, query, key, value, OFFSETS)


def test_mixed_dtypes():
    query, key, value = tensors()
    refuses(["query", "key", "float32", "bfloat16"], onchip.attention, query, key.bfloat16(), value)
    refuses(["value", "float32", "float64"], onchip.attention, query, key, value.double())


def test_integer_tensors():
    query, key, value = (tensor.int() for tensor in tensors())
    refuses(["query", "int32", "float16", "bfloat16", "float32", "float64"], onchip.attention, query, key, value)


def test_not_a_tensor():
    query, key, value = tensors()
    refuses(["key", "list"], onchip.attention, query, key.tolist(), value, error=TypeError)


def test_heads_that_are_not_a_multiple():
    query, key, value = tensors(heads=(4, 3))
    refuses(["heads", r"\b4\b", r"\b3\b", "multiple"], onchip.attention, query, key, value)


def test_shapes_that_do_not_fit_together():
    query, key, value = tensors()
    refuses(["batch", r"\b2\b", r"\b1\b"], onchip.attention, query, key[:1], value[:1])
    refuses(["dim", r"\b16\b", r"\b8\b"], onchip.attention, query, key[..., :8], value)
    refuses(["key", "value", r"\b8\b", r"\b7\b"], onchip.attention, query, key, value[:, :, :7])
    refuses(["key", "value", r"\b4\b", r"\b2\b"], onchip.attention, query, key, value[:, :2])


@pytest.mark.parametrize("window", [(-1, 0), (0, -2)])
def test_negative_window(window):
    refuses(["window", r"-[12]", "None"], onchip.attention, *tensors(), window=window, error=ValueError)
    refuses(["window", r"-[12]", "None"], lambda: onchip.masks.window(*window), error=ValueError)


def test_integer_window():
    refuses(["window", "128", r"w - 1, 0"], onchip.attention, *tensors(), window=128)


@pytest.mark.parametrize("window", [(1,), (1, 2, 3), "ab"], ids=str)
def test_malformed_window(window):
    refuses(["window", "left", "right"], onchip.attention, *tensors(), window=window)
    refuses(["window", "left", "1.5", "int"], onchip.attention, *tensors(), window=(1.5, 0), error=TypeError)


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_scale_that_is_not_finite(scale):
    refuses(["scale", str(scale), "finite"], onchip.attention, *tensors(), scale=scale, error=ValueError)


@pytest.mark.parametrize("probability", [-0.1, 1.0, 1.5, float("nan")])
def test_dropout_outside_its_range(probability):
    refuses(["dropout_p", str(probability), r"\b0\b", r"\b1\b"], onchip.attention, *tensors(), dropout_p=probability)


@pytest.mark.parametrize("seed", [1.5, torch.tensor([1.0]), torch.tensor([1, 2])], ids=["float", "float tensor", "two"])
def test_dropout_seed_of_the_wrong_kind(seed):
    refuses(["dropout_seed", "int"], onchip.attention, *tensors(), dropout_p=0.5, dropout_seed=seed)


@pytest.mark.parametrize("offsets", [[0, 6, 4, 10], [0, 10, 4]])
def test_decreasing_offsets(offsets, schedule, device):
    inputs = moved((*packed(), torch.tensor(offsets, dtype=torch.int32)), device)
    words = ["cu_seqlens", "decreas|ascend|sorted"]
    with values_checked(device):
        refuses(words, onchip.attention_varlen, *inputs, schedule=schedule, error=ValueError)


def test_offsets_beyond_the_tokens(schedule, device):
    *inputs, right, wrong = moved((*packed(), OFFSETS, torch.tensor([0, 4, 30], dtype=torch.int32)), device)
    numbers = [r"\b30\b", r"\b10\b"]
    with values_checked(device):
        refuses(["cu_seqlens", *numbers], onchip.attention_varlen, *inputs, wrong, schedule=schedule)
        refuses(["cu_seqlens_key", *numbers], onchip.attention_varlen, *inputs, right, wrong, schedule=schedule)


def test_offsets_that_do_not_start_at_zero(schedule, device):
    inputs = moved((*packed(), torch.tensor([2, 4, 10], dtype=torch.int32)), device)
    with values_checked(device):
        refuses(["cu_seqlens", r"\b2\b", r"\b0\b"], onchip.attention_varlen, *inputs, schedule=schedule)


def test_offsets_of_the_wrong_kind():
    refuses(["cu_seqlens_query", "float32", "int32"], onchip.attention_varlen, *packed(), OFFSETS.float())
    refuses(["cu_seqlens_query", r"\(1, 3\)"], onchip.attention_varlen, *packed(), OFFSETS[None])
    refuses(["cu_seqlens", r"\b3\b", r"\b2\b"], onchip.attention_varlen, *packed(), OFFSETS, OFFSETS[1:])


@pytest.mark.parametrize("lengths", [[3, 9], [-1, 2]])
def test_lengths_outside_the_tensor(lengths, schedule, device):
    words = ["lengths", str(min(lengths) if min(lengths) < 0 else max(lengths))]
    *inputs, wrong = moved((*tensors(), torch.tensor(lengths)), device)
    with values_checked(device):
        refuses(words, onchip.attention, *inputs, lengths=(None, wrong), schedule=schedule, error=ValueError)


def test_lengths_of_the_wrong_kind():
    refuses(["lengths", r"\b3\b", r"\b2\b"], onchip.attention, *tensors(), lengths=(None, torch.tensor([1, 2, 3])))
    refuses(["lengths", "float32", "int"], onchip.attention, *tensors(), lengths=(None, torch.tensor([1.0, 2.0])))
    refuses(["lengths", "query", "key"], onchip.attention, *tensors(), lengths=torch.tensor([1, 2]))


def test_wrong_mask_shape():
    refuses(["mask", r"\(8, 6\)", r"2, 4, 6, 8"], onchip.attention, *tensors(), mask=torch.ones(8, 6, dtype=torch.bool))
    mask = onchip.masks.keys(torch.ones(2, 7, dtype=torch.bool))
    refuses(["keys", r"\(2, 7\)", r"\b8\b"], onchip.attention, *tensors(), mask=mask)
    mask = onchip.masks.documents(torch.zeros(2, 6, dtype=torch.int64), torch.zeros(2, 6, dtype=torch.int64))
    refuses(["documents", r"\(2, 6\)", r"\b8\b"], onchip.attention, *tensors(), mask=mask)
    mask = onchip.masks.blocks(torch.ones(3, 3, dtype=torch.bool), size=4)
    refuses(["blocks", r"\(3, 3\)", r"2, 2"], onchip.attention, *tensors(), mask=mask)


def test_float_mask():
    mask = torch.zeros(6, 8)
    refuses(["mask", "float32", "bool", "scores.bias"], onchip.attention, *tensors(), mask=mask)
    refuses(["keys", "float32", "bool"], lambda: onchip.masks.keys(torch.zeros(8)))
    refuses(["tensor", "float32", "bool"], lambda: onchip.masks.tensor(mask))
    refuses(["blocks", "float32", "bool"], lambda: onchip.masks.blocks(mask))
    refuses(["documents", "float32", "int"], lambda: onchip.masks.documents(torch.zeros(8)))


def test_a_mask_that_is_no_mask():
    refuses(["mask", "str"], onchip.attention, *tensors(), mask="causal", error=TypeError)
    refuses(
        ["score", "mask|softcap|scores"], onchip.attention, *tensors(), score=onchip.masks.causal(), error=TypeError
    )


def test_unknown_diagonal():
    refuses(["diagonal", "middle", "bottom-right", "top-left"], lambda: onchip.masks.causal("middle"))


def test_wrong_score_shapes():
    query, key, value = tensors()
    scores = onchip.scores
    refuses(
        ["bias", r"\(8, 6\)", r"2, 4, 6, 8"], onchip.attention, query, key, value, score=scores.bias(torch.zeros(8, 6))
    )
    refuses(
        ["slopes|alibi", r"\(3,\)", r"\b4\b"], onchip.attention, query, key, value, score=scores.alibi(torch.zeros(3))
    )
    refuses(["sink", r"\(3,\)", r"\b4\b"], onchip.attention, query, key, value, score=scores.sink(torch.zeros(3)))
    refuses(["bias", "int64", "float"], lambda: scores.bias(torch.zeros(6, 8, dtype=torch.int64)))


@pytest.mark.parametrize("cap", [0.0, -3.0, float("nan"), float("inf")])
def test_softcap_that_is_not_positive(cap):
    refuses(["cap", str(cap), "positive|> 0|greater"], lambda: onchip.scores.softcap(cap), error=ValueError)


def test_unknown_schedule():
    words = ["schedule", "warp9", *onchip.dispatch.schedules()]
    refuses(words, onchip.attention, *tensors(), schedule="warp9", error=ValueError)
    refuses(words, onchip.plan, *tensors(), schedule="warp9", error=ValueError)


def test_functions_that_are_no_functions():
    refuses(["fn", "function", "int"], lambda: onchip.masks.predicate(3), error=TypeError)
    refuses(["fn", "function", "float"], lambda: onchip.scores.modify(2.0), error=TypeError)


def test_a_predicate_must_answer_with_bools():
    refuses(["predicate", "int64", "bool"], lambda: onchip.masks.predicate(lambda b, h, i, j: i - j), error=TypeError)


def test_nothing_is_written_on_an_error(schedule, device):
    """A refused call leaves its inputs as they were; one refused for its shapes draws no seed either."""
    *inputs, shaped, beyond = moved((*packed(), OFFSETS[None], torch.tensor([0, 4, 30])), device)
    generator_state = torch.get_rng_state if device == "cpu" else torch.cuda.get_rng_state
    before, state = [tensor.clone() for tensor in inputs], generator_state()
    with pytest.raises(ValueError):
        onchip.attention_varlen(*inputs, shaped, dropout_p=0.5, schedule=schedule)
    assert torch.equal(generator_state(), state)
    with values_checked(device), pytest.raises(ValueError):
        onchip.attention_varlen(*inputs, beyond, schedule=schedule)
    assert all(torch.equal(tensor, old) for tensor, old in zip(inputs, before, strict=True))


def test_plan_refuses_what_attention_refuses():
    refuses(["window", "-1"], onchip.plan, *tensors(), window=(-1, 0), error=ValueError)
    refuses(["query"], onchip.plan, torch.randn(2, 3), *tensors()[1:])
    refuses(["cu_seqlens_query"], onchip.plan_varlen, *packed(), OFFSETS.float())


def test_checked_validates_and_changes_nothing(schedule, device):
    """On a CPU values are checked anyway; inside `checked` right calls give the same bits."""
    *inputs, offsets = moved((*packed(), OFFSETS), device)
    plain = onchip.attention_varlen(*inputs, offsets, causal=True, schedule=schedule)
    with onchip.checked():
        assert torch.equal(onchip.attention_varlen(*inputs, offsets, causal=True, schedule=schedule), plain)
        with pytest.raises(ValueError, match="cu_seqlens"):
            onchip.attention_varlen(*inputs, offsets.flip(0), schedule=schedule)


def test_a_named_schedule_runs_or_raises(schedule, device):
    plan = onchip.plan(*moved(tensors(), device), schedule=schedule)
    assert schedule in (None, plan.forward)
    assert schedule not in plan.reasons or not plan.reasons[schedule]


def test_the_plan_gives_a_sentence_for_every_other_schedule(device):
    plan = onchip.plan(*moved(tensors(), device))
    known = set(onchip.dispatch.schedules())
    assert {plan.forward, plan.backward, plan.second_derivative} <= known
    assert known - {plan.forward, plan.backward} <= set(plan.reasons)
    for name, sentences in plan.reasons.items():
        assert name in str(plan)
        for sentence in sentences:
            assert len(sentence.split()) > 2 and sentence in str(plan)
    assert plan.forward in str(plan) and plan.second_derivative in str(plan)


def test_complete_schedules_are_registered():
    assert set(harness.COMPLETE) <= set(onchip.dispatch.schedules())
