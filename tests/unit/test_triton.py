"""What the Triton schedule decides on the host. Nothing is launched here."""

import importlib

import pytest
import torch
from hypothesis import given, strategies

import onchip
from onchip import masks, scores
from onchip.attention import _bind
from onchip.gpu import call as gpu
from onchip.gpu import source
from onchip.schedules.triton import launch

tiles = importlib.import_module("onchip.schedules.triton.tiles")


def call(monkeypatch, shape=(2, 4, 300, 64), *, cu=None, **keywords):
    """The call of a problem of zeros as an H100 would see it."""
    monkeypatch.setattr(gpu, "architecture", lambda device: "sm_90")
    options = {"causal": False, "window": None, "mask": None, "score": None, "lengths": None} | keywords
    x = torch.zeros(shape, dtype=torch.bfloat16)
    return launch.Call(_bind(x, x, cu, cu, x, *options.values(), None, 0.0, None, False, None, True))


@pytest.mark.parametrize("kind", ["plain", "short", "band", "masked", "changed", "few", "grouped"])
@pytest.mark.parametrize("architecture", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "gfx942", "interpreter"])
def test_every_problem_has_a_tile(architecture, kind):
    for kernel in tiles.KERNELS:
        for dim in (1, 40, 64, 65, 128, 129, 256):
            for bits in (16, 32):
                tile = tiles.tile_of(architecture, kernel, dim, bits, kind)
                assert 128 % tile.rows == 0 or kernel == tiles.FORWARD and kind in ("plain", "short", "band")
                assert 128 % tile.columns == 0, "a block of a list is walked in whole tiles"


@given(strategies.integers(-(2**37), 2**37))
def test_coded_ints_come_back(value):
    given = [source.coded(value)]
    assert eval(source.decoded(0), {"given": given}) == value
    assert given[0] % 2 == 1 and given[0] > 2**31, "Triton must see nothing special in it"


def test_float32_products_are_ieee_on_request():
    assert gpu.precision_of(torch.float32, "sm_90") == "tf32x3"
    assert gpu.precision_of(torch.float32, "gfx942") == "ieee"
    assert gpu.precision_of(torch.bfloat16, "sm_90") == "tf32"
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    try:
        assert gpu.precision_of(torch.float32, "sm_90") == "ieee"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def read_in_vectors(made):
    """Element sizes of the tensors that functions read in vectors."""
    return sorted(made.tensors[read[1]].element_size() for read in made.semantics.reads if read[-1] == "pair in eights")


def test_what_is_read_in_vectors(monkeypatch):
    """Eight columns in a row, none missing, and no more than tiles in shared memory have room for."""
    shape, dense = (1, 2, 64, 64), torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16)
    kept, wide = torch.ones(64, 64, dtype=torch.bool), torch.zeros(64, 64)
    for tensor, found in (
        (dense, [2]),
        (dense[0, 0], [2]),
        (dense[..., :1, :], [2]),
        (wide, []),
        (dense[..., :1], []),
        (dense.mT, []),
        (torch.zeros(64, 68, dtype=torch.bfloat16)[:, :64], []),
    ):
        made = call(monkeypatch, shape, score=scores.bias(tensor))
        assert read_in_vectors(made) == found and made.semantics.eights == bool(found), tensor.stride()
    ragged = call(monkeypatch, (1, 2, 60, 64), score=scores.bias(dense[..., :60, :60]))
    assert not ragged.semantics.eights
    other = masks.tensor(kept) & ~masks.tensor(kept.clone())
    assert read_in_vectors(call(monkeypatch, shape, mask=other, score=scores.bias(dense))) == [1, 2]
    assert read_in_vectors(call(monkeypatch, shape, mask=other)) == [1, 1]
    assert not call(monkeypatch, shape, mask=masks.blocks(kept[:1, :1])).semantics.eights
    ids = torch.arange(64) // 20
    for mask in (masks.documents(ids), masks.keys(kept[:1])):
        made = call(monkeypatch, shape, mask=mask)
        assert made.semantics.eights and read_in_vectors(made) == []
    assert not call(monkeypatch, shape, mask=masks.documents(ids.repeat_interleave(2)[::2])).semantics.eights


def test_pairs_follow_the_band(monkeypatch):
    everything = 2 * 4 * 300 * 300
    assert call(monkeypatch).pairs() == everything
    causal, window = call(monkeypatch, causal=True).pairs(), call(monkeypatch, window=(20, 0)).pairs()
    assert 0.5 * everything < causal < 0.75 * everything
    assert 2 * 4 * (21 * 300 - 210) < window < causal


def test_pairs_of_a_packed_batch_are_those_of_its_sequences(monkeypatch):
    cu = torch.tensor([0, 100, 100, 250], dtype=torch.int32)
    assert call(monkeypatch, (300, 4, 64), cu=cu).pairs() == 4 * (100 * 100 + 150 * 150)


def test_pairs_of_a_list_of_blocks_and_its_memory(monkeypatch):
    kept = torch.tensor([[True, False, False], [True, True, False], [False, False, True]])
    made = call(monkeypatch, (1, 2, 384, 64), mask=masks.blocks(kept))
    assert made.pairs() == 2 * 4 * 128 * 128
    assert made.workspace_bytes > 0 and call(monkeypatch, causal=True).workspace_bytes == 0


@pytest.mark.parametrize("kernel", [tiles.FORWARD, tiles.KEYS])
def test_lists_name_partial_blocks_before_full_ones(monkeypatch, kernel):
    ids = torch.arange(512) // 200
    order, counts, *_ = call(monkeypatch, (1, 1, 512, 64), mask=masks.documents(ids)).lists_for(kernel)
    # documents end at 200 and 400: block 0 is full of the first, block 1 of two, block 2 of the second, block 3 of two
    assert counts[0, 0].tolist() == [[1, 1], [4, 0], [2, 1], [3, 0]]
    assert [row[: sum(count)].tolist() for row, count in zip(order[0, 0], counts[0, 0], strict=True)] == [
        [1, 0], [0, 1, 2, 3], [1, 3, 2], [1, 2, 3],
    ]  # fmt: skip


def test_bands_of_every_diagonal_meet(monkeypatch):
    mask = masks.causal(7) & masks.window(20, 5, "top-left") & masks.window(None, 3, torch.tensor([0, 9]))
    band = call(monkeypatch, mask=mask, window=(30, None)).band
    assert (band.low, band.high) == (-20, 5)
    assert band.lows is None and band.highs.tolist() == [3, 12]
    padded = call(monkeypatch, causal=True, lengths=(None, torch.tensor([3, 300]))).band
    assert (padded.high, padded.high_aligned) == (None, 0)


def test_float32_is_copied_only_where_vectors_cannot_read_it():
    x = torch.zeros(1, 2, 30, 64)
    strided = torch.zeros(1, 2, 30, 128)[..., ::2]
    made = launch.Call(_bind(x, x, None, None, x, False, None, None, None, None, None, 0.0, None, False, None, True))
    assert made.readable(x)[0] is x and made.readable(x.transpose(1, 2))[0].data_ptr() == x.data_ptr()
    assert made.readable(strided)[0].is_contiguous()


def test_reasons_name_what_is_lacking():
    x = torch.zeros(1, 2, 8, 300)
    why = onchip.dispatch.schedules()["triton"].unsupported
    problem = _bind(x, x, None, None, x, False, None, None, None, None, None, 0.0, None, False, None, True)
    assert "GPU" in why(problem)[0]
