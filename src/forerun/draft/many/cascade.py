"""A cascade: a drafter whose draft tokens a better one (the judge) verifies before the target sees them.

This module runs rounds inside a round: the lower member drafts, the judge reads the draft in one pass, `verify` gives
the tokens that the judge itself would have sampled, and so on until the chain is as deep as its budget. It is the same
`verify` that judges for the target. Three or more members are a cascade whose lower member is one.

What is emitted is the judge's own text, so the chain carries the judge's law, whoever drafted it:

- Coupled: `verify` gives what the judge itself samples under the round's noise. The chain is, token for token, the one
  that the judge would have drafted alone; the lower member decides how many passes that takes, and nothing else.
- Rejection modes: one inner round emits a string Z with P(Z_j = v | Z_<j = z, |Z| >= j) = m(v | z), m being the judge's
  law, be the token accepted, recovered or bonus. Whether another round follows is settled when one is over, by numbers
  of tokens and by room, so the strings joined have the property too. They are joined until there are `depth` tokens;
  the surplus is dropped by its place and not for what it is: |Z| >= j holds for every j <= depth, whatever was drawn,
  so what is left is distributed as `depth` tokens drawn from m one after the other. Hence q = m at every place. Noise
  must be fresh for that: an inner round's is keyed by the roots of all rounds it lies in (`Draws.within`), as a verdict
  of the target has looked at what was drawn inside an earlier round, behind the same root perhaps.

How many tokens the lower member drafts at a time changes the number of passes, not the law; under coupled noise not a
token. It is the number at which a token of the judge takes the least time, by the measured costs and gains of its
rounds (`economy.py`). That time is all that the level above sees of this one, so if every level keeps to it, the
cascade as a whole is as fast as lengths can make it. The judge may also draft alone, in one call: length 0 stands for
that.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from forerun.annotations import ProgressCallback
from forerun.device import upload_tensor
from forerun.draft.base import NO_DRAFT, Budget, Committed, Draft, Drafter, Judge, Outlook, Question, adoptable
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
FIRST = 4  # guesses at a time, before anything was measured
BEHIND = 16  # unread tokens of one sequence above which a round's time is that of its text


@dataclass(frozen=True, slots=True)
class RoundTiming:
    """The times of a round: drafting `num_guesses` tokens in a row, and the judge's pass over `num_tokens`."""

    num_guesses: int
    draft_s: float
    num_tokens: int
    pass_s: float


@dataclass(slots=True)
class MeasuredLengths:
    """The best draft length by measurement: acceptance by sequence, with that of all as prior, and times of all.

    Counts fade with every round, also where it adds nothing: what was given up is tried again in time.
    """

    together: Acceptance = field(default_factory=Acceptance)
    apart: dict[int, Acceptance] = field(default_factory=dict)
    drafts: LinearCost = field(default_factory=lambda: LinearCost(flat=False))  # by guesses in a row
    passes: LinearCost = field(default_factory=LinearCost)  # by tokens in all
    alone: LinearCost = field(default_factory=LinearCost)  # by batch: a token each

    def best(self, seq_ids: Sequence[int], most: Sequence[int]) -> Sequence[int]:
        """How many tokens to draft for each of these sequences, at most `most[i]`.

        The length with the least time per token, as if the others drafted as many.
        """
        if self.drafts.weight == 0:
            return [min(FIRST, each) for each in most]
        batch, belief = len(seq_ids), self.together.overall()

        def round_s(length: int) -> float:
            if length == 0 and self.alone.weight > 0:
                return self.alone.expect(batch)
            return self.passes.expect(batch * (length + 1)) + (self.drafts.expect(length) if length else 0.0)

        rates = [self.apart.get(seq_id, Acceptance()).rates(belief, OTHERS_WEIGHT) for seq_id in seq_ids]
        return [best_depth(by_depth[:each], round_s) for by_depth, each in zip(rates, most, strict=True)]

    def count(self, seq_ids: Sequence[int], runs: Sequence[tuple[int, int]]) -> None:
        """Learn from a round's verdicts: how many draft tokens each sequence had, and how many were accepted."""
        self.together.count(runs)
        for seq_id, run in zip(seq_ids, runs, strict=True):
            self.apart.setdefault(seq_id, Acceptance()).count([run])

    def forget(self, seq_ids: Sequence[int]) -> None:
        """Drop the counts of these sequences."""
        for seq_id in seq_ids:
            self.apart.pop(seq_id, None)

    def time(self, timing: RoundTiming) -> None:
        """Learn from a round's times: the cost of a pass by its tokens, and of drafting by its length."""
        self.passes.record(timing.num_tokens, timing.pass_s)
        if timing.num_guesses:
            self.drafts.record(timing.num_guesses, timing.draft_s)

    def went_alone(self, seq_ids: Sequence[int], depth: int, taken_s: float | None) -> None:
        """Learn the judge's time for chains of `depth` tokens alone; None: that time was not typical.

        Every token counts as a round without draft tokens.
        """
        if taken_s is not None:
            self.alone.record(len(seq_ids), taken_s / depth)
        for _ in range(depth):
            self.count(seq_ids, [(0, 0)] * len(seq_ids))


