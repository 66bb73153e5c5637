"""Reading: the target pass of a round, in terms of the round's rows.

This file decides how a row's prompt chunk, root and guesses become one read, and where each one's logits are in the
result of the pass.
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
from forerun.models.decoder import States, Tapped
from forerun.models.runner import DeviceTokens, PartialPass, Read
from forerun.tree import DraftTree, HostTree


class RoundRow(NamedTuple):
    """One row of a round: a chunk of its unread tokens, then its tree where it draws a token.

    Its logits begin at row `first` of the pass's: those of `num_scored` tokens of the chunk, all or none, which are
    wanted for the prompt's log-probabilities, then those of its nodes. What of it is final: the chunk and, once they
    are known, the nodes that were `accepted`.
    """

    plan: RowPlan
    tree: HostTree | None
    first: int
    num_scored: int
    accepted: Seq[int] = ()

    @classmethod
    def of_plans(cls, plans: Seq[RowPlan], trees: Mapping[int, HostTree]) -> list[RoundRow]:
        """The rows of a round, as they stand before the pass; `trees` are those of rows that draw, by sequence."""
        rows: list[RoundRow] = []
        first = 0
        for plan in plans:
            num_scored = plan.num_chunk if plan.sequence.scores_prompt else 0
            rows.append(cls(plan, trees.get(plan.sequence.id), first, num_scored))
            first += num_scored + rows[-1].num_nodes
        return rows

    @property
    def sequence(self) -> Sequence:
        """The sequence that it is of."""
        return self.plan.sequence

    @property
    def first_node(self) -> int:
        """Where the logits of its nodes begin."""
        return self.first + self.num_scored

    @property
    def num_nodes(self) -> int:
        """Nodes of its tree, the root included."""
        return len(self.tree.tokens) if self.tree else 0

    def read(self) -> Read:
        """The read that the runner is asked for."""
        num_chunk = self.plan.num_chunk
        tokens = self.sequence.unread[:num_chunk] + (self.tree.tokens if self.tree else [])
        judged = range(num_chunk - self.num_scored, len(tokens))
        if self.tree is None or not self.tree.branches:
            return Read(self.sequence.id, tokens, judged=judged)
        assert num_chunk == 0, "a sequence with unread text is not drafted"
        return Read(self.sequence.id, tokens, self.tree.parents, judged, scratch=self.tree.depth() + 1)

    def accepting(self, nodes: Seq[int]) -> RoundRow:
        """The row, with these nodes of its tree final."""
        return RoundRow(self.plan, self.tree, self.first, self.num_scored, nodes)

    @property
    def path(self) -> Seq[int]:
        """Numbers of the read's tokens that stay, in order."""
        num_chunk = self.plan.num_chunk
        return [*range(num_chunk), *(num_chunk + node for node in self.accepted)] if num_chunk else self.accepted


def drawn_tokens(rows: Seq[RoundRow], tokens: Int[Tensor, "batch nodes"]) -> DeviceTokens:
    """Where the guesses among the tokens of all rows lie in the trees of those that have one."""
    source: list[int] = []
    first = 0
    for row in rows:
        source += [-1] * row.plan.num_chunk
        if row.tree is not None:
            source += [first + column for column in row.tree.places]
            first += tokens.shape[1]
    return DeviceTokens(tokens, source)


def resumable(draft: Draft, tree: DraftTree, taps: Seq[int]) -> bool:
    """Whether the pass may go on where a drafter's stopped: every node is judged as proposed, and no tap was passed."""
    resume, proposed = draft.resume, draft.tree
    if resume is None or any(0 <= tap < resume.layer for tap in taps):
        return False
    return torch.equal(proposed.tokens, tree.tokens) and torch.equal(proposed.parents, tree.parents)


