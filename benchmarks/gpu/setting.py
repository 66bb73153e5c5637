"""What every part is told: where it computes, in which shape, and where its rows go; and formats of weights."""

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
    """How weights are held and multiplied; `bits` is what a weight takes, scales included.

    Kernels, passes and the family are measured in each format; `widened` is false where the family is left out.
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
    """Whether kernels can run here, if only by the interpreter."""
    return find_spec("triton") is not None


@dataclass(frozen=True, slots=True)
class Setting:
    """One part's surroundings. In a dry run shapes are tiny, and a CPU computes."""

    dry: bool
    journal: Path
    part: str = ""

    @property
    def device(self) -> torch.device:
        """The first GPU; a CPU in a dry run."""
        return torch.device("cpu") if self.dry else torch.device("cuda", 0)

    @property
    def fields(self) -> dict[str, Any]:
        """The `config.json` of the model whose passes and kernels are measured."""
        return TINY if self.dry else LLAMA_8B

    def placement(self, form: WeightFormat, products: bool = False) -> Placement:
        """Where passes of fixed shape run, with this format's products; in a dry run, which would take minutes by
        Triton's interpreter, only where these `products` are what is measured."""
        if self.dry:
            return Placement(
                torch.device("cpu"), fixed=True, one_gemm=products and has_triton() and form != FORMATS["library"]
            )
        return replace(Placement.of("cuda"), one_gemm=form.one_gemm)

    def add(self, table: str, **row: Any) -> None:
        """A row, on disk when this returns: what was measured is not lost with a machine whose time is up."""
        entry: Mapping[str, Any] = {"part": self.part, "table": table} | row
        Journal(self.journal, []).add(entry)
        print(table, json.dumps(row), flush=True)
