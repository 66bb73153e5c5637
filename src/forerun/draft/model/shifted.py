"""Shifted drafters: a model reads each token beside the state after the token before it, and predicts the next one.

This module decides which state goes with which token. The state is the target's where the target has read the token
before, so the model's text is the target's without the first token; behind the text it is what the model itself made of
the guess before. The cache holds what the model made of the target's states alone: guesses are forgotten after each
round, and accepted ones are read again, from the states that the target has had for them since. Which states a model
reads, and which of its outputs a guess hands to the next one, is for each drafter to say.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from forerun.annotations import Float
from forerun.draft.base import Budget, Committed, Draft
from forerun.draft.model.follower import Follower
from forerun.draft.model.following import DraftRow
from forerun.models.chains import IdExchange, Start
from forerun.models.runner import DeviceTokens, Read, Runner, States
from forerun.sampling.draws import Draws


class ShiftedFollower(Follower, ABC):
    """Drafts with a `runner` whose decoder reads embeddings and states side by side."""

    rereads: ClassVar[bool] = False

    def __init__(self, runner: Runner, ids: IdExchange) -> None:
        super().__init__(runner, ids)
        self.last: dict[int, Float[Tensor, "taps hidden"]] = {}  # the target's states after each text's last token
        self.outputs: dict[int, list[Float[Tensor, " outputs"]]] = {}  # the model's, of root and guesses in their order

    @abstractmethod
    def of_text(
        self, reads: Sequence[Read], features: Float[Tensor, "total taps hidden"]
    ) -> Float[Tensor, "total inputs"]:
        """What the decoder reads of the target's states beside the tokens of final text, which are packed."""

    @abstractmethod
    def of_roots(self, seq_ids: Sequence[int]) -> Float[Tensor, "roots inputs"]:
        """What it reads beside roots: the states after the last token that the target has read."""

    @abstractmethod
    def of_guess(self, output: Float[Tensor, " outputs"]) -> Float[Tensor, " inputs"]:
        """What it reads beside a guess, given its own output at the guess's parent."""

    def observe(self, news: Committed) -> None:
        """Read what became final. Raises WrongTarget for text without states."""
        if news.adopted:
            super().observe(self.ahead(news))
            for seq_id in news.seq_ids:
                self.sequences[seq_id].root = None  # it is read already, and the next news begin behind it
        else:
            super().observe(news if news.features is None else self.shifted(news))

    def ahead(self, news: Committed) -> Committed:
        """Adopted news without the first token, and with the root: its own cache holds that beside the state before."""
        tokens = [token for _, own, root in news.rows() for token in (*own[1:], root)]
        salts = [(salt, own[0]) for salt, (_, own, _) in zip(news.salts, news.rows(), strict=True)]
        return replace(news, tokens=tokens, salts=salts)

    def adoptable(self, text: Sequence[int], most: int, salt: Hashable) -> int:
        """As much as its own cache holds, the token behind it included: no state is shown for that one's sake."""
        return super().adoptable(text[1 : most + 1], most, (salt, text[0]))

    def shifted(self, news: Committed) -> Committed:
        """The news, each token with the state after the one before it; the first token has none and is left out."""
        assert news.features is not None, "states are shifted"
        tokens: list[int] = []
        offsets, states, salts = [0], [news.features[:0]], list(news.salts)
        for i, (seq_id, own, _) in enumerate(news.rows()):
            if own and salts and salts[i] is not None:
                salts[i] = (salts[i], own[0])  # what the first token is decides about all states
            if own:
                before, shown = self.last.get(seq_id), news.features[news.offsets[i] : news.offsets[i + 1]]
                tokens += own if before is not None else own[1:]
                states += [shown[:-1]] if before is None else [before[None], shown[:-1]]
                self.last[seq_id] = shown[-1].clone()
            offsets.append(len(tokens))
        return replace(news, tokens=tokens, offsets=offsets, features=torch.cat(states), salts=salts)

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        """A tree per sequence, grown from the model; the root alone where text or memory is full."""
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

    def behind_roots(self, starts: Sequence[Start]) -> Float[Tensor, "starts outputs"]:
        """The model's outputs there."""
        return torch.stack([self.outputs[start.seq_id][-1] for start in starts])

    def inputs(
        self, reads: Sequence[Read], features: Float[Tensor, "total taps hidden"] | None
    ) -> Float[Tensor, "total inputs"]:
        """The target's states for text and roots; for a guess what the model made of its parent."""
        if features is not None:
            return self.of_text(reads, features)
        roots = [read.seq_id for read in reads if read.seq_id not in self.outputs]
        of_roots = dict(zip(roots, self.of_roots(roots), strict=True) if roots else ())
        found = []
        for read in reads:
            own = self.outputs.get(read.seq_id)
            if own is None:
                assert len(read.tokens) == 1, "a root is read alone"
                found.append(of_roots[read.seq_id])
            else:
                found += [self.of_guess(own[parent]) for parent in read.parents or [len(own) - 1]]
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
