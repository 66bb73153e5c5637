"""A mix: several drafters that all observe every sequence; in each round a row is drafted by one of them or by all.

The engine's controller chooses the member of each row, in the row's budget: a member's index, or the number of members
for the merged tree of all. This module calls the members that have rows and joins their drafts.

A row that one member drafted keeps that member's distribution. A merged row has none, because its tokens were chosen
after they were sampled: it is verified as a deterministic draft, which is exact for any choice. If several members
draft in a round, their trees are joined on the host, which waits for drafts that are still on a device.

Trees are merged as in SpecInfer (Miao et al., 2305.09781), which joins entire trees, and pruned to the likeliest paths.
If survival is estimated correctly, the sum of survival over a tree is its expected number of accepted tokens. A path of
the merged tree has at least the survival that any member gives it, and at most that of its parent. So taking the
likeliest next path n times finds the n likeliest of all, and their sum is at least that of the best n of any member.
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
from forerun.draft.spec import DraftSpec, with_class_names
from forerun.economy import Acceptance
from forerun.models.runner import Runner
from forerun.sampling.draws import Draws
from forerun.tree import DraftLaw, DraftTree, HostTree, padded, survival_of
from forerun.verify.sanitize import sanitize

NO_RUN = (0, 0)  # of a member that drafted nothing
ANY_SURVIVAL = 1e-9  # minimum for members of a merged tree: they return estimates, and leave out nothing of use


class MixDrafter:
    """Drafts each row with the member that its budget names, by index, or with all members merged.

    For a merged tree each member gets an equal part of the budget's width, and its entire depth and number of nodes. If
    a member returns no survival, it is estimated by depth from the member's earlier results in merged trees. The
    outlook reports these results, from which the controller learns what each member would gain alone.
    """

    def __init__(self, members: Sequence[Drafter], names: Sequence[str]) -> None:
        assert len(members) == len({*names} - {MERGED}) > 1, f"{len(members)} members, called {list(names)}"
        self.members = members
        self.names = (*names, MERGED)
        self.taps = tuple(sorted({tap for member in members for tap in member.taps}))
        self.accepted = [Acceptance() for _ in members]
        self.merged: dict[int, list[HostTree]] = {}  # by sequence: the members' trees of the last round
        self.merged_runs: dict[int, dict[int, tuple[int, int]]] = {}  # by sequence and member: their results

    def observe(self, committed: Committed) -> None:
        """All members observe, with the states that they read; merged trees are compared with the final text."""
        for member in self.members:
            columns = [self.taps.index(tap) for tap in member.taps]
            features = None if committed.features is None or not columns else committed.features[:, columns]
            member.observe(committed if features is committed.features else replace(committed, features=features))
        runs: dict[int, list[tuple[int, int]]] = {}
        for seq_id, tokens, root in committed.rows() if self.merged or self.merged_runs else ():
            self.merged_runs.pop(seq_id, None)
            if trees := self.merged.pop(seq_id, ()):
                self.merged_runs[seq_id] = {tree.drafters[0]: judged_run(tree, [*tokens, root][1:]) for tree in trees}
                for drafter, run in self.merged_runs[seq_id].items():
                    runs.setdefault(drafter, []).append(run)
        for drafter, member_runs in runs.items():
            self.accepted[drafter].count(member_runs)

    def adoptable(self, text: Sequence[int], most: int, salt: Hashable) -> int:
        """The smallest number that any member returns."""
        return min(adoptable(member, text, most, salt) for member in self.members)

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        """The drafts of the members whose rows have a budget, joined."""
        self.merged.clear()
        self.merged_runs.clear()
        drafts: dict[int, Draft] = {}
        drafter_s = [0.0] * len(self.members)
        shares = [[self.share(drafter, budget) for budget in budgets] for drafter in range(len(self.members))]
        for drafter, (member, member_budgets) in enumerate(zip(self.members, shares, strict=True)):
            if any(budget.depth for budget in member_budgets):
                started_s = time.perf_counter()
                drafts[drafter] = Draft.of(member, member.propose(draws, member_budgets, tail))
                drafter_s[drafter] = time.perf_counter() - started_s
        chosen = [budget.drafter if budget.depth else -1 for budget in budgets]
        if not drafts:
            return Draft(DraftTree.bare(draws.roots_tokens))
        if len({*chosen} - {-1}) == 1 and len(self.members) not in chosen:
            ((_, draft),) = drafts.items()
            columns = draft.tree.tokens.numel() // len(chosen)  # it is not sanitized: it may have one dimension
            drafted_by = padded([[drafter] * columns for drafter in chosen])
            return replace(draft, drafter=drafted_by, drafter_s=drafter_s)
        parts = {drafter: sanitized(draft, draws, shares[drafter]) for drafter, draft in drafts.items()}
        trees = {drafter: trees_of(part, drafter, self.chances(drafter)) for drafter, part in parts.items()}
        rows = [self.row_tree(row, budget, draws, trees) for row, budget in enumerate(budgets)]
        if tail is not None:
            self.merged.clear()  # the next committed tokens do not start at the end of the tail
        width = max(budget.width for budget in budgets if budget.depth)
        if len(self.members) not in chosen:
            width = min(width, max(draft.tree.width for draft in drafts.values()))
        return replace(
            joined_draft(draws, rows, parts, width),
            drafter=padded([[drafter, *tree.drafters[1:]] for drafter, tree in zip(chosen, rows, strict=True)]),
            pass_s=sum(draft.pass_s for draft in drafts.values()),
            drafter_s=drafter_s,
        )

    def share(self, drafter: int, budget: Budget) -> Budget:
        """The budget of a member for a row: its share of a merged tree, the row's own budget, or none."""
        if budget.depth and budget.drafter == len(self.members):
            width, least = max(1, budget.width // len(self.members)), max(budget.min_survival, ANY_SURVIVAL)
            return replace(budget, drafter=0, width=width, min_survival=least)
        if budget.drafter != drafter:
            return NO_DRAFT
        return replace(budget, drafter=0) if drafter else budget

    def row_tree(self, row: int, budget: Budget, draws: Draws, trees: Mapping[int, Sequence[HostTree]]) -> HostTree:
        """The tree of a row: that of its member, or the merged tree of all, whose parts are saved for `observe`."""
        if budget.depth == 0:
            return mixed_root(draws.rows[row].tokens[-1], -1)
        if budget.drafter < len(self.members):
            return trees[budget.drafter][row]
        parts = [rows[row] for rows in trees.values()]
        self.merged[draws.seq_ids[row]] = [tree for tree in parts if len(tree.tokens) > 1]
        return merge(parts, budget)

    def chances(self, drafter: int) -> list[float]:
        """Survival by depth of a member that returns no estimates, from its results in merged trees."""
        return list(accumulate(self.accepted[drafter].rates(), operator.mul))

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        """The greatest limit and number of unread tokens of all members; and the outlook of each member."""
        each = [self.outlook_of(drafter, seq_ids) for drafter in range(len(self.members))]
        return Outlook(
            unread=[max(row) for row in zip(*(outlook.unread for outlook in each), strict=True)],
            limit=[max(row) for row in zip(*(outlook.limit for outlook in each), strict=True)],
            drafters=dict(zip(self.names[:-1], each, strict=True)),
        )

    def outlook_of(self, drafter: int, seq_ids: Sequence[int]) -> Outlook:
        """A member's outlook, with its results if its drafts were merged in the last round."""
        outlook = self.members[drafter].outlook(seq_ids)
        if not self.merged_runs:
            return outlook
        runs = [self.merged_runs.get(seq_id, {}).get(drafter, NO_RUN) for seq_id in seq_ids]
        return replace(outlook, merged_runs=runs)

    def forget(self, seq_ids: Sequence[int]) -> None:
        """Drop the state that any member has of these sequences."""
        for member in self.members:
            member.forget(seq_ids)
        for seq_id in seq_ids:
            self.merged.pop(seq_id, None)
            self.merged_runs.pop(seq_id, None)


def sanitized(draft: Draft, draws: Draws, budgets: Sequence[Budget]) -> Draft:
    """A member's draft cut to its budgets, on the host; estimates or a `resume` that do not fit it are dropped."""
    proposed, survival, resume = draft.tree, draft.survival, draft.resume
    safe = sanitize(proposed, draws.roots_tokens.to(proposed.tokens.device), budgets, draws.vocab, draws.kernels)
    if survival is not None and (len(survival) != len(safe.tokens) or survival.shape[1] < safe.tokens.shape[1]):
        survival = None
    if not (torch.equal(safe.tokens, proposed.tokens) and torch.equal(safe.parents, proposed.parents)):
        resume = None
    return replace(draft, tree=replace(safe, known=safe.fetched()), survival=survival, resume=resume)


def trees_of(draft: Draft, drafter: int, chances: Sequence[float]) -> list[HostTree]:
    """A member's rows with their distributions; without its own survival, `chances` has the survival by depth."""
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
            add_node(tree, host.tokens[node], parent, chance, drafter)
        tree.law_rows = [law_rows[column] for column in host.places] if law_rows else []
        trees.append(tree)
    return trees


def mixed_root(root: int, drafter: int) -> HostTree:
    """A tree with its root only; `drafter` is the index of the member that drafts it, -1 for all or none."""
    return HostTree([root], [-1], survival=[1.0], drafters=[drafter])


def add_node(tree: HostTree, token: int, parent: int, survival: float, drafter: int) -> int:
    """Append a draft token; returns its node. Its survival is cut to at most its parent's, and is 0 if it is NaN."""
    tree.drafters.append(drafter)
    return tree.add(token, parent, min(max(survival, 0.0), tree.survival[parent]) if survival == survival else 0.0)


def merge(trees: Sequence[HostTree], budget: Budget) -> HostTree:
    """The most likely paths of trees with the same root, within the budget's depth, width, nodes and minimum.

    Nodes are ordered by survival; ties keep the order of the trees and of their nodes.
    """
    whole, below = union(trees)
    merged = mixed_root(whole.tokens[0], -1)
    depths, widths = [0], [0]
    # minus survival, node of the union, its parent in the merged tree
    heap = [(-whole.survival[child], child, 0) for child in below[0].values()]
    heapq.heapify(heap)
    while heap and len(merged.tokens) <= budget.nodes:
        minus, node, parent = heapq.heappop(heap)
        if widths[parent] == budget.width or -minus < budget.min_survival:
            continue
        at = add_node(merged, whole.tokens[node], parent, -minus, whole.drafters[node])
        widths[parent] += 1
        widths.append(0)
        depths.append(depths[parent] + 1)
        for child in below[node].values() if depths[at] < budget.depth else ():
            heapq.heappush(heap, (-whole.survival[child], child, at))
    return merged


def union(trees: Sequence[HostTree]) -> tuple[HostTree, list[dict[int, int]]]:
    """The tree of all paths, each once, and the children of each node by token.

    A path has the greatest survival that any member gives it, and belongs to the first member that drafted it.
    """
    whole, below = mixed_root(trees[0].tokens[0], -1), list[dict[int, int]]([{}])
    for tree in trees:
        place = [0]
        for node in range(1, len(tree.tokens)):
            token, parent = tree.tokens[node], place[tree.parents[node]]
            known = below[parent].get(token)
            if known is None:
                known = add_node(whole, token, parent, tree.survival[node], tree.drafters[node])
                below[parent][token] = known
                below.append({})
            else:
                survival = max(whole.survival[known], tree.survival[node])
                whole.survival[known] = min(survival, whole.survival[parent])
            place.append(known)
    return whole, below


def judged_run(tree: HostTree, tokens: Sequence[int]) -> tuple[int, int]:
    """The number of draft tokens of a tree that were judged along the final text, and how many of them it contains."""
    node, num_accepted = 0, 0
    for token in tokens:
        children = [child for child, parent in enumerate(tree.parents) if parent == node]
        if not children:
            return num_accepted, num_accepted
        equal = [child for child in children if tree.tokens[child] == token]
        if not equal:
            return num_accepted + 1, num_accepted
        node, num_accepted = equal[0], num_accepted + 1
    return num_accepted, num_accepted


def joined_draft(draws: Draws, rows: Sequence[HostTree], parts: Mapping[int, Draft], width: int) -> Draft:
    """The rows as one draft; rows of one member keep its distributions and its `resume`.

    The width selects the rule of verification, so it must follow from the budgets, never from sampled tokens.
    """
    tree = DraftTree.of_hosts(rows, width).to(draws.device)
    columns, members = tree.tokens.shape[1], [row.drafters[0] for row in rows]
    known = all(member < 0 or parts[member].survival is not None for member in members)
    return Draft(
        replace(tree, q=joined_laws(draws, rows, parts, columns)),
        upload_tensor(survival_of(rows), draws.device) if known else None,
        resume=joined_resume(members, parts, columns),
    )


def joined_laws(draws: Draws, rows: Sequence[HostTree], parts: Mapping[int, Draft], columns: int) -> DraftLaw | None:
    """The members' distributions, packed, each for the member's own rows."""
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


def joined_resume(members: Sequence[int], parts: Mapping[int, Draft], columns: int) -> Resume | None:
    """The `resume` of the first member that has one, for its own rows, with the node indices of the joined tree."""
    drafter = next((drafter for drafter, part in parts.items() if part.resume is not None), None)
    resume = None if drafter is None else parts[drafter].resume
    if drafter is None or resume is None:
        return None
    places = [divmod(node, parts[drafter].tree.tokens.shape[1]) for node in resume.nodes.tolist()]
    kept = [i for i, (row, _) in enumerate(places) if members[row] == drafter]
    nodes = torch.tensor([places[i][0] * columns + places[i][1] for i in kept], dtype=torch.long)
    return Resume(resume.layer, nodes, resume.hidden[kept]) if kept else None


def plan_mix(spec: DraftSpec, context: DraftContext, plan: PlanMember) -> DraftPlan:
    """`mix[A,B,...]`: several drafters; each round drafts a sequence with one of them, or with all of them merged."""
    names, plans = member_names(spec), member_plans(spec, context, plan)

    def build(cache_tokens: CacheTokens, progress: ProgressCallback | None, target: Runner) -> Drafter:
        members = [each.build(cache_tokens, progress, target) for each in plans]
        return MixDrafter([member for member in members if member is not None], names)

    return replace(joined_plans(plans, build), num_members=len(plans))


def member_names(spec: DraftSpec) -> list[str]:
    """The names of the members of `mix[A,B,...]`. Raises UnknownDrafter for less than two members or a nested mix."""
    if len(spec.members) < 2:
        refuse(spec, "a mix has two members or more, as in mix[ngram,model:DIR]")
    if any(member.name == spec.name for member in spec.members):
        flat = [one for member in spec.members for one in (member.members if member.name == spec.name else (member,))]
        refuse(spec, f"a mix in a mix is one mix: write {replace(spec, members=tuple(flat))}")
    names: list[str] = []
    for member in spec.members:
        names.append(free_name(str(with_class_names(member)), names))
    return names
