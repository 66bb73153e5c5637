"""DraftLayout: a layout of folders with drafters, what it is recognised by, and how it is read and written.

A format is a layout of folders; a method is the kind of drafter in it. What a layout is read into is the method's form
in which forerun runs it, so any layout of a method can be written from any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forerun.heads.draft_files import DraftFiles, TargetFacts
from forerun.heads.source import DraftSource
from forerun.heads.speculators import SPECULATORS

ReadLayout = Callable[[DraftSource, TargetFacts | None], DraftFiles]
WriteLayout = Callable[[DraftFiles, TargetFacts | None], DraftFiles]


def unchanged(files: DraftFiles, _target: TargetFacts | None) -> DraftFiles:
    """The same files."""
    return files


@dataclass(frozen=True, slots=True)
class DraftMethod:
    """A kind of drafter. `drafter` is what `--draft` calls it; `meaning` checks files, and says what they describe."""

    label: str
    drafter: str
    meaning: Callable[[DraftFiles, TargetFacts | None], object]


@dataclass(frozen=True, slots=True)
class DraftLayout:
    """A method in a format. `holds` recognises a folder, `sign` says by what; `complete` adds what the format needs.

    `file` is where the weights are written, `is_pickle` as torch saves them. `is_run`: `--draft` takes such a folder.
    """

    format: str
    method: DraftMethod
    sign: str
    holds: Callable[[DraftSource], bool]
    read: ReadLayout
    write: WriteLayout
    complete: WriteLayout = unchanged
    file: str = "model.safetensors"
    is_pickle: bool = False
    is_run: bool = True


def of_speculators(*kinds: str) -> Callable[[DraftSource], bool]:
    """Whether a folder's config.json is of one of these types in `speculators`."""
    return lambda source: source.values.get(SPECULATORS) in kinds
