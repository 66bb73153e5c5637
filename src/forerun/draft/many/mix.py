"""A mix: several drafters that are all kept up to date; in each round every row is drafted by one of them or by all.

This module decides which members are asked, and joins their drafts. The budget says which of them drafts a row: a
member alone or, as the last, all of them, their trees merged. Only members that have a row are called, but all of them
observe what became final, so any may be asked next. The engine's controller decides what pays.

A row that one member drafted keeps that member's law. A merged row has no law, because its guesses were chosen after
they were drawn: it is judged by equality, which is exact for any choice. Where more than one member is asked, their
trees are joined on the host, which waits for drafts that were drawn on a device and have not been copied yet.

Trees are merged as in SpecInfer (Miao et al., 2305.09781), which joins whole trees, and pruned to the likeliest paths.
If survival is estimated correctly, the sum of a tree's survival is its expected number of accepted guesses. A path here
has at least the survival that any member gives it, and at most that of the path it continues. So taking the likeliest
next path n times finds the likeliest n of all, and their sum is at least that of any member's own n.
"""

from __future__ import annotations

import heapq
import operator
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from forerun.annotations import ProgressCallback
from forerun.device import upload_tensor
from forerun.draft.base import MERGED, NO_DRAFT, Budget, Committed, Draft, Drafter, Outlook, Resume, adoptable
from forerun.draft.plan import (
    CacheTokens,
    DraftContext,
    DraftPlan,
    PlanMember,
    free_name,
    joined_plans,
    member_plans,
    refuse,
)
from forerun.draft.spec import DraftSpec
from forerun.economy import Acceptance
from forerun.models.runner import Runner
from forerun.sampling.draws import Draws
from forerun.tree import DraftLaw, DraftTree, HostTree, padded, survival_of
from forerun.verify.sanitize import sanitize

NO_RUN = (0, 0)  # where it guessed nothing
ANY_SURVIVAL = 1e-9  # what survives with less would not be missed: for members to say what survives with how much


