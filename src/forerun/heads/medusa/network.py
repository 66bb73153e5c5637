"""Medusa heads: small networks on a target's last hidden state, one for each token ahead (2401.10774).

Head d maps the state behind the final norm, of the last token that the target has read, to logits of the token d + 1
places behind the next one: through residual blocks, each adding the SiLU of a linear layer, and an output matrix, its
own or the target's. With `hydra` a head also sees the tokens between (2402.05109): the next one, which is final, and
the guesses before its own; their embeddings are joined with the state and mapped to its width first.

The file decides what a folder must hold to be such heads: a config.json with `medusa_num_heads`, and model.safetensors
with tensors named as the authors' code does, by head and block: `0.0.linear.weight`, `0.0.linear.bias`, and
`0.1.weight` for the output matrix behind one block; `0.in.weight` is what hydra adds. Device, number format and kernels
follow the target's.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float, Int
from forerun.cache.plan import ModelMemory
from forerun.errors import UnsupportedModel
from forerun.fields import Fields, read_fields
from forerun.models.decoder import Decoder
from forerun.models.device_linear import device_linears
from forerun.models.layer import MakeLinear
from forerun.models.linear import Linear, make_linear, padded_rows
from forerun.models.loading import HELD_BYTES, Blueprint
from forerun.models.mlp import pad_rows
from forerun.models.native import find_kernels
from forerun.models.source import find_heads
from forerun.models.weights import Checkpoint, check_tensors, draft_checkpoint

MOST_HEADS = 16
HEADS = "medusa_num_heads"


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
    def num_parameters(self) -> int:
        """Of all heads."""
        return sum(map(math.prod, self.shapes().values()))


class MedusaHeads:
    """The heads, over a target's embedding and head. Rows do not affect each other."""

    def __init__(self, config: MedusaConfig, checkpoint: Checkpoint, make: MakeLinear, target: Decoder) -> None:
        device = target.embedding.device

        def layer(name: str, bias: bool) -> Linear:
            shapes = config.shapes()
            weight = checkpoint.take(f"{name}.weight", shapes[f"{name}.weight"]).to(device)
            return make(weight, checkpoint.take(f"{name}.bias", shapes[f"{name}.bias"]).to(device) if bias else None)

        heads, blocks = range(config.num_heads), range(config.num_blocks)
        self.config = config
        self.embedding = target.embedding
        self.dtype = torch.float32 if target.native else target.dtype
        self.entries = [layer(f"{head}.in", bias=False) if config.hydra else None for head in heads]
        self.blocks = [[layer(f"{head}.{block}.linear", bias=True) for block in blocks] for head in heads]
        self.outputs = [layer(f"{d}.{len(blocks)}", bias=False) if config.own_output else target.head for d in heads]

    def logits(
        self, head: int, states: Float[Tensor, "rows hidden"], tokens: Int[Tensor, "rows seen"]
    ) -> Float[Tensor, "rows vocab"]:
        """Of one head, in float32. `states` are behind the target's final norm; `tokens` the next one and the guesses
        before the head's own, which only hydra looks at."""
        rows, x, entry = len(states), states.to(self.dtype), self.entries[head]
        if entry is not None:
            x = torch.cat([x, self.embedding[tokens].flatten(1).to(self.dtype)], dim=1)
        x = pad_rows(x, padded_rows(rows))
        x = x if entry is None else entry(x)
        for block in self.blocks[head]:
            x = x + functional.silu(block(x))
        return self.outputs[head](x)[:rows].float()


@dataclass(frozen=True, slots=True)
class MedusaBlueprint:
    """Heads that were checked, but that are not loaded."""

    folder: Path
    config: MedusaConfig
    target: Blueprint

    @property
    def memory(self) -> ModelMemory:
        """What they take once loaded: weights, and no cache."""
        each, _ = HELD_BYTES.get(self.target.quantize, (self.target.dtype.itemsize, 0))
        return ModelMemory(int(self.config.num_parameters * each), 0, 0, self.target.config.max_positions)

    def fingerprint(self) -> str:
        """What tells the heads apart from others."""
        digest, files = sha256(), {each.file for each in Checkpoint(self.folder, self.target.dtype).stored.values()}
        for path in sorted([*files, self.folder / "config.json"]):
            digest.update(path.read_bytes())
        return digest.hexdigest()[:16]

    def load(self, target: Decoder) -> MedusaHeads:
        """The heads, for this decoder of the target."""
        placement, dtype = self.target.placement, self.target.dtype
        if placement.fixed:
            make = device_linears(placement)
        else:
            make = partial(make_linear, quantize=self.target.quantize, kernels=find_kernels(self.target.kernels, dtype))
        return MedusaHeads(self.config, Checkpoint(self.folder, dtype), make, target)


def plan_heads(model: str, target: Blueprint) -> MedusaBlueprint:
    """The heads in the folder `model`. Raises ModelError for a folder that is not there or cannot be used."""
    folder, of = find_heads(model, "medusa"), target.config
    checkpoint = draft_checkpoint(folder, target.dtype, "medusa")
    config = fitted_heads(read_fields(folder / "config.json"), checkpoint.stored, of.hidden, of.vocab_size, target.name)
    check_tensors(config.shapes().items(), checkpoint, 0)
    return MedusaBlueprint(folder, config, target)


def fitted_heads(fields: Fields, stored: Collection[str], hidden: int, vocab_size: int, target: str) -> MedusaConfig:
    """The heads that a folder with this config.json and these tensors holds, for the target of this name and sizes.

    Raises UnsupportedModel for those of another target, and for a tensor that none of them has.
    """
    for key, own in (("hidden_size", hidden), ("vocab_size", vocab_size)):
        if fields.values.get(key, own) != own:
            raise fields.refuse(key, f"{target} has {own}: name heads that were trained for it")
    num_blocks = fields.whole("medusa_num_layers", 1)
    config = MedusaConfig(
        num_heads=fields.whole(HEADS, most=MOST_HEADS),
        num_blocks=num_blocks,
        hidden=hidden,
        vocab_size=vocab_size,
        own_output=f"0.{num_blocks}.weight" in stored,
        hydra=fields.flag("hydra"),
    )
    unread = sorted(set(stored) - set(config.shapes()))
    if unread:
        raise UnsupportedModel(
            f"{fields.path.parent}: the tensor {unread[0]} is none of {config.num_heads} heads with {num_blocks} "
            "blocks each: use the config.json that came with the weights"
        )
    return config
