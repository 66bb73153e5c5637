"""The settings that every part receives (device, shape of the model, journal), and the formats of weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from forerun.config import Quantization
from forerun.device import Placement
from forerun.store import Journal

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256, "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0, "max_position_embeddings": 8448, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "eos_token_id": 2,
}  # fmt: skip
TINY = LLAMA_8B | {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 300, "max_position_embeddings": 768,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How weights are stored and multiplied; `bits` is the size of a weight, scales included.

    Kernels and passes are measured in each format, the bundled family in those with `widened`.
    """

    name: str
    one_gemm: bool = False
    quantize: Quantization | None = None
    bits: float = 16.0
    widened: bool = True


FORMATS = {
    each.name: each
    for each in (
        WeightFormat("library"),
        WeightFormat("one_gemm", one_gemm=True),
        WeightFormat("int8", quantize="int8", bits=8),
        WeightFormat("fp8", quantize="fp8", bits=8, widened=False),
        WeightFormat("int4", quantize="int4", bits=4.5),
    )
}


def has_triton() -> bool:
    """Whether kernels can run here, on a GPU or in Triton's interpreter."""
    return find_spec("triton") is not None


@dataclass(frozen=True, slots=True)
class Setting:
    """The device, the model's shape and the journal of one part. A dry run uses tiny shapes on a CPU."""

    dry: bool
    journal: Path
    part: str = ""

    @property
    def device(self) -> torch.device:
        """The first GPU; the CPU in a dry run."""
        return torch.device("cpu") if self.dry else torch.device("cuda", 0)

    @property
    def fields(self) -> dict[str, Any]:
        """The `config.json` of the model with whose shapes passes and kernels are measured."""
        return TINY if self.dry else LLAMA_8B

    def placement(self, form: WeightFormat, products: bool = False) -> Placement:
        """The placement of passes of fixed shape, with this format's matrix products.

        In a dry run Triton's interpreter computes the products, which would take minutes for entire passes: then the
        format's products are used only if `products` is set, because they are what is measured.
        """
        if self.dry:
            return Placement(
                torch.device("cpu"), fixed=True, one_gemm=products and has_triton() and form != FORMATS["library"]
            )
        return replace(Placement.of("cuda"), one_gemm=form.one_gemm)

    def add(self, table: str, **row: Any) -> None:
        """Add a row to the journal; it is on disk when this returns, so it survives the end of the machine's time."""
        entry: Mapping[str, Any] = {"part": self.part, "table": table} | row
        Journal(self.journal, []).add(entry)
        print(table, json.dumps(row), flush=True)
