"""Suffix decoding: guess what most often followed the last few tokens, in this text and in past answers.

This module decides which context to trust: of the text's last 1, 2, ... tokens that occurred before, the one from which
the most guesses can be expected to be accepted. A context of n tokens is good for n guesses at most, and a path ends
where it is no longer likely. So the drafts follow from counts alone, those of the text and those of its tenant's past:
there is no law to declare. After SuffixDecoding (Oliaro et al., 2411.04975).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from forerun.annotations import ProgressCallback
from forerun.draft.base import AHEAD, Budget, Committed, Draft, Outlook
from forerun.draft.plan import CacheTokens, DraftContext, DraftPlan, refuse_members
from forerun.draft.spec import DraftSpec
from forerun.draft.text.suffix_file import PastFile
from forerun.draft.text.suffix_past import MAX_BYTES, Past, Reader
from forerun.draft.text.suffix_tree import LEAST_SHARE, Insertion, Leaf, Node, SuffixTree
from forerun.models.runner import Runner
from forerun.sampling.draws import Draws
from forerun.tree import DraftTree, HostTree, survival_of

PAST = "past answers"


@dataclass(slots=True)
class SuffixSequence:
    """One sequence: the contexts of its text, its root the last token of it, and its place in its tenant's past.

    `tenant` is None, and the past is not used, until the tenant is known.
    """

    tree: SuffixTree
    reader: Reader = field(default_factory=Reader)
    tenant: str | None = None
    num_prompt: int = 0


class SuffixDrafter:
    """Copies what followed before. The answers of dropped sequences stay in `past`."""

    taps: tuple[int, ...] = ()
    names: tuple[str, ...] = ("suffix",)

    def __init__(self, past: Past | None = None) -> None:
        self.past = Past() if past is None else past
        self.sequences: dict[int, SuffixSequence] = {}

    def observe(self, news: Committed) -> None:
        """Enter what became final, the root included: in O(1) per token and context that goes on."""
        for i, (seq_id, tokens, root) in enumerate(news.rows()):
            growing = self.sequences.get(seq_id)
            if growing is None:
                self.past.reopen(seq_id)
                growing = self.sequences[seq_id] = SuffixSequence(SuffixTree(self.past.depth))
            if news.tenants:
                growing.tenant, growing.num_prompt = news.tenants[i], news.num_prompts[i]
            for token in late(growing, tokens, root):
                growing.tree.append(token)

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        """The likeliest chain or tree of each sequence, within its budget, and how likely each guess is."""
        tails = {} if tail is None else {seq_id: (tokens, root) for seq_id, tokens, root in tail.rows()}
        trees = []
        for row, budget in zip(draws.rows, budgets, strict=True):
            growing, tree = self.sequences.get(row.seq_id), None
            if growing is not None and budget.depth:
                new = late(growing, *tails[row.seq_id]) if row.seq_id in tails else ()
                tree = self.guess(growing, budget, new)
            trees.append(HostTree.of_root(row.tokens[-1]) if tree is None else tree)
        width = max((budget.width for budget in budgets), default=1)
        return Draft(DraftTree.of_hosts(trees, width), survival_of(trees))  # of chains too: a mix has to choose

    def guess(self, growing: SuffixSequence, budget: Budget, tail: Sequence[int] = ()) -> HostTree | None:
        """The best guesses of any context, if any; among equals the text's own come before the past's, then longer
        contexts."""
        tree, past = growing.tree, self.remembered(growing, tail)
        steps: list[Insertion] = []
        for token in tail:
            tree.append(token, steps)
        best, expected = None, 0.0
        grow, depth = chain if budget.width == 1 else likeliest, min(budget.depth, budget.nodes, tree.depth // 2)
        for places in (tree.matches, past):
            for length, most in ranks(len(places), tree.depth, depth):
                if most <= expected:
                    break
                grown = grow(tree.text[-1], places[length - 1], most, budget)
                if (worth := grown.expected) > expected:
                    best, expected = grown, worth
        tree.undo(steps)
        return best

    def remembered(self, growing: SuffixSequence, tail: Sequence[int]) -> Sequence[Node | Leaf]:
        """What its tenant's past holds for a text's last 1, 2, ... tokens, as long as they occurred there."""
        tree = None if growing.tenant is None else self.past.trees.get(growing.tenant)
        places = growing.reader.read(tree, growing.tree.text)
        for token in tail:
            places = places if tree is None else tree.follow(places, token)
        return places

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        """Never unread; the depth that the longest context is good for, and how many of eight guesses it expects."""
        limit, expected = [], []
        for seq_id in seq_ids:
            growing = self.sequences.get(seq_id)
            best = None if growing is None else self.guess(growing, Budget(AHEAD))
            expected.append(0.0 if best is None else best.expected)
            limit.append(0 if growing is None or best is None else self.limit(growing))
        return Outlook(unread=[0] * len(seq_ids), limit=limit, expected=expected, depth_matters=True)

    def limit(self, growing: SuffixSequence) -> int:
        """The deepest draft that contexts as long as these can give."""
        longest = max(len(growing.tree.matches), len(growing.reader.places))
        return min(longest, growing.tree.depth // 2)

    def forget(self, seq_ids: Sequence[int]) -> None:
        """Drop these sequences; their answers become past answers of their tenant. Unknown ones are ignored."""
        for seq_id in seq_ids:
            growing = self.sequences.pop(seq_id, None)
            if growing is not None and growing.tenant is not None:
                self.past.add(seq_id, growing.tenant, growing.tree.text[growing.num_prompt :])


def late(growing: SuffixSequence, tokens: Sequence[int], root: int) -> Sequence[int]:
    """The new tokens that are not in a sequence's text yet: the first is its last root, unless the sequence is new."""
    if not growing.tree.text:
        return [*tokens, root]
    return [*tokens[1:], root] if tokens else ()


