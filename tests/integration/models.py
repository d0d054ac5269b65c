"""Small models of transformers with random weights, and inputs for them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from torch import Tensor

VOCABULARY = 64
LENGTH = 10
BATCH = 2

_DECODER: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_WINDOWED = {**_DECODER, "sliding_window": 4}
_MIXED = {**_WINDOWED, "layer_types": ["sliding_attention", "full_attention"]}
_ENCODER: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
)
_WHISPER: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    d_model=32,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=32,
    decoder_ffn_dim=32,
    num_mel_bins=8,
    max_source_positions=16,
    max_target_positions=32,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
    suppress_tokens=None,
    begin_suppress_tokens=None,
)

MAKERS = {
    "llama": lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**_DECODER)),
    "mistral": lambda: tf.MistralForCausalLM(tf.MistralConfig(**_WINDOWED)),
    "gemma2": lambda: tf.Gemma2ForCausalLM(
        tf.Gemma2Config(**_MIXED, query_pre_attn_scalar=8, attn_logit_softcapping=2.0)
    ),
    "gemma3": lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**_MIXED, query_pre_attn_scalar=8)),
    "gpt_oss": lambda: tf.GptOssForCausalLM(tf.GptOssConfig(**_MIXED, num_local_experts=2, num_experts_per_tok=2)),
    "qwen3": lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**_DECODER)),
    "llama4": lambda: tf.Llama4ForCausalLM(
        tf.Llama4TextConfig(
            **_DECODER,
            layer_types=["chunked_attention", "full_attention"],
            attention_chunk_size=3,
            intermediate_size_mlp=48,
            num_local_experts=2,
            interleave_moe_layer_step=2,
        )
    ),
    "bert": lambda: tf.BertForMaskedLM(tf.BertConfig(**_ENCODER)),
    "modernbert": lambda: tf.ModernBertForMaskedLM(
        tf.ModernBertConfig(
            **_ENCODER,
            local_attention=6,
            layer_types=["sliding_attention", "full_attention"],
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            cls_token_id=1,
            sep_token_id=2,
        )
    ),
    "t5": lambda: tf.T5ForConditionalGeneration(
        tf.T5Config(
            vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
    ),
    "whisper": lambda: tf.WhisperForConditionalGeneration(tf.WhisperConfig(**_WHISPER)),
    "vit": lambda: tf.ViTForImageClassification(
        tf.ViTConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=16,
            patch_size=4,
        )
    ),
}
TEXT = ("llama", "mistral", "gemma2", "gemma3", "gpt_oss", "qwen3", "llama4", "bert", "modernbert", "t5")
DECODERS = ("llama", "mistral", "gemma2", "gemma3", "gpt_oss", "qwen3", "llama4")
PADDINGS = ("none", "right", "left")
_STANDARD_DEVIATION = 0.2


def make(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """A model in evaluation mode without dropout, with weights that are large enough for attention to matter."""
    torch.manual_seed(0)
    model = MAKERS[name]()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() > 1 or parameter_name.endswith("sinks"):
                parameter.normal_(0.0, _STANDARD_DEVIATION)
    if hasattr(model, "set_experts_implementation") and name == "gpt_oss":
        model.set_experts_implementation("eager")  # the grouped product has no float64
    return model.to(dtype).eval()


def use(model: Any, implementation: str) -> None:
    """Let the model attend by a registered implementation."""
    model.set_attn_implementation(implementation)
    # In some versions of transformers T5's stacks have configurations that this does not reach.
    for name in ("encoder", "decoder"):
        stack = getattr(model, name, None)
        if isinstance(stack, tf.PreTrainedModel):
            stack.set_attn_implementation(implementation)


@dataclass(frozen=True)
class Inputs:
    """Keywords of a model's call, and which rows of its logits exist (bool)."""

    call: dict[str, Tensor]
    rows: Tensor


def padding(kind: str, length: int = LENGTH) -> Tensor:
    """(batch, length) of int64: 0 where the first sequence is padded."""
    kept = torch.ones(BATCH, length, dtype=torch.int64)
    if kind == "right":
        kept[0, -3:] = 0
    if kind == "left":
        kept[0, :3] = 0
    return kept


def inputs(name: str, kind: str, dtype: torch.dtype = torch.float64) -> Inputs:
    """Drawn inputs, padded on one side or not."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
    everything = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    if name == "vit":
        return Inputs({"pixel_values": torch.randn(BATCH, 3, 16, 16, generator=generator).to(dtype)}, everything[:, 0])
    if name == "whisper":
        features = torch.randn(BATCH, 8, 32, generator=generator).to(dtype)
        return Inputs({"input_features": features, "decoder_input_ids": ids}, everything)
    kept = padding(kind)
    call = {"input_ids": ids} if kind == "none" else {"input_ids": ids, "attention_mask": kept}
    if name == "t5":
        return Inputs({**call, "decoder_input_ids": ids.flip(-1)}, everything)
    return Inputs(call, kept.bool())
