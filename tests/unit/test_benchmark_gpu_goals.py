"""Goals of the GPU's benchmark: their cases at small sizes with fakes for peers, and how numbers are judged."""

import contextlib
import dataclasses
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from typer.testing import CliRunner

import onchip
from onchip.bench.machine import read_machine
from onchip.bench.protocol import Comparison, Failure, Method, Ratio, Record, Result

FOLDER = Path(__file__).parents[2] / "benchmarks"
CPU = torch.device("cpu")
TABLES = ("hopper-forward", "hopper-backward", "triton")
SEQUENCES, DOCUMENTS = (40, 7, 64), (100, 60)
NAMES = ("gpu", "cases", "inputs", "contenders", "calls", "goals", "rows", "verdicts", "runs", "stored")


class Modules:
    """The script's modules by the end of their names."""

    def __init__(self, modules: dict[str, ModuleType]) -> None:
        self.__dict__.update(modules)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


@pytest.fixture(scope="module")
def b() -> Iterator[Modules]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        yield Modules({name: importlib.import_module("gpu" if name == "gpu" else f"gpu_{name}") for name in NAMES})


def shrunk(case: Any) -> Any:
    """A case of the same kind that a processor computes in milliseconds, in float32."""
    heads = 4 if case.heads_kv else 2
    changed: dict[str, Any] = {
        "dtype": "float32", "dim": 16, "length": 160, "tokens": 320, "width": heads * 16,
        "heads_kv": case.heads_kv and (2 if case.heads_kv > 1 else 1), "dim_value": case.dim_value and 8,
        "window": case.window and 20,
    }  # fmt: skip
    if case.sequences:
        changed |= {"sequences": SEQUENCES, "length": max(SEQUENCES)}
    if case.documents:
        changed |= {"documents": DOCUMENTS, "tokens": 160}
    return dataclasses.replace(case, **changed)


