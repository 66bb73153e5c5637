"""Checkpoints with MTP modules for tests: copies of a target's folder, with modules under the names of each naming.

Nothing is trained: a module's projection is fitted by least squares to the target's next state, and its layer has small
random weights, so that inputs read wrongly, in another order or at another position, give other draft tokens.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from heads.trained import states, texts
from kit.checkpoints import rewritten

NAMES: Mapping[str, Mapping[str, str]] = {  # as in the published checkpoints; {} is a module's number
    "deepseek": {
        "layer": "model.layers.{}.",
        "e": "model.layers.{}.enorm.weight",
        "h": "model.layers.{}.hnorm.weight",
        "projection": "model.layers.{}.eh_proj.weight",
        "norm": "model.layers.{}.shared_head.norm.weight",
        "head": "model.layers.{}.shared_head.head.weight",
        "table": "model.layers.{}.embed_tokens.weight",
    },
    "mimo": {
        "layer": "model.mtp_layers.{}.",
        "e": "model.mtp_layers.{}.token_layernorm.weight",
        "h": "model.mtp_layers.{}.hidden_layernorm.weight",
        "projection": "model.mtp_layers.{}.input_proj.weight",
        "norm": "model.mtp_layers.{}.final_layernorm.weight",
    },
    "qwen": {
        "layer": "mtp.layers.{}.",
        "e": "mtp.pre_fc_norm_embedding.weight",
        "h": "mtp.pre_fc_norm_hidden.weight",
        "projection": "mtp.fc.weight",
        "norm": "mtp.norm.weight",
    },
}
COUNT = {"deepseek": "num_nextn_predict_layers", "mimo": "num_nextn_predict_layers", "qwen": "mtp_num_hidden_layers"}
SPREAD = 0.3  # of the output of a module's layer


def scaled(x: Tensor) -> Tensor:
    """The rows scaled to a mean square of 1."""
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5)


def fitted(source: Path) -> tuple[Tensor, Tensor]:
    """Two square matrices that predict the next state from a token's embedding and the state before it."""
    weights = load_file(source / "model.safetensors")
    table, gain = weights["model.embed_tokens.weight"].float(), weights["model.norm.weight"].float()
    x, y = [], []
    for text, own in zip(texts(source), states(source), strict=True):
        x.append(torch.cat([scaled(table[torch.tensor(text[1:])]), scaled(own[:-1])], dim=1))
        y.append(own[1:] / gain)
    solution = torch.linalg.lstsq(torch.cat(x), torch.cat(y)).solution.T
    first, second = solution.chunk(2, dim=1)
    return first, second


def module_tensors(source: Path, num_modules: int, naming: str) -> dict[str, Tensor]:
    """The tensors of modules for a target."""
    weights = {name: tensor.float() for name, tensor in load_file(source / "model.safetensors").items()}
    num_layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    names, dice = NAMES[naming], torch.Generator().manual_seed(7)
    first, second = fitted(source)
    found: dict[str, Tensor] = {}
    for module in range(num_modules):
        number = module + num_layers if naming == "deepseek" else module
        for name, tensor in weights.items():
            inside = name.removeprefix("model.layers.0.")
            if inside != name:
                drawn = torch.randn(tensor.shape, generator=dice)
                spread = SPREAD if inside.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                own = 1 + 0.1 * drawn if tensor.ndim == 1 else spread * drawn / tensor.shape[1] ** 0.5
                found[names["layer"].format(number) + inside] = own
        e, h = (1 + 0.1 * torch.rand(2, len(first), generator=dice)).unbind()
        halves = [first / e, second / h]
        projection = torch.cat(halves[::-1] if naming == "mimo" else halves, dim=1)
        own = {"e": e, "h": h, "projection": projection, "norm": weights["model.norm.weight"]}
        if naming == "deepseek":
            own["table"] = weights["model.embed_tokens.weight"]
            own["head"] = weights.get("lm_head.weight", own["table"])
        for key, tensor in own.items():
            found.setdefault(names[key].format(number), tensor.clone())
    return found


def shipped_with(source: Path, folder: Path, num_modules: int, naming: str, **keys: object) -> Path:
    """A copy of the target that ships modules."""
    shutil.copytree(source, folder)
    return rewritten(folder, module_tensors(source, num_modules, naming), {COUNT[naming]: num_modules} | keys)


def apart(source: Path, folder: Path, num_modules: int, naming: str, **keys: object) -> Path:
    """A folder with the modules only, for a target with such layers."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return rewritten(folder, module_tensors(source, num_modules, naming), {COUNT[naming]: num_modules} | keys)
