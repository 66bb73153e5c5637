"""Draws: the sampling of one round for all sequences, used by the target and every drafter.

This file decides how logits become a law (probabilities), and how a law and keyed noise become tokens. All methods are
pure: they take packed nodes (`PathState`) and return one result per node.
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
from forerun.sampling.winners import RoundNoise, first_largest, largest, point_mass, without_nan
from forerun.tree import DraftTree

__all__ = ["Children", "Draws", "HostChildren", "PathState", "RowSampling"]


class Draws:
    """The sampling state of a round: its sequences' parameters, and their noise.

    `num_ids` is the number of ids that the tokenizer has; ids above are padding and never sampled. `rejection` is for
    the verification modes `token` and `block`, in which drafters use separate noise. `level` is the level of a cascade;
    in these modes its levels share no noise. `kernels` speed up coupled sampling, with the same results.
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
        self.rounds = self.root_places  # identifies the round in the keys of noise
        self.constrained = any(row.constraint is not None for row in rows)
        self.on_host = is_cpu(self.device)
        self.kernels = kernels if self.on_host else None
        self._keys: dict[Purpose, Tensor] = {}

    @classmethod
    def of_tables(cls, transforms: Transforms, keys: Int[Tensor, " batch"]) -> Draws:
        """Coupled draws for rows that are given as tensors: the tables of their transforms, and `row_keys`."""
        draws = cls((), transforms.vocab, device=keys.device, num_ids=transforms.num_ids)
        draws.transforms, draws._keys[Purpose.COUPLED] = transforms, keys
        return draws

    @cached_property
    def tables(self) -> RoundTables:
        """The tables of the transforms, on the host."""
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
        """The draws of a round inside this one, for a cascade's lower members: these rows with `tails` committed.

        Coupled noise is the noise of the same positions. In rejection modes a round inside shares no noise with this
        round or with any other round.
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
        """The nodes of `tree` that the target reads, batch-major, then in node order."""
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
        """The states of new nodes: node i is `tokens[i]`, drawn after node `parents[i]` of `at`."""
        row, position, drawn = at.row[parents], at.position[parents], at.drawn[parents]
        end = position - self.root_positions[row] - 1
        drawn = torch.cat([drawn, torch.full_like(tokens, -1)[:, None]], dim=1)
        return PathState(row, drawn.scatter(1, end[:, None], tokens[:, None]), position + 1)

    def prepare_noise(self, depth: int) -> None:
        """Compute the noise for `depth` drafted tokens at once, which is faster than one by one; no-op with kernels."""
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
        softmax, since its bits do not depend on the other rows, unlike those of `exp`.
        """
        return self._probs(*self._transformed(logits, at), at)

    def draw(self, logits: Logits, at: PathState) -> Int[Tensor, " nodes"]:
        """The target's own token after each node: the argmax of transformed logits plus the position's noise.

        A function of logits, path, parameters, seed and position alone, so it is the token of plain decoding.
        Distributed exactly by the law (the Gumbel-max trick); greedy rows get no noise; ties go to the lowest id. -1 if
        there is no law: logits with NaN, or all -inf.
        """
        edited, filtered = self._transformed(logits, at)
        tokens = self._chosen(edited, filtered, at, Purpose.COUPLED)
        largest_logit = self._choose(at, lambda: edited.gather(1, tokens), lambda: filtered.gather(1, tokens))
        return torch.where(largest_logit > -math.inf, tokens, -1)[:, 0]  # NaN if the row has one: -1, too

    def scores(self, logits: Logits, at: PathState) -> Logits:
        """The scores whose argmax is `draw`: transformed logits, plus noise unless the row is greedy."""
        return self._scores(*self._transformed(logits, at), at, Purpose.COUPLED)

    def recover(self, law: Logits, at: PathState) -> Int[Tensor, " nodes"]:
        """Sample from each log-law (not necessarily normalised): recovered and bonus tokens of the rejection modes.

        -1 if there is no law, as in `draw`.
        """
        tokens = self._drawn(law, at, Purpose.RECOVER)
        return torch.where(law.gather(1, tokens) > -math.inf, tokens, -1)[:, 0]

    def coins(self, at: PathState, tokens: Int[Tensor, " nodes"]) -> Float[Tensor, " nodes"]:
        """A uniform number in (0, 1) for each node and the draft token that is verified after it."""
        return uniform(self._keys_at(at, Purpose.ACCEPT), tokens)

    def children(self, logits: Logits, at: PathState, width: int, *, survival: bool = True) -> Children:
        """A drafter's `width` draft tokens after each node, from the drafter's logits.

        Coupled: the largest logits plus noise, with the same noise that the target will use. Rejection modes: sampled
        without replacement from the drafter's law, with noise of this round alone. Greedy rows: the largest logits. Any
        logits are allowed, even NaN and infinity; tokens are in range or -1. Width 1 without `survival` is fastest.
        """
        edited, filtered = self._transformed(logits, at, drafting=True)
        law = self._probs(edited, filtered, at).nan_to_num(nan=0.0) if self.rejection else None
        purpose = Purpose.DRAFT if self.rejection else Purpose.COUPLED
        same = edited is filtered
        filtered = without_nan(filtered)
        edited = filtered if same else without_nan(edited)
        if width == 1 and not survival:
            tokens = self._chosen(edited, filtered, at, purpose)
            probability, possible = None, filtered.gather(1, tokens) > -math.inf
        else:
            scores = self._scores(edited, filtered, at, purpose)
            tokens = largest(scores, width)
            probability, possible = softmax(scores).gather(1, tokens), scores.gather(1, tokens) > -math.inf
            possible &= ~(tokens[:, :, None] == tokens[:, None]).tril(-1).any(2)  # ids repeat if all others are -inf
        if law is not None:
            greedy, q = self.transforms.greedy_nodes(at), law.gather(1, tokens)
            probability = None if probability is None else torch.where(greedy, probability, q)
            possible &= greedy | (q > 0)  # a token with q = 0 cannot have been sampled from q
        probability = None if probability is None else torch.where(possible, probability, 0.0)
        return Children(torch.where(possible, tokens, -1), probability, law)

    def offer(
        self, logits: Logits, rows: Sequence[int], paths: Sequence[Sequence[int]], width: int, *, survival: bool = True
    ) -> HostChildren:
        """`children` on the host: the draft tokens after `paths[i]`, the draft tokens so far of row `rows[i]`.

        The tokens are those of `children`; with compiled kernels survival agrees up to rounding only.
        """
        laws = self._laws_for(logits)
        if self.kernels is None or laws is None or self.rejection:
            children = self.children(logits, self._states_after(rows, paths), width, survival=survival)
            survivals = None if children.survival is None else children.survival.tolist()
            return HostChildren(children.tokens.tolist(), survivals, children.law)
        masks, contiguous = self._masks(rows, paths, logits), logits.float().contiguous()
        if survival or width > 1:
            offered = self.kernels.offer(contiguous, rows, paths, laws, width, masks)
            drawn, survivals, undecided = offered.tokens, offered.survival, offered.undecided
        else:  # sampling one token is fastest
            drawn = [[token] for token in self.kernels.choose(contiguous, rows, paths, laws, masks)]
            survivals, undecided = None, [i for i, (token,) in enumerate(drawn) if token < 0]
        if undecided:
            draws, at = self._draws_of([rows[i] for i in undecided], [paths[i] for i in undecided])
            children = draws.children(logits[undecided], at, width, survival=survivals is not None)
            for place, i in enumerate(undecided):
                drawn[i] = children.tokens[place].tolist()
                if survivals is not None and children.survival is not None:
                    survivals[i] = children.survival[place].tolist()
        return HostChildren(drawn, survivals)

    def verdict(
        self, tree: DraftTree, logits: Logits, drawn: array[int] | None = None
    ) -> Int[Tensor, "batch verdict"] | None:
        """The packed verdict of `follow` with the tokens of `draw`, by compiled kernels; None if they cannot do it.

        Only nodes on accepted paths are sampled. `drawn`, if given, has the known samples of some nodes and UNKNOWN for
        the others; it is changed.
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
        """Sample with torch the nodes that are UNDECIDED in `drawn`, at most one per row."""
        nodes = [i for i, token in enumerate(drawn) if token == UNDECIDED]
        paths = tree.path_tokens().flatten(0, 1)[nodes].tolist()
        rows = [node // tree.tokens.shape[1] for node in nodes]
        draws, at = self._draws_of(rows, [[token for token in path if token >= 0] for path in paths])
        place = (tree.valid.flatten().long().cumsum(0) - 1)[nodes]
        for node, token in zip(nodes, draws.draw(logits[place], at).tolist(), strict=True):
            drawn[node] = token

    def _draws_of(self, rows: Sequence[int], paths: Sequence[Sequence[int]]) -> tuple[Draws, PathState]:
        """Draws of these rows alone, which saves the transforms of the others, and their states after `paths`."""
        kept = sorted(set(rows))
        texts = [self.rows[row] for row in kept]
        draws = Draws(texts, self.vocab, rejection=self.rejection, num_ids=self.num_ids, level=self.level)
        draws.rounds = [self.rounds[row] for row in kept]
        return draws, draws._states_after([kept.index(row) for row in rows], paths)

    def _states_after(self, rows: Sequence[int], paths: Sequence[Sequence[int]]) -> PathState:
        """The states after the draft tokens `paths[i]` of row `rows[i]`."""
        row, known = self._column(rows), list(zip(rows, paths, strict=True))
        longest = max(map(len, paths), default=0)
        drawn = [[*path, *[-1] * (longest - len(path))] for path in paths]
        at = [self.root_places[i] + 1 + len(path) for i, path in zip(rows, paths, strict=True)]
        state = upload(drawn, torch.int64, self.device).view(len(rows), longest)
        return PathState(row, state, self._column(at), known)

    def _masks(
        self, rows: Sequence[int], paths: Sequence[Sequence[int]], logits: Logits
    ) -> Int[Tensor, "nodes words"] | None:
        """The grammars' token masks after these draft tokens; None if no sequence has a grammar."""
        if not self.constrained:
            return None
        return masks_of(self.rows, list(zip(rows, paths, strict=True)), logits.shape[1])

    def _laws_for(self, logits: Logits) -> RowLaws | None:
        """`row_laws`; None for float64 logits, since the kernels compute in float32."""
        return None if logits.dtype == torch.float64 else self.row_laws

    @cached_property
    def row_laws(self) -> RowLaws | None:
        """The rows' sampling parameters for coupled sampling by compiled kernels; None without kernels."""
        if self.kernels is None:
            return None
        return row_laws(self.rows, self.host_keys(Purpose.COUPLED), self.num_ids, self.kernels.slack)

    def _transformed(self, logits: Logits, at: PathState, *, drafting: bool = False) -> tuple[Logits, Logits]:
        """The logits for greedy rows, and those for sampled rows: before and after temperature and filters."""
        edited = self.transforms.edit(logits, at, drafting=drafting)
        return edited, edited if self.transforms.all_greedy else self.transforms.filter(edited, at)

    def _probs(self, edited: Logits, filtered: Logits, at: PathState) -> Logits:
        return self._choose(at, lambda: point_mass(edited), lambda: softmax(filtered))

    def _choose(self, at: PathState, greedy: Callable[[], Tensor], sampled: Callable[[], Tensor]) -> Tensor:
        """The value for greedy or sampled rows, by each node's row; a value that no row needs is not computed."""
        if not self.transforms.steps.greedy:
            return sampled()
        if self.transforms.all_greedy:
            return greedy()
        return torch.where(self.transforms.greedy_nodes(at), greedy(), sampled())

    def _scores(self, edited: Logits, filtered: Logits, at: PathState, purpose: Purpose) -> Logits:
        """The scores whose argmax is drawn: with the purpose's noise unless the row is greedy."""
        return self._choose(at, lambda: edited, lambda: filtered + self._noise.rows(self._keys_at(at, purpose)))

    def _chosen(self, edited: Logits, filtered: Logits, at: PathState, purpose: Purpose) -> Int[Tensor, "nodes 1"]:
        """The argmax of `_scores`, the first among equals."""
        return self._choose(at, lambda: first_largest(edited), lambda: self._drawn(filtered, at, purpose))

    def _drawn(self, logits: Logits, at: PathState, purpose: Purpose) -> Int[Tensor, "nodes 1"]:
        """The argmax of logits plus noise, the first among equals, without computing noise that cannot matter."""
        return self._noise.winners(logits, self._keys_at(at, purpose))

    def _keys_at(self, at: PathState, purpose: Purpose) -> Int[Tensor, " nodes"]:
        """The key of each node's noise: its row's key with the node's position absorbed."""
        return absorb(self.row_keys(purpose)[at.row], at.position)

    def row_keys(self, purpose: Purpose) -> Int[Tensor, " batch"]:
        """Each row's key of (seed, sample, purpose, level, round), into which positions are absorbed."""
        if purpose not in self._keys:
            self._keys[purpose] = self._column([signed(key) for key in self.host_keys(purpose)])
        return self._keys[purpose]

    def host_keys(self, purpose: Purpose) -> list[int]:
        """`row_keys` on the host, as unsigned 64-bit integers."""
        return [self._row_key(row, purpose, round_) for row, round_ in zip(self.rows, self.rounds, strict=True)]

    def _row_key(self, row: RowSampling, purpose: Purpose, round_: int) -> int:
        """Coupled noise is keyed by position alone, all other noise by position, round and level of a cascade.

        A block verdict depends on later draft tokens, so the noise of a position that is drafted again would not be
        fresh without the round in the key. A round is identified by its root's position, and a round inside another
        also by those of the outer rounds. Tokens that a cascade's middle model samples are draft tokens, too.
        """
        if purpose is Purpose.COUPLED and not (self.rejection and self.level):
            return coupled_key(row.seed, row.sample)
        return mix((row.seed, row.sample, purpose, self.level, round_))

    def _column(self, values: Sequence[int]) -> Int[Tensor, " batch"]:
        return upload(values, torch.int64, self.device)


def row_laws(rows: Sequence[RowSampling], keys: Sequence[int], num_ids: int, slack: float) -> RowLaws:
    """The sampling parameters of these rows for compiled kernels; `keys` are those of `Draws.host_keys`."""
    kept: list[object] = []
    laws = [row_law(row, key, kept) for row, key in zip(rows, keys, strict=True)]
    constrained = any(row.constraint is not None for row in rows)
    return RowLaws((CRowLaw * len(laws))(*laws), kept, num_ids, slack, constrained)


def row_law(row: RowSampling, key: int, kept: list[object]) -> CRowLaw:
    """The sampling parameters of one row for compiled kernels. The memory that they point to is added to `kept`."""
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
