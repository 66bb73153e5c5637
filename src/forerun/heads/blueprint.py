"""HeadBlueprint: trained heads that were checked but not loaded, and how they are widened together with their target.

The states of a widened target are the old ones followed by zeros. So the heads' tensors are widened like the target's
(`models/widen.py`), and the layers that they refer to, as taps or as an exit, become the layers with the same states in
the widened target. The blueprint of each kind lists these tensors and fields; `widen.py` writes the folder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Self

from torch import Tensor

from forerun.annotations import Int, ProgressCallback
from forerun.cache.plan import ModelMemory
from forerun.draft.base import Drafter
from forerun.draft.plan import CacheTokens, DraftContext, DraftPlan, refuse, refuse_members
from forerun.draft.spec import DraftSpec
from forerun.errors import InvalidRequest
from forerun.heads.folder import HeadFolder, HeadTensors
from forerun.heads.kinds import HEADS
from forerun.heads.layouts import DraftLayout, DraftMethod
from forerun.heads.student import MakeStudent
from forerun.heads.vocabulary import id_map_of, read_ids
from forerun.models.chains import IdMap
from forerun.models.config import ModelConfig
from forerun.models.decoder import Decoder
from forerun.models.loading import Blueprint
from forerun.models.projections import ADDING, HEAD, Shapes
from forerun.models.runner import Runner
from forerun.models.widen import WRITERS, Plan, Wider


@dataclass(frozen=True, slots=True)
class WideDrafter:
    """A widened drafter: the shapes of its tensors before (`narrow`) and after (`wide`), and the fields that change.

    The ends of tensor names classify them: `writers` add to the residual stream; `inner` matrices do not read it, like
    the output projections of a layer; `readers` read it although they are not matrices. `qk_norm`: whether the layers
    norm queries and keys. `argument` is the part of the drafter's argument before the folder.
    """

    folder: HeadFolder
    narrow: Shapes
    wide: Shapes
    fields: Mapping[str, Any]
    writers: tuple[str, ...]
    qk_norm: bool = False
    argument: str = ""
    inner: tuple[str, ...] = ADDING
    readers: tuple[str, ...] = ()

    @classmethod
    def of_layers(
        cls,
        folder: HeadFolder,
        shapes: tuple[Shapes, Shapes],
        wide: ModelConfig,
        fields: Mapping[str, Any],
        writers: tuple[str, ...] = (),
        **more: Any,
    ) -> WideDrafter:
        """A widened drafter made of layers, which have the configuration `wide`, with further fields and writers."""
        size = {"vocab_size": wide.vocab_size} if wide.vocab_size else {}
        values = {**wide.layer_fields(), **size, **fields}
        return cls(folder, *shapes, values, (*WRITERS, *writers), wide.qk_norm, **more)


def widened_layers(config: ModelConfig, plan: Plan, name: str) -> ModelConfig:
    """The layers' configuration, widened like the target's. Raises InvalidRequest for layers of another width."""
    if config.hidden != plan.source.config.hidden:
        raise InvalidRequest("draft", f"{name} cannot be widened with the target, whose width it does not have.")
    return Wider(plan.wide.hidden, config.layers).shape(config)


def widened_tap(plan: Plan, tap: int) -> int:
    """The tap of the widened target with the same state as this tap of the source."""
    real = [layer for layer, origin in enumerate(plan.origins) if origin.real]
    return real[tap - 1] + 1 if tap > 0 else tap


class HeadBlueprint(ABC):
    """Heads that were found and checked for a target, but are not loaded."""

    @classmethod
    @abstractmethod
    def read(cls, spec: DraftSpec, target: Blueprint) -> HeadBlueprint:
        """The heads of a specification.

        Raises UnknownDrafter for an invalid argument, ModelError for an unusable folder.
        """

    @abstractmethod
    def plan(self, name: str) -> DraftPlan:
        """The plan of the heads' drafter; `name` is that of its model in the plan."""

    @abstractmethod
    def widened(self, plan: Plan) -> WideDrafter:
        """The heads, widened with the target. Raises InvalidRequest if they cannot be widened."""


