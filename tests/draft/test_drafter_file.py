"""`python:FILE.py:CLASS`: what is wrong with a file is named, and only a user may name a file, since it is executed."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from draft.test_auto import put
from forerun import LLM
from forerun.draft.auto import RECORD, resolve_auto, resolved_draft
from forerun.draft.spec import DraftSpec, parse_spec
from forerun.drafters import draft_label, plan_drafter
from forerun.errors import CodeRefused, DrafterFileError, ForerunError, UnknownDrafter
from forerun.models.loading import Blueprint
from kit.checkpoints import DATA, ROOT, TARGET
from kit.command import command, refusal
from kit.unchecked import unchecked
from law.drafters import context

AGAIN = (DATA / "again.py").read_text(encoding="utf-8")
EVIL = "import pathlib; pathlib.Path(__file__).with_name('executed').touch()\nclass Evil: ...\n"


def written(folder: Path, text: str, name: str = "mine.py") -> Path:
    (folder / name).write_text(text)
    return folder / name


def test_the_page_shows_the_file_that_the_tests_run() -> None:
    assert f"```python\n{AGAIN}```\n" in (ROOT / "docs" / "write-a-drafter.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("source", "argument", "problem"),
    [
        (None, ":A", r"/mine\.py cannot be read \(No such file or directory\): name the file as seen from the current"),
        ("x = 1 / 0\n", ":A", "the file raised ZeroDivisionError: division by zero"),
        ("raise SystemExit(3)\n", ":A", "the file raised SystemExit: 3"),
        ("def (:\n", ":A", "the file raised SyntaxError: invalid syntax"),
        ("x = '\0'\n", ":A", "the file raised (SyntaxError|ValueError): source code string cannot contain null bytes"),
        ("import no_such_package\n", ":A", "the file raised ModuleNotFoundError: No module named 'no_such_package'"),
        ("x = 1\n", ":A", r"mine\.py has no class A: it defines no class: name a class of the file"),
        ("class Bee: ...\nclass C: ...\nA = 5\n", ":A", "has no class A: it has Bee, C: name a class of the file"),
        ("class Phrases: ...\n", ":Phrase", "has no class Phrase: it has Phrases; did you mean Phrases?"),
        (
            "class A:\n    def __init__(self, a, b, c=1, *d): ...\n",
            ":A",
            r"A\(\) lacks the arguments a, b: give defaults",
        ),
        ("class A:\n    def __init__(self, *, a): ...\n", ":A", r"A\(\) lacks the arguments a: give defaults"),
        ("class A:\n    def __init__(self): raise KeyError('k')\n", ":A", r"A\(\) raised KeyError: 'k'"),
        (
            "class A:\n    taps = ()\n    def observe(self): ...\n",
            ":A",
            "A is not a drafter: it has no names, propose, outl",
        ),
        (AGAIN, "", "the argument is a Python file and a class in it, as in python:mine.py:MyDrafter"),
        (AGAIN, ":", "the argument is a Python file and a class in it"),
        (None, "\0:A", r"cannot be read \(embedded null byte\): name the file"),
        (AGAIN, ":1x", "the argument is a Python file and a class in it"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_reason(
    source: str | None, argument: str, problem: str, tmp_path: Path
) -> None:
    if source is not None:
        written(tmp_path, source)
    before = set(sys.modules)
    spec = DraftSpec("python", argument=f"{tmp_path / 'mine.py'}{argument}")
    with pytest.raises((DrafterFileError, UnknownDrafter), match=problem) as raised:
        plan_drafter(str(spec), context())
    assert str(raised.value).startswith(f"drafter {str(spec)!r}: ")
    if "raised" in problem:
        assert not {name for name in set(sys.modules) - before if "drafter" in name} or "A()" in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] in ([], ["mine.py"])  # without compiled files


@pytest.mark.parametrize(("draft", "problem"), [("python", "the argument is"), ("python[ngram]", "takes no list")])
def test_a_specification_without_a_file_is_refused(draft: str, problem: str) -> None:
    with pytest.raises(UnknownDrafter, match=problem):
        plan_drafter(draft, context())


def test_the_command_line_shows_the_traceback_of_the_file_and_one_line(tmp_path: Path) -> None:
    file = written(tmp_path, "def find():\n    return table['x']\n\ntable = {}\nfind()\n")
    result = command("generate", "-m", str(TARGET), "--draft", f"python:{file}:A", "Once")
    assert (result.exit_code, result.stdout) == (2, "")
    *trace, line = result.stderr.splitlines()
    assert line == f"error: drafter 'python:{file}:A': the file raised KeyError: 'x'"
    assert trace[:3] == ["Traceback (most recent call last):", f'  File "{file}", line 5, in <module>', "    find()"]
    assert not any("drafter_file.py" in each for each in trace)
    broken = written(tmp_path, "x = 1\ndef (:\n")
    result = command("generate", "-m", str(TARGET), "--draft", f"python:{broken}:A", "Once")
    assert result.stderr.startswith(f'  File "{broken}", line 2\n')


def test_the_constructor_gets_the_tokenizer_if_it_has_such_a_parameter_and_nothing_else(tmp_path: Path) -> None:
    extended = "\nclass Mine(Again):\n    def __init__(self, least=2, *more, tokenizer, **rest):\n        self.got = "
    file = written(tmp_path, AGAIN + extended + "least, more, tokenizer, rest\n")
    plan = plan_drafter(f"python:{file}:Mine", context())
    drafter = plan.build({}, None, None)  # type: ignore[arg-type]
    assert drafter.got == (2, (), context().tokenizer, {})


def test_a_file_is_executed_once_until_it_changes_and_each_engine_has_a_drafter_of_its_own(tmp_path: Path) -> None:
    counting = (
        f"{AGAIN}\nimport pathlib\nwith pathlib.Path(__file__).with_name('log').open('a') as log: log.write('x')\n"
    )
    draft = f"python:{written(tmp_path, counting)}:Again"
    first, second = plan_drafter(draft, context()), plan_drafter(draft, context())
    drafters = [plan.build({}, None, None) for plan in (first, second)]  # type: ignore[arg-type]
    assert drafters[0] is not drafters[1]
    assert type(drafters[0]) is type(drafters[1])
    assert (tmp_path / "log").read_text() == "x"
    written(tmp_path, counting + "# changed\n")
    assert plan_drafter(draft, context()).fingerprint() != first.fingerprint() == second.fingerprint()
    assert (tmp_path / "log").read_text() == "xx"


def test_a_file_imports_its_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    written(tmp_path, AGAIN, "drafter_that_is_imported.py")
    file = written(tmp_path, "from drafter_that_is_imported import Again\nclass Mine(Again): ...\n")
    plan = plan_drafter(f"python:{file}:Mine", context())
    drafter = plan.build({}, None, None)  # type: ignore[arg-type]
    assert [each.__name__ for each in type(drafter).mro()[:2]] == ["Mine", "Again"]
    assert sys.path[-1] == str(tmp_path.resolve())


def test_reports_call_it_by_its_class(tmp_path: Path) -> None:
    file = written(tmp_path, AGAIN, "a, [b].py")
    draft = f'python:"{file}:Again"'
    assert draft_label(draft) == "Again"
    assert draft_label(f"mix[ngram,{draft},{draft}]") == "mix[ngram,Again,Again]"
    with unchecked():
        llm = LLM(str(TARGET), f"mix[ngram,{draft},{draft}]", speculation=2)
    assert (llm.draft_name, *llm.drafter_names) == (
        "mix[ngram,Again,Again]", "ngram", "Again", "Again (2)", "merged",
    )  # fmt: skip
    with unchecked():
        assert LLM(str(TARGET), draft, speculation=2).drafter_names == ("again",)


@pytest.fixture
def target(tmp_path: Path) -> Blueprint:
    """In a folder with a file that must not be executed."""
    written(tmp_path, EVIL, "evil.py")
    return Blueprint.of(str(shutil.copytree(TARGET, tmp_path / "target")))


def record(target: Blueprint, drafter: str, argument: str, mixed_with: str | None, folder: str = "heads") -> Path:
    """A record of this drafter in the target's folder."""
    values: dict[str, object] = {"drafter": drafter, "argument": argument, "mixed_with": mixed_with, "speed_up": 9.0}
    return put(target.folder / folder, target, **values) / RECORD


