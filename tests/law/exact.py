"""Exact enumeration of what the verification kernels emit, over every draft, every coin and every next token.

Models are random context-dependent laws in Fractions; drafts are enumerated with their exact probabilities and verified
by `forerun.verify.rules` in float64. The result is the probability of every string that one round can emit. Completed
with the target's law it must equal the target's law, which is the definition of lossless.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor

from forerun.tree import DraftLaw, DraftTree
from forerun.verify.rules import AcceptLaw, block_law, follow, token_law, walk

Law = tuple[Fraction, ...]
Context = tuple[int, ...]
Model = Callable[[Context], Law]
Rule = Callable[[DraftTree, Tensor, Tensor], AcceptLaw]
TOLERANCE = 1e-12
BELOW_ONE = math.nextafter(1.0, 0.0)


class Family:
    """A target, a middle model and a drafter, drawn at random: every context has its own rational law, some zeros."""

    def __init__(self, seed: int, vocab: int, zeros: float = 0.2) -> None:
        self.seed, self.vocab, self.zeros = seed, vocab, zeros
        self._laws: dict[tuple[str, Context], Law] = {}

    def _law(self, model: str, context: Context) -> Law:
        if (model, context) not in self._laws:
            rng = random.Random(f"{self.seed} {model} {context}")
            counts = [0 if rng.random() < self.zeros else rng.randint(1, 9) for _ in range(self.vocab)]
            counts[rng.randrange(self.vocab)] += 1
            self._laws[model, context] = tuple(Fraction(count, sum(counts)) for count in counts)
        return self._laws[model, context]

    def p(self, context: Context) -> Law:
        return self._law("p", context)

    def mid(self, context: Context) -> Law:
        return self._law("mid", context)

    def q(self, context: Context) -> Law:
        return self._law("q", context)


def families(count: int, zeros: float = 0.2) -> list[Family]:
    """Half with 3 tokens, half with 4: with 2, some wrong rules are right by accident."""
    return [Family(seed, vocab=3 + seed % 2, zeros=zeros) for seed in range(count)]


@dataclass(frozen=True)
class Draft:
    """One possible draft, and the probability with which a round offers it.

    `tokens` and `parents` are those of the nodes without the root; a parent of -1 is the root. `q[0]` is the law that
    the root's children were drawn from, `q[i]` that of the children of node i - 1; None where they are not drawn.
    """

    weight: Fraction | float
    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    q: tuple[Law | None, ...] = (None,)

    def context(self, node: int) -> Context:
        """The text up to and with a node; -1 is the root."""
        text: Context = ()
        while node >= 0:
            text, node = (self.tokens[node], *text), self.parents[node]
        return text

    def grown(self, chance: Fraction, token: int, parent: int) -> Draft:
        return replace(
            self,
            weight=self.weight * chance,
            tokens=(*self.tokens, token),
            parents=(*self.parents, parent),
            q=(*self.q, None),
        )

    def weighed(self, factor: Fraction | float) -> Draft:
        return replace(self, weight=self.weight * factor)

    def drawn_from(self, node: int, law: Law | None) -> Draft:
        return replace(self, q=tuple(law if i == node + 1 else old for i, old in enumerate(self.q)))


def bare() -> list[Draft]:
    return [Draft(Fraction(1))]


Stop = Callable[[Law, Context], bool]


def chains(model: Model, depth: int, stop: Stop | None = None, least: Fraction = Fraction(0)) -> list[Draft]:
    """Every chain of `depth` tokens drawn from `model`, under policies that end some of them.

    `stop(law, context)` may end one before a draw; a token below `least` is dropped when it was drawn, and ends it too.
    """
    drafts = bare()
    for step in range(depth):
        longer: list[Draft] = []
        for draft in drafts:
            context = draft.context(step - 1) if len(draft.tokens) == step else None
            if context is None or (stop is not None and stop(model(context), context)):
                longer.append(draft)
                continue
            law = model(context)
            known = draft.drawn_from(step - 1, law)
            for token, chance in enumerate(law):
                if chance:
                    longer.append(draft.weighed(chance) if chance < least else known.grown(chance, token, step - 1))
        drafts = longer
    return drafts


def trees(model: Model, shape: Sequence[int]) -> list[Draft]:
    """Every tree with these parents (-1 is the root), siblings drawn from `model` without replacement, in order.

    Where the support is used up, the lowest unused token is taken, without a draw.
    """
    drafts = bare()
    for parent in shape:
        longer: list[Draft] = []
        for draft in drafts:
            law = model(draft.context(parent))
            used = {token for token, above in zip(draft.tokens, draft.parents, strict=True) if above == parent}
            left = [Fraction(0) if token in used else chance for token, chance in enumerate(law)]
            if not sum(left):
                left[min(set(range(len(law))) - used)] = Fraction(1)
            known = draft.drawn_from(parent, law)
            longer += [known.grown(c / sum(left), token, parent) for token, c in enumerate(left) if c]
        drafts = longer
    return drafts


def chosen_tree(model: Model, shape: Sequence[int]) -> list[Draft]:
    """The one tree with these parents whose siblings are the model's most likely tokens, in order."""
    (draft,) = bare()
    for parent in shape:
        law = model(draft.context(parent))
        used = {token for token, above in zip(draft.tokens, draft.parents, strict=True) if above == parent}
        best = max(set(range(len(law))) - used, key=lambda token: (law[token], -token))
        draft = draft.grown(Fraction(1), best, parent)
    return [draft]


