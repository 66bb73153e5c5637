"""The protocol of drafters.

The engine tells a drafter what became final (`observe`) and asks it for guesses (`propose`). A drafter declares its
needs as data, and no code asks which kind it is. Verification, scheduling, stop conditions and other requests' text are
not visible to a drafter.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, cast, runtime_checkable

from torch import Tensor

from forerun.annotations import Float, Int
from forerun.config import Speculation
from forerun.device import Download
from forerun.errors import WrongTarget
from forerun.models.chains import JudgedChains
from forerun.sampling.draws import Draws
from forerun.shape import StaticTree
from forerun.tree import DraftTree

MERGED = "merged"  # the name under which all members of a mix draft one tree
AHEAD = 8  # guesses that `Outlook.expected` looks at: who drafts less far can expect no more than that


@dataclass(frozen=True, slots=True)
class Budget:
    """How far one sequence may be drafted this round; depth 0 means not at all.

    `depth` bounds a path's length, `width` the children of a node, `nodes` the guesses in all (the root not counted).
    `drafter` picks one of a mix. A guess whose path survives with less than `min_survival` is not worth having, nor
    is any below it; where a tree's shape must be fixed before it is drawn, such a guess may stay, without any below it.
    With a minimum above 0 a drafter that can estimate survival gives it, for chains too. `shape` fixes the tree, with
    its own depth, width and nodes; a drafter that cannot draft the shape stays within these.
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
        """A request's speculation, cut to `depth`. Trees without a node count get `width` guesses for every depth."""
        depth = speculation.depth if depth is None else min(depth, speculation.depth)
        if speculation.tree is not None:
            tree = speculation.tree.cut(depth)
            return NO_DRAFT if tree is None else cls(tree.depth, tree.width, len(tree.paths), shape=tree)
        if speculation.width == 1 and speculation.nodes is None:
            return cls(depth, nodes=depth) if depth > 0 else NO_DRAFT
        nodes = speculation.nodes_within(depth)
        return cls(min(depth, nodes), speculation.width, nodes) if nodes > 0 else NO_DRAFT

    def merging(self, num_members: int) -> Budget:
        """This budget for all members of a mix merged: the tree may be wider, so that all of them fit."""
        return replace(self, drafter=num_members, width=num_members * self.width)


NO_DRAFT = Budget(depth=0)


@dataclass(frozen=True, slots=True)
class Committed:
    """What the target has just made final, prompt chunks and accepted tokens alike, packed over sequences.

    Sequence `seq_ids[i]` gained `tokens[offsets[i]:offsets[i+1]]`, all read by the target; `roots[i]` is the token
    after them, final too but not yet read. All `Committed.tokens` of a sequence, joined, and then its last root are the
    sequence's text. Host lists: they come from the round's one synchronisation. `features[t]` is the target's state
    after reading `tokens[t]`, at the drafter's declared taps. `tenants` gives the tenant of each text and `num_prompts`
    the length of its prompt; both are empty where unknown.

    Texts of the same salt may share what was computed for their common beginning, in the caches of drafters too; None
    among `salts`, and no salts at all, forbid it. `adopted` news are the beginnings of new sequences that the target
    did not read, because it had read the same before: they have no features, and are no longer than the drafter said
    that they may be (`StateDrafter`).
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
        """The features. Raises WrongTarget, in the name of the drafter that needs them, where there are none."""
        if self.features is None:
            raise WrongTarget(
                f"{drafter} reads the target's states, and is told text without them: build the drafter for the engine "
                "that runs it, which shows them, as LLM(model, draft=...) does"
            )
        return self.features


@dataclass(frozen=True, slots=True)
class Resume:
    """Early exit: the target's layers below `layer` have read these nodes, and need not do so again.

    Their keys and values lie in the tails of the target's own cache, at the places of a chain, and nothing else does.
    `nodes` are numbered through all trees (row times columns plus column), ascending: of each chain its first ones.
    `hidden` are their states. Unlike guesses this is not checked: it is for a drafter that reads with the
    target's own runner. It holds for the tree as proposed; if the tree is changed, all of it is read again.
    """

    layer: int
    nodes: Int[Tensor, " known"]
    hidden: Float[Tensor, "known hidden"]


@dataclass(frozen=True, slots=True)
class Draft:
    """What `propose` returns: the guesses, the drafter's estimates of them, the time that its own models' passes took.

    A mix says in `drafter`, on the host, by number which of its drafters guessed each node, and at the root which one
    drafted the row; -1 for none. `drafter_s` is how long each of its members took to draft.
    """

    tree: DraftTree
    survival: Float[Tensor, "batch nodes"] | None = None  # the drafter's P(path accepted); 1 at the root
    drafter: Int[Tensor, "batch nodes"] | None = None
    resume: Resume | None = None
    pass_s: float = 0.0
    drafter_s: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Outlook:
    """A drafter's estimates before a round, made without computing: host numbers, one per sequence asked for.

    `expected` is how many of `AHEAD` guesses would be accepted. A mix adds what each of its members says, by name and
    in order; MERGED is not among them. Of members whose guesses were merged in the last round, `came_true` has for each
    row how many of their own were judged by its tokens and how many were right, along one path. `survival` is what each
    further guess of the best draft adds to that, as far as the limit; empty where unknown.
    """

    unread: Sequence[int]  # committed tokens it would have to read first
    limit: Sequence[int]  # the deepest draft it can give this sequence now (its own context length, its memory)
    expected: Sequence[float | None] = field(default=())  # expected accepted tokens, None where unknown
    drafters: Mapping[str, Outlook] = field(default_factory=dict)
    came_true: Sequence[tuple[int, int]] = ()
    ends_early: bool = False  # whether it draws chains guess by guess, so that a minimum spares it the rest
    survival: Sequence[Sequence[float]] = ()


@runtime_checkable
class Drafter(Protocol):
    """Guesses continuations of sequences. One file per kind, in `draft/text`, `model` or `many`, or in `heads/`.

    `taps` names the target states it reads: i is the residual stream entering layer i, which is what layer i - 1
    leaves, num_layers the one before the final norm, -1 the one after it; () none. `names` are those of its
    methods, for metrics: one unless it is a mix.
    """

    @property
    def taps(self) -> tuple[int, ...]: ...

    @property
    def names(self) -> tuple[str, ...]: ...

    def observe(self, news: Committed) -> None:
        """Learn what became final, a sequence's last tokens too. The only way in which lasting state grows.

        New sequences appear here first. News of rounds in which nothing was drafted may come together, in one call
        before the next outlook.
        """
        ...

    def propose(self, draws: Draws, budgets: Sequence[Budget], tail: Committed | None = None) -> Draft:
        """Guess, for the sequences of `draws`, in its order, within `budgets` (one per sequence).

        A sequence that was never observed, or whose budget is 0, gets its root alone. `tail` counts as observed
        during the call only. Guesses need not be good: bad ones only cost speed.
        """
        ...

    def outlook(self, seq_ids: Sequence[int]) -> Outlook:
        """The drafter's estimates for these sequences now. Host only; no tensor work."""
        ...

    def forget(self, seq_ids: Sequence[int]) -> None:
        """Drop all state of these sequences, which are finished or preempted."""
        ...


