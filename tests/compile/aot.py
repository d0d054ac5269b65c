"""Kernels compiled ahead of time, without a GPU: what a call would launch is recorded, and compiled for a target."""

import importlib
import re
import subprocess
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature

from onchip.attention import _bind
from onchip.gpu import call
from onchip.schedules.hopper import launch as hopper_launch
from tests import harness
from tests.problems import build

# the packages have functions of these names
hopper = importlib.import_module("onchip.schedules.hopper.forward")
hopper_backward = importlib.import_module("onchip.schedules.hopper.launch_backward")
forward, backward, finite = (
    importlib.import_module(f"onchip.schedules.triton.{name}") for name in ("forward", "backward", "finite")
)

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMITS = {"sm_80": 163 * 1024, "sm_86": 99 * 1024, "sm_90": 227 * 1024, "gfx942": 64 * 1024}
"""Bytes that one block may take. 99 KiB is also what sm_89 and sm_120 have."""
REGISTER_LIMITS = {"sm_80": 255, "sm_86": 255, "sm_90": 255, "gfx942": 512}
"""Of a thread; on gfx942 vector registers and accumulation registers together."""

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


# What a call launches


@dataclass
class Launch:
    """A kernel and what it would have been given."""

    kernel: triton.runtime.JITFunction
    arguments: tuple
    keywords: dict

    @property
    def name(self):
        return self.kernel.__name__.removesuffix("_kernel")

    @property
    def tile(self):
        """Rows, columns, warps and stages; a kernel without one of them has None there."""
        return tuple(self.keywords.get(name) for name in ("BQ", "BK", "num_warps", "num_stages"))


class _Recorder:
    def __init__(self, kernel, launches):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid):
        return lambda *arguments, **keywords: self.launches.append(Launch(self.kernel, arguments, keywords))


@contextmanager
def recorded(target):
    """Inside, launches of the schedule are recorded for a target and nothing runs: the tensors stay as they are."""
    launches = []
    with ExitStack() as patches:
        for module in (forward, backward, finite):
            for name in dir(module):
                if name.endswith("_kernel"):
                    recorder = _Recorder(getattr(module, name), launches)
                    patches.enter_context(mock.patch.object(module, name, recorder))
        patches.enter_context(mock.patch.object(call, "architecture", lambda device: target))
        yield launches


def bound(spec, dtype, deterministic=False):
    """A problem of tests/problems.py, with its query, key and value."""
    described = build(spec, dtype)
    (query, key, value, *offsets), keywords = harness.arguments(described, described.leaves)
    names = ("causal", "window", "mask", "score", "lengths", "scale", "dropout_p", "dropout_seed")
    given = (keywords.get(name) for name in names)
    return (
        _bind(query, key, *(offsets or (None, None)), value, *given, deterministic, "triton", True),
        query,
        key,
        value,
    )


def launch_of_hopper(spec, dtype):
    """The launch of the Hopper schedule's forward."""
    problem, query, key, value = bound(spec, dtype)
    launches = []
    with ExitStack() as patches:
        recorder = _Recorder(hopper.forward_kernel, launches)
        patches.enter_context(mock.patch.object(hopper, "forward_kernel", recorder))
        patches.enter_context(mock.patch.object(hopper_launch, "multiprocessors", lambda device: 132))
        patches.enter_context(mock.patch.object(hopper_launch, "workspace_of", hopper_launch._workspace))
        hopper.forward(problem, query, key, value, saves=True)
    return launches[0]


def launches_of_hopper_backward(spec, dtype, deterministic=False):
    """Every launch of the Hopper schedule's backward, for the gradients of query, key and value."""
    problem, query, key, value = bound(spec, dtype, deterministic)
    out, lse = call.empty_results(problem, query)
    launches = []
    with ExitStack() as patches:
        for name in dir(hopper_backward):
            if name.endswith("_kernel"):
                recorder = _Recorder(getattr(hopper_backward, name), launches)
                patches.enter_context(mock.patch.object(hopper_backward, name, recorder))
        gradients = torch.empty_like(out), torch.empty_like(lse)
        needs = [True] * 3 + [False] * len(problem.lower()[0])
        hopper_backward.backward(problem, *gradients, query, key, value, out, lse, needs[3:], needs)
    return launches


