"""The file of tuned tiles: which one is read, what is refused, and what a call then takes. No card is needed."""

import dataclasses
import json

import pytest
import torch
from hypothesis import given, strategies

import onchip
from onchip.gpu import call as gpu
from onchip.model.cache import cache_path
from onchip.schedules.triton import limits, tuned
from onchip.schedules.triton.launch import Call
from onchip.schedules.triton.tiles import KINDS, Tile, tile_of
from onchip.schedules.triton.tuned import Entry, Key, choose, read, write

KEY = Key(device="NVIDIA H200", architecture="sm_90", torch="2.11.0", triton="3.6.0", kernels="0123")
SHARED = 227 * 1024
CUDA = torch.device("cuda", 0)


TUNED = Tile(64, 32, 4, 2)


def entry(kernel="forward", dim=128, bits=16, kind="band", tile=TUNED, **more):
    given = {"ms": 0.5, "shipped_ms": 1.0, "ratio": 0.5, "tuned_on": "2026-11-30"} | more
    return Entry(kernel=kernel, dim=dim, bits=bits, kind=kind, tile=tile, shipped=Tile(128, 128, 8, 3), **given)


@pytest.fixture
def card(tmp_path, monkeypatch):
    """A card whose file the test writes: what asks the driver is answered here."""
    path = tmp_path / "card.json"
    monkeypatch.delenv(tuned.SWITCH, raising=False)
    monkeypatch.setattr(tuned, "tuned_path", lambda device: path)
    monkeypatch.setattr(tuned, "key_of", lambda device: KEY)
    monkeypatch.setattr(tuned, "shared_bytes", lambda device: SHARED)
    tuned.forget()
    yield path
    tuned.forget()


def tile(dim=128, kernel="forward", bits=16, kind="band", device=CUDA):
    return choose(device, "sm_90", kernel, dim, bits, kind)


SHIPPED = tile_of("sm_90", "forward", 128, 16, "band")


def test_what_is_written_comes_back(tmp_path):
    entries = (entry(), entry(kernel="keys", kind="grouped", bits=32))
    write(tmp_path / "deep" / "card.json", KEY, reversed(entries))
    assert read(tmp_path / "deep" / "card.json", KEY, SHARED).entries == entries
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["card.json"]


def test_a_call_takes_the_tuned_tile(card):
    assert tile().source == "shipped" and tile().tile == SHIPPED
    write(card, KEY, [entry()])
    assert tile().source == "shipped", "a process reads the file once"
    tuned.forget()
    assert tile() == tuned.Choice(TUNED, "tuned here on 2026-11-30")
    assert tile(kind="plain").source == tile(kernel="keys").source == tile(bits=32).source == "shipped"
    assert tile(device=None).source == "shipped", "a plan for another card knows nothing of this one"
    assert choose(CUDA, "interpreter", "forward", 128, 16, "band").tile == Tile(16, 32, 1, 1)


def test_the_file_is_read_once(card, monkeypatch):
    write(card, KEY, [entry()])
    reads = []
    monkeypatch.setattr(tuned, "read", lambda *given: reads.append(given) or tuned.Stored((entry(),)))
    for dim in (70, 80, 128, 128):
        for kind in ("band", "plain"):
            tile(dim, kind=kind)
    assert len(reads) == 1


def test_head_dims_between_rows_take_that_of_their_row(card):
    write(card, KEY, [entry(dim=96), entry(dim=256, tile=Tile(32, 16, 4, 1))])
    assert [tile(dim).tile for dim in (65, 96)] == [TUNED] * 2
    assert [tile(dim).tile for dim in (129, 256)] == [Tile(32, 16, 4, 1)] * 2
    for dim in (1, 64, 97, 128):
        assert tile(dim) == tuned.Choice(tile_of("sm_90", "forward", dim, 16, "band"), "shipped")


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Key)])
def test_a_file_of_another_key_is_ignored(card, field, recwarn):
    write(card, dataclasses.replace(KEY, **{field: "other"}), [entry()])
    assert tile().source == "shipped" and not recwarn
    stored = read(card, KEY, SHARED)
    assert field in stored.reason and "other" in stored.reason and not stored.broken


def test_the_switch_ignores_the_file(card, monkeypatch):
    write(card, KEY, [entry()])
    monkeypatch.setenv(tuned.SWITCH, "0")
    assert tile().source == "shipped"


def text_of(**fields):
    row = dataclasses.asdict(entry()) | fields
    return json.dumps({"format": tuned.FORMAT, "key": dataclasses.asdict(KEY), "rows": [row]})


