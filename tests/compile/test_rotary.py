"""The rotary kernel compiled for GPUs that are not here: nothing spills, no stack, and lengths compile no other one."""

import re
from unittest import mock

import pytest
import torch

import onchip
from onchip.rotary import launch, operator
from tests.compile import aot

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
OFFSETS = torch.tensor([0, 5, 9], dtype=torch.int32)
CASES = {
    "halves": {},
    "interleaved": {"interleaved": True},
    "partial": {"dim": 32, "offset": torch.tensor([3, 9])},
    "given": {"frequencies": torch.rand(64), "inverse": True, "positions": torch.arange(40)},
    "tables": {"tables": (torch.rand(50, 64), torch.rand(50, 64))},
}


def launch_of(query, key, **keywords):
    """What the public call would launch on a GPU of 132 multiprocessors."""
    launches = []
    with (
        mock.patch.object(operator, "unsupported", lambda inputs, rotation: []),
        mock.patch.object(launch, "rotary_kernel", aot._Recorder(launch.rotary_kernel, launches)),
        mock.patch.object(launch, "_processors", lambda device: 132),
    ):
        onchip.rotary(query, key, schedule="triton", **keywords)
    return launches[0]


def dense(dtype, length=40, head_dim=128):
    return torch.zeros(2, 4, length, head_dim, dtype=dtype), torch.zeros(2, 2, length, head_dim, dtype=dtype)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("case", CASES)
def test_nothing_spills(case, target):
    made = aot.compile_launch(launch_of(*dense(torch.bfloat16), **CASES[case]), target)
    assert made.local == 0 and made.spills == 0

    # of 65536 registers, eight programs of four warps may hold 64 a thread
    assert made.registers <= 64, f"{made.registers} registers"


def loads_of(launched, target="sm_90"):
    """Widths in bits of the global loads in PTX."""
    given = aot.specialized(launched, target)
    source = aot.ASTSource(launched.kernel, given.signature, given.constants, given.attributes)
    text = aot.triton.compile(source, target=aot.TARGETS[target], options=given.options).asm["ptx"]
    found = re.findall(r"ld\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+)", text)
    return [int(count or 1) * int(bits) for count, bits in found]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rows_are_read_16_bytes_at_a_time(interleaved, dtype):
    assert max(loads_of(launch_of(*dense(DTYPES[dtype]), interleaved=interleaved))) == 128


def test_packed_rows_are_read_16_bytes_at_a_time():
    query, key = torch.zeros(12, 4, 64, dtype=torch.bfloat16), torch.zeros(12, 2, 64, dtype=torch.bfloat16)
    assert max(loads_of(launch_of(query, key, cu_seqlens_query=OFFSETS))) == 128


def test_lengths_and_offsets_do_not_specialize():
    """Neither a length nor an offset, nor how far the angles go, compiles another kernel."""
    options = [(1, 0, 1e4), (16, 1, 5e5), (40, 16, 1e6), (1000, 2**20, 1e4)]
    launches = [launch_of(*dense(torch.bfloat16, length), offset=offset, base=base) for length, offset, base in options]
    first, *others = [aot.specialized(launched, "sm_90") for launched in launches]
    assert all(other == first for other in others)
    assert aot.specialized(launch_of(*dense(torch.bfloat16), offset=OFFSETS[:2]), "sm_90") != first
