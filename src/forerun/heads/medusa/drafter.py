"""Medusa (2401.10774): heads on the target's last hidden state, each of which predicts one token further ahead.

The heads read no text and have no cache: a sequence needs only the state at the last token that the target has read. So
a draft costs a few matrix products, whatever the length of the text.

Head d maps that state, after the final norm, to the logits of the token d + 1 positions after the root: through
residual blocks, each adding the SiLU of a linear layer, and an output matrix, its own or the target's. With `hydra`
(2402.05109) a head also reads the root and the draft tokens before its own: their embeddings are concatenated with the
state and mapped to its width first. The predictions of Medusa's heads are independent; in Hydra each draft token
depends on those before it. Device, dtype and kernels are the target's.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float, Int
from forerun.cache.plan import ModelMemory
from forerun.draft.base import NO_DRAFT, Budget, Committed, Draft, Outlook
from forerun.draft.model.grower import grow_by_heads
from forerun.heads.blueprint import FolderBlueprint, HeadParts, WideDrafter
from forerun.heads.folder import HeadFolder
from forerun.heads.medusa import format as names
from forerun.heads.medusa.format import MedusaConfig
from forerun.heads.medusa.student import make_medusa
from forerun.models.chains import Chains, ChainStart, HeadInputs, ParallelHeads, SameIds
from forerun.models.decoder import Decoder
from forerun.models.layer import Linear
from forerun.models.loading import QUANTIZED_BYTES
from forerun.models.rows import pad_rows, padded_rows
from forerun.models.runner import Runner
from forerun.models.widen import Plan
from forerun.sampling.draws import Draws
from forerun.tree import DraftTree

MOST_SHARED = 8  # average tokens per sequence in a round up to which a saved state is a view of the round's states


class MedusaHeads:
    """The Medusa heads of a target, with the target's embedding and head. Rows do not affect each other."""

    def __init__(self, config: MedusaConfig, folder: HeadFolder, target: Decoder) -> None:
        shapes = config.shapes()

        def layer(name: str) -> Linear:
            bias = name + names.BIAS
            return folder.make(folder.take(name + names.WEIGHT), folder.take(bias) if bias in shapes else None)

        heads, blocks = range(config.num_heads), range(config.num_blocks)
        self.config = config
        self.embedding = target.embedding
        self.dtype = target.stream_dtype
        self.entries = [layer(names.ENTRY.format(head)) if config.hydra else None for head in heads]
        self.blocks = [[layer(names.BLOCK.format(head, block)) for block in blocks] for head in heads]
        self.outputs = [
            layer(names.OUTPUT.format(d, len(blocks))) if config.own_output else target.shared_head() for d in heads
        ]

    def logits(
        self, head: int, states: Float[Tensor, "rows hidden"], tokens: Int[Tensor, "rows seen"]
    ) -> Float[Tensor, "rows vocab"]:
        """The logits of a head in float32, from states after the target's final norm.

        `tokens`, which only Hydra reads, are the root and the draft tokens before the head's own.
        """
        rows, x, entry = len(states), states.to(self.dtype), self.entries[head]
        if entry is not None:
            x = torch.cat([x, self.embedding[tokens].flatten(1).to(self.dtype)], dim=1)
        x = pad_rows(x, padded_rows(rows))
        x = x if entry is None else entry(x)
        for block in self.blocks[head]:
            x = x + functional.silu(block(x))
        return self.outputs[head](x)[:rows].float()


class MedusaDrafter:
    """Drafts with `heads` on the states of `target`, at most as deep as there are heads."""

    names: tuple[str, ...] = ("medusa",)
    taps: tuple[int, ...] = (-1,)

    def __init__(self, heads: MedusaHeads, target: Runner) -> None:
        self.heads = heads
        self.target = target
        self.ids = SameIds(target.vocab_size, target.vocab_size)
        self.states: dict[int, Float[Tensor, " hidden"]] = {}

    def observe(self, committed: Committed) -> None:
        """Save the state at the last token. Raises WrongTarget for text without states, unless it is adopted."""
        if committed.adopted:
            return
        copied = len(committed.tokens) > MOST_SHARED * len(committed.seq_ids)  # a view would keep all states in memory
        for i, (seq_id, tokens, _) in enumerate(committed.rows()):
            if tokens:
                state = committed.required_features("medusa")[committed.offsets[i + 1] - 1, 0]
                self.states[seq_id] = state.clone() if copied else state

    def adoptable(self, text: Sequence[int], most: int, salt: Hashable) -> int:
        """All tokens: only the state at the last token before a draft is needed, which the target reads in any case."""
        return most

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        """A tree for each sequence, grown from the heads' logits; the root alone if there is no state."""
        assert tail is None, "text that the target has not read has no states"
        each = zip(draws.seq_ids, budgets, strict=True)
        granted = {seq_id: b for seq_id, budget in each if (b := self.granted(seq_id, budget)).depth}
        if not granted:
            return Draft(DraftTree.of_roots([row.tokens[-1] for row in draws.rows]))

        def logits(inputs: HeadInputs, path: Tensor) -> Tensor:
            assert inputs.first is not None, "states are given"
            return self.heads.logits(path.shape[1] - 1, inputs.first, path)

        def inputs(seq_ids: Sequence[int], _level: int) -> HeadInputs:
            return HeadInputs(torch.stack([self.states[seq_id] for seq_id in seq_ids]))

        def draw(starts: Sequence[ChainStart]) -> Chains | None:
            heads = ParallelHeads(logits, [self.states[start.seq_id] for start in starts])
            return self.target.draw_chains(draws, starts, None, self.ids, heads=heads)

        return grow_by_heads(draws, granted, logits, inputs, self.target.draws_unseen, draw)

    def granted(self, seq_id: int, budget: Budget) -> Budget:
        """The budget, cut to the number of heads."""
        if seq_id not in self.states or budget.depth == 0:
            return NO_DRAFT
        depth = min(budget.depth, self.heads.config.num_heads)
        return budget if depth == budget.depth else replace(budget, depth=depth)

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        """A depth of the number of heads; nothing is ever unread."""
        limit = [self.heads.config.num_heads if seq_id in self.states else 0 for seq_id in seq_ids]
        return Outlook([0] * len(seq_ids), limit, ends_early=not self.target.draws_unseen)

    def forget(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self.states.pop(seq_id, None)


class MedusaBlueprint(FolderBlueprint):
    """`medusa:DIR`: checked heads that are not loaded yet. They need no cache."""

    method = names.MEDUSA
    tensors: MedusaConfig

    @property
    def memory(self) -> ModelMemory:
        """The memory of the loaded heads: weights, and no cache."""
        target, size = self.folder.target, sum(map(math.prod, self.tensors.shapes().values()))
        each, _ = QUANTIZED_BYTES.get(self.folder.quantize, (target.dtype.itemsize, 0))
        return ModelMemory(int(size * each), 0, 0, target.config.max_positions)

    def build(self, num_tokens: int, target: Runner) -> MedusaDrafter:
        return MedusaDrafter(MedusaHeads(self.tensors, self.folder, target.decoder), target)

    def widened(self, plan: Plan) -> WideDrafter:
        """The widened heads; the outputs of their blocks are 0 in the new channels."""
        wide = replace(self.tensors, hidden=plan.wide.hidden)
        fields = {"hidden_size": wide.hidden, "vocab_size": wide.vocab_size}
        return WideDrafter(self.folder, self.tensors.shapes(), wide.shapes(), fields, names.ADDED)


PARTS = HeadParts(MedusaBlueprint, make_medusa, names.LAYOUTS)
