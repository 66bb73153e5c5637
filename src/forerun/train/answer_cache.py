"""An optional cache of answers with their states, so that several trainings on the same data share the writing.

States take much room, which is why they are usually not kept: before anything is written, the size is told and compared
with what is free. What is read is to the bit what was written, so a training is the same with a cache as without.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from forerun.cache.plan import size
from forerun.errors import InvalidRequest
from forerun.heads.student import TargetText
from forerun.store import writable, write_whole
from forerun.streams import show_note

FORM = 1  # of the files


@dataclass(frozen=True, slots=True)
class AnswerCache:
    """Groups of answers by number, in a folder that belongs to one target, one set of data and one set of taps."""

    folder: Path

    @classmethod
    def at(cls, folder: Path, about: Mapping[str, Any], num_bytes: int) -> AnswerCache:
        """The cache for answers that `about` decides, of so many bytes at most, which are told.

        Raises InvalidRequest where they are more than what is free.
        """
        name = sha256(json.dumps({"form": FORM, **about}, sort_keys=True).encode()).hexdigest()[:16]
        own = folder / name
        with writable(folder, "cache"):
            own.mkdir(parents=True, exist_ok=True)
            held = sum(path.stat().st_size for path in own.glob("*.safetensors"))
            free = shutil.disk_usage(own).free
        told = f"The cache {own} will take up to {size(num_bytes)}; it has {size(held)}, and {size(free)} are free."
        show_note(told)
        if num_bytes - held > free:
            raise InvalidRequest("cache", f"{told} Name a folder with more room, or leave --cache out.")
        return cls(own)

    def path(self, number: int) -> Path:
        """The file of a group."""
        return self.folder / f"{number:08}.safetensors"

    def load(self, number: int) -> Sequence[TargetText] | None:
        """A group's answers; None where it was not kept, or its file is damaged."""
        path = self.path(number)
        if not path.is_file():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                heads: list[dict[str, Any]] = json.loads(file.metadata()["texts"])
                return [
                    TargetText(
                        tuple(head["tokens"]),
                        head["num_prompt"],
                        head["seed"],
                        file.get_tensor(f"{i}.taps"),
                        file.get_tensor(f"{i}.last"),
                        head["is_cut"],
                    )
                    for i, head in enumerate(heads)
                ]
        except (SafetensorError, KeyError, TypeError, ValueError):
            return None

    def save(self, number: int, texts: Sequence[TargetText]) -> None:
        """Keep a group's answers."""
        heads = [
            {"tokens": list(t.tokens), "num_prompt": t.num_prompt, "seed": t.seed, "is_cut": t.is_cut} for t in texts
        ]
        tensors: dict[str, Tensor] = {}
        for i, text in enumerate(texts):
            tensors |= {f"{i}.taps": text.taps.cpu().contiguous(), f"{i}.last": text.last.cpu().contiguous()}
        with writable(self.folder, "cache"):
            write_whole(self.path(number), lambda part: save_file(tensors, part, {"texts": json.dumps(heads)}))


def state_bytes(num_texts: int, longest: int, num_taps: int, hidden: int, dtype: torch.dtype) -> int:
    """What the states of so many texts take at most; those behind the last layer are one more than the taps."""
    return num_texts * longest * (num_taps + 1) * hidden * dtype.itemsize
