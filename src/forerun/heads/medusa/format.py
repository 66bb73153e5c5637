"""The folder of Medusa heads: config.json with `medusa_num_heads`, and the tensors by head and block (2401.10774).

Tensors in model.safetensors are named as the authors' code does: `0.0.linear.weight`, `0.0.linear.bias`, and
`0.1.weight` for the output matrix after one block; `0.in.weight` is an addition of Hydra (2402.05109). The authors
publish a state dict as `medusa_lm_head.pt` or as safetensors; in some versions all names start with `medusa_head.`.
Their config.json has no sizes, and published ones state fewer heads than the file has: sizes and number of heads are
taken from the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

from forerun.errors import MissingWeights, UnsupportedModel
from forerun.fields import Fields
from forerun.heads.folder import refuse_sizes
from forerun.heads.layouts import DraftFiles, DraftLayout, DraftMethod, TargetFacts, infer_target
from forerun.models.config import MOST_LAYERS, ModelConfig
from forerun.models.projections import Shapes

MOST_HEADS = 16
HEADS_KEY, BLOCKS, HYDRA, ARCHITECTURE = "medusa_num_heads", "medusa_num_layers", "hydra", "MedusaModel"
PREFIX, PICKLE = "medusa_head.", "medusa_lm_head.pt"
TENSOR = re.compile(r"(?:medusa_head\.)?(\d{1,4})\.(?:in|\d{1,4}|\d{1,4}\.linear)\.(?:weight|bias)")
ENTRY, BLOCK, OUTPUT = "{}.in", "{}.{}.linear", "{}.{}"  # linear layers: first (Hydra), of a block, and last
WEIGHT, BIAS = ".weight", ".bias"
ADDED = ("in.weight", "linear.weight", "linear.bias")  # ends of the names of tensors that add to a residual stream
FIRST = BLOCK.format(0, 0) + WEIGHT


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """The shape of Medusa heads; `own_output`: each has an own output matrix; `hydra`: heads read draft tokens."""

    num_heads: int
    num_blocks: int
    hidden: int
    vocab_size: int
    own_output: bool
    hydra: bool

    idle: ClassVar[Collection[str]] = ()

    @classmethod
    def of(cls, fields: Fields, stored: Collection[str], target: ModelConfig, target_name: str) -> MedusaConfig:
        """The heads in a folder with these fields and tensors, for a target of this configuration and name.

        Raises UnsupportedModel for heads of another target.
        """
        refuse_sizes(fields, target_name, hidden_size=target.hidden, vocab_size=target.vocab_size)
        num_blocks = fields.whole(BLOCKS, 1, most=MOST_LAYERS)
        num_heads = fields.whole(HEADS_KEY, most=MOST_HEADS)
        own_output = OUTPUT.format(0, num_blocks) + WEIGHT in stored
        return cls(num_heads, num_blocks, target.hidden, target.vocab_size, own_output, fields.flag(HYDRA))

    @property
    def title(self) -> str:
        return f"{self.num_heads} heads with {self.num_blocks} blocks each"

    @property
    def draft_vocab(self) -> int:
        return self.vocab_size

    def shapes(self) -> Shapes:
        shapes: Shapes = {}
        for head in range(self.num_heads):
            if self.hydra:
                shapes[ENTRY.format(head) + WEIGHT] = (self.hidden, (2 + head) * self.hidden)
            for block in range(self.num_blocks):
                shapes[BLOCK.format(head, block) + WEIGHT] = (self.hidden, self.hidden)
                shapes[BLOCK.format(head, block) + BIAS] = (self.hidden,)
            if self.own_output:
                shapes[OUTPUT.format(head, self.num_blocks) + WEIGHT] = (self.vocab_size, self.hidden)
        return shapes

    @property
    def values(self) -> Mapping[str, Any]:
        """The fields of config.json, as in the authors' code."""
        return {
            "architectures": [ARCHITECTURE],
            HEADS_KEY: self.num_heads,
            BLOCKS: self.num_blocks,
            "hidden_size": self.hidden,
            "vocab_size": self.vocab_size,
            HYDRA: self.hydra,
        }


def holds_heads(files: DraftFiles, is_pickle: bool) -> bool:
    """Whether a folder has Medusa heads, by its fields or tensors, in the authors' pickle (`is_pickle`) or not."""
    heads = HEADS_KEY in files.config or (bool(files.tensors) and all(map(TENSOR.fullmatch, files.tensors)))
    return heads and is_pickle == (files.file == PICKLE)


def read_medusa(files: DraftFiles, _target: TargetFacts | None) -> DraftFiles:
    """The heads with config.json completed by the sizes of the tensors."""
    fields, files = files.fields, files.renamed({PREFIX: ""})
    first = files.tensors.get(FIRST)
    if first is None or first.dim() != 2:
        raise MissingWeights(f"{files.folder} has no tensor {FIRST}: it has no Medusa heads, or not all of them")
    count = 1 + max(int(match[1]) for match in map(TENSOR.fullmatch, files.tensors) if match)
    num_blocks = fields.whole(BLOCKS, 1, most=MOST_LAYERS)
    config = {**files.config, "architectures": [ARCHITECTURE], HEADS_KEY: max(count, fields.whole(HEADS_KEY, count))}
    config |= {BLOCKS: num_blocks, "hidden_size": first.shape[0]}
    outputs = files.tensors.get(OUTPUT.format(0, num_blocks) + WEIGHT)
    return replace(files, config=config if outputs is None else config | {"vocab_size": outputs.shape[0]})


def infer_sizes(fields: Fields) -> TargetFacts:
    """A target with the sizes in these fields; heads without output matrices do not give the vocabulary's size."""
    sizes = {"hidden_size": fields.whole("hidden_size"), "vocab_size": fields.whole("vocab_size", 1)}
    return infer_target("llama")(replace(fields, values={"num_attention_heads": 1, "intermediate_size": 1, **sizes}))


def write_authors(files: DraftFiles, _target: TargetFacts | None) -> DraftFiles:
    """Convert the heads to the authors' layout. Raises UnsupportedModel for Hydra, which it cannot store."""
    if files.fields.flag(HYDRA):
        raise UnsupportedModel(f"{files.folder}: medusa-pt cannot store the heads of Hydra: choose the format medusa")
    return replace(files, config={key: value for key, value in files.config.items() if key != HYDRA})


MEDUSA = DraftMethod("Medusa", "medusa", MedusaConfig.of, infer_sizes)
LAYOUTS = (
    DraftLayout(
        "medusa-pt",
        MEDUSA,
        PICKLE,
        partial(holds_heads, is_pickle=True),
        read_medusa,
        write_authors,
        file=PICKLE,
        is_runnable=False,
    ),
    DraftLayout(
        "medusa", MEDUSA, "config.json with medusa_num_heads", partial(holds_heads, is_pickle=False), read_medusa
    ),
)
