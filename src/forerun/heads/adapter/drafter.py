"""Early exit: the target's first layers, with its norm and head, as the drafter (LayerSkip, 2404.16710).

Root and draft tokens run through the layers below the exit in the target's own cache, in the slots where the target's
pass expects them; there is no other model and, without an adapter, no other cache. The target has read all committed
text, so nothing else needs to be read. For chains, keys, values and states are handed over to the target's pass
(`Resume`): since the layers compute the same bits for one token as for many, that pass starts at the exit, except for
the last draft token, which was not read. Trees, whose nodes have other slots in the target's pass, and passes of fixed
shape are computed again from the first layer.

An adapter has trained layers above the exit (Kangaroo, 2404.18911), its own cache, and the target's head. It reads the
target's states at the exit: those of final text before a draft, and those of draft tokens after the pass of the lower
layers; accepted draft tokens are not read again. If a device drafts entire chains, all of this is one call, which drops
its draft tokens: accepted ones are read from the target's states, with the next root, in the next call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from forerun.annotations import Float, ProgressCallback
from forerun.cache.blocks import OutOfBlocks
from forerun.draft.base import Budget, Committed, Draft, Resume
from forerun.draft.model.drafted_text import DraftRow
from forerun.draft.model.tap_follower import TapFollower
from forerun.draft.plan import CacheTokens, DraftPlan, refuse
from forerun.draft.spec import DraftSpec
from forerun.errors import InvalidRequest, WrongTarget
from forerun.heads.adapter.format import EXIT, adapter_config, adapter_shapes
from forerun.heads.adapter.student import AdapterStudent
from forerun.heads.blueprint import HeadBlueprint, HeadParts, WideDrafter, widened_layers, widened_tap
from forerun.heads.folder import HeadFolder
from forerun.limits import is_whole
from forerun.models.chains import Chains, ChainStart, SameIds, UnreadTexts
from forerun.models.config import ModelConfig
from forerun.models.decoder import Outputs
from forerun.models.loading import Blueprint
from forerun.models.runner import DeviceTokens, Read, Runner
from forerun.models.widen import Plan
from forerun.sampling.draws import Draws


class EarlyExitDrafter(TapFollower):
    """Drafts with the first `layer` layers of `target`, which must be the engine's runner.

    `adapter` is the runner of an adapter, with the target's head and its own cache.
    """

    names: tuple[str, ...] = ("early-exit",)
    least_text: ClassVar[int] = 0  # the root is read in any case

    def __init__(self, target: Runner, layer: int, adapter: Runner | None = None) -> None:
        self.target = target
        self.layer = layer
        self.lower = target.lower(layer)
        self.adapter = adapter
        self.taps = () if adapter is None else (layer,)
        self.noted: dict[int, list[Tensor]] | None = None  # exit states of the draft's nodes; None: not recorded
        vocab = target.vocab_size
        super().__init__(adapter or self.lower, SameIds(vocab, vocab))
        # On devices the adapter's text, roots and draft tokens are read in one call.
        self.draws_after_text = adapter is not None and self.runner.draws_unseen

    def observe(self, committed: Committed) -> None:
        """Record the final tokens and the states that the adapter reads.

        Raises WrongTarget if the target's cache does not have these tokens, or if an adapter gets no states.
        """
        for seq_id, tokens, _ in committed.rows():
            known = self.sequences.get(seq_id)
            num_final = len(tokens) + (0 if known is None else len(known.text))
            if self.target.length(seq_id) != num_final:
                raise WrongTarget(
                    f"early-exit:{self.layer} uses the cache of the target that it was built for, which has "
                    f"{self.target.length(seq_id)} tokens of sequence {seq_id} instead of {num_final}: "
                    f"build a drafter for this engine, as LLM(model, draft='early-exit:{self.layer}') does"
                )
        super().observe(committed)

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        """A tree per sequence, grown from the lower layers; the root alone if context or cache have no room."""
        # After a tail the target's pass cannot resume, since it has not read the tail's tokens.
        self.noted = {} if self.lower.resumes and tail is None else None
        draft = super().propose(draws, budgets, tail)
        self.noted = None
        return draft

    def run(self, reads: Sequence[Read], drawn: DeviceTokens | None = None, features: Tensor | None = None) -> Outputs:
        """One pass of the lower layers and of the adapter, if any; of the adapter alone for final text."""
        if self.adapter is not None:
            return self.adapter.read(reads, inputs=self.inputs(reads, features, drawn))
        states = super().run(reads, drawn)
        self.note(reads, states.hidden)
        return states

    def inputs(
        self, reads: Sequence[Read], features: Float[Tensor, "total taps hidden"] | None, drawn: DeviceTokens | None
    ) -> Float[Tensor, "total hidden"]:
        """The states at the exit: the `features` of final text, computed by the lower layers for other tokens."""
        if features is not None:
            return features[:, 0]
        assert self.adapter is not None, "only an adapter reads states"
        cache = self.adapter.cache
        counts = [len(r.tokens) + (0 if r.seq_id in self.adapter.tails else r.scratch) for r in reads]
        if not cache.can_reserve([r.seq_id for r in reads], counts):
            raise OutOfBlocks(f"{sum(counts)} more tokens requested, {cache.blocks.num_free} blocks free")
        hidden = self.lower.read([read._replace(judged=()) for read in reads], drawn=drawn).hidden
        self.note(reads, hidden)
        return hidden

    def unread_texts(self, reads: Sequence[Read]) -> UnreadTexts:
        """The text with states, which the adapter reads, followed by the roots, which the lower layers read first."""
        config, stream = self.target.decoder.config, self.target.decoder.stream_dtype
        features = self.states.of([read for read in reads if read.tokens])
        features = features or [torch.empty(0, 1, config.hidden, dtype=stream, device=self.target.device)]
        texts = [[*read.tokens, *(self.after_text(read.seq_id) or ())] for read in reads]
        return UnreadTexts(texts, features, None, lambda states: states[:, 0], below=self.lower)

    def draw_in_one_call(
        self, draws: Draws, starts: Sequence[ChainStart], logits: Tensor, states: bool = False
    ) -> Chains | None:
        """As in Follower; the states at the exit are recorded if the target's pass can resume from them."""
        chains = super().draw_in_one_call(draws, starts, logits, self.noted is not None)
        if chains is not None and chains.states is not None and self.noted is not None:
            for start, states_read in zip(starts, chains.states, strict=True):
                self.noted[start.seq_id].append(states_read[: chains.num_read[start.seq_id]])
        return chains

    def note(self, reads: Sequence[Read], states: Float[Tensor, "read hidden"]) -> None:
        """Record the states at the exit of the nodes that were read."""
        if self.noted is not None:
            each = states.split([len(read.tokens) for read in reads]) if len(reads) > 1 else [states]
            for read, rows in zip(reads, each, strict=True):
                self.noted.setdefault(read.seq_id, []).append(rows)

    def finish(self, draws: Draws, draft: Draft, granted: Mapping[int, Budget]) -> Draft:
        """Hand the chains over to the target's pass with their states, and drop all other nodes from its cache."""
        rows = {s: row for row, s in enumerate(draws.seq_ids) if s in granted and granted[s].width == 1}
        rows = {} if self.noted is None else rows
        self.lower.hand_over([*rows])
        self.lower.drop([seq_id for seq_id in granted if seq_id not in rows])
        if self.noted is None or not rows:
            return draft
        columns = draft.tree.tokens.shape[1]
        counts = {row: sum(map(len, self.noted[seq_id])) for seq_id, row in rows.items()}
        nodes = [row * columns + node for row, count in counts.items() for node in range(count)]
        hidden = torch.cat([states for seq_id in rows for states in self.noted[seq_id]])
        return replace(draft, resume=Resume(self.layer, torch.tensor(nodes), hidden))

    def confirm(self, seq_ids: Sequence[int]) -> None:
        """Commit the accepted part of the adapter's tails; the engine does the same in the target's cache."""
        if self.adapter is not None:
            super().confirm(seq_ids)
        for seq_id in seq_ids:
            self.sequences[seq_id].clear()

    def cut_tails(self, rows: Sequence[DraftRow]) -> None:
        """Drop all draft tokens of an earlier draft, which are no longer in the target's cache."""
        seq_ids = [row.seq_id for row in rows]
        self.lower.drop(seq_ids)
        if self.adapter is not None:
            self.adapter.drop(seq_ids)
        for seq_id in seq_ids:
            self.sequences[seq_id].clear()

    @property
    def window(self) -> int:
        """The longest text that both the target and the adapter can read."""
        return self.lower.window if self.adapter is None else min(self.lower.window, self.adapter.window)

    def release(self, seq_ids: Sequence[int]) -> None:
        """Free the adapter's cache; the target's cache is the engine's."""
        self.lower.hand_over(seq_ids)
        if self.adapter is not None:
            super().release(seq_ids)
        for seq_id in seq_ids:
            if seq_id in self.sequences:
                self.sequences[seq_id].clear()


