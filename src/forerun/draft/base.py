"""The protocol of drafters.

The engine reports final tokens to a drafter (`observe`) and asks it for draft tokens, here also called guesses
(`propose`). A drafter declares its needs as data, and no code asks which kind it is. Verification, scheduling, stop
conditions and other requests' text are not visible to a drafter.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, cast, runtime_checkable

from torch import Tensor

from forerun.annotations import Float, Int
from forerun.config import Speculation
from forerun.device import Download
from forerun.errors import WrongTarget
from forerun.models.chains import VerifiedChains
from forerun.sampling.draws import Draws
from forerun.shape import StaticTree
from forerun.tree import DraftTree

MERGED = "merged"  # the name under which all members of a mix draft one tree


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of one sequence's draft in a round; depth 0 means no draft.

    `depth` bounds a path's length, `width` the children of a node, `nodes` the number of draft tokens (without the
    root). `drafter` selects a member of a mix. Nodes whose survival (P of the path being accepted) is below
    `min_survival` are not worth their time and should be left out; where a tree's shape must be fixed before sampling,
    such a node may stay, without children. With a minimum above 0 a drafter that can estimate survival returns it, for
    chains too. `shape` fixes the tree, with its own depth, width and nodes; a drafter that cannot draft the shape stays
    within these.
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

    @classmethod
    def of(cls, speculation: Speculation, depth: int | None = None) -> Budget:
        """A request's speculation as a budget, limited to `depth`; trees without a node count get `width` per depth."""
        depth = speculation.depth if depth is None else min(depth, speculation.depth)
        if speculation.tree is not None:
            tree = speculation.tree.cut(depth)
            return NO_DRAFT if tree is None else cls(tree.depth, tree.width, len(tree.paths), shape=tree)
        if speculation.width == 1 and speculation.nodes is None:
            return cls(depth, nodes=depth) if depth > 0 else NO_DRAFT
        nodes = speculation.nodes_within(depth)
        return cls(min(depth, nodes), speculation.width, nodes) if nodes > 0 else NO_DRAFT

    def merging(self, num_members: int) -> Budget:
        """This budget for a merged tree of all members of a mix: wider, so that all of them fit."""
        return replace(self, drafter=num_members, width=num_members * self.width)


NO_DRAFT = Budget(depth=0)


@dataclass(frozen=True, slots=True)
class Committed:
    """Tokens that became final, prompt chunks and accepted tokens alike, packed over sequences.

    Sequence `seq_ids[i]` gained `tokens[offsets[i]:offsets[i+1]]`, all read by the target; `roots[i]` is the token
    after them, final too but not yet read. All `Committed.tokens` of a sequence, concatenated, and its last root are
    the sequence's text. Lists on the host. `features[t]` is the target's state after reading `tokens[t]`, at the
    drafter's declared taps. `tenants` is the tenant of each text and `num_prompts` the length of its prompt; both are
    empty if unknown.

    Texts with the same salt may share cached prefixes, in the caches of drafters too; None among `salts`, and no salts
    at all, forbid it. With `adopted` the tokens are the cached prefixes of new sequences, which the target did not read
    again: they have no features, and are no longer than the drafter allowed (`StateDrafter.adoptable`).
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
        """(sequence, its new tokens, its root), one per sequence."""
        return [
            (seq, self.tokens[self.offsets[i] : self.offsets[i + 1]], self.roots[i])
            for i, seq in enumerate(self.seq_ids)
        ]

    def shown(self, drafter: str) -> Float[Tensor, "total taps hidden"]:
        """The features. Raises WrongTarget, with the name of the drafter that needs them, if there are none."""
        if self.features is None:
            raise WrongTarget(
                f"{drafter} reads the target's states, and is told text without them: build the drafter for the engine "
                "that runs it, which shows them, as LLM(model, draft=...) does"
            )
        return self.features


@dataclass(frozen=True, slots=True)
class Resume:
    """Early exit: the target's layers below `layer` have already computed these nodes.

    Their keys and values lie in the tails of the target's own KV cache, at the places of a chain, and nothing else
    does. `nodes` are indices into the flattened trees (row times columns plus column), ascending: of each chain its
    first ones. `hidden` are their states. Unlike draft tokens this is not checked: it is for a drafter that uses the
    target's own runner. It holds for the tree as proposed; if the tree is changed, all of it is read again.
    """

    layer: int
    nodes: Int[Tensor, " known"]
    hidden: Float[Tensor, "known hidden"]


@dataclass(frozen=True, slots=True)
class Draft:
    """The result of `propose`: the draft trees, the drafter's estimates, and the time of its own models' passes.

    A mix gives in `drafter`, on the host, the index of the member that proposed each node, and at the root the one that
    drafted the row; -1 for none. `drafter_s` is each member's drafting time.
    """

    tree: DraftTree
    survival: Float[Tensor, "batch nodes"] | None = None  # the drafter's P(path accepted); 1 at the root
    drafter: Int[Tensor, "batch nodes"] | None = None
    resume: Resume | None = None
    pass_s: float = 0.0
    drafter_s: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Outlook:
    """A drafter's estimates before a round, without tensor work: host numbers, one per requested sequence.

    `estimate(i, least)` gives, for the best draft of the i-th sequence, the probability that its first 1, 2, ... tokens
    would all be accepted; a list of fewer than `AUTO_DEPTH` says that there are no more. It may leave out those below
    `least`, which would not be drafted. It is called only where drafters or rows are compared, since it may take long;
    `estimate` is None for a drafter that has no estimates. A mix adds the outlook of each member, by name and in order;
    MERGED is not among them. For members whose drafts were merged in the last round, `came_true` has for each row how
    many of their tokens were judged and how many were right, along one path.
    """

    unread: Sequence[int]  # committed tokens it would have to read first
    limit: Sequence[int]  # the deepest draft it can give this sequence now (its own context length, its memory)
    estimate: Callable[[int, float], Sequence[float]] | None = None
    drafters: Mapping[str, Outlook] = field(default_factory=dict)
    came_true: Sequence[tuple[int, int]] = ()
    ends_early: bool = False  # whether its chains end at a minimum survival, so that it need not estimate before


@runtime_checkable
class Drafter(Protocol):
    """Proposes continuations of sequences. One file per kind, in `draft/text`, `model` or `many`, or in `heads/`.

    `taps` lists the target states that it reads: i is the residual stream entering layer i (the output of layer i - 1),
    num_layers the one before the final norm, -1 the one after it; () none. `names` are its names in metrics: one unless
    it is a mix.
    """

    @property
    def taps(self) -> tuple[int, ...]: ...

    @property
    def names(self) -> tuple[str, ...]: ...

    def observe(self, news: Committed) -> None:
        """Learn the final tokens, also a sequence's last ones. Only this method may extend lasting state.

        New sequences appear here first. Tokens of several rounds without drafting may come in one call, before the next
        outlook.
        """
        ...

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        """Draft for the sequences of `draws`, in its order, within `budgets` (one per sequence).

        A sequence that was never observed, or whose budget is 0, gets its root alone. `tail` counts as observed during
        the call only. Draft tokens need not be good: bad ones only cost speed.
        """
        ...

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        """The drafter's estimates for these sequences, in this order. Host only; no tensor work."""
        ...

    def forget(self, seq_ids: Sequence[int]) -> None:
        """Drop all state of these sequences, which are finished or preempted."""
        ...


