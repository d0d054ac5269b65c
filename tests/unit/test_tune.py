"""What `onchip tune` decides: candidates, the race, and the rows that come out. The device is a fake."""

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, strategies

from onchip.bench.tune.candidates import Limits, candidates
from onchip.bench.tune.cases import Case, cases, heaviest, timed
from onchip.bench.tune.search import GAIN, CannotRun, Timing, search
from onchip.bench.tune.session import tune
from onchip.bench.tune.table import rows_of, text_of
from onchip.schedules.triton import limits, tiles
from onchip.schedules.triton.launch import Call
from onchip.schedules.triton.tiles import Row, Tile, tile_of
from onchip.schedules.triton.tuned import Entry, Key, entry_for, read, table_of

ROOT = Path(__file__).parents[2]
H200 = Limits(227 * 1024, 255, 32, tma=True)
KEY = Key(device="NVIDIA H200", architecture="sm_90", torch="2.11.0", triton="3.6.0", kernels="0123")
CASE = Case("forward", 64, torch.bfloat16, "band")
SHIPPED = tile_of("sm_90", "forward", 64, 16, "band")
CPU = torch.device("cpu")


class Fake:
    """A device that takes a time for each tile, and refuses some."""

    def __init__(self, cost, *, batch=1000, refuse=None, wrong=(), narrow=(), seconds=1.0, missing=()):
        self.cost, self.batch, self.refuse, self.wrong, self.narrow = cost, batch, refuse or {}, wrong, narrow
        self.now, self.seconds, self.missing, self.is_open, self.raced = 0.0, seconds, missing, False, []

    def clock(self):
        return self.now

    def open(self, case, shipped):
        if case in self.missing:
            raise CannotRun("out of memory")
        self.is_open = True

    def compile(self, tiles):
        self.now += self.seconds
        return {tile: self.refuse[tile] for tile in tiles if tile in self.refuse}

    def check(self, tile):
        assert tile not in self.refuse, "what does not compile is not launched"
        return "wrong result" if tile in self.wrong else None

    def race(self, shipped, tiles, rounds):
        self.raced.append((rounds, len(tiles)))
        base = self.cost(shipped)
        ratios = {tile: self.cost(tile) / base for tile in (shipped, *tiles)}
        return {tile: Timing(ratio * base, ratio, ratio) for tile, ratio in ratios.items()}

    def serves(self, tile):
        return "too large for others of its row" if tile in self.narrow else None

    def close(self):
        self.is_open = False


def area(tile):
    """A cost with one best tile: 128 x 128 with 8 warps and 3 stages, all the registers that they like, and no TMA."""
    *sizes, registers, tma = dataclasses.astuple(tile)
    sizes = zip(sizes, (128, 128, 8, 3), strict=True)
    return (
        1
        + (registers is not None)
        + tma
        + sum(abs(one.bit_length() - best.bit_length()) + (one != best) for one, best in sizes)
    )


# Cases


def test_a_case_is_of_the_row_that_it_is_measured_for():
    """Both the problem that is timed and the heaviest ones take the tile of the case's kernel and kind."""
    for case in cases(dims=(64, 96, 256), dtypes=(torch.bfloat16, torch.float32)):
        for inputs in (timed(case, CPU, tokens=2048, length=2048), *heaviest(case, CPU)):
            assert Call(inputs.problem, "sm_90").kind(case.kernel) == case.kind
            assert inputs.query.dtype == case.dtype and inputs.problem.dim_qk == case.dim


def test_cases_cover_every_row_once_and_can_be_narrowed():
    every = cases(dtypes=(torch.bfloat16, torch.float32))
    kinds = sum(map(len, tiles.KINDS.values()))
    assert len(every) == len(set(every)) == 2 * 3 * kinds
    assert {case.kernel for case in cases(["keys:band", "queries"])} == {"keys", "queries"}
    assert {case.kind for case in cases(["keys:band", "queries"]) if case.kernel == "keys"} == {"band"}
    with pytest.raises(ValueError, match="got gradient:few"):
        cases(["gradient:few"])
    with pytest.raises(ValueError, match="share their tiles"):
        cases(dtypes=(torch.bfloat16, torch.float16))


# Candidates


def test_bounds_hold_for_what_was_compiled():
    """What is known without compiling never exceeds what the compiler reported, from 32 elements of a head on."""
    record = json.loads((ROOT / "benchmarks/results/compile/triton.json").read_text())
    checked = 0
    for row in record["rows"]:
        if row["kernel"] == "delta" or "x" in row["head_dim"] or int(row["head_dim"]) < 32:
            continue
        tile, dim = Tile(*row["tile"]), int(row["head_dim"])
        bits = 32 if row["dtype"] == "float32" else 16
        assert limits.is_tile(tile)
        assert limits.least_shared(tile, row["kernel"], dim, bits) <= row["shared"]
        lanes = 64 if row["target"] == "gfx942" else 32
        assert row["spills"] or limits.least_registers(tile, row["kernel"], dim, lanes) <= row["registers"]
        checked += 1
    assert checked > 1000


