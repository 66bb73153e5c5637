"""Names mean one thing: no class or type alias is defined twice, and files that are named exist."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from kit.checkpoints import ROOT, SRC

FOLDERS = ("src", "tests", "scripts", "benchmarks", "recipes", "docs")
NAMED_FILE = re.compile(r"`([\w/]+\.(?:py|cpp|hpp|js|css))`")


def defined_types(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(name, line) of the classes, wherever they stand, and of the type aliases and type variables of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name, node.lineno
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            if name[0].isupper() and not name.isupper():
                yield name, node.lineno


def test_every_class_name_is_defined_once() -> None:
    places = defaultdict(list)
    for path in sorted(SRC.rglob("*.py")):
        if path.name != "annotations.py":  # it defines stand-ins under the names of what may be missing
            for name, line in defined_types(ast.parse(path.read_text(encoding="utf-8"))):
                places[name].append(f"{path.relative_to(SRC)}:{line}")
    assert len(places) > 200
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_files_that_source_and_documents_name_exist() -> None:
    """By the end of their path: `rules.py` is any file of this name, `verify/rules.py` one in a folder `verify`."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")]
    ends = {"/".join(path.parts[-n:]) for path in files for n in range(1, len(path.relative_to(ROOT).parts) + 1)}
    pages = [*SRC.rglob("*.py"), *ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    named = [(path, name) for path in pages for name in NAMED_FILE.findall(path.read_text("utf-8"))]
    assert len(named) > 100
    assert [f"{path.relative_to(ROOT)}: {name}" for path, name in named if name not in ends] == []
