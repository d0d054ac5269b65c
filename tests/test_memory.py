"""How much memory a call adds, measured as the peak of a child process that does nothing else."""

import subprocess
import sys
from pathlib import Path

import pytest

MEGABYTE = 1_000_000

PREAMBLE = """
import torch, onchip
from onchip import scores

torch.set_num_threads(1)  # another test has the other core

def memory(field):
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines[field].split()[0]) * 1024

def attend(query, key, value, bias=None):
    score = None if bias is None else scores.bias(bias)
    return onchip.attention(query, key, value, score=score, schedule="tiled")

def warm_up(bias):
    leaves = [torch.randn(1, 8, 256, 64, requires_grad=True) for _ in range(3)]
    extra = [torch.randn(1, 8, 256, 256, requires_grad=True)] if bias else []
    attend(*leaves, *extra).sum().backward()
"""

LONG = """
warm_up(bias=False)
leaves = [torch.randn(1, 8, 16384, 64, requires_grad=True) for _ in range(3)]
d_out = torch.randn(1, 8, 16384, 64)
before = memory("VmRSS")
out = attend(*leaves)
grads = torch.autograd.grad(out, leaves, d_out)
owed = sum(tensor.numel() * tensor.element_size() for tensor in (out, *grads))
print(memory("VmHWM") - before - owed)
"""

BIASED = """
warm_up(bias=True)
leaves = [torch.randn(1, 8, 2048, 64, requires_grad=True) for _ in range(3)]
bias = torch.randn(1, 8, 2048, 2048, requires_grad=True)
d_out = torch.randn(1, 8, 2048, 64)
before = memory("VmRSS")
out = attend(*leaves, bias)
grads = torch.autograd.grad(out, (*leaves, bias), d_out)
peak = memory("VmHWM")  # before the next line, whose bool of every entry is no part of the call
assert grads[3].shape == bias.shape and grads[3].any()
print(peak - before)
"""


def added(script):
    """Bytes that the script reports."""
    run = subprocess.run([sys.executable, "-c", PREAMBLE + script], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    return int(run.stdout)


needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc/self/status")


@needs_proc
@pytest.mark.slow
def test_long_sequences_add_at_most_100_megabytes():
    """Forward and backward of 16384 tokens, 8 heads; one (length, length) matrix of one head would be 1074 MB."""
    megabytes = added(LONG) / MEGABYTE
    assert 0 <= megabytes <= 100, f"{megabytes:.0f} MB beside inputs, outputs and gradients"


@needs_proc
@pytest.mark.slow
def test_a_bias_with_gradient_adds_at_most_200_megabytes():
    """The bias of (1, 8, 2048, 2048) and its gradient are 134 MB each; the gradient counts."""
    megabytes = added(BIASED) / MEGABYTE
    assert 134 <= megabytes <= 200, f"{megabytes:.0f} MB above the inputs"