@pytest.mark.parametrize("case", cases(dtypes=(torch.bfloat16, torch.float32)), ids=str)
@pytest.mark.parametrize("card", [H200, Limits(99 * 1024, 255, 32), Limits(64 * 1024, 512, 64)], ids=str)
def test_candidates_are_tiles_that_may_launch(case, card):
    shipped = tile_of("sm_90", case.kernel, case.dim, case.bits, case.kind)
    found = candidates(case, shipped, card)
    assert found.tiles and shipped not in found.tiles and len(set(found.tiles)) == len(found.tiles)
    for tile in found.tiles:
        assert limits.is_tile(tile)
        assert limits.least_shared(tile, case.kernel, case.dim, case.bits) <= card.shared
        assert limits.least_registers(tile, case.kernel, case.dim, card.lanes) <= card.registers


def test_candidates_near_the_shipped_tile_come_first():
    first = candidates(CASE, SHIPPED, H200).tiles[:6]
    for tile in first:
        changed = [
            field.name
            for field in dataclasses.fields(Tile)
            if getattr(tile, field.name) != getattr(SHIPPED, field.name)
        ]
        assert len(changed) == 1, f"{tile} differs from {SHIPPED} in {changed}"


def test_a_smaller_card_has_fewer_candidates():
    case = Case("forward", 256, torch.float32, "plain")
    shipped = tile_of("sm_90", "forward", 256, 32, "plain")
    small, large = (candidates(case, shipped, Limits(size, 255, 32)) for size in (64 * 1024, 227 * 1024))
    assert set(small.tiles) < set(large.tiles)
    assert small.pruned["shared memory"] > large.pruned["shared memory"] > 0 and large.pruned["registers"] > 0


# The search


def found(fake, seconds=1e9):
    return search(fake, CASE, SHIPPED, candidates(CASE, SHIPPED, H200).tiles, seconds, fake.clock)


def test_the_fastest_tile_is_found_by_halving():
    fake = Fake(area)
    best = found(fake)
    assert best.tile == Tile(128, 128, 8, 3) and best.ratio == area(best.tile) / area(SHIPPED)
    rounds, counts = zip(*fake.raced, strict=True)
    assert list(counts) == sorted(counts, reverse=True) and counts[-1] == 2 and counts[0] == best.raced
    assert list(rounds) == sorted(rounds) and len(fake.raced) >= 4
    assert not fake.is_open


@pytest.mark.parametrize("way", ["refuse", "wrong", "narrow"])
def test_what_is_out_is_not_chosen_and_counted(way):
    best = Tile(128, 128, 8, 3)
    fake = Fake(area, **{way: {best: "spills"} if way == "refuse" else (best,)})
    got = found(fake)
    assert got.tile != best and area(got.tile) < area(SHIPPED)
    assert sum(got.dropped.values()) == 1


def test_the_shipped_tile_stays_unless_another_is_clearly_faster():
    assert found(Fake(lambda tile: 1.0)).tile == SHIPPED
    slightly = found(Fake(lambda tile: 1.0 if tile == SHIPPED else 1 - GAIN / 2))
    assert slightly.tile == SHIPPED and slightly.ratio == 1.0


def test_a_noisy_gain_is_no_gain():
    class Noisy(Fake):
        def race(self, shipped, tiles, rounds):
            times = super().race(shipped, tiles, rounds)
            return {tile: Timing(t.ms, t.ratio, 1.0 if tile != shipped else t.ratio) for tile, t in times.items()}

    assert found(Noisy(area)).tile == SHIPPED


def test_time_bounds_how_many_are_compiled():
    fake = Fake(area, batch=4, seconds=1.0)
    got = found(fake, seconds=5.0)
    every = len(candidates(CASE, SHIPPED, H200).tiles)
    assert got.raced == 12 and got.left == every - 12, "three batches begin within three of five seconds"
    assert found(Fake(area, batch=4), seconds=0.0).raced == 4, "one batch in any case"


# The session


def run(fake, todo, path, budget=1e9, **more):
    steps = []
    done = tune(fake, todo, key=KEY, limits=H200, path=path, budget=budget, step=steps.append, clock=fake.clock, **more)
    return done, steps


def test_each_case_is_stored_before_the_next_begins(tmp_path):
    path = tmp_path / "card.json"
    todo = cases(["forward"], dims=(64,))
    done, steps = run(Fake(area), todo, path)
    for count, measured in enumerate(done, start=1):
        stored = read(path, KEY, H200.shared)
        assert len(stored.entries) == count == len(steps)
        assert measured.found.tile in {entry.tile for entry in stored.entries}
    assert steps == [str(case) for case in todo]