@runtime_checkable
class StateDrafter(Drafter, Protocol):
    """What a drafter with taps must be able to say in addition."""

    def adoptable(self, text: Sequence[int], most: int, salt: Hashable) -> int:
        """How many of a new text's first `most` tokens it can be told of without the target's states after them.

        The target knows so many tokens already, and need not read them; it reads again what is beyond this answer, up
        to the last token of `text`, its root. What follows are `adopted` news of at most so many tokens.
        """
        ...


def adoptable(drafter: Drafter, text: Sequence[int], most: int, salt: Hashable) -> int:
    """`StateDrafter.adoptable` of any drafter: one without taps needs no states, so nothing is read again for it."""
    return cast(StateDrafter, drafter).adoptable(text, most, salt) if drafter.taps else most


def begin_next(drafter: Drafter, judged: JudgedChains) -> Download | None:
    """Let a drafter begin the next draft on a device that has judged its last one, before the host knows the verdict.

    The verdict on its way to the host, in front of the tokens of the judged trees; None where it begins nothing, as
    drafters without such a method do. What it begins is taken by the next `propose`, if that asks for the same.
    """
    begin = getattr(drafter, "begin_next", None)
    return None if begin is None else begin(judged)


@dataclass(frozen=True, slots=True)
class Question:
    """A chain of guesses about one sequence.

    `late` is what follows the text that was observed, to be taken as final: its root, and whatever was emitted behind
    it; the last token is what the guesses follow.
    """

    seq_id: int
    late: Sequence[int]
    guesses: Sequence[int]


@dataclass(frozen=True, slots=True)
class JudgeLogits:
    """The logits after the last token of `late` and after each guess, packed, for the questions `answered`, in order.

    `answered` are indices; the others found no room. `pass_s` is what the passes took.
    """

    answered: Sequence[int]
    logits: Float[Tensor, "rows vocab"]
    pass_s: float


@runtime_checkable
class Judge(Drafter, Protocol):
    """A drafter that can also say how it would go on behind guesses that are not its own."""

    def judge(self, questions: Sequence[Question]) -> JudgeLogits:
        """Its logits, at the target's width, behind one chain of guesses for each of these sequences.

        A chain may be asked about where `late` and guesses together stay within the sequence's `outlook` limit. What
        was read for a question is kept until the next: one that goes on from it reads what is new, and `observe` keeps
        what it confirms. A function of text, `late` and guesses alone.
        """
        ...
