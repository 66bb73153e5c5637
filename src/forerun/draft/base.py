"""The protocol of drafters.

The engine reports final tokens to a drafter (`observe`) and asks it for draft tokens (`propose`). A drafter declares
its needs as data; the engine never checks which kind of drafter it has. A drafter sees nothing of verification,
scheduling and stop conditions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, cast, runtime_checkable

from torch import Tensor

from forerun.annotations import Float, Int
from forerun.config import Speculation
from forerun.device import Download
from forerun.errors import InvalidDraft, WrongTarget
from forerun.limits import shown
from forerun.models.chains import VerifiedChains
from forerun.sampling.draws import Draws
from forerun.shape import StaticTree
from forerun.tree import DraftTree

MERGED = "merged"  # the drafter name in metrics of trees merged from all members of a mix


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of one sequence's draft in a round; depth 0 means no draft.

    `depth` bounds the length of a path, `width` the children of a node, `nodes` the number of draft tokens (without the
    root; by default the depth). The depth is at most `nodes`. `drafter` is the index of a member of a mix; other
    drafters ignore it.

    The survival of a node is the probability that it and all nodes above it are accepted. A drafter that can estimate
    survival leaves out the nodes below `min_survival`, which cost more time than they save; where a tree's shape must
    be fixed before sampling, such a node may stay, without children. If `min_survival` is above 0 the drafter also
    returns its estimates (`Draft.survival`), for chains too.

    `shape`, if given, fixes the tree; the limits are then its own, and a drafter that cannot draft it just keeps them.
    """

    depth: int
    width: int = 1
    nodes: int = 0
    drafter: int = 0
    min_survival: float = 0.0
    shape: StaticTree | None = None

    def __post_init__(self) -> None:
        assert self.depth >= 0, f"a budget's depth is {self.depth}, below 0"
        if self.nodes == 0:
            object.__setattr__(self, "nodes", self.depth)
        elif self.nodes < self.depth:
            object.__setattr__(self, "depth", self.nodes)

    @classmethod
    def of(cls, speculation: Speculation, depth: int | None = None) -> Budget:
        """The budget of a request's `speculation`, with at most `depth` levels.

        A tree without a node count gets `width` nodes per level.
        """
        depth = speculation.depth if depth is None else min(depth, speculation.depth)
        if speculation.tree is not None:
            tree = speculation.tree.cut(depth)
            return NO_DRAFT if tree is None else cls(tree.depth, tree.width, len(tree.paths), shape=tree)
        if speculation.width == 1 and speculation.nodes is None:
            return cls(depth) if depth > 0 else NO_DRAFT
        nodes = speculation.nodes_within(depth)
        return cls(depth, speculation.width, nodes) if nodes > 0 else NO_DRAFT

    def merged(self, num_members: int) -> Budget:
        """This budget for the merged tree of a mix: `num_members` times as wide, so that each member has its width."""
        return replace(self, drafter=num_members, width=num_members * self.width)


NO_DRAFT = Budget(depth=0)


@dataclass(frozen=True, slots=True)
class Committed:
    """Tokens that became final, prompt chunks and accepted tokens alike, packed over sequences.

    Sequence `seq_ids[i]` gained `tokens[offsets[i]:offsets[i+1]]`. The target has processed these tokens: they are in
    its KV cache. `roots[i]` is the token after them, which is final but not yet processed. The text of a sequence is
    the concatenation of its tokens in all `Committed`, followed by its last root. All lists are on the host.

    `features[t]` are the target's hidden states at position `tokens[t]`, one for each of the drafter's `taps`.
    `tenants[i]` is the tenant of sequence i and `num_prompts[i]` the length of its prompt in tokens; both lists are
    empty if unknown.

    Sequences with the same salt may share cached prefixes, also in the caches of drafters. A sequence whose salt is
    None shares with none; with empty `salts` none does. If `adopted` is true the tokens are cached prefixes of new
    sequences, which the target did not process again. They have no features, and are at most what `adoptable` allowed.
    """

    seq_ids: Sequence[int]
    tokens: Sequence[int]
    offsets: Sequence[int]
    roots: Sequence[int]
    features: Float[Tensor, "total taps hidden"] | None = None
    tenants: Sequence[str | None] = ()
    num_prompts: Sequence[int] = ()
    salts: Sequence[Hashable] = ()
    adopted: bool = False

    def rows(self) -> list[tuple[int, Sequence[int], int]]:
        """For each sequence its id, its new tokens and its root."""
        return [
            (seq, self.tokens[self.offsets[i] : self.offsets[i + 1]], self.roots[i])
            for i, seq in enumerate(self.seq_ids)
        ]

    def required_features(self, drafter: str) -> Float[Tensor, "total taps hidden"]:
        """The features. Raises WrongTarget, with the name of the drafter that needs them, if there are none."""
        if self.features is None:
            raise WrongTarget(
                f"{drafter} reads the target's hidden states, and received tokens without them: build the drafter "
                "together with the engine that runs it, as LLM(model, draft=...) does"
            )
        return self.features


