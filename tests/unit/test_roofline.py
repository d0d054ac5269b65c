"""Bounds from below: arithmetic of units, what caches may save, and where a plan prints them."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies

import onchip
from onchip import dispatch
from onchip.model.hardware import Figure
from onchip.model.kernels import Kernel, least_device_bytes
from onchip.model.presets import PRESETS, hardware_of
from onchip.model.roofline import roofline
from onchip.model.traffic import Traffic


def device(**figures):
    """A GPU of round figures."""
    made = {name: Figure(value, "", "made up for a test") for name, value in figures.items()}
    products = {"bfloat16": Figure(1e12, "FLOP/s", "made up"), "tf32": Figure(3e11, "FLOP/s", "made up")}
    plain = {"exponentials": 1e9, "device_memory": 1e9, "cache": 4e9, "cache_size": 100.0, "launch": 2e-6}
    plain = {name: Figure(value, "", "made up for a test") for name, value in plain.items()}
    return replace(PRESETS["h200"], products=products, **{**plain, **made})


def kernel(loads=None, stores=None, flops=0, exponentials=0, requested=0, precision="bfloat16", launches=1):
    compulsory = Traffic(loads or {}, stores or {}, flops, exponentials)
    asked = Traffic({"any": requested}, {}, flops, exponentials)
    return Kernel(name="kernel", requested=asked, compulsory=compulsory, precision=precision, launches=launches)


def test_each_unit_takes_its_work_over_its_rate():
    bound = roofline(
        [kernel({"a": 1000}, {"b": 500}, 10**9, 10**6, 8000), kernel({"c": 100}, {}, 10**9, 0, 4000, "tf32x3")],
        device(),
    )
    assert bound.times_us == {
        "matrix products": pytest.approx(1e3 + 1e4),  # a second product at a third of the rate of TF32
        "exponentials": pytest.approx(1e3),
        "device memory": pytest.approx(1.6),
        "on-chip memory": pytest.approx(3),
    }
    assert bound.launch_us == pytest.approx(4)
    assert bound.bound_us == pytest.approx(11004) and bound.binding == "matrix products"


@pytest.mark.parametrize(
    ("work", "unit"),
    [
        ({"flops": 10**10}, "matrix products"),
        ({"exponentials": 10**6}, "exponentials"),
        ({"loads": {"a": 10**6}}, "device memory"),
        ({"requested": 10**7}, "on-chip memory"),
        ({"launches": 9}, "launch"),
    ],
)
def test_the_unit_with_the_most_work_binds(work, unit):
    bound = roofline([kernel(**work)], device())
    assert bound.binding == unit and f"bound by {unit}" in str(bound)


def test_what_nobody_knows_is_left_out():
    unknown = replace(device(), launch=None, cache=None, products={})
    bound = roofline([kernel({"a": 1000}, flops=10**15, requested=10**15)], unknown)
    assert "matrix products" not in bound.times_us and bound.launch_us == 0
    # shared memory stands in for a cache that is not known
    assert bound.times_us["on-chip memory"] == pytest.approx(1e15 / unknown.on_chip.value * 1e6)


def test_nothing_takes_no_time():
    bound = roofline([], device())
    assert (bound.bound_us, bound.launch_us) == (0, 0)
    assert "0.00 us at least" in str(bound)


TENSORS = strategies.dictionaries(strategies.sampled_from("abcdef"), strategies.integers(0, 1000), max_size=4)
CHAINS = strategies.lists(strategies.builds(kernel, loads=TENSORS, stores=TENSORS), max_size=6)


@given(CHAINS, strategies.integers(0, 2000), strategies.integers(0, 2000))
def test_a_larger_cache_saves_no_less_and_never_more_than_all(chain, small, more):
    every = sum(part.compulsory.total_bytes for part in chain)
    least, fewer = least_device_bytes(chain, small), least_device_bytes(chain, small + more)
    assert 0 <= fewer <= least <= every
    if not small:
        assert least == every
    # what no kernel made comes from outside, and what the last one makes stays
    first, last = (chain[0], chain[-1]) if chain else (kernel(), kernel())
    assert fewer >= max(sum(first.compulsory.loads.values()), sum(last.compulsory.stores.values()))


def test_what_is_passed_on_may_stay_in_a_cache():
    chain = [kernel({"a": 10}, {"delta": 5}), kernel({"delta": 5, "a": 10}, {"b": 7})]
    assert least_device_bytes(chain, 0) == 37
    assert least_device_bytes(chain, 5) == 27
    assert least_device_bytes(chain, 1000) == 17


# Plans


def plan_on(name, schedule=None, length=8192, batch=2, heads=16, dim=128, dtype=torch.float16, **keywords):
    query = torch.zeros((), dtype=dtype).expand(batch, heads, length, dim)
    return onchip.plan(query, query, query, **keywords).on(PRESETS[name], schedule)


def test_exponentials_take_half_the_time_of_products_on_an_h100():
    """Shah et al. 2024, FlashAttention-3, section 3.1, for head dim 128 in FP16."""
    plan = plan_on("h100", "triton")
    (kernel,) = plan.kernels
    assert kernel.compulsory.flops / kernel.compulsory.exponentials == 512
    times = plan.roofline.times_us
    # the rescaling of each row takes one more for every tile of 64 columns
    assert times["exponentials"] / times["matrix products"] == pytest.approx(0.5 * 65 / 64, rel=2e-3)


def test_the_bound_of_products_is_the_operations_over_the_rate():
    plan = plan_on("h200", "triton", batch=4, dtype=torch.bfloat16)
    assert plan.roofline.binding == "matrix products"
    assert plan.roofline.times_us["matrix products"] == pytest.approx(4 * 4 * 16 * 8192**2 * 128 / 989.4e12 * 1e6)
    assert plan.backward_roofline.times_us["matrix products"] == pytest.approx(3.5 * 2222.6, rel=1e-3)


def test_a_decoding_step_is_bound_by_memory():
    query, key = (
        torch.zeros((), dtype=torch.bfloat16).expand(8, heads, length, 128) for heads, length in ((32, 1), (8, 8192))
    )
    plan = onchip.plan(query, key, key).on(PRESETS["h200"], "triton")
    assert plan.roofline.binding == "device memory"
    assert plan.roofline.times_us["device memory"] == pytest.approx(plan.minimum_bytes / 4.8e12 * 1e6)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_bounds_every_dtype(name):
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        plan = plan_on(name, length=512, dim=64, dtype=dtype, causal=True)
        for bound in (plan.roofline, plan.backward_roofline):
            assert len(bound.times_us) == 4 and bound.bound_us > 0
        assert plan.asked is PRESETS[name] and PRESETS[name].name in str(plan)
        assert (plan.forward == "aten") == (name == "epyc9654" and dtype != torch.float64)
        assert plan.forward != "hopper" or PRESETS[name].architecture == "sm_90"


def test_a_plan_for_another_device_refuses_like_one_there():
    query = torch.zeros(1, 2, 64, 16, dtype=torch.float64)
    with pytest.raises(onchip.Unsupported, match="it has no float64"):
        onchip.plan(query, query, query).on(PRESETS["h200"], "triton")
    with pytest.raises(ValueError, match="warp9"):
        onchip.plan(query, query, query).on(PRESETS["h200"], "warp9")


def test_masks_with_tensors_are_planned_for_a_device_that_is_not_here():
    query = torch.zeros(1, 2, 300, 64, dtype=torch.bfloat16)
    keep = torch.zeros(300, 300, dtype=torch.bool)
    keep[:, :100] = True
    plan = onchip.plan(query, query, query, mask=keep).on(PRESETS["h200"])
    assert plan.forward == "triton" and plan.pairs == 2 * 300 * 128
    cu = torch.tensor([0, 100, 300], dtype=torch.int32)
    packed = torch.zeros(300, 2, 64, dtype=torch.bfloat16)
    assert onchip.plan_varlen(packed, packed, packed, cu).on(PRESETS["a100"]).pairs == 2 * (100**2 + 200**2)


def test_a_plan_prints_its_bounds_and_for_which_device(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    query = torch.zeros(1, 2, 300, 64)
    text = str(onchip.plan(query, query, query))
    name = hardware_of(torch.device("cpu")).name
    assert f"roofline           {name}: forward " in text
    assert text.count("us at least, bound by ") == 2


def test_a_device_that_nobody_knows_has_no_bound(monkeypatch):
    monkeypatch.setattr(dispatch, "hardware_of", lambda device: None)
    query = torch.zeros(1, 2, 300, 64)
    plan = onchip.plan(query, query, query)
    assert plan.hardware is plan.roofline is plan.backward_roofline is None
    assert "`onchip doctor --measure` measures it" in str(plan)


def test_a_call_computes_no_bound(monkeypatch):
    def asked(*given):
        raise AssertionError("a call asked for a figure")

    for name in ("hardware_of", "roofline"):
        monkeypatch.setattr(dispatch, name, asked)
    monkeypatch.setattr(dispatch.Plan, "_kernels", asked)
    query = torch.randn(1, 2, 100, 16, requires_grad=True)
    for schedule in (None, "aten", "tiled", "dense"):
        onchip.attention(query, query, query, causal=True, schedule=schedule).sum().backward()
    onchip.plan(query, query, query)
