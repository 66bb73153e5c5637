"""A conversion from start to end: recognise, read, check, write, read back, and only then give the folder its name.

The first layout of the kinds' tables that a folder fits is the one that it is in.
What was written is read again and compared with what was read before: the tensors to the bit, and what config.json
says. So a folder that has its name holds the same drafter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from forerun.did_you_mean import nearest
from forerun.draft.spec import DraftSpec
from forerun.errors import InvalidRequest, UnsupportedModel
from forerun.heads.kinds import HEADS
from forerun.heads.layouts import DraftFiles, DraftLayout, DraftMethod, DraftSource, TargetFacts
from forerun.heads.speculators import SPECULATORS
from forerun.store import whole_folder, writable

LAYOUTS = tuple(layout for kind in HEADS.values() for layout in kind.layouts)
FORMATS = tuple(dict.fromkeys(layout.format for layout in LAYOUTS))
NOT_RUN: Mapping[str, str] = {  # types of speculators that are not read, and why
    "xpress": "xPress combines the guesses of a block in a way that no drafter here computes",
}


@dataclass(frozen=True, slots=True)
class Converted:
    """What was read, what was written, and where."""

    source: str
    read: DraftLayout
    written: DraftLayout
    folder: Path
    num_tensors: int
    num_bytes: int

    @property
    def draft(self) -> str:
        """What `--draft` takes to use the new folder."""
        return str(DraftSpec(self.read.method.drafter, argument=str(self.folder)))

    @property
    def is_used_as_it_is(self) -> bool:
        """Whether forerun reads the format without converting it again."""
        return self.written.is_run

    def as_object(self) -> dict[str, Any]:
        """What was converted, for JSON."""
        return {
            "method": self.read.method.label,
            "from": {"format": self.read.format, "source": self.source},
            "to": {"format": self.written.format, "folder": str(self.folder)},
            "tensors": self.num_tensors,
            "bytes": self.num_bytes,
            "draft": self.draft if self.is_used_as_it_is else None,
        }


def convert(source: str, to: str, out: Path, model: str | None = None, force: bool = False) -> Converted:
    """Write the drafter in `source` to the folder `out` in another format. `model` is its target.

    With a target, the drafter is checked to fit it. Raises InvalidRequest for an unknown format or a folder that holds
    something, ModelError for a drafter that cannot be read or written; nothing is written then. With `force`, files of
    the names that are written are replaced; no others are touched.
    """
    check_free(out, force)
    found = DraftSource.of(source)
    if out.exists() and out.resolve() == found.folder.resolve():
        raise InvalidRequest("out", f"{out} is what is read: name another folder.")
    layout = recognise(found)
    wanted = layout_of(to, layout.method)
    target = None if model is None else TargetFacts.of(model)
    files = layout.read(found, target)
    layout.method.meaning(files, target)
    files = wanted.complete(files, target)
    written = wanted.write(files, target)
    with writable(out), whole_folder(out) as part:
        write_files(part, written, wanted)
        compare(part, files, wanted, target)
    return Converted(source, layout, wanted, out, len(written.tensors), written.num_bytes)


def check_free(out: Path, force: bool) -> None:
    """Raise InvalidRequest where a folder cannot be made, or has something in it."""
    if not out.name:
        raise InvalidRequest("out", f"{out} is no new folder: name one.")
    if not out.resolve().parent.is_dir():
        raise InvalidRequest("out", f"the folder {out.parent} is not there: make it, or name another one.")
    if out.exists() and not out.is_dir():
        raise InvalidRequest("out", f"{out} is a file: name a folder.")
    held = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    if held and not force:
        shown = ", ".join(held[:3])
        raise InvalidRequest("out", f"{out} holds {shown}: name another folder, or overwrite it with --force.")


def write_files(folder: Path, files: DraftFiles, layout: DraftLayout) -> None:
    """The files of a layout, in an empty folder."""
    tensors, weights = dict(files.tensors), folder / layout.file
    if layout.is_pickle:
        torch.save(tensors, weights)
    else:
        save_file(tensors, weights, {"format": "pt"})
    weights.chmod(0o644)  # safetensors leaves it to its owner alone
    (folder / "config.json").write_text(json.dumps(dict(files.config), indent=2) + "\n", "utf-8")


def compare(folder: Path, files: DraftFiles, layout: DraftLayout, target: TargetFacts | None) -> None:
    """Raise UnsupportedModel where what a folder holds is not this drafter."""
    found = layout.read(DraftSource.at(folder), target)
    meanings = [layout.method.meaning(each, target) for each in (files, found)]
    differing = [
        name
        for name in sorted(files.tensors.keys() | found.tensors.keys())
        if not same(files.tensors, found.tensors, name)
    ]
    if differing or meanings[0] != meanings[1]:
        what = f"the tensor {differing[0]}" if differing else "the configuration"
        raise UnsupportedModel(
            f"{files.path.parent} cannot be kept as {layout.format}: {what} would be lost; choose another format"
        )


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], name: str) -> bool:
    """Whether both have this tensor, with the same bits."""
    if name not in one or name not in other:
        return False
    a, b = one[name], other[name]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def recognise(source: DraftSource) -> DraftLayout:
    """The layout of a folder. Raises UnsupportedModel for one that is in none of them."""
    kind = source.values.get(SPECULATORS)
    if isinstance(kind, str) and kind in NOT_RUN:
        raise source.fields.refuse(SPECULATORS, NOT_RUN[kind])
    found = next((layout for layout in LAYOUTS if layout.holds(source)), None)
    if found is None:
        signs = "; ".join(f"{each.method.label} ({each.format}): {each.sign}" for each in LAYOUTS)
        raise UnsupportedModel(f"{source.folder} is in none of the layouts that are read. These are: {signs}")
    return found


def layout_of(format_name: str, method: DraftMethod) -> DraftLayout:
    """The layout of a method in a format. Raises InvalidRequest where there is none."""
    if format_name not in FORMATS:
        near = nearest(format_name, FORMATS)
        meant = f"did you mean {near}? Otherwise " if near else ""
        raise InvalidRequest("to", f"{format_name!r} is no format: {meant}choose one of {', '.join(FORMATS)}.")
    formats = {layout.format: layout for layout in LAYOUTS if layout.method is method}
    if format_name not in formats:
        raise InvalidRequest(
            "to", f"{format_name!r} has no place for {method.label}: choose one of {', '.join(formats)}."
        )
    return formats[format_name]