@dataclass(frozen=True, slots=True)
class ExitBlueprint(HeadBlueprint):
    """`early-exit:E[:DIR]`: the target's first E layers, the adapter in DIR, if any, and the target's norm and head."""

    layer: int
    adapter: tuple[HeadFolder, ModelConfig] | None = None  # the folder, and the configuration of its layers

    @classmethod
    def read(cls, spec: DraftSpec, target: Blueprint) -> ExitBlueprint:
        layers = target.config.layers
        if layers < 2:
            refuse(spec, "the target has a single layer, so there is no earlier exit; use another drafter")
        exit_layer, colon, name = (spec.argument or "").partition(":")
        if not is_whole(exit_layer) or not 1 <= int(exit_layer) < layers:
            bounds = f"at least 1 and at most {layers - 1}, as the target has {layers}"
            example = f"for instance early-exit:{max(1, layers // 4)}, or early-exit:LAYERS:DIR with an adapter"
            refuse(spec, f"the argument is the number of layers that draft: {bounds}, {example}")
        layer = int(exit_layer)
        if not colon:
            return cls(layer)
        if not name:
            refuse(spec, f"name the adapter's folder after the second colon, as in early-exit:{layer}:DIR, or omit it")
        folder = HeadFolder.open(name, spec.name, target)
        return cls(layer, (folder, adapter_config(folder, layer)))

    def plan(self, name: str) -> DraftPlan:
        """As in HeadBlueprint; an adapter shares the target's head."""
        if self.adapter is None:
            return DraftPlan({}, lambda _tokens, _progress, target: EarlyExitDrafter(target, self.layer))
        folder, config = self.adapter
        adapter = folder.layers(config, adapter_shapes(folder, config))

        def build(tokens: CacheTokens, progress: ProgressCallback | None, target: Runner) -> EarlyExitDrafter:
            above = adapter.load(tokens[name], progress, target.decoder.config.max_positions, target.decoder)
            return EarlyExitDrafter(target, self.layer, above)

        return DraftPlan({name: adapter.memory}, build, adapter.fingerprint)

    def widened(self, plan: Plan) -> WideDrafter:
        """The widened adapter, for the exit with the same states. Raises InvalidRequest without an adapter."""
        if self.adapter is None:
            problem = f"early-exit:{self.layer} has no weights of its own: name an adapter's folder."
            raise InvalidRequest("draft", problem)
        folder, config = self.adapter
        wide, exit_wide = widened_layers(config, plan, folder.name), widened_tap(plan, self.layer)
        shapes = adapter_shapes(folder, config), adapter_shapes(folder, wide)
        return WideDrafter.of_layers(folder, shapes, wide, {EXIT: exit_wide}, argument=f"{exit_wide}:")


PARTS = HeadParts(ExitBlueprint, AdapterStudent.fresh)
