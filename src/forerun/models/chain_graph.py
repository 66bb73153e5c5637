"""A draft model's whole chains as one graph: draw, read, draw, ... without a launch in between.

This module decides for which rounds that is possible: chains that are drawn from plain or tempered logits under coupled
noise. A graph does the same work for every round, so nothing in it may depend on a request: temperatures, keys and
positions are tensors, and rounds with filters or penalties are drawn step by step. Chains may end at
different depths: the deepest come first, and at every step the rows that have ended are padding. So a graph also serves
shorter chains and fewer rows than it was captured for, as they occur near the ends of answers. Without a GPU the same
functions run uncaptured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.cache.blocks import OutOfBlocks
from forerun.device import upload
from forerun.models.chains import Chains, IdExchange, Start
from forerun.models.fixed import PADDED, Inputs, Shape, run_pass
from forerun.models.ops import power_of_two
from forerun.models.runner import Read
from forerun.sampling.draws import Draws
from forerun.sampling.noise import Purpose, absorb, gumbel
from forerun.sampling.params import SamplingParams

if TYPE_CHECKING:
    from forerun.models.graphs import GraphRunner

LONGER = 2  # how many times its depth a round may be padded to, rather than that another graph is captured
PLAIN = SamplingParams()
FILTERS = ("logit_bias", "banned_tokens", "bad_words", "min_tokens", "top_k", "top_p", "min_p", "repetition_penalty",
           "presence_penalty", "frequency_penalty", "logits_processors")  # fmt: skip


def is_plain(params: SamplingParams) -> bool:
    """Whether draws depend only on a request's temperature and noise."""
    return all(getattr(params, name) == getattr(PLAIN, name) for name in FILTERS)


@dataclass(frozen=True, slots=True)
class Buffers:
    """The tensors of one graph: the first logits, each row's noise and temperature, and every step's tables."""

    logits: Float[Tensor, "rows vocab"]
    keys: Int[Tensor, " rows"]
    positions: Int[Tensor, " rows"]
    temperatures: Float[Tensor, "rows 1"]  # 0: greedy
    steps: Sequence[Inputs]