@pytest.mark.parametrize(
    ("drafter", "argument", "mixed_with"),
    [
        ("python", "{evil}:Evil", None),
        ("suffix", "", "python:{evil}:Evil"),
        ("suffix", "", "mix[ngram,python:{evil}:Evil]"),
    ],
)
@pytest.mark.parametrize("draft", ["auto", "mix[ngram,auto]", "cascade[ngram,auto]"])
def test_a_record_that_names_a_file_is_refused_and_nothing_is_executed(
    drafter: str, argument: str, mixed_with: str | None, draft: str, target: Blueprint
) -> None:
    evil = target.folder.parent / "evil.py"
    mixed_with = None if mixed_with is None else mixed_with.format(evil=evil)
    path = record(target, drafter, argument.format(evil=evil), mixed_with)
    with pytest.raises(CodeRefused, match=r"would run a Python file.*: delete this file") as raised:
        LLM(str(target.folder), draft)
    assert str(raised.value).startswith(f"{path} names the drafter '")
    assert not evil.with_name("executed").exists()


@pytest.mark.parametrize(
    ("argument", "folder"), [('x",python:{evil}:Evil,ngram,suffix:"', "heads"), ("", 'x",python:evil.py:Evil,suffix:"')]
)
def test_quotation_marks_in_a_record_or_a_folder_cannot_smuggle_a_file(
    argument: str, folder: str, target: Blueprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stay in the argument of the drafter that the record names."""
    evil = target.folder.parent / "evil.py"
    monkeypatch.chdir(evil.parent)
    record(target, "suffix", argument.format(evil=evil), "ngram", folder)
    for spec in (str(resolve_auto(parse_spec("mix[ngram,auto]"), target)), str(resolved_draft("auto", target))):
        assert [(member.name, member.members) for member in parse_spec(spec).members] == [("ngram", ()), ("suffix", ())]
        assert '"' in (parse_spec(spec).members[1].argument or "")
    assert not evil.with_name("executed").exists()


@pytest.mark.parametrize("words", [("generate", "Once"), ("bench",), ("serve",), ("prove",)])
def test_a_settings_file_cannot_name_a_file(words: Sequence[str], tmp_path: Path) -> None:
    """Such a file may come with a model. The same on the command line is possible."""
    evil = written(tmp_path, EVIL, "evil.py")
    for draft in (f"python:{evil}:Evil", f"mix[ngram,python:{evil}:Evil]"):
        settings = written(tmp_path, f"model = '{TARGET}'\ndraft = '{draft}'\n", "forerun.toml")
        line = refusal(*words, "--config", str(settings))
        assert line.startswith(f"error: {settings} names the drafter '{draft}': it would run a Python file, which only")
        assert line.endswith(": leave it out there, and write it after --draft\n")
    assert not (tmp_path / "executed").exists()


def test_a_request_cannot_name_a_file(tmp_path: Path) -> None:
    evil = written(tmp_path, EVIL, "evil.py")
    from forerun.serve.parse import speculation_of

    with unchecked():
        llm = LLM(str(TARGET), "mix[ngram,suffix]", speculation=2)
    for value in ({"drafter": f"python:{evil}:Evil"}, f"python:{evil}:Evil"):
        with pytest.raises(ForerunError, match=r"is not a drafter of this engine; it has: ngram|use True, False"):
            llm.generate("Once", speculation=speculation_of(value))
    assert not (tmp_path / "executed").exists()


def test_a_file_whose_execution_was_interrupted_is_executed_again(tmp_path: Path) -> None:
    waiting = "import pathlib\nif pathlib.Path(__file__).with_name('wait').exists(): raise KeyboardInterrupt\n"
    draft = f"python:{written(tmp_path, waiting + AGAIN)}:Again"
    (tmp_path / "wait").touch()
    with pytest.raises(KeyboardInterrupt):
        plan_drafter(draft, context())
    (tmp_path / "wait").unlink()
    assert type(plan_drafter(draft, context()).build({}, None, None)).__name__ == "Again"  # type: ignore[arg-type]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have names in Unicode only")
def test_a_folder_may_have_a_name_that_is_not_unicode(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"\xff\xfe")
    folder.mkdir()
    draft = f"python:{written(folder, AGAIN)}:Again"
    assert plan_drafter(draft, context()).build({}, None, None).names == ("again",)  # type: ignore[arg-type]


def test_a_class_whose_parameters_are_unknown_is_called_without_arguments(tmp_path: Path) -> None:
    file = written(tmp_path, f"{AGAIN}\nclass Mine(dict, Again): ...\nclass Other(dict): ...\n")
    assert plan_drafter(f"python:{file}:Mine", context()).build({}, None, None).names  # type: ignore[arg-type]
    with pytest.raises(DrafterFileError, match="Other is not a drafter: it has no taps, names"):
        plan_drafter(f"python:{file}:Other", context())
