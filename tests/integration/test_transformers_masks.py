"""onchip's masks for transformers keep the pairs that transformers' own tensors keep."""

import functools

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

pytest.importorskip("transformers", minversion="5")

from transformers import masking_utils as own  # noqa: E402

import onchip  # noqa: E402
from onchip.integrations.transformers.pattern import Pattern, mask_function  # noqa: E402

make_mask = mask_function(own.sdpa_mask)


def pairs(mask, batch, rows, columns):
    """The visible pairs of a mask, bool (batch, 1, rows, columns): where a weight is not zero."""
    if isinstance(mask, torch.Tensor):
        return mask.expand(batch, 1, rows, columns)
    assert mask.shape == (batch, 1, rows, columns) and mask.ndim == 4
    query, key = torch.zeros(batch, 1, rows, 8), torch.zeros(batch, 1, columns, 8)
    value = torch.eye(columns).expand(batch, 1, -1, -1)
    lengths = None if mask.key_lengths is None else (None, mask.key_lengths)
    return onchip.attention(query, key, value, causal=mask.causal, mask=mask.mask, lengths=lengths) > 0


def tensor(**arguments):
    """What transformers makes of the same arguments."""
    return own.sdpa_mask(**{**arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


def assert_same(native=True, **arguments):
    batch, rows, columns = arguments["batch_size"], arguments["q_length"], arguments["kv_length"]
    mask = make_mask(**arguments)
    assert isinstance(mask, Pattern) is native
    if native and mask.mask is not None:
        assert not list(mask.mask.pair_tensors())
    assert torch.equal(pairs(mask, batch, rows, columns), tensor(**arguments))


@st.composite
def shapes(draw):
    """Batch, lengths and offsets of a call: all tokens, a step of a cache, or a cache that rolls."""
    batch, rows, past = draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.integers(0, 7))
    dropped = draw(st.integers(0, past))
    ahead = draw(st.sampled_from([0, 0, 4]))
    call = {"batch_size": batch, "q_length": rows, "kv_length": rows + past - dropped + ahead}
    return {**call, "q_offset": past, "kv_offset": dropped}


def draw_padding(draw, call):
    """None, or a bool mask of the tokens that may be shorter than a cache: right, left, or anything."""
    kind = draw(st.sampled_from(["none", "all", "right", "left", "any"]))
    if kind == "none":
        return None
    batch, tokens = call["batch_size"], call["q_length"] + call["q_offset"]
    counts = torch.tensor(draw(st.lists(st.integers(0, tokens), min_size=batch, max_size=batch)))[:, None]
    place = torch.arange(tokens)[None]
    if kind == "all":
        return torch.ones(batch, tokens, dtype=torch.bool)
    if kind == "right":
        return place < counts
    if kind == "left":
        return place >= counts
    bits = draw(st.lists(st.booleans(), min_size=batch * tokens, max_size=batch * tokens))
    return torch.tensor(bits).reshape(batch, tokens)


def draw_ids(draw, call, lowest):
    extent = call["kv_length"] + call["kv_offset"]
    extent = max(extent, call["q_length"] + call["q_offset"])
    count = call["batch_size"] * extent
    return torch.tensor(draw(st.lists(st.integers(lowest, 3), min_size=count, max_size=count))).reshape(-1, extent)


@settings(max_examples=150)
@given(st.data())
def test_patterns_of_transformers(data):
    draw = data.draw
    call = draw(shapes())
    padding = draw_padding(draw, call)
    size = draw(st.integers(1, 6))
    starts = torch.tensor([draw(st.integers(0, 4)) for _ in range(call["batch_size"])])
    function = draw(
        st.sampled_from(
            [
                own.causal_mask_function,
                own.bidirectional_mask_function,
                own.sliding_window_causal_mask_function(size),
                own.sliding_window_bidirectional_mask_function(size),
                own.chunked_causal_mask_function(size, starts),
            ]
        )
    )
    if draw(st.booleans()):
        # a cache of fixed size counts its tokens on the device
        call["q_offset"] = torch.tensor(call["q_offset"])
    assert_same(**call, mask_function=function, attention_mask=padding)


@settings(max_examples=150)
@given(st.data())
def test_overlays(data):
    """Blocks that see each other (images in text), documents, prefixes: unions and intersections with causality."""
    draw = data.draw
    call = draw(shapes())
    padding = draw_padding(draw, call)
    blocks = own.blockwise_overlay(draw_ids(draw, call, -1))
    ids = draw_ids(draw, call, 0)
    prefix = torch.tensor([draw(st.integers(0, 5)) for _ in range(call["batch_size"])])
    flags = ids > 1
    overlay = draw(
        st.sampled_from(
            [
                blocks,
                own.packed_sequence_mask_function(ids),
                own.padding_mask_function(flags),
                lambda b, h, q, k: k < prefix[b],
                lambda b, h, q, k: q % 3 == 0,
                lambda b, h, q, k: (ids[b, k] != ids[b, q]) | (k > 3),
                lambda b, h, q, k: (q >= 2) & (k - q < 3),
                lambda b, h, q, k: k + 2 <= q,
                lambda b, h, q, k: flags[b, q],
                lambda b, h, q, k: abs(k - q) < 2,
            ]
        )
    )
    combine = draw(st.sampled_from([own.and_masks, own.or_masks]))
    function = combine(draw(st.sampled_from([own.causal_mask_function, own.bidirectional_mask_function])), overlay)
    assert_same(**call, mask_function=function, attention_mask=padding, use_vmap=True)


@given(st.data())
def test_packed_positions(data):
    """Documents that start again at position 0, under causality, windows, chunks and blocks."""
    draw = data.draw
    parts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    positions = torch.cat([torch.arange(part) for part in parts])[None].repeat(2, 1)
    length = positions.shape[1]
    size = draw(st.integers(1, 4))
    function = draw(
        st.sampled_from(
            [
                own.causal_mask_function,
                own.sliding_window_causal_mask_function(size),
                own.chunked_causal_mask_function(size, torch.zeros(2, dtype=torch.int64)),
            ]
        )
    )
    if hasattr(own, "remap_positions_for_packed_sequence"):
        function = own.remap_positions_for_packed_sequence(function, positions)
    call = {"batch_size": 2, "q_length": length, "kv_length": length}
    if draw(st.booleans()):
        function = own.or_masks(
            function, own.blockwise_overlay(draw_ids(draw, {**call, "q_offset": 0, "kv_offset": 0}, -1))
        )
    documents = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    function = own.and_masks(function, own.packed_sequence_mask_function(documents))
    assert_same(**call, mask_function=function, allow_is_causal_skip=False)


POSITIONS = torch.tensor([[0, 2, 1, 3, 0, 1]])


@pytest.mark.parametrize(
    "function",
    [
        lambda b, h, q, k: (q * k) % 3 == 0,
        lambda b, h, q, k: torch.where(k <= q, k % 2 == 0, k % 3 == 0),
        lambda b, h, q, k: POSITIONS[b, k] <= POSITIONS[b, q],
        lambda b, h, q, k: (q - k) * 2 > 3,
        lambda b, h, q, k: abs(q - k) >= 2,
    ],
)
def test_what_is_not_understood_is_a_tensor(function):
    assert_same(native=False, batch_size=1, q_length=6, kv_length=6, mask_function=function, use_vmap=False)


def test_positions_are_not_taken_for_indices():
    """Only where transformers packs do differences of positions stand for those of indices."""
    call = {"batch_size": 1, "q_length": 6, "kv_length": 6}
    function = own.and_masks(
        lambda b, h, q, k: POSITIONS[b, k] <= POSITIONS[b, q], own.packed_sequence_mask_function(POSITIONS // 4)
    )
    assert_same(native=False, **call, mask_function=function, use_vmap=True)


@pytest.mark.parametrize("function", [own.causal_mask_function, own.bidirectional_mask_function])
def test_a_caller_that_computes_with_the_mask_gets_a_tensor(function):
    """Such callers say that the mask may not be skipped."""
    call = {"batch_size": 2, "q_length": 5, "kv_length": 5, "mask_function": function, "allow_is_causal_skip": False}
    assert_same(native=False, **call)
    assert_same(native=True, **call, allow_is_bidirectional_skip=True)


def test_a_mask_that_is_ready_is_returned():
    mask = make_mask(2, 5, 5)
    assert make_mask(2, 1, 6, 5, attention_mask=mask) is mask
    assert torch.equal(pairs(mask, 2, 5, 5), tensor(batch_size=2, q_length=5, kv_length=5))


def test_what_hides_nothing_is_left_out():
    """So the call is a plain one, which is bound once."""
    window = functools.partial(make_mask, mask_function=own.sliding_window_causal_mask_function(8))
    square, step, rolled = window(1, 6, 6), window(1, 1, 6, 5), window(1, 1, 8, 20, 13)
    assert (square.mask, square.causal) == (None, True)
    assert (step.mask, step.causal) == (rolled.mask, rolled.causal) == (None, False)
    everything = make_mask(1, 6, 6, attention_mask=torch.ones(1, 6, dtype=torch.bool))
    assert (everything.mask, everything.causal, everything.key_lengths) == (None, True, None)
    assert window(1, 9, 9).mask is not None
