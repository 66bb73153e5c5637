"""docs/ is true: its Python runs, its `forerun` lines parse, its links and headings exist, its JSON is JSON.

A Python block that follows the line `<!-- needs a download -->` is compiled and not run, but for those of
real-models.md, which test_real_models.py runs; one that follows `<!-- needs a server -->` is run by
tests/serve/test_serve_docs.py. The blocks of one page share their names, as a reader who goes from top to bottom would
have it.
"""

import json
import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from forerun.cli import app
from kit.checkpoints import ROOT
from test_readme import BLOCK, DOCUMENTS

NEEDS = ("<!-- needs a download -->", "<!-- needs a server -->")
PAGES = sorted((ROOT / "docs").rglob("*.md"))
EVERYWHERE = [*DOCUMENTS, *(page for page in PAGES if page not in DOCUMENTS)]
LINKED = [*EVERYWHERE, *sorted((ROOT / "benchmarks").glob("*.md"))]
TEXTS = {page: page.read_text(encoding="utf-8") for page in LINKED}
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
INLINE = re.compile(r"`(forerun [^`\n]+)`")
LONE_OPTION = re.compile(r"`(--[\w-]+)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
SHELL = {"|", ">", "2>", "<", "&&", ";"}


def blocks(page: Path, language: str) -> list[tuple[str, bool]]:
    """(body, whether it needs a download or a server) of every block in this language."""
    text = TEXTS[page]
    return [
        (found.group(2), text[: found.start()].rstrip().endswith(NEEDS))
        for found in BLOCK.finditer(text)
        if found.group(1) == language
    ]


def commands(page: Path) -> list[list[str]]:
    """The arguments of every `forerun` line in sh blocks, without what the shell does with them."""
    lines = [line for body, _ in blocks(page, "sh") for line in body.replace("\\\n", " ").splitlines()]
    words = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("forerun ")]
    return [line[: next((i for i, word in enumerate(line) if word in SHELL), None)] for line in words]


COMMANDS = [(page, line) for page in EVERYWHERE for line in commands(page)]
MENTIONS = [(page, mention) for page in EVERYWHERE for mention in INLINE.findall(TEXTS[page])]
KNOWN: dict[str, typer.core.TyperCommand] = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def command_of(line: list[str]) -> typer.core.TyperCommand:
    """The subcommand that the first words of a line name."""
    name = name_of(line)
    assert name in KNOWN, f"forerun has no command {name}"
    return KNOWN[name]


def name_of(line: list[str]) -> str:
    """The first two words where they are a command, such as bench serve; else the first."""
    return two if (two := " ".join(line[:2])) in KNOWN else line[0]


def options_of(*commands: typer.core.TyperCommand) -> set[str]:
    """The spellings of all options of these commands."""
    return {
        name for command in commands for option in command.params for name in (*option.opts, *option.secondary_opts)
    }


def slug(heading: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_there_is_something_to_check() -> None:
    assert any(blocks(page, "python") for page in PAGES)
    assert COMMANDS
    assert MENTIONS


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=lambda page: page.name)
def test_python_blocks_run_in_order(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {"__name__": "docs"}
    for body, needs_more in blocks(page, "python"):
        code = compile(body, page.name, "exec")
        if not needs_more:
            exec(code, names)


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=lambda value: getattr(value, "name", None))
def test_commands_parse(page: Path, line: list[str]) -> None:
    with command_of(line).make_context(name_of(line), line[len(name_of(line).split()) :]):
        pass


@pytest.mark.parametrize(("page", "mention"), MENTIONS, ids=lambda value: getattr(value, "name", value))
def test_commands_and_options_that_are_mentioned_exist(page: Path, mention: str) -> None:
    line = mention.split()[1:]
    named = {word for word in line[1:] if word.startswith("-")} - {"--help"}
    assert named <= options_of(command_of(line)), f"{page.name}: {mention}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_that_are_mentioned_alone_exist(page: Path) -> None:
    assert set(LONE_OPTION.findall(TEXTS[page])) <= options_of(*KNOWN.values())


def test_every_option_is_explained_somewhere() -> None:
    mentioned = {option for text in TEXTS.values() for option in re.findall(r"(?<![\w-])--[\w-]+", text)}
    for name, command in KNOWN.items():
        for option in command.params:
            spellings = {spelled for spelled in (*option.opts, *option.secondary_opts) if spelled.startswith("--")}
            assert not spellings or spellings & mentioned, f"forerun {name} {spellings}"


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(TEXTS[page]):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        goal = page if not path else (page.parent / path).resolve()
        assert goal.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in map(slug, HEADING.findall(goal.read_text(encoding="utf-8"))), f"{page.name}: {link}"


NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


@pytest.mark.parametrize("page", EVERYWHERE, ids=lambda page: str(page.relative_to(ROOT)))
def test_tests_that_are_named_exist(page: Path) -> None:
    for file, name in NAMED_TEST.findall(TEXTS[page]):
        assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), name


def test_every_complaint_has_its_source_and_its_tests() -> None:
    """In a table without an empty cell, all of whose tests are spelled so that the test above finds them."""
    lines = (ROOT / "docs" / "complaints.md").read_text(encoding="utf-8").splitlines()
    rows = [line.strip("|").split(" | ") for line in lines if line.startswith("|")][2:]
    assert len(rows) > 10
    for what, where, here, tests in rows:
        assert what.strip()
        assert here.strip()
        assert LINK.findall(where)
        assert all(NAMED_TEST.fullmatch(each) for each in tests.strip().split(", ")), tests


def test_the_rounds_that_are_shown_are_those_of_the_command_above_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Word for word; figures are left out: their last digits may differ from machine to machine."""
    page = ROOT / "docs" / "how-it-works.md"
    (line,), ((shown, _),) = commands(page), blocks(page, "text")
    monkeypatch.chdir(ROOT)
    run = CliRunner().invoke(app, line, env={"COLUMNS": "120"})
    assert run.exit_code == 0, run.output

    def words(text: str) -> str:
        return " ".join(re.sub(r"\d\.\d+", "#", text).split())

    assert words(shown) in words(run.stdout)


@pytest.mark.parametrize("page", EVERYWHERE, ids=lambda page: str(page.relative_to(ROOT)))
def test_json_is_json(page: Path) -> None:
    for body, _ in blocks(page, "json"):
        json.loads(body)
