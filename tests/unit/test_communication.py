"""Sharding a sequence: the formulas against devices that really pass their tokens around."""

import collections

import pytest
from hypothesis import given, strategies

from onchip.model.communication import SCHEMES, Sharding, all_to_all, ring, split, zigzag


def shardings(even_heads=False):
    @strategies.composite
    def make(draw):
        devices, kv_heads, group = (
            draw(strategies.integers(1, 5)),
            draw(strategies.integers(1, 4)),
            draw(strategies.integers(1, 4)),
        )
        heads = kv_heads * group * (devices if even_heads else 1)
        return Sharding(
            devices=devices,
            batch=draw(strategies.integers(0, 2)),
            heads=heads,
            kv_heads=kv_heads,
            length=draw(strategies.integers(0, 23)),
            dim=draw(strategies.integers(1, 3)),
            dim_v=draw(strategies.integers(1, 3)),
            element_bytes=draw(strategies.sampled_from((2, 4))),
            gradient_bytes=draw(strategies.sampled_from((4, 8))),
            causal=draw(strategies.booleans()),
        )

    return make()


def held_tokens(sharding, name):
    """What each device owns, token by token."""
    pieces = split(sharding.length, sharding.devices * (2 if name == "zigzag" else 1))
    if name == "zigzag":
        return [[*pieces[r], *pieces[len(pieces) - 1 - r]] for r in range(sharding.devices)]
    return [list(piece) for piece in pieces]


@pytest.mark.parametrize("name", ["ring", "zigzag"])
@given(sharding=shardings())
def test_a_ring_whose_devices_pass_their_blocks_on(name, sharding):
    devices = sharding.devices
    owned = held_tokens(sharding, name)
    width = sharding.batch * sharding.kv_heads * (sharding.dim + sharding.dim_v)
    forward, backward, pairs, waits = [0] * devices, [0] * devices, [0] * devices, 0
    keys = list(owned)
    gradients = [collections.Counter() for _ in range(devices)]
    seen = [collections.Counter() for _ in range(sharding.length)]
    for step in range(devices):
        work = [0] * devices
        for r in range(devices):
            for i in owned[r]:
                for j in keys[r]:
                    if j <= i or not sharding.causal:
                        seen[i][j] += 1
                        gradients[r][j] += 1
                        work[r] += 1
        pairs = [a + b for a, b in zip(pairs, work, strict=True)]
        waits += max(work)
        if step + 1 < devices:
            for r in range(devices):
                forward[r] += len(keys[r]) * width * sharding.element_bytes
                backward[r] += len(keys[r]) * width * sharding.element_bytes
        if devices > 1:
            for r in range(devices):
                backward[r] += len(keys[r]) * width * sharding.gradient_bytes
        keys = keys[-1:] + keys[:-1]
        gradients = gradients[-1:] + gradients[:-1]
    for i, columns in enumerate(seen):
        assert columns == collections.Counter(range(i + 1 if sharding.causal else sharding.length))
    for r in range(devices):
        # the sums are home, and every query has added to them
        assert gradients[r] == {j: sharding.length - j if sharding.causal else sharding.length for j in owned[r]}
    heads = sharding.batch * sharding.heads
    found = SCHEMES[name](sharding)
    assert (found.forward_sent, found.backward_sent) == (tuple(forward), tuple(backward))
    assert found.pairs == tuple(heads * one for one in pairs) and found.step_pairs == heads * waits