def with_tail(drafts: Sequence[Draft], model: Model) -> list[Draft]:
    """Each chain with one more token, drawn from `model`."""
    longer = []
    for draft in drafts:
        last = len(draft.tokens) - 1
        law = model(draft.context(last))
        known = draft.drawn_from(last, law)
        longer += [known.grown(chance, token, last) for token, chance in enumerate(law) if chance]
    return longer


@dataclass
class Emissions:
    """`mass[n][code]`: the probability that exactly this string of n tokens was emitted (code: base-vocab digits)."""

    vocab: int
    mass: dict[int, Tensor] = field(default_factory=dict)

    def add(self, length: int, codes: Tensor, weights: Tensor) -> None:
        empty = torch.zeros(self.vocab**length, dtype=torch.float64)
        self.mass.setdefault(length, empty).index_add_(0, codes, weights)


def completed(emissions: Emissions, target: Model, length: int) -> Tensor:
    """The law of the first `length` tokens when the target goes on after what was emitted."""
    vocab = emissions.vocab
    longest = max(length, *emissions.mass)
    law = emissions.mass.get(0, torch.zeros(1, dtype=torch.float64))
    for done in range(longest):
        more = torch.tensor(
            [[float(x) for x in target(text)] for text in itertools.product(range(vocab), repeat=done)],
            dtype=torch.float64,
        )
        law = (law[:, None] * more).flatten() + emissions.mass.get(done + 1, 0.0)
    return law.view(vocab**length, -1).sum(1)


def exact(target: Model, vocab: int, length: int) -> Tensor:
    """The target's own law over all strings of `length` tokens, from Fractions."""
    law = [
        math.prod((target(text[:i])[token] for i, token in enumerate(text)), start=Fraction(1))
        for text in itertools.product(range(vocab), repeat=length)
    ]
    return torch.tensor([float(mass) for mass in law], dtype=torch.float64)


def deviation(emissions: Emissions, target: Model) -> float:
    """Largest absolute error of the law over strings as long as the longest emission."""
    length = max(emissions.mass)
    return float((completed(emissions, target, length) - exact(target, emissions.vocab, length)).abs().max())


@dataclass(frozen=True)
class Batch:
    """Drafts in one batch, as the kernels take them."""

    tree: DraftTree
    p: Tensor
    row: Tensor
    weight: Tensor

    def repeated(self, times: int) -> Batch:
        """Every draft `times` over, one after another; the packed laws stay as they are."""
        tree = replace(
            self.tree,
            tokens=self.tree.tokens.repeat_interleave(times, 0),
            parents=self.tree.parents.repeat_interleave(times, 0),
            q=None,
        )
        return Batch(tree, self.p, *(each.repeat_interleave(times, 0) for each in (self.row, self.weight)))