@pytest.fixture
def tables(b: Modules, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The tables with cases that fit a processor, which stands for the GPU."""
    small = {
        name: dataclasses.replace(
            goals,
            rows=tuple(
                dataclasses.replace(row, cases=tuple(dict.fromkeys(map(shrunk, row.cases)))) for row in goals.rows
            ),
        )
        for name, goals in b.rows.TABLES.items()
    }
    for module in (b.rows, b.gpu, b.runs):
        monkeypatch.setattr(module, "TABLES", small)
    monkeypatch.setattr(b.gpu, "_machine", read_machine)
    return small


def fake(b: Modules, name: str, wrong: bool = False) -> Callable[..., Any]:
    """A peer that computes every problem with the definition."""

    def make(case: Any, inputs: Any) -> Callable[[], Tensor]:
        b.contenders._check_fits(name, case)
        attend = b.contenders._onchip("dense", case, inputs)
        return (lambda: attend() * 1.5) if wrong else attend

    return make


@pytest.fixture
def fakes(b: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(b.contenders, "MAKERS", {name: fake(b, name) for name in b.contenders.OTHERS})


def run(b: Modules, *arguments: str, status: int = 0) -> str:
    result = CliRunner().invoke(b.gpu.app, arguments)
    assert result.exit_code == status, result.output
    return result.output if status else result.stdout


# Tables


def every_case(b: Modules) -> list[tuple[Any, Any]]:
    return [(goals, case) for goals in b.rows.TABLES.values() for case in b.runs.all_cases(goals)]


def test_every_case_has_a_record_of_its_own(b: Modules) -> None:
    """Otherwise one would replace another's file, or be read as it."""
    any_case = b.rows.FIGURE_2
    anything = record(b, "gpu", any_case, {"onchip tiled": 1.0})
    everywhere: list[str] = []
    for goals in b.rows.TABLES.values():
        cases = b.runs.all_cases(goals)
        suite = b.runs.goals_run(goals, goals.schedule, (), False).suite
        keys = {(suite(case), case.what) for case in cases}
        assert len(keys) == len({case.name for case in cases}) == len(cases)
        everywhere += [dataclasses.replace(anything, suite=suite, what=what).file_name() for suite, what in keys]
    assert len(set(everywhere)) == len(everywhere) == len(every_case(b))


def test_every_bound_can_be_met_and_names_contenders_that_take_its_cases(b: Modules) -> None:
    for goals in b.rows.TABLES.values():
        for row in goals.rows:
            for bound in row.bounds:
                assert bound.quantity in b.goals.QUANTITIES and bound.over in ("mean", "each")
                wanted = [number for number in (bound.goal, bound.floor) if number is not None]
                assert wanted and wanted == sorted(wanted, reverse=bound.quantity == "ratio")
            for name in b.goals.peers(row.names):
                for case in row.cases:
                    b.contenders._check_fits(name, case)
            assert set(b.goals.peers(row.names) + b.goals.parts(row.names)) == row.names


def test_the_sizes_are_those_of_the_goals(b: Modules) -> None:
    for _, case in every_case(b):
        dim = case.dim_value or case.dim
        usual = case.tokens == 16384 and case.heads * dim == 2048
        heads = {"grouped": 32, "bias": 16}
        named = [heads[name] for name in case.features if name in heads]
        assert usual or case.heads in (*named, 1, 16), case.name
        assert case.sequences or case.batch * case.length == case.tokens, case.name
    ragged = b.rows._packed("forward")
    assert sum(ragged.sequences) == 39332 and ragged.heads == 16
    assert ragged.what.operations_flops == pytest.approx(464.5e9, rel=1e-3)
    documents = b.rows._documents(32, 65536).documents
    assert (len(documents), sum(documents), min(documents) > 0) == (32, 65536, True)
    wide = next(case for _, case in every_case(b) if case.dim_value)
    assert (wide.dim, wide.dim_value, wide.heads, wide.what.dim_value) == (192, 128, 16, 128)
    figure = b.rows.FIGURE_2
    assert (figure.batch, figure.heads, figure.length, figure.dim, figure.dtype) == (64, 16, 1024, 64, "float16")


def test_visible_pairs_are_those_of_the_mask(b: Modules) -> None:
    for _, big in every_case(b):
        case = shrunk(big)
        inputs = b.inputs.draw(case, CPU)
        row, column = torch.arange(case.length)[:, None], torch.arange(case.length)
        if case.window is not None:
            keep = (column <= row) & (row - column <= case.window)
            assert case.what.visible_pairs == case.batch * case.heads * int(keep.sum())
        elif case.documents:
            same = inputs.ids[:, None] == inputs.ids
            assert case.what.visible_pairs == case.heads * int(same.sum()) // 2


# Cases and contenders


@pytest.mark.parametrize("name", TABLES)
def test_every_kind_of_case_is_computed_and_agrees_with_the_definition(
    b: Modules, tables: dict[str, Any], fakes: None, name: str
) -> None:
    goals = tables[name]
    for case in b.runs.all_cases(goals):
        entered = b.contenders.contestants(
            ["tiled"], b.goals.peers(goals.names(case)), b.goals.parts(goals.names(case))
        )
        made = b.calls.prepare(case, entered, CPU)
        assert len(made) == len(entered) >= 1
        for contestant, call in zip(entered, made.values(), strict=True):
            if contestant.name.endswith("preparation"):
                with pytest.raises(b.contenders.Unfit):
                    call()
            else:
                found = call()
                found = found if isinstance(found, tuple) else (found,)
                assert all(bool(result.isfinite().all()) for result in found)
                assert len(found) == (1 if case.direction == "forward" else 3 + case.bias), case.name


@pytest.mark.parametrize("kind", ["window", "documents", "softcap", "bias", "packed", "flagged", "grouped"])
def test_a_wrong_peer_shows_in_every_kind(b: Modules, tables: dict[str, Any], kind: str) -> None:
    case = next(
        case
        for goals in tables.values()
        for case in b.runs.all_cases(goals)
        if kind in case.features or (kind == "flagged" and case.flagged)
    )
    wrong = b.contenders.Contestant(name="fa4", make=lambda case, inputs: fake(b, "fa4", wrong=True)(
        dataclasses.replace(case, bias=False, documents=()), inputs))  # fmt: skip
    made = b.calls.prepare(case, [*b.contenders.contestants(["tiled"], []), wrong], CPU)
    with pytest.raises(b.calls.WrongResult, match="differs from onchip tiled"):
        made["fa4"]()


def test_with_dropout_masks_may_differ_and_shapes_not(b: Modules) -> None:
    case = shrunk(b.rows._dropout(64)[0])

    def cut(case: Any, inputs: Any) -> Callable[[], Tensor]:
        return lambda: F.scaled_dot_product_attention(*inputs.tensors)[..., :8]

    def poisoned(case: Any, inputs: Any) -> Callable[[], Tensor]:
        return lambda: F.scaled_dot_product_attention(*inputs.tensors) * torch.nan

    case = dataclasses.replace(case, direction="forward")
    entered = b.contenders.contestants(["tiled"], [])
    for name, make in (("cut", cut), ("poisoned", poisoned), ("sdpa", partial(b.contenders._sdpa, "sdpa_flash", None))):
        entered.append(b.contenders.Contestant(name=name, make=make))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(b.contenders, "sdpa_kernel", lambda backend: torch.no_grad())
        made = b.calls.prepare(case, entered, CPU)
        assert made["sdpa"]().shape == (2, 2, 160, 16)
    for name, message in (("cut", "shape"), ("poisoned", "finite")):
        with pytest.raises(b.calls.WrongResult, match=message):
            made[name]()


def test_flagged_keys_score_far_above_every_other(b: Modules) -> None:
    case = dataclasses.replace(shrunk(next(case for _, case in every_case(b) if case.flagged)), causal=False)
    query, key, _ = b.inputs.draw(case, CPU).tensors
    scores = query @ key.mT * case.dim**-0.5
    keys = b.inputs.FLAGGED_KEYS
    above = scores[..., keys].amin(-1)
    scores[..., keys] = float("-inf")
    # 83 is what a bfloat16 row of the Hopper schedule has room for above its reference.
    assert float((above - scores.amax(-1)).min()) > 85
    assert case.plain.flagged is False


def test_preparation_is_the_lists_that_the_portable_kernels_walk(b: Modules) -> None:
    case = shrunk(b.rows._documents(32, 65536))
    inputs = b.inputs.draw(case, CPU)
    order = b.contenders._preparation("triton", case, inputs)()
    assert order.shape == (1, 1, 2, 2)


@pytest.mark.parametrize("kind", ["grouped", "bias"])
def test_sdpa_gets_key_heads_and_biases(b: Modules, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its math backend, since the others' kernels are for a GPU or without a gradient of the bias."""
    case = shrunk(next(case for _, case in every_case(b) if kind in case.features))
    name = "sdpa_flash" if kind == "grouped" else "sdpa_efficient"
    monkeypatch.setitem(b.contenders.MAKERS, name, partial(b.contenders._sdpa, name, SDPBackend.MATH))
    made = b.calls.prepare(case, b.contenders.contestants(["tiled"], [name]), CPU)
    made[name]()


@pytest.mark.parametrize(
    ("timing", "flushes", "timer"),
    [
        ("eager", True, "torch.cuda.Event"),
        ("graph", False, "CUDA graph"),
        ("host", None, "until the launches are queued"),
    ],
)
def test_each_timing_has_its_protocol(
    b: Modules, monkeypatch: pytest.MonkeyPatch, timing: str, flushes: bool | None, timer: str
) -> None:
    case = dataclasses.replace(b.rows.FIGURE_2, timing=timing)
    asked: dict[str, Any] = {}

    def compare(calls: Any, **options: Any) -> Comparison:
        asked.update(options)
        return record(b, "", case, {"onchip triton": 1.0}).comparison

    monkeypatch.setattr(b.calls, "compare", compare)
    monkeypatch.setattr(b.calls, "prepare", lambda *arguments: {})
    comparison = b.calls.time_case(case, [], torch.device("cuda"), 8)
    assert asked.get("flush_l2") is flushes and comparison.method.timer.endswith(timer)
    # Python's time is that of the processor, whatever the device does.
    assert str(asked.get("device", "cpu")) == ("cpu" if timing == "host" else "cuda")


def test_a_replay_is_of_the_very_call(b: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    class Graph:
        replays = 0

        def replay(self) -> None:
            self.replays += 1

    captured: list[str] = []
    graph = Graph()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda given: contextlib.nullcontext(given))
    replay = b.calls.replayed(lambda: captured.append("call"), torch.device("cuda"))
    replay(), replay()
    assert (captured, graph.replays) == (["call"], 2)


def test_jagged_sdpa_gets_the_sequences(b: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a processor SDPA has no kernel for jagged tensors under a causal mask; onchip, which takes them, stands in."""

    def attention(*tensors: Tensor, is_causal: bool, dropout_p: float) -> Tensor:
        assert all(tensor.is_nested and tensor.dim() == 4 for tensor in tensors)
        return onchip.attention(*tensors, causal=is_causal, dropout_p=dropout_p)

    monkeypatch.setattr(b.contenders.F, "scaled_dot_product_attention", attention)
    case = shrunk(b.rows._packed("forward+backward"))
    made = b.calls.prepare(case, b.contenders.contestants(["tiled"], ["sdpa_flash", "sdpa_cudnn"]), CPU)
    assert len(made["sdpa_flash"]()) == 3
    with pytest.raises(b.contenders.Unfit, match="sdpa_cudnn is not asked for 3 sequences"):
        made["sdpa_cudnn"]()


def test_flash_attention_gets_windows_offsets_and_the_rest(b: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keywords are those of flash-attn-4 4.0.0b36, fa3-fwd 0.0.3 and tokenspeed-fa3 3.0.0, as their sources have
    them."""
    seen: list[dict[str, Any]] = []

    def dense(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, window_size: Any = (-1, -1), softcap: float = 0.0,
              deterministic: bool = False) -> Tensor:  # fmt: skip
        seen.append({"window_size": window_size, "softcap": softcap, "deterministic": deterministic})
        options: dict[str, Any] = {"score": onchip.scores.softcap(softcap)} if softcap else {}
        options |= {"window": window_size} if window_size[0] >= 0 else {}
        views = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return onchip.attention(*views, causal=causal, **options).transpose(1, 2)

    def packed(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
               max_seqlen_k: int, causal: bool = False) -> tuple[Tensor, None]:  # fmt: skip
        assert cu_seqlens_q.dtype == torch.int32 and cu_seqlens_q.tolist() == [0, *accumulate(SEQUENCES)]
        assert max_seqlen_q == max_seqlen_k == max(SEQUENCES)
        return onchip.attention_varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=causal), None

    for name in ("flash_attn", "flash_attn.cute", "flash_attn_interface", "fa3_fwd_interface"):
        module = ModuleType(name)
        module.flash_attn_func, module.flash_attn_varlen_func = dense, packed  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    cases = [shrunk(case) for _, case in every_case(b)]
    kinds = {
        "window": {"window_size": (20, 0)},
        "softcap": {"softcap": 50.0},
        "deterministic": {"deterministic": True},
        "packed": {},
        "grouped": {},
    }
    for kind, options in kinds.items():
        case = next(case for case in cases if kind in case.features)
        names = [name for name in ("fa3", "fa3ts", "fa4") if kind in b.contenders.TAKES[name]]
        seen.clear()
        made = b.calls.prepare(case, b.contenders.contestants(["tiled"], names), CPU)
        assert len(made) == 1 + len(names)
        for call in made.values():
            call()
        assert all(call.items() >= options.items() for call in seen) and (seen or kind == "packed")


def test_fastflash_is_called_as_it_wants(b: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("fastflash_attention")
    module.fast_attention = F.scaled_dot_product_attention  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fastflash_attention", module)
    case = dataclasses.replace(shrunk(b.rows.FIGURE_2), causal=True)
    made = b.calls.prepare(case, b.contenders.contestants(["tiled"], ["fastflash"]), CPU)
    assert len(made["fastflash"]()) == 3


def test_flexs_mask_is_the_cases(b: Modules) -> None:
    for big in (b.rows._window("forward"), b.rows._documents(32, 65536)):
        case = shrunk(big)
        inputs = b.inputs.draw(case, CPU)
        visible = b.contenders._visible(case, inputs)
        row, column = torch.arange(160)[:, None], torch.arange(160)
        keep = visible(None, None, row, column)
        assert int(keep.sum()) == onchip.plan(*inputs.tensors, mask=onchip.masks.tensor(keep)).problem.mask.kept.sum()
        expected = b.contenders._onchip("dense", case, inputs)()
        assert torch.allclose(onchip.attention(*inputs.tensors, mask=onchip.masks.tensor(keep)), expected, atol=1e-5)


# Judging


def record(b: Modules, suite: str, case: Any, times_ms: dict[str, float | str]) -> Record:
    """A record with these times; a text is the error of one that failed."""
    times = {name: time for name, time in times_ms.items() if not isinstance(time, str)}
    reference = next(iter(times_ms))
    comparison = Comparison(
        method=Method(rounds=2, warmup_calls=1, order="", timer="", minimum_sample_ms=20.0, flush_bytes=0),
        reference=reference,
        results=tuple(Result.of(name, [time, 1.1 * time], 1) for name, time in times.items()),
        ratios=tuple(
            Ratio.of(name, reference, [time / times[reference]] * 2)
            for name, time in times.items()
            if reference in times and name != reference
        ),
        failures=tuple(
            Failure(name=name, error=error, traceback="") for name, error in times_ms.items() if isinstance(error, str)
        ),
        gpu_before=None,
        gpu_after=None,
    )
    return Record.of(suite, case.what, read_machine(), comparison)


MISSING = "ModuleNotFoundError: No module named 'fa3'"
WRONG = "WrongResult: differs from onchip hopper by 0.4 of the result; at most 0.05 is right"


@pytest.mark.parametrize(
    ("times", "value", "verdict"),
    [
        ([{"fa3 0.0.3": 1.2, "fa4": 1.3}, {"fa3 0.0.3": 1.2, "fa4": 1.1}], (1.2 * 1.1) ** 0.5, "met"),
        ([{"fa3 0.0.3": 1.0, "fa4": 1.3}, {"fa3 0.0.3": 1.0, "fa4": 1.1}], 1.0, "over floor"),
        ([{"fa3 0.0.3": 0.9, "fa4": 1.3}, {"fa3 0.0.3": 1.0, "fa4": 1.1}], 0.9**0.5, "under"),
        ([{"fa3": MISSING, "fa4": 1.2}, {"fa3": MISSING, "fa4": 1.2}], 1.2, "met so far"),
        ([{"fa4": 1.2}, {"fa4": 1.2}], 1.2, "met so far"),
        # whichever runs: one that is here and does not take the case is not waited for
        ([{"fa3": "RuntimeError: no", "fa4": 1.2}, {"fa3": 1.2, "fa4": 1.2}], 1.2, "met"),
        ([{"fa3": 1.2, "fa4": 1.3}, None], 1.2, "met so far"),
        ([{"fa3": MISSING, "fa4": MISSING}, {"fa3": MISSING, "fa4": MISSING}], None, "not here"),
        ([{"fa3": WRONG, "fa4": WRONG}, {"fa3": WRONG, "fa4": WRONG}], None, "results differ"),
        ([None, None], None, "not measured"),
    ],
)
def test_the_better_of_two_over_a_mean(b: Modules, times: Any, value: float | None, verdict: str) -> None:
    cases = b.rows._grid("forward", (64,), (2048,))
    bound = b.goals.Bound(against=("fa3", "fa4"), goal=1.08, floor=1.0)
    row = b.goals.Row(key="", what="", cases=cases, bounds=(bound,))
    records = {
        case: record(b, "", case, {"onchip hopper": 1.0, **given})
        for case, given in zip(cases, times, strict=True)
        if given is not None
    }
    judged = b.verdicts.judge(row, bound, records, Path(), "hopper")
    assert judged.verdict == verdict
    assert judged.value == (None if value is None else pytest.approx(value))


def test_the_worst_of_each_and_what_takes_less(b: Modules) -> None:
    cases = b.rows._grid("forward", (64,), (2048,))
    records = {
        case: record(b, "", case, {"onchip hopper": ours, "fa3": 1.2})
        for case, ours in zip(cases, (1, 1.25), strict=True)
    }

    def judged(cases: Any, **bound: Any) -> Any:
        wanted = b.goals.Bound(**bound)
        row = b.goals.Row(key="", what="", cases=cases, bounds=(wanted,))
        return b.verdicts.judge(row, wanted, records, Path(), "hopper")

    each = judged(cases, over="each", against=("fa3",), goal=None, floor=0.9)
    assert (each.value, each.verdict) == (pytest.approx(0.96), "met")
    assert judged(cases, over="each", against=("fa3",), goal=1.0, floor=0.97).verdict == "under"
    # medians of two samples, a tenth apart
    host = judged(cases[:1], quantity="microseconds", goal=1000, floor=1100)
    assert (host.value, host.verdict) == (pytest.approx(1050), "over floor")
    failed = {case: record(b, "", case, {"onchip hopper": "Unsupported: no", "fa3": 1.0}) for case in cases}
    records.update(failed)
    assert judged(cases, against=("fa3",), goal=1.0).verdict == "unsupported"


def test_preparation_is_taken_off_and_its_share_judged(b: Modules) -> None:
    (row,) = (row for row in b.rows.TRITON.rows if row.key == "documents")
    (case,) = row.cases
    times = {"onchip triton": 1.08, "onchip triton: preparation": 0.08, "flex": 1.2}
    records = {case: record(b, "", case, times)}
    ratio, share = (b.verdicts.judge(row, bound, records, Path(), "triton") for bound in row.bounds)
    assert (ratio.value, ratio.verdict) == (pytest.approx(1.2), "met")
    assert (share.value, share.verdict) == (pytest.approx(0.08), "over floor")
    lost = {case: record(b, "", case, times | {"onchip triton": 0.07})}
    assert [b.verdicts.judge(row, bound, lost, Path(), "triton").verdict for bound in row.bounds] == [
        "lost in noise"
    ] * 2


def test_bytes_and_memory_come_from_the_records_of_traffic(b: Modules, tmp_path: Path) -> None:
    kernel = {"device_read_bytes": 10**9, "device_written_bytes": 2 * 10**8}
    entries = [
        {"contender": name, "direction": direction, **b.stored.FIGURE_2, "kernels": [kernel] * count}
        for name, count in (("triton", 1), ("sdpa_cudnn", 2))
        for direction in ("forward", "backward")
    ]
    # half of what the name promises is no number
    entries.append({**entries[0], "contender": "hopper"})
    (tmp_path / "traffic.json").write_text(json.dumps({"cases": entries}))
    assert b.stored.figure_2_bytes(tmp_path, "triton") == 2.4e9
    peaks = [("hopper", 1024, 97), ("hopper", 2048, 220), ("sdpa_cudnn", 1024, 100), ("sdpa_cudnn", 2048, 200)]
    cases = [{"contender": name, "length": length, "peak_bytes": peak} for name, length, peak in peaks]
    (tmp_path / "memory-table-21.json").write_text(json.dumps({"cases": cases}))

    def judged(key: str, table: str, quantity: str, schedule: str) -> tuple[float | None, str]:
        rows = [row for row in b.rows.TABLES[table].rows if row.key == key and not row.cases]
        found = b.verdicts.judge(rows[0], rows[0].bounds[0], {}, tmp_path, schedule)
        assert rows[0].bounds[0].quantity == quantity
        return found.value, found.verdict

    assert judged("figure2", "triton", "gigabytes", "triton") == (pytest.approx(2.4), "met")
    assert judged("figure2", "hopper-backward", "bytes", "triton") == (pytest.approx(0.5), "met")
    assert judged("figure2", "hopper-backward", "bytes", "hopper") == (None, "not measured")
    assert judged("memory", "hopper-backward", "memory", "hopper") == (pytest.approx(1.1), "under")


def test_the_shipped_counts_are_read(b: Modules) -> None:
    shipped = FOLDER / "results" / "nvidia-h200"
    assert 2.2e9 < b.stored.figure_2_bytes(shipped, "triton") < 2.6e9
    assert set(b.stored.table_21_peaks(shipped, "sdpa_cudnn")) == {1024, 2048, 4096}


# The command


def lines(text: str) -> list[list[str]]:
    return [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]


@pytest.mark.parametrize("name", TABLES)
def test_one_command_measures_a_table_and_shows_it_again(
    b: Modules, tables: dict[str, Any], fakes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Timing is faked: a call runs once and takes as many milliseconds as its place, a preparation a hundredth."""

    def compare(calls: dict[str, Any], **options: Any) -> Comparison:
        times: dict[str, float | str] = {}
        for place, (contender, call) in enumerate(calls.items()):
            try:
                call()
                times[contender] = 0.01 if contender.endswith("preparation") else 1.0 + place
            except Exception as error:
                times[contender] = f"{type(error).__name__}: {error}"
        return record(b, "", case, times).comparison

    case = tables[name].rows[0].cases[0]
    monkeypatch.setattr(b.calls, "compare", compare)
    monkeypatch.setattr(b.contenders, "_preparation", b.contenders._onchip)
    options = ("--goals", name, "--schedule", "tiled", "--out", str(tmp_path))
    text = run(b, *options)
    assert len(list(tmp_path.iterdir())) == len(b.runs.all_cases(tables[name]))
    assert max(map(len, text.splitlines())) <= 112 and "…" not in text
    verdicts = [line[-1] for line in lines(text) if line[-1] in ("met", "over floor", "under", "not measured")]
    bounds = [bound for row in tables[name].rows for bound in row.bounds]
    assert len(verdicts) == len(bounds)
    assert verdicts.count("not measured") == sum(not row.cases for row in tables[name].rows)
    assert run(b, "--show", *options) == text
    assert run(b, "--show", "--speeds", *options).endswith(text)
    # The plain table does not take these records for its own.
    assert "no records of these cases" in run(b, "--show", "--out", str(tmp_path), status=2)


def test_rows_and_cases_are_chosen_and_a_shared_record_serves_all(
    b: Modules, tables: dict[str, Any], fakes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(case: Any, inputs: Any) -> Any:
        raise ModuleNotFoundError("No module named 'fa3_fwd_interface'")

    monkeypatch.setitem(b.contenders.MAKERS, "fa3", absent)
    options = ("--goals", "triton", "--schedule", "tiled", "--rounds", "1", "--out", str(tmp_path))
    run(b, *options, "--rows", "fa3,bias", "--only", "causal", "--without", "flex")
    (path,) = tmp_path.iterdir()
    found = Record.from_json(path.read_text())
    assert found.suite == "gpu-triton" and found.what.mask == "causal"
    # fa3 is of this row; sdpa_flash and flex are of another one with the same case, and flex was left out
    assert [failure.name for failure in found.comparison.failures] == ["fa3"]
    assert [result.name for result in found.comparison.results] == ["onchip tiled", "sdpa_flash"]
    text = run(b, "--show", *options, "--rows", "fa3")
    assert "fa3 (not here)" in text and "0 of 2" in text
    assert "1 of 4" in run(b, "--show", *options, "--rows", "forward")


def test_what_ours_cannot_do_is_said_and_fails(b: Modules, tables: dict[str, Any], tmp_path: Path) -> None:
    text = run(b, "--goals", "triton", "--schedule", "aten", "--rounds", "1", "--rows", "dropout", "--without",
               "sdpa_flash", "--out", str(tmp_path), status=1)  # fmt: skip
    assert "unsupported" in text and "onchip aten failed in 1 of 1" in text


def test_estimates_need_no_gpu_and_each_table_fits_two_commands(b: Modules, monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(*options: str) -> int:
        result = CliRunner().invoke(b.gpu.app, ["--estimate", *options])
        assert result.exit_code == 0, result.output
        return int(re.search(r"in all about (\d+) s", result.stderr).group(1))

    monkeypatch.setattr(b.gpu, "_machine", lambda: None)
    documented = re.findall(
        r"gpu\.py (--goals \S+(?: --rows \S+)?)$", (FOLDER.parent / "docs/benchmarks.md").read_text(), re.M
    )
    asked: dict[str, set[str]] = {}
    for command in documented:
        words = command.split()
        assert seconds(*words) <= 540, command
        keys = words[3].split(",") if len(words) > 2 else [row.key for row in b.rows.TABLES[words[1]].rows]
        asked.setdefault(words[1], set()).update(keys)
    for name, goals in b.rows.TABLES.items():
        timed = {row.key for row in goals.rows if row.cases}
        assert timed <= asked[name] and sum(command.split()[1] == name for command in documented) <= 2
    assert seconds("--goals", "triton", "--without", "flex") < seconds("--goals", "triton")


def test_wrong_options_are_refused(b: Modules) -> None:
    assert "--goals: 'speed' is not one of hopper-forward," in run(b, "--goals", "speed", status=2)
    assert "--rows: 'all' is not one of forward," in run(b, "--goals", "triton", "--rows", "all", status=2)
    assert "choose among them with" in run(b, "--goals", "triton", "--dims", "128", status=2)
    assert "belong to" in run(b, "--rows", "forward", status=2)
    assert "measures one schedule" in run(
        b, "--goals", "triton", "--schedule", "tiled", "--schedule", "dense", status=2
    )
    assert "no case has 'nothing'" in run(b, "--goals", "triton", "--only", "nothing", status=2)
