"""`forerun models`: what it says of a model holds when the model is run, and the list has what the machine has."""

import json
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import Result

from forerun.errors import ModelError
from forerun.llm import LLM
from forerun.machine import available_bytes
from forerun.models.loading import Blueprint
from forerun.models.source import find_checkpoint
from forerun.sampling.params import SamplingParams
from kit.checkpoints import SMALL, TARGET
from kit.command import command, refusal
from kit.gguf_files import stories


def invoke(*arguments: str, columns: str = "200") -> Result:
    return command("models", *arguments, COLUMNS=columns)


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches of forerun and of the hub."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def put_in_hub(machine: Path, name: str, folder: Path) -> Path:
    """A model as the hub's cache holds it."""
    place = machine / "hub" / f"models--{name.replace('/', '--')}" / "snapshots" / "abc"
    shutil.copytree(folder, place)
    return place


def test_the_description_of_a_model_holds_when_it_is_run(machine: Path) -> None:
    """Sizes are those of its plan, and each drafter drafts the tokens of plain decoding."""
    put_in_hub(machine, "owner/small", SMALL)
    found = json.loads(invoke(str(TARGET), "--json", "--dtype", "float32").stdout)
    llm = LLM(str(TARGET), dtype="float32")
    memory = Blueprint.of(str(TARGET), dtype="float32").memory
    assert found["weights_bytes"] == memory.weights_bytes
    assert found["context"] == llm.plan.max_model_len == llm.engine.runner.decoder.config.max_positions
    assert 0 < found["budget_bytes"] < available_bytes() * 1.2
    assert found["parameters"] == sum(weight.numel() for weight in weights_of(TARGET))
    params, prompt = SamplingParams(seed=3, max_tokens=24), "Once upon a time"
    plain = llm.generate(prompt, params)[0].outputs[0].token_ids
    drafts = [each["draft"] for each in found["drafters"]]
    assert drafts[0] == "auto"
    assert {"suffix", "ngram"} < set(drafts)
    for draft in drafts:
        assert LLM(str(TARGET), draft, dtype="float32").generate(prompt, params)[0].outputs[0].token_ids == plain


def weights_of(folder: Path) -> list:  # type: ignore[type-arg]
    """All tensors, read by another program."""
    from safetensors.torch import load_file

    return list(load_file(folder / "model.safetensors").values())


def test_draft_models_are_those_with_its_tokenizer_and_a_third_of_its_size_at_most(machine: Path) -> None:
    put_in_hub(machine, "owner/draft", Path(str(find_checkpoint("stdlib-draft"))))
    listed = json.loads(invoke("stdlib", "--json").stdout)["drafters"]
    found = {each["draft"]: each["about"] for each in listed}
    assert {"model:owner/draft", "model:stdlib-draft"} <= found.keys()
    assert not {"model:stdlib", "model:stdlib-draft-1024"} & found.keys()
    assert "when it was trained" in found["model:stdlib-middle"], "it is larger, but was trained for this target"
    assert len(found) == len(listed), "each is listed once"


def test_trained_drafters_are_listed_from_the_best_to_the_worst_by_the_measure_of_auto(machine: Path) -> None:
    """The tokens per round alone would not explain the choice: here a drafter with fewer is faster."""
    auto, *listed = json.loads(invoke("stdlib", "--json").stdout)["drafters"]
    trained = [each for each in listed if "when it was trained" in each["about"]]
    speed_ups = [float(re.search(r"×(\d+\.\d+)", each["about"])[1]) for each in trained]  # type: ignore[index]
    assert speed_ups == sorted(speed_ups, reverse=True)
    assert len(set(speed_ups)) > 1
    assert auto["about"] == f"chooses {trained[0]['draft']}"


def test_broken_entries_of_the_hubs_cache_are_skipped(machine: Path) -> None:
    """A model without a tokenizer, and a download whose files are links to nothing."""
    draft = put_in_hub(machine, "owner/draft", Path(str(find_checkpoint("stdlib-draft"))))
    for file in draft.glob("tokenizer*"):
        file.unlink()
    gone = put_in_hub(machine, "owner/gone", SMALL) / "config.json"
    gone.unlink()
    gone.symlink_to(machine / "nothing")
    found = [each["draft"] for each in json.loads(invoke("stdlib", "--json").stdout)["drafters"]]
    assert "model:stdlib-draft" in found
    assert "model:owner/draft" not in found


def test_the_list_has_bundled_models_those_of_the_hubs_cache_and_files_that_were_used(machine: Path) -> None:
    put_in_hub(machine, "owner/small", SMALL)
    (put_in_hub(machine, "owner/broken", SMALL) / "model.safetensors").write_bytes(b"cut off")
    file = stories(machine / "tiny.gguf")
    find_checkpoint(str(file))
    listed = {each["name"]: each for each in json.loads(invoke("--json").stdout)["models"]}
    assert {"stdlib", "owner/small", "owner/broken", str(file)} <= listed.keys()
    for name, each in listed.items():
        if each["problem"]:
            assert name == "owner/broken"
            with pytest.raises(ModelError, match=r"model\.safetensors"):
                Blueprint.of(each["folder"])
        else:
            assert Blueprint.of(each["folder"]).config.family == each["family"]
    lines = invoke(columns="40").stdout.splitlines()
    assert {line.split()[-1] for line in lines[1:-1]} == listed.keys(), "a long name is broken"
    assert [line.split() for line in lines if line.startswith("no")] == [["no", "owner/broken"]]
    assert lines[-1] == "forerun models MODEL shows why a model does not run."
    file.unlink()
    assert str(file) not in invoke("--json").stdout


@pytest.mark.parametrize("chat", [False, True])
def test_the_printed_command_runs(chat: bool, machine: Path) -> None:
    """A conversation where the model has a template, and else a text."""
    folder = shutil.copytree(TARGET, machine / "a model")
    if chat:
        (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    found = json.loads(invoke(str(folder), "--json").stdout)
    assert found["has_chat_template"] == chat
    assert [command.split()[1] for command in found["commands"]] == ["chat" if chat else "generate", "serve"]
    assert all(f'--model "{folder}"' in command for command in found["commands"])
    assert [line[10:] for line in invoke(str(folder), columns="40").stdout.splitlines()[-2:]] == found["commands"]


def test_a_model_that_cannot_be_run_is_refused_in_one_line(machine: Path) -> None:
    assert "there is no folder" in refusal("models", str(machine / "nothing"))
