"""Suffix decoding: drafts the tokens that most often followed the text's last tokens, in the text and in past answers.

This module estimates the probability of a continuation from counts. A context is the text's last 1, 2, ... tokens. Of
the contexts that occurred before, the longest and the one half as long are used, both from the text and from its
tenant's past answers. The estimate starts with the shortest context, and each longer one corrects it, the more so the
longer it is, the more often it occurred and the fewer tokens followed it, as in the blended models of compression by
partial matching (Cleary and Witten, 1984). A draft has the likeliest paths, so it is deterministic and has no
distribution to declare. The trees of contexts are those of SuffixDecoding (Oliaro et al., 2411.04975).
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
from forerun.draft.text.suffix_past import DEPTH, MAX_BYTES, PastAnswers, PastCursor, PastFile, usable_path
from forerun.draft.text.suffix_tree import Insertion, Leaf, Node, SuffixTree
from forerun.models.bundled import BUNDLED_TABLES
from forerun.models.runner import Runner
from forerun.sampling.draws import Draws
from forerun.tree import DraftTree, HostTree, survival_of

PAST = "past answers"
LEAST_SURVIVAL = 0.1  # paths with less are not drafted
# The occurrences that the estimate of shorter contexts counts as, for each token that followed a context of 1, 2, ...
# tokens in past answers, and in the text, which is more like itself than other texts are (benchmarks/RESULTS.md).
WEIGHTS = tuple([scale / (1 + i) ** power for i in range(DEPTH)] for scale, power in ((20.0, 1.5), (3.0, 1.0)))
CAUTION = 1.15  # power of an estimate, since the highest of several estimates is too high on average
CACHED_CONTEXTS = 4096  # of a table, half a kilobyte each: most contexts are looked up often
Places = Sequence[Node | Leaf]  # of the last 1, 2, ... tokens of a path, up to the longest suffix that occurs in a tree
TableLookup = Callable[[tuple[int, ...]], Mapping[int, float]]
# The places of a path's end in the tree of past answers and in that of its text, and its last ORDER tokens.
Contexts = tuple[Places, Places, tuple[int, ...]]


@dataclass(slots=True)
class SuffixSequence:
    """One sequence: the tree of its text, whose last token is the root, and its place in its tenant's past answers.

    While `tenant` is None, past answers are not used. `estimated` is the chain of the last estimate, down to the
    survival `least`, until the text grows.
    """

    tree: SuffixTree
    cursor: PastCursor = field(default_factory=PastCursor)
    tenant: str | None = None
    num_prompt: int = 0
    estimated: HostTree | None = None
    least: float = LEAST_SURVIVAL


class SuffixDrafter:
    """Drafts what followed the same context before. The answers of forgotten sequences stay in `past`."""

    taps: tuple[int, ...] = ()
    names: tuple[str, ...] = ("suffix",)

    def __init__(self, past: PastAnswers | None = None, table: NgramTable | None = None) -> None:
        self.past = PastAnswers() if past is None else past
        self.lookup: TableLookup = lambda last: {}
        if table is not None:
            self.lookup = lru_cache(CACHED_CONTEXTS)(table.continuations)
        self.sequences: dict[int, SuffixSequence] = {}

    def observe(self, committed: Committed) -> None:
        """Append the final tokens, with the root, to each text, in O(1) per token and repeated context."""
        for i, (seq_id, tokens, root) in enumerate(committed.rows()):
            sequence = self.sequences.get(seq_id)
            if sequence is None:
                self.past.reopen(seq_id)
                sequence = self.sequences[seq_id] = SuffixSequence(SuffixTree(self.past.depth))
            if committed.tenants:
                sequence.tenant, sequence.num_prompt = committed.tenants[i], committed.num_prompts[i]
            sequence.estimated = None
            for token in new_tokens(sequence, tokens, root):
                sequence.tree.append(token)

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        """The likeliest chain or tree of each sequence within its budget; with a minimum, also its survival."""
        tails = {} if tail is None else {seq_id: (tokens, root) for seq_id, tokens, root in tail.rows()}
        trees = []
        for row, budget in zip(draws.rows, budgets, strict=True):
            sequence, tree = self.sequences.get(row.seq_id), None
            if sequence is not None and budget.depth:
                after_text = new_tokens(sequence, *tails[row.seq_id]) if row.seq_id in tails else ()
                tree = self.draft(sequence, budget, after_text)
            trees.append(HostTree.of_root(row.tokens[-1]) if tree is None else tree)
        if all(len(tree.tokens) == 1 for tree in trees):
            return Draft(DraftTree.bare(draws.roots_tokens))
        width = max((budget.width for budget in budgets), default=1)
        with_survival = any(budget.min_survival for budget in budgets)
        return Draft(DraftTree.of_hosts(trees, width), survival_of(trees) if with_survival else None)

    def draft(self, sequence: SuffixSequence, budget: Budget, after_text: Sequence[int] = ()) -> HostTree:
        """The likeliest tree within a budget, from the text followed by `after_text`."""
        chain = None if after_text or budget.width > 1 else sequence.estimated
        least = max(LEAST_SURVIVAL, budget.min_survival)
        if chain is not None and (budget.depth < len(chain.tokens) or least >= sequence.least):
            return shortened(chain, budget)
        tree, places = sequence.tree, self.places_in_past(sequence, after_text)
        steps: list[Insertion] = []
        for token in after_text:
            tree.append(token, steps)
        contexts = (places, tree.matches, tuple(tree.text[-ORDER:]))
        grown = likeliest(tree.text[-1], Sources(tree, self.past_of(sequence), self.lookup), contexts, budget)
        tree.undo(steps)
        return grown

    def past_of(self, sequence: SuffixSequence) -> SuffixTree | None:
        """The tree of the past answers of the sequence's tenant; None if there are none."""
        return None if sequence.tenant is None else self.past.trees.get(sequence.tenant)

    def places_in_past(self, sequence: SuffixSequence, after_text: Sequence[int]) -> Places:
        """The places of the end of text and `after_text` in the tree of the tenant's past answers."""
        tree = self.past_of(sequence)
        places = sequence.cursor.read(tree, sequence.tree.text)
        for token in after_text:
            places = places if tree is None else tree.follow(places, token)
        return places

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        """Any depth for a known sequence; nothing is ever unread."""
        limit = [sys.maxsize if seq_id in self.sequences else 0 for seq_id in seq_ids]
        return Outlook([0] * len(seq_ids), limit, lambda i, least: self.estimate(seq_ids[i], least))

    def estimate(self, seq_id: int, least: float = 0.0) -> Sequence[float]:
        """The survival of each token of the likeliest chain, down to `least`; the chain is saved for `propose`."""
        sequence = self.sequences.get(seq_id)
        if sequence is None:
            return ()
        sequence.estimated, sequence.least = None, min(1.0, max(LEAST_SURVIVAL, least))
        sequence.estimated = self.draft(sequence, Budget(AUTO_DEPTH, min_survival=sequence.least))
        return sequence.estimated.survival[1:]

    def forget(self, seq_ids: Sequence[int]) -> None:
        """Drop these sequences; their answers become past answers of their tenants. Unknown ids are ignored."""
        for seq_id in seq_ids:
            sequence = self.sequences.pop(seq_id, None)
            if sequence is not None and sequence.tenant is not None:
                self.past.add(seq_id, sequence.tenant, sequence.tree.text[sequence.num_prompt :])


