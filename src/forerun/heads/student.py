"""Student: a drafter in training, and the texts that it learns from.

Each kind has a class that defines its network, its taps, the loss weights of depths, and its checkpoint. Data, the
target's answers, losses, optimizers, the training state on disk, measurements on held-out text, and the report are
common to all kinds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from forerun.annotations import Bool, Float, Int
from forerun.draft.spec import DraftSpec
from forerun.heads.fresh import TargetTables, save_weights, stored_dtype, trainable
from forerun.heads.sizes import StudentSizes
from forerun.heads.vocabulary import OFFSETS
from forerun.models.loading import Blueprint
from forerun.store import save_json

StudentT = TypeVar("StudentT", bound="Student")


@dataclass(frozen=True, slots=True)
class TargetText:
    """A prompt and the target's answer, with the target's states.

    Row t of `taps` has the states at token t, at the student's taps in order; row t of `last` is the output of the last
    layer there, from which norm and head compute the distribution of token t + 1. The target did not read the text's
    last token. `seed` is that of sampling. `is_cut`: whether the answer ended at its length limit.
    """

    tokens: Sequence[int]
    num_prompt: int
    seed: int
    taps: Float[Tensor, "read taps hidden"]
    last: Float[Tensor, "read hidden"]
    is_cut: bool = True

    @property
    def roots(self) -> range:
        """Positions from which a draft may start: the prompt's last token, and the answer without its last token."""
        return range(self.num_prompt - 1, len(self.tokens) - 1)


