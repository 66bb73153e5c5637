"""The layouts of drafters' folders, for conversions: how each is recognized, read and written.

A method is a kind of drafter, and a layout is how a format stores it. Each layout is converted to the one that forerun
runs and back, so any layout of a method can be converted to any other. Weights are read from safetensors and from
torch's pickles. A pickle with anything but tensors is refused, because reading it could run code.

All folders of `speculators` describe the drafter's layers under `transformer_layer_config`, and the target under
`speculators_config`. This file writes these parts; the file of each method writes the others.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic

import torch
from torch import Tensor

from forerun.annotations import Int
from forerun.errors import MissingWeights, UnsupportedModel, WrongShape
from forerun.fields import Fields, read_fields, short
from forerun.heads.folder import TensorsT, model_fields, refuse_unread
from forerun.heads.kinds import SPECULATORS
from forerun.heads.vocabulary import MASK, OFFSETS, ids_of
from forerun.models.config import MOST_LAYERS, ModelConfig, config_of, read_config
from forerun.models.projections import EMBEDDING, HEAD
from forerun.models.source import TOKENIZER_FILES, find_checkpoint
from forerun.models.stored import DOWNLOAD, read_header
from forerun.models.weights import BUFFERS, Checkpoint, read_headers

FETCHED = ("*.safetensors", "*.bin", "*.pt", *TOKENIZER_FILES)
MEDUSA_FILE = "medusa_lm_head.safetensors"
PICKLES = ("medusa_lm_head.pt", "pytorch_model.bin")
FILES = ("model.safetensors", "model.safetensors.index.json", MEDUSA_FILE, *PICKLES)
LAYER_CONFIG = "transformer_layer_config"
VERSION = "0.9.0"  # the version of speculators whose layout is written
TARGET_KEY = "speculators_config"  # copied by conversions: the target's name, and how many tokens to draft
FORMAT_KEYS = ("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", TARGET_KEY)
VERSION_KEY = "speculators_version"
TRAINING = ("verifier_lm_head.weight", "verifier_norm.weight")  # tensors of the target, used in training only
INFERRED = "its own config.json"  # in place of the target's name in error messages
USUAL_DEPTH = 3  # as the converter of speculators writes


@dataclass(frozen=True, slots=True)
class DraftFiles:
    """A drafter's config.json (its path is `path`) and tensors (from `file`)."""

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    file: str = ""

    @classmethod
    def of(cls, folder: Path) -> DraftFiles:
        """The files of a folder, without `t2d` and buffers, which can be recomputed. Raises ModelError."""
        config = read_fields(folder / "config.json").values
        file = next((name for name in FILES if (folder / name).exists()), None)
        if file is None:
            raise MissingWeights(f"{folder} has no weights: it must hold one of {', '.join(FILES)}")
        tensors = read_pickle(folder / file) if file in PICKLES else read_safetensors(folder, file)
        kept = {name: tensor for name, tensor in tensors.items() if not name.endswith((*BUFFERS, MASK))}
        return cls(folder / "config.json", config, kept, file)

    @property
    def folder(self) -> Path:
        return self.path.parent

    @property
    def fields(self) -> Fields:
        return Fields(self.path, self.config)

    def without(self, *names: str) -> DraftFiles:
        return replace(self, tensors={name: tensor for name, tensor in self.tensors.items() if name not in names})

    def renamed(self, names: Mapping[str, str]) -> DraftFiles:
        """The drafter with renamed tensors: `names` maps prefixes to new ones, and the first that fits is replaced."""

        def new(name: str) -> str:
            old = next((each for each in names if name.startswith(each)), "")
            return names.get(old, "") + name.removeprefix(old)

        return replace(self, tensors={new(name): tensor for name, tensor in self.tensors.items()})

    def checked(self, tensors: TensorsT) -> TensorsT:
        """Check that the files have these tensors, and no others except those `idle`; returns them.

        Raises ModelError for a missing tensor, another shape, or an unknown tensor.
        """
        shapes = tensors.shapes()
        for name, shape in shapes.items():
            if name not in self.tensors:
                raise MissingWeights(f"{self.folder} has no tensor {name}: the checkpoint is incomplete; get it again")
            stored = tuple(self.tensors[name].shape)
            if stored != shape:
                raise WrongShape(f"{self.folder}: {name} has shape {list(stored)}, config.json promises {list(shape)}")
        refuse_unread(self.folder, self.tensors, {*shapes, *tensors.idle}, tensors.title)
        return tensors

    @property
    def id_tables(self) -> dict[str, Tensor]:
        """`d2t` and `t2d` as they are written, if the drafter has `d2t`."""
        if OFFSETS not in self.tensors:
            return {}
        vocab_size = self.fields.whole("vocab_size")
        mask = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, self.head_ids(vocab_size), True)
        return {OFFSETS: self.tensors[OFFSETS].long(), MASK: mask}

    def head_ids(self, vocab_size: int) -> Int[Tensor, " draft_vocab"]:
        """The target's ids of the head's tokens. Raises UnsupportedModel for an invalid table."""
        offsets = self.tensors.get(OFFSETS)
        if offsets is None:
            return torch.arange(vocab_size)
        if offsets.is_floating_point() or offsets.dim() != 1:
            raise UnsupportedModel(f"{self.folder}: {OFFSETS} must have a whole number for each token of the head")
        return ids_of(offsets.long(), len(offsets), vocab_size, self.folder)


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """The target of a drafter. If the target is unknown, `folder` is None and `config` is inferred."""

    name: str
    config: ModelConfig
    folder: Path | None

    @classmethod
    def of(cls, name: str) -> TargetFacts:
        """The checkpoint of this name. Raises ModelError."""
        folder = find_checkpoint(name)
        return cls(name, read_config(folder), folder)

    @property
    def architectures(self) -> list[str]:
        """The architectures in its config.json."""
        return [] if self.folder is None else read_fields(self.folder / "config.json").names("architectures")

    def embedding(self) -> Tensor:
        """Its embedding table, in its own dtype."""
        return self.table(EMBEDDING)

    def head(self) -> Tensor:
        """Its output matrix, in its own dtype."""
        return self.embedding() if self.config.tied else self.table(HEAD)

    def table(self, name: str) -> Tensor:
        """A tensor with a row for each token."""
        c = self.config
        assert self.folder is not None, "the target is unknown"
        return Checkpoint.of_model(self.folder, c.dtype).take(name, (c.vocab_size, c.hidden))


