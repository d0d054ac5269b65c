"""The timer: order, repetition, pairing, failures, and the peak of memory, with a simulated clock."""

import os
import re
import time
from functools import partial

import pytest
import torch

from onchip.bench import timing
from onchip.bench.timing import compare, measure_peak_memory


class Clock:
    """A clock that moves only when a contender runs, and the list of the contenders that ran."""

    def __init__(self, monkeypatch):
        self.now_ms = 0.0
        self.ran = []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_ms / 1e3)

    def contender(self, name, *lasts_ms):
        calls = iter(range(10**9))

        def call():
            self.ran.append(name)
            self.now_ms += lasts_ms[next(calls) % len(lasts_ms)]

        return call


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_order_rotates_every_round_and_turns_around_after_a_full_turn(clock):
    compare({name: clock.contender(name, 1.0) for name in "abc"}, rounds=6, warmup=0, minimum_sample_ms=0)
    assert "".join(clock.ran) == "abcbcacabcbaacbbac"


def test_medians_quartiles_and_minimum_in_milliseconds(clock):
    result = compare({"a": clock.contender("a", 1.0, 2.0, 3.0, 4.0, 100.0)}, rounds=5, warmup=0, minimum_sample_ms=0)
    a = result.result("a")
    assert (a.lower_quartile_ms, a.median_ms, a.upper_quartile_ms) == pytest.approx((2.0, 3.0, 4.0))
    assert a.minimum_ms == pytest.approx(1.0)
    assert a.samples_ms == pytest.approx((1.0, 2.0, 3.0, 4.0, 100.0))
    assert a.calls_per_sample == 1


def test_ratios_pair_the_samples_of_one_round(clock):
    # Both slow down together; only pairing shows that the ratio never moves.
    contenders = {"theirs": clock.contender("t", 1.0, 10.0, 100.0), "ours": clock.contender("o", 2.0, 20.0, 200.0)}
    (ratio,) = compare(contenders, reference="theirs", rounds=3, warmup=0, minimum_sample_ms=0).ratios
    assert (ratio.name, ratio.reference, ratio.rounds) == ("ours", "theirs", 3)
    assert (ratio.lower_quartile, ratio.median, ratio.upper_quartile) == pytest.approx((2.0, 2.0, 2.0))


def test_the_first_contender_is_the_reference_unless_one_is_named(clock):
    contenders = {"a": clock.contender("a", 1.0), "b": clock.contender("b", 4.0)}
    options = {"rounds": 1, "warmup": 0, "minimum_sample_ms": 0}
    assert [(r.name, r.median) for r in compare(contenders, **options).ratios] == [("b", pytest.approx(4.0))]
    named = compare(contenders, reference="b", **options)
    assert [(r.name, r.median) for r in named.ratios] == [("a", pytest.approx(0.25))]


def test_short_calls_repeat_until_a_sample_is_long_enough_and_count_per_call(clock):
    comparison = compare(
        {"short": clock.contender("short", 0.5), "long": clock.contender("long", 30.0)},
        rounds=2,
        warmup=1,
        minimum_sample_ms=20.0,
    )
    short, long = comparison.result("short"), comparison.result("long")
    assert 40 <= short.calls_per_sample <= 60
    assert short.median_ms == pytest.approx(0.5)
    assert long.calls_per_sample == 1
    assert comparison.method.minimum_sample_ms == 20.0


def test_warmup_calls_come_before_the_samples(clock):
    result = compare({"a": clock.contender("a", 50.0, 50.0, 1.0, 1.0)}, rounds=2, warmup=2, minimum_sample_ms=0)
    assert result.result("a").samples_ms == pytest.approx((1.0, 1.0))
    assert result.method.warmup_calls == 2


@pytest.mark.parametrize("fails_at_call", [1, 3])
def test_a_contender_that_raises_is_reported_and_the_others_go_on(clock, fails_at_call):
    calls = iter(range(1, 100))

    def failing():
        if next(calls) == fails_at_call:
            raise RuntimeError("no kernel for this\nmore lines")
        clock.now_ms += 1.0

    contenders = {"bad": failing, "good": clock.contender("good", 2.0)}
    comparison = compare(contenders, reference="good", rounds=4, warmup=1, minimum_sample_ms=0)
    (failure,) = comparison.failures
    assert (failure.name, failure.error) == ("bad", "RuntimeError: no kernel for this")
    assert 'File "test_timing.py", line' in failure.traceback and "in failing" in failure.traceback
    assert not re.search('File "[^"]*/', failure.traceback), "a record holds no path of a machine"
    assert len(comparison.result("good").samples_ms) == 4
    assert comparison.ratios == ()
    with pytest.raises(KeyError, match="bad failed: RuntimeError: no kernel for this"):
        comparison.result("bad")
    with pytest.raises(KeyError, match="other was not compared"):
        comparison.result("other")