@dataclass(frozen=True, slots=True)
class TextBatch:
    """A batch of texts, padded at their ends, that a student's network reads in one pass.

    A causal network does not see the padding, since it is last. `tokens` includes each text's last token, which the
    target did not read.
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
        """The tokens that the target read."""
        return self.tokens[:, :-1]

    @property
    def first_root(self) -> int:
        """The first position that is a root in any of the texts."""
        return min(text.roots.start for text in self.texts)

    @property
    def places(self) -> Int[Tensor, "batch length"]:
        """All positions that the target read."""
        rows, length = self.read.shape
        return torch.arange(length, device=self.tokens.device).expand(rows, -1)

    @property
    def roots(self) -> Int[Tensor, "batch places"]:
        """All positions from the first root on."""
        return self.places[:, self.first_root :]

    def inside(self, places: Int[Tensor, "batch places"], ahead: int = 0) -> Bool[Tensor, "batch places"]:
        """Whether these positions, and those `ahead` positions later, are roots of their texts."""
        starts, stops = torch.tensor(
            [[text.roots.start, text.roots.stop] for text in self.texts], device=places.device
        ).T
        counted: Tensor = (places >= starts[:, None]) & (places + ahead < stops[:, None])
        return counted

    def some_roots(self, one_in: int, generator: torch.Generator) -> Int[Tensor, "batch roots"]:
        """Random roots of each text, sorted, as many as one in `one_in` positions.

        A text with too few roots gets other positions too.
        """
        places = self.roots
        order = torch.rand(places.shape, generator=generator) + ~self.inside(places.cpu())
        count = -(-places.shape[1] // one_in)
        return places[0, 0] + order.argsort(1)[:, :count].sort(1).values.to(places.device)


@dataclass(frozen=True, slots=True)
class Predictions:
    """A student's logits. Entry `[b, r]` of `logits[d - 1]` is for the token d positions after `roots[b, r]`.

    A drafter whose inputs at a position do not depend on the depth has logits for depth 1 only, with every position a
    root (`TextBatch.roots`); the logits of deeper draft tokens equal those of depth 1 at later positions. `confidence`,
    shaped like `logits`, are the logits of the estimated probability that a draft token is accepted if those before it
    are; they learn the overlap of p and q. `target` are the target's own logits from the batch's first root on, for a
    kind that tunes the target too.
    """

    logits: Sequence[Float[Tensor, "batch roots vocab"]]
    roots: Int[Tensor, "batch roots"]
    confidence: Sequence[Float[Tensor, "batch roots"]] = ()
    target: Float[Tensor, "batch places vocab"] | None = None


@dataclass(frozen=True, kw_only=True)
class Student(ABC):
    """A drafter in training; `kind` is its name in `--draft`, and `values` are written as config.json.

    `weights` are the trained tensors by their names in the checkpoint, which stores them in `dtype`. `taps` are as in
    `Drafter.taps`. `depth_weights` are the loss weights of the predicted depths. `most_depth` is the greatest depth of
    a draft, None for no limit. `vocabulary` are the target's ids of its output tokens, None for all; a kind with
    `may_lack_tokens` can be trained for a part of them. `fitted_answers` is the number of answers that `fit` needs.
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
    def untrained(
        cls: type[StudentT], target: Blueprint, values: Mapping[str, Any], weights: Mapping[str, Tensor], **fields: Any
    ) -> StudentT:
        """A student for this target with these initial weights; `fields` are further fields of the kind."""
        trained = trainable(weights, target.placement.device)
        return cls(**{"values": values, "dtype": stored_dtype(target), "weights": trained, **fields})

    @property
    def description(self) -> Mapping[str, Any]:
        """A JSON description of the student; training resumes only from a state with an equal description."""
        return {"kind": self.kind, "config": dict(self.values)}

    def with_vocabulary(self, ids: Int[Tensor, " ids"]) -> Student:
        """This untrained student with these output tokens, as many as before; `ids` are ascending ids of the target."""
        assert self.may_lack_tokens, f"a drafter of the kind {self.kind} has all of the target's tokens"
        return replace(self, vocabulary=ids)

    def fit(self, texts: Sequence[TargetText]) -> None:  # noqa: B027 - only kinds with a closed form have it
        """Initialize weights by a closed-form solution on `fitted_answers` answers, before the first step."""

    @abstractmethod
    def predict(self, batch: TextBatch, generator: torch.Generator | None) -> Predictions:
        """The logits with gradients, as a drafter would compute them from the same tokens and states.

        A drafter knows the text up to the root, and the target's states before the root, which the target has not read
        yet. So a network may use the state at the root only if its drafter computes this state itself. Without a
        `generator` all of `TextBatch.roots` are roots; with it a kind may sample some of them.
        """

    def target_logits(self, last: Float[Tensor, "*places hidden"]) -> Float[Tensor, "*places ids"] | None:
        """The target's logits over `vocabulary` from the outputs of its last layer; None if that saves nothing."""
        return None

    def at_depth_1(self) -> Student:
        """This student with the same weights, predicting only the first draft token."""
        return self

    @torch.no_grad()
    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Set all trained tensors to these values."""
        for name, tensor in self.weights.items():
            tensor.copy_(weights[name])

    def write(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """Write a checkpoint with these weights and the token ids to an empty folder, without the target's tables."""
        if self.vocabulary is not None:
            weights = {**weights, OFFSETS: self.vocabulary.cpu() - torch.arange(len(self.vocabulary))}
        save_weights(weights, self.dtype, folder)
        save_json(self.values, folder / "config.json")

    def spec(self, folder: Path) -> str:
        """The specification of the drafter in this folder, for `--draft`."""
        return str(DraftSpec(self.kind, argument=str(folder)))


@dataclass(frozen=True, kw_only=True)
class TableStudent(Student):
    """A student with the target's `tables` (the head's rows in `vocabulary`), which are not trained."""

    may_lack_tokens: ClassVar[bool] = True
    tables: TargetTables

    def with_vocabulary(self, ids: Int[Tensor, " ids"]) -> Student:
        ids = ids.to(self.tables.embedding.device)
        return replace(self, vocabulary=ids, tables=replace(self.tables, head=self.tables.head[ids]))


MakeStudent = Callable[[Blueprint, StudentSizes, int], Student]  # of target, sizes, seed
