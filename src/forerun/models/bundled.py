"""The checkpoints that ship inside the package, by name.

This file is two explicit tables from short names to folders of the package's data: models, and drafters that read the
states of the bundled target. `source.py` finds all other checkpoints.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "bundled"
BUNDLED = {
    "stdlib": FOLDER / "stdlib" / "target",
    "stdlib-middle": FOLDER / "stdlib" / "middle",
    "stdlib-draft": FOLDER / "stdlib" / "draft",
    "stdlib-draft-1024": FOLDER / "stdlib" / "draft-1024",  # with a tokenizer of its own
}
BUNDLED_HEADS = {  # by what --draft takes in the place of a folder
    "stdlib-early-exit": FOLDER / "stdlib" / "early-exit",
    "stdlib-block": FOLDER / "stdlib" / "block",
    "stdlib-medusa": FOLDER / "stdlib" / "medusa",
    "stdlib-eagle": FOLDER / "stdlib" / "eagle",
    "stdlib-mtp": FOLDER / "stdlib" / "mtp",
}
BUNDLED_DRAFTS = {  # how each drafts
    **{name: f"model:{name}" for name in BUNDLED},
    **{name: f"{name.removeprefix('stdlib-')}:{name}" for name in BUNDLED_HEADS},
    "stdlib-early-exit": "early-exit:2:stdlib-early-exit",
}
TARGET, DRAFT = "stdlib", "stdlib-draft"  # the pair that commands run unless told otherwise
BUNDLED_NAMES = ", ".join(BUNDLED)
BUNDLED_HEAD_NAMES = ", ".join(BUNDLED_HEADS)
