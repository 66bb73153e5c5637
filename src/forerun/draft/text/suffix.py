"""Suffix decoding: guess what followed the last few tokens, in this text and in past answers, as often as it did.

This module decides how likely a continuation is. A context is the text's last 1, 2, ... tokens; of the contexts that
occurred before, the longest and the one half as long count, in the text and in its tenant's past. Short contexts come
first, and what they say is corrected by what longer ones say, as in the blended models of compression by partial
matching (Cleary and Witten, 1984): the more, the longer a context is and the more often it occurred. Guesses are the
likeliest paths. So the drafts follow from counts alone: there is no law to declare. The trees of contexts are those of
SuffixDecoding (Oliaro et al., 2411.04975).
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from forerun.annotations import ProgressCallback
from forerun.config import AUTO_DEPTH
from forerun.draft.base import Budget, Committed, Draft, Outlook
from forerun.draft.plan import CacheTokens, DraftContext, DraftPlan, refuse_members
from forerun.draft.spec import DraftSpec
from forerun.draft.text.ngram_table import ORDER, NgramTable
from forerun.draft.text.suffix_past import MAX_BYTES, Past, PastFile, Reader
from forerun.draft.text.suffix_tree import Insertion, Leaf, Node, SuffixTree
from forerun.models.runner import Runner
from forerun.sampling.draws import Draws
from forerun.tree import DraftTree, HostTree, survival_of

PAST = "past answers"
LEAST = 0.1  # chance to survive below which a path is not offered
WEIGHTS = (6.0, 3.0, 1.5, 0.8, 0.4, 0.2)  # occurrences of a context of 1, 2, ... tokens that shorter ones weigh as
MOST_OFFERS = 4096  # of a table that are kept, of half a kilobyte each: most contexts are asked for often
Places = Sequence[Node | Leaf]
TableOffers = Callable[[tuple[int, ...]], Mapping[int, float]]
# What is stored for a path's last 1, 2, ... tokens, as far as they occurred: in the past and in its text; and as many
# of these tokens as a table may ask for.
Contexts = tuple[Places, Places, tuple[int, ...]]


@dataclass(slots=True)
class SuffixSequence:
    """One sequence: the contexts of its text, its root the last token of it, and its place in its tenant's past.

    `tenant` is None, and the past is not used, until the tenant is known. `likeliest` is the chain that was estimated,
    down to the survival `least`, until the text grows.
    """

    tree: SuffixTree
    reader: Reader = field(default_factory=Reader)
    tenant: str | None = None
    num_prompt: int = 0
    likeliest: HostTree | None = None
    least: float = LEAST


class SuffixDrafter:
    """Copies what followed before. The answers of dropped sequences stay in `past`."""

    taps: tuple[int, ...] = ()
    names: tuple[str, ...] = ("suffix",)

    def __init__(self, past: Past | None = None, table: NgramTable | None = None) -> None:
        self.past = Past() if past is None else past
        self.offers: TableOffers = (lambda last: {}) if table is None else lru_cache(MOST_OFFERS)(table.offers)
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
            growing.likeliest = None
            for token in late(growing, tokens, root):
                growing.tree.append(token)

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        """The likeliest chain or tree of each sequence, within its budget; with a minimum, how likely guesses are."""
        tails = {} if tail is None else {seq_id: (tokens, root) for seq_id, tokens, root in tail.rows()}
        trees = []
        for row, budget in zip(draws.rows, budgets, strict=True):
            growing, tree = self.sequences.get(row.seq_id), None
            if growing is not None and budget.depth:
                new = late(growing, *tails[row.seq_id]) if row.seq_id in tails else ()
                tree = self.guess(growing, budget, new)
            trees.append(HostTree.of_root(row.tokens[-1]) if tree is None else tree)
        if all(len(tree.tokens) == 1 for tree in trees):
            return Draft(DraftTree.bare(draws.roots_tokens))
        width = max((budget.width for budget in budgets), default=1)
        priced = any(budget.min_survival for budget in budgets)
        return Draft(DraftTree.of_hosts(trees, width), survival_of(trees) if priced else None)

    def guess(self, growing: SuffixSequence, budget: Budget, tail: Sequence[int] = ()) -> HostTree:
        known = None if tail or budget.width > 1 else growing.likeliest
        if known is not None and (
            max(LEAST, budget.min_survival) >= growing.least or min(budget.depth, budget.nodes) < len(known.tokens)
        ):
            return shortened(known, budget)
        tree, past = growing.tree, self.remembered(growing, tail)
        steps: list[Insertion] = []
        for token in tail:
            tree.append(token, steps)
        contexts = (past, tree.matches, tuple(tree.text[-ORDER:]))
        grown = likeliest(tree.text[-1], Sources(tree, self.past_of(growing), self.offers), contexts, budget)
        tree.undo(steps)
        return grown

    def past_of(self, growing: SuffixSequence) -> SuffixTree | None:
        """The past of its tenant, if there is any."""
        return None if growing.tenant is None else self.past.trees.get(growing.tenant)

    def remembered(self, growing: SuffixSequence, tail: Sequence[int]) -> Places:
        """What its tenant's past holds for a text's last 1, 2, ... tokens, as long as they occurred there."""
        tree = self.past_of(growing)
        places = growing.reader.read(tree, growing.tree.text)
        for token in tail:
            places = places if tree is None else tree.follow(places, token)
        return places

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        """Never unread; any depth."""
        limit = [sys.maxsize if seq_id in self.sequences else 0 for seq_id in seq_ids]
        return Outlook([0] * len(seq_ids), limit, lambda i, least: self.estimate(seq_ids[i], least), ends_early=True)

    def estimate(self, seq_id: int, least: float = 0.0) -> Sequence[float]:
        """The survival of each token of the likeliest chain, as far as it is at least `least`; kept for `propose`."""
        growing = self.sequences.get(seq_id)
        if growing is None:
            return ()
        growing.likeliest, growing.least = None, min(1.0, max(LEAST, least))
        growing.likeliest = self.guess(growing, Budget(AUTO_DEPTH, min_survival=growing.least))
        return growing.likeliest.survival[1:]

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


class Sources(NamedTuple):
    """What continuations are looked up in: a text, its tenant's past, and what a table offers."""

    text: SuffixTree
    past: SuffixTree | None
    offers: TableOffers

    def behind(self, contexts: Contexts, token: int) -> Contexts:
        """Those of the path with one more token."""
        past, text, last = contexts
        past = () if self.past is None else self.past.follow(past, token)
        return past, self.text.follow(text, token), (*last[1 - ORDER :], token)

    def counted(self, contexts: Contexts) -> list[tuple[int, int, Node | Leaf]]:
        """The contexts that count: their length, and what is stored; the text's after the past's of the same length."""
        counted: list[tuple[int, int, Node | Leaf]] = []
        most = self.text.depth - 1  # behind longer ones nothing is stored
        for source, places in enumerate(contexts[:2]):
            if places:
                longest = len(places) if len(places) < most else most
                if longest > 1:
                    counted.append((longest // 2, source, places[longest // 2 - 1]))
                counted.append((longest, source, places[longest - 1]))
        if len(counted) > 2:
            counted.sort()  # no length stands there twice of one source, so that places are not compared
        return counted

    def chances(self, contexts: Contexts, width: int) -> list[tuple[float, int]]:
        """Minus the chance of each of the `width` likeliest continuations, and its token, the likeliest first."""
        table, counted = self.offers(contexts[2]), self.counted(contexts)
        if not counted:
            return [(-chance, token) for token, chance in table.items()][:width]
        chances = dict(table) if width > 1 else {}
        corrections = []
        for length, _, place in counted:
            weight = WEIGHTS[length - 1] if length < len(WEIGHTS) else WEIGHTS[-1]
            count, tokens, several = place.followed()
            corrections.append((weight, count, tokens, several, weight + count))
            for token in tokens:
                chances[token] = table.get(token, 0.0)
            if several is not None and width == 1:
                for token in several.keys() & table.keys():
                    chances[token] = table[token]
        top = 0.0
        for token, chance in table.items():
            if chance < top:  # the likeliest is this one or has a count
                break
            chances[token] = top = chance
        ranked = []
        for token, chance in chances.items():
            for weight, count, tokens, several, total in corrections:
                chance *= weight
                if several is None:
                    if token in tokens:
                        chance += count
                elif token in several:
                    chance += several[token].count
                chance /= total
            ranked.append((-chance, token))
        ranked.sort()
        return ranked[:width]


def likeliest(root: int, sources: Sources, contexts: Contexts, budget: Budget) -> HostTree:
    """The likeliest of all paths, as many as the budget allows; of a tree with fewer guesses, the first ones.

    Best first: a path is at most as likely as the one it goes on from. Among equals the smaller tokens come first.
    """
    tree, least = HostTree.of_root(root), max(LEAST, budget.min_survival)
    heap: list[tuple[float, int, int, int, Contexts]] = []
    node, chance, depth = 0, 1.0, 0
    for num_left in range(budget.nodes, 0, -1):
        for minus, token in sources.chances(contexts, budget.width) if depth < budget.depth else ():
            if -minus * chance < least:
                break
            heapq.heappush(heap, (minus * chance, node, token, depth + 1, contexts))
        if not heap:
            break
        minus, parent, token, depth, contexts = heapq.heappop(heap)
        node, chance = tree.add(token, parent, -minus), -minus
        if num_left > 1:
            contexts = sources.behind(contexts, token)
    return tree


def shortened(chain: HostTree, budget: Budget) -> HostTree:
    """A chain's guesses within a budget."""
    num_nodes = 1 + min(budget.depth, budget.nodes, len(chain.tokens) - 1)
    while chain.survival[num_nodes - 1] < budget.min_survival:
        num_nodes -= 1
    return HostTree(chain.tokens[:num_nodes], chain.parents[:num_nodes], survival=chain.survival[:num_nodes])


def plan_suffix(spec: DraftSpec, context: DraftContext) -> DraftPlan:
    """`suffix[:FILE]`: contexts of this text and of past answers, which FILE stores; created with the first answer.

    `suffix:DIR`: past answers are not stored, and beside them counts what the folder's n-grams say.
    """
    file, table = files_of(spec, context.tokenizer.fingerprint)
    name = context.unused(PAST)

    def build(granted: CacheTokens, _progress: ProgressCallback | None, _target: Runner) -> SuffixDrafter:
        return SuffixDrafter(Past(max_bytes=granted.get(name, MAX_BYTES), file=file), table)

    return DraftPlan({}, build, remembered_bytes={name: MAX_BYTES})


def files_of(spec: DraftSpec, vocabulary: Callable[[], str]) -> tuple[PastFile | None, NgramTable | None]:
    """The file of past answers, or the table, that `suffix[:FILE|DIR]` names; `vocabulary` is what they must be of."""
    refuse_members(spec)
    if spec.argument is None:
        return None, None
    path = Path(spec.argument).expanduser()
    return (None, NgramTable.read(path, vocabulary())) if path.is_dir() else (PastFile(path, vocabulary()), None)
