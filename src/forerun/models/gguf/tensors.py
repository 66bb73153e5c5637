"""GgufTensor: a tensor of a GGUF file under Hugging Face's name, in Hugging Face's layout.

This file has the table of names. Where llama.cpp rotates adjacent elements, its files hold the rows of query and key
heads in another order, which is reversed here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forerun.errors import MissingWeights
from forerun.models.backends.torch_cpu.grouped import GroupedWeight, GroupForm
from forerun.models.families import FAMILIES, ExpertNames, Family
from forerun.models.gguf.file import DOWNLOAD, GgufFile, TensorLocation
from forerun.models.gguf.formats import FORMATS

# Architectures whose files hold the two halves of each query and key head interleaved.
ROTATED = ("llama", "mistral3", "internlm2", "eagle3")
BLOCK_NUMBERS = 1 << 22  # numbers dequantized at a time
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INNER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm_2": "hidden_norm",  # in EAGLE-3
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
NEXTN = {  # tensors of MTP modules, in addition to those of their decoder layer
    **{name: name for name in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
    "shared_head_head": "shared_head.head",
    "shared_head_norm": "shared_head.norm",
}
NORMS = {
    "attn_norm": "attention",
    "ffn_norm": "mlp",
    "post_attention_norm": "attention_out",
    "post_ffw_norm": "mlp_out",
}
EXPERTS = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")  # each holds the tensors of all experts of a layer
HEADS = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}  # metadata keys of numbers of heads
IDS = "d2t"  # the target's id of each token of an EAGLE-3 head
ROPE_DIVISORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in Hugging Face's layout, from one stored tensor, or from two whose outputs alternate.

    `shape` is that of the result. With `heads`, the rows are stored as this number of heads with interleaved halves.
    `transposed`: the result has inputs before outputs. `subtracted` is subtracted from each number, and with
    `minus_index` the index of its row too.
    """

    shape: tuple[int, ...]
    locations: tuple[TensorLocation, ...]
    heads: int = 0
    transposed: bool = False
    subtracted: float = 0.0
    minus_index: bool = False

    readable: ClassVar[bool] = True

    @property
    def file(self) -> Path:
        return self.locations[0].file

    @property
    def format(self) -> str:
        return self.locations[0].format

    @property
    def form(self) -> GroupForm | None:
        """The form of a weight that can stay in groups, the largest of its stored parts'; None if it is dequantized."""
        forms = [FORMATS[location.format].form for location in self.locations]
        stays = self.transposed or (len(forms) == 1 and len(self.shape) == 2)
        return max((form for form in forms if form), key=GroupForm.num_bytes) if stays and all(forms) else None

    def read(self) -> Tensor:
        tensor = torch.stack([read_location(location) for location in self.locations], 2 if self.transposed else -1)
        if self.transposed:
            return tensor.flatten(1, 2).transpose(1, 2)
        rows = self.in_order(tensor.reshape(self.shape))
        rows = rows - torch.arange(len(rows)) if self.minus_index else rows
        return rows - self.subtracted if self.subtracted else rows

    def read_into(self, result: Tensor) -> Tensor:
        """Read the tensor into `result`, converted to its dtype; without a float32 copy if the layout is the same."""
        if len(self.locations) == 1 and not (self.heads or self.transposed or self.subtracted or self.minus_index):
            return read_location(self.locations[0], result)
        return result.copy_(self.read())

    def groups(self, part: int | None = None) -> GroupedWeight | None:
        """The matrix, or that of expert `part`, in groups, [outputs, inputs]; None if its format has no groups."""
        if self.form is None or (part is None) == self.transposed:
            return None
        locations = self.locations if part is None else [location.part(part) for location in self.locations]
        weight = GroupedWeight.joined([FORMATS[location.format].grouped(bytes_of(location)) for location in locations])
        if len(locations) == 1 and not self.heads:
            return weight
        order = torch.arange(len(weight.numbers))
        return weight[self.in_order(order) if part is None else order.view(len(locations), -1).T.flatten()]

    def in_order(self, rows: Tensor) -> Tensor:
        """Rows, or values for each row, in Hugging Face's order."""
        return rows.unflatten(0, (self.heads, -1, 2)).transpose(1, 2).reshape(rows.shape) if self.heads else rows


