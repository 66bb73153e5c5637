"""The contents of a trace, as frozen values and as JSON, and the reason for each verdict.

`Trace.as_object` gives this shape, with null where a value does not exist:

    prompt, prompt_token_ids, text, token_ids, seed, temperature, verification,
    finish_reason, same_as_plain
    rounds: one per target pass that sampled a token
        number, num_prompt_tokens, rule, text, choice
        guesses: node, parent (0 is the root), depth, token_id, text, q, p, verdict, reason, drawn_id, coin, chance
        emitted: token_id, text, origin, p
        segments: text, origin, special

The values come from the functions that serve requests: laws, draws and coins from `Draws`, acceptance probabilities
from the rules of `verify`. Verdicts are those of the engine. `record.py` creates these values, `show.py` displays them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from forerun.accept.commit import Origin
from forerun.accept.delta import Segment
from forerun.annotations import Float
from forerun.config import Verification
from forerun.sampling.draws import Draws, PathState
from forerun.tree import DraftTree, HostTree
from forerun.verify.rules import block_law, token_law

Fate = Literal["accepted", "rejected", "not judged"]
Rule = Literal["follow", "token", "block"]
Path = tuple[int, ...]  # tokens from the root's child down to a node
Spell = Callable[[Sequence[int], int], str]  # the text of a token after a path


@dataclass(frozen=True, slots=True)
class TracedNode:
    """One draft token. `node` counts from 1 within the round; `parent` is the node before it, 0 the root.

    `q` and `p`: the drafter's and the target's probability of the token after all transforms (`q` is None without a
    law, as with n-grams). Under `follow`, `drawn_id` is the target's token after the parent. Under `token` and `block`,
    the uniform `coin` is compared with `chance`: under `token` P(accepted | reached), under `block` h.
    """

    node: int
    parent: int
    depth: int
    token_id: int
    text: str
    q: float | None
    p: float
    verdict: Fate
    reason: str
    drawn_id: int | None = None
    coin: float | None = None
    chance: float | None = None


@dataclass(frozen=True, slots=True)
class Emitted:
    """A token that the round emitted, and its probability by the target."""

    token_id: int
    text: str
    origin: Origin
    p: float


@dataclass(frozen=True, slots=True)
class TracedRound:
    """One target pass over `num_prompt_tokens` of the prompt (without the root) and the draft tokens (`guesses`).

    `rule`: the verification rule used; tokens without a law use `follow` in every mode. `emitted` has no bonus or
    recovered token if the text ends within the accepted ones. `segments`: the text that became certain in this round,
    which may lag behind the tokens; `text`: the answer so far. `choice`: the controller's depth and its reason; "" for
    a fixed depth.
    """

    number: int
    num_prompt_tokens: int
    rule: Rule
    guesses: Sequence[TracedNode]
    emitted: Sequence[Emitted]
    segments: Sequence[Segment]
    text: str
    choice: str = ""

    @property
    def num_accepted(self) -> int:
        """The number of accepted draft tokens."""
        return sum(node.verdict == "accepted" for node in self.guesses)

    @property
    def has_branches(self) -> bool:
        """Whether the draft is a tree and not a chain."""
        return any(node.parent != node.node - 1 for node in self.guesses)

    def children(self, parent: int) -> list[TracedNode]:
        """The children of a node, in the order in which they were drawn."""
        return [node for node in self.guesses if node.parent == parent]


@dataclass(frozen=True, slots=True)
class Trace:
    """A complete answer. `same_as_plain`: whether plain decoding gave the same tokens; None if it need not."""

    prompt: str
    prompt_token_ids: Sequence[int]
    text: str
    token_ids: Sequence[int]
    seed: int
    temperature: float
    verification: Verification
    finish_reason: str
    same_as_plain: bool | None
    rounds: Sequence[TracedRound]

    def as_object(self) -> dict[str, Any]:
        """The trace as a JSON object."""
        values: dict[str, Any] = json.loads(json.dumps(asdict(self), default=lambda origin: origin.value))
        return values


@dataclass(frozen=True, slots=True)
class VerifiedValues:
    """The values that a tree was verified with: one entry per node of its host tree; node 0 is the root.

    `law` is p, the target's law of the token after each node. With `follow`, `drawn` is the token that the target
    sampled after each node. With `token` and `block`, `coins` and `chances` are those of each node's token.
    """

    rule: Rule
    law: Float[Tensor, "nodes vocab"]
    drawn: Sequence[int] | None = None
    coins: Sequence[float] | None = None
    chances: Sequence[float] | None = None


def verified_values(
    tree: DraftTree, logits: Float[Tensor, "nodes vocab"], draws: Draws, verification: Verification
) -> VerifiedValues:
    """The values with which `verify` decides on this tree, in a round of one sequence."""
    at = draws.nodes(tree)
    law = draws.probs(logits, at)
    if verification == "coupled" or tree.rows_with_law() is None:
        return VerifiedValues("follow", law, drawn=draws.draw(logits, at).tolist())
    rule: Rule = "block" if verification == "block" and tree.width == 1 else "token"
    valid = tree.valid[0]
    row = torch.where(valid, valid.long().cumsum(0) - 1, 0)[None]
    accept = (block_law if rule == "block" else token_law)(tree, law, row).accept[0, valid]
    above = row[0, tree.parents[0, valid].clamp_min(0)]
    coins = draws.coins(PathState(at.row[above], at.drawn[above], at.position[above]), tree.tokens[0, valid])
    return VerifiedValues(rule, law, coins=coins.tolist(), chances=accept.tolist())


def explain(
    tree: HostTree, values: VerifiedValues, accepted: Sequence[int], q: Mapping[tuple[Path, int], float], spell: Spell
) -> list[TracedNode]:
    """Every draft token of a tree, with its values and verdict.

    `accepted`: the accepted nodes, including the root; `q`: the drafter's probabilities by path and token.
    """
    paths = tree.paths()
    nodes = []
    for node, (token, parent) in enumerate(zip(tree.tokens[1:], tree.parents[1:], strict=True), start=1):
        fate = fate_of(tree, values.rule, accepted, node)
        drawn = values.drawn[parent] if values.drawn else None
        drawn_text = None if drawn is None else quote(spell(paths[parent], drawn))
        nodes.append(
            TracedNode(
                node=node,
                parent=parent,
                depth=len(paths[node]),
                token_id=token,
                text=spell(paths[parent], token),
                q=q.get((paths[parent], token)),
                p=float(values.law[parent, token]),
                verdict=fate,
                reason=reason_for(tree, values, accepted, node, fate, drawn_text),
                drawn_id=drawn,
                coin=values.coins[node] if values.coins else None,
                chance=values.chances[node] if values.chances else None,
            )
        )
    return nodes


def fate_of(tree: HostTree, rule: Rule, accepted: Sequence[int], node: int) -> Fate:
    """The verdict on a draft token. Under `block`, every token of a chain is verified."""
    if node in accepted:
        return "accepted"
    parent = tree.parents[node]
    earlier = any(tree.parents[other] == parent for other in accepted if other < node)
    skipped = rule == "token" and earlier  # siblings are tried in turn, until one is accepted
    return "rejected" if rule == "block" or (parent in accepted and not skipped) else "not judged"


def reason_for(
    tree: HostTree, values: VerifiedValues, accepted: Sequence[int], node: int, fate: Fate, drawn: str | None
) -> str:
    """The reason of a verdict, as a phrase. `drawn`: under `follow`, the token that the target sampled instead."""
    if fate == "not judged":
        return "not verified: " + why_not_verified(tree, values.rule, accepted, node)
    if drawn is not None:
        return "the target sampled the same token" if fate == "accepted" else f"the target sampled {drawn}"
    assert values.coins is not None, "a rule that is not `follow` tosses coins"
    assert values.chances is not None, "a coin is compared with a chance"
    first = node == tree.parents.index(tree.parents[node])
    return comparison(values.rule, values.coins[node], values.chances[node], fate, first)


def why_not_verified(tree: HostTree, rule: Rule, accepted: Sequence[int], node: int) -> str:
    """Why a draft token was not verified: what happened to its first ancestor that was not accepted."""
    ancestor = node
    while tree.parents[ancestor] not in accepted:
        ancestor = tree.parents[ancestor]
    if ancestor == node:
        return "another was accepted"
    return "after a rejected token" if fate_of(tree, rule, accepted, ancestor) == "rejected" else "on another branch"


def comparison(rule: Rule, coin: float, chance: float, fate: Fate, first: bool) -> str:
    """The comparison of coin and chance as a phrase; later siblings are verified against the residual of p and q."""
    below = coin < chance
    against = f"coin {coin:.3f} {'<' if below else '≥'} {chance:.3f} = "
    if rule == "block":
        return against + "h" + ("" if below or fate == "rejected" else ", saved later")
    ratio = "p/q" if first else "residual p/q"
    return f"coin {coin:.3f} < 1 ≤ {ratio}" if chance >= 1 else against + ratio


def quote(text: str) -> str:
    """A token's text in quotes, with unprintable characters escaped."""
    mark = "'" if '"' in text else '"'
    return mark + "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text) + mark
