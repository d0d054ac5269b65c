"""The installed wheel computes attention and its gradients. Run with `python -I`, in an environment of its own."""

import sys
from importlib.metadata import version
from pathlib import Path

import torch

import onchip

assert Path(onchip.__file__).is_relative_to(sys.prefix), onchip.__file__
assert Path(onchip.__file__).with_name("py.typed").exists()
query, key, value = (torch.randn(2, 4, 33, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
out = onchip.attention(query, key, value, causal=True)
hidden = torch.ones(33, 33, dtype=torch.bool).triu(1)
weights = (query @ key.mT / 4).masked_fill(hidden, float("-inf")).softmax(-1)
torch.testing.assert_close(out, weights @ value)
grads = torch.autograd.grad(out.square().sum(), (query, key, value))
expected = torch.autograd.grad((weights @ value).square().sum(), (query, key, value))
torch.testing.assert_close(grads, expected)
print(f"the wheel of onchip {version('onchip')} works: attention and its gradients are right")
