"""GgufFile: the metadata of a GGUF model, and the locations of its tensors in one or several files.

The layout of the header is that of ggml's docs/gguf.md, versions 2 and 3 (ggml-org/ggml). Each list is read in one
loop, since a vocabulary may have a million entries.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

from forerun.errors import MissingWeights, UnsupportedModel
from forerun.fields import Fields, mistaken, short

PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
DOWNLOAD = "download it again (`hf download owner/name FILE`)"
MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # of struct
STRING, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")
MOST_DIMENSIONS = 4
USUAL_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """A tensor's entry in the header: its shape, outermost size first, the code of its format, and its offset."""

    name: str
    shape: tuple[int, ...]
    format: int
    offset: int


class Header:
    """The header of a GGUF file: `metadata`, and `tensors`, with offsets from the beginning of the file.

    `data` is the file as bytes, or a memory map. Raises ValueError for an invalid header.
    """

    def __init__(self, data: Any) -> None:
        self.data, self.at = data, 0
        if data[:4] != MAGIC:
            raise ValueError("it does not begin with GGUF")
        self.at = 4
        (version,) = self.numbers("I", 1)
        if version not in VERSIONS:
            raise ValueError(f"it has version {version} of the format; supported are 2 and 3, little-endian")
        num_tensors, num_keys = self.numbers("Q", 2)
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.string()
            if key in self.metadata:
                raise ValueError(f"it has the key {short(key)} twice")
            self.metadata[key] = self.value(*self.numbers("I", 1))
        tensors = [self.tensor() for _ in range(num_tensors)]
        if len({tensor.name for tensor in tensors}) < len(tensors):
            raise ValueError("two of its tensors have the same name")
        alignment = self.metadata.get("general.alignment", USUAL_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {short(alignment)}")
        first = -(-self.at // alignment) * alignment
        self.tensors = [replace(tensor, offset=first + tensor.offset) for tensor in tensors]

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        """Read the next `count` numbers of one type."""
        form = f"<{self.checked_count(count, struct.calcsize('<' + code))}{code}"
        values = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return values

    def checked_count(self, count: int, size: int) -> int:
        """`count`. Raises ValueError if the rest of the file is too short for so many items of `size` bytes."""
        if count * size > len(self.data) - self.at:
            raise ValueError("it ends inside its header")
        return count

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """Read the next `count` strings."""
        data, at, texts = self.data, self.at, []
        for _ in range(self.checked_count(count, LENGTH.size)):
            if at + LENGTH.size > len(data):
                raise ValueError("it ends inside its header")
            begin = at + LENGTH.size
            at = begin + LENGTH.unpack_from(data, at)[0]
            texts.append(data[begin:at].decode())
        self.at = at
        self.checked_count(0, 1)
        return texts

    def value(self, kind: int) -> Any:
        """Read the next value, of type `kind`: a number, a string, or a list of these."""
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.numbers(self.code(kind), 1)[0]
        (inner,), (count,) = self.numbers("I", 1), self.numbers("Q", 1)
        return self.strings(count) if inner == STRING else [*self.numbers(self.code(inner), count)]

    def code(self, kind: int) -> str:
        """The format character in struct of this number type."""
        if kind not in SCALARS:
            raise ValueError(f"a value has the unknown type {kind}")
        return SCALARS[kind]

    def tensor(self) -> TensorHeader:
        """Read the next tensor's entry, with its offset from the end of the header."""
        name, (dimensions,) = self.string(), self.numbers("I", 1)
        if not 0 < dimensions <= MOST_DIMENSIONS:
            raise ValueError(f"{short(name)} has {dimensions} dimensions")
        sizes = self.numbers("Q", dimensions)
        if 0 in sizes:
            raise ValueError(f"{short(name)} has the sizes {sizes}")
        (number_format,), (offset,) = self.numbers("I", 1), self.numbers("Q", 1)
        return TensorHeader(name, sizes[::-1], number_format, offset)


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """Where and in which format a tensor is stored; `shape` has the outermost size first."""

    file: Path
    offset: int
    num_bytes: int
    format: str
    shape: tuple[int, ...]

    def part(self, number: int) -> TensorLocation:
        """The location of one slice along the first dimension."""
        num_bytes = self.num_bytes // self.shape[0]
        return TensorLocation(self.file, self.offset + number * num_bytes, num_bytes, self.format, self.shape[1:])


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A GGUF model: the metadata of its first file, and the tensors of all files, by llama.cpp's names."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorLocation]

    @classmethod
    def read(cls, path: Path) -> GgufFile:
        """Read the headers of a file and, if the model is split, of all its parts.

        Raises MissingWeights for a file that is damaged or incomplete, or if a part is missing, UnsupportedModel for a
        number format that is not supported.
        """
        paths = parts_of(path)
        metadata, tensors = read_header(paths[0])
        for other in paths[1:]:
            tensors |= read_header(other)[1]
        count = metadata.get("split.tensors.count", len(tensors))
        if count != len(tensors):
            raise MissingWeights(f"{path} declares {count} tensors and has {len(tensors)}: {DOWNLOAD}")
        return cls(path, metadata, tensors)

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture, such as "qwen2"."""
        return str(self.metadata.get("general.architecture"))

    @property
    def model_fields(self) -> Fields:
        """The keys that begin with the name of the architecture, without that prefix."""
        prefix = f"{self.architecture}."
        values = {key.removeprefix(prefix): v for key, v in self.metadata.items() if key.startswith(prefix)}
        return Fields(Path(f"{self.path}, {self.architecture}"), values)


def parts_of(path: Path) -> list[Path]:
    """The file, or all parts of a split model, of which `path` is any."""
    part = PART.fullmatch(path.name)
    if part is None or not 1 <= int(part[2]) <= int(part[3]):
        return [path]
    stem, _, count = part.groups()
    paths = [path.with_name(f"{stem}-{i:05d}-of-{count}.gguf") for i in range(1, int(count) + 1)]
    missing = [each.name for each in paths if not each.is_file()]
    if missing:
        raise MissingWeights(f"{path} is one of {int(count)} parts, and {missing[0]} is missing: {DOWNLOAD}")
    return paths


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, TensorLocation]]:
    """The metadata and the tensors of one file."""
    from forerun.models.gguf.formats import FORMATS, READABLE, UNREADABLE  # imports torch, which slows `serve -h`

    try:
        with path.open("rb") as opened, mmap(opened.fileno(), 0, access=ACCESS_READ) as data:
            if data[:4] != MAGIC and (mistake := mistaken(path)):
                raise MissingWeights(f"{path} {mistake}")
            header, size = Header(data), len(data)
    except OSError as error:
        raise MissingWeights(f"{path} cannot be read ({short(error)}): make it a readable file") from error
    except ValueError as error:
        raise MissingWeights(f"{path} is not a valid GGUF file ({short(error)}): {DOWNLOAD}") from error
    names, tensors = {each.code: name for name, each in FORMATS.items()}, {}
    for info in header.tensors:
        name = names.get(info.format)
        if name is None:
            kind = UNREADABLE.get(info.format, f"type {info.format}")
            raise UnsupportedModel(
                f"{path}: the tensor {short(info.name)} is stored as {kind}; "
                f"supported are {', '.join(READABLE)}: choose a file in one of these, such as Q4_K_M or Q8_0"
            )
        numbers = FORMATS[name].numbers
        num_bytes = math.prod(info.shape) // numbers * FORMATS[name].num_bytes
        if numbers > 1 and info.shape[-1] % numbers:
            problem = f"has rows of {info.shape[-1]} numbers, which blocks of {numbers} do not divide: {DOWNLOAD}"
            raise MissingWeights(f"{path}: the tensor {short(info.name)} {problem}")
        if info.offset + num_bytes > size:
            raise MissingWeights(f"{path} ends inside the tensor {short(info.name)} ({size} bytes): {DOWNLOAD}")
        tensors[info.name] = TensorLocation(path, info.offset, num_bytes, name, info.shape)
    return header.metadata, tensors
