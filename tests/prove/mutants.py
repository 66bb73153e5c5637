"""Engines with a planted fault: what `prove` must reject.

Each plants itself in the functions that serve, through pytest's MonkeyPatch, and is gone with it. The first kind
changes the law that rejection verification emits, the second kind the tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun.cache.paged import PagedCache
from forerun.config import Verification
from forerun.engine import engine as engine_round
from forerun.engine.target_pass import TargetPass
from forerun.kernels.sampling import SamplingKernels
from forerun.models.batch import TokenBatch
from forerun.models.runner import Read, Runner
from forerun.sampling.draws import Draws, RowSampling
from forerun.sampling.noise import Purpose, mix
from forerun.tree import DraftTree
from forerun.verify import verify as judging
from forerun.verify.rules import AcceptLaw, Verdict, follow
from forerun.verify.sanitize import sanitize
from forerun.verify.verify import verify
from law.wrong_rules import first_failure_stops, joint_weights, token_residual
from prove.tables import Pair, Spoil, dropping, flattened

Patch = pytest.MonkeyPatch


def block_as(law: Callable[[DraftTree, Tensor, Tensor], AcceptLaw]) -> Callable[[Patch], None]:
    """Block verification with another distribution."""
    return lambda patch: patch.setattr(judging, "block_law", law)


def one_noise(purpose: Purpose) -> Callable[[Patch], None]:
    """This purpose reuses the noise that the draft was sampled with."""
    key = Draws._row_key

    def mutant(draws: Draws, row: RowSampling, wanted: Purpose, root: int) -> int:
        return key(draws, row, Purpose.DRAFT if wanted is purpose else wanted, root)

    return lambda patch: patch.setattr(Draws, "_row_key", mutant)


def position_only(patch: Patch) -> None:
    """The noise of a position that is drafted again is reused."""

    def mutant(draws: Draws, row: RowSampling, purpose: Purpose, root: int) -> int:
        return mix(
            (row.seed, row.sample, purpose, 0, 0) if purpose is Purpose.COUPLED else (row.seed, row.sample, purpose)
        )

    patch.setattr(Draws, "_row_key", mutant)


def drafts(spoil: Spoil) -> Callable[[Patch], None]:
    """Every draft is changed before the target reads it."""
    return lambda patch: patch.setattr(engine_round, "sanitize", lambda *given: spoil(sanitize(*given)))


@dataclass(frozen=True)
class LawMutant:
    """A fault in the distribution of `rule`, and a table model on which so many texts show it."""

    rule: Verification
    plant: Callable[[Patch], None]
    pair: Pair
    num_texts: int
    depth: int = 3
    spoil: Spoil = lambda tree: tree


def nothing(patch: Patch) -> None:
    """For mutants that spoil drafts instead."""


FOUR = Pair.opposed(0.45, 0.35, 0.15, 0.05)
THREE = Pair.opposed(0.5, 0.3, 0.2)
RANDOM = Pair.random(0)
LAW_MUTANTS = {
    "token residual in block": LawMutant("block", block_as(token_residual), FOUR, 12_000, depth=2),
    "first failure stops block": LawMutant("block", block_as(first_failure_stops), RANDOM, 1500),
    "joint ratio in block": LawMutant("block", joint_weights, THREE, 2000),
    "recovery reuses the draft's noise": LawMutant("token", one_noise(Purpose.RECOVER), FOUR, 8000, depth=1),
    "coins reuse the draft's noise": LawMutant("token", one_noise(Purpose.ACCEPT), RANDOM, 1500),
    "position-only noise in block": LawMutant("block", position_only, THREE, 10_000, depth=2),
    "unlikely draft tokens dropped, token": LawMutant("token", nothing, RANDOM, 1500, spoil=dropping(0.15)),
    "unlikely draft tokens dropped, block": LawMutant("block", nothing, RANDOM, 1500, spoil=dropping(0.15)),
    "q mis-declared, token": LawMutant("token", nothing, THREE, 2000, spoil=flattened(0.3)),
    "q mis-declared, block": LawMutant("block", nothing, THREE, 2000, spoil=flattened(0.3)),
}


def wrong_token_at(position: int) -> Callable[[Patch], None]:
    """In the round that emits the text's token `position` after draft tokens, another token ends the round there."""

    def mutant(tree: DraftTree, logits: Tensor, draws: Draws, rule: Verification, *judge: Any) -> Verdict:
        verdict = verify(tree, logits, draws, rule, *judge)
        place = position - draws.root_positions - 1
        hit = (place >= 0) & (place <= verdict.length) & (tree.valid.sum(1) > 1)
        length = torch.where(hit, place, verdict.length)
        column = torch.arange(verdict.path.shape[1])
        following = verdict.path.gather(1, (length + 1).clamp_max(len(column) - 1)[:, None])
        accepted = tree.tokens.gather(1, following.clamp_min(0))[:, 0]
        right = torch.where(length < verdict.length, accepted, verdict.next_token)
        path = torch.where(column <= length[:, None], verdict.path, -1)
        return Verdict.of(path, length, torch.where(hit, (right + 1) % logits.shape[1], verdict.next_token))

    return lambda patch: patch.setattr(engine_round, "verify", mutant)


