"""The tensors of a GGUF file under Hugging Face's names: what each is made of, and how its numbers are unpacked.

The table of names is this file's. llama.cpp holds the rows of queries and keys in another order where it rotates
neighbours; here they get their order back.
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
from forerun.models.gguf.file import AGAIN, GgufFile, Place
from forerun.models.gguf.formats import FORMATS

# Architectures whose query and key heads have interleaved halves.
ROTATED = ("llama", "mistral3", "internlm2", "eagle3")
BLOCK_NUMBERS = 1 << 22  # numbers dequantized at a time
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INNER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm_2": "hidden_norm",  # of EAGLE-3
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
NEXTN = {  # tensors of MTP modules, besides those of the block
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
HEADS = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}  # keys of the metadata
IDS = "d2t"  # the target's ids of an EAGLE-3 head's tokens
ROPE_DIVISORS = "rope_freqs.weight"
IDLE = (ROPE_DIVISORS,)  # replaced by fields of config.json


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in Hugging Face's form, from one stored tensor, or from two whose outputs alternate.

    `shape` is that of the result. With `heads` the rows are those of so many heads with interleaved halves.
    `transposed`: the result has inputs before outputs. `added` is subtracted from each number; with `counted` its index
    is subtracted too.
    """

    shape: tuple[int, ...]
    places: tuple[Place, ...]
    heads: int = 0
    transposed: bool = False
    added: float = 0.0
    counted: bool = False

    readable: ClassVar[bool] = True

    @property
    def file(self) -> Path:
        return self.places[0].file

    @property
    def format(self) -> str:
        return self.places[0].format

    @property
    def form(self) -> GroupForm | None:
        """The form of a weight that stays as stored, the largest of its places'; None if it is dequantized."""
        forms = [FORMATS[place.format].form for place in self.places]
        stays = self.transposed or (len(forms) == 1 and len(self.shape) == 2)
        return max((form for form in forms if form), key=GroupForm.num_bytes) if stays and all(forms) else None

    def read(self) -> Tensor:
        tensor = torch.stack([read_place(place) for place in self.places], 2 if self.transposed else -1)
        if self.transposed:
            return tensor.flatten(1, 2).transpose(1, 2)
        rows = self.in_order(tensor.reshape(self.shape))
        rows = rows - torch.arange(len(rows)) if self.counted else rows
        return rows - self.added if self.added else rows

    def read_into(self, result: Tensor) -> Tensor:
        """The numbers, in the number format and the memory of `result`; of a matrix in its usual order no copy in
        float32 is made."""
        if len(self.places) == 1 and not (self.heads or self.transposed or self.added or self.counted):
            return read_place(self.places[0], result)
        return result.copy_(self.read())

    def groups(self, part: int | None = None) -> GroupedWeight | None:
        """The matrix as it is stored, in groups, or that of an expert, with outputs before inputs; None where it is in
        a format that has none."""
        if self.form is None or (part is None) == self.transposed:
            return None
        places = self.places if part is None else [place.part(part) for place in self.places]
        weight = GroupedWeight.joined([FORMATS[place.format].grouped(bytes_of(place)) for place in places])
        if len(places) == 1 and not self.heads:
            return weight
        order = torch.arange(len(weight.numbers))
        return weight[self.in_order(order) if part is None else order.view(len(places), -1).T.flatten()]

    def in_order(self, rows: Tensor) -> Tensor:
        """Rows, or what belongs to them, in Hugging Face's order."""
        return rows.unflatten(0, (self.heads, -1, 2)).transpose(1, 2).reshape(rows.shape) if self.heads else rows


