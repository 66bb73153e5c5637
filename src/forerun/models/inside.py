"""Multimodal models whose language model can be loaded; their image and audio encoders are not.

The table lists models whose language model computes text exactly as a model of its own would, with the defaults of its
configuration, which text_config may omit.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forerun.fields import Fields

FOR_ALL_PARTS = (  # keys outside of text_config that apply to it too
    *("tie_word_embeddings", "dtype", "torch_dtype"),
    *("quantization_config", "compression_config", "quantization"),
)
LLAMA_2: dict[str, object] = {  # Llama 2 7B
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}

INSIDE: dict[str, dict[str, object]] = {  # supported multimodal models, and the defaults of their text_config
    "Mistral3ForConditionalGeneration": {"model_type": "mistral", "head_dim": 128},
    "Gemma3ForConditionalGeneration": {
        "model_type": "gemma3_text",
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
    },
    "LlavaForConditionalGeneration": LLAMA_2,
    "LlavaNextForConditionalGeneration": LLAMA_2,
    "InternVLForConditionalGeneration": {"model_type": "qwen2"},
    "Cohere2VisionForConditionalGeneration": {"model_type": "cohere2"},
    "AyaVisionForConditionalGeneration": {"model_type": "cohere2"},
    "SmolVLMForConditionalGeneration": {"model_type": "llama"},
    "Idefics3ForConditionalGeneration": {"model_type": "llama"},
    "VoxtralForConditionalGeneration": {"model_type": "llama"},
}


def text_part(fields: Fields) -> Fields:
    """The configuration of the language model: text_config for a model in the table, else all of config.json."""
    usual = next((INSIDE[name] for name in fields.names("architectures") if name in INSIDE), None)
    if usual is None:
        return fields
    part = fields.inside("text_config")
    outer: dict[str, Any] = {key: value for key in FOR_ALL_PARTS if (value := fields.values.get(key)) is not None}
    return replace(part, values={**usual, **part.values, **outer})