def unseen_acceptance(patch: Patch) -> None:
    """The first draft token of every fifth round is accepted whatever the target drew."""

    def mutant(tree: DraftTree, drawn: Tensor) -> Verdict:
        if tree.tokens.shape[1] > 1:
            blind = (tree.tokens.sum(1) % 5 == 0) & (tree.parents[:, 1] == 0)
            drawn = drawn.clone()
            drawn[:, 0] = torch.where(blind, tree.tokens[:, 1], drawn[:, 0])
        return follow(tree, drawn)

    def compiled_mutant(kernels: SamplingKernels, tokens: Tensor, parents: Tensor, *given: Any) -> Tensor | None:
        """The same where compiled kernels verify: the token drawn at the root is replaced."""
        (*_, drawn, _masks), columns = given, tokens.shape[1]
        for b, (row, above) in enumerate(zip(tokens.tolist(), parents.tolist(), strict=True)):
            if len(row) > 1 and sum(row) % 5 == 0 and above[1] == 0:
                drawn[b * columns] = row[1]
        return compiled(kernels, tokens, parents, *given)

    compiled = SamplingKernels.judge
    patch.setattr(judging, "follow", mutant)
    patch.setattr(SamplingKernels, "judge", compiled_mutant)


def skipped_row(patch: Patch) -> None:
    """A row of the pass is skipped: every draft token is verified by the logits of the node before it."""
    true = TargetPass.node_logits

    def mutant(reading: TargetPass) -> Tensor:
        logits = list(true(reading).split([row.num_nodes for row in reading.rows]))
        return torch.cat([torch.cat([rows[:1], rows[:-1]]) if len(rows) > 1 else rows for rows in logits])

    patch.setattr(TargetPass, "node_logits", mutant)


def stale_row(patch: Patch) -> None:
    """The last draft token on an accepted path of a tree is not copied to its place in the cache."""
    true = PagedCache.gather_slots

    def mutant(cache: PagedCache, sources: Sequence[int], targets: Sequence[int]) -> None:
        if len(sources) > 1:
            true(cache, sources[:-1], targets[:-1])

    patch.setattr(PagedCache, "gather_slots", mutant)


def wrong_position(patch: Patch) -> None:
    """The nodes of a tree get the positions of their slots instead of their depths."""
    true = Runner.pack

    def mutant(runner: Runner, reads: Sequence[Read]) -> TokenBatch:
        batch, first = true(runner, reads), 0
        positions = batch.positions.clone()
        for read in reads:
            if read.parents is not None:
                count = len(read.tokens)
                positions[first : first + count] = positions[first] + torch.arange(count)
            first += len(read.tokens)
        limit = runner.decoder.config.max_positions - 1
        return replace(batch, positions=positions.clamp_max(limit))

    patch.setattr(Runner, "pack", mutant)


TOKEN_MUTANTS: dict[str, Callable[[Patch], None]] = {
    "a wrong token": wrong_token_at(9),
    "a draft token accepted unseen": unseen_acceptance,
    "a skipped verify row": skipped_row,
    "a stale cache row": stale_row,
    "a wrong position": wrong_position,
}


def planted(name: str, patch: Patch) -> None:
    """Plant a mutant of either kind in the engine."""
    if name in TOKEN_MUTANTS:
        TOKEN_MUTANTS[name](patch)
        return
    mutant = LAW_MUTANTS[name]
    mutant.plant(patch)
    drafts(mutant.spoil)(patch)