def batched(drafts: Sequence[Draft], target: Model, vocab: int) -> Batch:
    """Ragged drafts padded to one tree, `p` and `q` packed, all in float64."""
    nodes = 1 + max(len(draft.tokens) for draft in drafts)
    tokens, parents, q_row, row, p_rows = [], [], [], [], []
    q_rows: dict[Law, int] = {}
    for draft in drafts:
        pad = [-1] * (nodes - 1 - len(draft.tokens))
        tokens.append([0, *draft.tokens, *pad])
        parents.append([-1, *(parent + 1 for parent in draft.parents), *pad])
        q_row.append([-1 if law is None else q_rows.setdefault(law, len(q_rows)) for law in draft.q] + pad)
        row.append([*range(len(p_rows), len(p_rows) + len(draft.tokens) + 1)] + [0] * len(pad))
        p_rows += [[float(x) for x in target(draft.context(node))] for node in range(-1, len(draft.tokens))]
    probs = torch.tensor([[float(x) for x in law] for law in q_rows], dtype=torch.float64).view(-1, vocab)
    depth = max((len(d.context(g)) for d in drafts for g in range(len(d.tokens))), default=0)
    width = max((d.parents.count(parent) for d in drafts for parent in d.parents), default=1)
    law = DraftLaw(torch.tensor(q_row), probs)
    return Batch(
        tree=DraftTree(torch.tensor(tokens), torch.tensor(parents), depth=depth, width=width, q=law),
        p=torch.tensor(p_rows, dtype=torch.float64),
        row=torch.tensor(row),
        weight=torch.tensor([float(draft.weight) for draft in drafts], dtype=torch.float64),
    )


def judged(drafts: Sequence[Draft], target: Model, vocab: int, rule: Rule) -> Emissions:
    """What one round emits under an acceptance law: all coins through `walk`, all next tokens by `after`."""
    batch = batched(drafts, target, vocab)
    law = rule(batch.tree, batch.p, batch.row)
    coins = tosses(batch.tree.tokens.shape[1])
    batch = batch.repeated(len(coins))
    law = replace(law, accept=law.accept.repeat_interleave(len(coins), 0), row=batch.row)
    coins = coins.repeat(len(drafts), 1)
    chance = torch.where(coins == 0, law.accept, 1 - law.accept)[:, 1:].prod(1) * batch.weight
    walked = walk(batch.tree, law, coins)
    rows = batch.row.gather(1, walked.node[:, None])[:, 0]
    outcomes = Emissions(vocab)
    record(outcomes, batch, walked.path, law.after[rows] * chance[:, None])
    return outcomes


def tosses(nodes: int) -> Tensor:
    """Every pattern of coins: 0 is taken wherever there is a chance, the largest number below 1 where it is sure."""
    patterns = itertools.product((0.0, BELOW_ONE), repeat=nodes - 1)
    return torch.tensor([[BELOW_ONE, *pattern] for pattern in patterns], dtype=torch.float64)


def followed(drafts: Sequence[Draft], target: Model, vocab: int) -> Emissions:
    """What one round emits when the target draws at every node and `follow` judges."""
    batch = batched(drafts, target, vocab)
    drawn = torch.tensor([*itertools.product(range(vocab), repeat=batch.tree.tokens.shape[1])])
    batch = batch.repeated(len(drawn))
    drawn = drawn.repeat(len(drafts), 1)
    chance = batch.p[batch.row].gather(2, drawn[:, :, None])[:, :, 0]
    chance = torch.where(batch.tree.valid, chance, 1 / vocab)  # what padding draws must not matter
    verdict = follow(batch.tree, drawn)
    after = torch.nn.functional.one_hot(verdict.next_token, vocab) * (chance.prod(1) * batch.weight)[:, None]
    outcomes = Emissions(vocab)
    record(outcomes, batch, verdict.path, after)
    return outcomes


Judge = Callable[[Sequence[Draft], Model, int], Emissions]
RULES: dict[str, Judge] = {"token": partial(judged, rule=token_law), "block": partial(judged, rule=block_law)}
EVERY: dict[str, Judge] = {**RULES, "follow": followed}


def record(outcomes: Emissions, batch: Batch, path: Tensor, after: Tensor) -> None:
    """Add the strings `accepted + v`, v distributed by `after` (weights included)."""
    code, vocab = torch.zeros_like(batch.row[:, 0]), outcomes.vocab
    for node in path[:, 1:].unbind(1):
        token = batch.tree.tokens.gather(1, node.clamp_min(0)[:, None])[:, 0]
        code = torch.where(node >= 0, code * vocab + token, code)
    length = (path >= 0).sum(1)
    codes = code[:, None] * vocab + torch.arange(vocab)
    for size in length.unique().tolist():
        outcomes.add(size, codes[length == size].flatten(), after[length == size].flatten())
