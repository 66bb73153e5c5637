"""StoredTensor: a tensor of a safetensors file, known by the file's header and read when it is asked for.

The file decides what damage to such a file is called. What a tensor is for is none of its business.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from safetensors import SafetensorError, safe_open
from torch import Tensor

from forerun.errors import MissingWeights
from forerun.fields import mistaken, short

PLAIN = ("F64", "F32", "F16", "BF16")  # number formats that need no scales beside them
AGAIN = "download it again (`hf download owner/name FILE`; in a git clone, `git lfs pull`)"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies, under which name, and what its file's header says of it."""

    file: Path
    name: str
    shape: tuple[int, ...]
    format: str

    held_bytes: ClassVar[float | None] = None  # of a number, where they are held as they are stored

    @property
    def readable(self) -> bool:
        """Whether its numbers mean what they are."""
        return self.format in PLAIN

    def read(self) -> Tensor:
        """Its numbers. Raises MissingWeights."""
        with opened(self.file) as file:
            tensor: Tensor = file.get_tensor(self.name)
        return tensor

    def read_part(self, number: int) -> Tensor:
        """One of the parts that the outermost size counts. Raises MissingWeights."""
        with opened(self.file) as file:
            tensor: Tensor = file.get_slice(self.name)[number]
        return tensor

    def read_into(self, result: Tensor) -> Tensor:
        """Its numbers, in the number format and the memory of `result`. Raises MissingWeights."""
        return result.copy_(self.read())

    def groups(self, _part: int | None = None) -> None:
        """Nothing is stored in groups here."""


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file."""
    if not file.exists():
        raise MissingWeights(f"{file} is missing: {AGAIN}")
    tensors: dict[str, StoredTensor] = {}
    with opened(file) as shard:
        for name in shard.keys():  # noqa: SIM118 (the handle is no mapping)
            part = shard.get_slice(name)
            tensors[name] = StoredTensor(file, name, tuple(part.get_shape()), part.get_dtype())
    return tensors


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """A safetensors file, open. Raises MissingWeights, now or within, where it is no such file or damaged."""
    try:
        if not file.is_file():
            raise MissingWeights(f"{file} is not a file: {AGAIN}")
        with safe_open(file, framework="pt") as handle:
            yield handle
    except SafetensorError as error:
        damage = f"is damaged or incomplete ({file.stat().st_size} bytes; {short(error)}): {AGAIN}"
        raise MissingWeights(f"{file} {mistaken(file) or damage}") from error
    except OSError as error:
        raise MissingWeights(f"{file} cannot be read ({short(error)}): make it a readable file") from error
