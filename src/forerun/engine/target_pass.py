"""TargetPass: the input and the result of a round's forward pass of the target.

Each sequence's prompt chunk, root and draft tokens become one `Read` for the runner; `RoundRow` knows which rows of the
logits belong to them.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from forerun.accept.commit import Accepted
from forerun.annotations import Float, Int
from forerun.draft.base import Committed, Draft
from forerun.engine.scheduler import RowPlan
from forerun.engine.sequence import Sequence
from forerun.errors import ForerunError, InvalidRequest, ModelOutputInvalid, RequestFailed
from forerun.models.decoder import Outputs, TapStates
from forerun.models.runner import DeviceTokens, PartialPass, Read
from forerun.tree import DraftTree, HostTree


class RoundRow(NamedTuple):
    """One sequence's part of a round: a chunk of unread tokens, then the draft tree if the sequence samples a token.

    Its logits start at row `first` of the pass's logits: first those of `num_scored` chunk tokens (all of the chunk or
    none), for the prompt's log-probabilities, then those of the tree's nodes. `accepted` are the nodes that stay after
    verification; the chunk always stays.
    """

    plan: RowPlan
    tree: HostTree | None
    first: int
    num_scored: int
    accepted: Seq[int] = ()

    @classmethod
    def of_plans(cls, plans: Seq[RowPlan], trees: Mapping[int, HostTree]) -> list[RoundRow]:
        """The rows of a round before the pass; `trees` has the tree of each sequence that samples, by its id."""
        rows: list[RoundRow] = []
        first = 0
        for plan in plans:
            num_scored = plan.num_chunk if plan.sequence.scores_prompt else 0
            rows.append(cls(plan, trees.get(plan.sequence.id), first, num_scored))
            first += num_scored + rows[-1].num_nodes
        return rows

    @property
    def sequence(self) -> Sequence:
        """The sequence of this row."""
        return self.plan.sequence

    @property
    def first_node(self) -> int:
        """Row of the pass's logits at which those of the tree's nodes start."""
        return self.first + self.num_scored

    @property
    def num_nodes(self) -> int:
        """Number of nodes of its tree, the root included; 0 without a tree."""
        return len(self.tree.tokens) if self.tree else 0

    def read(self) -> Read:
        """The row as the runner's input."""
        num_chunk = self.plan.num_chunk
        tokens = self.sequence.unread[:num_chunk] + (self.tree.tokens if self.tree else [])
        judged = range(num_chunk - self.num_scored, len(tokens))
        if self.tree is None or not self.tree.branches:
            return Read(self.sequence.id, tokens, judged=judged)
        assert num_chunk == 0, "a sequence is not drafted while its prompt is prefilled"
        return Read(self.sequence.id, tokens, self.tree.parents, judged, scratch=self.tree.depth() + 1)

    @property
    def path(self) -> Seq[int]:
        """Indices of the row's tokens that stay in the KV cache, in order."""
        num_chunk = self.plan.num_chunk
        return [*range(num_chunk), *(num_chunk + node for node in self.accepted)] if num_chunk else self.accepted


def unseen_tokens(rows: Seq[RoundRow], tokens: Int[Tensor, "batch nodes"]) -> DeviceTokens:
    """Draft tokens that only the device knows: for each token of the pass its index in `tokens`, -1 in chunks."""
    source: list[int] = []
    first = 0
    for row in rows:
        source += [-1] * row.plan.num_chunk
        if row.tree is not None:
            source += [first + column for column in row.tree.places]
            first += tokens.shape[1]
    return DeviceTokens(tokens, source)


def reused_nodes(draft: Draft, tree: DraftTree, taps: Seq[int]) -> list[int]:
    """How many nodes of each sequence's tree continue above an early exit.

    None do unless `tree` is the one that was drafted and no tap lies below the exit.
    """
    resume, drafted = draft.resume, draft.tree
    can_resume = resume is not None and not any(0 <= tap < resume.layer for tap in taps)
    if can_resume and torch.equal(drafted.tokens, tree.tokens) and torch.equal(drafted.parents, tree.parents):
        return num_resumed(draft)
    return [0] * len(tree.tokens)


