"""What all folders of `speculators` have in common: the fields around the drafter's own.

The drafter's layers are described under `transformer_layer_config`, and the target under `speculators_config`. This
file decides what is written there; the file of each method decides the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from forerun.errors import UnsupportedModel
from forerun.fields import Fields
from forerun.heads.layouts import DraftSource, TargetFacts
from forerun.models.config import ModelConfig

SPECULATORS, LAYER_CONFIG = "speculators_model_type", "transformer_layer_config"
VERSION = "0.9.0"  # of the package whose layout is written
KEPT = "speculators_config"  # what the layout says beside the layer: the target's name, and how many guesses to make
FORMAT_KEYS = ("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", KEPT)
VERSION_KEY = "speculators_version"
TRAINING = ("verifier_lm_head.weight", "verifier_norm.weight")  # the target's, which only training reads


def package_config(
    fields: Fields, target: TargetFacts | None, kind: str, num_guesses: int, values: Mapping[str, Any]
) -> dict[str, Any]:
    """config.json of a drafter of this type with these fields; `fields` are those that were read.

    What the layout says of the target stays as it was read, unless another target is named.
    """
    kept = fields.inside(KEPT).values
    verifier = kept.get("verifier", {"name_or_path": None, "architectures": []})
    if target is not None:
        verifier = {"name_or_path": target.name, "architectures": target.architectures}
    around = {
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": num_guesses}],
        "default_proposal_method": "greedy",
        **kept,
        "algorithm": kind,
        "verifier": verifier,
    }
    return {
        SPECULATORS: kind,
        VERSION_KEY: VERSION,
        KEPT: around,
        **values,
        "tie_word_embeddings": False,
        "dtype": number_format(fields),
    }


def resolved(config: ModelConfig) -> Mapping[str, Any]:
    """Fields of layers that forerun takes from the family or the target, and the package elsewhere, written out."""
    return {
        "head_dim": config.head_dim,
        "num_key_value_heads": config.kv_heads,
        "rms_norm_eps": config.norm_eps,
        "max_position_embeddings": config.max_positions,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": False,
    }


def number_format(fields: Fields) -> Any:
    """The name of the number format, as config.json has it."""
    return fields.values.get("dtype") or fields.values.get("torch_dtype") or "float32"


def named(target: TargetFacts | None, folder: object, why: str) -> TargetFacts:
    """The target. Raises UnsupportedModel where none was named, which these folders need."""
    if target is None:
        raise UnsupportedModel(f"{folder}: {why}: name the target with --model")
    return target


def of_speculators(*kinds: str) -> Callable[[DraftSource], bool]:
    """Whether a folder's config.json is of one of these types in `speculators`."""
    return lambda source: source.values.get(SPECULATORS) in kinds
