"""A model name is a folder, a bundled checkpoint or a hub id, in this order; and error messages for wrong names."""

import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils._paths import filter_repo_objects

from forerun.draft.plan import DraftContext
from forerun.drafters import plan_drafter
from forerun.errors import InvalidRequest, MissingPackage, ModelNotFound, UnknownDrafter
from forerun.heads.folder import find_heads, find_of_kind
from forerun.models.bundled import BUNDLED, BUNDLED_DRAFTS, BUNDLED_HEADS, FOLDER
from forerun.models.loading import Blueprint
from forerun.models.source import find_checkpoint, find_tokenizer
from kit.checkpoints import TARGET


def test_a_folder_is_used_as_it_is() -> None:
    assert find_checkpoint(str(TARGET)) == TARGET


def test_paths_that_hold_no_model_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"has no config\.json: name the folder"):
        find_checkpoint(str(tmp_path))
    for find in (find_checkpoint, find_tokenizer, find_heads):
        for name in ("", "/", "//"):
            with pytest.raises(ModelNotFound, match=rf"'{name}' names no model: name a folder"):
                find(name)
    file = tmp_path / "model.bin"
    file.write_bytes(b"x")
    with pytest.raises(ModelNotFound, match=r"model\.bin is a file: name the folder"):
        find_checkpoint(str(file))
    for model in (str(tmp_path / "absent"), "./absent", "a/b/c", "a b"):
        with pytest.raises(
            ModelNotFound, match=f"there is no folder {model}, and it is not .* bundled: stdlib, stdlib-middle"
        ):
            find_checkpoint(model)


def test_a_cached_model_is_found_without_a_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offline = partial(snapshot_download, cache_dir=tmp_path, local_files_only=True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelNotFound, match=r"the hub cannot be reached: connect .* `hf download owner/name`"):
        find_checkpoint("owner/name")
    cache = tmp_path / "models--owner--name"
    snapshot = cache / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0" * 40)
    with pytest.raises(ModelNotFound, match=r"owner/name has no config\.json on the hub"):
        find_checkpoint("owner/name")
    (snapshot / "config.json").write_text("{}")
    assert find_checkpoint("owner/name") == snapshot


def test_only_what_is_read_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's own filter, applied to what repositories of these families hold."""

    def fake(model: str, revision: str | None, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        kept = filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        fetched.update(kept)
        (tmp_path / "config.json").write_text("{}")
        return str(tmp_path)

    wanted = {
        "model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json", "generation_config.json",
        "tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
    }  # fmt: skip
    files = [
        *wanted, "consolidated.safetensors", "pytorch_model.bin", "original/params.json", "original/tokenizer.model",
        "onnx/model.bin", "tokenizer/tokenizer.model", "tokenizer/vocab.json", "README.md", "a/b.safetensors",
    ]  # fmt: skip
    fetched: set[str] = set()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    assert find_checkpoint("owner/name") == tmp_path
    assert fetched == wanted


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (GatedRepoError, "owner/name is gated: accept its terms .* `hf auth login`"),
        (RepositoryNotFoundError, "nor a model on the hub: check the spelling"),
        (ConnectionError, "owner/name could not be downloaded from the hub .*: try again"),
        (HfHubHTTPError, "owner/name could not be downloaded from the hub .*: try again"),
        (HFValidationError, "there is no folder owner/name, and as a hub id it is not valid"),
    ],
)
def test_an_error_of_the_hub_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception], message: str
) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise error.__new__(error)  # its constructor wants a response of the client that this hub version uses

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelNotFound, match=message):
        find_checkpoint("owner/name")


