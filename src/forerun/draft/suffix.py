"""Suffix decoding: guess what most often followed the last few tokens, in this text and in past answers.

Decides which context to trust: of the text's last 1, 2, ... tokens that occurred before, the one from which the most
tokens are expected to be accepted. A longer context may guess further, and a path ends where it is no longer likely.
Past answers are kept by tenant, up to a size, the oldest forgotten first: no tenant's text drafts for another. Knows
nothing of models. A function of text alone, so there is no law to declare. After SuffixDecoding (Oliaro et al.,
2411.04975).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from forerun.draft.base import NO_DRAFT, Budget, Committed, Draft, Outlook
from forerun.draft.suffix_past import Past
from forerun.draft.suffix_tree import Leaf, Node, Step, SuffixTree, continuations, likeliest
from forerun.sampling.draws import Draws
from forerun.tree import DraftTree

DEPTH = 24  # longest context, in tokens
REACH = 1.0  # guesses per token of context
LEAST = 0.1  # a path less likely than this is not guessed


@dataclass(slots=True)
class Answer:
    """One sequence: the contexts of its text, its root the last token of it. What `forget` needs to know of it."""

    tree: SuffixTree
    tenant: str = ""
    num_prompt: int | None = None  # not known before it is drafted

    @property
    def text(self) -> list[int]:
        """All of its text, the root last."""
        return self.tree.text


@dataclass(slots=True)
class Guesses:
    """A tree of guesses while it grows: tokens, parents (0 is the root), and how likely each is by counts alone."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    chances: list[float] = field(default_factory=list)

    def add(self, parent: int, token: int, chance: float) -> int:
        """Append a guess; returns its node."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.chances.append(chance)
        return len(self.tokens)

    @property
    def expected(self) -> float:
        """Guesses that will be accepted, if the past is a guide."""
        return math.fsum(self.chances)


class SuffixDrafter:
    """Copies what followed before. `past` holds other answers' contexts."""

    taps: tuple[int, ...] = ()
    arms: tuple[str, ...] = ("suffix",)

    def __init__(self, past: Past | None = None, depth: int = DEPTH) -> None:
        self.depth = depth
        self.past = past or Past(depth)
        self.answers: dict[int, Answer] = {}

    def observe(self, news: Committed) -> None:
        """Enter what became final, the root included: in O(1) per token and matching context."""
        for seq_id, tokens, root in news.rows():
            answer = self.answers.get(seq_id)
            if answer is None:
                self.past.drop(seq_id)  # it is back: what was kept of it stands in its text
                answer = self.answers[seq_id] = Answer(SuffixTree(self.depth))
            known = 1 if answer.text else 0  # the last root is the first of the news
            for token in [*tokens[known:], root] if tokens or not known else []:
                answer.tree.append(token)

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        """The likeliest chain or tree of each sequence, within its budget."""
        tails = {} if tail is None else {seq_id: [*tokens[1:], root] for seq_id, tokens, root in tail.rows() if tokens}
        drafts = []
        for row, budget in zip(draws.rows, budgets, strict=True):
            answer = self.answers.get(row.seq_id)
            if answer is not None:
                answer.tenant, answer.num_prompt = row.tenant, row.num_prompt
            with_tail = self.told(answer, tails.get(row.seq_id, ()))
            drafts.append(self.guess(answer, budget) if answer and budget is not NO_DRAFT else Guesses())
            if answer is not None:
                answer.tree.undo(with_tail)
        return as_draft([row.tokens[-1] for row in draws.rows], drafts, budgets)

    def told(self, answer: Answer | None, tail: Sequence[int]) -> list[Step]:
        """A tail entered for the moment."""
        return [answer.tree.append(token) for token in tail] if answer else []

    def guess(self, answer: Answer, budget: Budget) -> Guesses:
        """The best of what all contexts offer, the text's own first among equals, then the longest."""
        best = Guesses()
        for length, place in self.contexts(answer):
            most = min(budget.depth, budget.nodes, math.floor(length * REACH))
            if most <= best.expected:
                continue  # no path of this context can be expected to go further
            found = grown(place, budget, most)
            if found.expected > best.expected:
                best = found
        return best

    def contexts(self, answer: Answer) -> Iterator[tuple[int, Node | Leaf]]:
        """The ends of the text that occurred before, the longest first: in the text itself, then in past answers."""
        own = answer.tree.matches
        yield from ((length, own[length - 1]) for length in range(len(own), 0, -1))
        past = self.past.find(answer.tenant, answer.text)
        yield from ((length, past[length - 1]) for length in range(len(past), 0, -1))

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        """Never behind; as deep as the longest context reaches."""
        limits = []
        for seq_id in seq_ids:
            answer = self.answers.get(seq_id)
            longest = max((length for length, _ in self.contexts(answer)), default=0) if answer else 0
            limits.append(math.floor(longest * REACH))
        return Outlook(unread=[0] * len(seq_ids), limit=limits, expected=[None] * len(seq_ids))

    def adopt(self, seq_ids: Sequence[int], prefixes: Sequence[Sequence[int]]) -> Sequence[int]:
        """All of each prefix: contexts need tokens alone."""
        return [len(prefix) for prefix in prefixes]

    def forget(self, seq_ids: Sequence[int]) -> None:
        """Drop these sequences; what they answered becomes past."""
        for seq_id in seq_ids:
            answer = self.answers.pop(seq_id, None)
            if answer is not None and answer.num_prompt is not None:
                self.past.add(seq_id, answer.tenant, answer.text[answer.num_prompt :])


