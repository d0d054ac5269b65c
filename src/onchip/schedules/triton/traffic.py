"""What each of the portable kernels moves and computes: the sums of counts.py over their walks."""

from __future__ import annotations

from onchip.gpu import GRADIENT, KEYS, QUERIES
from onchip.gpu.counts import Counts, forward_kernel, slots, softcaps
from onchip.model.kernels import Kernel
from onchip.model.traffic import Traffic
from onchip.problem import Problem
from onchip.schedules.triton.launch import Call
from onchip.scores import Alibi, Bias
from onchip.tile import per_head, rank4

DELTA, FINITE = "delta", "finite"


def kernels(problem: Problem, backward: bool, target: str | None) -> list[Kernel]:
    """Every kernel of a direction. Reads lengths, offsets and lists."""
    sequences = 1 if problem.layout == "packed" else problem.batch
    rows = sequences * problem.heads_q * problem.length_q
    if rows * problem.dim_v == 0:
        return []
    call = Call(problem, target)
    if not backward:
        return [forward_kernel(call, rows)]
    before = [_delta(call, rows), *_finite(call)]
    return [*before, _keys(call), _queries(call, rows), *gradients_of_scores(problem, target)]


def gradients_of_scores(problem: Problem, target: str | None) -> list[Kernel]:
    """The kernels of the gradients of biases and slopes that want one."""
    steps = [score for score in problem.scores if isinstance(score, Bias | Alibi)]
    wanted = [step for step in steps if step.parameters[0][0].requires_grad]
    call = Call(problem, target)
    return [kernel for step in wanted for kernel in _gradient(call, step)]


def _finite(call: Call) -> list[Kernel]:
    """One for each tensor that is looked through for what is not finite. Of each two kernels that follow one runs."""
    problem = call.problem
    if not call.careful:
        return []
    sequences = 1 if call.packed else problem.batch
    queries, keys = problem.heads_q * problem.length_q, problem.heads_kv * problem.length_k
    numbers = {
        "query": queries * problem.dim_qk, "key": keys * problem.dim_qk, "value": keys * problem.dim_v,
        "d_out": queries * problem.dim_v,
    }  # fmt: skip
    reads = {name: Traffic({name: sequences * number * problem.dtype.itemsize}, {}) for name, number in numbers.items()}
    return [
        Kernel(name=f"{FINITE} {name}", requested=one, compulsory=one, precision="float32")
        for name, one in reads.items()
    ]


def _delta(call: Call, rows: int) -> Kernel:
    """Also rows that do not exist, so that nothing need be known of lengths."""
    problem = call.problem
    size = rows * problem.dim_v * problem.dtype.itemsize
    padded = rows // problem.length_q * call.padded_rows
    stores = {"lse": 4 * padded, "delta": 4 * padded}
    traffic = Traffic({"out": size, "d_out": size, "lse": 4 * rows}, stores)
    return Kernel(name=DELTA, requested=traffic, compulsory=traffic, precision="float32")


def _rows_of(counts: Counts, loaded: int, touched: int) -> None:
    """Loads of query, d_out, LSE and delta by rows."""
    _tiles_of(counts, loaded, touched)
    counts.add("lse", 4, loaded, touched)
    counts.add("delta", 4, loaded, touched)


def _tiles_of(counts: Counts, loaded: int, touched: int) -> None:
    problem, width = counts.problem, counts.width
    counts.add("query", problem.dim_qk * width, loaded, touched)
    counts.add("d_out", problem.dim_v * width, loaded, touched)


def _keys(call: Call) -> Kernel:
    problem = call.problem
    counts = Counts(call, KEYS, problem.heads_q)
    tile, width = counts.tile, counts.width
    owned = counts.owned() * problem.heads_kv
    counts.add("key", problem.dim_qk * width, owned, owned)
    counts.add("value", problem.dim_v * width, owned, owned)
    _tiles_of(counts, counts.others_loaded, counts.others_touched(1))
    # where nothing is asked of a row, the values of those behind the last one are read with it
    whole = call.reads_every_row
    values = counts.steps * tile.rows if whole else counts.others_loaded
    for name in ("lse", "delta"):
        counts.add(name, 4, values, counts.others_touched(1, whole))
    counts.add_sides()
    counts.add_lists(slots(call, call.rooms()[1], problem.length_k, 1, tile.columns) * problem.heads_q)
    columns = (1 if call.packed else problem.batch) * problem.length_k * problem.heads_kv
    counts.stores |= {"d_key": columns * problem.dim_qk * width, "d_value": columns * problem.dim_v * width}
    each = tile.rows * tile.columns * (1 + 2 * softcaps(problem))
    return counts.kernel(KEYS, (2, 2), counts.steps * each)


def _queries(call: Call, rows: int) -> Kernel:
    problem = call.problem
    counts = Counts(call, QUERIES, problem.heads_q // call.pack)
    tile, width = counts.tile, counts.width
    owned, loaded = counts.owned() * counts.heads, counts.others_loaded
    touched = counts.others_touched(problem.group)
    _rows_of(counts, owned, owned)
    counts.add("key", problem.dim_qk * width, loaded, touched)
    counts.add("value", problem.dim_v * width, loaded, touched)
    counts.add_sides()
    counts.add_lists(slots(call, call.rooms()[0], problem.length_q, call.pack, tile.rows) * counts.heads)
    counts.stores |= {"d_query": rows * problem.dim_qk * width}
    each = tile.rows * tile.columns * (1 + 2 * softcaps(problem))
    return counts.kernel(QUERIES, (2, 1), counts.steps * each)


def _gradient(call: Call, step: Bias | Alibi) -> list[Kernel]:
    """The gradient of a bias or of slopes, and the sum over sequences, heads and rows where they share entries."""
    problem = call.problem
    tensor = step.parameters[0][0]
    if tensor.numel() == 0:
        return []
    shape = tuple((per_head(tensor) if isinstance(step, Alibi) else rank4(tensor)).shape)
    full = shape[2] > 1 and shape[3] > 1
    made = shape if full else (problem.batch, problem.heads_q, shape[2], shape[3])
    if not full and shape[2:] == (1, 1) and not call.packed:
        made = (*made[:2], problem.length_q, 1)
    counts = Counts(call, GRADIENT, problem.heads_q)
    loaded = counts.others_loaded
    if full and call.sums_in_one_loop:
        _rows_of(counts, counts.own_loaded, counts.own_touched())
    else:
        # a program of one tile of columns loads its rows all the same
        repeats = -(-made[3] // counts.tile.columns) if made[3] > 1 else 1
        owned = counts.owned() * problem.heads_q
        _rows_of(counts, owned * repeats, owned)
    touched = counts.others_touched(problem.group)
    counts.add("key", problem.dim_qk * counts.width, loaded, touched)
    counts.add("value", problem.dim_v * counts.width, loaded, touched)
    counts.add_sides(masked_everywhere=True)
    name = "d_bias" if isinstance(step, Bias) else "d_slopes"
    entries = made[0] * made[1] * made[2] * made[3]
    counts.stores[name if full else f"{name} of each"] = entries * (tensor.element_size() if full else 4)
    each = counts.tile.rows * counts.tile.columns * (1 + softcaps(problem))
    found = [counts.kernel(f"{GRADIENT} of {name[2:]}", (1, 1), counts.steps * each)]
    if not full:
        sums = Traffic({f"{name} of each": 4 * entries}, {name: tensor.numel() * tensor.element_size()})
        found.append(Kernel(name=f"sum of {name}", requested=sums, compulsory=sums, precision="float32"))
    return found
