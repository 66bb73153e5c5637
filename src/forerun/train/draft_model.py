"""Training a draft model: a small Llama, or a checkpoint that is there, learns the law of a target.

The network reads the text alone, so a guess at any depth reads what its first guess would read there. The result is a
Hugging Face folder with the target's tokenizer, for `--draft model:DIR`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Int
from forerun.config import require_whole
from forerun.draft.spec import DraftSpec
from forerun.errors import InvalidRequest, VocabularyMismatch
from forerun.fields import Fields, read_fields
from forerun.heads.fresh import EMBEDDING, HEAD, NORM, fresh_weights, save_config, save_weights, stored_dtype, trainable
from forerun.heads.student import Predictions, TextBatch
from forerun.heads.trained_layer import LayerStack
from forerun.models.config import ModelConfig, config_of
from forerun.models.loading import Blueprint
from forerun.models.projections import promised_tensors
from forerun.models.source import find_tokenizer
from forerun.models.widen import copy_files
from forerun.text.chat import OTHER_FILES

USUAL_HEAD = 64  # width of a head where nothing else is said
TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.jinja",
    OTHER_FILES,
)


@dataclass(frozen=True, slots=True)
class DraftShape:
    """The size of a fresh draft model; what is None follows from the target or from the other sizes."""

    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    mlp: int | None = None

    def config(self, target: ModelConfig) -> dict[str, Any]:
        """Its config.json: half as wide as the target with a quarter of its layers, unless told otherwise.

        Raises InvalidRequest for sizes that do not fit together.
        """
        layers = max(1, target.layers // 4) if self.layers is None else self.layers
        head_dim = min(USUAL_HEAD, target.head_dim)
        hidden = max(head_dim, target.hidden // 2 // head_dim * head_dim) if self.hidden is None else self.hidden
        heads = max(1, hidden // head_dim) if self.heads is None else self.heads
        mlp = -(-11 * hidden // 4 // 32) * 32 if self.mlp is None else self.mlp
        for name, size in (("layers", layers), ("hidden", hidden), ("heads", heads), ("mlp", mlp)):
            require_whole(name, size, 1)
        if hidden % (2 * heads):
            raise InvalidRequest("heads", f"{heads} must divide hidden, {hidden}, into parts of an even width.")
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": target.vocab_size,
            "hidden_size": hidden,
            "intermediate_size": mlp,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "max_position_embeddings": target.max_positions,
            "rms_norm_eps": 1e-5,
            "rope_theta": target.rope.theta,
            "tie_word_embeddings": True,
            "bos_token_id": target.bos_id,
            "eos_token_id": list(target.eos_ids),
        }


@dataclass(frozen=True)
class DraftModelStudent:
    """A draft model in training: `values` are its config.json."""

    values: Mapping[str, Any]
    config: ModelConfig
    weights: dict[str, Tensor]
    tokenizer_folder: Path
    init: str | None = None
    taps: tuple[int, ...] = ()
    depth_weights: tuple[float, ...] = (1.0,)
    most_depth: int | None = None
    vocabulary: Int[Tensor, " ids"] | None = None
    stack: LayerStack = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stack", LayerStack.of(self.config, self.weights))

    @classmethod
    def fresh(cls, target: Blueprint, shape: DraftShape, seed: int) -> DraftModelStudent:
        """One of random weights."""
        dtype = str(stored_dtype(target)).removeprefix("torch.")
        values = {**shape.config(target.config), "dtype": dtype}
        config = config_of(Fields(Path("the draft model's config.json"), values))
        weights = trainable(fresh_weights(config, seed), target.placement.device)
        return cls(values, config, weights, tokenizer_folder(target))

    @classmethod
    def going_on(cls, target: Blueprint, init: str) -> DraftModelStudent:
        """A checkpoint of the target's tokenizer, to be trained further.

        Raises VocabularyMismatch for another tokenizer, and ModelError for what cannot be loaded or trained.
        """
        own = Blueprint.of(init, dtype="float32")
        if own.tokenizer().fingerprint() != target.tokenizer().fingerprint():
            raise VocabularyMismatch(
                f"--init {init} has another tokenizer than {target.name}, whose law it is to learn token by token: "
                "name a checkpoint of the same family, or leave --init out"
            )
        checkpoint = own.checkpoint(torch.float32)
        weights = {name: checkpoint.take(name, shape) for name, shape in promised_tensors(own.config)}
        values = dict(read_fields(own.folder / "config.json").values)
        device = target.placement.device
        return cls(values, own.config, trainable(weights, device), tokenizer_folder(target), own.fingerprint())

    @property
    def about(self) -> Mapping[str, Any]:
        """Its configuration, and the weights it began with if they were not drawn."""
        return {"kind": "draft", "config": dict(self.values), "init": self.init}

    def predict(self, batch: TextBatch, dice: torch.Generator | None) -> Predictions:
        """Its law behind every root."""
        x = self.stack(functional.embedding(batch.read, self.weights[EMBEDDING]))
        head = self.weights[EMBEDDING if self.config.tied else HEAD]
        logits = functional.linear(self.stack.normed(x[:, batch.first_root :], NORM), head)
        return Predictions([logits], batch.roots)

    def write(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        """The model and the target's tokenizer, in the number format that config.json names."""
        save_weights(weights, self.config.dtype, folder)
        save_config(self.values, folder)
        files = sorted({path for pattern in TOKENIZER for path in self.tokenizer_folder.glob(pattern)})
        copy_files(files, self.tokenizer_folder, folder)

    def spec(self, folder: Path) -> str:
        """`model:DIR`."""
        return str(DraftSpec("model", argument=str(folder)))


def tokenizer_folder(target: Blueprint) -> Path:
    """Where the tokenizer lies that the target is used with."""
    return target.folder if target.spec.tokenizer is None else find_tokenizer(target.spec.tokenizer)
