"""The target's own first layers as drafter: their states, under the target's norm and head, guess (2404.16710).

This module decides what is read, where, and which of it the target's pass need not read again. Root and guesses go
through the layers below the exit, in the target's own cache, into the slots where verification expects them; there is
no other model and, without an adapter, no other cache. The target has read all committed text, so there is nothing else
to read or to remember. A chain's keys, values and states are handed on with the draft (`Resume`): these layers compute
the same bits for one token as for many, so the target's pass begins at the exit, except for the last guess, which was
not read yet. Trees, whose nodes lie in other slots in the target's pass, and passes of fixed shape are read again.
`expand` grows trees, and `adapter` decides what an adapter reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor

from forerun.annotations import Float
from forerun.cache.blocks import OutOfBlocks
from forerun.draft import chains, loop
from forerun.draft.adapter import AdaptedRunner
from forerun.draft.base import NO_DRAFT, Budget, Committed, Draft, Outlook, Resume
from forerun.draft.chain_graph import ChainGraph
from forerun.draft.expand import NodeToExpand, expand
from forerun.draft.growth import Growth
from forerun.errors import WrongTarget
from forerun.models.graphs import GraphRunner
from forerun.models.runner import DeviceTokens, Read, Runner, States
from forerun.sampling.draws import Draws
from forerun.tree import DraftTree

ReturnType = TypeVar("ReturnType")


@dataclass(frozen=True, slots=True)
class ExitRow:
    """A sequence to be drafted: its row in the round, the final tokens that the target has not read, and how far."""

    row: int
    seq_id: int
    late: Sequence[int]  # the root the last
    budget: Budget

    def read(self) -> Read:
        """The root and what is before it. The last guess is not read, so a tree's paths are that much shorter."""
        scratch = len(self.late) + self.budget.depth - 1 if self.budget.width > 1 else 0
        return Read(self.seq_id, self.late, judged=[len(self.late) - 1], scratch=scratch)