ChangeFiles = Callable[[DraftFiles, TargetFacts | None], DraftFiles]
ReadTensors = Callable[[Fields, Collection[str], ModelConfig, str], TensorsT]
InferTarget = Callable[[Fields], TargetFacts]


def infer_target(family: str) -> InferTarget:
    """A function that infers the target from the fields of a drafter, whose layers are by default of `family`."""
    usual = {"max_position_embeddings": 2048, "model_type": family, "num_hidden_layers": 1}

    def infer(fields: Fields) -> TargetFacts:
        config = config_of(model_fields(fields, usual))
        hidden = fields.whole("target_hidden_size", config.hidden)
        return TargetFacts(INFERRED, replace(config, layers=MOST_LAYERS, hidden=hidden), None)

    return infer


def unchanged(files: DraftFiles, _target: TargetFacts | None) -> DraftFiles:
    return files


@dataclass(frozen=True, slots=True)
class DraftMethod(Generic[TensorsT]):
    """A kind of drafter. `drafter` is its name in `--draft`.

    `read` returns the tensors from the fields of config.json, the names of the stored tensors, and the target's
    configuration and name. If the target is unknown, `infer` infers it from the fields.
    """

    label: str
    drafter: str
    read: ReadTensors[TensorsT]
    infer: InferTarget

    def meaning(self, files: DraftFiles, target: TargetFacts | None) -> TensorsT:
        """The drafter that the files describe, for comparison. Raises ModelError for missing or unused tensors."""
        target = target or self.infer(files.fields)
        tensors = files.checked(self.read(files.fields, files.tensors.keys(), target.config, target.name))
        if OFFSETS in tensors.idle and len(files.head_ids(target.config.vocab_size)) != tensors.draft_vocab:
            raise files.fields.refuse("draft_vocab_size", f"{OFFSETS} is missing or has another size: correct it")
        return tensors


