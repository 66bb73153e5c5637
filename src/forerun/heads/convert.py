"""The conversion of a drafter's checkpoint to another format.

A folder is read in the first layout that fits it, of those that the kinds of heads list. The new folder is written
under a temporary name, read back, and compared with the source: tensors bit for bit, and the meaning of config.json.
Only then it gets its final name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.did_you_mean import nearest
from forerun.draft.spec import DraftSpec
from forerun.errors import InvalidRequest, UnsupportedModel
from forerun.heads.blueprint import HeadParts
from forerun.heads.folder import find_heads
from forerun.heads.kinds import HEADS, SPECULATORS
from forerun.heads.layouts import FETCHED, PICKLES, TARGET_KEY, DraftFiles, DraftLayout, DraftMethod, TargetFacts
from forerun.store import names_in, save_json, save_pickle, save_tensors, whole_folder, writable

LAYOUTS = tuple(layout for kind in HEADS for layout in HeadParts.of(kind).layouts)
FORMATS = tuple(dict.fromkeys(layout.format for layout in LAYOUTS))
UNSUPPORTED: Mapping[str, str] = {  # types of speculators that are not read, and why
    "xpress": "forerun has no drafter that combines the draft tokens of a block as xPress does"
}


@dataclass(frozen=True, slots=True)
class Converted:
    """The result of a conversion: the source, the layouts before and after, and the new folder."""

    source: str
    read: DraftLayout
    written: DraftLayout
    folder: Path
    num_tensors: int
    num_bytes: int

    @property
    def draft(self) -> str:
        """The value of `--draft` that uses the new folder."""
        return str(DraftSpec(self.read.method.drafter, argument=str(self.folder)))

    def as_object(self) -> dict[str, Any]:
        return {
            "method": self.read.method.label,
            "from": {"format": self.read.format, "source": self.source},
            "to": {"format": self.written.format, "folder": str(self.folder)},
            "tensors": self.num_tensors,
            "bytes": self.num_bytes,
            "draft": self.draft if self.written.is_runnable else None,
        }


def convert(source: str, to: str, out: Path, model: str | None = None, force: bool = False) -> Converted:
    """Write the drafter in `source` to the folder `out` in the format `to`; if its target `model` is given, check it.

    Raises InvalidRequest for an unknown format or a folder that is not empty, ModelError for a drafter that cannot be
    read or written; nothing is written then. With `force`, existing files of the same names are replaced.
    """
    check_free(out, force)
    source_files = DraftFiles.of(find_heads(source, files=FETCHED))
    if out.exists() and out.resolve() == source_files.folder.resolve():
        raise InvalidRequest("out", f"{out} is the source: name another folder.")
    layout = find_layout(source_files)
    written_as = layout_of(to, layout.method)
    target = None if model is None else TargetFacts.of(model)
    if target is not None and target.folder is not None and out.resolve() == target.folder.resolve():
        raise InvalidRequest("out", f"{out} is the folder of the model: name another folder.")
    files = layout.read(source_files, target)
    if source_files.config.get(TARGET_KEY) is not None:
        files = replace(files, config={**files.config, TARGET_KEY: source_files.config[TARGET_KEY]})
    layout.method.meaning(files, target)
    files = written_as.complete(files, target)
    written = written_as.write(files, target)
    written = replace(written, tensors={**written.tensors, **files.id_tables})
    with writable(out), whole_folder(out) as part:
        write_files(part, written, written_as)
        compare(part, files, written_as, target)
    num_bytes = sum(tensor.nbytes for tensor in written.tensors.values())
    return Converted(source, layout, written_as, out, len(written.tensors), num_bytes)


def check_free(out: Path, force: bool) -> None:
    """Raise InvalidRequest if the folder cannot be created, or is not empty and may not be overwritten (`force`)."""
    if not out.name:
        raise InvalidRequest("out", f"{out} is not the name of a new folder: name one.")
    if not out.resolve().parent.is_dir():
        raise InvalidRequest("out", f"the folder {out.parent} does not exist: create it, or name another one.")
    if out.exists() and not out.is_dir():
        raise InvalidRequest("out", f"{out} is a file: name a folder.")
    held = names_in(out) if out.is_dir() else []
    if held and not force:
        shown = ", ".join(held[:3])
        raise InvalidRequest("out", f"{out} contains {shown}: name another folder, or overwrite it with --force.")


def write_files(folder: Path, files: DraftFiles, layout: DraftLayout) -> None:
    """Write the files of a layout to an empty folder."""
    if layout.file in PICKLES:
        save_pickle(dict(files.tensors), folder / layout.file)
    else:
        save_tensors(dict(files.tensors), folder / layout.file)
    save_json(files.config, folder / "config.json")


def compare(folder: Path, files: DraftFiles, layout: DraftLayout, target: TargetFacts | None) -> None:
    """Raise UnsupportedModel unless the folder contains the same drafter as `files`."""
    read_back = layout.read(DraftFiles.of(folder), target)
    names = sorted(files.tensors.keys() | read_back.tensors.keys())
    lost = [f"the tensor {name}" for name in names if not same(files.tensors.get(name), read_back.tensors.get(name))]
    if layout.method.meaning(files, target) != layout.method.meaning(read_back, target):
        lost.append("the configuration")
    if lost:
        problem = f"cannot be written as {layout.format}: {lost[0]} would be lost; choose another format"
        raise UnsupportedModel(f"{files.folder} {problem}")


def same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether both tensors exist and are equal bit for bit."""
    return one is not None and other is not None and one.dtype == other.dtype and torch.equal(one, other)


def find_layout(source: DraftFiles) -> DraftLayout:
    """The layout of a folder. Raises UnsupportedModel if no layout fits."""
    kind = source.config.get(SPECULATORS)
    if isinstance(kind, str) and kind in UNSUPPORTED:
        raise source.fields.refuse(SPECULATORS, UNSUPPORTED[kind])
    for layout in LAYOUTS:
        if layout.fits(source):
            return layout
    signs = "; ".join(f"{each.method.label} ({each.format}): {each.sign}" for each in LAYOUTS)
    raise UnsupportedModel(f"{source.folder} has an unknown layout; known are: {signs}")


def layout_of(format_name: str, method: DraftMethod[Any]) -> DraftLayout:
    """The layout of a method in a format. Raises InvalidRequest if there is none."""
    if format_name not in FORMATS:
        near = nearest(format_name, FORMATS)
        meant = f"did you mean {near}? Otherwise " if near else ""
        raise InvalidRequest("to", f"{format_name!r} is not a format: {meant}choose one of {', '.join(FORMATS)}.")
    formats = {layout.format: layout for layout in LAYOUTS if layout.method is method}
    if format_name not in formats:
        fix = f"choose one of {', '.join(formats)}"
        raise InvalidRequest("to", f"{format_name!r} cannot store the method {method.label}: {fix}.")
    return formats[format_name]
