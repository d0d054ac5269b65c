"""The kernel that torch ships for the CPU, also while another implementation stands over its operator.

`onchip.integrations.flash` puts onchip in the operator's place; by way of the operator this schedule would call itself.
"""

from __future__ import annotations

from functools import partial

import torch

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_NAME = "aten::_scaled_dot_product_flash_attention_for_cpu"

flash = partial(torch.library.get_kernel(_NAME, "CPU").call_boxed, _CPU)
"""(query, key, value, dropout_p, causal, attn_mask=, scale=) -> (out, lse), as the operator."""

flash_backward = partial(torch.library.get_kernel(_NAME + "_backward", "CPU").call_boxed, _CPU)
"""(grad_out, query, key, value, out, lse, dropout_p, causal, attn_mask=, scale=) -> gradients of the three inputs."""