BROKEN = {
    "empty": "",
    "cut": text_of()[:-9],
    "no object": "[]",
    "binary": "\udcff",
    "rows left out": json.dumps({"format": tuned.FORMAT, "key": dataclasses.asdict(KEY)}),
    "a field more": text_of(more=1),
    "unknown kernel": text_of(kernel="delta"),
    "kind of another kernel": text_of(kind="grouped"),
    "head dim": text_of(dim=512),
    "bits": text_of(bits=8),
    "rows not a power of two": text_of(tile={"rows": 48, "columns": 64, "warps": 4, "stages": 2}),
    "rows below a product's": text_of(tile={"rows": 8, "columns": 64, "warps": 4, "stages": 2}),
    "wider than a block of the lists": text_of(tile={"rows": 128, "columns": 256, "warps": 8, "stages": 2}),
    "warps": text_of(tile={"rows": 64, "columns": 64, "warps": 3, "stages": 2}),
    "no stage": text_of(tile={"rows": 64, "columns": 64, "warps": 4, "stages": 0}),
    "registers": text_of(tile={"rows": 64, "columns": 64, "warps": 4, "stages": 2, "registers": 100}),
    "registers of other warps": text_of(tile={"rows": 64, "columns": 64, "warps": 8, "stages": 2, "registers": 168}),
    "half a register": text_of(tile={"rows": 64, "columns": 64, "warps": 4, "stages": 2, "registers": 128.0}),
    "TMA": text_of(tile={"rows": 64, "columns": 64, "warps": 4, "stages": 2, "tma": 1}),
    "a bool": text_of(tile={"rows": 64, "columns": 64, "warps": True, "stages": 2}),
    "shared memory": text_of(dim=256, tile={"rows": 64, "columns": 128, "warps": 8, "stages": 5}),
    "time": text_of(ms=float("nan")),
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_ignored_with_one_warning(card, text):
    card.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.warns(UserWarning, match="is ignored, and shipped tiles are used") as warned:
        for dim in (65, 100, 128):
            assert tile(dim).source == "shipped"
    assert len(warned) == 1


numbers = strategies.one_of(
    strategies.sampled_from([1, 2, 4, 8, 16, 32, 64, 128]),
    strategies.sampled_from([0, 48, 256, 2**31, -16, "64"]),
    strategies.floats(),
    strategies.none(),
    strategies.booleans(),
)


@given(
    sizes=strategies.tuples(numbers, numbers, numbers, numbers, numbers),
    dim=strategies.sampled_from([64, 128, 256]),
    of=strategies.sampled_from([(kernel, kind) for kernel, kinds in KINDS.items() for kind in kinds]),
)
def test_no_number_in_a_file_names_a_tile_that_kernels_cannot_have(tmp_path_factory, sizes, dim, of):
    """Whatever a file says, what is read is a tile of the ones whose results are tested, within the shared memory."""
    path = tmp_path_factory.mktemp("drawn") / "card.json"
    drawn = dict(zip(("rows", "columns", "warps", "stages", "registers"), sizes, strict=True))
    path.write_text(text_of(tile=drawn, dim=dim, kernel=of[0], kind=of[1]))
    for found in read(path, KEY, SHARED).entries:
        assert 128 % found.tile.rows == 128 % found.tile.columns == 0
        assert found.tile.rows >= 16 and found.tile.columns >= 16
        assert found.tile.warps in limits.WARPS and found.tile.stages in limits.STAGES
        assert found.tile.registers in (None, *limits.BOUNDS.get(found.tile.warps, ()))
        assert type(found.tile.registers) in (int, type(None))
        assert limits.least_shared(found.tile, of[0], dim, 16) <= SHARED


def test_a_tile_tried_out_is_taken_back(card):
    write(card, KEY, [entry(kind="plain")])
    assert tile(kind="plain").source != "shipped"
    with pytest.raises(KeyboardInterrupt), tuned.substituted(CUDA, [entry(tile=Tile(16, 16, 4, 1))]):
        assert tile().tile == Tile(16, 16, 4, 1) and tile(kind="plain").source == "shipped"
        raise KeyboardInterrupt
    assert tile().source == "shipped" and tile(kind="plain").source != "shipped"


def test_the_call_and_the_plan_of_a_card_take_it(card, monkeypatch):
    write(card, KEY, [entry(dim=64), entry("queries", 64, tile=Tile(32, 16, 4, 2))])
    monkeypatch.setattr(gpu, "architecture", lambda device: "sm_90")
    x = torch.zeros(1, 2, 1100, 64, dtype=torch.bfloat16)
    plan = onchip.plan(x, x, x, causal=True)
    call = Call(dataclasses.replace(plan.problem, device=CUDA))
    assert call.tile("forward") == TUNED
    assert call.tile_source("queries") == "tuned here on 2026-11-30"
    assert call.tile_source("keys") == "shipped"
    there = plan.on(onchip.model.presets.PRESETS["h200"])
    assert there.kernels[0].tile_source == "shipped" and "columns (shipped); backward" in str(there)


def test_one_folder_holds_what_is_known_of_devices(monkeypatch, tmp_path):
    monkeypatch.setenv("ONCHIP_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_path("tiles", "NVIDIA H200 (x)") == tmp_path / "own" / "tiles" / "nvidia-h200-x.json"
    monkeypatch.delenv("ONCHIP_CACHE")
    assert cache_path("tiles", "NVIDIA H200") == tmp_path / "xdg" / "onchip" / "tiles" / "nvidia-h200.json"
