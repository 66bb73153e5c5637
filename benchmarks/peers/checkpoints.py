"""The checkpoints that every engine reads: the bundled pair widened, with no two weight matrices equal.

Decides how equal matrices are told apart. Layers that widening added write nothing, so their output matrices are all
zeros; a format that stores equal constants once, as OpenVINO's does, would read a quarter less memory per token than
any real model of this size asks for. One element of each such matrix, which feeds a channel that is padding, becomes
MARK: what the model computes changes by less than rounding does, and all engines read the same files.
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
    """What is asked of every engine: a target and a draft model by folder, and prompts as token ids."""

    target: Path
    draft: Path
    prompts: Sequence[Sequence[int]]

    @classmethod
    def make(cls, folder: Path) -> Material:
        """The demo's pair, copied to `folder` once, and its held-out prompts for the draft model."""
        sources = (widen(TARGET, TARGET_PARAMETERS, None), widen(DRAFT, DRAFT_PARAMETERS, None))
        target, draft = (told_apart(Path(source), folder / Path(source).name) for source in sources)
        tokenizer = Tokenizer.load(target)
        texts = [prompt.text for prompt in load_prompts() if not prompt.repeats]
        return cls(target, draft, [tokenizer.encode(text) for text in texts])


def told_apart(source: Path, destination: Path) -> Path:
    """A copy of a checkpoint in which no two matrices are equal; one that is there is taken as it is."""
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
    """`tensor`; if it is an output matrix of zeros, with one element that differs in place from layer to layer."""
    layer = WRITER.fullmatch(name)
    if layer and not tensor.any():
        tensor[-1, int(layer[1])] = MARK
    return tensor