class EarlyExitDrafter:
    """Drafts with the first `layer` layers of `target`, for engines that run on this very runner.

    An `adapter` is a runner that reads their states, and has the target's head, in a cache of its own.
    """

    arms: tuple[str, ...] = ("early-exit",)

    def __init__(self, target: Runner, layer: int, adapter: Runner | None = None) -> None:
        self.target = target
        self.layer = layer
        self.lower = target.lower(layer)
        self.adapted = None if adapter is None else AdaptedRunner(self.lower, adapter)
        self.runner = self.adapted or self.lower
        self.taps: tuple[int, ...] = () if adapter is None else (layer,)
        self.told: dict[int, int] = {}  # committed tokens of each sequence, roots not counted
        self.graph: ChainGraph | None = None
        if isinstance(self.runner, GraphRunner):
            self.graph = ChainGraph(self.runner, lambda logits: logits, target.decoder.config.vocab_size)

    def observe(self, news: Committed) -> None:
        """Count what became final, and let the adapter read it.

        Raises WrongTarget where the target's cache does not hold it, or where an adapter is not shown its states.
        """
        for seq_id, tokens, _ in news.rows():
            self.told[seq_id] = self.told.get(seq_id, 0) + len(tokens)
            if self.target.length(seq_id) != self.told[seq_id]:
                raise WrongTarget(
                    f"early-exit:{self.layer} reads in the cache of the target that it was built for, which holds "
                    f"{self.target.length(seq_id)} tokens of sequence {seq_id} where {self.told[seq_id]} are final: "
                    f"build one for this engine, as LLM(model, draft='early-exit:{self.layer}') does"
                )
        if self.adapted is not None:
            self.adapted.learn(news)

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        """A tree per sequence, grown from the lower layers; the root alone where text or memory is full."""
        wishes = self.wishes(draws, budgets, tail)
        self.runner.drop([wish.seq_id for wish in wishes])
        passes = Passes(self.runner, draws.seq_ids, noted=self.lower.resumes and tail is None)
        wishes, logits = passes.read_roots(wishes)
        granted = {wish.row: wish.budget for wish in wishes}
        draft = self.grow(draws, granted, logits, passes) if wishes else self.nothing(draws)
        chained = [wish for wish in wishes if wish.budget.width == 1 and passes.noted]
        if chained:
            self.lower.hand_over([wish.seq_id for wish in chained])
            resume = passes.resume(self.layer, {wish.row for wish in chained}, draft.tree.tokens.shape[1])
            draft = replace(draft, resume=resume)
        self.lower.drop([wish.seq_id for wish in wishes if wish not in chained])
        return replace(draft, pass_s=passes.pass_s)

    def grow(self, draws: Draws, granted: Mapping[int, Budget], logits: Tensor, passes: Passes) -> Draft:
        """The guesses, made in the cheapest way that these draws and budgets allow."""
        budgets = list(granted.values())
        if self.graph is not None and loop.can_draw_unseen(draws, budgets):
            starts = [loop.Start(row, draws.seq_ids[row], min(b.depth, b.nodes)) for row, b in granted.items()]
            drawn = passes.timed(self.graph.draw, draws, starts, logits)
            drawn = drawn or loop.draw_chains(draws, starts, logits, passes.read_unseen)
            return Draft(drawn.tree(draws))
        if chains.are_plain_chains(draws, budgets):
            at_once = passes.draw_chains(draws, granted, logits)
            return Draft(at_once or chains.grow_chains(draws, granted, logits, passes.read_tokens))
        each = [granted.get(row, NO_DRAFT) for row in range(len(draws.rows))]
        return expand(draws, each, logits, passes)

    def nothing(self, draws: Draws) -> Draft:
        """The roots alone."""
        return Draft(DraftTree.of_texts([[row.tokens[-1]] for row in draws.rows]))

    def wishes(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None) -> list[ExitRow]:
        """The sequences to be drafted, their depths cut to what the target's context and cache allow."""
        late = {} if tail is None else {seq_id: [*tokens, root] for seq_id, tokens, root in tail.rows()}
        wishes = []
        for row, (sampling, budget) in enumerate(zip(draws.rows, budgets, strict=True)):
            new = late.get(sampling.seq_id, [sampling.tokens[-1]])
            depth = min(budget.depth, self.room(sampling.seq_id, len(new)))
            if depth > 0:
                wishes.append(ExitRow(row, sampling.seq_id, new, replace(budget, depth=depth)))
        return wishes

    def room(self, seq_id: int, num_late: int) -> int:
        """The deepest draft behind a sequence's text and so many more tokens; its last guess need not be read."""
        if seq_id not in self.told:
            return 0
        config, blocks = self.target.decoder.config, self.target.cache.blocks
        window = min(config.max_positions, blocks.num_blocks * blocks.block_size)
        room = max(0, window + 1 - self.told[seq_id] - num_late)
        return room if self.adapted is None else min(room, self.adapted.room(seq_id, num_late))

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        """Nothing is ever unread; context and cache limit the depth."""
        limit = [self.room(seq_id, 1) for seq_id in seq_ids]
        return Outlook(unread=[0] * len(seq_ids), limit=limit, expected=[None] * len(seq_ids))

    def forget(self, seq_ids: Sequence[int]) -> None:
        """Stop counting these sequences; unknown ones are ignored. Their keys and values are the target's."""
        self.lower.hand_over(seq_ids)
        if self.adapted is not None:
            self.adapted.forget(seq_ids)
        for seq_id in seq_ids:
            self.told.pop(seq_id, None)


