"""Code of a kind of heads is in its folder and one table: its names occur nowhere else, and folders are recognised."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from forerun.drafters import PLANNERS
from forerun.fields import Fields, read_fields
from forerun.heads.kinds import HEADS
from forerun.models.bundled import BUNDLED_HEADS
from forerun.train.kinds import KINDS

SRC = Path(__file__).parents[2] / "src" / "forerun"
NAMES = {  # tensor names and keys of config.json that no other kind has
    "adapter": {"exit_layer"},
    "block": {"dflash_config", "target_layer_ids", "mask_embedding", "markov_head", "candidate_selector"},
    "eagle": {"eagle_aux_hidden_state_layer_ids", "midlayer", "mask_hidden", "fc_norm."},
    "medusa": {"medusa_num_heads", "medusa_num_layers"},
    "mtp": {"mtp_num_hidden_layers", "num_mtp_layers"},
}

TABLE = "heads/kinds.py"  # has keys that identify folders
IN_GGUF = {"eagle": {"models/gguf/config.py", "models/gguf/tensors.py"}}  # which map names in files to names in folders


@cache
def texts(path: Path) -> set[str]:
    """The string constants of a module, without docstrings."""
    nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    alone = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    constants = (node for node in nodes if isinstance(node, ast.Constant) and id(node) not in alone)
    return {node.value for node in constants if isinstance(node.value, str)}


@pytest.mark.parametrize("kind", NAMES)
def test_names_of_a_kind_occur_only_in_files_that_read_and_write_its_folders(kind: str) -> None:
    places = {
        path.relative_to(SRC).as_posix()
        for path in SRC.rglob("*.py")
        if any(name in text for text in texts(path) for name in NAMES[kind])
    }
    assert f"heads/{kind}/format.py" in places
    assert places <= {f"heads/{kind}/{file}.py" for file in ("format", "convert")} | {TABLE} | IN_GGUF.get(kind, set())


def test_a_tensor_of_a_kind_is_named_in_one_file() -> None:
    """Tensors of a target, too; names that two kinds share occur in both. `.weight` alone ends names of parts."""
    places: dict[tuple[str, str], set[str]] = {}
    for path in SRC.rglob("*.py"):
        place = path.relative_to(SRC).as_posix()
        kind = place.split("/")[1] if place.startswith("heads/") and place.count("/") > 1 else ""
        for text in texts(path):
            if re.search(r"\w\.(weight|bias)$", text):
                places.setdefault((kind, text), set()).add(place)
    assert {name: files for name, files in places.items() if len(files) > 1} == {}
    files = {file for (kind, _), found in places.items() if kind for file in found}
    assert files <= {f"heads/{kind}/{file}.py" for kind in NAMES for file in ("format", "convert")}


def test_every_kind_has_a_drafter_and_a_student_and_recognises_only_its_folders() -> None:
    assert HEADS.keys() <= PLANNERS.keys() & KINDS.keys()
    for folder in BUNDLED_HEADS.values():
        fields = read_fields(folder / "config.json")
        shown = [kind for kind, each in HEADS.items() if each.match(fields)]
        assert shown == ([] if folder.name == "mtp" else [folder.name])
    empty = Fields(Path("config.json"), dict.fromkeys(key for each in HEADS.values() for key, _ in each.keys))
    assert not any(each.match(empty) for each in HEADS.values())
