"""The layouts of drafters' folders: what a conversion reads, what it holds in between, and how a layout is described.

`DraftSource` is a folder as it is found. Weights are read from safetensors, and from pickles as torch writes them, of
which only tensors are taken: a pickle that holds anything else could run code when it is read, and is refused.
`DraftFiles` is a drafter in the form in which forerun runs it. A format is a layout of folders; a method is the kind of
drafter in it. What a layout is read into is its method's form, so any layout of a method can be written from any other.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.errors import MissingWeights, UnsupportedModel, WrongShape
from forerun.fields import Fields, read_fields, short
from forerun.heads.folder import find_heads
from forerun.models.config import MOST_LAYERS, ModelConfig, config_of, read_config
from forerun.models.projections import Shapes
from forerun.models.source import TOKENIZER_FILES, find_checkpoint
from forerun.models.weights import AGAIN, BUFFERS, Checkpoint, StoredTensor, opened, read_header, read_headers

MOST_NAMES = 5  # of tensors that an error lists
FETCHED = ("*.safetensors", "*.bin", "*.pt", *TOKENIZER_FILES)
WHOLE_FOLDER = ("model.safetensors", "model.safetensors.index.json")
ALONE = ("medusa_lm_head.safetensors",)
PICKLES = ("medusa_lm_head.pt", "pytorch_model.bin")


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A folder with a drafter in some layout. `file` holds the weights; `shapes` are of its tensors, by name."""

    fields: Fields
    file: str
    shapes: Mapping[str, tuple[int, ...]]
    stored: Mapping[str, StoredTensor] = field(default_factory=dict)  # in safetensors
    held: Mapping[str, Tensor] = field(default_factory=dict)  # of a pickle

    @classmethod
    def of(cls, name: str) -> DraftSource:
        """The folder of this name, or a hub id, whose files are fetched. Raises ModelError."""
        return cls.at(find_heads(name, files=FETCHED))

    @classmethod
    def at(cls, folder: Path) -> DraftSource:
        """This folder. Raises ModelError."""
        fields = read_fields(folder / "config.json")
        file = next((name for name in (*WHOLE_FOLDER, *ALONE, *PICKLES) if (folder / name).exists()), None)
        if file is None:
            known = ", ".join((*WHOLE_FOLDER, *ALONE, *PICKLES))
            raise MissingWeights(f"{folder} has no weights: it must hold one of {known}")
        if file in PICKLES:
            held = read_pickle(folder / file)
            return cls(fields, file, {name: tuple(tensor.shape) for name, tensor in held.items()}, held=held)
        stored = read_header(folder / file) if file in ALONE else read_headers(folder)
        return cls(fields, file, {name: entry.shape for name, entry in stored.items()}, stored)

    @property
    def folder(self) -> Path:
        """The place of its config.json."""
        return self.fields.path.parent

    @property
    def values(self) -> Mapping[str, Any]:
        """The fields of its config.json."""
        return self.fields.values

    def files(self, *left_out: str) -> DraftFiles:
        """The drafter as it is here, without these tensors and tables that can be computed."""
        names = [name for name in self.shapes if name not in left_out and not name.endswith(BUFFERS)]
        return DraftFiles(self.fields.path, dict(self.values), self.tensors(names))

    def tensors(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Some tensors, or all, in the number format that they are stored in."""
        found = {}
        for name in self.shapes if names is None else names:
            if name in self.held:
                found[name] = self.held[name].contiguous()
            else:
                with opened(self.stored[name].file) as file:
                    found[name] = file.get_tensor(name)
        return found


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


ReadLayout = Callable[[DraftSource, TargetFacts | None], DraftFiles]
WriteLayout = Callable[[DraftFiles, TargetFacts | None], DraftFiles]


def unchanged(files: DraftFiles, _target: TargetFacts | None) -> DraftFiles:
    """The same files."""
    return files


@dataclass(frozen=True, slots=True)
class DraftMethod:
    """A kind of drafter. `drafter` is what `--draft` calls it; `meaning` checks files, and says what they describe."""

    label: str
    drafter: str
    meaning: Callable[[DraftFiles, TargetFacts | None], object]


@dataclass(frozen=True, slots=True)
class DraftLayout:
    """A method in a format. `holds` recognises a folder, `sign` says by what; `complete` adds what the format needs.

    `file` is where the weights are written, `is_pickle` as torch saves them. `is_run`: `--draft` takes such a folder.
    """

    format: str
    method: DraftMethod
    sign: str
    holds: Callable[[DraftSource], bool]
    read: ReadLayout
    write: WriteLayout
    complete: WriteLayout = unchanged
    file: str = "model.safetensors"
    is_pickle: bool = False
    is_run: bool = True


def read_pickle(path: Path) -> Mapping[str, Tensor]:
    """The tensors of a file of torch's. Nothing in it is run. Raises UnsupportedModel, MissingWeights."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of pickles that others than torch wrote
            found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UnsupportedModel(
            f"{path} holds more than tensors ({short(error).splitlines()[0]}), and reading that could run code: get "
            "the weights as safetensors, or as a state dict"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise MissingWeights(f"{path} is damaged or incomplete ({short(error).splitlines()[0]}): {AGAIN}") from error
    if not isinstance(found, dict) or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise UnsupportedModel(f"{path} is no state dict: it must hold tensors by their names alone")
    return {str(name): tensor for name, tensor in found.items()}


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
