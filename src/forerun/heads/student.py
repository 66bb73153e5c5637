"""What is trained: a student, one class for each kind of drafter, and the texts that it learns from.

A kind brings its network, the target's states that this reads, the weights that its loss gives to each depth, and its
checkpoint. Everything else is the same for all of them: data, the target's answers, losses, optimizers, the state that
survives a kill, what is measured on held-out text, and the report. No code asks which kind it trains.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from forerun.annotations import Bool, Float, Int
from forerun.draft.spec import DraftSpec
from forerun.heads.fresh import TargetHead, TargetTables, save_config, save_weights, stored_dtype, trainable
from forerun.heads.sizes import StudentSizes
from forerun.heads.vocabulary import OFFSETS, offsets_of
from forerun.models.loading import Blueprint

Begun = TypeVar("Begun", bound="Student")


@dataclass(frozen=True, slots=True)
class TargetText:
    """A prompt and what the target wrote behind it, with the target's states while it wrote.

    Row t of `taps` is the state after reading token t, at the student's taps in their order; row t of `last` is the one
    behind the last layer, which the target's norm and head turn into the law of token t + 1. The text's last token was
    not read. `seed` is that of the draws. `is_cut` tells an answer that ended at its limit from one that ended itself.
    """

    tokens: Sequence[int]
    num_prompt: int
    seed: int
    taps: Float[Tensor, "read taps hidden"]
    last: Float[Tensor, "read hidden"]
    is_cut: bool = True

    @property
    def roots(self) -> range:
        """Places from which a draft may begin: the prompt's last token, and all of the answer but its last token."""
        return range(self.num_prompt - 1, len(self.tokens) - 1)

    @property
    def whole(self) -> TargetText:
        """The text with every token as a part of the answer, so that drafts may begin in its prompt too."""
        return replace(self, num_prompt=1)


