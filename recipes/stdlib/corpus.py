"""The corpus: every source file of the running Python's standard library, some of which are held out.

A hash of its path decides whether a file is held out, so the split is the same on every machine and for every version.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_ONE_IN = 50
NOT_STDLIB = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file: its path below the standard library, its text, and the hash of its bytes."""

    path: str
    text: str
    sha256: str

    @property
    def held_out(self) -> bool:
        """Whether the file is held out: one file in HELD_OUT_ONE_IN is, selected by its path."""
        digest = hashlib.sha256(self.path.encode()).digest()
        return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def standard_library() -> Path:
    """The folder of the running Python's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def read_corpus(root: Path) -> list[SourceFile]:
    """Every Python file below `root`, sorted by a hash of its path, without empty files and files that are not UTF-8.

    Installed packages are skipped. Raises FileNotFoundError if there is no file.
    """
    files = []
    for path in root.rglob("*.py"):
        name = path.relative_to(root)
        if NOT_STDLIB.intersection(name.parts):
            continue
        data = path.read_bytes()
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            continue  # the library tests its own decoders with such files
        if text.strip():
            files.append(SourceFile(name.as_posix(), text.replace("\r\n", "\n"), hashlib.sha256(data).hexdigest()))
    if not files:
        raise FileNotFoundError(f"{root}: no Python source there; give --source a folder with .py files.")
    return sorted(files, key=lambda file: hashlib.sha256(file.path.encode()).hexdigest())