def launches_of(spec, dtype, target):
    """Every launch of a forward and a backward with all gradients, of a problem of tests/problems.py."""
    problem, query, key, value = bound(spec, dtype)
    with recorded(target) as launches:
        out, lse = forward.forward(problem, query, key, value, saves=True)
        tensors = problem.lower()[0]
        needs = [True] * 3 + [tensor.is_floating_point() for tensor in tensors]
        gradients = torch.empty_like(out), torch.empty_like(lse)
        backward.backward(problem, *gradients, query, key, value, out, lse, tensors, needs)
    return launches


# What a compiler is given


@dataclass(frozen=True)
class Specialized:
    """All that a compiled kernel depends on, beside its source: launches with equal ones share it."""

    signature: dict
    constants: dict
    attributes: dict
    options: dict


def specialized(launch, target):
    """What Triton's own launch would look a kernel up by, and compile it from."""
    backend = make_backend(TARGETS[target])
    kernel = launch.kernel
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    keywords = launch.keywords | {"debug": False, "instrumentation_mode": ""}
    bound, specialization, options = binder(*launch.arguments, **keywords)
    options, signature, constants, attributes = kernel._pack_args(backend, keywords, bound, specialization, options)
    return Specialized(signature, constants, attributes, options.__dict__)


def made_of(launch, target):
    """What Triton makes of the kernel of a launch, for a target."""
    given = specialized(launch, target)
    kind = GluonASTSource if launch.kernel.is_gluon() else ASTSource
    source = kind(launch.kernel, given.signature, given.constants, given.attributes)
    return triton.compile(source, target=TARGETS[target], options=given.options)


def compile_launch(launch, target):
    """The kernel of a launch, compiled for a target."""
    made = made_of(launch, target)
    return read_hip(made) if TARGETS[target].backend == "hip" else read_cuda(made)


# What it made of it


@dataclass(frozen=True)
class Compiled:
    """Registers of a thread, local memory of a thread and shared memory of a block in bytes, and instructions.

    `spills` counts the loads and stores of local memory, `spills_in_loops` those of them in loops, see `in_loops`, and
    `spills_at_products` those in loops that make products; on gfx942 the first two are the spilled vector registers.
    `products` counts the products of matrices, `units` names the instructions that make them. `serialized` counts
    ptxas's warnings of products that wait for each other, `handed` holds what threads ask for by setmaxnreg,
    `overwritten` where in shared memory there is a barrier and at other times something else, `hurried` where there is
    what an atomic operation found and then something else, though not every warp has read the first, and `barriers` is
    the highest number that the code names a barrier of the hardware by.
    """

    registers: int
    local: int
    spills: int
    spills_in_loops: int
    shared: int
    products: int
    units: str
    spills_at_products: int = 0
    serialized: int = 0
    handed: tuple[int, ...] = ()
    overwritten: tuple[int, ...] = ()
    hurried: tuple[int, ...] = ()
    barriers: int = 0


def products_of(text):
    """How many products of matrices PTX or AMD assembly makes, and by which instructions."""
    found = re.findall(r"\bwgmma\.mma_async|\bmma\.sync|\bv_mfma", text)
    return {"products": len(found), "units": " ".join(sorted(set(found)))}


def read_cuda(made):
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(made.asm["cubin"])
        usage = _dump("-res-usage", binary)
        instructions = parse_sass(_dump("-sass", binary))
        joined = "\n".join(instructions.values())
        warnings = _warnings(made.asm["ptx"], folder) if "wgmma" in made.asm["ptx"] else ""
    count = lambda word: max(map(int, re.findall(rf"\b{word}:(\d+)", usage)))  # noqa: E731
    spills = [place for place, text in instructions.items() if re.search(r"\b(LDL|STL)\b", text)]
    repeated, at_products = (in_loops(instructions, only) if spills else set() for only in (False, True))
    return Compiled(
        registers=count("REG"),
        local=count("STACK"),
        spills=len(spills),
        spills_in_loops=sum(place in repeated for place in spills),
        spills_at_products=sum(place in at_products for place in spills),
        shared=made.metadata.shared,
        **products_of(made.asm["ptx"]),
        serialized=len(re.findall(r"C75\d\d", warnings)),
        handed=tuple(sorted({int(size, 16) for size in re.findall(r"USETMAXREG.*\b0x(\w+)", joined)})),
        overwritten=tuple(sorted(_offsets(r"SYNCS\.EXCH", joined) & _offsets(r"STS[.\w]*", joined))),
        hurried=tuple(sorted(_hurried(instructions.values()))),
        barriers=max(map(int, re.findall(r"\bbar(?:rier)?\.(?:sync|arrive)\S*\s+(\d+)", made.asm["ptx"])), default=0),
    )


