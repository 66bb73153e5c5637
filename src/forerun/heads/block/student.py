"""Training a block drafter, which predicts an entire block in one pass, from sampled roots of a text.

A block reads the target's states up to the position before its root, and the root's embedding. In every step as many
roots are sampled that each token of an answer is predicted about once. The Markov head, or the selector, is trained
with the text's tokens in place of draft tokens (teacher forcing): accepted draft tokens equal the text, and tokens
after a rejected one never matter. The confidence head learns the overlap of p and q at each position. The result is a
folder for `--draft block:DIR`, in the layout of `format.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float, Int
from forerun.errors import InvalidRequest
from forerun.fields import Fields
from forerun.heads.block import format as names
from forerun.heads.block.format import BlockConfig, BlockTensors, layer_ids
from forerun.heads.fresh import TargetTables, drawn_weights, layer_values
from forerun.heads.sizes import MOST_DEPTH, StudentSizes, check_most
from forerun.heads.student import Predictions, TableStudent, TextBatch
from forerun.heads.trained_layer import TrainedLayer
from forerun.models.loading import Blueprint
from forerun.models.rope import RopeTables, rope_tables
from forerun.models.rows import rms_norm
from forerun.sampling.winners import largest

LAYERS, BLOCK_SIZE = 2, 8  # defaults
MOST_RANK, RANK_SHARE = 256, 4  # default rank of a Markov head: the width over RANK_SHARE, at most MOST_RANK
NUM_TAPS = 5  # by default, at most
FADES = 4.0  # depth at which the loss weight is 1/e


@dataclass(frozen=True, kw_only=True)
class BlockStudent(TableStudent):
    """A block drafter in training."""

    kind: ClassVar[str] = "block"
    config: BlockConfig
    rope: RopeTables = field(init=False)

    def __post_init__(self) -> None:
        layers = self.config.layers
        tables = rope_tables(replace(layers, max_positions=layers.max_positions + names.MOST_BLOCK))
        object.__setattr__(self, "rope", tables.to(self.tables.embedding.device))

    @classmethod
    def fresh(cls, target: Blueprint, sizes: StudentSizes, seed: int) -> BlockStudent:
        """Untrained layers with the target's shapes, and heads that add nothing yet; a head of rank 0 is left out.

        Loss weights decrease exponentially with depth, as in both papers. Raises InvalidRequest for invalid sizes.
        """
        of_heads = ("markov_rank", "selector_rank", "confidence")
        sizes.only(cls.kind, "layers", "mlp", "block", *of_heads, "taps", "portable", "draft_vocab")
        values = values_of(target, sizes)
        tensors = BlockTensors.of(Fields(Path("the drafter's config.json"), values), (), target.config, target.name)
        weights, tables = drawn_weights(tensors.shapes(), seed), TargetTables.of(target)
        config, num_taps = tensors.config, len(tensors.config.taps)
        weights[names.MAP] = torch.cat([torch.eye(target.config.hidden) / num_taps] * num_taps, dim=1)
        for name in {names.MARKOV_W2, names.SUCCESSORS, names.CONFIDENCE, names.CONFIDENCE_BIAS} & set(weights):
            weights[name].zero_()
        weights[names.NORM] = tables.norm
        if names.MASK_EMBEDDING in weights:
            weights[names.MASK_EMBEDDING] = tables.embedding.mean(0)
        return cls.untrained(
            target,
            values,
            weights,
            tables=tables,
            config=config,
            taps=config.taps,
            depth_weights=tuple(math.exp(-depth / FADES) for depth in range(config.most_depth)),
            most_depth=config.most_depth,
        )

    def predict(self, batch: TextBatch, generator: torch.Generator | None) -> Predictions:
        """The logits and confidences of all draft tokens of the blocks from these roots."""
        c = self.config
        roots = batch.roots if generator is None else batch.some_roots(c.most_depth, generator)
        most = -(-batch.places.shape[1] // c.most_depth)  # roots per pass, as in a training step, to bound memory
        states = torch.cat([self.states(batch, some) for some in roots.split(most, dim=1)], dim=1)
        padded = functional.pad(batch.tokens, (0, c.block_size))
        rows = torch.arange(len(roots), device=roots.device)[:, None]
        logits, confidence = [], []
        for depth in range(c.most_depth):
            at_depth, before = states[:, :, c.first + depth], padded[rows, roots + depth]
            logits.append(self.logits(at_depth, before, whole=generator is not None))
            if c.confidence:
                confidence.append(self.confidence(at_depth, before))
        return Predictions(logits, roots, confidence=confidence)

    def logits(
        self, states: Float[Tensor, "batch roots hidden"], before: Int[Tensor, "batch roots"], whole: bool
    ) -> Float[Tensor, "batch roots vocab"]:
        """The logits at a position, after the tokens `before`. `whole`: a selector scores all tokens, for training."""
        w, base = self.weights, self.tables.head(states)
        if names.MARKOV_W1 in w:
            return base + functional.linear(w[names.MARKOV_W1][before], w[names.MARKOV_W2])
        if names.SELECTOR not in w:
            return base
        after = w[names.SUCCESSORS] if self.vocabulary is None else w[names.SUCCESSORS][self.vocabulary]
        pairs = functional.linear(w[names.PREDECESSORS][before] * functional.linear(states, w[names.SELECTOR]), after)
        if whole:
            return base + pairs
        flat = base.flatten(0, 1)
        candidates = largest(flat, self.config.top_k)
        hidden = torch.full_like(flat, -math.inf).scatter_(1, candidates, 0.0)
        return base + pairs + hidden.view_as(base)

    def confidence(
        self, states: Float[Tensor, "batch roots hidden"], before: Int[Tensor, "batch roots"]
    ) -> Float[Tensor, "batch roots"]:
        """The logit of the acceptance probability of the draft token at a position."""
        w = self.weights
        read = [states, w[names.MARKOV_W1][before]] if self.config.confidence_with_markov else [states]
        return functional.linear(torch.cat(read, dim=-1), w[names.CONFIDENCE], w[names.CONFIDENCE_BIAS])[..., 0]

    def states(self, batch: TextBatch, roots: Int[Tensor, "batch roots"]) -> Float[Tensor, "batch roots places hidden"]:
        """The inputs of the heads at every position of the blocks from these roots.

        A block sees the context before its root, and its own positions.
        """
        c, num_places = self.config, self.config.num_places(self.config.most_depth)
        context = self.normed(functional.linear(batch.taps.flatten(2).float(), self.weights[names.MAP]), names.MAP_NORM)
        rows, text = torch.arange(len(roots), device=roots.device)[:, None], batch.places
        embedding = self.weights[names.MASK_EMBEDDING] if c.mask_id is None else self.tables.embedding[c.mask_id]
        masked = embedding.expand(*roots.shape, num_places - 1, -1)
        x = torch.cat([self.tables.embedding[batch.tokens[rows, roots]][:, :, None], masked], dim=2).flatten(1, 2)
        positions = (roots[:, :, None] + torch.arange(num_places, device=x.device)).flatten(1)
        root = roots.repeat_interleave(num_places, dim=1)[:, :, None]  # of each position
        in_block = root == root.mT
        if c.causal:
            in_block &= positions[:, None] <= positions[:, :, None]
        mask = torch.cat([text[:, None] < root, in_block], dim=2)[:, None]
        for index in range(c.layers.layers):
            layer = TrainedLayer(c.layers, self.weights, names.LAYER.format(index).removesuffix("."), self.rope)
            x = layer(x, positions, mask, [layer.keys_and_values(context, text)])
        states: Tensor = self.normed(x, names.NORM).unflatten(1, (-1, num_places))
        return states

    def normed(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, self.weights[name], self.config.layers.norm_eps)


def values_of(target: Blueprint, sizes: StudentSizes) -> dict[str, Any]:
    """The fields of config.json for these sizes.

    A block is causal, so that a shallower draft takes a shorter pass, and has its own mask embedding. A portable block
    is not causal, and its mask token is the token that starts or ends texts.
    """
    target_config, block = target.config, sizes.block or BLOCK_SIZE
    mask_id = next(iter(target_config.eos_ids), 0) if target_config.bos_id is None else target_config.bos_id
    check_most("block", block, MOST_DEPTH)
    check_most("draft_vocab", sizes.draft_vocab or 1, target_config.vocab_size)
    usual = 0 if sizes.selector_rank else min(MOST_RANK, target_config.hidden // RANK_SHARE)
    rank = usual if sizes.markov_rank is None else sizes.markov_rank
    if sizes.markov_rank and sizes.selector_rank:
        raise InvalidRequest("selector_rank", f"{sizes.selector_rank} excludes a --markov-rank: leave out one of them.")
    confident = not (sizes.portable and sizes.selector_rank) if sizes.confidence is None else sizes.confidence
    if sizes.portable and sizes.selector_rank and confident:
        raise InvalidRequest("confidence", "speculators has no confidence head next to a selector: leave it out.")
    taps = sizes.tapped(target_config.layers)
    layers = usual_layers(target_config.layers) if taps is None else layer_ids(taps, target_config.layers)
    return {
        "architectures": [names.ARCHITECTURE],
        "model_type": "qwen3",
        names.NESTED: {
            names.TAP_IDS: layers,
            "block_size": block,
            "causal": not sizes.portable,
            "sample_from_anchor": True,
            **({names.MASK_ID: mask_id} if sizes.portable else {}),
        },
        "markov_rank": rank,
        "selector_rank": sizes.selector_rank or 0,
        "enable_confidence_head": confident,
        "confidence_head_with_markov": confident and rank > 0,
        "vocab_size": target_config.vocab_size,
        **({} if sizes.draft_vocab is None else {"draft_vocab_size": sizes.draft_vocab}),
        **layer_values(target, sizes.layers or LAYERS, sizes.mlp),
    }


def usual_layers(num_layers: int) -> list[int]:
    """The default taps, as the authors choose: evenly spaced from the second layer to the last but two."""
    first, last = min(1, num_layers - 1), max(0, num_layers - 3)
    return sorted({round(first + i * (last - first) / (NUM_TAPS - 1)) for i in range(NUM_TAPS)})
