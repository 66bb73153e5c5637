"""Names mean one thing: no class or type alias is defined twice, and files that source names exist."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from kit.checkpoints import SRC

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


def test_files_that_docstrings_and_comments_name_exist() -> None:
    """By the end of their path: `rules.py` is any file of this name, `verify/rules.py` one in a folder `verify`."""
    ends = {"/".join(path.parts[-n:]) for path in SRC.rglob("*.*") for n in range(1, len(path.parts))}
    named = [(path, name) for path in SRC.rglob("*.py") for name in NAMED_FILE.findall(path.read_text("utf-8"))]
    assert len(named) > 50
    assert [f"{path.relative_to(SRC)}: {name}" for path, name in named if name not in ends] == []