def num_resumed(draft: Draft) -> list[int]:
    """How many nodes of each sequence an early exit has run through the lower layers: the first nodes of its chain."""
    assert draft.resume is not None, "the draft has no states of an early exit"
    batch, columns = draft.tree.tokens.shape
    nodes: list[int] = draft.resume.nodes.tolist()
    counts = Counter(node // columns for node in nodes)
    expected = [row * columns + i for row in range(batch) for i in range(counts[row])]
    assert nodes == expected, "an early exit has read other nodes than the first ones of each chain"
    return [counts[row] for row in range(batch)]


def partial_pass(rows: Seq[RoundRow], draft: Draft) -> PartialPass:
    """The states that an early exit has computed in the target's lower layers, by row."""
    assert draft.resume is not None, "the draft has no states of an early exit"
    counts = iter(num_resumed(draft))
    resumed = [0 if row.tree is None else next(counts) for row in rows]
    return PartialPass(draft.resume.layer, resumed, draft.resume.hidden)


@dataclass(frozen=True, slots=True)
class TargetPass:
    """The result of a round's pass: its rows, in order, and the target's states and logits."""

    rows: Seq[RoundRow]
    states: Outputs
    drawn: Int[Tensor, "batch nodes"] | None = None  # the tokens of the trees, if only the device knows them

    def node_logits(self) -> Float[Tensor, "nodes vocab"]:
        """The logits of all trees' nodes, packed [nodes, vocab]."""
        if not any(row.num_scored for row in self.rows):
            return self.states.logits
        return torch.cat([self.states.logits[row.first_node : row.first_node + row.num_nodes] for row in self.rows])

    def check_drawn(self, runs: Seq[Accepted]) -> None:
        """Raise RequestFailed, with the reason, for the first sequence for which no token could be sampled."""
        if all(run.tokens[-1] >= 0 for run in runs):
            return
        for row, run in zip((row for row in self.rows if row.tree), runs, strict=True):
            if run.tokens[-1] < 0:
                sequence, logits = row.sequence, self.states.logits[row.first_node + run.nodes[-1]]
                raise RequestFailed(sequence.id) from reason_without_token(sequence, logits)


@dataclass(slots=True)
class PendingRow:
    """A sequence's pending tokens: from index `first` on, one for each of `states`, their rows in the tapped states."""

    sequence: Sequence
    first: int
    states: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """Index of the first token that is not read yet, the root."""
        return self.first + len(self.states)


@dataclass(slots=True)
class PendingTokens:
    """Accepted tokens of one round or several that the drafter has not received yet."""

    rows: dict[int, PendingRow] = field(default_factory=dict)  # by sequence id
    tapped: list[TapStates] = field(default_factory=list)
    num_tokens: int = 0  # of the passes added, rejected draft tokens included

    def add(self, rows: Seq[RoundRow], tapped: TapStates | None) -> None:
        """Add the final tokens of a pass, and the states at the drafter's taps."""
        for row in rows:
            sequence = row.sequence
            pending = self.rows.setdefault(sequence.id, PendingRow(sequence, sequence.num_read))
            pending.states += [self.num_tokens + node for node in row.path]
            self.num_tokens += row.plan.num_chunk + row.num_nodes
        if tapped is not None:
            self.tapped.append(tapped)

    def committed(self, shared: bool) -> Committed:
        """All pending tokens as one `Committed`; `shared`: whether texts of a tenant may share cached prefixes."""
        rows = list(self.rows.values())
        sequences = [row.sequence for row in rows]
        states = [state for row in rows for state in row.states]
        return Committed(
            seq_ids=list(self.rows),
            tokens=[token for row in rows for token in row.sequence.tokens[row.first : row.end]],
            offsets=[0, *itertools.accumulate(len(row.states) for row in rows)],
            roots=[row.sequence.tokens[row.end] for row in rows],
            features=TapStates.joined(self.tapped).rows(states) if self.tapped else None,
            tenants=[sequence.tenant for sequence in sequences],
            num_prompts=[sequence.num_prompt for sequence in sequences],
            salts=[sequence.tenant if shared else None for sequence in sequences],
        )


def reason_without_token(sequence: Sequence, logits: Float[Tensor, " vocab"]) -> ForerunError:
    """Why no token can be sampled after a sequence: invalid logits, or a request that excludes every token."""
    place = f"after {len(sequence.tokens) - sequence.num_prompt} tokens of the answer"
    if logits.isnan().any() or logits.isneginf().all():
        return ModelOutputInvalid(
            f"the model's logits {place} contain NaN, or are all -inf: check that its files are complete, or load it "
            "with dtype 'float32'."
        )
    return InvalidRequest("sampling_params", f"the request excludes every token {place}: allow more tokens.")
