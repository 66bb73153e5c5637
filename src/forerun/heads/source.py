"""What a conversion reads: a folder's config.json, and its tensors one by one.

The file decides which files of weights are read: safetensors, and pickles as torch writes them, of which only tensors
are taken. A pickle that holds anything else could run code when it is read, and is refused.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.errors import MissingWeights, UnsupportedModel
from forerun.fields import Fields, read_fields, short
from forerun.heads.folder import find_heads
from forerun.models.source import TOKENIZER_FILES
from forerun.models.weights import AGAIN, StoredTensor, opened, read_header, read_headers

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
