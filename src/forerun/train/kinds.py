"""The kinds of students: all kinds of heads (`heads/kinds.py`), and draft models.

A draft model is a small Llama, new or from a checkpoint, that learns the target's distribution without its states. The
result is a Hugging Face folder with the target's tokenizer, for `--draft model:DIR`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from forerun.annotations import Float
from forerun.draft.spec import DraftSpec
from forerun.errors import InvalidRequest, VocabularyMismatch
from forerun.fields import Fields, read_fields
from forerun.heads.blueprint import HeadParts
from forerun.heads.fresh import drawn_weights, stored_dtype
from forerun.heads.kinds import HEADS
from forerun.heads.sizes import StudentSizes
from forerun.heads.student import MakeStudent, Student, TextBatch
from forerun.heads.trained_layer import StackStudent
from forerun.models.config import config_of
from forerun.models.loading import Blueprint
from forerun.models.projections import EMBEDDING, HEAD, tensor_shapes
from forerun.models.widen import copy_files
from forerun.text.chat import OTHER_FILES
from forerun.train.settings import check_choice

USUAL_HEAD = 64  # default head width
TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.jinja",
    OTHER_FILES,
)


@dataclass(frozen=True, kw_only=True)
class DraftModelStudent(StackStudent):
    """A draft model in training. `init` is the fingerprint of the checkpoint that it started from, if any."""

    kind: ClassVar[str] = "draft"
    tokenizer_folder: Path
    init: str | None = None

    @classmethod
    def fresh(cls, target: Blueprint, sizes: StudentSizes, seed: int) -> DraftModelStudent:
        """A student with random weights, or one that starts from the checkpoint `sizes.init`.

        Raises InvalidRequest for inconsistent sizes; for a checkpoint VocabularyMismatch if its tokenizer differs from
        the target's, and ModelError if it cannot be loaded or trained.
        """
        sizes.only(cls.kind, "layers", "hidden", "heads", "mlp", "init")
        if sizes.init is not None:
            sizes.only("draft --init", "init")
            return cls.from_checkpoint(target, sizes.init)
        values = values_of(target, sizes)
        config = config_of(Fields(Path("the draft model's config.json"), values))
        weights = drawn_weights(tensor_shapes(config), seed, config.layers)
        return cls.untrained(target, values, weights, config=config, taps=(), tokenizer_folder=target.tokenizer_folder)

    @classmethod
    def from_checkpoint(cls, target: Blueprint, init: str) -> DraftModelStudent:
        """A student that starts from the checkpoint `init`, whose tokenizer must be the target's."""
        model = Blueprint.of(init, dtype="float32")
        if model.tokenizer().fingerprint() != target.tokenizer().fingerprint():
            raise VocabularyMismatch(
                f"--init {init} has another tokenizer than {target.name}, but must predict the target's tokens: "
                "name a checkpoint of the same family, or leave --init out"
            )
        checkpoint = model.checkpoint(torch.float32)
        return cls.untrained(
            target,
            read_fields(model.folder / "config.json").values,
            {name: checkpoint.take(name, shape) for name, shape in tensor_shapes(model.config).items()},
            dtype=model.config.dtype,
            config=model.config,
            taps=(),
            tokenizer_folder=target.tokenizer_folder,
            init=model.fingerprint(),
        )

    @property
    def description(self) -> Mapping[str, Any]:
        """As in Student, and the checkpoint that it started from, if any."""
        return {**super().description, "init": self.init}

    def inputs(self, batch: TextBatch) -> Float[Tensor, "batch length hidden"]:
        """The draft model's own embeddings of the tokens."""
        return functional.embedding(batch.read, self.weights[EMBEDDING])

    def logits(self, states: Float[Tensor, "batch places hidden"]) -> Float[Tensor, "batch places vocab"]:
        """The logits of the draft model's own output matrix (its embeddings if tied)."""
        return functional.linear(states, self.weights[EMBEDDING if self.config.tied else HEAD])

    def write(self, weights: Mapping[str, Tensor], folder: Path) -> None:
        super().write(weights, folder)
        files = sorted({path for pattern in TOKENIZER for path in self.tokenizer_folder.glob(pattern)})
        copy_files(files, self.tokenizer_folder, folder)

    def spec(self, folder: Path) -> str:
        return str(DraftSpec("model", argument=str(folder)))


def values_of(target: Blueprint, sizes: StudentSizes) -> dict[str, Any]:
    """The fields of config.json; by default half the target's width and a quarter of its layers.

    Raises InvalidRequest for inconsistent sizes.
    """
    target_config = target.config
    head_dim = min(USUAL_HEAD, target_config.head_dim)
    hidden = sizes.hidden or max(head_dim, target_config.hidden // 2 // head_dim * head_dim)
    heads = sizes.heads or max(1, hidden // head_dim)
    if hidden % (2 * heads):
        raise InvalidRequest("heads", f"{heads} must divide hidden, {hidden}, into parts of an even width.")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": target_config.vocab_size,
        "hidden_size": hidden,
        "intermediate_size": sizes.mlp or -(-11 * hidden // 4 // 32) * 32,
        "num_hidden_layers": sizes.layers or max(1, target_config.layers // 4),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": target_config.max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": target_config.rope.theta,
        "tie_word_embeddings": True,
        "bos_token_id": target_config.bos_id,
        "eos_token_id": list(target_config.eos_ids),
        "dtype": str(stored_dtype(target)).removeprefix("torch."),
    }


KINDS: Mapping[str, MakeStudent] = {
    "draft": DraftModelStudent.fresh,
    **{kind: HeadParts.of(kind).student for kind in HEADS},
}


def make_student(kind: str, target: Blueprint, sizes: StudentSizes, seed: int) -> Student:
    """Create a student. Raises InvalidRequest for an unknown kind or an invalid size."""
    check_choice("kind", kind, sorted(KINDS))
    return KINDS[kind](target, sizes, seed)
