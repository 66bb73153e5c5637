"""HeadFolder: a folder of trained heads of any kind.

This file finds the folder, checks that it is of the kind asked for and has the tensors of this kind and no others,
computes the memory of its layers, and loads them with the target's kernels. `kinds.py` is the table of kinds; the
`format.py` of a kind defines its tensors and fields.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor

from forerun.annotations import Int
from forerun.cache.plan import ModelMemory
from forerun.config import Quantization
from forerun.errors import MissingWeights, ModelNotFound, UnsupportedModel
from forerun.fields import Fields, read_fields, short
from forerun.heads.kinds import HEADS
from forerun.models.backends.base import Backend
from forerun.models.bundled import BUNDLED, BUNDLED_HEAD_NAMES, BUNDLED_HEADS
from forerun.models.config import ModelConfig
from forerun.models.decoder import Decoder
from forerun.models.layer import Bias, Linear, WeightMatrix
from forerun.models.loading import Blueprint
from forerun.models.packing import Take, WeightLoader
from forerun.models.projections import HEAD, Shapes
from forerun.models.source import HUB_FILES, find_folder, similar_names
from forerun.models.weights import BUFFERS, Checkpoint

OWN_EMBEDDING = "embed_tokens.weight"  # a drafter's own embedding
OTHER_WEIGHTS = (".bin", ".pt", ".safetensors")  # endings of files with published heads
FIX = f"name the folder that forerun train wrote, or a hub id as owner/name; bundled are {BUNDLED_HEAD_NAMES}"


@runtime_checkable
class HeadTensors(Protocol):
    """The tensors that a folder of heads must have, according to its config.json.

    `title` describes the heads in error messages. `idle` are further tensors that a folder may have; they are not read,
    or are read separately. `draft_vocab` is the number of tokens of the heads' output.
    """

    @property
    def title(self) -> str: ...

    @property
    def idle(self) -> Collection[str]: ...

    @property
    def draft_vocab(self) -> int: ...

    def shapes(self) -> Shapes:
        """Names and shapes of all tensors, except the table of ids."""
        ...


TensorsT = TypeVar("TensorsT", bound=HeadTensors)


@dataclass(frozen=True, slots=True)
class HeadFolder:
    """A folder of heads for `target`, with the fields of its config.json and the headers of its tensors.

    `name` is the folder as the user wrote it. `is_targets`: whether it is the target's own checkpoint, which contains
    the heads too.
    """

    name: str
    target: Blueprint
    fields: Fields
    checkpoint: Checkpoint
    is_targets: bool = False

    @classmethod
    def open(cls, name: str, kind: str, target: Blueprint) -> HeadFolder:
        """The folder of this name, which must be of this kind (in HEADS). Raises ModelError if it cannot be used."""
        path, layout = find_of_kind(name, kind), HEADS[kind].layout
        if layout is not None:
            refuse_other_weights(path, layout)
        return cls.at(path, name, target)

    @classmethod
    def at(cls, folder: Path, name: str, target: Blueprint, is_targets: bool = False) -> HeadFolder:
        """The heads in an existing folder. Raises ModelError if it has no weights."""
        return cls(name, target, read_fields(folder / "config.json"), Checkpoint(folder, target.dtype), is_targets)

    @property
    def path(self) -> Path:
        return self.checkpoint.folder

    @property
    def backend(self) -> Backend:
        """The target's backend, which also runs the heads."""
        return self.target.backend()

    @property
    def quantize(self) -> Quantization | None:
        """The quantization of the heads' layers: the target's, or int8 if the target's weights stay as stored."""
        return self.target.quantize or ("int8" if self.target.keeps_groups else None)

    def make(self, weight: WeightMatrix, bias: Bias | None = None) -> Linear:
        """A linear layer with the quantization `quantize`."""
        return self.backend.linear(weight, bias, self.quantize)

    def weights(self, fetch: Take) -> WeightLoader:
        """The weights that `fetch` returns, for a decoder with the target's dtype and backend."""
        return WeightLoader(fetch, self.target.dtype, self.backend, self.quantize)

    def shared_head(self, ids: Int[Tensor, " draft_vocab"], target: Decoder) -> Linear:
        """The target's head, or a head of its rows `ids` unless these are all ids in order."""
        is_whole = torch.equal(ids, torch.arange(target.config.vocab_size))
        return target.shared_head() if is_whole else self.target.head_rows(ids)

    def take(self, name: str) -> Tensor:
        """Load a tensor, whose shape was checked before, to the target's device."""
        return self.checkpoint.take(name, self.checkpoint.stored[name].shape).to(self.target.placement.device)

    def checked(self, tensors: TensorsT, *fixes: str) -> TensorsT:
        """Check by the headers that the folder has these tensors, and no others except those `idle`; returns them.

        Raises ModelError; `fixes` are further suggestions for an unknown tensor.
        """
        shapes = tensors.shapes()
        for name, shape in shapes.items():
            self.checkpoint.find(name, shape)
        refuse_unread(self.path, self.checkpoint.stored, {*shapes, *tensors.idle}, tensors.title, *fixes)
        return tensors

    def layers(self, config: ModelConfig, shapes: Shapes, tables: Collection[str] = ()) -> Blueprint:
        """The folder's layers as a model without a vocabulary; `tables` are the tensors that are not part of layers."""
        size = sum(math.prod(shape) for name, shape in shapes.items() if name not in tables)
        return Blueprint(
            spec=replace(self.target.spec.derive(self.name), quantize=self.quantize),
            name=self.name,
            folder=self.path,
            config=replace(config, vocab_size=0),
            choice=self.target.choice,
            num_bytes=size * self.target.dtype.itemsize,
            placement=self.target.placement,
            passes=self.target.passes.of_drafter(),
        )

    def memory(self, config: ModelConfig, shapes: Shapes, tables: Collection[str], shared_rows: int = 0) -> ModelMemory:
        """The memory of the layers, of `tables`, which are never quantized, and of a copy of rows of the target's head.

        The copy has `shared_rows` rows; a head of all rows is shared, not copied.
        """
        shared_rows = 0 if shared_rows == self.target.config.vocab_size else shared_rows
        layers = self.layers(config, shapes, tables)
        size = sum(math.prod(shape) for name, shape in shapes.items() if name in tables)
        size += shared_rows * self.target.config.hidden
        weights = layers.weights_bytes + size * self.target.dtype.itemsize
        scratch = layers.scratch_bytes(self.target.config.vocab_size)
        return replace(layers.memory, weights_bytes=weights, scratch_bytes=scratch)

    def fingerprint(self) -> str:
        """The fingerprint of the folder's weights."""
        return self.layers(self.target.config, {}).fingerprint()


