"""The table of layouts: which formats there are, what each is recognised by, and how it is read and written.

A format is a layout of folders; a method is the kind of drafter in it. The first layout that a folder fits is the one
that it is in. What a layout is read into is the method's form in which forerun runs it, so any layout of a method can
be written from any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from forerun.errors import InvalidRequest, UnsupportedModel
from forerun.heads.block.convert import (
    KINDS,
    block_meaning,
    is_block,
    read_block_authors,
    read_block_package,
    with_the_targets_tables,
    write_block_authors,
    write_block_package,
)
from forerun.heads.draft_files import DraftFiles, TargetFacts
from forerun.heads.eagle.convert import (
    eagle_meaning,
    is_fused,
    is_joined,
    read_fused,
    read_joined,
    self_contained,
    write_fused,
    write_joined,
    write_speculators,
)
from forerun.heads.eagle.fields import KINDS as EAGLE_KINDS
from forerun.heads.eagle.fields import SPECULATORS
from forerun.heads.medusa.convert import (
    is_medusa,
    is_medusa_pickle,
    medusa_meaning,
    read_medusa,
    write_authors,
    write_medusa,
)
from forerun.heads.mtp.convert import (
    KIND,
    is_modules,
    modules_meaning,
    read_modules,
    read_package_module,
    write_modules,
    write_package_module,
)
from forerun.heads.source import DraftSource
from forerun.near import nearest

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


EAGLE3 = DraftMethod("EAGLE-3", "eagle", eagle_meaning)
EAGLE1 = DraftMethod("EAGLE-1 or EAGLE-2", "eagle", eagle_meaning)
MEDUSA = DraftMethod("Medusa", "medusa", medusa_meaning)
BLOCK = DraftMethod("block drafter", "block", block_meaning)
MTP = DraftMethod("MTP module", "mtp", modules_meaning)


def of_speculators(*kinds: str) -> Callable[[DraftSource], bool]:
    """Whether a folder's config.json is of one of these types in `speculators`."""
    return lambda source: source.values.get(SPECULATORS) in kinds


LAYOUTS = (
    DraftLayout(
        "speculators",
        EAGLE3,
        f"config.json with {SPECULATORS} eagle3 or peagle",
        of_speculators(*EAGLE_KINDS),
        read_fused,
        write_speculators,
        self_contained,
    ),
    DraftLayout("eagle", EAGLE3, "fc.weight, norm.weight, midlayer.* or layers.0.*", is_fused, read_fused, write_fused),
    DraftLayout("eagle", EAGLE1, "fc.weight, layers.0.*, no norm.weight", is_joined, read_joined, write_joined),
    DraftLayout(
        "medusa-pt",
        MEDUSA,
        "medusa_lm_head.pt",
        is_medusa_pickle,
        read_medusa,
        write_authors,
        file="medusa_lm_head.pt",
        is_pickle=True,
        is_run=False,
    ),
    DraftLayout(
        "speculators",
        BLOCK,
        f"config.json with {SPECULATORS} dflash, dspark or dflash2",
        of_speculators(*KINDS),
        read_block_package,
        write_block_package,
        with_the_targets_tables,
        is_run=False,
    ),
    DraftLayout("dflash", BLOCK, "fc.weight, hidden_norm.weight", is_block, read_block_authors, write_block_authors),
    DraftLayout(
        "speculators",
        MTP,
        f"config.json with {SPECULATORS} mtp",
        of_speculators(KIND),
        read_package_module,
        write_package_module,
        is_run=False,
    ),
    DraftLayout("mtp", MTP, "mtp.fc.weight, and no tensors but mtp.*", is_modules, read_modules, write_modules),
    DraftLayout("medusa", MEDUSA, "config.json with medusa_num_heads", is_medusa, read_medusa, write_medusa),
)
FORMATS = tuple(dict.fromkeys(layout.format for layout in LAYOUTS))
NOT_RUN: Mapping[str, str] = {  # types of speculators that are not read, and why
    "xpress": "xPress combines the guesses of a block in a way that no drafter here computes",
}


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
