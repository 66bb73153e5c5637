"""VerdictGraph: a round's draws and verdict as one captured graph, where draws depend on temperature alone.

This module decides which rounds are judged so, and in which sizes. Launched one by one, the small kernels of a verdict
take the host longer than a small target takes to compute. The graph gives to the bit what `verify` gives: it runs the
same functions of tensors, over tables that are filled in one copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.device import overwrite
from forerun.models.backends.gpu.capture import Graphs
from forerun.models.rows import power_of_two
from forerun.models.runner import TreeRule
from forerun.sampling.draws import Draws
from forerun.sampling.noise import Purpose, absorb, gumbel, signed
from forerun.sampling.params import SamplingParams
from forerun.sampling.transforms import centred
from forerun.sampling.winners import first_largest
from forerun.tree import DraftTree, HostTree

MOST_ROWS = 192  # of logits that are set aside: 98 MB of a vocabulary of 128,000
SPARE = 4  # how many times its rows a round may be padded to, rather than that another graph is captured
PLAIN = SamplingParams()
FILTERS = ("logit_bias", "banned_tokens", "bad_words", "min_tokens", "top_k", "top_p", "min_p", "repetition_penalty",
           "presence_penalty", "frequency_penalty", "logits_processors")  # fmt: skip


def is_plain(params: SamplingParams) -> bool:
    """Whether draws depend only on a request's temperature and noise."""
    return all(getattr(params, name) == getattr(PLAIN, name) for name in FILTERS)


class VerdictShape(NamedTuple):
    """The sizes of a graph: rows of logits, sequences, columns of the tree, and its depth."""

    rows: int
    batch: int
    nodes: int
    depth: int

    def holds(self, other: VerdictShape) -> bool:
        """Whether such a round fits, without too much padding."""
        large = all(mine >= needed for mine, needed in zip(self, other, strict=True))
        return large and self.rows <= SPARE * other.rows and self.batch * self.nodes <= SPARE**2 * other.rows


@dataclass(frozen=True, slots=True)
class Tables:
    """The static tensors of one graph; all but logits and tokens are views of `flat`, which is filled in one copy."""

    flat: Int[Tensor, " numbers"]
    logits: Float[Tensor, "rows vocab"]
    tokens: Int[Tensor, "batch nodes"]
    keys: Int[Tensor, " rows"]  # of each row's noise, without its position
    positions: Int[Tensor, " rows"]
    temperatures: Float[Tensor, "rows 1"]  # 0: greedy
    parents: Int[Tensor, "batch nodes"]
    row: Int[Tensor, "batch nodes"]  # of a node's logits; one past the last where none were read


