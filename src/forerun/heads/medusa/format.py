"""The folder of Medusa heads: config.json with `medusa_num_heads`, and the tensors by head and block (2401.10774).

Tensors in model.safetensors are named as the authors' code does: `0.0.linear.weight`, `0.0.linear.bias`, and
`0.1.weight` for the output matrix behind one block; `0.in.weight` is what hydra adds (2402.05109).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from forerun.fields import Fields
from forerun.heads.folder import HeadSigns, refuse_unread

MOST_HEADS = 16
HEADS, BLOCKS, HYDRA, ARCHITECTURE = "medusa_num_heads", "medusa_num_layers", "hydra", "MedusaModel"
SIGNS = HeadSigns(((HEADS, ""),), needed=HEADS, layout="medusa")


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """How many heads with how many blocks, whether each has an output matrix, and whether it sees guesses."""

    num_heads: int
    num_blocks: int
    hidden: int
    vocab_size: int
    own_output: bool
    hydra: bool

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's name and shape."""
        found: dict[str, tuple[int, ...]] = {}
        for head in range(self.num_heads):
            if self.hydra:
                found[f"{head}.in.weight"] = (self.hidden, (2 + head) * self.hidden)
            for block in range(self.num_blocks):
                found[f"{head}.{block}.linear.weight"] = (self.hidden, self.hidden)
                found[f"{head}.{block}.linear.bias"] = (self.hidden,)
            if self.own_output:
                found[f"{head}.{self.num_blocks}.weight"] = (self.vocab_size, self.hidden)
        return found

    @property
    def values(self) -> Mapping[str, Any]:
        """The fields of config.json, as the authors' code spells them."""
        return {
            "architectures": [ARCHITECTURE],
            HEADS: self.num_heads,
            BLOCKS: self.num_blocks,
            "hidden_size": self.hidden,
            "vocab_size": self.vocab_size,
            HYDRA: self.hydra,
        }

    @property
    def num_parameters(self) -> int:
        """The weights of all heads."""
        return sum(map(math.prod, self.shapes().values()))


def fitted_heads(fields: Fields, stored: Collection[str], hidden: int, vocab_size: int, target: str) -> MedusaConfig:
    """The heads that a folder with this config.json and these tensors holds, for the target of this name and sizes.

    Raises UnsupportedModel for those of another target, and for a tensor that none of them has.
    """
    for key, own in (("hidden_size", hidden), ("vocab_size", vocab_size)):
        if fields.values.get(key, own) != own:
            raise fields.refuse(key, f"{target} has {own}: name heads that were trained for it")
    num_blocks = fields.whole(BLOCKS, 1)
    config = MedusaConfig(
        num_heads=fields.whole(HEADS, most=MOST_HEADS),
        num_blocks=num_blocks,
        hidden=hidden,
        vocab_size=vocab_size,
        own_output=f"0.{num_blocks}.weight" in stored,
        hydra=fields.flag(HYDRA),
    )
    refuse_unread(
        fields.path.parent, stored, config.shapes(), f"{config.num_heads} heads with {num_blocks} blocks each"
    )
    return config
