"""A drafter in the layout in which forerun runs it, on its way between two others.

`DraftFiles` is the config.json and the tensors; `TargetFacts` is what is known of the target. `check_tensors_of` sees
to it that every tensor is used and every expected one is there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from forerun.errors import MissingWeights, UnsupportedModel, WrongShape
from forerun.fields import Fields, read_fields, short
from forerun.models.config import MOST_LAYERS, ModelConfig, config_of, read_config
from forerun.models.projections import Shapes
from forerun.models.source import find_checkpoint
from forerun.models.weights import Checkpoint

MOST_NAMES = 5  # of tensors that an error lists


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """The target that a drafter is for."""

    name: str
    folder: Path
    config: ModelConfig

    @classmethod
    def of(cls, name: str) -> TargetFacts:
        """The checkpoint of this name. Raises ModelError."""
        folder = find_checkpoint(name)
        return cls(name, folder, read_config(folder))

    @property
    def architectures(self) -> list[str]:
        """As its config.json has them."""
        return read_fields(self.folder / "config.json").names("architectures")

    def embedding(self) -> Tensor:
        """Its embeddings, in its own number format."""
        return self.table("model.embed_tokens.weight")

    def head(self) -> Tensor:
        """Its output matrix, likewise."""
        return self.embedding() if self.config.tied else self.table("lm_head.weight")

    def table(self, name: str) -> Tensor:
        """A tensor with a row for each token."""
        c = self.config
        return Checkpoint.of_model(self.folder, c.dtype).take(name, (c.vocab_size, c.hidden))


@dataclass(frozen=True, slots=True)
class DraftFiles:
    """A drafter's config.json and tensors; `path` is the config.json that errors name."""

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    @property
    def fields(self) -> Fields:
        """The configuration, for reading."""
        return Fields(self.path, self.config)

    @property
    def num_bytes(self) -> int:
        """The size of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def check_tensors_of(files: DraftFiles, shapes: Shapes, also: tuple[str, ...] = ()) -> None:
    """Raise where a tensor is missing or of another shape, or where one is neither promised nor in `also`."""
    folder = files.path.parent
    missing = [name for name in shapes if name not in files.tensors]
    if missing:
        raise MissingWeights(f"{folder} has no tensor {listed(missing)}: the checkpoint is incomplete; get it again")
    unread = sorted(files.tensors.keys() - shapes.keys() - set(also))
    if unread:
        wanted = "use the config.json that came with the weights"
        raise UnsupportedModel(f"{folder}: nothing reads the tensor {listed(unread)}: {wanted}")
    for name, shape in shapes.items():
        found = tuple(files.tensors[name].shape)
        if found != shape:
            raise WrongShape(f"{folder}: {name} has shape {list(found)}, config.json promises {list(shape)}")


def listed(names: list[str]) -> str:
    """Names for a message: a few, and how many more there are."""
    shown = ", ".join(map(short, names[:MOST_NAMES]))
    return shown if len(names) <= MOST_NAMES else f"{shown} and {len(names) - MOST_NAMES} more"


def own_target(fields: Fields) -> ModelConfig:
    """What the layer's fields say of a target that was not named; it may have any number of layers."""
    usual = {"max_position_embeddings": 2048, "model_type": "llama", "num_hidden_layers": 1}
    values = {key: value for key, value in fields.values.items() if key != "architectures"}
    config = config_of(replace(fields, values=usual | values))
    return replace(config, layers=MOST_LAYERS, hidden=fields.whole("target_hidden_size", config.hidden))
