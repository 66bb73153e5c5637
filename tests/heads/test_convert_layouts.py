"""Conversions between the layouts of EAGLE's and Medusa's authors: what is kept, refused and overwritten."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typing_extensions import override

from forerun.errors import InvalidRequest, MissingWeights, ModelError, UnsupportedModel, WrongShape
from forerun.heads.convert import convert
from forerun.heads.folder import HeadFolder
from forerun.models.loading import Blueprint
from forerun.sampling.params import SamplingParams
from heads.trained import eagle_of, first_eagle_of, heads_of
from kit.assertions import num_accepted
from kit.checkpoints import TARGET, same_tensors
from kit.command import command, refusal

Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return eagle_of(TARGET, tmp_path_factory.mktemp("eagle") / "layer")


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return first_eagle_of(TARGET, tmp_path_factory.mktemp("eagle") / "first")


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return heads_of(TARGET, tmp_path_factory.mktemp("medusa") / "heads", 3)


def copied(folder: Path, new: Path, change: Change) -> Path:
    """A copy of a folder with changed tensors."""
    new.mkdir()
    shutil.copy(folder / "config.json", new)
    save_file(change(load_file(folder / "model.safetensors")), new / "model.safetensors")
    return new


def as_published(folder: Path, new: Path, file: str, prefix: str = "", **keys: object) -> Path:
    """A copy whose weights are a pickle, as the authors publish them."""
    new.mkdir()
    config = json.loads((folder / "config.json").read_text())
    (new / "config.json").write_text(json.dumps({k: v for k, v in (config | keys).items() if v is not None}))
    tensors = {prefix + name: tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    torch.save(tensors, new / file)
    return new


def counts(draft: str) -> tuple[int, int]:
    """The numbers of drafted and accepted tokens of some answers."""
    return num_accepted(TARGET, draft, 3, SamplingParams(temperature=0, max_tokens=20))


def test_eagle_1_as_its_authors_publish_it_drafts_the_same_once_it_is_converted(first: Path, tmp_path: Path) -> None:
    published = as_published(first, tmp_path / "published", "pytorch_model.bin")
    with pytest.raises(MissingWeights, match=r"forerun convert .*published --to eagle --out published-converted"):
        HeadFolder.open(str(published), "eagle", Blueprint.of(str(TARGET)))
    made = convert(str(published), "eagle", tmp_path / "out", str(TARGET))
    assert made.read.method.label == "EAGLE-1 or EAGLE-2"
    assert same_tensors(first, tmp_path / "out")
    assert counts(made.draft) == counts(f"eagle:{first}")
    with pytest.raises(InvalidRequest, match="cannot store the method EAGLE-1 or EAGLE-2: choose one of eagle"):
        convert(str(published), "speculators", tmp_path / "other")


def test_the_heads_rows_are_sorted_by_token_id(eagle: Path, tmp_path: Path) -> None:
    order = torch.randperm(400, generator=torch.Generator().manual_seed(0))

    def shuffled(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        ids = (torch.arange(400) + tensors["d2t"])[order]
        buffer = {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(8)}
        head = {"lm_head.weight": tensors["lm_head.weight"][order].contiguous(), "d2t": ids - torch.arange(400)}
        return tensors | head | buffer

    convert(str(copied(eagle, tmp_path / "in", shuffled)), "eagle", tmp_path / "out")
    found, expected = load_file(tmp_path / "out" / "model.safetensors"), load_file(eagle / "model.safetensors")
    assert found.keys() == {*expected, "t2d"}
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert torch.equal(found["t2d"].nonzero()[:, 0], torch.arange(400) + expected["d2t"])


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_medusas_state_dict_is_read_and_written(prefix: str, heads: Path, tmp_path: Path) -> None:
    """The authors' config.json has fewer heads than the file, and no sizes."""
    published = as_published(
        heads, tmp_path / "published", "medusa_lm_head.pt", prefix, medusa_num_heads=2, medusa_num_layers=1, hydra=None
    )
    with pytest.raises(MissingWeights, match=r"forerun convert .* --to medusa"):
        HeadFolder.open(str(published), "medusa", Blueprint.of(str(TARGET)))
    made = convert(str(published), "medusa", tmp_path / "out", str(TARGET))
    assert made.read.format == "medusa-pt"
    assert same_tensors(heads, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["medusa_num_heads"], config["hidden_size"], config["vocab_size"]) == (3, 64, 512)
    assert counts(made.draft) == counts(f"medusa:{heads}")
    back = convert(str(tmp_path / "out"), "medusa-pt", tmp_path / "back")
    assert not back.written.is_runnable
    stored = torch.load(tmp_path / "back" / "medusa_lm_head.pt", weights_only=True)
    assert stored.keys() == load_file(heads / "model.safetensors").keys()