def bytes_of(location: TensorLocation) -> NDArray[np.uint8]:
    """The bytes of a stored tensor, [rows, bytes of a row]. Raises MissingWeights."""
    rows = math.prod(location.shape[:-1])
    try:
        return np.memmap(location.file, np.uint8, "r", location.offset, (rows, location.num_bytes // rows))
    except (OSError, ValueError) as error:
        raise MissingWeights(f"{location.file} has changed since its header was read ({error}): {DOWNLOAD}") from error


def read_location(location: TensorLocation, result: Tensor | None = None) -> Tensor:
    """A stored tensor, dequantized some rows at a time, into `result` or in float32. Raises MissingWeights."""
    data, width = bytes_of(location), location.shape[-1]
    result = torch.empty(location.shape) if result is None else result
    rows, step = result.view(len(data), width), max(1, BLOCK_NUMBERS // width)
    for first in range(0, len(data), step):
        rows[first : first + step] = FORMATS[location.format].dense(data[first : first + step])
    return result


def hugging_face_tensors(file: GgufFile, family: Family) -> dict[str, GgufTensor]:
    """All tensors of a model of this family, by Hugging Face's names; unknown tensors keep their names."""
    tensors: dict[str, GgufTensor] = {}
    experts = family.moe.names if family.moe else None
    norms = {part: getattr(family.norms, role) for part, role in NORMS.items()}
    if family.norms.attention_out is None:
        norms["post_attention_norm"] = family.norms.mlp  # in gpt-oss
    inner = {**INNER, **NEXTN, **norms} | ({"ffn_up": "mlp.gate_up_proj"} if family.fused_gate_up else {})
    for name, location in file.tensors.items():
        *layer, part, kind = name.replace(".nextn.", ".").split(".") if "." in name else ("", name)
        prefix = f"model.layers.{layer[1]}." if len(layer) == 2 else ""
        if name == ROPE_DIVISORS:  # in config.json instead
            continue
        if experts is not None and part in EXPERTS:
            tensors |= dict(experts_of(file, location, name, prefix, experts))
        elif experts is not None and part == "ffn_gate_inp":
            tensors[f"{prefix}{experts.router}.{kind}"] = GgufTensor(location.shape, (location,))
        elif part == "attn_sinks":
            tensors[f"{prefix}self_attn.sinks"] = GgufTensor(location.shape, (location,))
        else:
            heads = file.model_fields.whole(HEADS[part]) if part in HEADS and file.architecture in ROTATED else 0
            known = (inner if prefix else OUTER).get(part)
            subtracted = 1.0 if family.gains_minus_one and part.endswith("norm") else 0.0
            tensor = GgufTensor(location.shape, (location,), heads, subtracted=subtracted)
            tensors[f"{prefix}{known}.{kind}" if known else name] = tensor
    return tensors


def eagle_tensors(file: GgufFile) -> dict[str, GgufTensor]:
    """All tensors of an EAGLE-3 drafter, by its authors' names. The table of ids holds the target's ids in the file and
    their differences from the head's ids in the result."""
    table = file.tensors.get(IDS)
    rest = replace(file, tensors={name: location for name, location in file.tensors.items() if name != IDS})
    tensors = hugging_face_tensors(rest, FAMILIES["LlamaForCausalLM"])
    renamed = {
        name.replace("model.layers.0.", "midlayer.").removeprefix("model."): tensor for name, tensor in tensors.items()
    }
    return renamed if table is None else {**renamed, IDS: GgufTensor(table.shape, (table,), minus_index=True)}


def ups_of(file: GgufFile, gates: str) -> TensorLocation:
    """The tensor of ups that belongs to a tensor of gates. Raises MissingWeights."""
    ups = file.tensors.get(gates.replace("_gate_", "_up_"))
    if ups is None or ups.shape != file.tensors[gates].shape:
        raise MissingWeights(f"{file.path} has no tensor of ups in the shape of {gates}: {DOWNLOAD}")
    return ups


def experts_of(
    file: GgufFile, location: TensorLocation, name: str, prefix: str, names: ExpertNames
) -> Iterator[tuple[str, GgufTensor]]:
    """The tensors, by Hugging Face's names, from a stored tensor of gate, up or down of all experts in a layer. In a
    family that fuses gate and up, the gates give the fused tensor, and the ups nothing."""
    *_, part, kind = name.split(".")
    which, count = part.split("_")[1], location.shape[0]
    if len(location.shape) != (2 if kind == "bias" else 3):
        problem = f"has the sizes {location.shape}, none of them for experts"
        raise MissingWeights(f"{file.path}: {name} {problem}: {DOWNLOAD}")
    if not names.is_stacked:
        form = dict(zip(("gate", "up", "down"), (*names.gate_up, names.down), strict=True))[which]
        for i in range(count):
            yield f"{prefix}{form.format(i)}.{kind}", GgufTensor(location.shape[1:], (location.part(i),))
    elif which != "up":
        locations = (location,) if which == "down" else (location, ups_of(file, name))
        new_name = names.down if which == "down" else names.gate_up[0]
        outputs, inputs = len(locations) * location.shape[1], location.shape[2:]
        if kind == "bias":
            yield f"{prefix}{new_name}_bias", GgufTensor((count, outputs), locations)
        else:
            yield f"{prefix}{new_name}", GgufTensor((count, *inputs, outputs), locations, transposed=True)
