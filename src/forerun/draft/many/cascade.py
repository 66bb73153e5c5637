"""A cascade: a drafter whose draft tokens a better one (the judge) verifies before the target sees them.

A cascade runs inner rounds inside a round of the target: the lower member drafts, the judge reads the draft in one
pass, and `verify` returns the tokens that the judge itself samples, until the chain has the depth of its budget. The
target's rounds use the same `verify`. In a cascade of three or more members the lower member is itself a cascade.

The tokens are sampled by the judge, so the chain has the judge's distribution, whichever member drafted it:

- Coupled mode: `verify` returns what the judge samples under the round's noise. The chain equals the one that the judge
  would have drafted alone, token for token; the lower member only changes the number of passes.
- Rejection modes: let m be the judge's distribution. An inner round emits a string Z, of accepted, recovered and bonus
  tokens, with P(Z_j = v | Z_<j = z, |Z| >= j) = m(v | z). Whether another inner round follows depends on numbers of
  tokens and on free memory, not on the values of the last tokens, so the concatenated strings have this property too.
  The chain is their first `depth` tokens: |Z| >= j holds for every j <= depth, whatever was sampled, so the chain is
  distributed as `depth` tokens sampled from m one after the other, and q = m at every place. This needs fresh noise: a
  verdict of the target depends on tokens sampled inside an earlier round, maybe after the same root. So the noise of an
  inner round is keyed by the roots of all rounds that contain it (`Draws.within`).

The number of tokens that the lower member drafts at a time (the length) changes the number of passes but not the
distribution, and in coupled mode not even the tokens. It is the length with the least time per token of the judge, from
the measured times and acceptance of earlier inner rounds (`economy.py`). That time is all that the next level sees of
this one, so the best length at every level makes the entire cascade as fast as lengths can. Length 0 means that the
judge drafts alone, in one call.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from forerun.annotations import ProgressCallback
from forerun.device import upload_tensor
from forerun.draft.base import NO_DRAFT, Budget, ChainToJudge, Committed, Draft, Drafter, Judge, Outlook, adoptable
from forerun.draft.plan import (
    BuildJudge,
    CacheTokens,
    DraftContext,
    DraftPlan,
    PlanMember,
    joined_plans,
    member_plans,
    refuse,
)
from forerun.draft.spec import DraftSpec
from forerun.economy import OTHERS_WEIGHT, Acceptance, LinearCost, best_depth
from forerun.models.runner import Runner
from forerun.sampling.draws import Draws
from forerun.tree import DraftLaw, DraftTree
from forerun.verify.sanitize import sanitize
from forerun.verify.verify import verify

ORDER = "name the cheapest first, then models from small to large, as in cascade[ngram,model:SMALL,model:MIDDLE]"
FIRST_LENGTH = 4  # draft tokens of an inner round before any was measured
BEHIND = 16  # unread tokens of a sequence above which rounds are not timed: prefill would dominate the time


@dataclass(frozen=True, slots=True)
class RoundTiming:
    """The times of an inner round: drafting chains of up to `num_drafted` tokens, and the judge's pass."""

    num_drafted: int
    draft_s: float
    num_tokens: int  # in the judge's pass, of all sequences
    pass_s: float


