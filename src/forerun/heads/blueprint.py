"""HeadBlueprint: heads that were checked but not loaded, and what becomes of them when their target is widened.

Heads read, of a widened target, the states that they read before with zeros behind them. So their own tensors grow as
the target's do (`models/widen.py`), and layers that they name, as taps or as an exit, become those where the same
states are in the widened target. Which tensors and fields these are is said by the blueprint of each kind; `widen.py`
writes the folder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from forerun.annotations import ProgressCallback
from forerun.cache.plan import ModelMemory
from forerun.draft.base import Drafter
from forerun.draft.plan import CacheTokens, DraftPlan, refuse
from forerun.draft.spec import DraftSpec
from forerun.errors import InvalidRequest
from forerun.heads.folder import HeadFolder, HeadSigns, OpenFolder
from forerun.heads.layouts import DraftLayout
from forerun.heads.student import MakeStudent
from forerun.models.config import ModelConfig
from forerun.models.loading import Blueprint
from forerun.models.projections import ADDING, Shapes
from forerun.models.runner import Runner
from forerun.models.widen import WRITERS, Plan, Wider


@dataclass(frozen=True, slots=True)
class WideDrafter:
    """What becomes of a drafter: the shapes of its tensors before and after, and the fields that change.

    Tensors are told by the ends of their names: `writers` add to a residual stream, matrices that are `inner` read
    none, as those of a layer that add to it, and `readers` read one though they are no matrices. `qk_norm` says that
    its layers norm queries and keys, and `argument` what its argument says before the folder.
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
        """What becomes of layers, which are `wide` then, with fields and writers of their own."""
        size = {"vocab_size": wide.vocab_size} if wide.vocab_size else {}
        values = {**wide.layer_fields(), **size, **fields}
        return cls(folder, *shapes, values, (*WRITERS, *writers), wide.qk_norm, **more)


def widened_layers(config: ModelConfig, plan: Plan, name: str) -> ModelConfig:
    """The layers' shape, grown as far as the target's. Raises InvalidRequest for layers of another width than it."""
    if config.hidden != plan.source.config.hidden:
        raise InvalidRequest("draft", f"{name} has a width of its own, and cannot be widened with the target.")
    return replace(Wider(plan.wide.hidden, config.layers).shape(config), vocab_size=config.vocab_size)


def widened_tap(plan: Plan, tap: int) -> int:
    """The layer of the widened target that the state entering this layer of the source enters."""
    real = [layer for layer, origin in enumerate(plan.origins) if origin.real]
    return real[tap - 1] + 1 if tap > 0 else tap


class HeadBlueprint(ABC):
    """Heads that were found and checked for a target, but that are not loaded."""

    @classmethod
    @abstractmethod
    def read(cls, spec: DraftSpec, target: Blueprint, open_folder: OpenFolder) -> HeadBlueprint:
        """The heads of a specification. Raises UnknownDrafter for a wrong argument, ModelError for an unusable folder.

        `open_folder` opens folders of their kind.
        """

    @abstractmethod
    def plan(self, name: str) -> DraftPlan:
        """The plan of their drafter, which is called so."""

    @abstractmethod
    def widened(self, plan: Plan) -> WideDrafter:
        """What becomes of them when the target is widened. Raises InvalidRequest."""


class FolderBlueprint(HeadBlueprint):
    """Heads whose argument is their folder."""

    folder: HeadFolder

    @classmethod
    @abstractmethod
    def of(cls, folder: HeadFolder) -> FolderBlueprint:
        """The heads in a folder. Raises ModelError for one that cannot be used."""

    @classmethod
    def read(cls, spec: DraftSpec, target: Blueprint, open_folder: OpenFolder) -> HeadBlueprint:
        if spec.argument is None:
            refuse(spec, f"name the folder with the heads, as in {spec.name}:DIR")
        return cls.of(open_folder(spec.argument))

    @property
    @abstractmethod
    def memory(self) -> ModelMemory:
        """What they take once loaded."""

    @abstractmethod
    def build(self, num_tokens: int, target: Runner) -> Drafter:
        """The drafter for engines on this runner, with a cache of `num_tokens`."""

    def plan(self, name: str) -> DraftPlan:

        def build(cache_tokens: CacheTokens, _progress: ProgressCallback | None, target: Runner) -> Drafter:
            return self.build(cache_tokens.get(name, 0), target)

        return DraftPlan({name: self.memory}, build, self.folder.fingerprint)


@dataclass(frozen=True, slots=True)
class HeadParts:
    """What a kind of heads brings: the signs of its folders, the blueprint that finds and checks heads, what makes a
    student, and the layouts of its conversions."""

    signs: HeadSigns
    blueprint: type[HeadBlueprint]
    student: MakeStudent
    layouts: tuple[DraftLayout, ...] = ()