def test_an_interrupt_keeps_what_was_measured(tmp_path):
    class Interrupted(Fake):
        def check(self, tile):
            if len(self.raced) > 6:
                raise KeyboardInterrupt
            return super().check(tile)

    fake, path = Interrupted(area), tmp_path / "card.json"
    done, _ = run(fake, cases(["forward"], dims=(64,)), path)
    with pytest.raises(KeyboardInterrupt):
        list(done)
    assert 1 <= len(read(path, KEY, H200.shared).entries) < 6 and not fake.is_open


def test_what_is_measured_again_replaces_and_the_rest_stays(tmp_path):
    path = tmp_path / "card.json"
    list(run(Fake(area), cases(["forward"], dims=(64,)), path)[0])
    list(run(Fake(lambda tile: 1.0), [CASE], path)[0])
    entries = {entry.kind: entry for entry in read(path, KEY, H200.shared).entries}
    assert len(entries) == 6
    assert entries["band"].tile == SHIPPED and entries["plain"].tile != SHIPPED


def test_a_case_that_cannot_run_is_told_and_passed_over(tmp_path):
    todo = cases(["forward"], dims=(64,))
    measured = list(run(Fake(area, missing=todo[:1]), todo, tmp_path / "card.json")[0])
    assert (measured[0].found, measured[0].reason) == (None, "out of memory")
    assert all(each.found is not None for each in measured[1:])
    assert len(read(tmp_path / "card.json", KEY, H200.shared).entries) == 5


def test_the_budget_is_shared_by_the_cases(tmp_path):
    fake = Fake(area, batch=1, seconds=1.0)
    todo = cases(["forward"], dims=(64, 128))
    list(run(fake, todo, tmp_path / "card.json", budget=80.0)[0])
    assert 0.5 * 80 <= fake.now <= 80 + len(todo)


def test_rows_that_the_budget_did_not_reach_come_first_the_next_time(tmp_path):
    todo, path = cases(["forward"], dims=(64, 128)), tmp_path / "card.json"
    first = [each.case for each in run(Fake(area, seconds=10.0), todo, path, budget=25.0)[0]]
    assert first == todo[:3], "none begins after 25 seconds"
    second = [each.case for each in run(Fake(area), todo, path)[0]]
    assert second == [*todo[3:], *first]
    assert [each.case for each in run(Fake(area, seconds=10.0), todo, path, budget=1.0)[0]] == todo[:1]


# The printed table

entries_of_any_rows = strategies.lists(
    strategies.tuples(
        strategies.sampled_from([(kernel, kind) for kernel, kinds in tiles.KINDS.items() for kind in kinds]),
        strategies.sampled_from([16, 40, 64, 96, 128, 256]),
        strategies.sampled_from([16, 32]),
        strategies.sampled_from([Tile(*sizes) for sizes in itertools.product((16, 32), (32, 64), (4,), (1, 2))]),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda drawn: drawn[:3],
)


@given(drawn=entries_of_any_rows)
def test_printed_rows_choose_as_the_cache_does(drawn):
    entries = [
        Entry(
            kernel=kernel, dim=dim, bits=bits, kind=kind, tile=tile, shipped=tile,
            ms=1.0, shipped_ms=1.0, ratio=1.0, tuned_on="",
        )
        for (kernel, kind), dim, bits, tile in drawn
    ]  # fmt: skip
    rows = rows_of(entries, KEY)
    names = {name: getattr(tiles, name) for name in ("ANY", "FORWARD", "KEYS", "QUERIES", "GRADIENT", "Row", "Tile")}
    assert eval("[" + "".join(map(text_of, rows)) + "]", names) == rows
    table = table_of(entries)
    for kernel, kinds in tiles.KINDS.items():
        for kind, dim, bits in itertools.product(kinds, (1, 16, 17, 40, 64, 65, 96, 97, 128, 129, 256), (16, 32)):
            entry = entry_for(table, kernel, dim, bits, kind)
            wanted = tile_of("sm_90", kernel, dim, bits, kind) if entry is None else entry.tile
            first = next((row for row in rows if fits(row, kernel, dim, bits, kind)), None)
            got = tile_of("sm_90", kernel, dim, bits, kind) if first is None else first.tile
            assert got == wanted, (kernel, kind, dim, bits)


def fits(row: Row, kernel, dim, bits, kind):
    return (row.kernel, row.bits) == (kernel, bits) and dim <= row.dim and (not row.kinds or kind in row.kinds)


def test_every_shipped_row_says_where_it_comes_from():
    assert all(row.source == tiles.COMPILED or row.source.startswith("measured on ") for row in tiles.TABLE)
