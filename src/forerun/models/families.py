"""The table of families: everything that differs between the architectures that the decoder computes.

There is one row per architecture name of config.json. A difference is a value declared here and read once by
`read_config`; no other file asks which family a model is. All rows share Llama's tensor names.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Windows(Enum):
    """Which layers see only the tokens inside a sliding window."""

    NONE = "no layer"
    ALL = "every layer, where sliding_window is set"
    LISTED = "those that layer_types lists or, without it, those from max_window_layers on"


@dataclass(frozen=True, slots=True)
class Family:
    """One family's declared facts.

    A bias is there, is not, or is there where config.json sets the key named here. `head_dim` and `window` are the
    family's values where config.json lacks the key; head_dim None divides the hidden size by the heads.
    """

    name: str
    qkv_bias: bool | str
    out_bias: bool | str
    mlp_bias: bool | str
    qk_norm: bool
    windows: Windows
    head_dim: int | None = None
    window: int | None = None


LLAMA = Family(
    name="llama",
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    mlp_bias="mlp_bias",
    qk_norm=False,
    windows=Windows.NONE,
)
MISTRAL = Family(
    name="mistral",
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    qk_norm=False,
    windows=Windows.ALL,
    window=4096,
)
QWEN2 = Family(
    name="qwen2",
    qkv_bias=True,
    out_bias=False,
    mlp_bias=False,
    qk_norm=False,
    windows=Windows.LISTED,
    window=4096,
)
QWEN3 = Family(
    name="qwen3",
    qkv_bias="attention_bias",
    out_bias="attention_bias",
    mlp_bias=False,
    qk_norm=True,
    windows=Windows.LISTED,
    head_dim=128,
    window=4096,
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
}
