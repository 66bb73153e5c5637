"""The bytes of a GGUF header: metadata by key, and what is said of each tensor.

The layout is that of ggml's docs/gguf.md, versions 2 and 3 (ggml-org/ggml). Lists of a vocabulary's length are read in
one loop each, for a header may hold a million values.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Any

from forerun.fields import short

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # as struct's
STRING, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")
MOST_DIMENSIONS = 4
USUAL_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a header says of a tensor: its sizes, the outermost first, the number of its format, its first byte."""

    name: str
    shape: tuple[int, ...]
    format: int
    offset: int


class Header:
    """A header, read from its first byte to its last: `metadata`, and `tensors`, whose offsets count from the beginning
    of the file. Raises ValueError where the bytes are none.
    """

    def __init__(self, data: Any) -> None:
        """`data` is the file as bytes, or mapped."""
        self.data, self.at = data, 0
        if data[:4] != MAGIC:
            raise ValueError("its first bytes are not GGUF")
        self.at = 4
        (version,) = self.numbers("I", 1)
        if version not in VERSIONS:
            raise ValueError(f"version {version} of the format; read are 2 and 3 with the lowest byte first")
        num_tensors, num_keys = self.numbers("Q", 2)
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self.string()
            if key in self.metadata:
                raise ValueError(f"{short(key)} stands there twice")
            self.metadata[key] = self.value(*self.numbers("I", 1))
        tensors = [self.tensor() for _ in range(num_tensors)]
        if len({tensor.name for tensor in tensors}) < len(tensors):
            raise ValueError("two tensors have one name")
        alignment = self.metadata.get("general.alignment", USUAL_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {short(alignment)}")
        first = -(-self.at // alignment) * alignment
        self.tensors = [replace(tensor, offset=first + tensor.offset) for tensor in tensors]

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        """The next numbers of one type."""
        form = f"<{self.room(count, struct.calcsize('<' + code))}{code}"
        values = struct.unpack_from(form, self.data, self.at)
        self.at += struct.calcsize(form)
        return values

    def room(self, count: int, size: int) -> int:
        """The count, if so many things of this size fit into the rest of the file."""
        if count * size > len(self.data) - self.at:
            raise ValueError("it ends inside its header")
        return count

    def string(self) -> str:
        """The text that stands next in the file."""
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """So many texts that stand next in the file."""
        data, at, texts = self.data, self.at, []
        for _ in range(self.room(count, LENGTH.size)):
            if at + LENGTH.size > len(data):
                raise ValueError("it ends inside its header")
            begin = at + LENGTH.size
            at = begin + LENGTH.unpack_from(data, at)[0]
            texts.append(data[begin:at].decode())
        self.at = at
        self.room(0, 1)
        return texts

    def value(self, kind: int) -> Any:
        """The next value of a type: a number, a text, or a list of these."""
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.numbers(self.code(kind), 1)[0]
        (inner,), (count,) = self.numbers("I", 1), self.numbers("Q", 1)
        return self.strings(count) if inner == STRING else [*self.numbers(self.code(inner), count)]

    def code(self, kind: int) -> str:
        """How struct spells a type of numbers."""
        if kind not in SCALARS:
            raise ValueError(f"a value has type {kind}")
        return SCALARS[kind]

    def tensor(self) -> TensorHeader:
        """What is said of the next tensor; its offset counts from the end of the header."""
        name, (dimensions,) = self.string(), self.numbers("I", 1)
        if dimensions > MOST_DIMENSIONS:
            raise ValueError(f"{short(name)} has {dimensions} dimensions")
        sizes = self.numbers("Q", dimensions)
        if 0 in sizes:
            raise ValueError(f"{short(name)} has the sizes {sizes}")
        (number_format,), (offset,) = self.numbers("I", 1), self.numbers("Q", 1)
        return TensorHeader(name, sizes[::-1], number_format, offset)