@dataclass(frozen=True, slots=True)
class Resume:
    """Early exit: the target's layers below `layer` have already processed these nodes.

    Their keys and values are in the target's own KV cache, after each sequence's committed tokens, in the order of the
    chain. `nodes` are ascending indices into the flattened trees (row times columns plus column); of each chain they
    are the first nodes. `hidden` are the nodes' hidden states at the input of `layer`.

    Unlike draft tokens this is not verified, so only a drafter that uses the target's own runner may return it. It is
    valid for the tree as proposed: if the engine changes the tree, the target processes all nodes from the first layer.
    """

    layer: int
    nodes: Int[Tensor, " known"]
    hidden: Float[Tensor, "known hidden"]


@dataclass(frozen=True, slots=True)
class Draft:
    """The result of `propose`: the draft trees, the drafter's estimates, and the time of its own models' passes.

    Only a mix sets `drafter` and `drafter_s`. `drafter`, on the host, is the index of the member that drafted a node,
    and at the root that of the row's member; -1 for none. `drafter_s` is each member's drafting time in seconds.
    """

    tree: DraftTree
    survival: Float[Tensor, "batch nodes"] | None = None  # estimated P(path to this node accepted); 1 at the root
    drafter: Int[Tensor, "batch nodes"] | None = None
    resume: Resume | None = None
    pass_s: float = 0.0
    drafter_s: Sequence[float] = ()

    @staticmethod
    def of(drafter: Drafter, proposed: object) -> Draft:
        """What `drafter.propose` returned. Raises InvalidDraft unless it is a Draft of a DraftTree."""
        if isinstance(proposed, Draft) and isinstance(proposed.tree, DraftTree):
            return proposed
        problem = f"returned {shown(proposed)}: return Draft(tree), where tree is a DraftTree."
        raise InvalidDraft(f"propose of the drafter {', '.join(drafter.names)} {problem}")


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a drafter can say about its next drafts without tensor work: host numbers, one per requested sequence.

    `unread[i]` is the number of committed tokens that the drafter would have to process before it drafts. `limit[i]` is
    the greatest depth that it can draft now, limited by its own context length and memory.

    `estimate(i, least)` returns, for the best draft of the i-th sequence, the probability that its first 1, 2, ...
    tokens are all accepted. It may leave out probabilities below `least`, whose tokens would not be drafted; fewer than
    `AUTO_DEPTH` numbers mean that the draft has no more tokens. The controller calls it only to compare drafters or
    sequences, since it may take long. It is None for a drafter without estimates. `ends_early` says that the drafter
    ends its chains at `Budget.min_survival` by itself, so that no estimate is needed before.

    A mix adds the outlook of each member in `drafters`, by name and in their order, without MERGED. `merged_runs` of a
    member whose drafts were merged in the last round has for each sequence how many of its draft tokens were judged
    along one path, and how many of these were accepted.
    """

    unread: Sequence[int]
    limit: Sequence[int]
    estimate: Callable[[int, float], Sequence[float]] | None = None
    drafters: Mapping[str, Outlook] = field(default_factory=dict)
    merged_runs: Sequence[tuple[int, int]] = ()
    ends_early: bool = False


@runtime_checkable
class Drafter(Protocol):
    """Proposes continuations of sequences. One file per kind, in `draft/text`, `model` or `many`, or in `heads/`.

    `taps` are the hidden states of the target that the drafter reads; () for none. Tap i is the residual stream at the
    input of layer i (the output of layer i - 1), tap num_layers the input of the final norm, and tap -1 its output.
    `names` are the drafter's names in metrics: exactly one, unless it is a mix.
    """

    @property
    def taps(self) -> tuple[int, ...]: ...

    @property
    def names(self) -> tuple[str, ...]: ...

    def observe(self, committed: Committed) -> None:
        """Record tokens that became final. Only this method may extend state that outlives a round.

        A sequence appears here before any other call, and its last tokens are reported before `forget`. Several rounds
        without drafting may be reported in one call, before the next `outlook`.
        """
        ...

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        """Draft for the sequences of `draws`, in its order, within `budgets` (one per sequence).

        A sequence that was never observed, or whose depth is 0, gets a tree of its root alone. `tail` holds tokens that
        count as observed during this call only. The output is exact for any draft tokens: poor ones only cost time.
        """
        ...

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        """The drafter's estimates for these sequences, in this order, computed on the host without tensor work."""
        ...

    def forget(self, seq_ids: Sequence[int]) -> None:
        """Drop all state of these sequences, which are finished or preempted; ignore unknown ids."""
        ...


