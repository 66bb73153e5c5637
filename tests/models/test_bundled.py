"""Names of bundled checkpoints: each stands for a folder of the package, unless a folder of that name is there."""

import shutil
from pathlib import Path

import pytest

from forerun.errors import ModelNotFound
from forerun.models import source
from forerun.models.bundled import BUNDLED, FOLDER
from forerun.models.loading import Blueprint
from forerun.models.source import find_checkpoint
from kit.checkpoints import TARGET


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", BUNDLED)
def test_every_name_is_a_checkpoint_of_the_package_and_all_but_one_have_the_targets_tokenizer(
    name: str, elsewhere: Path
) -> None:
    blueprint = Blueprint.of(name)
    assert blueprint.folder.is_relative_to(FOLDER)
    assert blueprint.name == name
    its_own = blueprint.tokenizer().fingerprint() != Blueprint.of("stdlib").tokenizer().fingerprint()
    assert its_own == (name == "stdlib-draft-1024")
    assert blueprint.config.eos_ids


def test_a_folder_in_the_working_directory_wins(elsewhere: Path) -> None:
    assert find_checkpoint("stdlib") == BUNDLED["stdlib"]
    (elsewhere / "stdlib").mkdir()
    with pytest.raises(ModelNotFound, match=r"stdlib has no config\.json"):
        find_checkpoint("stdlib")
    shutil.copy(TARGET / "config.json", elsewhere / "stdlib")
    assert find_checkpoint("stdlib").resolve() == elsewhere / "stdlib"


def test_a_package_without_its_data_says_so(elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(source.BUNDLED, "stdlib", tmp_path / "lost")
    with pytest.raises(ModelNotFound, match=r"stdlib should have come with the package, .*lost is missing: install"):
        find_checkpoint("stdlib")


def test_all_that_ships_is_below_48_megabytes() -> None:
    package = FOLDER.parent
    shipped = [path for path in package.rglob("*") if path.is_file() and path.suffix not in (".pyc", ".so")]
    assert sum(path.stat().st_size for path in shipped) < 48e6
