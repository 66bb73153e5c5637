"""--config: every command that loads a model reads the same file, the command line wins, and mistakes are named."""

from pathlib import Path

import pytest
import typer

from forerun import cli
from forerun.errors import InvalidRequest, UnknownSetting
from forerun.settings_file import read_settings, written_settings
from kit.command import refusal

COMMANDS = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
NEEDED = {
    "prove": ["--prompts", "p.txt"],
    "widen": ["--out", "wide"],
    "tune": ["--drafts", "ngram"],
    "train": ["draft", "--data", "p.txt"],
    "convert": ["source", "--to", "eagle", "--out", "out"],
}
TUNED: dict[str, str | int | float | bool] = {
    "model": 'a "model",\x7f of \\ mine',
    "quantize": "int8",
    "kernels": "torch",
    "threads": 3,
    "one_gemm": True,
    "draft": "mix[ngram,model:./draft]",
    "depth": 5,
    "verification": "coupled",
}
LOADING = [name for name, command in COMMANDS.items() if any(param.name == "model" for param in command.params)]


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    path = tmp_path / "forerun.toml"
    path.write_text(written_settings(TUNED, "Written by a test.\n\nReally."))
    return path


def test_what_is_written_is_read_again(settings: Path) -> None:
    found = read_settings(settings, set(TUNED))
    assert found == {name: value if isinstance(value, bool) else str(value) for name, value in TUNED.items()}


def test_a_byte_order_mark_is_ignored(settings: Path) -> None:
    expected = read_settings(settings, set(TUNED))
    settings.write_text(settings.read_text("utf-8"), "utf-8-sig")
    assert read_settings(settings, set(TUNED)) == expected


def test_every_command_that_loads_a_model_takes_the_file() -> None:
    assert set(LOADING) == {"generate", "chat", "trace", "prove", "bench", "tune", "train", "widen", "serve", "convert"}
    for name, command in COMMANDS.items():
        assert any(param.name == "config" for param in command.params) == (name in LOADING)


@pytest.mark.parametrize("name", LOADING)
def test_its_values_are_those_of_the_options(name: str, settings: Path) -> None:
    """Typed as the command line's would be: two contexts, one from the file and one from the options, are the same."""
    command = COMMANDS[name]
    known = {str(param.name): param for param in command.params}
    given = [
        word
        for key, value in TUNED.items()
        if key in known
        for word in ([known[key].opts[0]] if value is True else [known[key].opts[0], str(value)])
    ]
    with command.make_context(name, ["--config", str(settings), *NEEDED.get(name, [])]) as from_file:
        read = {key: value for key, value in from_file.params.items() if key != "config"}
    with command.make_context(name, [*given, *NEEDED.get(name, [])]) as from_line:
        assert read == {key: value for key, value in from_line.params.items() if key != "config"}
    assert read["model"] == TUNED["model"]


def test_the_command_line_wins(settings: Path) -> None:
    line = ["--depth", "2", "--config", str(settings), "--model", "other", "text"]
    with COMMANDS["generate"].make_context("generate", line) as context:
        assert (context.params["depth"], context.params["model"]) == ("2", "other")
        assert context.params["draft"] == TUNED["draft"]


def test_hyphens_equal_underscores_and_a_repeatable_option_accepts_one_text(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('model = "m"\nmax-tokens = 7\nstop = "end"\n')
    with COMMANDS["generate"].make_context("generate", ["--config", str(path), "text"]) as context:
        assert context.params["max_tokens"] == 7
        assert list(context.params["stop"]) == ["end"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('modle = "x"', "there is no option 'modle': did you mean 'model'?"),
        ("qwertz = 1", "there is no option 'qwertz': the options are"),
        ("model = [1]", "model is [1]: use a text, a number, true or false"),
        ("[draft]\nname = 'x'", "draft is {'name': 'x'}"),
        ("model = ", "is not TOML"),
        (f"model = {'[' * 3000}1{']' * 3000}", "is not TOML"),
        (f"depth = 0x{'f' * 4000}", "depth is an integer of thousands of digits: use a text"),
    ],
)
def test_mistakes_are_one_line_and_status_2(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(content)
    assert message in refusal("generate", "--config", str(path), "text")


def test_errors_have_names(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read"):
        read_settings(tmp_path / "none.toml", ["model"])
    (tmp_path / "mine.toml").write_text("drat = 1\nmodel = 'x'\n")
    with pytest.raises(UnknownSetting) as raised:
        read_settings(tmp_path / "mine.toml", ["draft", "model"])
    assert raised.value.likely == "draft"
    (tmp_path / "mine.toml").write_text("draft = 'x'\nmodel = 'x'\n")
    assert read_settings(tmp_path / "mine.toml", ["model"], ["draft"]) == {"model": "x"}
