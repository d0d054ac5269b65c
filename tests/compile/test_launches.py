"""What the Triton schedule prepares for a problem once, and what makes it prepare anew."""

import dataclasses
import weakref
from collections import Counter

import pytest
import torch

import onchip
from onchip import dispatch, ops
from onchip.problem import Problem
from onchip.schedules import triton as schedule
from onchip.schedules.triton import launch as host
from onchip.schedules.triton import tuned
from onchip.schedules.triton.tiles import Tile
from tests.compile import aot
from tests.problems import Spec

PLAIN = Spec(((130, 140),), heads=(4, 2), dims=(64, 64), causal=True)
SPECS = {
    "plain": PLAIN,
    "padded": Spec(((20, 33), (7, 0)), layout="padded", heads=(2, 2), dims=(64, 64), window=(9, 2)),
    "packed": Spec(((20, 33), (7, 9)), layout="packed", heads=(2, 2), dims=(64, 64), causal=True),
    "lists": Spec(((150, 150),), heads=(2, 2), dims=(64, 64), mask="documents"),
    "scores": Spec(((20, 33),), heads=(2, 2), dims=(64, 64), score=("bias", "alibi", "sink")),
}


class Run:
    """Forwards and backwards of one problem, whose launches are recorded for a Hopper GPU."""

    def __init__(self, launches, spec, dtype=torch.bfloat16):
        self.launches = launches
        self.problem, *self.inputs = aot.bound(spec, dtype)

    def forward(self, *inputs):
        self.launches.clear()
        self.out, self.lse = aot.forward.forward(self.problem, *(inputs or self.inputs), saves=True)
        # where keys may be hidden, there is one more behind it, with care
        return self.launches[0]

    def backward(self, grad_out=None, grad_lse=None, needs=(True, True, True)):
        self.launches.clear()
        if grad_out is None:
            grad_out = torch.zeros_like(self.out)
        tensors = self.problem.lower()[0]
        given = (grad_out, grad_lse, *self.inputs, self.out, self.lse)
        every = [*needs, *(False for _ in tensors)]
        self.gradients = aot.backward.backward(self.problem, *given, tensors, every)
        return list(self.launches)


@pytest.fixture
def launches():
    with aot.recorded("sm_90") as launches:
        yield launches


def facts(launched):
    """All of a launch but the addresses of dense and half tensors that its call brought."""
    rest = [
        "tensor" if isinstance(given, torch.Tensor) and given.is_floating_point() else given
        for given in launched.arguments
    ]
    return launched.name, rest, launched.keywords


