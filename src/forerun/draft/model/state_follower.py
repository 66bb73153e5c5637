"""StateFollower: a drafter whose model reads each token with the hidden state of the token before it (EAGLE, MTP).

For final text the state is the target's. The model's text therefore starts at the second token and ends with the root.
It is read before a draft, and drafting starts from the model's output at the root. For a draft token the state is the
model's own output at the token before. The cache keeps only what was computed from the target's states: draft tokens
are dropped after each round, and accepted ones are read again with the target's states. Subclasses define which states
the model reads, and which of its outputs are passed to the next draft token.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from forerun.annotations import Float
from forerun.device import Download
from forerun.draft.base import Committed
from forerun.draft.model.drafted_text import DraftRow, RootPass
from forerun.draft.model.tap_follower import TapFollower
from forerun.models.chains import ChainStart, IdMap, UnreadTexts, VerifiedChains, joined
from forerun.models.decoder import Outputs
from forerun.models.runner import DeviceTokens, Read, Runner


class StateFollower(TapFollower, ABC):
    """Drafts with a `runner` whose decoder reads embeddings and states; its output per token has `num_outputs` numbers.

    `outputs` are those at the last token of a sequence's text, followed by those at its draft tokens.
    """

    draws_after_text = True

    def __init__(self, runner: Runner, ids: IdMap, num_outputs: int) -> None:
        super().__init__(runner, ids)
        self.num_outputs = num_outputs
        self.outputs: dict[int, list[Float[Tensor, " outputs"]]] = {}

    @abstractmethod
    def fuse(self, features: Float[Tensor, "total taps hidden"]) -> Float[Tensor, "total inputs"]:
        """The decoder's state inputs for final text, computed from the target's states (after `before_fusing`)."""

    @abstractmethod
    def draft_states(self, output: Float[Tensor, "*rows outputs"]) -> Float[Tensor, "*rows inputs"]:
        """The state input of a draft token, from the model's output at its parent."""

    def before_fusing(self, reads: Sequence[Read], features: Sequence[Tensor]) -> Sequence[Tensor]:
        """The target's states for these reads; a subclass may add further states that the model reads with the text."""
        return features

    def observe(self, committed: Committed) -> None:
        """Record the final tokens. Raises WrongTarget for text without states."""
        for seq_id, tokens, _ in committed.rows():
            before = self.sequences[seq_id].text[-1:] if seq_id in self.sequences else []
            assert not tokens or not before or before[0] == tokens[0], "the first committed token is not the last root"
        super().observe(self.shifted(committed))
        for seq_id in committed.seq_ids:
            self.sequences[seq_id].root = None  # the text includes the root

    def shifted(self, committed: Committed) -> Committed:
        """The committed tokens without the first and with the root, so that each goes with the state before it.

        The first token of a text has no state before it, so the model does not read it. Since all states depend on it,
        it becomes part of the salt.
        """
        rows = [(row_tokens, root) for _, row_tokens, root in committed.rows()]
        tokens = [token for row_tokens, root in rows for token in ((*row_tokens[1:], root) if row_tokens else ())]
        firsts = [row_tokens[0] if row_tokens else root for row_tokens, root in rows]
        salts = [None if salt is None else (salt, first) for salt, first in zip(committed.salts, firsts, strict=False)]
        return replace(committed, tokens=tokens, salts=salts)

    def adoptable(self, text: Sequence[int], most: int, salt: Hashable) -> int:
        """As for the text without its first token, which needs no state."""
        return super().adoptable(text[1 : most + 1], most, (salt, text[0]))

    def after_text(self, seq_id: int) -> Sequence[int] | None:
        """No tokens, since the text includes the root; None if the model's output there cannot be computed."""
        return () if seq_id in self.outputs or seq_id in self.states.waiting else None

    def run(self, reads: Sequence[Read], drawn: DeviceTokens | None = None, features: Tensor | None = None) -> Outputs:
        """One pass. The outputs at the text's last token and at draft tokens are saved: their children read them."""
        states = self.runner.read(reads, drawn=drawn, inputs=self.inputs(reads, features))
        for read, outputs in zip(reads, states.hidden.split([len(read.tokens) for read in reads]), strict=True):
            if features is not None:
                self.outputs[read.seq_id] = [outputs[-1].clone()]
            else:
                self.outputs[read.seq_id].extend(outputs.clone())
        return states

    @torch.inference_mode()
    def read_roots(self, rows: list[DraftRow]) -> RootPass:
        """The logits after the roots, from the saved outputs: the roots were read with the text."""
        if not rows:
            return self.read_fitting([], rows)
        started_s = time.perf_counter()
        logits = self.runner.logits(torch.stack([self.outputs[row.seq_id][0] for row in rows]))
        self.pass_s += time.perf_counter() - started_s
        return RootPass([], rows, self.ids.target_logits(logits))

    def begin_next(self, judged: VerifiedChains) -> Download | None:
        """Start the next chains on the device after the tokens that it has accepted; returns the verdict's download.

        None, and nothing is started, unless `judged` are all chains of the last draft.
        """
        starts = self.drawn
        if not starts or [start.seq_id for start in starts] != [judged.draws.seq_ids[start.row] for start in starts]:
            return None
        if any(s.depth != judged.num_drafted[s.row] or s.seq_id not in self.runner.cache for s in starts):
            return None
        firsts = [*itertools.accumulate((1 + count for count in judged.num_drafted), initial=0)]
        features = [judged.features[firsts[start.row] : firsts[start.row + 1]] for start in starts]
        features = [judged.features] if len(starts) == len(judged.num_drafted) else features
        reads = [Read(start.seq_id, [0] * (start.depth + 1)) for start in starts]
        return self.runner.begin_chains(judged, starts, self.ids, self.texts_of(reads, features))

    def unread_texts(self, reads: Sequence[Read]) -> UnreadTexts:
        return self.texts_of(reads, self.states.of(reads))

    def texts_of(self, reads: Sequence[Read], features: Sequence[Float[Tensor, "_ taps hidden"]]) -> UnreadTexts:
        """The text of these reads with the target's states, as the input of the runner's call."""
        runner, features = self.runner, self.before_fusing(reads, features)
        dtype = runner.decoder.stream_dtype if runner.draws_unseen else torch.float32
        roots = torch.empty(len(reads), self.num_outputs, dtype=dtype, device=runner.device)
        return UnreadTexts([read.tokens for read in reads], features, roots, self.fuse, self.draft_states)

    def keep_ends(self, reads: Sequence[Read], texts: UnreadTexts) -> None:
        """Save the model's output at the last token of each text, from which drafting starts."""
        if texts.roots is not None:
            self.outputs |= {read.seq_id: [root] for read, root in zip(reads, texts.roots, strict=True)}

    def states_at_roots(self, starts: Sequence[ChainStart]) -> Float[Tensor, "starts outputs"]:
        return torch.stack([self.outputs[start.seq_id][-1] for start in starts])

    def inputs(
        self, reads: Sequence[Read], features: Float[Tensor, "total taps hidden"] | None
    ) -> Float[Tensor, "total inputs"]:
        """The state inputs of these reads: the target's states for text, the model's output at the parent otherwise."""
        if features is not None:
            return self.fuse(joined(self.before_fusing(reads, [features])))
        states = []
        for read in reads:
            outputs = self.outputs[read.seq_id]
            states += [self.draft_states(outputs[1 + parent]) for parent in read.parents or [len(outputs) - 2]]
        return torch.stack(states)

    def confirm(self, seq_ids: Sequence[int]) -> None:
        """Drop all draft tokens; accepted ones are read again with the target's states."""
        self.drop(seq_ids)

    def cut_tails(self, rows: Sequence[DraftRow]) -> None:
        """Drop the draft tokens of an earlier draft."""
        self.drop([row.seq_id for row in rows])

    def drop(self, seq_ids: Sequence[int]) -> None:
        """Drop all draft tokens of these sequences."""
        self.runner.drop([seq_id for seq_id in seq_ids if seq_id in self.runner.tails])
        for seq_id in seq_ids:
            self.sequences[seq_id].clear()
            del self.outputs.get(seq_id, [])[1:]

    def forget(self, seq_ids: Sequence[int]) -> None:
        super().forget(seq_ids)
        for seq_id in seq_ids:
            self.outputs.pop(seq_id, None)