@runtime_checkable
class StateDrafter(Drafter, Protocol):
    """The additional method of drafters with taps."""

    def adoptable(self, text: Sequence[int], most: int, salt: Hashable) -> int:
        """How many of a new text's first `most` tokens it can do without the target's states for.

        The target has these tokens in its prefix cache; it reads those beyond the answer again, up to the last token of
        `text`, its root. The tokens of the answer, or fewer, then come in a Committed that is `adopted`.
        """
        ...


def adoptable(drafter: Drafter, text: Sequence[int], most: int, salt: Hashable) -> int:
    """`StateDrafter.adoptable` of any drafter: one without taps needs no states, so nothing is read again for it."""
    return cast(StateDrafter, drafter).adoptable(text, most, salt) if drafter.taps else most


def begin_next(drafter: Drafter, judged: VerifiedChains) -> Download | None:
    """Let a drafter start the next draft on a device that has judged its last one, before the host knows the verdict.

    Returns the verdict's copy to the host, followed by the tokens of the judged trees; None if nothing is started, as
    for drafters without this method. The next `propose` takes the result if it asks for the same.
    """
    begin = getattr(drafter, "begin_next", None)
    return None if begin is None else begin(judged)


@dataclass(frozen=True, slots=True)
class Question:
    """A chain of another drafter's tokens to be judged, for one sequence.

    `late` are the tokens after the observed text, to be taken as final: its root, and tokens emitted after it;
    `guesses` follow its last token.
    """

    seq_id: int
    late: Sequence[int]
    guesses: Sequence[int]


@dataclass(frozen=True, slots=True)
class JudgeLogits:
    """The logits after the last token of `late` and after each guess, packed, for the questions `answered`, in order.

    `answered` are indices; for the other questions the cache had no room. `pass_s` is the time of the passes.
    """

    answered: Sequence[int]
    logits: Float[Tensor, "rows vocab"]
    pass_s: float


@runtime_checkable
class Judge(Drafter, Protocol):
    """A drafter that can also judge another drafter's tokens, as in a cascade."""

    def judge(self, questions: Sequence[Question]) -> JudgeLogits:
        """Its logits, at the target's width, along one chain of another drafter's tokens for each of these sequences.

        `late` and guesses together must stay within the sequence's `outlook` limit. What was read for a question stays
        cached until the next one, which reads only new tokens, and `observe` keeps what it confirms. A function of
        text, `late` and guesses alone.
        """
        ...