@given(sharding=shardings(even_heads=True))
def test_all_to_all_element_by_element(sharding):
    devices, heads = range(sharding.devices), sharding.heads // sharding.devices
    group = sharding.heads // sharding.kv_heads
    home = {token: r for r, piece in enumerate(split(sharding.length, sharding.devices)) for token in piece}
    of = {head: r for r in devices for head in range(r * heads, (r + 1) * heads)}
    users = {kv: {of[head] for head in of if head // group == kv} for kv in range(sharding.kv_heads)}
    forward, backward = [0] * len(devices), [0] * len(devices)
    scale = sharding.batch * sharding.element_bytes
    for owner in home.values():
        for worker in of.values():
            if worker != owner:
                forward[owner] += scale * sharding.dim
                forward[worker] += scale * sharding.dim_v
                backward[owner] += scale * sharding.dim_v
                backward[worker] += scale * sharding.dim
        for workers in users.values():
            for worker in workers - {owner}:
                forward[owner] += scale * (sharding.dim + sharding.dim_v)
                backward[worker] += scale * (sharding.dim + sharding.dim_v)
    found = all_to_all(sharding)
    assert (found.forward_sent, found.backward_sent) == (tuple(forward), tuple(backward))
    visible = sum(j <= i or not sharding.causal for i in home for j in home)
    assert found.pairs == (sharding.batch * heads * visible,) * len(devices)
    assert found.imbalance == found.efficiency == 1


def causal(devices, length=4096, **other):
    return Sharding(
        devices=devices, batch=1, heads=8, kv_heads=8, length=length, dim=64, dim_v=64, causal=True, **other
    )


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_a_zigzag_is_even_and_a_contiguous_ring_is_not(devices):
    """The last device of a contiguous ring has (2P - 1) / P of the mean, and the others wait for it."""
    contiguous, even = ring(causal(devices)), zigzag(causal(devices))
    assert len(set(even.pairs)) == 1 and even.efficiency == 1
    assert contiguous.pairs[-1] == max(contiguous.pairs)
    assert contiguous.imbalance == pytest.approx((2 * devices - 1) / devices, rel=1e-3)
    assert contiguous.efficiency == pytest.approx(devices / (2 * devices - 1), rel=1e-3)
    assert sum(contiguous.pairs) == sum(even.pairs) == 8 * 4096 * 4097 // 2
    assert (contiguous.forward_sent, contiguous.backward_sent) == (even.forward_sent, even.backward_sent)


def test_deepspeed_ulysses_figure():
    """Jacobs et al. 2023: 4 N h / P elements of a device in the forward, of which 1 / P stays."""
    devices, length, width = 8, 4096, 8 * 64
    found = all_to_all(causal(devices))
    assert set(found.forward_sent) == {4 * length * width // devices * (devices - 1) // devices * 2}


def test_one_device_sends_nothing():
    for scheme in SCHEMES.values():
        assert scheme(causal(1)).total_sent == 0


def test_grouped_heads_save_on_a_ring_in_proportion():
    whole = Sharding(devices=4, batch=1, heads=32, kv_heads=32, length=64, dim=8, dim_v=8)
    grouped = Sharding(devices=4, batch=1, heads=32, kv_heads=8, length=64, dim=8, dim_v=8)
    assert ring(whole).total_sent == 4 * ring(grouped).total_sent


def test_fewer_key_heads_than_devices_are_sent_to_several():
    few = Sharding(devices=8, batch=1, heads=8, kv_heads=2, length=64, dim=8, dim_v=8)
    many = Sharding(devices=8, batch=1, heads=8, kv_heads=8, length=64, dim=8, dim_v=8)
    assert all_to_all(few).total_sent == all_to_all(many).total_sent


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"heads": 6, "kv_heads": 4}, "multiple of kv_heads, got 6 and 4"),
        ({"devices": 0}, "devices must be at least 1"),
    ],
)
def test_what_cannot_be_sharded_is_named(options, words):
    sizes = {"devices": 2, "batch": 1, "heads": 4, "kv_heads": 4, "length": 8, "dim": 4, "dim_v": 4}
    with pytest.raises(ValueError, match=words):
        Sharding(**{**sizes, **options})


def test_heads_that_do_not_divide():
    with pytest.raises(ValueError, match="8 heads do not divide among 3 devices"):
        all_to_all(causal(3))


@given(length=strategies.integers(0, 50), parts=strategies.integers(1, 9))
def test_pieces_are_consecutive_and_even(length, parts):
    pieces = split(length, parts)
    assert [token for piece in pieces for token in piece] == list(range(length))
    assert len(pieces) == parts and max(map(len, pieces)) - min(map(len, pieces)) <= 1
