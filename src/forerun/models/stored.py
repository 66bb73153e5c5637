"""StoredTensor: a tensor in a safetensors file, known from the file's header and read on demand."""

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

UNQUANTIZED = ("F64", "F32", "F16", "BF16")  # formats
DOWNLOAD = "download it again (`hf download owner/name FILE`; in a git clone, `git lfs pull`)"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The file, the name, the shape and the format of a tensor."""

    file: Path
    name: str
    shape: tuple[int, ...]
    format: str

    form: ClassVar[None] = None  # it is not stored in groups

    @property
    def readable(self) -> bool:
        """Whether the numbers are the values themselves, without scales in another tensor."""
        return self.format in UNQUANTIZED

    def read(self) -> Tensor:
        """Read the tensor. Raises MissingWeights."""
        with opened(self.file) as file:
            tensor: Tensor = file.get_tensor(self.name)
        return tensor

    def read_part(self, number: int) -> Tensor:
        """Read one slice along the first dimension. Raises MissingWeights."""
        with opened(self.file) as file:
            tensor: Tensor = file.get_slice(self.name)[number]
        return tensor

    def read_into(self, result: Tensor) -> Tensor:
        """Read the tensor into `result`, converted to its dtype. Raises MissingWeights."""
        return result.copy_(self.read())

    def groups(self, _part: int | None = None) -> None:
        """None, since the tensor is not stored in groups."""


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, by name. Raises MissingWeights."""
    if not file.exists():
        raise MissingWeights(f"{file} is missing: {DOWNLOAD}")
    tensors: dict[str, StoredTensor] = {}
    with opened(file) as shard:
        for name in shard.keys():  # noqa: SIM118 (the handle is no mapping)
            part = shard.get_slice(name)
            tensors[name] = StoredTensor(file, name, tuple(part.get_shape()), part.get_dtype())
    return tensors


@contextmanager
def opened(file: Path) -> Iterator[Any]:
    """An open safetensors file. Raises MissingWeights if it is missing or damaged, also inside the block."""
    try:
        if not file.is_file():
            raise MissingWeights(f"{file} is not a file: {DOWNLOAD}")
        with safe_open(file, framework="pt") as handle:
            yield handle
    except SafetensorError as error:
        problem = f"is damaged or incomplete ({file.stat().st_size} bytes; {short(error)}): {DOWNLOAD}"
        if any("\udc80" <= letter <= "\udcff" for letter in str(file)):
            problem = "has a name that is not UTF-8, and safetensors does not open it: rename it, or its folder"
        raise MissingWeights(f"{file} {mistaken(file) or problem}") from error
    except OSError as error:
        raise MissingWeights(f"{file} cannot be read ({short(error)}): make it a readable file") from error
