"""Drafters that break every rule of their protocol, which must not change the output.

Each is a function from a round to a tree; `Hostile` makes a drafter of it. Trees are built without the checks of
DraftTree's constructor. The oracle is among them: it breaks no rule, but knows the answer.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from forerun.draft.base import Budget, Committed, Draft, Outlook
from forerun.sampling.draws import Draws
from forerun.tree import DraftLaw, DraftTree
from kit.drafters import Stateless


@dataclass(frozen=True)
class Situation:
    """A round as a hostile drafter sees it: more than the protocol gives a drafter."""

    draws: Draws
    budgets: Sequence[Budget]
    answers: Sequence[Sequence[int]]  # each prompt with the answer of plain decoding
    random: random.Random

    @property
    def roots(self) -> Tensor:
        return self.draws.roots_tokens

    @property
    def depth(self) -> int:
        return max(budget.depth for budget in self.budgets)

    def truth(self, depth: int) -> Tensor:
        """The right continuation of every row, -1 where it is not known."""
        found = []
        for row in self.draws.rows:
            text = list(row.tokens)
            known = [list(a) for a in self.answers if list(a[: len(text)]) == text]
            rest = known[0][len(text) :][:depth] if known else []
            found.append(rest + [-1] * (depth - len(rest)))
        return torch.tensor(found, dtype=torch.long).view(len(found), depth)


class Hostile(Stateless):
    """A drafter whose drafts a function makes, and whose outlook has no limit."""

    def __init__(self, make: Callable[[Situation], DraftTree | Draft], answers: Sequence[Sequence[int]]) -> None:
        self.make = make
        self.answers = answers
        self.random = random.Random(0)
        self.num_proposed = 0

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        self.num_proposed += 1
        return drafted(self.make, Situation(draws, budgets, self.answers, self.random))

    @override
    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        return Outlook([0] * len(seq_ids), [10**9] * len(seq_ids))


def drafted(make: Callable[[Situation], DraftTree | Draft], now: Situation) -> Draft:
    """The draft of a rule-breaking function for a round."""
    made = make(now)
    return made if isinstance(made, Draft) else Draft(made)


def tree_of(tokens: Tensor, parents: Tensor, depth: int, width: int = 1, q: DraftLaw | None = None) -> DraftTree:
    """A DraftTree without the checks of its constructor."""
    tree = object.__new__(DraftTree)
    fields = {
        "tokens": tokens,
        "parents": parents,
        "depth": depth,
        "width": width,
        "q": q,
        "known": None,
        "sound": False,
    }
    for name, value in fields.items():
        object.__setattr__(tree, name, value)
    return tree


def chain_parents(batch: int, nodes: int) -> Tensor:
    return torch.arange(-1, nodes - 1).expand(batch, nodes).contiguous()


def chains(now: Situation, draft_tokens: Tensor) -> DraftTree:
    """The tokens as chains, unchecked."""
    tokens = torch.cat([now.roots[:, None].to(draft_tokens.dtype), draft_tokens], 1)
    return tree_of(tokens, chain_parents(*tokens.shape), draft_tokens.shape[1])


def noise(now: Situation, low: int, high: int, *shape: int) -> Tensor:
    return torch.tensor([now.random.randrange(low, high) for _ in range(math.prod(shape))]).view(shape)


def oracle(now: Situation) -> DraftTree:
    return DraftTree.chains(now.roots, now.truth(now.depth))


def always_wrong(now: Situation) -> DraftTree:
    truth = now.truth(now.depth)
    return DraftTree.chains(now.roots, torch.where(truth >= 0, (truth + 1) % now.draws.vocab, 0))


def half_right(now: Situation) -> DraftTree:
    truth = now.truth(now.depth)
    return DraftTree.chains(now.roots, torch.where(noise(now, 0, 2, *truth.shape) > 0, truth, 5))


def empty(now: Situation) -> DraftTree:
    return DraftTree.bare(now.roots)


def too_deep(now: Situation) -> DraftTree:
    return chains(now, now.truth(now.depth + 40).clamp_min(0))


def too_wide(now: Situation) -> DraftTree:
    """A star of the whole vocabulary."""
    ids = torch.arange(now.draws.vocab).expand(len(now.budgets), -1)
    tokens = torch.cat([now.roots[:, None], ids], 1)
    parents = torch.zeros_like(tokens)
    parents[:, 0] = -1
    return tree_of(tokens, parents, 1, now.draws.vocab)


def twins(now: Situation) -> DraftTree:
    """Siblings with the same token, each with children."""
    truth = now.truth(2).clamp_min(0)
    first, second = truth[:, :1], truth[:, 1:]
    tokens = torch.cat([now.roots[:, None], first, first, second, second], 1)
    return tree_of(tokens, torch.tensor([-1, 0, 0, 1, 2]).expand_as(tokens), 2, 2)


def ids_out_of_range(now: Situation) -> DraftTree:
    return chains(now, noise(now, -(2**40), 2**40, len(now.budgets), max(1, now.depth)))


def just_out_of_range(now: Situation) -> DraftTree:
    return chains(now, torch.full((len(now.budgets), max(1, now.depth)), now.draws.vocab))


def parents_at_random(now: Situation) -> DraftTree:
    shape = (len(now.budgets), 9)
    return tree_of(noise(now, 0, now.draws.vocab, *shape), noise(now, -5, 30, *shape), 3, 2)


def own_parent(now: Situation) -> DraftTree:
    tokens = torch.cat([now.roots[:, None], now.truth(3).clamp_min(0)], 1)
    return tree_of(tokens, torch.arange(4).expand_as(tokens), 3)


def wrong_roots(now: Situation) -> DraftTree:
    tree = oracle(now)
    return DraftTree((tree.tokens + 1) % now.draws.vocab, tree.parents, tree.depth)


def holes(now: Situation) -> DraftTree:
    """Padding in the middle of chains."""
    draft_tokens = now.truth(max(now.depth, 3)).clamp_min(0)
    draft_tokens[:, 1] = -1
    return chains(now, draft_tokens)


def no_columns(now: Situation) -> DraftTree:
    nothing = torch.empty(len(now.budgets), 0, dtype=torch.long)
    return tree_of(nothing, nothing, 4)


def one_dimension(now: Situation) -> DraftTree:
    return tree_of(now.roots, torch.full_like(now.roots, -1), 0)


def floats(now: Situation) -> DraftTree:
    tree = oracle(now)
    tokens = tree.tokens.float()
    tokens[:, 1:] = math.nan
    return tree_of(tokens, tree.parents, tree.depth)


def altered(change: Callable[[Tensor, Tensor, int], tuple[Any, ...]]) -> Callable[[Situation], DraftTree]:
    """The oracle's tree with tokens, parents and depth changed by a function."""

    def make(now: Situation) -> DraftTree:
        tree = oracle(now)
        return tree_of(*change(tree.tokens, tree.parents, tree.depth))

    return make