@dataclass(frozen=True, slots=True)
class FolderBlueprint(HeadBlueprint):
    """Heads whose argument is their folder, with its `tensors`; `ids` are the target's ids of their output tokens."""

    method: ClassVar[DraftMethod[Any]]
    folder: HeadFolder
    tensors: Any
    ids: Int[Tensor, " draft_vocab"]

    @classmethod
    def of(cls, folder: HeadFolder) -> Self:
        """The heads in a folder. Raises ModelError if it cannot be used."""
        target = folder.target
        tensors = cls.method.read(folder.fields, folder.checkpoint.stored, target.config, target.name)
        return cls.checked(folder, folder.checked(tensors))

    @classmethod
    def checked(cls, folder: HeadFolder, tensors: HeadTensors) -> Self:
        """The heads in a folder whose tensors were checked."""
        return cls(folder, tensors, read_ids(folder.checkpoint, tensors.draft_vocab, folder.target.config.vocab_size))

    @classmethod
    def read(cls, spec: DraftSpec, target: Blueprint) -> HeadBlueprint:
        if spec.argument is None:
            refuse(spec, f"the argument is the folder with the heads, as in {spec.name}:DIR")
        return cls.of(HeadFolder.open(spec.argument, spec.name, target))

    @property
    @abstractmethod
    def memory(self) -> ModelMemory:
        """The memory of the loaded heads."""

    @abstractmethod
    def build(self, num_tokens: int, target: Runner) -> Drafter:
        """The drafter for engines on this runner, with a cache of `num_tokens`."""

    def plan(self, name: str) -> DraftPlan:

        def build(cache_tokens: CacheTokens, _progress: ProgressCallback | None, target: Runner) -> Drafter:
            return self.build(cache_tokens.get(name, 0), target)

        return DraftPlan({name: self.memory}, build, self.folder.fingerprint)


class StateBlueprint(FolderBlueprint):
    """Layers with their own cache that read the target's states.

    `tensors` has the configuration of the layers (`layers`), a variant for shorter texts (`for_length`), and the names
    of the tensors that are never quantized (`tables`).
    """

    decoder: ClassVar[type[Any]]  # of tensors, folder, target and ids

    @abstractmethod
    def drafter(self, layers: Any, runner: Runner, ids: IdMap) -> Drafter:
        """The drafter with these layers, which `runner` runs."""

    @property
    def memory(self) -> ModelMemory:
        tensors, shapes = self.tensors, self.tensors.shapes()
        return self.folder.memory(tensors.layers, shapes, tensors.tables, 0 if HEAD in shapes else len(self.ids))

    def load(self, max_model_len: int, target: Decoder) -> Any:
        """Load the layers, for texts of at most `max_model_len` tokens."""
        return self.decoder(self.tensors.for_length(max_model_len), self.folder, target, self.ids)

    def build(self, num_tokens: int, target: Runner) -> Drafter:
        config = target.decoder.config
        layers = self.load(config.max_positions, target.decoder)
        runner = self.folder.target.runner(layers, num_tokens)
        return self.drafter(layers, runner, id_map_of(self.ids, config.vocab_size, target.device))


@dataclass(frozen=True, slots=True)
class HeadParts:
    """What a kind of heads consists of: its blueprint, its student, and its layouts."""

    blueprint: type[HeadBlueprint]
    student: MakeStudent
    layouts: tuple[DraftLayout, ...] = ()

    @classmethod
    def of(cls, kind: str) -> HeadParts:
        """The declaration `PARTS` in `drafter.py` of this kind (in HEADS), which is imported now."""
        parts: HeadParts = import_module(f"{__package__}.{HEADS[kind].folder}.drafter").PARTS
        return parts


def checked_heads(spec: DraftSpec, target: Blueprint) -> HeadBlueprint:
    """The heads of this specification.

    Raises UnknownDrafter for an invalid argument, ModelError for an unusable folder.
    """
    refuse_members(spec)
    return HeadParts.of(spec.name).blueprint.read(spec, target)


def plan_heads(spec: DraftSpec, context: DraftContext) -> DraftPlan:
    """The plan of the drafter of this specification; raises the errors of `checked_heads`."""
    return checked_heads(spec, context.target).plan(context.unused(str(spec)))
