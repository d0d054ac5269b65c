"""The IO model: loop nests compute attention, closed forms count what they move, both meet the published figures."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings, strategies

from onchip.model import comparison, figure2, sweeps
from onchip.model.io import (
    ALGORITHMS,
    TILED,
    Sizes,
    cost,
    largest_blocks,
    paper_blocks,
    spread,
    unavoidable,
)
from onchip.model.memory import ChipFull
from onchip.model.shape import Blocks, Shape, count, cut
from onchip.model.simulation import random_values, simulate

GB = 1e9
A100 = figure2.CHIP_BYTES // 2
DIRECTIONS = ("forward", "backward", "both")


def shapes(least=0):
    small = strategies.integers(least, 20)
    # one much wider than the other changes which step holds the most
    dim = strategies.integers(1, 6) | strategies.just(40)
    return strategies.builds(
        Shape,
        batch=strategies.integers(1, 2),
        heads=strategies.integers(1, 2),
        length_q=small,
        length_k=small,
        dim=dim,
        dim_v=dim,
        element_bytes=strategies.sampled_from((1, 2, 8)),
        statistic_bytes=strategies.sampled_from((4, 8)),
    )


def blocks():
    return strategies.builds(Blocks, strategies.integers(1, 24), strategies.integers(1, 24))


def dense(shape, values, keep=None):
    """Attention and its gradients by autograd; `keep` is a bool (length_q, length_k)."""
    query, key, value = (values[name].clone().requires_grad_() for name in ("query", "key", "value"))
    s = query @ key.mT * shape.scale
    weights = torch.softmax(s, -1)
    if keep is not None:
        # a row that sees nothing has weight 0 everywhere, not NaN
        weights = torch.softmax(s.masked_fill(~keep, -1e300), -1) * keep
    out = weights @ value
    gradients = torch.autograd.grad(out, (query, key, value), values["d_out"])
    return dict(zip(("out", "d_query", "d_key", "d_value"), (out.detach(), *gradients), strict=True))


def assert_computes(simulation, expected):
    assert simulation.results.keys() == expected.keys()
    for name, true in expected.items():
        torch.testing.assert_close(simulation.results[name], true, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ALGORITHMS)
@given(shape=shapes(), blocks=blocks(), seed=strategies.integers(0, 99))
def test_every_loop_nest_computes_attention_and_its_gradients(name, shape, blocks, seed):
    values = random_values(shape, seed=seed)
    assert_computes(simulate(ALGORITHMS[name], shape, blocks, values=values), dense(shape, values))


@pytest.mark.parametrize("name", ALGORITHMS)
@given(shape=shapes(), blocks=blocks(), with_values=strategies.booleans())
def test_closed_forms_are_what_the_loop_nests_move(name, shape, blocks, with_values):
    algorithm = ALGORITHMS[name]
    simulation = simulate(algorithm, shape, blocks, values=random_values(shape) if with_values else None)
    for form, run in (
        (algorithm.forward.cost(shape, blocks), simulation.forward),
        (algorithm.backward.cost(shape, blocks), simulation.backward),
    ):
        assert form.traffic == run.traffic
        if shape.length_q and shape.length_k:
            assert form.peak_elements == run.peak_elements
        assert form.peak_elements >= run.peak_elements


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(("dim", "dim_v"), [(1, 60), (60, 1)])
def test_peaks_where_one_side_is_wide(name, dim, dim_v):
    shape = Shape(batch=1, heads=1, length_q=12, length_k=3, dim=dim, dim_v=dim_v)
    algorithm, chosen = ALGORITHMS[name], Blocks(12, 1)
    run = simulate(algorithm, shape, chosen)
    assert algorithm.forward.cost(shape, chosen) == run.forward
    assert algorithm.backward.cost(shape, chosen) == run.backward


@given(shape=shapes(least=1), blocks=blocks(), data=strategies.data())
def test_a_block_sparse_nest_is_attention_under_a_mask_of_blocks(shape, blocks, data):
    rows, columns = count(shape.length_q, blocks.rows), count(shape.length_k, blocks.columns)
    places = strategies.tuples(strategies.integers(0, rows - 1), strategies.integers(0, columns - 1))
    visited = data.draw(strategies.frozensets(places))
    sparse = dataclasses.replace(blocks, visited=visited)
    keep = torch.zeros(shape.length_q, shape.length_k, dtype=torch.bool)
    for i, r in enumerate(cut(shape.length_q, blocks.rows)):
        for j, c in enumerate(cut(shape.length_k, blocks.columns)):
            keep[r.start : r.stop, c.start : c.stop] = (i, j) in visited
    algorithm, values = ALGORITHMS["flash1"], random_values(shape)
    simulation = simulate(algorithm, shape, sparse, values=values)
    assert_computes(simulation, dense(shape, values, keep))
    assert algorithm.forward.cost(shape, sparse).traffic == simulation.forward.traffic
    assert algorithm.backward.cost(shape, sparse).traffic == simulation.backward.traffic


def test_a_block_sparse_nest_with_all_blocks_is_the_dense_one():
    shape = Shape(batch=1, heads=2, length_q=50, length_k=70, dim=8, dim_v=4)
    every, algorithm = spread(shape, Blocks(8, 16), 1.0), ALGORITHMS["flash1"]
    assert len(every.visited) == 7 * 5
    for one in (algorithm.forward, algorithm.backward):
        assert one.cost(shape, every) == one.cost(shape, Blocks(8, 16))


@pytest.mark.parametrize("fraction", [0.0, 0.125, 0.5])
def test_a_fraction_of_the_blocks_moves_that_fraction_above_what_is_always_moved(fraction):
    """Proposition 4 of Dao et al. 2022: Theta(N d + s N^2 d^2 / M)."""
    shape = Shape(batch=1, heads=1, length_q=256, length_k=256, dim=16, dim_v=16)
    algorithm, whole = ALGORITHMS["flash1"], Blocks(16, 32)
    for one in (algorithm.forward, algorithm.backward):
        none, some, all_ = (one.cost(shape, spread(shape, whole, s)).traffic.total_bytes for s in (0.0, fraction, 1.0))
        assert some - none == fraction * (all_ - none)


@pytest.mark.parametrize("name", ALGORITHMS)
@given(shape=shapes(least=1), blocks=blocks(), direction=strategies.sampled_from(DIRECTIONS))
def test_nothing_moves_less_than_inputs_and_results(name, shape, blocks, direction):
    moved = cost(ALGORITHMS[name], shape, Sizes(blocks, blocks), direction).traffic.total_bytes
    assert moved >= unavoidable(shape, direction)


@given(shape=shapes(least=1), chip=strategies.integers(1, 400))
@settings(max_examples=20)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_largest_blocks_fit_and_larger_ones_do_not(name, shape, chip):
    algorithm = ALGORITHMS[name]
    sizes = largest_blocks(algorithm, shape, chip)
    if sizes.forward is None or sizes.backward is None:
        one = algorithm.forward.sized(1, shape.dim), algorithm.backward.sized(1, shape.dim)
        with pytest.raises(ChipFull):
            simulate(algorithm, shape, one[0], backward_blocks=one[1], capacity=chip)
        return
    simulate(algorithm, shape, sizes.forward, backward_blocks=sizes.backward, capacity=chip)
    longest = max(shape.length_q, shape.length_k)
    size = max(sizes.forward.rows, sizes.forward.columns)
    if size < longest and not algorithm.shares_blocks:
        assert algorithm.forward.cost(shape, algorithm.forward.sized(size + 1, shape.dim)).peak_elements > chip


def test_one_element_less_than_the_peak_is_too_little():
    shape, chosen = Shape(batch=1, heads=1, length_q=40, length_k=30, dim=4, dim_v=4), Blocks(7, 5)
    for algorithm in ALGORITHMS.values():
        run = simulate(algorithm, shape, chosen)
        peak = max(run.forward.peak_elements, run.backward.peak_elements)
        simulate(algorithm, shape, chosen, capacity=peak)
        with pytest.raises(ChipFull):
            simulate(algorithm, shape, chosen, capacity=peak - 1)


class TestFigure2:
    """FlashAttention's Figure 2 (left): B=64, H=16, N=1024, d=64, 16-bit, forward and backward."""

    shape = figure2.SHAPE
    matrix = 64 * 16 * 1024 * 1024 * 2
    input = 64 * 16 * 1024 * 64 * 2

    def moved(self, name, sizes=None):
        return cost(ALGORITHMS[name], self.shape, sizes or Sizes(Blocks(1, 1), Blocks(1, 1)), "both").traffic

    def test_sizes(self):
        assert self.shape.matrix_bytes == self.matrix == pytest.approx(2.147 * GB, rel=1e-3)
        assert self.input == pytest.approx(0.134 * GB, rel=2e-3)

    def test_the_textbook_list(self):
        traffic = self.moved("textbook")
        assert traffic.total_bytes == 11 * self.matrix + 12 * self.input
        assert traffic.total_bytes == pytest.approx(25.2 * GB, rel=2e-3)

    def test_the_eager_list_and_what_was_measured(self):
        """ncu on an H200 counted 24.70 GB read and 15.58 GB written by device memory."""
        traffic = self.moved("eager")
        assert traffic.read_bytes == 11 * self.matrix + 8 * self.input
        assert traffic.written_bytes == 7 * self.matrix + 4 * self.input
        assert traffic.read_bytes == pytest.approx(24.70 * GB, rel=0.01)
        assert traffic.written_bytes == pytest.approx(15.58 * GB, rel=0.01)
        assert traffic.total_bytes == pytest.approx(figure2.STANDARD.gigabytes * GB, rel=0.01)

    def test_flash_attention_with_the_papers_blocks(self):
        found = paper_blocks(self.shape, A100)
        assert (found.rows, found.columns) == (64, 384)
        assert self.moved("flash1", Sizes(found, found)).total_bytes == pytest.approx(
            figure2.FLASH.gigabytes * GB, rel=0.01
        )

    def test_the_printed_operations_are_those_of_no_number_of_heads(self):
        kept, again = self.moved("eager").flops, self.moved("flash1").flops
        assert kept == 6 * 2 * 1024 * 1024**2 * 64 and again == 7 * kept // 6
        assert kept > 10 * figure2.STANDARD.gflops * GB and again > 10 * figure2.FLASH.gflops * GB
        standard, flash = figure2.heads_of(figure2.STANDARD, 6), figure2.heads_of(figure2.FLASH, 7)
        assert flash[0] < flash[1] < standard[0] < standard[1]
        assert kept == pytest.approx(figure2.STANDARD.gflops * GB * 1024 / (sum(standard) / 2))

    def test_saved_weights_move_two_matrices(self):
        traffic = self.moved("saved-weights")
        assert traffic.loads["weights"] + traffic.stores["weights"] == 2 * self.matrix
        assert traffic.total_bytes == 2 * self.matrix + (3 + 1 + 4 + 3) * self.input

    def test_the_flash_algorithms_move_no_matrix(self):
        for name in TILED:
            traffic = self.moved(name)
            assert not {"scores", "weights", "d_scores", "d_weights"} & {*traffic.loads, *traffic.stores}