class MixDrafter:
    """Drafts with whichever of `members` a row's budget names: by its index, or one past the last for all merged.

    A merged tree's budget has room for all: each member gets an equal part of its width, its whole depth and its whole
    number of nodes. If a member gives no survival, it is estimated by depth from its past results in merged trees; the
    outlook reports these, from which the gain of a member alone follows.
    """

    def __init__(self, members: Sequence[Drafter], names: Sequence[str]) -> None:
        assert len(members) == len({*names} - {MERGED}) > 1, f"{len(members)} members, called {list(names)}"
        self.members = members
        self.names = (*names, MERGED)
        self.taps = tuple(sorted({tap for member in members for tap in member.taps}))
        self.accepted = [Acceptance() for _ in members]
        self.guessed: dict[int, list[HostTree]] = {}  # by sequence: what was merged in the last round, to be compared
        self.came_true: dict[int, dict[int, tuple[int, int]]] = {}  # what came of them, by sequence and member

    def observe(self, news: Committed) -> None:
        """All members observe, with the states that they read; their draft tokens are compared with the final text."""
        for member in self.members:
            columns = [self.taps.index(tap) for tap in member.taps]
            features = None if news.features is None or not columns else news.features[:, columns]
            member.observe(news if features is news.features else replace(news, features=features))
        runs: dict[int, list[tuple[int, int]]] = {}
        for seq_id, tokens, root in news.rows() if self.guessed or self.came_true else ():
            self.came_true.pop(seq_id, None)
            if guessed := self.guessed.pop(seq_id, ()):
                judged = {tree.drafters[0]: came_true(tree, [*tokens, root][1:]) for tree in guessed}
                self.came_true[seq_id] = judged
                for drafter, run in judged.items():
                    runs.setdefault(drafter, []).append(run)
        for drafter, own_runs in runs.items():
            self.accepted[drafter].count(own_runs)

    def adoptable(self, text: Sequence[int], most: int, salt: Hashable) -> int:
        """The smallest answer of all members."""
        return min(adoptable(member, text, most, salt) for member in self.members)

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        """The drafts of the members whose rows have a budget, joined."""
        self.guessed.clear()
        self.came_true.clear()
        drafts: dict[int, Draft] = {}
        drafter_s = [0.0] * len(self.members)
        shares = [[self.share(drafter, budget) for budget in budgets] for drafter in range(len(self.members))]
        for drafter, (member, member_budgets) in enumerate(zip(self.members, shares, strict=True)):
            if any(budget.depth for budget in member_budgets):
                started_s = time.perf_counter()
                drafts[drafter] = member.propose(draws, member_budgets, tail)
                drafter_s[drafter] = time.perf_counter() - started_s
        taken = [budget.drafter if budget.depth else -1 for budget in budgets]
        if not drafts:
            return Draft(DraftTree.bare(draws.roots_tokens))
        if len({*taken} - {-1}) == 1 and len(self.members) not in taken:
            ((_, draft),) = drafts.items()
            guessed_by = padded([[drafter] * draft.tree.tokens.shape[1] for drafter in taken])
            return replace(draft, drafter=guessed_by, drafter_s=drafter_s)
        parts = {drafter: harmless(draft, draws, shares[drafter]) for drafter, draft in drafts.items()}
        trees = {drafter: trees_of(part, drafter, self.chances(drafter)) for drafter, part in parts.items()}
        rows = [self.row(row, budget, draws, trees) for row, budget in enumerate(budgets)]
        if tail is not None:
            self.guessed.clear()  # what is behind a tail is not compared with what becomes final
        width = max(budget.width for budget in budgets if budget.depth)
        if len(self.members) not in taken:
            width = min(width, max(draft.tree.width for draft in drafts.values()))
        return replace(
            together(draws, rows, parts, width),
            drafter=padded([[drafter, *tree.drafters[1:]] for drafter, tree in zip(taken, rows, strict=True)]),
            pass_s=sum(draft.pass_s for draft in drafts.values()),
            drafter_s=drafter_s,
        )

    def share(self, drafter: int, budget: Budget) -> Budget:
        """A member's share of a row's budget."""
        if budget.depth and budget.drafter == len(self.members):
            width, least = max(1, budget.width // len(self.members)), max(budget.min_survival, ANY_SURVIVAL)
            return replace(budget, drafter=0, width=width, min_survival=least)
        if budget.drafter != drafter:
            return NO_DRAFT
        return replace(budget, drafter=0) if drafter else budget

    def row(self, row: int, budget: Budget, draws: Draws, trees: Mapping[int, Sequence[HostTree]]) -> HostTree:
        """One row: its member's draft, or the merged draft of all."""
        if budget.depth == 0:
            return mixed_root(draws.rows[row].tokens[-1], -1)
        if budget.drafter < len(self.members):
            return trees[budget.drafter][row]
        grown = [rows[row] for rows in trees.values()]
        self.guessed[draws.seq_ids[row]] = [tree for tree in grown if len(tree.tokens) > 1]
        return merge(grown, budget)

    def chances(self, drafter: int) -> list[float]:
        """Estimated survival of a member's draft tokens by depth, if it gives none itself."""
        return list(accumulate(self.accepted[drafter].rates(), operator.mul))

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        """The greatest limit and unread text of all members; and each member's outlook and results when merged."""
        each = [self.outlook_of(drafter, seq_ids) for drafter in range(len(self.members))]
        return Outlook(
            unread=[max(row) for row in zip(*(outlook.unread for outlook in each), strict=True)],
            limit=[max(row) for row in zip(*(outlook.limit for outlook in each), strict=True)],
            drafters=dict(zip(self.names[:-1], each, strict=True)),
        )

    def outlook_of(self, drafter: int, seq_ids: Sequence[int]) -> Outlook:
        """One member's outlook, with the results of its draft tokens in the last round."""
        outlook = self.members[drafter].outlook(seq_ids)
        if not self.came_true:
            return outlook
        return replace(outlook, came_true=[self.came_true.get(seq_id, {}).get(drafter, NO_RUN) for seq_id in seq_ids])

    def forget(self, seq_ids: Sequence[int]) -> None:
        """Drop the state that any member has of these sequences."""
        for member in self.members:
            member.forget(seq_ids)
        for seq_id in seq_ids:
            self.guessed.pop(seq_id, None)
            self.came_true.pop(seq_id, None)


def harmless(draft: Draft, draws: Draws, budgets: Sequence[Budget]) -> Draft:
    """A member's draft within its budgets, on the host, without estimates of a wrong shape or an invalid `resume`."""
    proposed, survival, resume = draft.tree, draft.survival, draft.resume
    safe = sanitize(proposed, draws.roots_tokens.to(proposed.tokens.device), budgets, draws.vocab, draws.kernels)
    if survival is not None and (len(survival) != len(safe.tokens) or survival.shape[1] < safe.tokens.shape[1]):
        survival = None
    if not (torch.equal(safe.tokens, proposed.tokens) and torch.equal(safe.parents, proposed.parents)):
        resume = None
    return replace(draft, tree=replace(safe, known=safe.fetched()), survival=survival, resume=resume)


def trees_of(draft: Draft, drafter: int, chances: Sequence[float]) -> list[HostTree]:
    """A member's rows, with their laws; where it gives no survival, `chances` gives it by depth."""
    q, rows = draft.tree.q, draft.tree.host()
    laws = [()] * len(rows) if q is None else q.row.tolist()
    survival = [()] * len(rows) if draft.survival is None else draft.survival.tolist()
    trees = []
    for host, law_rows, survives in zip(rows, laws, survival, strict=True):
        tree, depths = mixed_root(host.tokens[0], drafter), [0]
        for node, column in enumerate(host.places[1:], start=1):
            parent = host.parents[node]
            depths.append(depths[parent] + 1)
            chance = survives[column] if survives else chances[min(depths[-1], len(chances)) - 1]
            add_guess(tree, host.tokens[node], parent, chance, drafter)
        tree.law_rows = [law_rows[column] for column in host.places] if law_rows else []
        trees.append(tree)
    return trees


def mixed_root(root: int, drafter: int) -> HostTree:
    """A tree of a mix with its root only: who drafts it, -1 for all or none."""
    return HostTree([root], [-1], survival=[1.0], drafters=[drafter])


def add_guess(tree: HostTree, token: int, parent: int, survival: float, drafter: int) -> int:
    """Append a draft token; returns its number. Its survival is at most its parent's, 0 if unknown."""
    tree.drafters.append(drafter)
    return tree.add(token, parent, min(max(survival, 0.0), tree.survival[parent]) if survival == survival else 0.0)


def merge(trees: Sequence[HostTree], budget: Budget) -> HostTree:
    """The most likely paths of all trees, within the budget's depth, width and nodes; all have one root.

    The most likely come first; ties keep the order of the trees and of their nodes.
    """
    whole, below = union(trees)
    merged = mixed_root(whole.tokens[0], -1)
    depths, widths = [0], [0]
    # minus survival, node of the union, its parent in what is merged
    heap = [(-whole.survival[child], child, 0) for child in below[0].values()]
    heapq.heapify(heap)
    while heap and len(merged.tokens) <= budget.nodes:
        minus, node, parent = heapq.heappop(heap)
        if widths[parent] == budget.width or -minus < budget.min_survival:
            continue
        at = add_guess(merged, whole.tokens[node], parent, -minus, whole.drafters[node])
        widths[parent] += 1
        widths.append(0)
        depths.append(depths[parent] + 1)
        for child in below[node].values() if depths[at] < budget.depth else ():
            heapq.heappush(heap, (-whole.survival[child], child, at))
    return merged


def union(trees: Sequence[HostTree]) -> tuple[HostTree, list[dict[int, int]]]:
    """All paths, each once, and the children of each node by token.

    A path has the greatest survival that any member gives it, and counts for the first member that proposed it.
    """
    whole, below = mixed_root(trees[0].tokens[0], -1), list[dict[int, int]]([{}])
    for tree in trees:
        place = [0]
        for node in range(1, len(tree.tokens)):
            token, parent = tree.tokens[node], place[tree.parents[node]]
            known = below[parent].get(token)
            if known is None:
                known = add_guess(whole, token, parent, tree.survival[node], tree.drafters[node])
                below[parent][token] = known
                below.append({})
            else:
                survival = max(whole.survival[known], tree.survival[node])
                whole.survival[known] = min(survival, whole.survival[parent])
            place.append(known)
    return whole, below


def came_true(tree: HostTree, tokens: Sequence[int]) -> tuple[int, int]:
    """How many draft tokens were judged along the final text, and how many were right."""
    node, right = 0, 0
    for token in tokens:
        below = [child for child, parent in enumerate(tree.parents) if parent == node]
        if not below:
            return right, right
        equal = [child for child in below if tree.tokens[child] == token]
        if not equal:
            return right + 1, right
        node, right = equal[0], right + 1
    return right, right


def together(draws: Draws, rows: Sequence[HostTree], parts: Mapping[int, Draft], width: int) -> Draft:
    """The rows as one draft: those of one member with its law, and with its `resume`.

    The rule that judges them depends on the width, so the width must follow from budgets, not from sampled tokens.
    """
    tree = DraftTree.of_hosts(rows, width).to(draws.device)
    columns, members = tree.tokens.shape[1], [row.drafters[0] for row in rows]
    known = all(member < 0 or parts[member].survival is not None for member in members)
    return Draft(
        replace(tree, q=laws(draws, rows, parts, columns)),
        upload_tensor(survival_of(rows), draws.device) if known else None,
        resume=resumed(members, parts, columns),
    )


def laws(draws: Draws, rows: Sequence[HostTree], parts: Mapping[int, Draft], columns: int) -> DraftLaw | None:
    """The members' laws packed together, each for the rows that it was declared for."""
    declared = {drafter: part.tree.q for drafter, part in parts.items() if part.tree.q is not None}
    if not declared:
        return None
    firsts = dict(zip(declared, accumulate((len(law.probs) for law in declared.values()), initial=0), strict=False))
    table = [[-1] * columns for _ in rows]
    for places, tree in zip(table, rows, strict=True):
        first = firsts.get(tree.drafters[0])
        if first is not None:
            places[: len(tree.law_rows)] = [first + place if place >= 0 else -1 for place in tree.law_rows]
    row_of = upload_tensor(torch.tensor(table), draws.device)
    if len(declared) == 1:
        return replace(next(iter(declared.values())), row=row_of)
    return DraftLaw(row_of, torch.cat([law.dense(draws.vocab) for law in declared.values()]))


def resumed(members: Sequence[int], parts: Mapping[int, Draft], columns: int) -> Resume | None:
    """What a member has read of the rows that are its own, numbered as they lie here; of one member, the first."""
    drafter = next((drafter for drafter, part in parts.items() if part.resume is not None), None)
    resume = None if drafter is None else parts[drafter].resume
    if drafter is None or resume is None:
        return None
    places = [divmod(node, parts[drafter].tree.tokens.shape[1]) for node in resume.nodes.tolist()]
    kept = [i for i, (row, _) in enumerate(places) if members[row] == drafter]
    nodes = torch.tensor([places[i][0] * columns + places[i][1] for i in kept], dtype=torch.long)
    return Resume(resume.layer, nodes, resume.hidden[kept]) if kept else None


def plan_mix(spec: DraftSpec, context: DraftContext, plan: PlanMember) -> DraftPlan:
    """`mix[A,B,...]`: several drafters at once, of which each round and sequence takes one, or all of them merged."""
    names, plans = member_names(spec), member_plans(spec, context, plan)

    def build(cache_tokens: CacheTokens, progress: ProgressCallback | None, target: Runner) -> Drafter:
        members = [each.build(cache_tokens, progress, target) for each in plans]
        return MixDrafter([member for member in members if member is not None], names)

    return replace(joined_plans(plans, build), num_members=len(plans))


def member_names(spec: DraftSpec) -> list[str]:
    """The names of the members of `mix[A,B,...]`. Raises UnknownDrafter for anything else."""
    if len(spec.members) < 2:
        refuse(spec, "a mix has two members or more, as in mix[ngram,model:DIR]")
    if any(member.name == spec.name for member in spec.members):
        flat = [one for member in spec.members for one in (member.members if member.name == spec.name else (member,))]
        refuse(spec, f"a mix in a mix is one mix: write {replace(spec, members=tuple(flat))}")
    names: list[str] = []
    for member in spec.members:
        names.append(free_name(str(member), names))
    return names
