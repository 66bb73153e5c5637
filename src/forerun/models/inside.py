"""Models that have a language model as a part, beside parts that read images or sound, which are left out.

The table names those whose language model computes with a text what it would compute by itself, and the values of its
configuration where text_config, which says only what differs, does not have them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forerun.fields import Fields

FOR_ALL_PARTS = (  # where they stand beside text_config
    *("tie_word_embeddings", "dtype", "torch_dtype"),
    *("quantization_config", "compression_config", "quantization"),
)
LLAMA_2: dict[str, object] = {  # of 7 billion parameters
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}

INSIDE: dict[str, dict[str, object]] = {  # models whose text_config is a language model, and its usual values
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
    """The fields of the language model: of text_config in a model of the table, else all of config.json's."""
    usual = next((INSIDE[name] for name in fields.names("architectures") if name in INSIDE), None)
    if usual is None:
        return fields
    part = fields.inside("text_config")
    outer: dict[str, Any] = {key: value for key in FOR_ALL_PARTS if (value := fields.values.get(key)) is not None}
    return replace(part, values={**usual, **part.values, **outer})
