"""EAGLE as drafter: a layer on the target's states drafts token by token, in a cache of its own (2401.15077,
2503.01840).

This module decides which state goes with which token. The layer reads a token beside the target's state after the token
before it, so its text is the target's without the first token. The cache holds what it made of the target's own states:
guesses, whose states are its own outputs, are forgotten after each round, and accepted ones are read again, from the
states that the target has had for them since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from forerun.annotations import Float, ProgressCallback
from forerun.draft.base import Budget, Committed, Draft
from forerun.draft.model.follower import Follower
from forerun.draft.model.following import DraftRow
from forerun.draft.plan import CacheTokens, DraftContext, DraftPlan, refuse, refuse_members
from forerun.draft.spec import DraftSpec
from forerun.models.eagle import DraftVocabulary, plan_layer
from forerun.models.eagle_layer import EagleDecoder
from forerun.models.runner import DeviceTokens, Read, Runner, States
from forerun.sampling.draws import Draws


class EagleDrafter(Follower):
    """Drafts with a layer's `runner`, whose decoder is an EagleDecoder; `taps` are the states that it reads."""

    arms: tuple[str, ...] = ("eagle",)
    rereads: ClassVar[bool] = False

    def __init__(self, runner: Runner, ids: DraftVocabulary, taps: tuple[int, ...]) -> None:
        super().__init__(runner, ids)
        assert isinstance(runner.decoder, EagleDecoder), "it fuses states"
        self.decoder = runner.decoder
        self.taps = taps
        self.last: dict[int, Float[Tensor, "taps hidden"]] = {}  # the target's states after each text's last token
        self.outputs: dict[int, list[Float[Tensor, " hidden"]]] = {}  # the layer's, of root and guesses in their order

    def observe(self, news: Committed) -> None:
        """Read what became final. Raises WrongTarget for text without states."""
        super().observe(news if news.features is None else self.shifted(news))

    def shifted(self, news: Committed) -> Committed:
        """The news, each token with the state after the one before it; the first token has none and is left out."""
        assert news.features is not None, "states are shifted"
        tokens: list[int] = []
        offsets, states = [0], [news.features[:0]]
        for i, (seq_id, own, _) in enumerate(news.rows()):
            if own:
                before, shown = self.last.get(seq_id), news.features[news.offsets[i] : news.offsets[i + 1]]
                tokens += own if before is not None else own[1:]
                states += [shown[:-1]] if before is None else [before[None], shown[:-1]]
                self.last[seq_id] = shown[-1].clone()
            offsets.append(len(tokens))
        return replace(news, tokens=tokens, offsets=offsets, features=torch.cat(states))

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        """A tree per sequence, grown from the layer; the root alone where text or memory is full."""
        self.outputs = {}
        draft = super().propose(draws, budgets, tail)
        self.outputs = {}
        return draft

    def run(self, reads: Sequence[Read], drawn: DeviceTokens | None = None, features: Tensor | None = None) -> States:
        """One pass; the outputs of root and guesses are kept, for their children."""
        states = super().run(reads, drawn, features)
        if features is None:
            for read, own in zip(reads, states.hidden.split([len(read.tokens) for read in reads]), strict=True):
                self.outputs.setdefault(read.seq_id, []).extend(own)
        return states

    def inputs(
        self, reads: Sequence[Read], features: Float[Tensor, "total taps hidden"] | None
    ) -> Float[Tensor, "total hidden"]:
        """The target's states, fused, for text and roots; for a guess the layer's output at its parent."""
        if features is not None:
            return self.decoder.fuse(features)
        roots = [read.seq_id for read in reads if read.seq_id not in self.outputs]
        fused = dict(
            zip(roots, self.decoder.fuse(torch.stack([self.last[s] for s in roots])), strict=True) if roots else ()
        )
        found = []
        for read in reads:
            own = self.outputs.get(read.seq_id)
            if own is None:
                assert len(read.tokens) == 1, "a root is read alone"
                found.append(fused[read.seq_id])
            else:
                found += [own[parent] for parent in read.parents or [len(own) - 1]]
        return torch.stack(found)

    def confirm(self, seq_ids: Sequence[int]) -> None:
        """Forget all guesses: accepted ones are read from the target's states."""
        self.drop(seq_ids)

    def cut_tails(self, wishes: Sequence[DraftRow]) -> None:
        """The same for guesses that nothing was said about."""
        self.drop([wish.seq_id for wish in wishes])

    def drop(self, seq_ids: Sequence[int]) -> None:
        """Forget all guesses of these sequences."""
        self.runner.drop([seq_id for seq_id in seq_ids if seq_id in self.runner.tails])
        for seq_id in seq_ids:
            self.sequences[seq_id].clear()

    def forget(self, seq_ids: Sequence[int]) -> None:
        """Drop text, states, keys and values of these sequences; unknown ones are ignored."""
        super().forget(seq_ids)
        for seq_id in seq_ids:
            self.last.pop(seq_id, None)


def plan_eagle(spec: DraftSpec, context: DraftContext) -> DraftPlan:
    """`eagle:DIR`: an EAGLE layer on the target's states, with a cache of its own."""
    refuse_members(spec)
    if spec.argument is None:
        refuse(spec, "name the folder with the layer, as in eagle:DIR")
    name, eagle = str(spec), plan_layer(spec.argument, context.target)

    def build(cache_tokens: CacheTokens, _progress: ProgressCallback | None, target: Runner) -> EagleDrafter:
        config = target.decoder.config
        runner = eagle.load(cache_tokens[name], config.max_positions, target.decoder)
        return EagleDrafter(runner, DraftVocabulary(config.vocab_size, eagle.ids), eagle.taps)

    return DraftPlan({name: eagle.memory}, build, eagle.layer.fingerprint)
