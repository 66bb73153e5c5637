"""Imports go one way, every module says what it is for, and the core does without what it does not need."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from kit.checkpoints import SRC, TARGET
from kit.command import apart

MODULES = sorted((SRC / "forerun").rglob("*.py"))
# A part may import itself and the parts on earlier lines; parts on one line do not know each other.
ORDER = """
    annotations errors guard did_you_mean __version__
    store
    limits
    device fields kernels progress shape report stored streams settings_file
    tree config machine economy
    sampling cache text
    models
    verify
    draft
    heads
    drafters
    accept
    request
    control
    engine
    ecosystem output catalog
    llm
    async_llm
    serve prove trace inside
    replicas
    card
    bench
    tune
    traffic train
    remote
    demo
    options
    commands
    cli
    __init__ __main__
"""
RANK = {part: rank for rank, line in enumerate(ORDER.strip().splitlines()) for part in line.split()}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def part_of(path: Path) -> str:
    """The file or folder directly below forerun that a module belongs to."""
    return path.relative_to(SRC / "forerun").parts[0].removesuffix(".py")


def imported_parts(path: Path) -> Iterator[tuple[int, str]]:
    """(line, part) of every import of forerun's own, also those for type checkers and inside functions."""
    for node in ast.walk(parsed(path)):
        names: list[str] = []
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            assert node.level == 0, f"{path}:{node.lineno}: a relative import; write forerun. in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from ((node.lineno, name.split(".")[1]) for name in names if name.startswith("forerun."))


def test_imports_go_one_way_and_a_docstring_says_why_the_file_exists() -> None:
    for path in MODULES:
        own = part_of(path)
        assert own in RANK, f"{own} has no place in the import order; give it one in ORDER"
        for line, part in imported_parts(path):
            assert part in RANK, f"{path}:{line}: import {part} from the module that defines it"
            assert part == own or RANK[part] < RANK[own], f"{path}:{line}: {own} may not import {part}"
        assert ast.get_docstring(parsed(path)), f"{path} has no module docstring"


def module_name(path: Path) -> str:
    """What a module is imported by."""
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


def circles(imports: dict[str, set[str]]) -> list[set[str]]:
    """The groups of modules each of which needs, directly or not, all others of its group."""
    reached: dict[str, set[str]] = {}
    for start in imports:
        seen, left = set[str](), [start]
        while left:
            for module in imports[left.pop()] - seen:
                seen.add(module)
                left.append(module)
        reached[start] = seen
    groups = [{other for other in seen if module in reached[other]} for module, seen in reached.items()]
    return [group for i, group in enumerate(groups) if group and group not in groups[:i]]


def test_no_modules_import_each_other_for_types_either() -> None:
    names = {module_name(path): path for path in MODULES}
    imports = {}
    for name, path in names.items():
        nodes = [n for n in ast.walk(parsed(path)) if isinstance(n, ast.ImportFrom)]
        targets = {f"{n.module}.{alias.name}" for n in nodes for alias in n.names} | {n.module for n in nodes}
        imports[name] = {target for target in targets if target in names} - {name, "forerun"}
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]
    assert circles(imports) == []


def test_importing_forerun_loads_neither_transformers_nor_a_server() -> None:
    unwanted = {"transformers", "fastapi", "starlette", "pydantic", "uvicorn"}
    code = f"import sys, forerun, forerun.cli; print(*({unwanted!r} & set(sys.modules)))"
    run = apart("-c", code)
    assert (run.returncode, run.stdout.split()) == (0, [])


WITHOUT_EXTRAS = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("jaxtyping", "beartype", "huggingface_hub", "transformers"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocker())
from forerun import LLM, ForerunError, SamplingParams
llm = LLM(sys.argv[1], "ngram", kernels="torch", dtype="float32")
print(repr(llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].text))
try:
    LLM("owner/name")
except ForerunError as error:
    print(type(error).__name__, error)
"""


def test_it_generates_without_jaxtyping_and_without_the_hub() -> None:
    run = apart("-c", WITHOUT_EXTRAS, str(TARGET))
    assert run.returncode == 0, run.stderr
    text, error = run.stdout.splitlines()
    assert text == "', there was a'"
    assert error.startswith("MissingPackage owner/name is not a local folder")
    assert "pip install huggingface_hub" in error