def new_tokens(sequence: SuffixSequence, tokens: Sequence[int], root: int) -> Sequence[int]:
    """The committed tokens that are not in the sequence's text yet; its last token, the old root, is `tokens[0]`."""
    if not sequence.tree.text:
        return [*tokens, root]
    return [*tokens[1:], root] if tokens else ()


class Sources(NamedTuple):
    """Where continuations are looked up: the text, its tenant's past answers, and a table of n-grams."""

    text: SuffixTree
    past: SuffixTree | None
    lookup: TableLookup

    def extended(self, contexts: Contexts, token: int) -> Contexts:
        """The contexts of the path with one more token."""
        past, text, last = contexts
        past = () if self.past is None else self.past.follow(past, token)
        return past, self.text.follow(text, token), (*last[1 - ORDER :], token)

    def used(self, contexts: Contexts) -> list[tuple[int, int, Node | Leaf]]:
        """The contexts whose counts are used, by ascending length: length, source (0 past, 1 text), and place."""
        used: list[tuple[int, int, Node | Leaf]] = []
        most = self.text.depth - 1  # the tree has no continuations of longer contexts
        for source, places in enumerate(contexts[:2]):
            if places:
                longest = len(places) if len(places) < most else most
                if longest > 1:
                    used.append((longest // 2, source, places[longest // 2 - 1]))
                used.append((longest, source, places[longest - 1]))
        if len(used) > 2:
            used.sort()  # (length, source) are distinct, so places are never compared
        return used

    def chances(self, contexts: Contexts, width: int) -> list[tuple[float, int]]:
        """The `width` likeliest continuations, likeliest first, each as (minus its chance, token)."""
        table, used = self.lookup(contexts[2]), self.used(contexts)
        if not used:
            return [(-(chance**CAUTION), token) for token, chance in table.items()][:width]
        # A chain needs the likeliest token only: one with a count, or the table's likeliest, which beats all others.
        chances = dict(table) if width > 1 else {}
        corrections = []
        for length, source, place in used:
            count, tokens, several = place.followed()
            weight = WEIGHTS[source][length - 1] * (1 if several is None else len(several))
            corrections.append((weight, count, tokens, several, weight + count))
            for token in tokens:
                chances[token] = table.get(token, 0.0)
            if several is not None and width == 1:
                for token in several.keys() & table.keys():
                    chances[token] = table[token]
        top = 0.0
        for token, chance in table.items():
            if chance < top:
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
        return [(-((-minus) ** CAUTION), token) for minus, token in ranked[:width]]


def likeliest(root: int, sources: Sources, contexts: Contexts, budget: Budget) -> HostTree:
    """The tree of the likeliest paths within a budget, found best first; a smaller budget gives its first nodes.

    A path is at most as likely as its parent. Of equally likely paths those with the smaller tokens come first.
    """
    tree, least = HostTree.of_root(root), max(LEAST_SURVIVAL, budget.min_survival)
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
            contexts = sources.extended(contexts, token)
    return tree


def shortened(chain: HostTree, budget: Budget) -> HostTree:
    """The first tokens of a chain, within a budget."""
    num_nodes = 1 + min(budget.depth, len(chain.tokens) - 1)
    while chain.survival[num_nodes - 1] < budget.min_survival:
        num_nodes -= 1
    return HostTree(chain.tokens[:num_nodes], chain.parents[:num_nodes], survival=chain.survival[:num_nodes])


def plan_suffix(spec: DraftSpec, context: DraftContext) -> DraftPlan:
    """`suffix[:FILE|DIR]`: contexts of the text and of past answers. FILE stores past answers; the first creates it.

    With a folder DIR, or the name of a bundled one, past answers are not stored, and its table of n-grams is used too.
    """
    file, table = files_of(spec, context.tokenizer.fingerprint)
    name = context.unused(PAST)

    def build(granted: CacheTokens, _progress: ProgressCallback | None, _target: Runner) -> SuffixDrafter:
        return SuffixDrafter(PastAnswers(max_bytes=granted.get(name, MAX_BYTES), file=file), table)

    return DraftPlan({}, build, remembered_bytes={name: MAX_BYTES})


def files_of(spec: DraftSpec, vocabulary: Callable[[], str]) -> tuple[PastFile | None, NgramTable | None]:
    """The file of past answers or the table that `suffix[:FILE|DIR]` names, checked against the `vocabulary`."""
    refuse_members(spec)
    if spec.argument is None:
        return None, None
    with usable_path(spec.argument):
        path = Path(spec.argument).expanduser()
        path = path if path.exists() else BUNDLED_TABLES.get(spec.argument, path)
        is_table = path.is_dir()
    return (None, NgramTable.read(path, vocabulary())) if is_table else (PastFile(path, vocabulary()), None)
