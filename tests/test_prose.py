"""Words that hide what a thing is become fewer: a ratchet over src, lowered by whoever mends some."""

import ast
from collections import Counter
from collections.abc import Iterator

from kit.checkpoints import SRC

VAGUE = {"own", "found", "told", "said", "given", "wanted"}  # names of locals that a noun would serve better
LEAST_WORDS = 4  # of a public docstring: fewer do not state a contract
MOST = {"vague local": 2, "short docstring": 16}
Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def faults(tree: ast.Module) -> Iterator[str]:
    """What is wrong with the names and docstrings of a module, once for every place."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            stored = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            yield from ["vague local"] * len(stored & VAGUE)
        docstring = ast.get_docstring(node) if isinstance(node, Documented) else None
        if docstring and docstring.startswith("The same"):
            yield "docstring that begins with The same"
        if docstring and isinstance(node, Documented) and not node.name.startswith("_"):
            yield from ["short docstring"] * (len(docstring.split()) < LEAST_WORDS)


def test_vague_names_and_docstrings_do_not_become_more() -> None:
    counted = Counter[str]()
    for path in sorted(SRC.rglob("*.py")):
        counted.update(faults(ast.parse(path.read_text(encoding="utf-8"))))
    assert counted <= Counter(MOST), f"more than there may be: {counted - Counter(MOST)}"
    slack = {kind: most - counted[kind] for kind, most in MOST.items() if most - counted[kind] > 5}
    assert not slack, f"lower MOST by {slack}"