def grown(place: Node | Leaf, budget: Budget, most: int) -> Guesses:
    """A context's likeliest chain of at most `most` guesses, or its likeliest tree of as many as the budget allows."""
    if budget.width == 1:
        return chain(place, most, max(LEAST, budget.price))
    return best_first(place, budget, most)


def chain(place: Node | Leaf, most: int, least: float) -> Guesses:
    """Follow the likeliest continuation while the whole path is likely."""
    guesses, chance = Guesses(), 1.0
    while len(guesses.tokens) < most and (found := likeliest(place)):
        token, place, share = found
        chance *= share
        if chance < least:
            break
        guesses.add(len(guesses.tokens), token, chance)
    return guesses


def best_first(place: Node | Leaf, budget: Budget, most: int) -> Guesses:
    """Of all paths of at most `most` guesses the likeliest: each is at least as likely as all that were left out."""
    guesses, order = Guesses(), itertools.count()
    offers: list[tuple[float, int, int, int, int, Node | Leaf]] = []  # -chance, age, parent, depth, token, context

    def offer(parent: int, depth: int, chance: float, context: Node | Leaf) -> None:
        for token, longer, share in continuations(context)[: budget.width]:
            if depth <= most and chance * share >= max(LEAST, budget.price):
                heapq.heappush(offers, (-chance * share, next(order), parent, depth, token, longer))

    offer(0, 1, 1.0, place)
    while offers and len(guesses.tokens) < budget.nodes:
        minus, _, parent, depth, token, longer = heapq.heappop(offers)
        offer(guesses.add(parent, token, -minus), depth + 1, -minus, longer)
    return guesses


def as_draft(roots: Sequence[int], drafts: Sequence[Guesses], budgets: Sequence[Budget]) -> Draft:
    """Guesses as trees on the host, and how likely they are."""
    nodes = 1 + max((len(guesses.tokens) for guesses in drafts), default=0)

    def padded(first: float, rows: Sequence[Sequence[float]], empty: float) -> list[list[float]]:
        return [[first, *row, *[empty] * (nodes - 1 - len(row))] for row in rows]

    tokens = [[root, *g.tokens, *[-1] * (nodes - 1 - len(g.tokens))] for root, g in zip(roots, drafts, strict=True)]
    parents = torch.tensor(padded(-1, [g.parents for g in drafts], -1), dtype=torch.long)
    width = max((budget.width for budget in budgets), default=1)
    depth = min(nodes - 1, max((budget.depth for budget in budgets), default=0))
    tree = DraftTree(torch.tensor(tokens, dtype=torch.long).view(len(roots), nodes), parents, depth, width)
    survival = torch.tensor(padded(1.0, [g.chances for g in drafts], 0.0), dtype=torch.float32)
    return Draft(tree, survival=survival)