@dataclass(slots=True)
class Passes:
    """The passes of one proposal, the states that they left, and how long they took.

    Called with growing trees it reads their nodes, for `expand`. `nodes` says whose states are in `states`, if they are
    to be `noted`: row of the round and node of its tree. `numbers` are their places in the sequences' tails.
    """

    runner: Runner | AdaptedRunner
    seq_ids: Sequence[int]
    noted: bool
    numbers: dict[tuple[int, int], int] = field(default_factory=dict)
    nodes: list[tuple[int, int]] = field(default_factory=list)
    states: list[Float[Tensor, "read hidden"]] = field(default_factory=list)
    pass_s: float = 0.0

    def read_roots(self, wishes: list[ExitRow]) -> tuple[list[ExitRow], Float[Tensor, "wishes vocab"]]:
        """Read the roots; the wishes for which there was room, the youngest left out, and the logits after theirs."""
        while wishes:
            states = self.read([wish.read() for wish in wishes])
            if states is not None:
                self.note([(wish.row, 0) for wish in wishes], states.hidden)
                self.numbers |= {(wish.row, 0): len(wish.late) - 1 for wish in wishes}
                return wishes, states.logits
            youngest = max(wish.seq_id for wish in wishes)  # ids grow with arrival
            wishes = [wish for wish in wishes if wish.seq_id != youngest]
        return [], torch.empty(0, self.runner.decoder.config.vocab_size)

    def __call__(self, growths: Sequence[Growth], places: Sequence[NodeToExpand]) -> Tensor | None:
        """The logits after the nodes, in their order; None where the cache has no room for them."""
        reads = []
        for row, group in groupby(places, key=lambda place: place.row):
            nodes = [place.node for place in group]
            parents = [self.numbers[row, growths[row].parents[node]] for node in nodes]
            tokens = [growths[row].tokens[node] for node in nodes]
            reads.append(Read(self.seq_ids[row], tokens, parents, judged=range(len(tokens))))
        states = self.read(reads)
        if states is None:
            return None
        for row, group in groupby(places, key=lambda place: place.row):
            first = len(self.runner.tails[self.seq_ids[row]].parents) - sum(place.row == row for place in places)
            self.numbers |= {(row, place.node): first + i for i, place in enumerate(group)}
        self.note([(place.row, place.node) for place in places], states.hidden)
        return states.logits

    def read_tokens(self, rows: Sequence[int], tokens: Sequence[int]) -> Tensor | None:
        """One more guess of each of these rows' chains, and the logits after it; None where there is no room."""
        seq_ids = [self.seq_ids[row] for row in rows]
        nodes = [(row, len(self.runner.tails[seq_id].parents)) for row, seq_id in zip(rows, seq_ids, strict=True)]
        states = self.read([Read(s, [token], judged=(0,)) for s, token in zip(seq_ids, tokens, strict=True)])
        if states is None:
            return None
        self.note(nodes, states.hidden)
        return states.logits

    def read_unseen(self, reads: Sequence[Read], drawn: DeviceTokens) -> Tensor | None:
        """The same for guesses that the host has not seen; their states are not kept."""
        states = self.read(reads, drawn)
        return None if states is None else states.logits

    def draw_chains(self, draws: Draws, budgets: Mapping[int, Budget], logits: Tensor) -> DraftTree | None:
        """The chains by one call of the runner; None where it has none for them."""
        laws = draws.row_laws
        if laws is None or not laws.compiled:
            return None
        rows, depths = list(budgets), [min(b.depth, b.nodes) for b in budgets.values()]
        states = torch.empty(len(rows), max(depths), self.runner.decoder.config.hidden)
        seq_ids = [self.seq_ids[row] for row in rows]
        found = self.timed(self.runner.draw_chains, seq_ids, depths, logits, laws.some(rows), states)
        if found is None:
            return None
        drawn = [[row.tokens[-1]] for row in draws.rows]
        for i, (row, depth, chain) in enumerate(zip(rows, depths, found, strict=True)):
            drawn[row] += chain
            num_read = min(len(chain), depth - 1)
            self.note([(row, 1 + j) for j in range(num_read)], states[i, :num_read])
        return DraftTree.of_texts(drawn)

    def note(self, nodes: Sequence[tuple[int, int]], states: Float[Tensor, "read hidden"]) -> None:
        """Keep the states of nodes that were read. Where there is text before a root, nothing is noted."""
        if self.noted:
            self.nodes += nodes
            self.states.append(states)

    def resume(self, layer: int, rows: Collection[int], columns: int) -> Resume:
        """Where the target's pass may go on for the chains of these rows, in a draft of so many columns."""
        order = sorted((i for i, (row, _) in enumerate(self.nodes) if row in rows), key=lambda i: self.nodes[i])
        nodes = [self.nodes[i][0] * columns + self.nodes[i][1] for i in order]
        return Resume(layer, torch.tensor(nodes), torch.cat(self.states)[order])

    def read(self, reads: Sequence[Read], drawn: DeviceTokens | None = None) -> States | None:
        """One pass; None where the cache has no room."""
        try:
            return self.timed(self.runner.read, reads, (), drawn)
        except OutOfBlocks:
            return None

    def timed(self, call: Callable[..., ReturnType], *arguments: object) -> ReturnType:
        """What the call gives, its time counted."""
        started_s = time.perf_counter()
        result = call(*arguments)
        self.pass_s += time.perf_counter() - started_s
        return result