class VerdictGraph:
    """What a rule says of the tokens that a round's draws give, in graphs of a few shapes."""

    def __init__(self, graphs: Graphs, device: torch.device, vocab: int) -> None:
        self.graphs, self.device, self.vocab = graphs, device, vocab
        self.tables: dict[VerdictShape, Tables] = {}
        self.logits: Float[Tensor, "rows vocab"] | None = None  # all shapes use the first rows of one buffer

    def judge(
        self, draws: Draws, tree: DraftTree, logits: Float[Tensor, "nodes vocab"], rule: TreeRule
    ) -> Int[Tensor, "batch verdict"] | None:
        """What `rule` says of the target's own token after each node; None for rounds that no graph can judge.

        Rounds with filters, penalties, grammars or laws to reject by are such, and those of more than MOST_ROWS nodes.
        The result holds until the next verdict.
        """
        plain = type(draws) is Draws and not draws.rejection and not draws.constrained
        if not plain or not 0 < len(logits) <= MOST_ROWS or logits.dtype == torch.float64:
            return None
        if not all(is_plain(row.params) for row in draws.rows):
            return None
        batch, nodes = tree.tokens.shape
        shape = self.shape_of(VerdictShape(len(logits), batch, nodes, tree.depth))
        tables = self.tables_of(shape)
        tables.logits[: len(logits)] = logits
        tables.tokens[:batch, :nodes] = tree.tokens
        self.fill(tables, shape, draws, tree.host())
        packed = self.graphs.run(("verdict", shape, draws.num_ids), lambda: verdict(tables, shape, draws.num_ids, rule))
        return packed[:batch, : 3 + tree.depth]

    def shape_of(self, needed: VerdictShape) -> VerdictShape:
        """A shape that holds the round: one that is there, else a new one."""
        there = [shape for shape in self.tables if shape.holds(needed)]
        if there:
            return min(there)
        depth = power_of_two(needed.depth) if needed.depth else 0
        nodes = 1 + power_of_two(needed.nodes - 1) if needed.nodes > 1 else 1
        return VerdictShape(min(power_of_two(needed.rows), MOST_ROWS), power_of_two(needed.batch), nodes, depth)

    def tables_of(self, shape: VerdictShape) -> Tables:
        """The tensors of this shape, always the same."""
        if shape not in self.tables:
            if self.logits is None:
                self.logits = torch.zeros(MOST_ROWS, self.vocab, device=self.device)
            rows, grid = shape.rows, shape.batch * shape.nodes
            flat = torch.zeros(3 * rows + 2 * grid, dtype=torch.int64, device=self.device)
            keys, positions, heat, parents, row = flat.split([rows, rows, rows, grid, grid])
            self.tables[shape] = Tables(
                flat,
                logits=self.logits[:rows],
                tokens=torch.zeros(shape.batch, shape.nodes, dtype=torch.int64, device=self.device),
                keys=keys,
                positions=positions,
                temperatures=heat.view(torch.float64)[:, None],
                parents=parents.view(shape.batch, shape.nodes),
                row=row.view(shape.batch, shape.nodes),
            )
        return self.tables[shape]

    def fill(self, tables: Tables, shape: VerdictShape, draws: Draws, trees: Sequence[HostTree]) -> None:
        """What the host knows of the round: all but logits and tokens."""
        heat = np.ones(shape.rows)
        keys, positions = np.zeros((2, shape.rows), dtype=np.int64)
        parents = np.full((shape.batch, shape.nodes), -1)
        row = np.full((shape.batch, shape.nodes), shape.rows)
        end = 0
        noise = draws.host_keys(Purpose.COUPLED)
        for i, (sampled, tree) in enumerate(zip(draws.rows, trees, strict=True)):
            first, end = end, end + len(tree.tokens)
            places = list(tree.places)
            keys[first:end] = signed(noise[i])
            positions[first:end] = draws.root_places[i] + 1 + np.array(tree.depths())
            heat[first:end] = 0.0 if sampled.params.greedy else sampled.params.temperature
            parents[i, places] = [-1 if parent < 0 else places[parent] for parent in tree.parents]
            row[i, places] = range(first, end)
        flat = np.concatenate([keys, positions, heat.view(np.int64), parents.ravel(), row.ravel()])
        overwrite(tables.flat, torch.from_numpy(flat))


def verdict(tables: Tables, shape: VerdictShape, num_ids: int, rule: TreeRule) -> Int[Tensor, "batch verdict"]:
    """The rule, of what is drawn. Tensor code alone."""
    drawn = draw(tables, num_ids)
    after = torch.cat([drawn, torch.full_like(drawn[:1], -1)])[tables.row]
    read = (tables.row < shape.rows) & (tables.tokens >= 0)
    tokens = torch.where(read, tables.tokens, -1)
    tree = DraftTree(tokens, torch.where(read, tables.parents, -1), shape.depth)
    return rule(tree, torch.where(read, after, -1))


def draw(tables: Tables, num_ids: int) -> Int[Tensor, " rows"]:
    """What `Draws.draw` gives for rows without filters."""
    logits, temperatures = tables.logits, tables.temperatures.to(torch.float32)
    vocab = logits.shape[1]
    shaped = logits.masked_fill(torch.arange(vocab, device=logits.device) >= num_ids, -math.inf)
    greedy = temperatures == 0
    heat = torch.where(greedy, 1.0, temperatures)
    narrowed = centred(shaped, heat) / heat
    noise = gumbel(absorb(tables.keys, tables.positions), vocab)
    tokens = torch.where(greedy, first_largest(shaped), first_largest(narrowed + noise))
    reached = torch.where(greedy, shaped.gather(1, tokens), narrowed.gather(1, tokens))
    return torch.where(reached > -math.inf, tokens, -1)[:, 0]