def test_heads_with_the_targets_matrix_and_hydras_are_read_too(heads: Path, tmp_path: Path) -> None:
    shared = copied(heads, tmp_path / "shared", lambda all_: {k: v for k, v in all_.items() if ".1." not in k})
    convert(str(shared), "medusa-pt", tmp_path / "pt", str(TARGET))
    convert(str(tmp_path / "pt"), "medusa", tmp_path / "back")
    assert same_tensors(shared, tmp_path / "back")
    hydra = heads_of(TARGET, tmp_path / "hydra", 2, hydra=True)
    assert convert(str(hydra), "medusa", tmp_path / "hydra2").num_tensors == 8
    with pytest.raises(UnsupportedModel, match="medusa-pt cannot store the heads of Hydra"):
        convert(str(hydra), "medusa-pt", tmp_path / "hydra3")


class Mischief:
    """An object that runs code when it is unpickled."""

    @override
    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("mischief",)


@pytest.mark.parametrize("how", ["torch", "pickle"])
def test_a_pickle_with_more_than_tensors_is_refused_and_does_nothing(
    how: str, heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = as_published(heads, tmp_path / "bad", "medusa_lm_head.pt")
    weights = {"0.0.linear.weight": torch.zeros(4, 4), "0.0.linear.bias": Mischief()}
    if how == "torch":
        torch.save(weights, folder / "medusa_lm_head.pt")
    else:
        (folder / "medusa_lm_head.pt").write_bytes(pickle.dumps(weights))
    with pytest.raises(UnsupportedModel, match=r"contains more than tensors .* reading it could run code"):
        convert(str(folder), "medusa", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad"]


def without(name: str) -> Change:
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


def with_one(name: str, tensor: Tensor) -> Change:
    return lambda tensors: {**tensors, name: tensor}


@pytest.mark.parametrize(
    ("kind", "change", "error", "message"),
    [
        ("eagle", without("midlayer.mlp.up_proj.weight"), MissingWeights, "midlayer.mlp.up_proj.weight"),
        ("eagle", with_one("midlayer.extra", torch.ones(1)), UnsupportedModel, "midlayer.extra does not belong to"),
        ("eagle", with_one("norm.weight", torch.ones(3)), WrongShape, r"norm.weight has shape \[3\]"),
        ("eagle", with_one("d2t", torch.zeros(400)), UnsupportedModel, "d2t must have a whole number"),
        ("eagle", without("d2t"), UnsupportedModel, "d2t is missing or has another size"),
        ("eagle", with_one("d2t", torch.zeros(3, dtype=torch.long)), ModelError, "d2t|lm_head"),
        ("heads", without("2.0.linear.bias"), MissingWeights, "2.0.linear.bias"),
        ("heads", without("0.0.linear.weight"), MissingWeights, "no tensor 0.0.linear.weight"),
        ("heads", with_one("0.7.weight", torch.ones(1)), UnsupportedModel, "0.7.weight does not belong to 3 heads"),
        ("first", without("fc.bias"), MissingWeights, "fc.bias"),
        ("first", without("fc.weight"), UnsupportedModel, "has an unknown layout; known are: .*EAGLE-3"),
    ],
)
def test_every_weight_must_be_used_and_every_expected_one_be_there(
    kind: str, change: Change, error: type[ModelError], message: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    source = copied(request.getfixturevalue(kind), tmp_path / "in", change)
    with pytest.raises(error, match=message):
        convert(str(source), "medusa" if kind == "heads" else "eagle", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_a_conversion_that_writes_other_tensors_is_refused(
    heads: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def saved(tensors: dict[str, Tensor], path: Path) -> None:
        save_file({**tensors, "1.1.weight": tensors["1.1.weight"] * 2}, path)

    monkeypatch.setattr("forerun.heads.convert.save_tensors", saved)
    with pytest.raises(UnsupportedModel, match=r"cannot be written as medusa: the tensor 1.1.weight would be lost"):
        convert(str(heads), "medusa", tmp_path / "out")
    assert not [*tmp_path.iterdir()]


def test_an_empty_folder_is_written_even_with_a_partial_file_of_a_killed_run(eagle: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / ".out.part").mkdir(parents=True)
    convert(str(eagle), "eagle", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]


def test_only_a_drafters_folder_is_overwritten_and_only_if_forced(eagle: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("precious")
    (out / "thesis.txt").write_text("years of work")
    with pytest.raises(InvalidRequest, match=r"contains config.json, thesis.txt: name another folder, or .* --force"):
        convert(str(eagle), "eagle", out)
    broken = copied(eagle, tmp_path / "broken", without("midlayer.mlp.up_proj.weight"))
    with pytest.raises(MissingWeights, match="up_proj"):
        convert(str(broken), "eagle", out, force=True)
    assert (out / "config.json").read_text() == "precious"
    convert(str(eagle), "eagle", out, force=True)
    assert json.loads((out / "config.json").read_text())["draft_vocab_size"] == 400
    assert (out / "thesis.txt").read_text() == "years of work"
    with pytest.raises(InvalidRequest, match="is the source: name another folder"):
        convert(str(eagle), "eagle", eagle, force=True)
    model = copied(TARGET, tmp_path / "model", lambda tensors: tensors)
    with pytest.raises(InvalidRequest, match="is the folder of the model: name another folder"):
        convert(str(eagle), "eagle", model, str(model), force=True)
    assert same_tensors(model, TARGET)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "model", "out"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eagle", "--to", "eagel", "--out", "x"], "'eagel' is not a format: did you mean eagle?"),
        (
            ["eagle", "--to", "medusa", "--out", "x"],
            "cannot store the method EAGLE-3: choose one of speculators, eagle",
        ),
        (["eagle", "--to", "eagle", "--out", "no/where"], "the folder no does not exist"),
        (["eagle", "--to", "eagle", "--out", "eagle/config.json"], "is a file: name a folder"),
        (["eagle", "--to", "eagle", "--out", "x", "--model", "no where"], "there is no folder no where"),
        (["nowhere", "--to", "eagle", "--out", "x"], "there is no folder nowhere"),
        (["target", "--to", "eagle", "--out", "x"], "has an unknown layout"),
    ],
)
def test_mistakes_give_one_line_and_write_nothing(
    arguments: list[str], message: str, eagle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "eagle").symlink_to(eagle)
    (tmp_path / "target").symlink_to(TARGET)
    assert message in refusal("convert", *arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["eagle", "target"]


def test_the_command_reports_what_it_did(eagle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["convert", str(eagle), "--to", "speculators", "--model", str(TARGET), "--out"]
    shown = command(*arguments, "new")
    as_json = command(*arguments, "newer", "--json")
    assert "--draft eagle:new" in shown.stdout
    found = json.loads(as_json.stdout)
    assert found["method"] == "EAGLE-3"
    assert found["to"] == {"format": "speculators", "folder": "newer"}
    assert counts(found["draft"]) == counts(f"eagle:{eagle}")
