"""The checkpoints inside the package, by short name: models, and trained heads for the bundled target."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent / "bundled"
BUNDLED = {
    "stdlib": FOLDER / "stdlib" / "target",
    "stdlib-middle": FOLDER / "stdlib" / "middle",
    "stdlib-draft": FOLDER / "stdlib" / "draft",
    "stdlib-draft-1024": FOLDER / "stdlib" / "draft-1024",  # with its own tokenizer
}
BUNDLED_HEADS = {  # the names replace a folder in --draft
    "stdlib-early-exit": FOLDER / "stdlib" / "early-exit",
    "stdlib-block": FOLDER / "stdlib" / "block",
    "stdlib-medusa": FOLDER / "stdlib" / "medusa",
    "stdlib-eagle": FOLDER / "stdlib" / "eagle",
    "stdlib-mtp": FOLDER / "stdlib" / "mtp",
}
BUNDLED_DRAFTS = {  # the drafter specification of each bundled checkpoint
    **{name: f"model:{name}" for name in BUNDLED},
    **{name: f"{name.removeprefix('stdlib-')}:{name}" for name in BUNDLED_HEADS},
    "stdlib-early-exit": "early-exit:2:stdlib-early-exit",
}
TARGET, DRAFT = "stdlib", "stdlib-draft"  # the default models of commands
BUNDLED_NAMES = ", ".join(BUNDLED)
BUNDLED_HEAD_NAMES = ", ".join(BUNDLED_HEADS)
