"""The contents of a trace, as frozen values and as JSON, and the reason for each verdict.

`Trace.as_object` gives this shape, with null where a value does not exist:

    prompt, prompt_token_ids, text, token_ids, seed, temperature, verification,
    finish_reason, same_as_plain
    rounds: one per target pass that sampled a token
        number, num_prompt_tokens, rule, text, choice
        guesses: node, parent (0 is the root), depth, token_id, text, q, p, verdict, reason, drawn_id, coin, chance
        emitted: token_id, text, origin, p
        segments: text, origin, special

The numbers of a guess come from the functions that serve requests: laws, draws and coins from `Draws`, acceptance
probabilities from the rules of `verify`. Verdicts are those of the engine. `record.py` fills in these values, `show.py`
displays them.
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
class Guess:
    """One drafted token. `node` counts from 1 within the round; `parent` is the node before it, 0 the root.

    `q` and `p`: the drafter's and the target's probability of the token after all transforms (`q` is None without a
    law, as with n-grams). Under `follow`, `drawn_id` is the target's token in its place. Under `token` and `block`, the
    uniform `coin` is compared with `chance`: under `token` P(accepted | reached), under `block` h.
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
    """One target pass over `num_prompt_tokens` of prompt (without the root) and the drafted tokens.

    `rule`: the verification rule used; tokens without a law use `follow` in every mode. `emitted` has no bonus or
    recovered token if the text ends within the accepted ones. `segments`: the text that became certain in this round
    (it may lag behind tokens); `text`: the answer so far. `choice`: the controller's depth and its reason; "" for a
    fixed depth.
    """

    number: int
    num_prompt_tokens: int
    rule: Rule
    guesses: Sequence[Guess]
    emitted: Sequence[Emitted]
    segments: Sequence[Segment]
    text: str
    choice: str = ""

    @property
    def num_accepted(self) -> int:
        """The number of accepted guesses."""
        return sum(guess.verdict == "accepted" for guess in self.guesses)

    @property
    def branches(self) -> bool:
        """Whether the draft is a tree and not a chain."""
        return any(guess.parent != guess.node - 1 for guess in self.guesses)

    def children(self, node: int) -> list[Guess]:
        """The children of a node, in draw order."""
        return [guess for guess in self.guesses if guess.parent == node]


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole answer. `same_as_plain`: whether plain decoding gave the same tokens; None where it need not."""

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
class Numbers:
    """The values that a tree was verified by: one entry per node of its host tree; node 0 is the root.

    `law` is p, the target's law of the token after each node. With `follow`, `drawn` is the target's draw after each
    node. With `token` and `block`, `coins` and `chances` are those of each node's own token.
    """

    rule: Rule
    law: Float[Tensor, "nodes vocab"]
    drawn: Sequence[int] | None = None
    coins: Sequence[float] | None = None
    chances: Sequence[float] | None = None


def numbers(tree: DraftTree, logits: Float[Tensor, "nodes vocab"], draws: Draws, verification: Verification) -> Numbers:
    """The values by which `verify` decides on this tree, in a round of one sequence."""
    at = draws.nodes(tree)
    law = draws.probs(logits, at)
    if verification == "coupled" or tree.rows_with_law() is None:
        return Numbers("follow", law, drawn=draws.draw(logits, at).tolist())
    rule: Rule = "block" if verification == "block" and tree.width == 1 else "token"
    valid = tree.valid[0]
    row = torch.where(valid, valid.long().cumsum(0) - 1, 0)[None]
    accept = (block_law if rule == "block" else token_law)(tree, law, row).accept[0, valid]
    above = row[0, tree.parents[0, valid].clamp_min(0)]
    coins = draws.coins(PathState(at.row[above], at.drawn[above], at.position[above]), tree.tokens[0, valid])
    return Numbers(rule, law, coins=coins.tolist(), chances=accept.tolist())


def explain(
    tree: HostTree, found: Numbers, kept: Sequence[int], q: Mapping[tuple[Path, int], float], spell: Spell
) -> list[Guess]:
    """Every guess of a tree, with its values and verdict.

    `kept`: the accepted nodes, including the root; `q`: the drafter's probabilities by path and token.
    """
    paths = tree.paths()
    guesses = []
    for node, (token, parent) in enumerate(zip(tree.tokens[1:], tree.parents[1:], strict=True), start=1):
        fate = fate_of(tree, found.rule, kept, node)
        drawn = found.drawn[parent] if found.drawn else None
        instead = None if drawn is None else quote(spell(paths[parent], drawn))
        guesses.append(
            Guess(
                node=node,
                parent=parent,
                depth=len(paths[node]),
                token_id=token,
                text=spell(paths[parent], token),
                q=q.get((paths[parent], token)),
                p=float(found.law[parent, token]),
                verdict=fate,
                reason=reason_for(tree, found, kept, node, fate, instead),
                drawn_id=drawn,
                coin=found.coins[node] if found.coins else None,
                chance=found.chances[node] if found.chances else None,
            )
        )
    return guesses


def fate_of(tree: HostTree, rule: Rule, kept: Sequence[int], node: int) -> Fate:
    """The verdict on a guess. Under `block`, every guess of a chain is judged."""
    if node in kept:
        return "accepted"
    parent = tree.parents[node]
    earlier = any(tree.parents[other] == parent for other in kept if other < node)
    passed_over = rule == "token" and earlier  # siblings are tried in turn, until one is accepted
    return "rejected" if rule == "block" or (parent in kept and not passed_over) else "not judged"


def reason_for(tree: HostTree, found: Numbers, kept: Sequence[int], node: int, fate: Fate, drawn: str | None) -> str:
    """The reason of a verdict, in words. `drawn`: the target's token in the guess's place, under `follow`."""
    if fate == "not judged":
        return "not judged: " + why_not(tree, found.rule, kept, node)
    if drawn is not None:
        return "the target drew the same" if fate == "accepted" else f"the target drew {drawn} instead"
    assert found.coins is not None, "a rule that is not `follow` tosses coins"
    assert found.chances is not None, "a coin decides against a chance"
    return tossed(
        found.rule, found.coins[node], found.chances[node], fate, first=node == tree.parents.index(tree.parents[node])
    )


def why_not(tree: HostTree, rule: Rule, kept: Sequence[int], node: int) -> str:
    """Why a guess was not judged, by its first ancestor that was not accepted."""
    turn = node
    while tree.parents[turn] not in kept:
        turn = tree.parents[turn]
    if turn == node:
        return "another was accepted"
    return "behind a rejected guess" if fate_of(tree, rule, kept, turn) == "rejected" else "on another branch"


def tossed(rule: Rule, coin: float, chance: float, fate: Fate, first: bool) -> str:
    """A comparison of coin and chance in words; later siblings are judged by the residual of p and q."""
    below = coin < chance
    against = f"coin {coin:.3f} {'<' if below else '≥'} {chance:.3f} = "
    if rule == "block":
        return against + "h" + ("" if below or fate == "rejected" else ", saved later")
    ratio = "p/q" if first else "p/q of the rest"
    return f"coin {coin:.3f} < 1 ≤ {ratio}" if chance >= 1 else against + ratio


def quote(text: str) -> str:
    """A token's text in quotes, with unprintable characters escaped."""
    mark = "'" if '"' in text else '"'
    return mark + "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text) + mark
