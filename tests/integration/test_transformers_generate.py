"""Generation on onchip gives the same tokens as on the model's own attention, with every kind of cache."""

import inspect

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

from transformers.masking_utils import create_chunked_causal_mask  # noqa: E402
from transformers.utils import logging  # noqa: E402

from onchip.integrations.transformers import register  # noqa: E402
from tests.integration import models, reference  # noqa: E402

logging.set_verbosity_error()
register()
reference.register()

NEW = 6
CHUNKED = inspect.signature(create_chunked_causal_mask).parameters


def generate(model, implementation, call, **options):
    models.use(model, implementation)
    return model.generate(**call, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, **options)


def prompt(name, kind, dtype):
    if name == "whisper":
        return {"input_features": models.inputs(name, "none", dtype).call["input_features"]}
    return {"input_ids": models.inputs(name, kind, dtype).call["input_ids"], "attention_mask": models.padding(kind)}


@pytest.mark.parametrize("name", (*models.DECODERS, "t5", "whisper"))
@pytest.mark.parametrize(("dtype", "before"), [(torch.float32, "eager"), (torch.float64, reference.NAME)])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("beams", [1, 2])
def test_tokens(name, dtype, before, cache, beams):
    """Windows are shorter than the prompt, so that caches of windowed layers roll from the start."""
    if (name, cache) == ("llama4", "static") and "block_sequence_ids" not in CHUNKED:
        pytest.skip("this transformers cannot make the masks of chunked layers for a static cache")
    model = models.make(name, dtype)
    options = {"num_beams": beams, **({"cache_implementation": "static"} if cache == "static" else {})}
    for kind in ("none", "left"):
        call = prompt(name, kind, dtype)
        wanted = generate(model, before, call, **options)
        assert torch.equal(generate(model, "onchip", call, **options), wanted), kind


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_a_step_of_several_tokens(name):
    """A prompt that comes in two pieces, the second on top of a cache."""
    model, ids = models.make(name), models.inputs(name, "none").call["input_ids"]
    model.set_attn_implementation("onchip")
    whole = model(ids).logits
    first = model(ids[:, :6], use_cache=True)
    second = model(ids[:, 6:], past_key_values=first.past_key_values)
    torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), whole, rtol=0, atol=1e-10)
