"""The checkpoints that every engine reads: the widened bundled pair, with no two weight matrices equal.

This file decides how equal matrices are made different. The output matrices of layers that widening added are all
zeros. A format that stores equal constants once, such as OpenVINO's, would read a quarter less memory per token than a
real model of this size needs. So one element of each such matrix, which feeds a padding channel, becomes MARK. This
changes the model's numbers by less than rounding does, and all engines read the same files.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.demo.material import DRAFT_PARAMETERS, TARGET_PARAMETERS, load_prompts, widen
from forerun.models.bundled import DRAFT, TARGET
from forerun.text.tokenizer import Tokenizer

WRITER = re.compile(r"model\.layers\.(\d+)\..*(o_proj|down_proj)\.weight")
MARK = 2.0**-10


@dataclass(frozen=True, slots=True)
class Material:
    """The folders of the target and the draft model, and the prompts as token ids; the same for every engine."""

    target: Path
    draft: Path
    prompts: Sequence[Sequence[int]]

    @classmethod
    def make(cls, folder: Path) -> Material:
        """The demo's pair, copied to `folder` once, and its held-out prompts for the draft model."""
        sources = (widen(TARGET, TARGET_PARAMETERS, None), widen(DRAFT, DRAFT_PARAMETERS, None))
        target, draft = (distinct_copy(Path(source), folder / Path(source).name) for source in sources)
        tokenizer = Tokenizer.load(target)
        texts = [prompt.text for prompt in load_prompts() if not prompt.repeats]
        return cls(target, draft, [tokenizer.encode(text) for text in texts])


def distinct_copy(source: Path, destination: Path) -> Path:
    """Copy a checkpoint to `destination` so that no two matrices are equal; an existing copy is not changed."""
    if destination.is_dir():
        return destination
    partial = destination.with_name(f".{destination.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for path in sorted(source.iterdir()):
        if path.suffix == ".safetensors":
            tensors = {name: marked(name, tensor) for name, tensor in load_file(path).items()}
            save_file(tensors, partial / path.name, metadata={"format": "pt"})
        elif path.is_file():
            shutil.copyfile(path, partial / path.name)
    partial.rename(destination)
    return destination


def marked(name: str, tensor: Tensor) -> Tensor:
    """`tensor`, in which an output matrix of zeros gets one element MARK, in a different place in each layer."""
    layer = WRITER.fullmatch(name)
    if layer and not tensor.any():
        tensor[-1, int(layer[1])] = MARK
    return tensor
