"""The checkpoints inside the package, by short name: models, trained heads for the bundled target, and n-grams."""

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
BUNDLED_TABLES = {"smollm2-ngrams": FOLDER / "smollm2" / "ngrams"}  # of n-grams, as in `suffix:smollm2-ngrams`
TARGET, DRAFT = "stdlib", "stdlib-draft"  # the default models of commands
BUNDLED_NAMES = ", ".join(BUNDLED)
BUNDLED_HEAD_NAMES = ", ".join(BUNDLED_HEADS)


def bundled_name(folder: Path) -> str:
    """The short name of a bundled folder, unless a file here has that name; otherwise the path itself."""
    for name, bundled in {**BUNDLED, **BUNDLED_HEADS, **BUNDLED_TABLES}.items():
        if folder == bundled and not Path(name).exists():
            return name
    return str(folder)