def _offsets(instruction, text):
    """Where in shared memory an instruction reads or writes, but for what registers add."""
    return {int(offset, 16) for offset in re.findall(rf"\b{instruction} [^\[;]*\[[^\]]*\+(0x\w+)\]", text)}


def _hurried(instructions):
    """Where something is written that was read behind an atomic operation, without a barrier in between."""
    following, read, found = False, set(), set()
    for text in instructions:
        if re.search(r"\bATOMG?\b", text):
            following, read = True, set()
        elif re.search(r"\bBAR\.SYNC", text):
            following, read = following and not read, set()
        elif following:
            read |= _offsets(r"LDS[.\w]*", text)
            found |= _offsets(r"STS[.\w]*", text) & read
    return found


def _warnings(ptx, folder):
    """What ptxas says of a kernel, which Triton keeps to itself; the first of those beside Triton that reads it."""
    source = Path(folder, "kernel.ptx")
    source.write_text(ptx)
    for tool in ("ptxas", "ptxas-blackwell"):
        command = [TOOLS / tool, "-v", "--gpu-name=sm_90a", source, "-o", Path(folder, "again.cubin")]
        run = subprocess.run(command, capture_output=True, text=True)
        if "Unsupported .version" not in run.stderr:
            break
    run.check_returncode()
    return run.stderr


def _dump(option, binary):
    return subprocess.run([TOOLS / "cuobjdump", option, binary], capture_output=True, text=True, check=True).stdout


def read_hip(made):
    text = made.asm["amdgcn"]
    count = lambda word: max(map(int, re.findall(rf"\.{word}:\s+(\d+)", text)))  # noqa: E731
    spills = count("vgpr_spill_count")
    return Compiled(
        registers=count("vgpr_count"),
        local=count("private_segment_fixed_size"),
        spills=spills,
        spills_in_loops=spills,
        shared=made.metadata.shared,
        **products_of(text),
    )


# Loops in SASS


def parse_sass(text):
    """Instructions by their address, in its order."""
    found = re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?);", text, re.MULTILINE)
    return {int(place, 16): instruction for place, instruction in found}


def successors(instructions):
    """For each instruction the addresses that may come next. What looks like a call may be a jump out of a loop."""
    places = list(instructions)
    following = dict(zip(places, [*places[1:], None], strict=True))
    paths = {}
    for place, text in instructions.items():
        always = not text.startswith("@")
        word = re.sub(r"^@!?U?P\w+\s+", "", text)
        operation = word.split()[0].split(".")[0]
        ends = operation in ("EXIT", "RET") or (operation in ("BRA", "JMP") and re.match(r"\w+\s+0x", word))
        paths[place] = set() if always and ends else {following[place]} - {None}
        if operation in ("BRA", "JMP", "CALL"):
            paths[place].add(int(re.findall(r"\b0x([0-9a-f]+)", word)[-1], 16))
    return paths


def in_loops(instructions, with_products=False):
    """Addresses of instructions that a loop repeats: of nested loops the innermost one that makes products.

    `with_products` leaves out loops without any.
    """
    paths = successors(instructions)
    hot = {place for place, text in instructions.items() if re.search(r"\b[HIDQB]?G?MMA\b", text)}
    waiting, found = cycles(paths, set(instructions)), set()
    while waiting:
        loop = waiting.pop()
        entries = {after for place in instructions.keys() - loop for after in paths[place] if after in loop}
        inner = [part for part in cycles(paths, loop - entries) if part & hot]
        waiting += inner
        if not inner and (loop & hot or not with_products):
            found |= loop
    return found


def cycles(paths, places):
    """Sets of these places from each of which control may come back to it (strongly connected components, Tarjan)."""
    index, lowest, stack, waiting, found = {}, {}, [], set(), []
    for root in sorted(places):
        work = [(root, None)] if root not in index else []
        while work:
            place, rest = work.pop()
            if rest is None:
                index[place] = lowest[place] = len(index)
                stack.append(place)
                waiting.add(place)
                rest = iter(sorted(paths[place] & places))
            for after in rest:
                if after not in index:
                    work += [(place, rest), (after, None)]
                    break
                if after in waiting:
                    lowest[place] = min(lowest[place], index[after])
            else:
                if lowest[place] == index[place]:
                    at = stack.index(place)
                    members = set(stack[at:])
                    del stack[at:]
                    waiting -= members
                    if len(members) > 1 or place in paths[place]:
                        found.append(members)
                if work:
                    parent = work[-1][0]
                    lowest[parent] = min(lowest[parent], lowest[place])
    return found