@runtime_checkable
class StateDrafter(Drafter, Protocol):
    """The protocol of drafters with taps, which have one method more."""

    def adoptable(self, text: Sequence[int], most: int, salt: Hashable) -> int:
        """For how many of the first `most` tokens of a new text the drafter does not need the target's hidden states.

        The target has the first `most` tokens in its prefix cache. It processes those beyond the returned number again,
        up to the last token of `text`, the root, to compute their states. The drafter then observes the first tokens,
        at most the returned number, in a Committed that is `adopted`.
        """
        ...


def adoptable(drafter: Drafter, text: Sequence[int], most: int, salt: Hashable) -> int:
    """`StateDrafter.adoptable` for any drafter: one without taps needs no states, so the answer is `most`."""
    return cast(StateDrafter, drafter).adoptable(text, most, salt) if drafter.taps else most


def begin_next(drafter: Drafter, judged: VerifiedChains) -> Download | None:
    """Start the next draft on the device that has verified the last one, before the host has the verdict.

    Returns the copy to the host of the verdict followed by the tokens of the verified trees, or None if no draft was
    started, as for a drafter without a method `begin_next`. The next `propose` returns this draft if its sequences and
    budgets are the same.
    """
    begin = getattr(drafter, "begin_next", None)
    return None if begin is None else begin(judged)


@dataclass(frozen=True, slots=True)
class ChainToJudge:
    """A chain of another drafter's tokens for one sequence.

    `after_text` are the tokens after the observed text, which the judge takes as final: the root, and tokens emitted
    after it. The `draft_tokens` follow the last of them.
    """

    seq_id: int
    after_text: Sequence[int]
    draft_tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class JudgeLogits:
    """The logits after the last token of `after_text` and after each draft token, packed over chains.

    `indices` are those of the chains with logits, ascending; the judge's cache had no room for the other chains.
    `pass_s` is the time of the judge's passes in seconds.
    """

    indices: Sequence[int]
    logits: Float[Tensor, "rows vocab"]
    pass_s: float


@runtime_checkable
class Judge(Drafter, Protocol):
    """A drafter that can also verify another drafter's tokens, as in a cascade."""

    def judge(self, chains: Sequence[ChainToJudge]) -> JudgeLogits:
        """The logits of this drafter's model over the target's vocabulary along these chains, one per sequence.

        `after_text` and `draft_tokens` together must stay within the sequence's `outlook` limit. The logits depend on
        the text and these tokens alone. Keys and values stay cached until the next call, which processes new tokens
        only; `observe` keeps those of tokens that become final.
        """
        ...