def shifted(tensor):
    """An equal tensor that starts one element behind an aligned address, with the same strides."""
    wide = tensor.new_empty(tensor.untyped_storage().nbytes() // tensor.element_size() + 1)
    found = wide.as_strided(tensor.shape, tensor.stride(), 1).copy_(tensor)
    assert found.data_ptr() % 16 != 0
    return found


@pytest.mark.parametrize("name", SPECS)
def test_a_second_call_prepares_nothing(launches, name, monkeypatch):
    run = Run(launches, SPECS[name])
    first = [run.forward(), *run.backward()]
    monkeypatch.setattr(host.Call, "__init__", lambda *arguments: pytest.fail("prepared again"))
    second = [run.forward(), *run.backward()]
    care = ["finite"] * 4 + ["keys", "queries"] if name in ("lists", "scores") else []
    assert [launched.name for launched in second] == ["forward", "delta", *care, "keys", "queries"]
    for one, other in zip(first, second, strict=True):
        assert facts(one) == facts(other)


@pytest.fixture
def step(launches, monkeypatch):
    """A forward and a backward of a plain call, which have run once; they give the names of what they launch."""
    monkeypatch.setattr(schedule, "_interprets", lambda: True)
    leaves = [leaf.requires_grad_() for leaf in torch.randn(3, 1, 2, 130, 64, dtype=torch.float16).unbind()]
    gradient = torch.randn(1, 2, 130, 64, dtype=torch.float16)

    def step():
        launches.clear()
        gradients = torch.autograd.grad(onchip.attention(*leaves, causal=True, schedule="triton"), leaves, gradient)
        assert all(gradient.stride() == leaf.stride() for gradient, leaf in zip(gradients, leaves, strict=True))
        return [launched.name for launched in launches]

    assert step() == ["forward", "delta", "keys", "queries"]
    return step


def test_a_second_step_goes_from_the_call_to_its_launches(step, monkeypatch):
    """No problem, no choice, no operator: in both directions a look-up of what is ready."""

    def asked(*arguments, **keywords):
        pytest.fail("asked again")

    for owner in (Problem, host.Call, dispatch.Ready):
        monkeypatch.setattr(owner, "__init__", asked)
    for name in ("_attention", "_attention_backward", "_compute", "_differentiate"):
        monkeypatch.setattr(ops, name, asked)
    for name in ("choose", "candidates"):
        monkeypatch.setattr(dispatch, name, asked)
    assert step() == ["forward", "delta", "keys", "queries"]


def test_a_second_step_allocates_its_results_and_two_numbers_for_each_row(step):
    with torch.autograd.profiler.profile() as seen:
        step()
    called = Counter(
        event.name
        for event in seen.function_events
        if event.name.startswith("aten::") and not event.cpu_parent.name.startswith("aten::")
    )
    # out and LSE; LSE and deltas as weights want them, and the gradients of query, key and value
    assert called == {"aten::empty_strided": 2, "aten::empty": 1, "aten::empty_like": 4}


@pytest.mark.parametrize("grad", [False, True])
def test_results_of_launches_are_no_views(launches, monkeypatch, grad):
    """They are made where autograd looks on, so it must have nothing to see."""
    monkeypatch.setattr(schedule, "_interprets", lambda: True)
    leaves = [leaf.requires_grad_(grad) for leaf in torch.randn(3, 1, 40, 2, 64, dtype=torch.float16).unbind()]
    inputs = [leaf.transpose(1, 2) for leaf in leaves]
    found = onchip.attention_with_lse(*inputs, schedule="triton")
    assert not any(result._is_view() for result in found)
    assert [result.requires_grad for result in found] == [grad, grad]
    if grad:
        gradients = torch.autograd.grad(found.out.float().sum(), inputs)
        assert not any(gradient._is_view() or gradient.requires_grad for gradient in gradients)
    found.out.add_(inputs[0])


@pytest.mark.parametrize("mask", [None, "documents"])
def test_descriptors_are_of_the_tensors_of_the_call(launches, mask):
    run = Run(launches, dataclasses.replace(PLAIN, dims=(128, 128), causal=False, mask=mask))
    for _ in range(2):
        run.inputs = [tensor.clone() for tensor in run.inputs]
        run.forward()
        assert [launched.name for launched in launches] == ["forward"] * (2 if mask else 1)
        for launched in launches:
            for given, wanted in zip(launched.arguments[:2], run.inputs[1:], strict=True):
                assert given.base is wanted and given.shape == list(wanted.shape)


@pytest.mark.parametrize(
    "spec",
    [
        Spec(((20, 33),), dims=(128, 128), layout="padded"),
        Spec(((20, 33),), dims=(128, 128), layout="packed"),
        Spec(((20, 33),), dims=(100, 100)),
        Spec(((20, 33),), dims=(128, 128), view="interleaved"),
        Spec(((20, 33),), dims=(128, 128), dropout_p=0.1),
        PLAIN,
    ],
    ids=["padded", "packed", "odd rows", "interleaved", "changed", "narrow"],
)
def test_tma_is_left_alone_where_it_reads_too_much_or_cannot(launches, spec):
    assert Run(launches, spec).forward().arguments[:2] == (None, None)


def test_each_launch_gets_the_tensors_of_its_call(launches):
    run = Run(launches, PLAIN)
    for _ in range(2):
        run.inputs = [tensor.clone() for tensor in run.inputs]
        launched = run.forward()
        for given, wanted in zip(launched.arguments[2:], (*run.inputs, run.out, run.lse), strict=False):
            assert given is wanted
        grad_out = torch.zeros_like(run.out)
        delta, keys, queries = run.backward(grad_out)
        assert delta.arguments[0] is run.out and delta.arguments[1] is grad_out and delta.arguments[2] is run.lse
        for backward, gradients in ((keys, run.gradients[1:]), (queries, run.gradients[:1])):
            wanted = (*run.inputs, grad_out, *delta.arguments[4:6], *gradients)
            assert all(given is tensor for given, tensor in zip(backward.arguments[2:], wanted, strict=False))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_strides_are_another_launch(launches, place):
    run = Run(launches, PLAIN)
    expected = run.forward(), *run.backward()
    dense, inputs = run.inputs, list(run.inputs)
    inputs[place] = inputs[place].transpose(1, 2).contiguous().transpose(1, 2)
    for run.inputs, same in ((inputs, False), (dense, True)):
        found = run.forward(), *run.backward()
        # the kernel of deltas reads out, whose strides are in the order of those of the query
        for got, wanted in zip(found, expected, strict=True):
            assert (facts(got) == facts(wanted)) == (same or (got.name == "delta" and place > 0))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_addresses_that_are_not_aligned_are_another_launch(launches, place):
    run = Run(launches, PLAIN)
    aligned = run.forward()
    inputs = list(run.inputs)
    inputs[place] = shifted(inputs[place])
    assert run.forward(*inputs).keywords["VECTOR"] == 1 < aligned.keywords["VECTOR"]
    assert facts(run.forward()) == facts(aligned)


def test_a_gradient_whose_address_is_not_aligned_is_another_launch(launches):
    run = Run(launches, PLAIN)
    run.forward()
    aligned = run.backward()
    grad_out = torch.zeros_like(run.out)
    copied = run.backward(shifted(grad_out))
    # vectors cannot read it, so a copy stands in its place
    assert copied[0].arguments[1].data_ptr() % 16 == 0 and [*map(facts, copied)] == [*map(facts, aligned)]
    assert run.backward(grad_out)[0].arguments[1] is grad_out


def test_a_gradient_that_sums_give_is_copied_each_time(launches):
    run = Run(launches, PLAIN)
    run.forward()
    for value in (1.0, 2.0):
        grad_out = torch.full((), value, dtype=run.out.dtype).expand_as(run.out)
        for launched in run.backward(grad_out)[1:]:
            read = launched.arguments[5]
            assert read.stride() == run.out.stride() and read.eq(value).all()
    dense = torch.zeros_like(run.out)
    assert run.backward(dense)[0].arguments[1] is dense


def test_the_gradient_of_the_lse_comes_and_goes(launches):
    run = Run(launches, PLAIN)
    run.forward()
    for grad_lse in (None, torch.zeros_like(run.lse), None, torch.zeros(()).expand_as(run.lse)):
        delta, *_ = run.backward(None, grad_lse)
        assert delta.arguments[3] is grad_lse
        # behind the tensors and the strides of out, its gradient and the LSE
        strides = (0, 0, 0) if grad_lse is None else grad_lse.stride()
        assert delta.arguments[16:19] == strides


def test_only_the_gradients_that_are_needed_are_launched(launches):
    run = Run(launches, PLAIN)
    run.forward()
    for needs, wanted in (
        ((True, True, True), ["delta", "keys", "queries"]),
        ((True, False, False), ["delta", "queries"]),
        ((False, True, False), ["delta", "keys"]),
        ((False, False, True), ["delta", "keys"]),
        ((True, True, True), ["delta", "keys", "queries"]),
    ):
        found = run.backward(needs=needs)
        assert [launched.name for launched in found] == wanted
        assert [gradient is not None for gradient in run.gradients] == list(needs)
        fresh = Run(launches, PLAIN)
        fresh.forward()
        assert [*map(facts, found)] == [*map(facts, fresh.backward(needs=needs))]


def test_tiles_that_are_tuned_meanwhile_are_taken(launches, monkeypatch):
    run = Run(launches, PLAIN)
    shipped = run.forward(), *run.backward()
    tile = Tile(32, 32, 4, 1)
    monkeypatch.setattr(host, "choose", lambda *arguments: tuned.Choice(tile, "tuned"))
    assert [launched.tile for launched in run.backward()] == [launched.tile for launched in shipped[1:]]
    tuned.forget()
    (_, *walks), launched = run.backward(), run.forward()
    assert all(found.tile == dataclasses.astuple(tile)[:4] for found in (launched, *walks))
    monkeypatch.undo()
    tuned.forget()
    assert facts(run.forward()) == facts(shipped[0])


def test_every_change_of_tiles_is_another_generation():
    device, before = torch.device("cuda", 0), tuned.generation()
    with tuned.substituted(device, []):
        inside = tuned.generation()
    assert len({before, inside, tuned.generation()}) == 3


def test_the_precision_of_products_is_asked_for_each_time(launches):
    run, before = Run(launches, PLAIN, torch.float32), torch.backends.cuda.matmul.fp32_precision
    assert run.forward().keywords["PRECISION"] == "tf32x3"
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    try:
        _, keys, queries = run.backward()
        assert run.forward().keywords["PRECISION"] == "ieee"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert keys.keywords["PRECISION"] == queries.keywords["PRECISION"] == "ieee"
    assert run.forward().keywords["PRECISION"] == "tf32x3"


@pytest.mark.parametrize("name", SPECS)
def test_nothing_outlives_its_problem(launches, name):
    """What is prepared holds tensors of the problem, and the problem must not wait for a collection of cycles."""
    run = Run(launches, SPECS[name])
    run.forward()
    run.backward()
    problem = weakref.ref(run.problem)
    del run
    assert problem() is None


def test_a_kernel_that_stands_in_for_another_is_launched(launches):
    run = Run(launches, PLAIN)
    kernels = [run.forward().kernel, *(launched.kernel for launched in run.backward())]
    with aot.recorded("sm_90") as inside:
        run.launches = inside
        run.forward()
        assert len(run.backward()) == 3
    run.launches = launches
    assert [run.forward().kernel, *(launched.kernel for launched in run.backward())] == kernels
