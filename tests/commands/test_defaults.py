"""The model's generation_config.json at the command line: what it sets, how it is shown and switched off."""

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forerun import cli
from kit.checkpoints import TARGET


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "model"
    shutil.copytree(TARGET, folder)
    config = {"temperature": 0.25, "top_k": 7, "max_new_tokens": 3}
    (folder / "generation_config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder)


def generate(model: str, *arguments: str) -> tuple[dict[str, object], str]:
    line = ["generate", "--model", model, "--seed", "1", "--ignore-eos", *arguments, "Once upon a time"]
    found = CliRunner().invoke(cli.app, [*line, "--json"])
    assert found.exit_code == 0, found.output
    shown = CliRunner().invoke(cli.app, line)
    return json.loads(found.stdout), shown.stderr


def test_options_not_given_have_the_models_defaults_and_the_card_shows_them(model: str) -> None:
    answer, card = generate(model)
    assert answer["defaults"] == {"temperature": 0.25, "top_k": 7, "max_tokens": 3}
    assert len(answer["token_ids"]) == 3  # type: ignore[arg-type]
    assert "temperature 0.25, top_k 7, max_tokens 3" in " ".join(card.split())


def test_given_options_override_the_defaults_and_one_option_drops_them(model: str) -> None:
    answer, _ = generate(model, "--max-tokens", "5", "--temperature", "0")
    assert len(answer["token_ids"]) == 5  # type: ignore[arg-type]
    answer, card = generate(model, "--generation-config", "none", "--max-tokens", "4")
    assert answer["defaults"] == {}
    assert len(answer["token_ids"]) == 4  # type: ignore[arg-type]
    assert "defaults" not in card


def test_the_models_stop_strings_end_answers_unless_others_are_given(model: str) -> None:
    whole, _ = generate(model, "--max-tokens", "12")
    text = str(whole["text"])
    path = Path(model) / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "stop_strings": text[3]}), encoding="utf-8")
    answer, card = generate(model, "--max-tokens", "12")
    assert answer["text"] == text[: text.index(text[3])]
    assert f"stop ['{text[3]}']" in card
    answer, _ = generate(model, "--max-tokens", "12", "--stop", "nowhere")
    assert answer["text"] == text
