"""Models of transformers compile to one graph with onchip inside, and no mask of pairs enters it."""

import ast

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

from transformers import StaticCache  # noqa: E402
from transformers.utils import logging  # noqa: E402

from onchip.integrations.transformers import register  # noqa: E402
from tests.integration import models  # noqa: E402

logging.set_verbosity_error()
register()


class Specs:
    """A backend that runs graphs as they are and keeps the structure of every attention in them."""

    def __init__(self):
        self.specs, self.graphs = [], 0

    def __call__(self, graph, example_inputs):
        self.graphs += 1
        for node in graph.graph.nodes:
            if "onchip" in str(node.target):
                self.specs += [value for value in node.args if isinstance(value, str)]
        return torch._dynamo.lookup_backend("aot_eager")(graph, example_inputs)


def step(model, inputs):
    model.zero_grad(set_to_none=True)
    without_cache = {} if model.config.model_type == "bert" else {"use_cache": False}
    logits = model(**inputs.call, **without_cache).logits[inputs.rows]
    logits.square().mean().backward()
    return logits.detach(), [value.grad for value in model.parameters() if value.grad is not None]


@pytest.mark.parametrize(("name", "kind"), [("llama", "left"), ("bert", "right"), ("mistral", "none")])
def test_one_graph_gives_the_same(name, kind):
    torch._dynamo.reset()
    model, inputs, backend = models.make(name), models.inputs(name, kind), Specs()
    model.set_attn_implementation("onchip")
    wanted, wanted_gradients = step(model, inputs)
    model.forward = torch.compile(model.forward, fullgraph=True, backend=backend)
    got, gradients = step(model, inputs)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
    for one, other in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
    assert backend.graphs == 1 and len(backend.specs) == 2
    for spec in backend.specs:
        ast.literal_eval(spec)
        assert "'tensor'" not in spec
        # Without a mask of tokens a compiler cannot know whether positions start again: documents say so on the device.
        assert ("'documents'" in spec) is (kind == "none")


def test_lengths_may_vary_without_another_graph():
    torch._dynamo.reset()
    model, backend = models.make("llama").requires_grad_(False), Specs()
    model.model.layers = model.model.layers[:1]
    model.set_attn_implementation("onchip")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    graphs = []
    for length in (5, 8, 9):
        ids = models.inputs("llama", "none").call["input_ids"][:, :length]
        mask = models.padding("left", length)
        wanted = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
        got = compiled(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
        graphs.append(backend.graphs)
    assert graphs[0] == graphs[-1]


def test_a_step_of_a_static_cache():
    """One graph decodes: the number of tokens stays on the device."""
    torch._dynamo.reset()
    model, backend = models.make("llama"), Specs()
    model.set_attn_implementation("onchip")
    ids, mask = models.inputs("llama", "left").call["input_ids"], models.padding("left")
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        wanted = model(ids, attention_mask=mask, position_ids=positions).logits
        cache = StaticCache(config=model.config, max_cache_len=16)
        model(ids[:, :7], attention_mask=mask[:, :7], position_ids=positions[:, :7], past_key_values=cache)
        compiled = torch.compile(model, fullgraph=True, backend=backend)
        padded = torch.nn.functional.pad(mask, (0, 6), value=0)
        for place in (7, 8, 9):
            seen = padded * (torch.arange(16) <= place)
            one = slice(place, place + 1)
            call = {"attention_mask": seen, "position_ids": positions[:, one], "past_key_values": cache}
            got = compiled(ids[:, one], **call).logits
            torch.testing.assert_close(got, wanted[:, one], rtol=0, atol=1e-10)
    assert backend.graphs == 1