class ChainGraph:
    """Draws chains with a model, in graphs of a few numbers of rows (powers of two) and depths."""

    def __init__(self, runner: GraphRunner, ids: IdExchange) -> None:
        self.runner = runner
        self.ids = ids
        self.buffers: dict[tuple[int, int], Buffers] = {}

    def draw(self, draws: Draws, starts: Sequence[Start], logits: Float[Tensor, "starts vocab"]) -> Chains | None:
        """The chains; None, with nothing changed, where the graph cannot draw this round or there is no room."""
        drawn = [draws.rows[start.row] for start in starts]
        if draws.rejection or type(draws) is not Draws or not all(is_plain(row.params) for row in drawn):
            return None
        try:
            self.runner.cache.reserve([s.seq_id for s in starts], [s.depth - 1 for s in starts])
        except OutOfBlocks:
            return None
        order = sorted(range(len(starts)), key=lambda i: -starts[i].depth)
        if order != [*range(len(starts))]:
            starts, logits = [starts[i] for i in order], logits[upload(order, torch.long, logits.device)]
        buffers = self.fill(draws, starts, logits)
        key = ("chains", len(buffers.keys), 1 + len(buffers.steps), draws.num_ids)
        guesses = self.runner.graphs.run(key, lambda: self.body(buffers, draws.num_ids))
        return self.spread(draws, starts, guesses)

    def fill(self, draws: Draws, starts: Sequence[Start], logits: Tensor) -> Buffers:
        """Set the tables of all steps, the deepest chains first: where tokens lie is known before they are."""
        buffers, device = self.buffers_of(*self.size_of(len(starts), starts[0].depth)), draws.device
        buffers.logits[: len(starts)] = logits
        index = upload([start.row for start in starts], torch.long, device)
        buffers.keys[: len(starts)] = draws.row_keys(Purpose.COUPLED)[index]
        buffers.positions[: len(starts)] = draws.root_positions[index] + 1
        params = [draws.rows[start.row].params for start in starts]
        heat = [[0.0 if p.greedy else p.temperature] for p in params]
        buffers.temperatures[: len(starts)] = upload(heat, torch.float32, device)
        for level, step in enumerate(buffers.steps, start=1):
            reads = [Read(start.seq_id, [0], judged=[0]) for start in starts if start.depth > level]
            layout, judged = self.runner.lay_out(reads)
            step.fill(layout, judged, self.runner.cache.blocks.block_size, self.runner.spare_slot)
        return buffers

    def size_of(self, rows: int, depth: int) -> tuple[int, int]:
        """The rows and depth of a captured graph, or of a new one if too much of a captured one would be padding."""
        there = [(r, d) for r, d in self.buffers if rows <= r <= PADDED * rows and depth <= d <= LONGER * depth]
        return min(there, key=lambda size: size[0] * size[1], default=(power_of_two(rows), depth))

    def buffers_of(self, rows: int, depth: int) -> Buffers:
        """The buffers for this many rows and steps, always the same."""
        if (rows, depth) not in self.buffers:
            device = self.runner.device
            shape = Shape(rows, 0, rows, self.runner.most_keys)
            self.buffers[rows, depth] = Buffers(
                logits=torch.zeros(rows, self.ids.vocab_size, device=device),
                keys=torch.zeros(rows, dtype=torch.long, device=device),
                positions=torch.zeros(rows, dtype=torch.long, device=device),
                temperatures=torch.zeros(rows, 1, device=device),
                steps=[Inputs(shape, device) for _ in range(depth - 1)],
            )
        return self.buffers[rows, depth]

    def body(self, buffers: Buffers, num_ids: int) -> Int[Tensor, "rows depth"]:
        """All steps. Tensor code alone."""
        logits, columns = buffers.logits, []
        for level in range(len(buffers.steps) + 1):
            tokens = draw_coupled(logits, buffers, level, num_ids)
            columns.append(tokens)
            if level < len(buffers.steps):
                step = buffers.steps[level]
                step.columns["tokens"].copy_(self.ids.own(tokens).clamp_min(0))
                found = run_pass(self.runner.decoder, self.runner.ops, step, self.runner.cache).logits
                assert found is not None, "every row of a step is judged"
                logits = self.ids.spread(found)
        return torch.stack(columns, dim=1)

    def spread(self, draws: Draws, starts: Sequence[Start], guesses: Tensor) -> Chains:
        """The rows of the graph as rows of the round, each with the length that was asked for."""
        batch, deepest, device = len(draws.rows), starts[0].depth, draws.device
        index = upload([start.row for start in starts], torch.long, device)
        depths = upload([start.depth for start in starts], torch.long, device)
        found = torch.full((batch, deepest), -1, dtype=torch.long, device=device)
        wanted = torch.arange(deepest, device=device) < depths[:, None]
        found[index] = torch.where(wanted, guesses[: len(starts), :deepest], -1)
        counts = [0] * batch
        for start in starts:
            counts[start.row] = start.depth
        return Chains(counts, {s.seq_id: s.depth - 1 for s in starts if s.depth > 1}, guesses=found)


def draw_coupled(
    logits: Float[Tensor, "rows vocab"], buffers: Buffers, level: int, num_ids: int
) -> Int[Tensor, " rows"]:
    """The guesses that `Draws.children` gives at a width of 1, for rows without filters."""
    vocab = logits.shape[1]
    shaped = logits.masked_fill(torch.arange(vocab, device=logits.device) >= num_ids, -math.inf)
    greedy = buffers.temperatures == 0
    noise = gumbel(absorb(buffers.keys, buffers.positions + level), vocab)
    heated = shaped / torch.where(greedy, 1.0, buffers.temperatures) + noise
    scores = torch.where(greedy, shaped, heated)
    scores = scores.nan_to_num(nan=-math.inf, posinf=torch.finfo(scores.dtype).max, neginf=-math.inf)
    tokens = scores.argmax(1, keepdim=True)
    offered = scores.gather(1, tokens) > -math.inf
    return torch.where(offered, tokens, -1)[:, 0]