@pytest.fixture
def unreached(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that must not be contacted."""

    def never(*_: Any, **__: Any) -> str:
        raise AssertionError("the network was tried")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", never)


@pytest.mark.usefixtures("unreached")
@pytest.mark.parametrize(
    ("name", "meant"),
    [("stdlb", "stdlib"), ("stdlib-drft", "stdlib-draft"), ("std-lib", "stdlib"), ("my-modl", "my-model")],
)
def test_the_error_for_a_misspelt_name_suggests_a_near_one_without_using_the_network(
    name: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "config.json").touch()
    (tmp_path / "my-modl2").mkdir()  # no checkpoint
    with pytest.raises(ModelNotFound, match=f"^{name} is neither a folder here nor .*: did you mean {meant}") as caught:
        find_checkpoint(name)
    assert "connect" not in str(caught.value)
    assert "my-modl2" not in str(caught.value)


@pytest.mark.usefixtures("unreached")
def test_heads_are_a_folder_that_has_their_key_and_nothing_bundled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFound, match="there is no folder nowhere: name the folder that forerun train wrote"):
        find_of_kind("nowhere", "medusa")
    with pytest.raises(ModelNotFound, match="there is no folder stdlb: name the folder"):
        find_heads("stdlb")
    with pytest.raises(ModelNotFound, match=r"no folder \./nowhere, .* bundled: stdlib-early-exit, stdlib-block"):
        find_heads("./nowhere")
    with pytest.raises(
        ModelNotFound, match=r"is not a drafter of the kind medusa: its config.json has no medusa_num_heads"
    ):
        find_of_kind(str(TARGET), "medusa")
    (tmp_path / "my-heads").mkdir()
    (tmp_path / "my-heads" / "config.json").write_text('{"medusa_num_heads": 2}')
    assert find_of_kind("my-heads", "medusa") == Path("my-heads")
    with pytest.raises(ModelNotFound, match=r"did you mean my-heads[?] Otherwise"):
        find_of_kind("my-head", "medusa")


@pytest.mark.parametrize("kind", ["block", "eagle", "early-exit", "medusa", "mtp"])
def test_the_error_for_heads_of_another_kind_names_their_kind(kind: str, tmp_path: Path) -> None:
    """Unless nothing in config.json shows the kind, where what is missing is named when it is looked for."""
    for name, folder in BUNDLED_HEADS.items():
        own = folder.name
        if own in (kind, "mtp"):
            assert own == "mtp" or find_of_kind(name, kind) == folder
            continue
        with pytest.raises(
            ModelNotFound, match=f"{name} is a drafter of another kind than .*: write {own}:(2:)?{name}"
        ):
            find_of_kind(name, kind)
    (tmp_path / "config.json").write_text('{"medusa_num_heads": null, "exit_layer": null, "dflash_config": null}')
    if kind in ("medusa", "early-exit"):
        with pytest.raises(ModelNotFound, match=r"its config\.json has no "):
            find_of_kind(str(tmp_path), kind)
    else:
        assert find_of_kind(str(tmp_path), kind) == tmp_path
    with pytest.raises(
        ModelNotFound, match="stdlib-draft is a model, not heads: use it as model:stdlib-draft; for heads"
    ):
        find_of_kind("stdlib-draft", kind)


@pytest.mark.usefixtures("unreached")
@pytest.mark.parametrize("name", BUNDLED_HEADS)
def test_the_error_for_heads_in_place_of_a_model_names_their_drafter(name: str) -> None:
    """The drafter that the message names drafts for the bundled target."""
    spec = BUNDLED_DRAFTS[name]
    with pytest.raises(ModelNotFound, match=f"{name} is a drafter for stdlib, not a model: write {spec} as a"):
        find_checkpoint(name)
    target = Blueprint.of("stdlib")
    context = DraftContext(target, target.tokenizer())
    with pytest.raises(UnknownDrafter, match=f"there is no drafter '{name}': did you mean {spec}[?] Otherwise choose"):
        plan_drafter(name, context)
    assert plan_drafter(spec, context).num_members == 1


@pytest.mark.usefixtures("unreached")
def test_the_error_for_a_misspelt_path_suggests_the_folder_next_to_it(tmp_path: Path) -> None:
    (tmp_path / "llama-8b").mkdir()
    (tmp_path / "llama-8b" / "config.json").touch()
    with pytest.raises(ModelNotFound, match=f"did you mean {tmp_path}/llama-8b[?] Otherwise"):
        find_checkpoint(str(tmp_path / "lama-8b"))


@pytest.mark.usefixtures("unreached")
@pytest.mark.parametrize("name", ["~no-such-user-here/model", "x" * 5000, "a\0b"])
def test_a_path_that_cannot_be_looked_up_is_named(name: str) -> None:
    with pytest.raises(ModelNotFound, match=r"cannot be looked up|there is no folder"):
        find_checkpoint(name)


def test_a_revision_is_fetched_and_is_for_hub_ids_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(_model: str, revision: str | None, **_: Any) -> str:
        if revision not in (None, "v2"):
            raise RevisionNotFoundError.__new__(RevisionNotFoundError)
        return str(TARGET if revision else tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    assert find_checkpoint("owner/name", "v2") == TARGET
    with pytest.raises(ModelNotFound, match="owner/name has no revision 'v3' on the hub: name a branch, tag or commit"):
        find_checkpoint("owner/name", "v3")
    for folder in (str(TARGET), "stdlib"):
        with pytest.raises(InvalidRequest, match=r"revision: 'v2' is only for hub ids"):
            find_checkpoint(folder, "v2")


def test_a_tokenizer_is_found_like_a_checkpoint_and_needs_no_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"has no tokenizer\.json: name the folder that holds tokenizer\.json"):
        find_tokenizer(str(tmp_path))
    shutil.copy(TARGET / "tokenizer.json", tmp_path)
    assert find_tokenizer(str(tmp_path)) == tmp_path
    assert find_tokenizer("stdlib") == BUNDLED["stdlib"]


def test_a_hub_id_without_the_package_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingPackage, match=r"owner/name is not a local folder, .*pip install huggingface_hub"):
        find_checkpoint("owner/name")


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


def test_a_package_without_its_data_is_a_named_error(
    elsewhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BUNDLED, "stdlib", tmp_path / "lost")
    with pytest.raises(ModelNotFound, match=r"stdlib should be in the package, but .*lost is missing: install"):
        find_checkpoint("stdlib")


def test_all_that_ships_is_below_48_megabytes() -> None:
    package = FOLDER.parent
    shipped = [path for path in package.rglob("*") if path.is_file() and path.suffix not in (".pyc", ".so")]
    assert sum(path.stat().st_size for path in shipped) < 48e6