@dataclass(frozen=True, slots=True)
class DraftLayout:
    """How a format stores a method. `fits` recognizes a folder; `sign` says how, in error messages.

    `complete` adds the tensors that the format needs beyond those of the method. `file` is the file of the weights:
    safetensors or, with another ending, a torch pickle. `is_runnable`: whether `--draft` accepts such a folder.
    """

    format: str
    method: DraftMethod[Any]
    sign: str
    fits: Callable[[DraftFiles], bool]
    read: ChangeFiles = unchanged
    write: ChangeFiles = unchanged
    complete: ChangeFiles = unchanged
    file: str = "model.safetensors"
    is_runnable: bool = True


def read_safetensors(folder: Path, file: str) -> dict[str, Tensor]:
    """The tensors of a folder, in their stored dtypes."""
    stored = read_header(folder / file) if file == MEDUSA_FILE else read_headers(folder)
    return {name: entry.read() for name, entry in stored.items()}


def read_pickle(path: Path) -> dict[str, Tensor]:
    """The tensors of a torch pickle, without running code in it.

    Raises UnsupportedModel for other content, MissingWeights for a damaged file.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns of pickles from other programs
            value = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise UnsupportedModel(
            f"{path} contains more than tensors ({short(error).splitlines()[0]}), and reading it could run code: get "
            "the weights as safetensors, or as a state dict"
        ) from error
    except (RuntimeError, EOFError, OSError, ValueError) as error:
        raise MissingWeights(f"{path} is damaged or incomplete ({short(error).splitlines()[0]}): {DOWNLOAD}") from error
    if not isinstance(value, dict) or not all(isinstance(tensor, Tensor) for tensor in value.values()):
        raise UnsupportedModel(f"{path} is not a state dict: it must have tensors by their names and nothing else")
    return {str(name): tensor.contiguous() for name, tensor in value.items()}


def package_config(
    fields: Fields, target: TargetFacts | None, kind: str, values: Mapping[str, Any], depth: int = USUAL_DEPTH
) -> dict[str, Any]:
    """config.json of a drafter of type `kind` with these `values`; `fields` are those of the source.

    The description of the target is that of the source, unless a target is given.
    """
    kept = fields.inside(TARGET_KEY).values
    verifier = kept.get("verifier", {"name_or_path": None, "architectures": []})
    if target is not None:
        verifier = {"name_or_path": target.name, "architectures": target.architectures}
    around = {
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": depth}],
        "default_proposal_method": "greedy",
        **kept,
        "algorithm": kind,
        "verifier": verifier,
    }
    signs = {SPECULATORS: kind, VERSION_KEY: VERSION, TARGET_KEY: around}
    return {**signs, **values, "tie_word_embeddings": False, "dtype": number_format(fields)}


def package_layer(config: Mapping[str, Any], layers: ModelConfig, *others: str) -> dict[str, Any]:
    """The fields of a drafter's layers without `others`, including defaults of the family or the target."""
    kept = {key: value for key, value in config.items() if key not in (*FORMAT_KEYS, *others)}
    return {
        "hidden_act": "silu",  # vLLM reads it, and has no default
        **kept,
        **layers.layer_fields(),
        "model_type": layers.family,
        "num_hidden_layers": layers.layers,
        "max_position_embeddings": layers.max_positions,
        "vocab_size": layers.vocab_size,
        "tie_word_embeddings": False,
    }


def number_format(fields: Fields) -> Any:
    """The name of the dtype in config.json."""
    return fields.values.get("dtype") or fields.values.get("torch_dtype") or "float32"


def of_speculators(*kinds: str) -> Callable[[DraftFiles], bool]:
    """A function that tells whether a folder's config.json has one of these types of `speculators`."""
    return lambda files: files.config.get(SPECULATORS) in kinds


def refuse_fields(fields: Fields, refused: Mapping[str, tuple[bool, str]], fix: str) -> None:
    """Raise UnsupportedModel for the first refused field; `refused` maps a field to (whether to refuse it, reason)."""
    for key, (is_refused, why) in refused.items():
        if is_refused:
            raise fields.refuse(key, f"{why}: {fix}")