@dataclass(slots=True)
class MeasuredLengths:
    """Finds the best draft length: acceptance of each sequence, with that of all as prior, and the times of all.

    Counts lose weight with every round, also with rounds that add no counts. So a length that was abandoned is tried
    again after some time.
    """

    overall: Acceptance = field(default_factory=Acceptance)
    by_sequence: dict[int, Acceptance] = field(default_factory=dict)
    drafts: LinearCost = field(default_factory=lambda: LinearCost(flat=False))  # of the lower member, by length
    passes: LinearCost = field(default_factory=LinearCost)  # of the judge, by tokens of all sequences
    alone: LinearCost = field(default_factory=LinearCost)  # of a token per sequence by the judge alone, by batch size

    def best(self, seq_ids: Sequence[int], most: Sequence[int]) -> Sequence[int]:
        """How many tokens to draft for each of these sequences, at most `most[i]`.

        It is the length with the least time per token, if all sequences drafted as many.
        """
        if self.drafts.weight == 0:
            return [min(FIRST_LENGTH, each) for each in most]
        batch, prior = len(seq_ids), self.overall.overall()

        def round_s(length: int) -> float:
            if length == 0 and self.alone.weight > 0:
                return self.alone.expect(batch)
            return self.passes.expect(batch * (length + 1)) + (self.drafts.expect(length) if length else 0.0)

        rates = [self.by_sequence.get(seq_id, Acceptance()).rates(prior, OTHERS_WEIGHT) for seq_id in seq_ids]
        return [best_depth(by_depth[:each], round_s) for by_depth, each in zip(rates, most, strict=True)]

    def count(self, seq_ids: Sequence[int], runs: Sequence[tuple[int, int]]) -> None:
        """Count the verdicts of a round: for each sequence (number of draft tokens, number of accepted ones)."""
        self.overall.count(runs)
        for seq_id, run in zip(seq_ids, runs, strict=True):
            self.by_sequence.setdefault(seq_id, Acceptance()).count([run])

    def forget(self, seq_ids: Sequence[int]) -> None:
        """Drop the counts of these sequences."""
        for seq_id in seq_ids:
            self.by_sequence.pop(seq_id, None)

    def time(self, timing: RoundTiming) -> None:
        """Record the times of a round."""
        self.passes.record(timing.num_tokens, timing.pass_s)
        if timing.num_drafted:
            self.drafts.record(timing.num_drafted, timing.draft_s)

    def record_alone(self, seq_ids: Sequence[int], depth: int, draft_s: float | None) -> None:
        """Record chains of `depth` tokens by the judge alone, and their time, unless it is None because of prefill.

        Each token counts as a round without draft tokens.
        """
        if draft_s is not None:
            self.alone.record(len(seq_ids), draft_s / depth)
        for _ in range(depth):
            self.count(seq_ids, [(0, 0)] * len(seq_ids))


@dataclass(slots=True)
class Chain:
    """One sequence's chain while it grows.

    `after_text` are the tokens after the observed text: the root, the tail, and the emitted tokens. `laws` are the
    distributions that the emitted tokens were sampled from, in rejection modes.
    """

    row: int
    seq_id: int
    after_text: list[int]
    left: int  # tokens still to be drafted
    emitted: list[int] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)

    def extend(self, tokens: Sequence[int]) -> None:
        self.emitted += tokens
        self.after_text += tokens
        self.left -= len(tokens)