def bytes_of(place: Place) -> NDArray[np.uint8]:
    """The bytes of a stored tensor, a row for each of its rows. Raises MissingWeights."""
    rows = math.prod(place.shape[:-1])
    try:
        return np.memmap(place.file, np.uint8, "r", place.offset, (rows, place.num_bytes // rows))
    except (OSError, ValueError) as error:
        raise MissingWeights(f"{place.file} is not as it was when its header was read ({error}): {AGAIN}") from error


def read_place(place: Place, result: Tensor | None = None) -> Tensor:
    """A stored tensor, unpacked some rows at a time to `result` or float32. Raises MissingWeights."""
    data, width = bytes_of(place), place.shape[-1]
    result = torch.empty(place.shape) if result is None else result
    rows, step = result.view(len(data), width), max(1, BLOCK_NUMBERS // width)
    for first in range(0, len(data), step):
        rows[first : first + step] = FORMATS[place.format].dense(data[first : first + step])
    return result


def hugging_face_tensors(file: GgufFile, family: Family) -> dict[str, GgufTensor]:
    """All tensors of a model by Hugging Face's names, as its family has them; those it does not know keep their own."""
    tensors: dict[str, GgufTensor] = {}
    experts = family.sparse.names if family.sparse else None
    norms = {part: getattr(family.norms, role) for part, role in NORMS.items()}
    if family.norms.attention_out is None:
        norms["post_attention_norm"] = family.norms.mlp  # as gpt-oss has it
    inner = {**INNER, **NEXTN, **norms} | ({"ffn_up": "mlp.gate_up_proj"} if family.fused_gate_up else {})
    for name, place in file.tensors.items():
        *layer, part, kind = name.replace(".nextn.", ".").split(".")
        prefix = f"model.layers.{layer[1]}." if len(layer) == 2 else ""
        if name in IDLE:
            continue
        if experts is not None and part.endswith("_exps"):
            tensors |= dict(experts_of(file, place, name, prefix, experts))
        elif experts is not None and part == "ffn_gate_inp":
            tensors[f"{prefix}{experts.router}.{kind}"] = GgufTensor(place.shape, (place,))
        elif part == "attn_sinks":
            tensors[f"{prefix}self_attn.sinks"] = GgufTensor(place.shape, (place,))
        else:
            heads = file.model_fields.whole(HEADS[part]) if part in HEADS and file.architecture in ROTATED else 0
            known = (inner if prefix else OUTER).get(part)
            added = 1.0 if family.from_one and part.endswith("norm") else 0.0
            tensor = GgufTensor(place.shape, (place,), heads, added=added)
            tensors[f"{prefix}{known}.{kind}" if known else name] = tensor
    return tensors


def eagle_tensors(file: GgufFile) -> dict[str, GgufTensor]:
    """All tensors of an EAGLE-3 drafter by its authors' names. Its table of ids has the target's in the file, and what
    these are more than the head's own here."""
    table = file.tensors.get(IDS)
    rest = replace(file, tensors={name: place for name, place in file.tensors.items() if name != IDS})
    tensors = hugging_face_tensors(rest, FAMILIES["LlamaForCausalLM"])
    renamed = {
        name.replace("model.layers.0.", "midlayer.").removeprefix("model."): tensor for name, tensor in tensors.items()
    }
    return renamed if table is None else {**renamed, IDS: GgufTensor(table.shape, (table,), counted=True)}


def experts_of(
    file: GgufFile, place: Place, name: str, prefix: str, names: ExpertNames
) -> Iterator[tuple[str, GgufTensor]]:
    """The tensors by Hugging Face's names from one of the file's, which holds gate, up or down of all experts of a
    layer. For a family with fused gate and up, the fused tensor comes with the gates."""
    *_, part, kind = name.split(".")
    which, count = part.split("_")[1], place.shape[0]
    if not names.is_stacked:
        form = dict(zip(("gate", "up", "down"), (*names.gate_up, names.down), strict=True))[which]
        for i in range(count):
            yield f"{prefix}{form.format(i)}.{kind}", GgufTensor(place.shape[1:], (place.part(i),))
    elif which != "up":
        places = (place,) if which == "down" else (place, file.tensors[name.replace("_gate_", "_up_")])
        names_of = names.down if which == "down" else names.gate_up[0]
        outputs, inputs = len(places) * place.shape[1], place.shape[2:]
        if kind == "bias":
            yield f"{prefix}{names_of}_bias", GgufTensor((count, outputs), places)
        else:
            yield f"{prefix}{names_of}", GgufTensor((count, *inputs, outputs), places, transposed=True)