def find_of_kind(name: str, kind: str) -> Path:
    """The folder of this name. Raises ModelNotFound if it does not exist, or if its config.json is of another kind."""
    folder = find_heads(name)
    fields, needed = read_fields(folder / "config.json"), HEADS[kind].needed
    stored_kind = next((other for other, each in HEADS.items() if each.match(fields)), kind)
    if stored_kind != kind:
        key = HEADS[stored_kind].argument
        draft = stored_kind if key is None else f"{stored_kind}:{fields.values[key]}"
        raise ModelNotFound(f"{name} is a drafter of another kind than {kind}: write {draft}:{name}")
    if needed is not None and fields.values.get(needed) is None:
        raise ModelNotFound(f"{folder} is not a drafter of the kind {kind}: its config.json has no {needed}: {FIX}")
    return folder


def find_heads(name: str, files: Sequence[str] = HUB_FILES) -> Path:
    """The folder of trained heads of this name: a folder, a bundled name, or a hub id as owner/name.

    `files` are the patterns of files to download. Raises ModelNotFound for a missing folder, for an unknown name
    without an owner, and for the name of a bundled model.
    """
    try:
        exists = Path(name).expanduser().exists()
    except (OSError, RuntimeError, ValueError):
        exists = False
    if not exists and name in BUNDLED_HEADS:
        return BUNDLED_HEADS[name]
    if not exists and name in BUNDLED:
        raise ModelNotFound(f"{name} is a model, not heads: use it as model:{name}; for heads {FIX}")
    if not exists and "/" not in name:
        near = [each for each in similar_names(name, BUNDLED_HEADS) if each not in BUNDLED]
        hint = f"did you mean {' or '.join(near)}? Otherwise " if near else ""
        raise ModelNotFound(f"there is no folder {name}: {hint}{FIX}")
    return find_folder(name, None, files, "config.json", BUNDLED_HEADS)


def refuse_other_weights(folder: Path, layout: str) -> None:
    """Raise MissingWeights, with the conversion to `layout`, for weights in other files than model.safetensors."""
    stored = [folder / name for name in ("model.safetensors", "model.safetensors.index.json")]
    others = sorted(path.name for path in folder.iterdir() if path.suffix in OTHER_WEIGHTS)
    if others and not any(path.exists() for path in stored):
        command = f"forerun convert {folder} --to {layout} --out {folder.name}-converted"
        raise MissingWeights(f"{folder} has {others[0]} but no model.safetensors: write one with `{command}`")


def refuse_unread(folder: Path, stored: Iterable[str], read: Collection[str], heads: str, *fixes: str) -> None:
    """Raise UnsupportedModel for a stored tensor that is neither read nor a buffer, which can be recomputed."""
    unread = sorted(name for name in stored if name not in read and not name.endswith(BUFFERS))
    if unread:
        fix = ", ".join(("use the config.json that came with the weights", *fixes))
        raise UnsupportedModel(f"{folder}: the tensor {short(unread[0])} does not belong to {heads}: {fix}")


def refuse_sizes(fields: Fields, target_name: str, **sizes: int) -> None:
    """Raise UnsupportedModel for a field whose size differs from the target's; `sizes` are the target's, by field."""
    for key, size in sizes.items():
        if fields.values.get(key) not in (None, size):
            raise fields.refuse(key, f"{target_name} has {size}: name a drafter that was trained for it")


def refuse_missing_tables(fields: Fields, target: ModelConfig, target_name: str, hidden: int, tables: Shapes) -> None:
    """Raise UnsupportedModel for a drafter of another width than its target's without its own embedding and head."""
    missing = [name for name in (OWN_EMBEDDING, HEAD) if name not in tables]
    if missing and hidden != target.hidden:
        fix = "name a drafter that was trained for it, or add that tensor"
        raise fields.refuse(
            "hidden_size", f"{target_name} has {target.hidden}, and the folder has no {missing[0]}: {fix}"
        )


def model_fields(fields: Fields, usual: Mapping[str, Any]) -> Fields:
    """The fields of the drafter's layers as those of a model, with defaults from `usual`."""
    kept = {key: value for key, value in fields.values.items() if key != "architectures"}
    return replace(fields, values={**usual, **kept})