@dataclass(slots=True)
class Chain:
    """One sequence's chain while it grows.

    `late` is the text after the observed one: its root, then the tail, then emitted tokens. `laws` are those that the
    emitted tokens were sampled from; rejection modes only.
    """

    row: int
    seq_id: int
    late: list[int]
    left: int
    emitted: list[int] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)

    def extend(self, tokens: Sequence[int]) -> None:
        self.emitted += tokens
        self.late += tokens
        self.left -= len(tokens)


class CascadeDrafter:
    """Drafts the tokens of `judge`, which verifies the drafts of `lower` instead of sampling token by token.

    Chains only, whatever width a budget allows, and without survival: a minimum ends none of them. If the lower member
    drafts nothing the judge drafts alone. If the judge's cache or context is full the lower member drafts alone, as if
    there were no cascade: its draft tokens then have its own laws.

    A lower member that reads the target's states can draft after the target's text only: the judge verifies its draft
    once, and continues alone.
    """

    names: tuple[str, ...] = ("cascade",)

    def __init__(self, lower: Drafter, judge: Judge, lengths: MeasuredLengths | None = None) -> None:
        assert not judge.taps, "there are no features behind tokens that the target has not read"
        self.taps = lower.taps
        self.lower = lower
        self.judge = judge
        self.lengths = lengths or MeasuredLengths()

    def observe(self, news: Committed) -> None:
        self.lower.observe(news)
        self.judge.observe(news)

    def adoptable(self, text: Sequence[int], most: int, salt: Hashable) -> int:
        """The lower member's answer; a judge needs no states."""
        return adoptable(self.lower, text, most, salt)

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        """A chain for every sequence, as deep as its budget and the judge's cache and context allow."""
        chains, pass_s = self.begin(draws, budgets, tail), 0.0
        timed = max(self.outlook([chain.seq_id for chain in chains]).unread, default=0) <= BEHIND
        if not any(self.wanted(chains)):
            pass_s += self.go_alone(draws, [chain.row for chain in chains], chains, tail, timed)
        while going := [chain for chain in chains if chain.left > 0]:
            pass_s += self.round(draws, going, timed)
            if self.taps and (going := [chain for chain in going if chain.left > 0]):
                pass_s += self.go_alone(inside(draws, going), range(len(going)), going, tail_of(going), timed)
        judged = {chain.row for chain in chains if chain.emitted}
        left = [NO_DRAFT if row in judged else Budget(min(b.depth, b.nodes)) for row, b in enumerate(budgets)]
        unjudged = self.guess(draws, left, tail)
        return Draft(joined(draws, chains, unjudged.tree), pass_s=pass_s + unjudged.pass_s)

    def begin(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None) -> list[Chain]:
        """Empty chains for the sequences that are drafted, and their depths."""
        tails = {} if tail is None else {seq_id: [*tokens, root] for seq_id, tokens, root in tail.rows()}
        limits = self.judge.outlook(draws.seq_ids).limit
        chains = []
        for row, (sampling, budget, limit) in enumerate(zip(draws.rows, budgets, limits, strict=True)):
            late = tails.get(sampling.seq_id, [sampling.tokens[-1]])
            depth = min(budget.depth, budget.nodes, limit + 1 - len(late))
            if depth > 0:
                chains.append(Chain(row, sampling.seq_id, late, depth))
        return chains

    def wanted(self, chains: Sequence[Chain]) -> Sequence[int]:
        """How many tokens the judge will verify; the last token of a chain is its own."""
        return self.lengths.best([chain.seq_id for chain in chains], [chain.left - 1 for chain in chains])

    def go_alone(
        self, draws: Draws, rows: Sequence[int], chains: Sequence[Chain], tail: Committed | None, timed: bool
    ) -> float:
        """The chains, of these rows of `draws`, that the judge generates alone in as few calls as it can: lower drafts
        cost more time, or there are none.
        """
        depths = dict(zip(rows, (chain.left for chain in chains), strict=True))
        if not depths:
            return 0.0
        budgets = [Budget(depths[row]) if row in depths else NO_DRAFT for row in range(len(draws.rows))]
        started_s = time.perf_counter()
        draft = self.judge.propose(draws, budgets, tail)
        taken_s = time.perf_counter() - started_s
        self.lengths.went_alone([chain.seq_id for chain in chains], max(depths.values()), taken_s if timed else None)
        guesses, law = chains_of(draft.tree), draft.tree.q
        for row, chain in zip(rows, chains, strict=True):
            chain.left = 0
            chain.emitted += guesses[row]
            if law is not None:
                chain.laws.append(law.probs[law.row[row, : len(guesses[row])].clamp_min(0)])
        return draft.pass_s

    def round(self, draws: Draws, chains: Sequence[Chain], timed: bool) -> float:
        """One inner round; chains for which the judge has no room end. Returns the time of the passes."""
        budgets = [Budget(length) for length in self.wanted(chains)]
        started_s = time.perf_counter()
        draft = self.guess(inside(draws, chains), budgets, tail_of(chains))
        guesses = chains_of(draft.tree)
        drafted_s = time.perf_counter()
        judged = self.judge.judge([Question(c.seq_id, c.late, chain) for c, chain in zip(chains, guesses, strict=True)])
        for i in set(range(len(chains))).difference(judged.answered):
            chains[i].left = 0
        if judged.answered:
            tree = draft.tree if len(judged.answered) == len(chains) else draft.tree.select(judged.answered)
            self.emit(draws, [chains[i] for i in judged.answered], tree, judged.logits)
        if timed:
            deepest, num_tokens = max(b.depth for b in budgets), sum(1 + len(chain) for chain in guesses)
            self.lengths.time(RoundTiming(deepest, drafted_s - started_s, num_tokens, time.perf_counter() - drafted_s))
        return draft.pass_s + judged.pass_s

    def guess(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None) -> Draft:
        """The lower member's drafts as valid chains; empty chains if none are needed."""
        if not any(budget.depth for budget in budgets):
            return Draft(DraftTree.bare(draws.roots_tokens))
        draft = self.lower.propose(draws, budgets, None if self.taps else tail)
        roots = draws.roots_tokens.to(draft.tree.tokens.device)
        tree = sanitize(draft.tree, roots, budgets, draws.vocab, draws.kernels)
        return replace(draft, tree=replace(tree, known=tree.fetched()).to(draws.device))

    def emit(self, draws: Draws, chains: Sequence[Chain], tree: DraftTree, logits: Tensor) -> None:
        """Add the accepted tokens to every chain, and the judge's own token after them."""
        inner = inside(draws, chains)
        verdict = verify(tree, logits, inner, "block" if inner.rejection else "coupled")
        laws = inner.probs(logits, inner.nodes(tree)) if inner.rejection else None
        first, runs = 0, []
        for chain, guesses, (length, next_token, *_) in zip(
            chains, chains_of(tree), verdict.packed.tolist(), strict=True
        ):
            run = [token for token in (*guesses[:length], next_token) if token >= 0][: chain.left]
            if next_token < 0:  # the judge has no law there, so its chain ends
                chain.left = len(run)
            if laws is not None:
                chain.laws.append(laws[first : first + len(run)])
            chain.extend(run)
            runs.append((len(guesses), length))
            first += 1 + len(guesses)
        self.lengths.count([chain.seq_id for chain in chains], runs)

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        """The judge's limit, and the larger number of unread tokens of both; or the lower member's outlook."""
        lower, judge = self.lower.outlook(seq_ids), self.judge.outlook(seq_ids)
        both = zip(lower.unread, judge.unread, judge.limit, strict=True)
        unread = [max(below, above) if room else below for below, above, room in both]
        limit = [room or below for room, below in zip(judge.limit, lower.limit, strict=True)]
        return Outlook(unread, limit)

    def forget(self, seq_ids: Sequence[int]) -> None:
        self.lengths.forget(seq_ids)
        self.lower.forget(seq_ids)
        self.judge.forget(seq_ids)


