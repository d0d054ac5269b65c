"""Exact attention for PyTorch that keeps its quadratic intermediates on the chip."""

from onchip import masks as masks
from onchip import scores as scores
from onchip._version import __version__ as __version__
from onchip.attention import Output as Output
from onchip.attention import attention as attention
from onchip.attention import attention_varlen as attention_varlen
from onchip.attention import attention_varlen_with_lse as attention_varlen_with_lse
from onchip.attention import attention_with_lse as attention_with_lse
from onchip.attention import plan as plan
from onchip.attention import plan_varlen as plan_varlen
from onchip.dispatch import Plan as Plan
from onchip.errors import Unsupported as Unsupported
from onchip.integrations.sdpa import replace_sdpa as replace_sdpa
from onchip.ops import checked as checked
from onchip.rotary import rotary as rotary
