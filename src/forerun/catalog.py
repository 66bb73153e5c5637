"""Facts about models: whether and how a model runs here, its drafters, and which models this machine has.

Nothing is loaded: only the configuration and the headers of tensors are read. The models of a machine are those that
ship with forerun, those in the hub's cache, and GGUF files that were used before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from forerun.draft.auto import AUTO_DRAFT, records_of, resolve_auto
from forerun.draft.spec import DraftSpec
from forerun.engine.memory import default_budget
from forerun.errors import ForerunError
from forerun.models.bundled import BUNDLED
from forerun.models.config import read_config
from forerun.models.gguf.folder import INDEX, stored_tensors
from forerun.models.loading import Blueprint
from forerun.models.mtp_names import find_modules
from forerun.models.projections import count_parameters
from forerun.models.spec import ModelSpec
from forerun.models.weights import Checkpoint, check_weights
from forerun.store import cache_folder
from forerun.text.files import template_of
from forerun.text.tokenizer import Tokenizer

SMALLER = 3  # a draft model has at most one third of the target's parameters
HUB_FOLDER = "models--"  # prefix of folders in the hub's cache


@dataclass(frozen=True, slots=True)
class DrafterFacts:
    """A drafter that fits a model: its specification for `--draft`, and a description."""

    draft: str
    about: str


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts of a model and how it runs here. `number_format` is the format of the weights in memory, `kernels` the
    backend that computes with them; `token_bytes` is the size of a token in the KV cache, `context` is in tokens,
    `budget_bytes` is the memory that forerun would use now at most, unless --memory-bytes is given."""

    name: str
    folder: str
    family: str
    parameters: int
    number_format: str
    kernels: str
    weights_bytes: int
    token_bytes: int
    context: int
    budget_bytes: int
    has_chat_template: bool
    drafters: Sequence[DrafterFacts]

    def as_object(self) -> dict[str, Any]:
        """The facts as a JSON object."""
        return asdict(self) | {"commands": list(self.commands)}

    @property
    def commands(self) -> Iterator[str]:
        """Command lines that run the model here."""
        name = f'"{self.name}"' if " " in self.name else self.name
        if self.has_chat_template:
            yield f"forerun chat --model {name} --draft {AUTO_DRAFT}"
        else:
            yield f'forerun generate --model {name} --draft {AUTO_DRAFT} "..."'
        yield f"forerun serve --model {name} --draft {AUTO_DRAFT}"


def facts_of(spec: ModelSpec) -> ModelFacts:
    """The facts of a model. Raises ModelError for a model that cannot run here, InvalidRequest for a wrong option."""
    target = Blueprint.of(spec)
    memory, tokenizer = target.memory, target.tokenizer()
    return ModelFacts(
        name=spec.model,
        folder=str(target.folder),
        family=target.config.family,
        parameters=count_parameters(target.config),
        number_format=target.format,
        kernels=target.backend_name,
        weights_bytes=memory.weights_bytes,
        token_bytes=memory.bytes_per_token,
        context=target.config.max_positions,
        budget_bytes=default_budget(target.placement.device),
        has_chat_template=template_of(target.tokenizer_folder).is_usable,
        drafters=tuple(drafters_for(target, tokenizer)),
    )


def drafters_for(target: Blueprint, tokenizer: Tokenizer) -> Iterator[DrafterFacts]:
    """The drafters of a target: `auto`, trained ones by rank, its own MTP modules, draft models, text drafters."""
    yield DrafterFacts(AUTO_DRAFT, f"chooses {resolve_auto(DraftSpec(AUTO_DRAFT), target)}")
    ranked = sorted(records_of(target), key=lambda each: each[1].rank, reverse=True)
    trained = {str(record.spec(folder)): record for folder, record in ranked}
    for draft, record in trained.items():
        speed_up = "" if record.speed_up is None else f" and a predicted speed-up of ×{record.speed_up:.2f}"
        yield DrafterFacts(draft, f"{max(record.tokens_per_round):.2f} tokens per round{speed_up} when it was trained")
    if find_modules(target.checkpoint(target.dtype).stored, target.config.layers) is not None:
        yield DrafterFacts("mtp", "modules in its own checkpoint")
    for model in models_here():
        if model.drafts_for(target) and model.tokens() == tokenizer.fingerprint():
            draft = str(DraftSpec("model", argument=model.name))
            if draft not in trained:
                yield DrafterFacts(draft, f"{model.parameters / 1e6:.1f} M parameters")
    yield DrafterFacts("suffix", "the most frequent continuation in this text and earlier ones; no weights")
    yield DrafterFacts("ngram", "the last continuation in this text; no weights")


@dataclass(frozen=True, slots=True)
class ModelHere:
    """A model of this machine. `problem` says why it cannot run; empty if it can."""

    name: str
    folder: str
    family: str = ""
    parameters: int = 0
    vocab_size: int = 0
    num_bytes: int = 0
    problem: str = ""

    @property
    def runs(self) -> bool:
        """Whether the model can run here."""
        return not self.problem

    def drafts_for(self, target: Blueprint) -> bool:
        """Whether the model is small enough to draft for a target, and has a vocabulary of the same size."""
        is_small = self.parameters * SMALLER <= count_parameters(target.config)
        return self.runs and is_small and self.vocab_size == target.config.vocab_size

    def tokens(self) -> str | None:
        """The fingerprint of its tokenizer; None if the tokenizer cannot be used."""
        try:
            return Tokenizer.load(Path(self.folder)).fingerprint()
        except (ForerunError, OSError):
            return None

    @classmethod
    def read(cls, name: str, folder: Path) -> ModelHere:
        """The facts of the model in a folder."""
        try:
            config = read_config(folder)
            checkpoint = Checkpoint.of_model(folder, torch.float32)
            check_weights(config, checkpoint)
            num_bytes = sum(file.stat().st_size for file in {entry.file for entry in checkpoint.stored.values()})
        except (ForerunError, OSError) as error:
            return cls(name, str(folder), problem=str(error))
        return cls(name, str(folder), config.family, count_parameters(config), config.vocab_size, num_bytes)


def models_here() -> Iterator[ModelHere]:
    """The models of this machine: those that ship, those in the hub's cache, and GGUF files that were used."""
    for name, folder in BUNDLED.items():
        yield ModelHere.read(name, folder)
    for folder in sorted(hub_cache().glob(f"{HUB_FOLDER}*")):
        revisions = sorted(folder.glob("snapshots/*/config.json"), key=changed_s)
        if revisions:
            yield ModelHere.read(folder.name.removeprefix(HUB_FOLDER).replace("--", "/"), revisions[-1].parent)
    seen = set[Path]()
    for index in sorted(cache_folder("gguf").glob(f"*/{INDEX}"), key=changed_s, reverse=True):
        try:
            file = min(place.file for tensor in stored_tensors(index.parent).values() for place in tensor.locations)
        except (ForerunError, ValueError):
            continue
        if file.exists() and file not in seen:
            seen.add(file)
            yield ModelHere.read(str(file), index.parent)


def changed_s(path: Path) -> float:
    """The time when a file was changed; 0 if it, or the target of the link, does not exist."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def hub_cache() -> Path:
    """The folder of the hub's cache."""
    try:
        from huggingface_hub import constants
    except ImportError:
        return Path("~/.cache/huggingface/hub").expanduser()
    return Path(constants.HF_HUB_CACHE)