def inside(draws: Draws, chains: Sequence[Chain]) -> Draws:
    """The draws of these sequences' next inner round."""
    return draws.within([chain.row for chain in chains], [chain.emitted for chain in chains])


def tail_of(chains: Sequence[Chain]) -> Committed:
    """The tokens after the observed texts, as a lower member's `tail`."""
    tokens: list[int] = []
    offsets = [0]
    for chain in chains:
        tokens += chain.late[:-1]
        offsets.append(len(tokens))
    return Committed([chain.seq_id for chain in chains], tokens, offsets, [chain.late[-1] for chain in chains])


def chains_of(tree: DraftTree) -> list[Sequence[int]]:
    """Each sequence's draft tokens, on the host; the tree's chains are valid."""
    return [chain.tokens[1:] for chain in tree.fetched()]


def joined(draws: Draws, chains: Sequence[Chain], unjudged: DraftTree) -> DraftTree:
    """The chains, and the chains of other rows that are `unjudged`, as a draft.

    Chains have their laws with them; those of greedy sequences are not sampled, so they have none.
    """
    texts = [[row.tokens[-1], *guesses] for row, guesses in zip(draws.rows, chains_of(unjudged), strict=True)]
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
    """`cascade[A,B,...]`: each drafter's draft is verified by the next one, the cheapest first."""
    if len(spec.members) < 2:
        refuse(spec, f"a cascade has two members or more: {ORDER}")
    if spec.members[0].name == "mix":
        refuse(spec, "a mix is chosen from by what rounds of the target give: put the cascade into the mix instead")
    plans, judges = member_plans(spec, context, plan), list[BuildJudge]()
    for member, member_plan in zip(spec.members[1:], plans[1:], strict=True):
        if member_plan.build_judge is None:
            refuse(
                spec,
                f"{str(member)!r} cannot judge the guesses of the drafter before it; only models with the target's "
                f"tokenizer can: {ORDER}",
            )
        judges.append(member_plan.build_judge)

    def build(cache_tokens: CacheTokens, progress: ProgressCallback | None, target: Runner) -> Drafter | None:
        lower = plans[0].build(cache_tokens, progress, target)
        for build_judge in judges:
            assert lower is not None, "a member is a drafter"
            lower = CascadeDrafter(lower, build_judge(cache_tokens, progress, target))
        return lower

    return joined_plans(plans, build)
