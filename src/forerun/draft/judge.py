"""Judge: what a drafter must be able to do in addition, to verify the guesses of another in a cascade.

A judge gives its logits after guesses that follow a text. `verify` turns the logits into a verdict, as in a round of
the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from forerun.annotations import Float
from forerun.draft.base import Drafter


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
