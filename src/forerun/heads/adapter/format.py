"""An adapter: trained layers between an exit of a target and its norm and head (Kangaroo, 2404.18911).

The file decides what a folder must hold to be an adapter: a config.json of any family, with the target's hidden size
and the exit it was trained for, and the layers' tensors. Embedding and head are the target's; so is the norm before the
head where the folder has none. Device, number format and kernels follow the target's.
"""

from __future__ import annotations

import math
from dataclasses import replace

from forerun.fields import read_fields
from forerun.models.config import config_of
from forerun.models.loading import FINAL_NORM, Blueprint
from forerun.models.projections import promised_tensors, tensor_shapes
from forerun.models.source import find_heads
from forerun.models.weights import Checkpoint, check_tensors, with_stored_names

HOSTS = ("model.embed_tokens.weight", "lm_head.weight")  # the host's own are used


def plan_adapter(model: str, target: Blueprint, layer: int) -> Blueprint:
    """The adapter in the folder `model`, for the exit before layer `layer` of `target`, to be loaded under a host.

    Its own vocabulary is empty. Raises ModelError for a folder that cannot be used, or not there.
    """
    folder, of = find_heads(model, "early-exit"), target.config
    defaults = {
        "vocab_size": of.vocab_size,
        "max_position_embeddings": of.max_positions,
        "rms_norm_eps": of.norm_eps,
    }
    read = read_fields(folder / "config.json")
    fields = replace(read, values=defaults | dict(read.values))
    trained_for = fields.whole("exit_layer")
    if trained_for != layer:
        wanted = f"write early-exit:{trained_for}:{model}, or name an adapter that was trained for exit {layer}"
        raise fields.refuse("exit_layer", f"it is not for exit {layer}: {wanted}")
    config = replace(config_of(fields), vocab_size=0, tied=False)
    if config.hidden != of.hidden:
        wanted = f"{target.name} has {of.hidden}: name an adapter that was trained for it"
        raise fields.refuse("hidden_size", wanted)
    checkpoint = Checkpoint(folder, target.dtype)
    config = with_stored_names(config, checkpoint)
    own = (
        (name, shape)
        for name, shape in promised_tensors(config)
        if name not in HOSTS and (name != FINAL_NORM or name in checkpoint)
    )
    check_tensors(own, checkpoint, config.layers, idle=HOSTS)
    shapes = {name: shape for name, shape in tensor_shapes(config).items() if name in checkpoint and name not in HOSTS}
    return Blueprint(
        spec=target.spec.beside(model),
        name=model,
        folder=folder,
        config=config,
        choice=target.choice,
        num_bytes=sum(map(math.prod, shapes.values())) * target.dtype.itemsize,
        placement=target.placement,
    )
