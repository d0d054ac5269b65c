"""Models of transformers on a CUDA device: the same logits, gradients and tokens as on their own attention."""

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

from transformers.utils import logging  # noqa: E402

from onchip.integrations.transformers import register  # noqa: E402
from tests.integration import models  # noqa: E402

logging.set_verbosity_error()
register()

pytestmark = pytest.mark.gpu

RELATIVE = 2e-4
"""Of the largest value: products of onchip are three of TF32, those of eager attention float32."""


def on_device(inputs):
    return {name: tensor.cuda() for name, tensor in inputs.call.items()}, inputs.rows.cuda()


def logits_and_gradients(model, implementation, call, rows):
    models.use(model, implementation)
    model.zero_grad(set_to_none=True)
    logits = model(**call).logits[rows]
    logits.square().mean().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", models.MAKERS)
def test_logits_and_gradients_are_those_of_eager(name):
    model = models.make(name, torch.float32).cuda()
    for kind in models.PADDINGS if name in models.TEXT else ("none",):
        call, rows = on_device(models.inputs(name, kind, torch.float32))
        wanted, wanted_gradients = logits_and_gradients(model, "eager", call, rows)
        logits, gradients = logits_and_gradients(model, "onchip", call, rows)
        assert (logits - wanted).abs().max() <= RELATIVE * wanted.abs().max(), kind
        assert gradients.keys() == wanted_gradients.keys()
        largest = max(gradient.abs().max() for gradient in wanted_gradients.values())
        for parameter, gradient in wanted_gradients.items():
            assert (gradients[parameter] - gradient).abs().max() <= RELATIVE * largest, (kind, parameter)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt_oss", "t5"])
@pytest.mark.parametrize("cache", [None, "static"], ids=["dynamic", "static"])
def test_tokens(name, cache):
    model = models.make(name, torch.float32).cuda()
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    for kind in ("none", "left"):
        ids, kept = models.inputs(name, kind).call["input_ids"].cuda(), models.padding(kind).cuda()
        found = []
        for implementation in ("eager", "onchip"):
            models.use(model, implementation)
            found.append(model.generate(ids, attention_mask=kept, cache_implementation=cache, **options))
        assert torch.equal(*found), kind


def test_nothing_waits_for_the_device():
    """The masks of a padded batch are made and used without a look at their values."""
    model = models.make("llama", torch.bfloat16).cuda()
    models.use(model, "onchip")
    call, _ = on_device(models.inputs("llama", "left"))
    model(**call, use_cache=False)
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(**call, use_cache=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