class CascadeDrafter:
    """Drafts the tokens of `judge`, which verifies the drafts of `lower` instead of sampling token by token.

    Drafts are chains without survival estimates: the width and the minimum of a budget are ignored. If the lower member
    drafts nothing the judge drafts alone. If the judge's cache or context is full the lower member drafts alone, and
    its tokens keep its own distributions.

    A lower member that reads the target's states can draft only once per round, directly after the target's text. The
    judge verifies that draft and continues alone.
    """

    names: tuple[str, ...] = ("cascade",)

    def __init__(self, lower: Drafter, judge: Judge, lengths: MeasuredLengths | None = None) -> None:
        assert not judge.taps, "a judge cannot have taps: tokens that the target has not read have no states"
        self.taps = lower.taps
        self.lower = lower
        self.judge = judge
        self.lengths = lengths or MeasuredLengths()

    def observe(self, committed: Committed) -> None:
        self.lower.observe(committed)
        self.judge.observe(committed)

    def adoptable(self, text: Sequence[int], most: int, salt: Hashable) -> int:
        """That of the lower member, because a judge needs no states."""
        return adoptable(self.lower, text, most, salt)

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        """A chain for every sequence, as deep as its budget and the judge's cache and context allow."""
        chains, pass_s = self.start_chains(draws, budgets, tail), 0.0
        timed = max(self.outlook([chain.seq_id for chain in chains]).unread, default=0) <= BEHIND
        if not any(self.next_lengths(chains)):
            pass_s += self.judge_alone(draws, [chain.row for chain in chains], chains, tail, timed)
        while growing := [chain for chain in chains if chain.left > 0]:
            pass_s += self.round(draws, growing, timed)
            if self.taps and (growing := [chain for chain in growing if chain.left > 0]):
                rows = range(len(growing))
                pass_s += self.judge_alone(inner_draws(draws, growing), rows, growing, tail_of(growing), timed)
        judged = {chain.row for chain in chains if chain.emitted}
        left = [NO_DRAFT if row in judged else Budget(budget.depth) for row, budget in enumerate(budgets)]
        unjudged = self.lower_draft(draws, left, tail)
        return Draft(joined_tree(draws, chains, unjudged.tree), pass_s=pass_s + unjudged.pass_s)

    def start_chains(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None) -> list[Chain]:
        """Empty chains, with their depths, for the sequences that the judge can draft."""
        tails = {} if tail is None else {seq_id: [*tokens, root] for seq_id, tokens, root in tail.rows()}
        limits = self.judge.outlook(draws.seq_ids).limit
        chains = []
        for row, (sampling, budget, limit) in enumerate(zip(draws.rows, budgets, limits, strict=True)):
            after_text = tails.get(sampling.seq_id, [sampling.tokens[-1]])
            depth = min(budget.depth, limit + 1 - len(after_text))
            if depth > 0:
                chains.append(Chain(row, sampling.seq_id, after_text, depth))
        return chains

    def next_lengths(self, chains: Sequence[Chain]) -> Sequence[int]:
        """How many tokens the lower member drafts next for each chain; the judge adds the last token of a chain."""
        return self.lengths.best([chain.seq_id for chain in chains], [chain.left - 1 for chain in chains])

    def judge_alone(
        self, draws: Draws, rows: Sequence[int], chains: Sequence[Chain], tail: Committed | None, timed: bool
    ) -> float:
        """Complete the chains, of these rows of `draws`, by one call of the judge; returns the time of its passes."""
        depths = dict(zip(rows, (chain.left for chain in chains), strict=True))
        if not depths:
            return 0.0
        budgets = [Budget(depths[row]) if row in depths else NO_DRAFT for row in range(len(draws.rows))]
        started_s = time.perf_counter()
        draft = self.judge.propose(draws, budgets, tail)
        draft_s = time.perf_counter() - started_s
        self.lengths.record_alone([chain.seq_id for chain in chains], max(depths.values()), draft_s if timed else None)
        draft_tokens, law = chains_of(draft.tree), draft.tree.q
        for row, chain in zip(rows, chains, strict=True):
            chain.left = 0
            chain.emitted += draft_tokens[row]
            if law is not None:
                chain.laws.append(law.probs[law.row[row, : len(draft_tokens[row])].clamp_min(0)])
        return draft.pass_s

    def round(self, draws: Draws, chains: Sequence[Chain], timed: bool) -> float:
        """One inner round; a chain ends if the judge has no room for it. Returns the time of the passes."""
        budgets = [Budget(length) for length in self.next_lengths(chains)]
        started_s = time.perf_counter()
        draft = self.lower_draft(inner_draws(draws, chains), budgets, tail_of(chains))
        draft_tokens = chains_of(draft.tree)
        drafted_s = time.perf_counter()
        pairs = zip(chains, draft_tokens, strict=True)
        judged = self.judge.judge([ChainToJudge(chain.seq_id, chain.after_text, tokens) for chain, tokens in pairs])
        for i in set(range(len(chains))).difference(judged.indices):
            chains[i].left = 0
        if judged.indices:
            tree = draft.tree if len(judged.indices) == len(chains) else draft.tree.select(judged.indices)
            self.emit(draws, [chains[i] for i in judged.indices], tree, judged.logits)
        if timed:
            deepest, num_tokens = max(b.depth for b in budgets), sum(1 + len(tokens) for tokens in draft_tokens)
            self.lengths.time(RoundTiming(deepest, drafted_s - started_s, num_tokens, time.perf_counter() - drafted_s))
        return draft.pass_s + judged.pass_s

    def lower_draft(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None) -> Draft:
        """The lower member's draft as valid chains; empty chains if no budget has a depth."""
        if not any(budget.depth for budget in budgets):
            return Draft(DraftTree.bare(draws.roots_tokens))
        draft = Draft.of(self.lower, self.lower.propose(draws, budgets, None if self.taps else tail))
        roots = draws.roots_tokens.to(draft.tree.tokens.device)
        tree = sanitize(draft.tree, roots, budgets, draws.vocab, draws.kernels)
        return replace(draft, tree=replace(tree, known=tree.fetched()).to(draws.device))

    def emit(self, draws: Draws, chains: Sequence[Chain], tree: DraftTree, logits: Tensor) -> None:
        """Verify the judged chains, and append the accepted tokens and the judge's next token to each chain."""
        inner = inner_draws(draws, chains)
        verdict = verify(tree, logits, inner, "block" if inner.rejection else "coupled")
        laws = inner.probs(logits, inner.nodes(tree)) if inner.rejection else None
        first, runs = 0, []
        for chain, tokens, (length, next_token, *_) in zip(
            chains, chains_of(tree), verdict.packed.tolist(), strict=True
        ):
            emitted = [token for token in (*tokens[:length], next_token) if token >= 0][: chain.left]
            if next_token < 0:  # no token is possible there, so the chain ends
                chain.left = len(emitted)
            if laws is not None:
                chain.laws.append(laws[first : first + len(emitted)])
            chain.extend(emitted)
            runs.append((len(tokens), length))
            first += 1 + len(tokens)
        self.lengths.count([chain.seq_id for chain in chains], runs)

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        """The judge's limit and the larger number of unread tokens; the lower member's where the judge has no room."""
        lower, judge = self.lower.outlook(seq_ids), self.judge.outlook(seq_ids)
        both = zip(lower.unread, judge.unread, judge.limit, strict=True)
        unread = [max(below, above) if room else below for below, above, room in both]
        limit = [room or below for room, below in zip(judge.limit, lower.limit, strict=True)]
        return Outlook(unread, limit)

    def forget(self, seq_ids: Sequence[int]) -> None:
        self.lengths.forget(seq_ids)
        self.lower.forget(seq_ids)
        self.judge.forget(seq_ids)


