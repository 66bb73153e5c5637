"""GgufFile: a model's metadata and where its tensors lie, read with errors that name the file.

The package `gguf` names the formats of numbers; this file decides which are read and what damage is called, and joins
the parts of a model that was split. It does not know what a tensor is for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from forerun.errors import MissingPackage, MissingWeights, UnsupportedModel
from forerun.fields import Fields, mistaken, short
from forerun.models.gguf.header import MAGIC, Header

PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
READABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
WHOLE = ("I32", "I64")  # numbers of tables of ids
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
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError as error:
        raise MissingPackage(f"{path} is in GGUF, which needs the package gguf: pip install 'forerun[gguf]'") from error
    try:
        with path.open("rb") as opened, mmap(opened.fileno(), 0, access=ACCESS_READ) as data:
            if data[:4] != MAGIC and (what := mistaken(path)):
                raise MissingWeights(f"{path} {what}")
            header, size = Header(data), len(data)
    except OSError as error:
        raise MissingWeights(f"{path} cannot be read ({short(error)}): make it a readable file") from error
    except ValueError as error:
        raise MissingWeights(f"{path} is no GGUF file that can be read ({short(error)}): {AGAIN}") from error
    formats, tensors = {each.value: each for each in GGMLQuantizationType}, {}
    for info in header.tensors:
        kind = formats.get(info.format)
        if kind is None or kind.name not in (*READABLE, *WHOLE):
            raise UnsupportedModel(
                f"{path}: the tensor {short(info.name)} is stored as {kind.name if kind else f'type {info.format}'}; "
                f"read are {', '.join(READABLE)}: choose a file in one of these, such as Q4_K_M or Q8_0"
            )
        numbers, block_bytes = GGML_QUANT_SIZES[kind]
        num_bytes = math.prod(info.shape) // numbers * block_bytes
        if numbers > 1 and info.shape[-1] % numbers:
            whole = f"which come in blocks of {numbers}: {AGAIN}"
            raise MissingWeights(f"{path}: the tensor {short(info.name)} has rows of {info.shape[-1]} numbers, {whole}")
        if info.offset + num_bytes > size:
            raise MissingWeights(f"{path} is cut off inside the tensor {short(info.name)} ({size} bytes): {AGAIN}")
        tensors[info.name] = Place(path, info.offset, num_bytes, kind.name, info.shape)
    return header.metadata, tensors