def num_begun(draft: Draft) -> list[int]:
    """How many nodes of each row a drafter has read for the target: the first ones of its chain."""
    assert draft.resume is not None, "nothing was read"
    batch, columns = draft.tree.tokens.shape
    nodes: list[int] = draft.resume.nodes.tolist()
    counts = Counter(node // columns for node in nodes)
    assert nodes == [row * columns + i for row in range(batch) for i in range(counts[row])], "nodes from each root on"
    return [counts[row] for row in range(batch)]


def begun_rows(rows: Seq[RoundRow], draft: Draft) -> PartialPass:
    """What of the rows a drafter has read through the target's lower layers."""
    assert draft.resume is not None, "a pass goes on where another one stopped"
    of_trees = iter(num_begun(draft))
    begun = [0 if row.tree is None else next(of_trees) for row in rows]
    return PartialPass(draft.resume.layer, begun, draft.resume.hidden)


@dataclass(frozen=True, slots=True)
class TargetPass:
    """A pass that was made: its rows, in order, and what came of it."""

    rows: Seq[RoundRow]
    states: States
    drawn: Int[Tensor, "batch nodes"] | None = None  # the trees' tokens, where the host has not seen them

    def node_logits(self) -> Float[Tensor, "nodes vocab"]:
        """The logits of all trees' nodes, packed."""
        if not any(row.num_scored for row in self.rows):
            return self.states.logits
        return torch.cat([self.states.logits[row.first_node : row.first_node + row.num_nodes] for row in self.rows])

    def check_drawn(self, runs: Seq[Accepted]) -> None:
        """Raise RequestFailed for the first sequence that has no law for its next token; its logits say why."""
        if all(run.tokens[-1] >= 0 for run in runs):
            return
        for row, run in zip((row for row in self.rows if row.tree), runs, strict=True):
            if run.tokens[-1] < 0:
                sequence, logits = row.sequence, self.states.logits[row.first_node + run.nodes[-1]]
                raise RequestFailed(sequence.id) from undrawable(sequence, logits)


@dataclass(slots=True)
class News:
    """What became final in one round or several, and the drafter is still to be told, together."""

    rows: dict[int, tuple[Sequence, int, list[int]]] = field(default_factory=dict)  # by id: its first token, its states
    tapped: list[Tapped] = field(default_factory=list)
    num_tokens: int = 0  # that the passes read

    def add(self, kept: Seq[RoundRow], tapped: Tapped | None) -> None:
        """Add the tokens of a pass that stay, which their sequences do not count as read yet, and its states."""
        for row in kept:
            sequence = row.sequence
            _, _, states = self.rows.setdefault(sequence.id, (sequence, sequence.num_read, []))
            states += [self.num_tokens + node for node in row.path]
            self.num_tokens += row.plan.num_chunk + row.num_nodes
        if tapped is not None:
            self.tapped.append(tapped)

    def committed(self, shared: bool) -> Committed:
        """All of it; `shared`: whether texts of a tenant may share what is computed for them."""
        rows = list(self.rows.values())
        ends = [first + len(states) for _, first, states in rows]
        places = [place for _, _, states in rows for place in states]
        return Committed(
            seq_ids=list(self.rows),
            tokens=[t for (each, first, _), end in zip(rows, ends, strict=True) for t in each.tokens[first:end]],
            offsets=[0, *itertools.accumulate(len(states) for _, _, states in rows)],
            roots=[sequence.tokens[end] for (sequence, _, _), end in zip(rows, ends, strict=True)],
            features=Tapped.joined(self.tapped).rows(places) if self.tapped else None,
            tenants=[sequence.tenant for sequence, _, _ in rows],
            num_prompts=[sequence.num_prompt for sequence, _, _ in rows],
            salts=[sequence.tenant if shared else None for sequence, _, _ in rows],
        )


def undrawable(sequence: Sequence, logits: Float[Tensor, " vocab"]) -> ForerunError:
    """Why no token can be drawn after a sequence: the model's fault, or what its request allows."""
    behind = f"behind {len(sequence.tokens)} tokens of sequence {sequence.id}"
    if logits.isnan().any() or logits.isneginf().all():
        return ModelOutputInvalid(
            f"the model's logits {behind} hold NaN or no number at all: check that its files are whole, or load it "
            "with dtype 'float32'."
        )
    return InvalidRequest("sampling_params", f"no token is left to draw {behind}: allow more of them.")