def inner_draws(draws: Draws, chains: Sequence[Chain]) -> Draws:
    """The draws of the next inner round of these sequences."""
    return draws.within([chain.row for chain in chains], [chain.emitted for chain in chains])


def tail_of(chains: Sequence[Chain]) -> Committed:
    """The tokens after the observed texts, as the `tail` of a `propose`."""
    tokens: list[int] = []
    offsets = [0]
    for chain in chains:
        tokens += chain.after_text[:-1]
        offsets.append(len(tokens))
    return Committed([chain.seq_id for chain in chains], tokens, offsets, [chain.after_text[-1] for chain in chains])


def chains_of(tree: DraftTree) -> list[Sequence[int]]:
    """The draft tokens of each row on the host; the tree must have chains only."""
    return [chain.tokens[1:] for chain in tree.fetched()]


def joined_tree(draws: Draws, chains: Sequence[Chain], unjudged: DraftTree) -> DraftTree:
    """The tree of the judge's chains, and of the `unjudged` chains in other rows, with their distributions.

    Greedy sequences have none, because their tokens are not sampled.
    """
    texts = [[row.tokens[-1], *tokens] for row, tokens in zip(draws.rows, chains_of(unjudged), strict=True)]
    for chain in chains:
        texts[chain.row] += chain.emitted
    tree = DraftTree.of_texts(texts)
    laws, law_of = [law for chain in chains for law in chain.laws], unjudged.q
    if not laws and law_of is None:
        return tree
    rows, first, greedy = torch.full_like(tree.tokens, -1), 0, draws.greedy
    for chain in chains:
        if not greedy[chain.row]:
            rows[chain.row, : len(chain.emitted)] = torch.arange(first, first + len(chain.emitted))
        first += len(chain.emitted)
    if law_of is not None:
        law_rows = law_of.row[:, : rows.shape[1]].to(rows.device)
        part = rows[:, : law_rows.shape[1]]
        part.copy_(torch.where(law_rows >= 0, first + law_rows, part))
        laws.append(law_of.dense(draws.vocab))
    return replace(tree.to(draws.device), q=DraftLaw(upload_tensor(rows, draws.device), torch.cat(laws)))


def plan_cascade(spec: DraftSpec, context: DraftContext, plan: PlanMember) -> DraftPlan:
    """`cascade[A,B,...]`: each drafter verifies the drafts of the one before it; the cheapest comes first."""
    if len(spec.members) < 2:
        refuse(spec, f"a cascade has two members or more: {ORDER}")
    if spec.members[0].name == "mix":
        refuse(spec, "a mix cannot be a member, as only rounds of the target choose: put the cascade into the mix")
    plans, judges = member_plans(spec, context, plan), list[BuildJudge]()
    for member, member_plan in zip(spec.members[1:], plans[1:], strict=True):
        if member_plan.build_judge is None:
            refuse(
                spec,
                f"{str(member)!r} cannot verify the drafts of the drafter before it; only models with the target's "
                f"tokenizer can: {ORDER}",
            )
        judges.append(member_plan.build_judge)

    def build(cache_tokens: CacheTokens, progress: ProgressCallback | None, target: Runner) -> Drafter | None:
        lower = plans[0].build(cache_tokens, progress, target)
        for build_judge in judges:
            assert lower is not None, "a member of a cascade is never None"
            lower = CascadeDrafter(lower, build_judge(cache_tokens, progress, target))
        return lower

    return joined_plans(plans, build)
