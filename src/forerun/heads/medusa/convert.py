"""Medusa heads in the layouts of their authors: a state dict in `medusa_lm_head.pt`, or the same in safetensors.

The names of the tensors are the same in all of them; some versions put `medusa_head.` before them. The authors'
config.json has no sizes, and in published checkpoints fewer heads than the file: sizes and number are those of the
tensors.
"""

from __future__ import annotations

import re
from dataclasses import replace

from forerun.errors import MissingWeights, UnsupportedModel
from forerun.heads.layouts import (
    DraftFiles,
    DraftLayout,
    DraftMethod,
    DraftSource,
    TargetFacts,
    check_tensors_of,
    unchanged,
)
from forerun.heads.medusa.format import ARCHITECTURE, BLOCKS, HEADS, HYDRA, MedusaConfig, fitted_heads

PREFIX = "medusa_head."
TENSOR = re.compile(r"(?:medusa_head\.)?(\d{1,4})\.(?:in|\d{1,4}|\d{1,4}\.linear)\.(?:weight|bias)")
FIRST = "0.0.linear.weight"


def is_medusa(source: DraftSource) -> bool:
    """Whether a folder holds Medusa heads, in safetensors."""
    return source.file != "medusa_lm_head.pt" and holds_heads(source)


def is_medusa_pickle(source: DraftSource) -> bool:
    """Whether it holds them as the authors' code does."""
    return source.file == "medusa_lm_head.pt" and holds_heads(source)


def holds_heads(source: DraftSource) -> bool:
    """Whether its configuration is of Medusa heads, or its tensors are."""
    return HEADS in source.values or (bool(source.shapes) and all(TENSOR.fullmatch(name) for name in source.shapes))


def read_medusa(source: DraftSource, _target: TargetFacts | None) -> DraftFiles:
    """The heads, with the sizes that their tensors have."""
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in source.tensors().items()}
    first = tensors.get(FIRST)
    if first is None or first.dim() != 2:
        raise MissingWeights(f"{source.folder} has no tensor {FIRST}: these are no Medusa heads, or not all of them")
    named = (TENSOR.fullmatch(name) for name in tensors)
    count = 1 + max(int(found[1]) for found in named if found)
    promised = source.fields.whole(HEADS, count)
    fields = {**source.values, "architectures": [ARCHITECTURE], HEADS: max(count, promised)}
    fields[BLOCKS] = source.fields.whole(BLOCKS, 1)
    outputs = tensors.get(f"0.{fields[BLOCKS]}.weight")
    fields["hidden_size"] = first.shape[0]
    if outputs is not None:
        fields["vocab_size"] = outputs.shape[0]
    return DraftFiles(source.fields.path, fields, tensors)


def medusa_meaning(files: DraftFiles, target: TargetFacts | None) -> MedusaConfig:
    """What the files describe, for comparison. Raises ModelError unless every tensor is used and all are there."""
    fields = files.fields
    if target is not None:
        name, hidden, vocab_size = target.name, target.config.hidden, target.config.vocab_size
    else:
        name, hidden = "its own config.json", fields.whole("hidden_size")
        vocab_size = fields.whole("vocab_size", 1)  # heads without matrices of their own do not say it
    found = fitted_heads(fields, files.tensors, hidden, vocab_size, name)
    check_tensors_of(files, found.shapes())
    return found


def write_authors(files: DraftFiles, _target: TargetFacts | None) -> DraftFiles:
    """As the authors' code reads them. Raises UnsupportedModel for Hydra's, which it does not have."""
    if files.fields.flag(HYDRA):
        raise UnsupportedModel(f"{files.path.parent}: heads of Hydra have no place in Medusa's own layout: use medusa")
    return replace(files, config={key: value for key, value in files.config.items() if key != HYDRA})


MEDUSA = DraftMethod("Medusa", "medusa", medusa_meaning)
LAYOUTS = (
    DraftLayout(
        "medusa-pt",
        MEDUSA,
        "medusa_lm_head.pt",
        is_medusa_pickle,
        read_medusa,
        write_authors,
        file="medusa_lm_head.pt",
        is_pickle=True,
        is_run=False,
    ),
    DraftLayout("medusa", MEDUSA, "config.json with medusa_num_heads", is_medusa, read_medusa, unchanged),
)