@dataclass(frozen=True, slots=True)
class TextBatch:
    """Texts side by side, padded at their ends: what a student's network reads in one pass.

    Padding comes last, so no causal network sees it before it has read the text. `num_tokens` counts the text's last
    token, which is in `tokens` although nothing was read behind it.
    """

    texts: Sequence[TargetText]
    tokens: Int[Tensor, "batch longest"]
    taps: Float[Tensor, "batch length taps hidden"]
    last: Float[Tensor, "batch length hidden"]

    @classmethod
    def of(cls, texts: Sequence[TargetText]) -> TextBatch:
        """A batch of texts of any lengths, padded at the end to the longest."""
        longest = max(len(text.tokens) for text in texts)
        device = texts[0].last.device
        tokens = [[*text.tokens, *[0] * (longest - len(text.tokens))] for text in texts]
        pad = torch.nn.utils.rnn.pad_sequence
        return cls(
            texts,
            torch.tensor(tokens, device=device),
            pad([text.taps for text in texts], batch_first=True),
            pad([text.last for text in texts], batch_first=True),
        )

    @property
    def read(self) -> Int[Tensor, "batch length"]:
        """The tokens that were read."""
        return self.tokens[:, :-1]

    @property
    def first_root(self) -> int:
        """The first place that is a root in any of the texts."""
        return min(text.roots.start for text in self.texts)

    @property
    def places(self) -> Int[Tensor, "batch length"]:
        """All places that were read."""
        rows, length = self.read.shape
        return torch.arange(length, device=self.tokens.device).expand(rows, -1)

    @property
    def roots(self) -> Int[Tensor, "batch places"]:
        """All places from the first root on."""
        return self.places[:, self.first_root :]

    def inside(self, places: Int[Tensor, "batch places"], ahead: int = 0) -> Bool[Tensor, "batch places"]:
        """Which of these places are roots of their texts, as those are that lie so many places ahead."""
        starts, stops = torch.tensor(
            [[text.roots.start, text.roots.stop] for text in self.texts], device=places.device
        ).T
        counted: Tensor = (places >= starts[:, None]) & (places + ahead < stops[:, None])
        return counted

    def some_roots(self, one_in: int, dice: torch.Generator) -> Int[Tensor, "batch roots"]:
        """Roots of every text, one in so many places, in their order; other places where a text has too few roots."""
        places = self.roots
        order = torch.rand(places.shape, generator=dice) + ~self.inside(places.cpu())
        count = -(-places.shape[1] // one_in)
        return places[0, 0] + order.argsort(1)[:, :count].sort(1).values.to(places.device)


@dataclass(frozen=True, slots=True)
class Predictions:
    """A student's logits. Entry `[b, r]` of `logits[d - 1]` is for the token d places behind `roots[b, r]`.

    A drafter whose guess at every depth reads what its first one would read there has logits for depth 1 alone, with
    every place a root (`TextBatch.roots`): those for deeper guesses are the same, further on. `more` are losses of the
    kind's own, already weighed, which are added. `confidence` are, in the places of `logits`, the logits of the kind's
    own estimates of the chance that a guess is accepted once those before it are: they learn the overlap of the laws.
    `target` are the target's own logits, from the first root of the batch on, of a kind that tunes the target as well.
    """

    logits: Sequence[Float[Tensor, "batch roots vocab"]]
    roots: Int[Tensor, "batch roots"]
    more: Mapping[str, Float[Tensor, ""]] = field(default_factory=dict)
    confidence: Sequence[Float[Tensor, "batch roots"]] = ()
    target: Float[Tensor, "batch places vocab"] | None = None


@dataclass(frozen=True, kw_only=True)
class Student(ABC):
    """A drafter in training, of the kind that `--draft` calls `kind`; it is written with `values` as config.json.

    `weights` are the tensors that are trained, by their names in the checkpoint, where they are of `dtype`. `taps` are
    the target states that it reads, as `Drafter.taps` names them. `depth_weights` says how much each depth counts in
    its loss, as many as it predicts. `most_depth` is that of its deepest draft; None where it goes as far as it is
    asked to. `vocabulary` are the target's ids of its tokens; None where it has all of them, as it must unless it
    `may_lack_tokens`. `fitted_answers` are so many as `fit` wants.
    """

    kind: ClassVar[str]
    may_lack_tokens: ClassVar[bool] = False
    fitted_answers: ClassVar[int] = 0
    values: Mapping[str, Any]
    dtype: torch.dtype
    weights: dict[str, Tensor]
    taps: tuple[int, ...] = (-1,)
    depth_weights: tuple[float, ...] = (1.0,)
    most_depth: int | None = None
    vocabulary: Int[Tensor, " ids"] | None = None

    @classmethod
    def begun(
        cls: type[Begun], target: Blueprint, values: Mapping[str, Any], weights: Mapping[str, Tensor], **fields: Any
    ) -> Begun:
        """One that is trained for this target, from these weights on; `fields` are the kind's own."""
        trained = trainable(weights, target.placement.device)
        return cls(**{"values": values, "dtype": stored_dtype(target), "weights": trained, **fields})

    @property
    def about(self) -> Mapping[str, Any]:
        """What it is made of, as JSON: another value is another training."""
        return {"kind": self.kind, "config": dict(self.values)}

    def with_vocabulary(self, ids: Int[Tensor, " ids"]) -> Student:
        """A student, not trained yet, of these of the target's tokens, as many as this one has; `ids` ascend."""
        assert self.may_lack_tokens, f"a drafter of the kind {self.kind} has all of the target's tokens"
        return replace(self, vocabulary=ids)

    def fit(self, texts: Sequence[TargetText]) -> None:  # noqa: B027 - few kinds have such a form
        """Move the weights, before the first step, to where a closed form on `fitted_answers` answers says."""

    @abstractmethod
    def predict(self, batch: TextBatch, dice: torch.Generator | None) -> Predictions:
        """Its logits with gradients, as serving would compute them from the same tokens and states.

        What serving knows behind a root is the text up to the root, and states up to the place before it: the target
        has not read the root yet. A network may use the state at the root only if its drafter computes it itself.
        Without `dice` all of `TextBatch.roots` are roots; with them a kind for which that is too much draws some.
        """

    def target_logits(self, last: Float[Tensor, "*places hidden"]) -> Float[Tensor, "*places ids"] | None:
        """The target's logits of the ids in `vocabulary` alone, behind its last layer; None where all are as cheap."""
        return None

    def of_first_guesses(self) -> Student:
        """This student, with these weights, where it predicts the first guess of a draft alone."""
        return self

    def write(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Put a checkpoint with these weights, and the ids of its tokens, into an empty folder; what the target has is
        left out."""
        if self.vocabulary is not None:
            weights = {**weights, OFFSETS: offsets_of(self.vocabulary)}
        save_weights(weights, self.dtype, folder)
        save_config(self.values, folder)

    def spec(self, folder: Path) -> str:
        """The specification of the drafter in a folder, as `--draft` takes it."""
        return str(DraftSpec(self.kind, argument=str(folder)))


@dataclass(frozen=True, kw_only=True)
class TableStudent(Student):
    """A student beside the target's own tables, which stay as they are: `embedding`, and `head`, of the ids in
    `vocabulary`."""

    may_lack_tokens: ClassVar[bool] = True
    embedding: Float[Tensor, "vocab hidden"]
    head: TargetHead

    @classmethod
    def beside(
        cls: type[Begun],
        target: Blueprint,
        values: Mapping[str, Any],
        weights: Mapping[str, Tensor],
        tables: TargetTables,
        **fields: Any,
    ) -> Begun:
        """One that begins with these weights, beside these tables of its target."""
        return cls.begun(target, values, weights, embedding=tables.embedding, head=tables.head, **fields)

    def with_vocabulary(self, ids: Int[Tensor, " ids"]) -> Student:
        ids = ids.to(self.embedding.device)
        return replace(self, vocabulary=ids, head=self.head[ids])


MakeStudent = Callable[[Blueprint, StudentSizes, int], Student]  # for a target, of these sizes, with a seed