@cache
def ranks(longest: int, depth: int, wanted: int) -> Sequence[tuple[int, int]]:
    """Lengths of contexts, and how many guesses each is good for: those good for most first, then the longer.

    A context of n tokens is good for n guesses, and no more than `depth` tokens are stored together.
    """
    good = [(length, min(wanted, length, depth - length)) for length in range(1, longest + 1)]
    return sorted(good, key=lambda rank: (-rank[1], -rank[0]))


def chain(root: int, place: Node | Leaf, most: int, budget: Budget) -> HostTree:
    """The likeliest continuation of the likeliest continuation, and so on, while the whole path is likely."""
    tokens: list[int] = []
    chances: list[float] = []
    chance, least = 1.0, max(LEAST_SHARE, budget.min_survival)
    while len(tokens) < most:
        if isinstance(place, Leaf):  # the rest of a text
            tokens += place.text[place.end : place.end + most - len(tokens)]
            chances += [chance] * (len(tokens) - len(chances))
            break
        offers = place.offers()
        if not offers or chance * offers[0].share < least:
            break
        token, share, place = offers[0]
        chance *= share
        tokens.append(token)
        chances.append(chance)
    tree = HostTree.of_root(root)
    tree.extend(tokens, chances)
    return tree


def likeliest(root: int, place: Node | Leaf, most: int, budget: Budget) -> HostTree:
    """The likeliest of all paths of at most `most` guesses, as many as the budget allows.

    Best first: a path is at most as likely as the one it goes on from. Among equals the smaller tokens come first.
    """
    tree, least = HostTree.of_root(root), max(LEAST_SHARE, budget.min_survival)
    heap: list[tuple[float, tuple[int, ...], int, Node | Leaf]] = [(-1.0, (), 0, place)]
    while heap and len(tree.tokens) <= budget.nodes:
        minus, path, parent, place = heapq.heappop(heap)
        node = tree.add(path[-1], parent, -minus) if path else 0
        for token, share, longer in place.offers()[: budget.width] if len(path) < most else ():
            if -minus * share >= least:
                heapq.heappush(heap, (minus * share, (*path, token), node, longer))
    return tree


def plan_suffix(spec: DraftSpec, context: DraftContext) -> DraftPlan:
    """`suffix[:FILE]`: contexts of this text and of past answers, which FILE stores; created with the first answer."""
    refuse_members(spec)
    file = None if spec.argument is None else PastFile(spec.argument, context.tokenizer.fingerprint())

    def build(granted: CacheTokens, _progress: ProgressCallback | None, _target: Runner) -> SuffixDrafter:
        return SuffixDrafter(Past(max_bytes=granted.get(PAST, MAX_BYTES), file=file))

    return DraftPlan({}, build, remembered_bytes={PAST: MAX_BYTES})
