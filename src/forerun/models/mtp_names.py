"""The tensor names of MTP modules (multi-token prediction) in checkpoints, one MtpNaming for each layout.

Each declares the names, the order in which embedding and state are concatenated, and whether modules are numbered after
the target's layers. `weights.py` uses the table too, so that modules are no unknown tensors of the target;
`heads/mtp/drafter.py` computes modules.

Sources: the modeling code of DeepSeek-V3 (2412.19437), whose layout GLM-4.5 shares, of MiMo (2505.07608), whose
projection reads the state first, and of Qwen3-Next, whose layout Qwen3.5 and Mellum share; and the readers of
transformers 5.23 and vLLM. In all of them the first module reads the target's state after its final norm, and further
modules read the previous module's output after that module's norm.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

PARTS = ("projection", "embedding_norm", "state_norm", "norm", "layer")  # the parts of every module


@dataclass(frozen=True, slots=True)
class MtpNaming:
    """One layout of names; `{}` stands for the number of a module.

    All names of modules begin with `prefix`, and those of a module's decoder layer with `layer`. `state_first`: the
    projection reads the state before the embedding. `behind_layers`: module numbers continue those of the target's
    layers. `head` and `embedding` are the module's own, usually copies of the target's; None: it has none.
    """

    name: str
    prefix: str
    layer: str
    embedding_norm: str
    state_norm: str
    projection: str
    norm: str
    head: str | None = None
    embedding: str | None = None
    state_first: bool = False
    behind_layers: bool = False

    def number(self, module: int, num_layers: int) -> int:
        """The number of this module in the checkpoint of a target with `num_layers` layers."""
        return module + num_layers if self.behind_layers else module

    def names_in(self, other: MtpNaming) -> dict[str, str]:
        """The names of the first module's parts, mapped to those in the other layout."""
        return {getattr(self, part).format(0): getattr(other, part).format(0) for part in PARTS}

    def owned(self, stored: Collection[str], num_layers: int) -> list[str]:
        """The stored tensors that belong to modules."""
        if not self.behind_layers:
            return [name for name in stored if name.startswith(self.prefix)]
        # Layers after the target's may be something else; those with a projection are modules.
        numbers = (
            (name, name.removeprefix(self.prefix).partition(".")[0]) for name in stored if name.startswith(self.prefix)
        )
        return [
            name
            for name, number in numbers
            if number.isdecimal() and int(number[:9]) >= num_layers and self.projection.format(number) in stored
        ]

    def count(self, stored: Collection[str], num_layers: int) -> int:
        count = 0
        while any(name.startswith(self.layer.format(self.number(count, num_layers))) for name in stored):
            count += 1
        return count


DEEPSEEK = MtpNaming(
    name="DeepSeek-V3 and GLM-4.5",
    prefix="model.layers.",
    layer="model.layers.{}.",
    embedding_norm="model.layers.{}.enorm.weight",
    state_norm="model.layers.{}.hnorm.weight",
    projection="model.layers.{}.eh_proj.weight",
    norm="model.layers.{}.shared_head.norm.weight",
    head="model.layers.{}.shared_head.head.weight",
    embedding="model.layers.{}.embed_tokens.weight",
    behind_layers=True,
)
MIMO = MtpNaming(
    name="MiMo",
    prefix="model.mtp_layers.",
    layer="model.mtp_layers.{}.",
    embedding_norm="model.mtp_layers.{}.token_layernorm.weight",
    state_norm="model.mtp_layers.{}.hidden_layernorm.weight",
    projection="model.mtp_layers.{}.input_proj.weight",
    norm="model.mtp_layers.{}.final_layernorm.weight",
    state_first=True,
)
QWEN = MtpNaming(
    name="Qwen3-Next and Qwen3.5",
    prefix="mtp.",
    layer="mtp.layers.{}.",
    embedding_norm="mtp.pre_fc_norm_embedding.weight",
    state_norm="mtp.pre_fc_norm_hidden.weight",
    projection="mtp.fc.weight",
    norm="mtp.norm.weight",
)
NAMINGS = (DEEPSEEK, MIMO, QWEN)
SEPARATE: dict[str, Any] = {part: getattr(MIMO, part).removeprefix("model.") for part in ("prefix", *PARTS)}
PACKAGE = replace(MIMO, name="speculators", state_first=False, **SEPARATE)  # a module in its own folder


@dataclass(frozen=True, slots=True)
class StoredModules:
    """The names of a checkpoint's module tensors, and their layout."""

    naming: MtpNaming
    tensors: tuple[str, ...]


def find_modules(stored: Collection[str], num_layers: int) -> StoredModules | None:
    """The MTP modules among these tensors of a checkpoint whose target has `num_layers` layers; None without any."""
    for naming in NAMINGS:
        owned = naming.owned(stored, num_layers)
        if owned:
            return StoredModules(naming, tuple(owned))
    return None
