"""Adapter folders made for tests: some of a target's own layers, layers that say nothing, layers of another family."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from forerun.fields import read_fields
from forerun.models.config import config_of
from forerun.models.projections import tensor_shapes
from kit.checkpoints import written

STRANGE = {  # another family, and other heads, widths and positions than any target of the tests
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": True,
    "hidden_size": 64,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 100,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000.0,
}
QUIET = ("self_attn.o_proj", "mlp.down_proj")


def adapter_of(source: Path, folder: Path, exit_layer: int, layers: range, norm: bool = False) -> Path:
    """These layers of a checkpoint as an adapter, with its norm or without one."""
    tensors, chosen = load_file(source / "model.safetensors"), {}
    for i, layer in enumerate(layers):
        prefix = f"model.layers.{layer}."
        chosen |= {f"model.layers.{i}.{n.removeprefix(prefix)}": t for n, t in tensors.items() if n.startswith(prefix)}
    if norm:
        chosen["model.norm.weight"] = tensors["model.norm.weight"]
    config = json.loads((source / "config.json").read_text())
    for key in ("vocab_size", "rms_norm_eps", "max_position_embeddings", "eos_token_id"):
        del config[key]  # the target's
    return written(folder, config | {"num_hidden_layers": len(layers), "exit_layer": exit_layer}, chosen)


def silent_adapter(folder: Path, exit_layer: int) -> Path:
    """A layer that adds nothing to what it reads."""
    config = STRANGE | {"num_hidden_layers": 1, "exit_layer": exit_layer, "rms_norm_eps": 1e-5}
    tensors = random_tensors(config, folder)
    del tensors["model.norm.weight"]
    return written(folder, config, {n: t * (not any(quiet in n for quiet in QUIET)) for n, t in tensors.items()})


def strange_adapter(folder: Path, exit_layer: int, layers: int = 1, **keys: object) -> Path:
    """Layers of random weights, of another shape than the target's, and a norm."""
    config = STRANGE | {"num_hidden_layers": layers, "exit_layer": exit_layer} | keys
    return written(folder, config, random_tensors(config, folder))


def random_tensors(config: Mapping[str, object], folder: Path) -> dict[str, Tensor]:
    """Weights for this configuration; they add about as much to a state as a trained layer does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config) | {"vocab_size": 1, "max_position_embeddings": 1}))
    dice = torch.Generator().manual_seed(0)
    shapes = tensor_shapes(config_of(read_fields(folder / "config.json")))
    tensors = {n: torch.randn(s, generator=dice) * 0.1 + ("norm" in n) for n, s in shapes.items()}
    return {n: t for n, t in tensors.items() if n not in ("model.embed_tokens.weight", "lm_head.weight")}
