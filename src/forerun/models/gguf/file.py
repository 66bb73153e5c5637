"""GgufFile: the header of a GGUF file, its metadata and where its tensors lie, read with errors that name the file.

The format is ggml's (docs/gguf.md in ggml-org/ggml, version 3). The package `gguf` reads it; this file decides what
damage is called, and joins the parts of a model that was split. It does not know what a tensor is for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from forerun.errors import MissingPackage, MissingWeights, UnsupportedModel
from forerun.fields import Fields, short

PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
READABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
AGAIN = "download it again (`hf download owner/name FILE`)"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor's numbers lie: in which file, from which byte on, how many bytes, in which format.

    `shape` has the outermost size first.
    """

    file: Path
    offset: int
    num_bytes: int
    format: str
    shape: tuple[int, ...]

    def part(self, number: int) -> Place:
        """One of the parts that the outermost size counts."""
        num_bytes = self.num_bytes // self.shape[0]
        return Place(self.file, self.offset + number * num_bytes, num_bytes, self.format, self.shape[1:])


@dataclass(frozen=True)
class GgufFile:
    """A model in GGUF: the metadata of its first part, and the tensors of all parts by their names there."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, Place]

    @classmethod
    def read(cls, path: Path) -> GgufFile:
        """Read the headers of a file and, if it is the first of several, of the others.

        Raises MissingWeights for a file that is cut off, damaged, or lacks a part beside it, UnsupportedModel for
        numbers in a format that is not read, MissingPackage without the package `gguf`.
        """
        paths = parts_of(path)
        metadata, tensors = read_header(paths[0])
        for other in paths[1:]:
            tensors |= read_header(other)[1]
        count = metadata.get("split.tensors.count", len(tensors))
        if count != len(tensors):
            raise MissingWeights(f"{path} says that it has {count} tensors, and has {len(tensors)}: {AGAIN}")
        return cls(path, metadata, tensors)

    @property
    def architecture(self) -> str:
        """What llama.cpp calls the family, such as "qwen2"."""
        return str(self.metadata.get("general.architecture"))

    @cached_property
    def fields(self) -> Fields:
        """The metadata, for reading keys with errors that name the file."""
        return Fields(self.path, self.metadata)

    @property
    def model_fields(self) -> Fields:
        """The keys that begin with the architecture's name, without it."""
        prefix = f"{self.architecture}."
        values = {key.removeprefix(prefix): v for key, v in self.metadata.items() if key.startswith(prefix)}
        return Fields(Path(f"{self.path}, {self.architecture}"), values)


def parts_of(path: Path) -> list[Path]:
    """The file, or all parts of a model that was split, whichever of them is named."""
    part = PART.fullmatch(path.name)
    if part is None:
        return [path]
    stem, _, count = part.groups()
    paths = [path.with_name(f"{stem}-{i:05d}-of-{count}.gguf") for i in range(1, int(count) + 1)]
    missing = [each.name for each in paths if not each.is_file()]
    if missing:
        raise MissingWeights(f"{path} is one of {int(count)} parts, and {missing[0]} is not beside it: {AGAIN}")
    return paths


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, Place]]:
    """The metadata and the tensors of one file."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise MissingPackage(f"{path} is in GGUF, which needs the package gguf: pip install 'forerun[gguf]'") from error
    try:
        size = path.stat().st_size
        reader = GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    except OSError as error:
        raise MissingWeights(f"{path} cannot be read ({short(error)}): make it a readable file") from error
    except (ValueError, IndexError, KeyError, MemoryError, OverflowError, UnicodeDecodeError) as error:
        raise MissingWeights(f"{path} is no GGUF file that can be read ({short(error)}): {AGAIN}") from error
    tensors = {}
    for tensor in reader.tensors:
        if tensor.tensor_type.name not in READABLE:
            raise UnsupportedModel(
                f"{path}: the tensor {short(tensor.name)} is stored as {tensor.tensor_type.name}; read are "
                f"{', '.join(READABLE)}: choose a file in one of these, such as Q4_K_M or Q8_0"
            )
        if tensor.data_offset + tensor.n_bytes > size:
            raise MissingWeights(f"{path} is cut off inside the tensor {short(tensor.name)} ({size} bytes): {AGAIN}")
        shape = tuple(int(n) for n in reversed(tensor.shape))
        tensors[tensor.name] = Place(path, int(tensor.data_offset), int(tensor.n_bytes), tensor.tensor_type.name, shape)
    return metadata, tensors