def test_a_failing_reference_leaves_results_without_ratios(clock):
    def failing():
        raise ValueError("never")

    comparison = compare({"bad": failing, "good": clock.contender("good", 2.0)}, rounds=2, warmup=0)
    assert comparison.reference == "bad"
    assert [result.name for result in comparison.results] == ["good"]
    assert comparison.ratios == ()


def test_an_interrupt_is_not_swallowed():
    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare({"a": interrupted}, rounds=1)


def test_progress_counts_every_sample(clock):
    seen = []
    contenders = {name: clock.contender(name, 1.0) for name in "ab"}
    compare(contenders, rounds=2, warmup=0, minimum_sample_ms=0, progress=lambda *step: seen.append(step))
    assert seen == [(1, 4, "a"), (2, 4, "b"), (3, 4, "b"), (4, 4, "a")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"contenders": {}}, "at least one contender"),
        ({"reference": "z"}, "reference must be one of a: got 'z'"),
        ({"rounds": 0}, "rounds must be at least 1: got 0"),
        ({"warmup": -1}, "warmup must be at least 0: got -1"),
        ({"minimum_sample_ms": -1.0}, "minimum_sample_ms must be at least 0"),
        ({"device": "meta"}, "device must be cpu or cuda: got meta"),
        ({"flush_l2": True}, "flush_l2 needs a CUDA device: got cpu"),
    ],
)
def test_bad_arguments_are_refused_with_a_sentence(change, message):
    arguments = {"contenders": {"a": lambda: None}, **change}
    with pytest.raises(ValueError, match=message):
        compare(**arguments)


def test_the_real_clock_sees_a_call_last_at_least_as_long_as_it_sleeps():
    result = compare({"sleep": lambda: time.sleep(0.002)}, rounds=3, warmup=1, minimum_sample_ms=0)
    assert result.result("sleep").minimum_ms >= 2.0
    assert result.method.timer == "time.perf_counter"


@pytest.mark.parametrize("mebibytes", [4, 64])
def test_peak_memory_counts_what_a_call_holds_at_once(mebibytes):
    measured = measure_peak_memory(partial(torch.zeros(mebibytes * 2**18).add, 1.0))
    # The operand came with the call; only the result is new.
    assert measured.peak_bytes == pytest.approx(mebibytes * 2**20, abs=2 * 2**20)


def test_peak_memory_counts_memory_that_an_operator_frees_before_it_returns():
    matrix = torch.randn(1024, 1024, dtype=torch.float64)
    assert measure_peak_memory(matrix.sum).peak_bytes < 2**20
    # The condition number is one number, but the decomposition works on a copy of the matrix.
    assert measure_peak_memory(partial(torch.linalg.cond, matrix)).peak_bytes > matrix.nbytes // 2


def test_peak_memory_reports_what_the_call_raised():
    with pytest.raises(RuntimeError, match="must match the size"):
        measure_peak_memory(partial(torch.add, torch.zeros(3), torch.zeros(4)))


def test_peak_memory_refuses_a_call_that_cannot_be_sent():
    with pytest.raises(TypeError, match="must be functions of a module"):
        measure_peak_memory(lambda: None)


@pytest.mark.gpu
@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="needs the device to itself: run without xdist")
@pytest.mark.parametrize("flush_l2", [False, True])
def test_cuda_events_time_the_device_and_not_the_launch(flush_l2):
    contenders = {"long": partial(torch.cuda._sleep, 20_000_000), "short": partial(torch.cuda._sleep, 2_000_000)}
    comparison = compare(contenders, rounds=4, device="cuda", flush_l2=flush_l2, reference="short")
    assert comparison.failures == ()
    assert comparison.result("long").minimum_ms > 1.0
    assert comparison.ratios[0].median == pytest.approx(10.0, rel=0.2)
    assert (comparison.method.flush_bytes > 0) == flush_l2


@pytest.mark.gpu
def test_cuda_peak_memory_is_that_of_the_tensors():
    measured = measure_peak_memory(partial(torch.zeros, 2**20, device="cuda"), device="cuda")
    assert measured == timing.PeakMemory(peak_bytes=4 * 2**20, method="torch.cuda.max_memory_allocated")