@pytest.mark.parametrize("per_side", [1, 2, 8])
def test_theorem_2_with_its_constant(per_side):
    """FlashAttention's forward moves 12 N^2 d^2 / M + 3 N d elements of Q, K, V and O where M / 4d divides N."""
    d, n = 16, 64
    chip = 4 * d * per_side
    shape = Shape(batch=1, heads=1, length_q=n, length_k=n, dim=d, dim_v=d, element_bytes=1)
    traffic = ALGORITHMS["flash1"].forward.cost(shape, paper_blocks(shape, chip)).traffic
    moved = sum(
        one.get(name, 0) for one in (traffic.loads, traffic.stores) for name in ("query", "key", "value", "out")
    )
    assert moved == 12 * n * n * d * d // chip + 3 * n * d


@given(dim=strategies.integers(1, 64), chip=strategies.integers(1, 20000))
def test_the_papers_blocks_and_the_room_that_they_take(dim, chip):
    length = 4096
    shape = Shape(batch=1, heads=1, length_q=length, length_k=length, dim=dim, dim_v=dim)
    found = paper_blocks(shape, chip)
    assert found.columns == -(-chip // (4 * dim)) and found.rows == min(found.columns, dim)
    forward = ALGORITHMS["flash1"].forward.cost(shape, found).peak_elements
    backward = ALGORITHMS["flash1"].backward.cost(shape, found).peak_elements
    # rounding up adds a row of four blocks, a row and a column of the scores, and the statistics come on top
    assert forward <= 1.25 * chip + 4 * dim + found.rows + found.columns + 2 * found.rows
    if chip % (4 * dim) == 0 and found.rows == found.columns:
        assert forward > chip
        assert backward > 2 * chip


def test_a_chip_of_four_heads_rows_and_statistics_is_the_least():
    shape = Shape(batch=1, heads=1, length_q=100, length_k=100, dim=16, dim_v=16)
    least = 4 * 16 + 3
    assert largest_blocks(ALGORITHMS["flash1"], shape, least - 1).forward is None
    assert largest_blocks(ALGORITHMS["flash1"], shape, least).forward == Blocks(1, 1)


def test_an_exponential_for_each_score_in_each_pass_that_computes_it():
    shape = Shape(batch=1, heads=1, length_q=64, length_k=96, dim=8, dim_v=8)
    once = {name: ALGORITHMS[name].backward.cost(shape, Blocks(8, 8)).traffic.exponentials for name in ALGORITHMS}
    assert once["textbook"] == once["eager"] == once["saved-weights"] == 0
    assert once["flash1"] == once["flash2"] == 64 * 96


class TestSweeps:
    shape = Shape(batch=2, heads=2, length_q=256, length_k=256, dim=16, dim_v=16)

    @pytest.mark.parametrize("direction", DIRECTIONS)
    def test_over_memory(self, direction):
        sweep = sweeps.over_memory(self.shape, direction)
        assert (sweep.chips[0], sweep.chips[-1]) == (16, 256 * 16)
        assert len({len(points) for points in sweep.lines.values()} | {len(sweep.chips)}) == 1
        for name in ("flash1", "flash2"):
            points = sweep.lines[name]
            assert points[0].moved_bytes is None and points[-1].moved_bytes is not None
            known = [point.moved_bytes for point in points if point.moved_bytes is not None]
            assert known == sorted(known, reverse=True)
            assert all((point.peak_elements or 0) <= chip for point, chip in zip(points, sweep.chips, strict=True))
        # the paper's blocks hold more than the chip
        assert any(
            point.peak_elements > chip for point, chip in zip(sweep.lines[comparison.PAPER], sweep.chips, strict=True)
        )

    def test_over_memory_meets_the_closed_form(self):
        sweep = sweeps.over_memory(self.shape, "forward")
        point = sweep.lines[sweeps.THEOREM][-1]
        assert point.moved_bytes == 4 * 256 * 16 * 2
        assert sweep.lines[sweeps.BOUND][-1].moved_bytes == 4 * point.moved_bytes

    def test_over_blocks(self):
        sweep = sweeps.over_block(self.shape, 5000, "forward")
        assert [point.x for point in sweep.lines["flash1"]] == [16, 32, 64, 128, 256]
        for point in sweep.lines["flash1"]:
            form = ALGORITHMS["flash1"].forward.cost(self.shape, Blocks(16, point.x))
            assert (point.moved_bytes, point.peak_elements) == (form.traffic.total_bytes, form.peak_elements)
        whole = sweep.lines["flash2"][-1]
        assert whole.moved_bytes == unavoidable(self.shape, "forward") + 4 * 256 * 4

    def test_over_length(self):
        sweep = sweeps.over_length(self.shape, 4096, "both", longest=1024)
        assert [point.x for point in sweep.lines["flash2"]] == [128, 256, 512, 1024]
        textbook = [point.moved_bytes for point in sweep.lines["textbook"]]
        bound = [point.moved_bytes for point in sweep.lines[sweeps.BOUND]]
        assert [b / a for a, b in zip(bound, bound[1:], strict=False)] == [2, 2, 2]
        assert 3.5 < textbook[-1] / textbook[-2] < 4


def test_a_comparison_has_every_algorithm_and_what_was_asked_for():
    rows = {row.name: row for row in comparison.compare(figure2.SHAPE, A100, "both", fraction=0.25)}
    assert list(rows) == [
        *("textbook", "eager", "saved-weights", "rabe-staats", "flash1"),
        *(comparison.PAPER, "flash1, 25% of the blocks", "flash2"),
    ]
    assert rows["flash1"].fits and not rows[comparison.PAPER].fits and not rows["saved-weights"].fits
    given_blocks = comparison.compare(figure2.SHAPE, A100, "both", blocks=Blocks(64, 32))
    assert [row.sizes for row in given_blocks] == [Sizes(Blocks(64, 32), Blocks(64, 32))] * len(ALGORITHMS)
    tiny = {row.name: row for row in comparison.compare(figure2.SHAPE, 100, "both")}
    assert tiny["flash2"].cost is None and tiny["textbook"].cost is not None and not tiny["textbook"].fits


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Shape(batch=-1, heads=1, length_q=1, length_k=1, dim=1, dim_v=1), "batch must be at least 0, got -1"),
        (lambda: Shape(batch=1, heads=1, length_q=1, length_k=1, dim=0, dim_v=1), "dim must be at least 1, got 0"),
        (lambda: Blocks(0, 1), "at least one row and one column, got 0 and 1"),
        (lambda: paper_blocks(figure2.SHAPE, 0), "at least one element, got 0"),
        (lambda: spread(figure2.SHAPE, Blocks(64, 64), 1.5), "between 0 and 1, got 1.5"),
    ],
)
def test_bad_sizes_are_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_values_must_have_the_sizes_of_the_shape():
    shape = Shape(batch=1, heads=2, length_q=3, length_k=4, dim=5, dim_v=6)
    values = random_values(shape)
    values["value"] = values["key"]
    with pytest.raises(ValueError, match=r"value must be a tensor of shape \(2, 4, 6\), got \(2, 4, 5\)"):
        simulate(ALGORITHMS["flash2"], shape, Blocks(2, 2), values=values)
