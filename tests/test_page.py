"""Help pages: every option, whole, at any width; examples that work; near names for mistakes; completion."""

import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import Result

from forerun import cli
from forerun.commands.train import KIND_NAMES
from forerun.train.kinds import KINDS
from forerun.train.objective import LOSSES
from forerun.train.settings import LOSS_NAMES
from heads.trained import eagle_of
from kit.checkpoints import ROOT, SMALL, TARGET
from kit.command import apart, command, refusal
from kit.unchecked import unchecked

STORIES = TARGET, SMALL
COMMANDS = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
EXAMPLES = [
    (name, line)
    for name, command in [("", None), *COMMANDS.items()]
    for line in (command.epilog if command else cli.EXAMPLES).strip().splitlines()
]


def invoke(*arguments: str, columns: int = 80) -> Result:
    return command(*arguments, COLUMNS=str(columns))


@pytest.mark.short("-*", "generate-*", "train-40", "train-100")
@pytest.mark.parametrize("columns", [1, 40, 60, 80, 100, 300])
@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_a_page_has_every_option_whole_and_fits(name: str, columns: int) -> None:
    page = invoke(*name.split(), "--help", columns=columns)
    assert page.exit_code == 0
    assert page.stderr == ""
    words = page.stdout.split()
    options = COMMANDS[name].params if name else []
    for option in options:
        for spelling in option.opts if option.param_type_name == "option" else [str(option.metavar)]:
            assert any(word.strip(",[].") == spelling.strip("[].") for word in words), spelling
    examples = {f"  {line}" for _, line in EXAMPLES}
    allowed = max(40, min(100, columns))
    for line in page.stdout.splitlines():
        assert len(line) <= allowed or line in examples or " " not in line.strip() or "--" in line, line
    assert "…" not in page.stdout
    assert page.stdout == invoke(*name.split(), "-h", columns=columns).stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_page_has_a_purpose_examples_and_statuses(name: str) -> None:
    page = invoke(name, "-h").stdout
    assert page.index("Examples:") < page.index("Options:") < page.index("Exit status:")
    for status in ("0", "1", "2", "3", "130", "141"):
        assert re.search(rf"^  {status} +[A-Z]", page, re.MULTILINE)
    assert f"forerun {name} " in page
    assert set(re.findall(r" (<[^|>]+>)", page)) <= {"<str>", "<int>", "<float>", "<path>"}


@pytest.mark.parametrize(("name", "line"), EXAMPLES, ids=lambda value: value)
def test_examples_parse(name: str, line: str) -> None:
    words = shlex.split(line)
    assert words[0] == "forerun"
    own = name.split() or words[1:2]
    assert words[1 : len(own) + 1] == own
    arguments = words[len(own) + 1 : words.index(">") if ">" in words else None]
    if "--help" not in arguments:
        with COMMANDS[" ".join(own)].make_context(own[0], list(arguments)):
            pass


@pytest.mark.short(
    "forerun generate --model stdlib --draft ngram --json*",
    "forerun trace *--svg*",
    "forerun widen --model stdlib --experts*",
)
@pytest.mark.parametrize(
    "line",
    [line for name, line in EXAMPLES if name in ("generate", "trace", "prove", "widen") and "--server" not in line],
)
def test_examples_run(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the stories pair in place of what they name, and less of everything."""
    if "--replicas" in line:
        pytest.importorskip("ray", reason="replicas need Ray")
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("Once upon a time\nLily had a red ball\n")
    Path("prompts.jsonl").write_text('{"prompt": "Once upon a time"}\n{"prompt": "Lily had a red ball"}\n')
    words = shlex.split(line)[1:]
    words = words[: words.index(">") if ">" in words else None]
    less = {"prove": ["--num-prompts", "2", "-n", "6", "--num-texts", "100"], "generate": ["-n", "8"]}
    models = {"stdlib-draft": STORIES[1], "model:stdlib-draft": f"model:{STORIES[1]}", "stdlib": STORIES[0]}
    words = [str(models.get(word, word)) for word in words if word != "--thorough"]
    if words[0] == "widen":
        layer = f"eagle:{eagle_of(STORIES[0], tmp_path / 'layer')}"
        small = {"0.1B": "2M", "1B": "2M", "./target": str(STORIES[0]), "eagle:./my-layer": layer}
        words = [small.get(word, word) for word in words]
    with unchecked():
        result = invoke(*words, *less.get(words[0], []))
    assert result.exit_code == 0, result.output
    assert result.output.strip()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gnerate"], "No such command 'gnerate'. Did you mean 'generate'?"),
        (["generate", "--temprature", "1"], "No such option: --temprature. Did you mean --temperature?"),
        (["generate", "--temp", "1"], "No such option: --temp. Did you mean --temperature?"),
        (["serve", "--ctx-size", "8"], "No such option: --ctx-size. Did you mean --max-model-len?"),
        (["generate", "--predict", "8"], "No such option: --predict. Did you mean --max-tokens?"),
        (["generate", "x"], "Missing option '--model' / '-m'; forerun generate -h lists all options"),
        (["generate", "-m", "x", "--depth", "-1"], "Invalid value for '--depth'"),
        (["serve", "-m", "x", "--port", "99999"], "'--port': '99999' should be less than or equal to 65535; forerun"),
        (["serve", "-m", "x", "--memory-bytes", "1MB"], "'--memory-bytes': '1MB' should be a valid integer; forerun"),
        (["serve", "-m", "x", "--chunk-tokens", "0"], "'0' is neither auto nor a whole number of at least 1"),
        (["generate", "-m", "x", "--verification", "x"], "'x' is not one of 'coupled', 'token', 'block'"),
    ],
)
def test_mistakes_of_usage_are_one_line_with_what_may_have_been_meant(arguments: list[str], message: str) -> None:
    refused = refusal(*arguments)
    assert message in refused
    assert "Value error" not in refused


def test_without_arguments_there_is_help() -> None:
    assert invoke().stdout == invoke("--help").stdout


def test_help_and_completion_of_train_name_every_kind_and_loss() -> None:
    assert sorted(KIND_NAMES) == sorted(KINDS)
    assert sorted(LOSS_NAMES) == sorted(LOSSES)


def test_the_shell_completes_commands_models_and_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    def completed(*words: str) -> list[str]:
        env = {"_FORERUN_COMPLETE": "complete_bash", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
        return apart("-m", "forerun", **env).stdout.split()

    monkeypatch.chdir(ROOT)
    assert completed("forerun", "ge") == ["generate"]
    assert completed("forerun", "generate", "--temp") == ["--temperature"]
    assert completed("forerun", "generate", "--model", "stdlib-d") == ["stdlib-draft", "stdlib-draft-1024"]
    assert completed("forerun", "bench", "-d", "ng") == ["ngram"]
    assert completed("forerun", "generate", "-m", "tests/da") == ["tests/data/"]
    assert completed("forerun", "train", "e") == ["early-exit", "eagle"]
    assert completed("forerun", "train", "eagle", "--loss", "lk") == ["lk-lambda", "lk-alpha"]
