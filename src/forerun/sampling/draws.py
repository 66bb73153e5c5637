"""Draws: the sampling of one round for all sequences, used by the target and every drafter.

This file decides how logits become a law (probabilities), and how a law and keyed noise become tokens. All methods are
pure: they take packed nodes (`PathState`), give one result per node, and keep no state.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from forerun.annotations import Float, Int
from forerun.device import is_cpu, softmax, upload
from forerun.kernels.sampling import UNDECIDED, UNKNOWN, CRowLaw, RowLaws, SamplingKernels
from forerun.sampling.edits import TextEdits
from forerun.sampling.noise import Purpose, absorb, coupled_key, mix, signed, uniform
from forerun.sampling.params import GREEDY_BELOW
from forerun.sampling.tables import RoundTables, RowSampling
from forerun.sampling.transforms import Children, HostChildren, Logits, PathState, Transforms, masks_of
from forerun.sampling.winners import RoundNoise, all_on_largest, first_largest, largest, tamed
from forerun.tree import DraftTree

__all__ = ["Children", "Draws", "HostChildren", "PathState", "RowSampling"]


class Draws:
    """The sampling state of a round: its sequences' parameters, and their noise.

    `num_ids` is the number of ids the tokenizer has: padding ids above are never sampled. `rejection` is for the
    verification modes `token` and `block`: drafters then use separate noise. `level` distinguishes the levels of a
    cascade, which share no noise in those modes. `kernels` speed up coupled sampling, with the same results.
    """

    def __init__(
        self,
        rows: Sequence[RowSampling],
        vocab: int,
        *,
        rejection: bool = False,
        device: torch.device | str = "cpu",
        num_ids: int | None = None,
        level: int = 0,
        kernels: SamplingKernels | None = None,
    ) -> None:
        self.rows, self.vocab, self.rejection, self.level = rows, vocab, rejection, level
        self.num_ids = vocab if num_ids is None else min(num_ids, vocab)
        self.device = torch.device(device)
        self.seq_ids = [row.seq_id for row in rows]
        self.root_places = [len(row.tokens) - 1 for row in rows]
        self.rounds = self.root_places  # what tells a sequence's rounds apart
        self.constrained = any(row.constraint is not None for row in rows)
        self.on_host = is_cpu(self.device)
        self.kernels = kernels if self.on_host else None
        self._keys: dict[Purpose, Tensor] = {}

    @classmethod
    def of_tables(cls, transforms: Transforms, keys: Int[Tensor, " batch"]) -> Draws:
        """Coupled draws for rows given as tensors: their transforms' tables, and `row_keys`."""
        draws = cls((), transforms.vocab, device=keys.device, num_ids=transforms.num_ids)
        draws.transforms, draws._keys[Purpose.COUPLED] = transforms, keys
        return draws

    @cached_property
    def tables(self) -> RoundTables:
        """The tables that its transforms use, on the host."""
        return RoundTables(self.rows, self.vocab)

    @cached_property
    def transforms(self) -> Transforms:
        """The transforms of logits: penalties, biases, temperature, filters."""
        return Transforms.of(self.tables, self.num_ids, self.device)

    @cached_property
    def _noise(self) -> RoundNoise:
        return RoundNoise(self.vocab, self.device)

    @cached_property
    def roots_tokens(self) -> Int[Tensor, " batch"]:
        """The last token of every text."""
        return self._column([row.tokens[-1] for row in self.rows])

    @cached_property
    def root_positions(self) -> Int[Tensor, " batch"]:
        """The positions of the roots; the same as `root_places`, on the device."""
        return self._column(self.root_places)

    @property
    def greedy(self) -> Sequence[bool]:
        """Which sequences are greedy, on the host, in batch order."""
        return [row.params.greedy for row in self.rows]

    def within(self, places: Sequence[int], tails: Sequence[Sequence[int]]) -> Draws:
        """The draws of a cascade's lower members: these rows as they would be with `tails` committed, one level down.

        Coupled noise is that of the same positions. In rejection modes it shares no noise with this round, with other
        rounds inside it, or with those inside any other.
        """
        rows = [self.rows[place] for place in places]
        inner = Draws(
            [replace(row, tokens=[*row.tokens, *tail]) for row, tail in zip(rows, tails, strict=True)],
            self.vocab,
            rejection=self.rejection,
            device=self.device,
            num_ids=self.num_ids,
            level=self.level + 1,
            kernels=self.kernels,
        )
        inner.rounds = [mix((self.rounds[i], root)) for i, root in zip(places, inner.root_places, strict=True)]
        return inner

    def roots(self) -> PathState:
        """The root of every sequence, in batch order."""
        row = torch.arange(len(self.rows), device=self.device)
        known = [(i, ()) for i in range(len(self.rows))]
        return PathState(row, row.new_empty(len(self.rows), 0), self.root_positions + 1, known)

    def nodes(self, tree: DraftTree) -> PathState:
        """Every node of `tree` that is read, batch-major, then in node order."""
        batch, nodes = tree.tokens.shape
        assert batch == len(self.rows), f"a tree for {batch} sequences in a round of {len(self.rows)}"
        if nodes == 1:
            return self.roots()
        read = tree.read_nodes()
        row = read // nodes
        drawn = tree.path_tokens().flatten(0, 1)[read]
        known = tree.seen_paths() if self.constrained else None
        return PathState(row, drawn, self.root_positions[row] + 1 + (drawn >= 0).sum(1), known)

    def advance(self, at: PathState, parents: Int[Tensor, " new"], tokens: Int[Tensor, " new"]) -> PathState:
        """The states of new nodes: `tokens[i]` drawn after node `parents[i]` of `at`, which does not change."""
        row, position, drawn = at.row[parents], at.position[parents], at.drawn[parents]
        end = position - self.root_positions[row] - 1
        drawn = torch.cat([drawn, torch.full_like(tokens, -1)[:, None]], dim=1)
        return PathState(row, drawn.scatter(1, end[:, None], tokens[:, None]), position + 1)

    def prepare_noise(self, depth: int) -> None:
        """Compute the noise of paths of `depth` tokens at once, cheaper than level by level; no effect with kernels."""
        if self.row_laws is not None and not self.rejection:
            return
        purpose, levels = (Purpose.DRAFT, depth) if self.rejection else (Purpose.COUPLED, depth + 1)
        if not self.transforms.all_greedy:
            position = (self.root_positions[:, None] + torch.arange(1, levels + 1, device=self.device)).flatten()
            row = torch.arange(len(self.rows), device=self.device).repeat_interleave(levels)
            self._noise.prepare(absorb(self.row_keys(purpose)[row], position))

    def probs(self, logits: Logits, at: PathState) -> Logits:
        """The probabilities of the token after each node, all transforms applied; float32, or float64 for float64.

        Temperature 0 is the point mass at the largest transformed logit, the lowest id among equals. Computed by
        softmax, whose bits do not depend on other rows as those of `exp` do.
        """
        return self._probs(*self._transformed(logits, at), at)

    def draw(self, logits: Logits, at: PathState) -> Int[Tensor, " nodes"]:
        """The target's own token after each node: the largest of transformed logits plus the position's noise.

        A function of logits, path, parameters, seed and position alone: the token of plain decoding there. Distributed
        exactly by the law (the Gumbel-max trick); greedy rows get no noise; ties go to the lowest id. -1 if there is no
        law: logits with NaN, or all -inf.
        """
        shaped, narrowed = self._transformed(logits, at)
        tokens = self._chosen(shaped, narrowed, at, Purpose.COUPLED)
        reached = self._choose(at, lambda: shaped.gather(1, tokens), lambda: narrowed.gather(1, tokens))
        return torch.where(reached > -math.inf, tokens, -1)[:, 0]  # of a row with NaN the largest is NaN

    def scores(self, logits: Logits, at: PathState) -> Logits:
        """The scores of which `draw` takes the largest: transformed logits, plus noise unless the row is greedy."""
        return self._scores(*self._transformed(logits, at), at, Purpose.COUPLED)

    def recover(self, law: Logits, at: PathState) -> Int[Tensor, " nodes"]:
        """A token from each log-law (need not be normalised): recovered and bonus tokens of the rejection modes.

        -1 if there is no law, as in `draw`.
        """
        tokens = self._drawn(law, at, Purpose.RECOVER)
        return torch.where(law.gather(1, tokens) > -math.inf, tokens, -1)[:, 0]

    def coins(self, at: PathState, tokens: Int[Tensor, " nodes"]) -> Float[Tensor, " nodes"]:
        """Acceptance coins, uniform in (0, 1): one for each node state and the token judged there."""
        return uniform(self._keys_at(at, Purpose.ACCEPT), tokens)

    def children(self, logits: Logits, at: PathState, width: int, *, survival: bool = True) -> Children:
        """A drafter's `width` draft tokens after each node, under the round's noise.

        Coupled: the largest perturbed logits, under the very noise that the target will use. Rejection modes: sampled
        without replacement from the drafter's own law, with noise of this round alone. Greedy rows: the largest logits.
        Logits may be anything, NaN and infinities included; tokens are in range or -1. One token without its `survival`
        costs the least.
        """
        shaped, narrowed = self._transformed(logits, at, guessing=True)
        law = self._probs(shaped, narrowed, at).nan_to_num(nan=0.0) if self.rejection else None
        purpose = Purpose.DRAFT if self.rejection else Purpose.COUPLED
        same = shaped is narrowed
        narrowed = tamed(narrowed)
        shaped = narrowed if same else tamed(shaped)
        if width == 1 and not survival:
            tokens = self._chosen(shaped, narrowed, at, purpose)
            chance, offered = None, narrowed.gather(1, tokens) > -math.inf
        else:
            scores = self._scores(shaped, narrowed, at, purpose)
            tokens = largest(scores, width)
            chance, offered = softmax(scores).gather(1, tokens), scores.gather(1, tokens) > -math.inf
            offered &= ~(tokens[:, :, None] == tokens[:, None]).tril(-1).any(2)  # where nothing is left, ids repeat
        if law is not None:
            greedy, drawn = self.transforms.greedy_nodes(at), law.gather(1, tokens)
            chance = None if chance is None else torch.where(greedy, chance, drawn)
            offered &= greedy | (drawn > 0)  # no law, no draw: a token that q denies would be accepted for free
        chance = None if chance is None else torch.where(offered, chance, 0.0)
        return Children(torch.where(offered, tokens, -1), chance, law)

    def offer(
        self, logits: Logits, rows: Sequence[int], paths: Sequence[Sequence[int]], width: int, *, survival: bool = True
    ) -> HostChildren:
        """`children` of the nodes after these draft tokens of `rows`, on the host.

        The tokens are identical; with compiled kernels survival agrees up to rounding only.
        """
        laws = self._laws_for(logits)
        if self.kernels is None or laws is None or self.rejection:
            children = self.children(logits, self._behind(rows, paths), width, survival=survival)
            chances = None if children.survival is None else children.survival.tolist()
            return HostChildren(children.tokens.tolist(), chances, children.law)
        masks, contiguous = self._masks(rows, paths, logits), logits.float().contiguous()
        if survival or width > 1:
            offered = self.kernels.offer(contiguous, rows, paths, laws, width, masks)
            drawn, chances, left = offered.tokens, offered.survival, offered.undecided
        else:  # a draw alone costs the least
            drawn = [[token] for token in self.kernels.choose(contiguous, rows, paths, laws, masks)]
            chances, left = None, [i for i, (token,) in enumerate(drawn) if token < 0]
        if left:
            alone, at = self._alone([rows[i] for i in left], [paths[i] for i in left])
            children = alone.children(logits[left], at, width, survival=chances is not None)
            for place, i in enumerate(left):
                drawn[i] = children.tokens[place].tolist()
                if chances is not None and children.survival is not None:
                    chances[i] = children.survival[place].tolist()
        return HostChildren(drawn, chances)

    def verdict(
        self, tree: DraftTree, logits: Logits, drawn: array[int] | None = None
    ) -> Int[Tensor, "batch verdict"] | None:
        """`follow` with the tokens of `draw`, by compiled kernels; None if there are none for it.

        Per row the accepted length, the next token and the path; only nodes on accepted paths are sampled. `drawn` has
        known tokens of some nodes, UNKNOWN for others, and is changed.
        """
        laws = self._laws_for(logits)
        if self.kernels is None or laws is None:
            return None
        drawn = array("q", [UNKNOWN]) * tree.tokens.numel() if drawn is None else drawn
        tokens, parents, logits = tree.tokens.contiguous(), tree.parents.contiguous(), logits.float().contiguous()
        nodes = tree.seen_paths() or [] if self.constrained else []
        masks = self._masks([row for row, _ in nodes], [path for _, path in nodes], logits)
        while True:
            verdict = self.kernels.judge(tokens, parents, logits, laws, tree.depth, drawn, masks)
            if verdict is not None:
                return verdict
            self._draw_undecided(tree, logits, drawn)

    def _draw_undecided(self, tree: DraftTree, logits: Logits, drawn: array[int]) -> None:
        """Sample with torch the nodes that are marked so, one per row at most."""
        nodes = [i for i, token in enumerate(drawn) if token == UNDECIDED]
        paths = tree.path_tokens().flatten(0, 1)[nodes].tolist()
        rows = [node // tree.tokens.shape[1] for node in nodes]
        alone, at = self._alone(rows, [[token for token in path if token >= 0] for path in paths])
        place = (tree.valid.flatten().long().cumsum(0) - 1)[nodes]
        for node, token in zip(nodes, alone.draw(logits[place], at).tolist(), strict=True):
            drawn[node] = token

    def _alone(self, rows: Sequence[int], paths: Sequence[Sequence[int]]) -> tuple[Draws, PathState]:
        """Draws of these rows without the others, whose transforms would cost time, and states after these guesses."""
        kept = sorted(set(rows))
        texts = [self.rows[row] for row in kept]
        draws = Draws(texts, self.vocab, rejection=self.rejection, num_ids=self.num_ids, level=self.level)
        draws.rounds = [self.rounds[row] for row in kept]
        return draws, draws._behind([kept.index(row) for row in rows], paths)

    def _behind(self, rows: Sequence[int], paths: Sequence[Sequence[int]]) -> PathState:
        """The states after these guesses."""
        row, known = self._column(rows), list(zip(rows, paths, strict=True))
        longest = max(map(len, paths), default=0)
        drawn = [[*path, *[-1] * (longest - len(path))] for path in paths]
        at = [self.root_places[i] + 1 + len(path) for i, path in zip(rows, paths, strict=True)]
        state = upload(drawn, torch.int64, self.device).view(len(rows), longest)
        return PathState(row, state, self._column(at), known)

    def _masks(
        self, rows: Sequence[int], paths: Sequence[Sequence[int]], logits: Logits
    ) -> Int[Tensor, "nodes words"] | None:
        """The grammars' token masks after these draft tokens; None if no row has a grammar."""
        if not self.constrained:
            return None
        return masks_of(self.rows, list(zip(rows, paths, strict=True)), logits.shape[1])

    def _laws_for(self, logits: Logits) -> RowLaws | None:
        """The rows' laws for compiled kernels, which compute in float32."""
        return None if logits.dtype == torch.float64 else self.row_laws

    @cached_property
    def row_laws(self) -> RowLaws | None:
        """The rows' laws for coupled sampling by compiled kernels; None if there are none."""
        if self.kernels is None:
            return None
        return row_laws(self.rows, self.host_keys(Purpose.COUPLED), self.num_ids, self.kernels.slack)

    def _transformed(self, logits: Logits, at: PathState, *, guessing: bool = False) -> tuple[Logits, Logits]:
        """Logits for greedy rows and for sampled rows: before and after temperature and filters."""
        shaped = self.transforms.shape(logits, at, guessing=guessing)
        return shaped, shaped if self.transforms.all_greedy else self.transforms.narrow(shaped, at)

    def _probs(self, shaped: Logits, narrowed: Logits, at: PathState) -> Logits:
        return self._choose(at, lambda: all_on_largest(shaped), lambda: softmax(narrowed))

    def _choose(self, at: PathState, greedy: Callable[[], Tensor], sampled: Callable[[], Tensor]) -> Tensor:
        """Select one of two by each node's row; unneeded ones are not computed."""
        if not self.transforms.steps.greedy:
            return sampled()
        if self.transforms.all_greedy:
            return greedy()
        return torch.where(self.transforms.greedy_nodes(at), greedy(), sampled())

    def _scores(self, shaped: Logits, narrowed: Logits, at: PathState, purpose: Purpose) -> Logits:
        """The scores of a draw: with the purpose's noise unless the row is greedy."""
        return self._choose(at, lambda: shaped, lambda: narrowed + self._noise.rows(self._keys_at(at, purpose)))

    def _chosen(self, shaped: Logits, narrowed: Logits, at: PathState, purpose: Purpose) -> Int[Tensor, "nodes 1"]:
        """The first largest of `_scores`."""
        return self._choose(at, lambda: first_largest(shaped), lambda: self._drawn(narrowed, at, purpose))

    def _drawn(self, logits: Logits, at: PathState, purpose: Purpose) -> Int[Tensor, "nodes 1"]:
        """The first largest of logits and noise, which need not all be made for that."""
        return self._noise.winners(logits, self._keys_at(at, purpose))

    def _keys_at(self, at: PathState, purpose: Purpose) -> Int[Tensor, " nodes"]:
        """The key of each node's noise: that of its row, and the node's position."""
        return absorb(self.row_keys(purpose)[at.row], at.position)

    def row_keys(self, purpose: Purpose) -> Int[Tensor, " batch"]:
        """Each row's (seed, sample, purpose, level, round), absorbed once on the host; positions are still to be."""
        if purpose not in self._keys:
            self._keys[purpose] = self._column([signed(key) for key in self.host_keys(purpose)])
        return self._keys[purpose]

    def host_keys(self, purpose: Purpose) -> list[int]:
        """`row_keys` on the host, as unsigned 64-bit integers."""
        return [self._row_key(row, purpose, round_) for row, round_ in zip(self.rows, self.rounds, strict=True)]

    def _row_key(self, row: RowSampling, purpose: Purpose, round_: int) -> int:
        """Coupled noise belongs to a position; all other noise to a position in one round at one level.

        A block verdict looks at later draft tokens, so in rejection modes the noise of a position that is drafted
        again would not be fresh if the round did not count: its root, and the roots of the rounds it lies in. The
        tokens that a cascade's middle model draws are drafts too, whatever they are drawn for.
        """
        if purpose is Purpose.COUPLED and not (self.rejection and self.level):
            return coupled_key(row.seed, row.sample)
        return mix((row.seed, row.sample, purpose, self.level, round_))

    def _column(self, values: Sequence[int]) -> Int[Tensor, " batch"]:
        return upload(values, torch.int64, self.device)


def row_laws(rows: Sequence[RowSampling], keys: Sequence[int], num_ids: int, slack: float) -> RowLaws:
    """How these rows draw. `keys` are those of their noise, of 64 bits, with the position still to be absorbed."""
    kept: list[object] = []
    laws = [row_law(row, key, kept) for row, key in zip(rows, keys, strict=True)]
    constrained = any(row.constraint is not None for row in rows)
    return RowLaws((CRowLaw * len(laws))(*laws), kept, num_ids, slack, constrained)


def row_law(row: RowSampling, key: int, kept: list[object]) -> CRowLaw:
    """The law of one row for compiled kernels, which cannot call processors; what it points to is added to `kept`."""
    p = row.params
    law = CRowLaw(
        key,
        len(row.tokens) - 1,
        bool(p.logits_processors),
        max(p.top_k, 0),
        0.0 if p.temperature < GREEDY_BELOW else p.temperature,
        math.log(p.min_p) if p.min_p else -math.inf,
        p.top_p if p.top_p < 1 else math.inf,
        p.repetition_penalty,
        p.frequency_penalty,
        p.presence_penalty,
    )
    edits = row.edits or TextEdits.of(p, row.tokens, row.num_prompt, row.eos_ids, row.bad_words)
    if edits.any:
        law.point_to(tables := edits.at(row.tokens).tables(row.tokens))
        kept.append(tables)
        law.ends_from = edits.ends_from
    return law