ALTERED = {
    "one_row_short": altered(lambda tokens, parents, depth: (tokens[1:], parents[1:], depth)),
    "one_row_over": altered(
        lambda tokens, parents, depth: (torch.cat([tokens, tokens[:1]]), torch.cat([parents, parents[:1]]), depth)
    ),
    "short_integers": altered(lambda tokens, parents, depth: (tokens.int(), parents.int(), depth)),
    "unequal_shapes": altered(lambda tokens, parents, depth: (tokens, parents[:, :-1], depth)),
    "understated_depth": altered(lambda tokens, parents, depth: (tokens, parents, 1)),
    "absurd_bounds": altered(lambda tokens, parents, depth: (tokens, parents, 10**6, 10**6)),
    "negative_depth": altered(lambda tokens, parents, depth: (tokens, parents, -3, -1)),
}


def nan_logits(now: Situation) -> DraftTree:
    """Draws from logits that are no numbers."""
    rows = len(now.budgets)
    drawn = now.draws.children(torch.full((rows, now.draws.vocab), math.nan), now.draws.roots(), 2)
    tokens = torch.cat([now.roots[:, None], drawn.tokens], 1)
    return tree_of(tokens, torch.tensor([-1, 0, 0]).expand_as(tokens), 1, 2)


def nan_confidence(now: Situation) -> Draft:
    tree = oracle(now)
    return Draft(tree, survival=torch.full(tree.tokens.shape, math.nan))


def laws(value: float) -> Callable[[Situation], DraftTree]:
    """The oracle's tree with a law that is none: all entries are `value`."""

    def make(now: Situation) -> DraftTree:
        tree = oracle(now)
        probs = torch.full((1, now.draws.vocab), value)
        return tree_of(tree.tokens, tree.parents, tree.depth, 1, DraftLaw(torch.zeros_like(tree.tokens), probs))

    return make


def law_out_of_range(now: Situation) -> DraftTree:
    tree, probs = oracle(now), torch.full((1, now.draws.vocab), 1 / now.draws.vocab)
    return tree_of(tree.tokens, tree.parents, tree.depth, 1, DraftLaw(torch.full_like(tree.tokens, 99), probs))


HOSTILE: dict[str, Callable[[Situation], DraftTree | Draft]] = {
    make.__name__: make
    for make in (
        oracle,
        always_wrong,
        half_right,
        empty,
        too_deep,
        too_wide,
        twins,
        ids_out_of_range,
        just_out_of_range,
        parents_at_random,
        own_parent,
        wrong_roots,
        holes,
        no_columns,
        one_dimension,
        floats,
        nan_logits,
        nan_confidence,
        law_out_of_range,
    )
}
HOSTILE |= ALTERED
HOSTILE |= {f"law_of_{value}": laws(value) for value in (math.nan, math.inf, -1.0, 0.0, 7.0)}
