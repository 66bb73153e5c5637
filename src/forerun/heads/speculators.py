"""What all folders of `speculators` have in common: the fields around the drafter's own.

The drafter's layers are described under `transformer_layer_config`, and the target under `speculators_config`. This
file decides what is written there; the file of each method decides the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from forerun.fields import Fields
from forerun.heads.layouts import DraftFiles, TargetFacts
from forerun.models.config import ModelConfig

SPECULATORS, LAYER_CONFIG = "speculators_model_type", "transformer_layer_config"
VERSION = "0.9.0"  # of the package whose layout is written
KEPT = "speculators_config"  # what the layout says beside the layer: the target's name, and how many guesses to make
FORMAT_KEYS = ("architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", KEPT)
VERSION_KEY = "speculators_version"
TRAINING = ("verifier_lm_head.weight", "verifier_norm.weight")  # the target's, which only training reads
USUAL_GUESSES = 3  # what the package's own converter writes


def package_config(
    fields: Fields, target: TargetFacts | None, kind: str, values: Mapping[str, Any], num_guesses: int = USUAL_GUESSES
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
    own = {SPECULATORS: kind, VERSION_KEY: VERSION, KEPT: around}
    return {**own, **values, "tie_word_embeddings": False, "dtype": number_format(fields)}


def package_layer(config: Mapping[str, Any], layers: ModelConfig, *others: str) -> dict[str, Any]:
    """The fields of a drafter's layers, without its `others`; what comes from the family or target is written out."""
    kept = {key: value for key, value in config.items() if key not in (*FORMAT_KEYS, *others)}
    return {
        **kept,
        **layers.layer_fields(),
        "model_type": layers.family,
        "num_hidden_layers": layers.layers,
        "max_position_embeddings": layers.max_positions,
        "vocab_size": layers.vocab_size,
        "tie_word_embeddings": False,
    }


def number_format(fields: Fields) -> Any:
    """The name of the number format, as config.json has it."""
    return fields.values.get("dtype") or fields.values.get("torch_dtype") or "float32"


def of_speculators(*kinds: str) -> Callable[[DraftFiles], bool]:
    """Whether a folder's config.json is of one of these types in `speculators`."""
    return lambda files: files.config.get(SPECULATORS) in kinds


def refuse_fields(fields: Fields, refused: Mapping[str, tuple[bool, str]], cure: str) -> None:
    """Raise UnsupportedModel for the first of these fields that the package cannot have, and why."""
    for key, (is_refused, why) in refused.items():
        if is_refused:
            raise fields.refuse(key, f"{why}: {cure}")
