"""Medusa heads: small networks on a target's last hidden state, one for each token ahead (2401.10774).

Head d maps the state behind the final norm, of the last token that the target has read, to logits of the token d + 1
places behind the next one: through residual blocks, each adding the SiLU of a linear layer, and an output matrix, its
own or the target's. With `hydra` a head also sees the tokens between (2402.05109): the next one, which is final, and
the guesses before its own; their embeddings are joined with the state and mapped to its width first. Device, number
format and kernels follow the target's.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float, Int
from forerun.heads.folder import HeadFolder
from forerun.heads.medusa.format import BIAS, BLOCK, ENTRY, OUTPUT, WEIGHT, MedusaConfig
from forerun.models.decoder import Decoder
from forerun.models.layer import Linear
from forerun.models.rows import pad_rows, padded_rows


class MedusaHeads:
    """The heads, over a target's embedding and head. Rows do not affect each other."""

    def __init__(self, config: MedusaConfig, folder: HeadFolder, target: Decoder) -> None:
        shapes, device = config.shapes(), target.embedding.device

        def take(name: str) -> Tensor | None:
            return folder.checkpoint.take(name, shapes[name]).to(device) if name in shapes else None

        def layer(name: str) -> Linear:
            return folder.make(take(name + WEIGHT), take(name + BIAS))

        heads, blocks = range(config.num_heads), range(config.num_blocks)
        self.config = config
        self.embedding = target.embedding
        self.dtype = target.stream
        self.entries = [layer(ENTRY.format(head)) if config.hydra else None for head in heads]
        self.blocks = [[layer(BLOCK.format(head, block)) for block in blocks] for head in heads]
        self.outputs = [layer(OUTPUT.format(d, len(blocks))) if config.own_output else target.head for d in heads]

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
