"""The folder of an adapter: trained layers between an exit of a target and its norm and head (Kangaroo, 2404.18911).

It has a config.json of any family, with the target's hidden size and the exit that it was trained for, and the tensors
of its layers. Embedding and head are the target's, and so is the norm before the head if the folder has none.
"""

from __future__ import annotations

from dataclasses import replace

from forerun.heads.folder import HeadFolder, refuse_sizes
from forerun.models.config import ModelConfig, config_of
from forerun.models.projections import EMBEDDING, FINAL_NORM, HEAD, Shapes, expected_tensors, tensor_shapes
from forerun.models.weights import check_tensors, with_stored_names

EXIT = "exit_layer"
HOSTS = (EMBEDDING, HEAD)  # the target's are used


def adapter_config(folder: HeadFolder, layer: int) -> ModelConfig:
    """Check the adapter in a folder for the exit before layer `layer`; returns its configuration.

    Raises ModelError for an unusable folder.
    """
    target, checkpoint = folder.target.config, folder.checkpoint
    defaults = {
        "vocab_size": target.vocab_size,
        "max_position_embeddings": target.max_positions,
        "rms_norm_eps": target.norm_eps,
    }
    fields = replace(folder.fields, values=defaults | dict(folder.fields.values))
    trained_for = fields.whole(EXIT)
    if trained_for != layer:
        fix = f"write early-exit:{trained_for}:{folder.name}, or name an adapter that was trained for exit {layer}"
        raise fields.refuse(EXIT, f"the adapter is not for exit {layer}: {fix}")
    config = replace(config_of(fields), vocab_size=0, tied=False)
    refuse_sizes(fields, folder.target.name, hidden_size=target.hidden)
    config = with_stored_names(config, checkpoint)
    promised = (
        (name, shape)
        for name, shape in expected_tensors(config)
        if name not in HOSTS and (name != FINAL_NORM or name in checkpoint)
    )
    check_tensors(promised, checkpoint, config.layers, ignored=HOSTS)
    return config


def adapter_shapes(folder: HeadFolder, config: ModelConfig) -> Shapes:
    """Names and shapes of the tensors that are read from the folder."""
    stored = folder.checkpoint
    return {name: shape for name, shape in tensor_shapes(config).items() if name in stored and name not in HOSTS}
