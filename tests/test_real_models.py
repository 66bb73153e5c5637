"""docs/real-models.md is true: its table is that of the code and of the tests, and its commands and Python run.

They run with small models of the same families under the names of the published ones. A stand-in for the hub hands them
out by the patterns that it is asked for; nothing is fetched.
"""

import re
import shlex
import shutil
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils._paths import filter_repo_objects
from typer.testing import CliRunner

from forerun import cli
from forerun.kernels.build import NoKernels
from forerun.kernels.library import library
from forerun.models.config import read_config
from forerun.models.families import FAMILIES
from forerun.models.gguf.config import ARCHITECTURES
from forerun.models.inside import INSIDE
from forerun.models.quantized.scheme import METHODS
from heads.modules import shipped_with
from kit.checkpoints import ROOT, SMALL, TARGET, read_json, rewritten
from kit.gguf_files import metadata_of, stories, vocabulary, write_gguf
from kit.quantized_folders import write_quantized
from kit.sparse import DENSE, write_architecture, write_sparse
from kit.sparse import FAMILIES as SPARSE
from kit.unchecked import unchecked
from models.test_families import CASES
from models.test_gguf import CASES as FILES
from models.test_quantized_folders import FAMILIES as QUANTISED
from test_docs import blocks

PAGE = ROOT / "docs" / "real-models.md"
TEXT = PAGE.read_text(encoding="utf-8")
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
NAME = {family.name: architecture for architecture, family in FAMILIES.items()}
SHORTER = {  # by command: options that make it short, and its answers those of every run
    "generate": ("--max-tokens", "8", "--seed", "1"),
    "chat": ("--max-tokens", "8", "--seed", "1"),
    "prove": ("--max-tokens", "8", "--num-prompts", "1", "--num-texts", "100"),
    "models": (),
}


def table(heading: str) -> list[dict[str, str]]:
    """The rows of the table that has a column of this heading."""
    (lines,) = (found for found in re.findall(r"(?:^\|.*\n)+", TEXT, re.MULTILINE) if f"| {heading} |" in found)
    head, _, *rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines.splitlines()]
    return [dict(zip(head, row, strict=True)) for row in rows]


def names(cell: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)


ROWS = table("`architectures`")


def test_every_family_of_the_code_has_its_row_and_no_other() -> None:
    assert sorted(name for row in ROWS for name in names(row["`architectures`"])) == sorted(FAMILIES)
    assert sorted(name for row in table("its language model") for name in names(row["model"])) == sorted(INSIDE)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["family"])
def test_every_entry_of_a_row_is_tested(row: dict[str, str], tmp_path: Path) -> None:
    """Its GGUF, quantised folders, devices and tests are those of the tests' tables and of the code."""
    architectures = set(names(row["`architectures`"]))

    def listed(families: Any) -> bool:
        return any(NAME[family] in architectures for family in families)

    files = {(gguf, NAME[family]) for gguf, family, _ in FILES.values()}
    assert set(names(row["GGUF"])) == {gguf for gguf, name in files if name in architectures} <= ARCHITECTURES.keys()
    quantised = "all but MXFP4" if listed(QUANTISED) else "MXFP4" if listed(["gpt_oss"]) else ""
    assert row["quantised folders"] == quantised
    config = read_config(write_architecture(tmp_path / "target", min(architectures)))
    assert row["trained"] == ("yes" if config.is_plain and not config.experts and not config.sinks else "")
    logits, laws = listed(case.family for case in CASES), listed([*SPARSE, *DENSE])
    tests = ["logits"] * logits + ["every drafter"] * listed(["llama"]) + ["formats"] * laws
    assert row["tested by"].split("; ")[0] == (", ".join(tests) or "the row of Qwen2")


def test_every_method_of_quantised_folders_has_its_row() -> None:
    assert {name for row in table("`quant_method`") for name in names(row["`quant_method`"])} == METHODS.keys()


def qwen3(folder: Path, **sizes: Any) -> Path:
    """A random Qwen3."""
    rope = {"rope_type": "default", "rope_theta": 1e6}
    form = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 32, "rope_parameters": rope}
    write_sparse(folder, "qwen3_moe", **form | {"max_position_embeddings": 8192, "intermediate_size": 96} | sizes)
    return talking(folder)


def talking(folder: Path) -> Path:
    """With a template for conversations."""
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def longer(source: Path, folder: Path) -> Path:
    """A model of the stories, with positions for more tokens."""
    shutil.copytree(source, folder)
    return talking(rewritten(folder, {}, {"max_position_embeddings": 8192}))


def in_gguf(folder: Path) -> Path:
    """A repository with a Qwen3 in two formats, of which one is called by a mixture's name."""
    source, number_formats = qwen3(folder / "source"), {"Q4_K_M": "Q4_1", "Q8_0": "Q8_0"}
    for name, number_format in number_formats.items():
        metadata = metadata_of(read_json(source / "config.json")) | vocabulary(TARGET)
        write_gguf(source, folder / f"qwen3-{name}.gguf", "qwen3", metadata, number_format)
    shutil.rmtree(source)
    return folder


def with_module(folder: Path) -> Path:
    """A MiMo, which ships a module for multi-token prediction."""
    source = folder.with_name("MiMo without a module")
    write_architecture(source, "MiMoForCausalLM", max_position_embeddings=8192)
    return shipped_with(source, folder, 1, "mimo")


def quantised(folder: Path, kind: str) -> Path:
    """A Qwen3 in a quantised folder of this kind."""
    source = qwen3(folder.with_name(f"{folder.name}, whole"), hidden_size=128, intermediate_size=256)
    write_quantized(source, folder, kind)
    return talking(folder)


def several(folder: Path) -> Path:
    """A folder with a file for each of two formats."""
    folder.mkdir(parents=True)
    for number_format in ("Q4_K_M", "Q8_0"):
        stories(folder / f"stories-{number_format}.gguf", "Q4_1" if number_format == "Q4_K_M" else number_format)
    return folder


HUB: dict[str, Callable[[Path], Path]] = {  # what stands for the published models
    "Qwen/Qwen3-4B": qwen3,
    "Qwen/Qwen3-0.6B": lambda folder: qwen3(folder, num_hidden_layers=2),
    "Qwen/Qwen3-4B-Base": qwen3,
    "Qwen/Qwen3-0.6B-Base": lambda folder: qwen3(folder, num_hidden_layers=2),
    "meta-llama/Llama-3.1-8B-Instruct": lambda folder: longer(TARGET, folder),
    "meta-llama/Llama-3.2-1B-Instruct": lambda folder: longer(SMALL, folder),
    "XiaomiMiMo/MiMo-7B-Base": with_module,
    "unsloth/Qwen3-4B-GGUF": in_gguf,
    "unsloth/Qwen3-0.6B-GGUF": in_gguf,
}
HERE: dict[str, Callable[[Path], Path]] = {  # what the page takes to be on the reader's machine
    "models/smollm2-135m-instruct.Q4_1.gguf": lambda file: stories(file, "Q4_1"),
    "models/folder-of-files": several,
    "models/mine": lambda folder: Path(shutil.copytree(TARGET, folder)),
    "models/qwen3-8b-awq": lambda folder: quantised(folder, "awq, 64"),
    "models/qwen3-0.6b-gptq-int4": lambda folder: quantised(folder, "gptq, 128"),
    "prompts.txt": lambda file: Path(shutil.copy(ROOT / "tests" / "data" / "prompts.txt", file)),
}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that a reader of the page works in; what they download comes from HUB."""
    root = tmp_path_factory.mktemp("reader")
    (root / "models").mkdir()
    with suppress(NoKernels):  # found where they are kept, before the reader has a cache of their own
        library()

    def download(name: str, allow_patterns: list[str], ignore_patterns: list[str], revision: None = None) -> str:
        whole, fetched = root / "hub" / name, root / "fetched" / name
        if not whole.exists():
            whole.parent.mkdir(parents=True, exist_ok=True)
            HUB[name](whole)
        files = [path.name for path in whole.iterdir()]
        fetched.mkdir(parents=True, exist_ok=True)
        for each in filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns):
            shutil.copyfile(whole / each, fetched / each)
        return str(fetched)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(root / "hub cache"))
        patch.setattr(huggingface_hub, "snapshot_download", download)
        yield root


def make(text: str) -> None:
    """Make what a command or program names and the page takes to be there."""
    for name, maker in HERE.items():
        if name in text and not Path(name).exists():
            maker(Path(name))


def run(arguments: list[str]) -> str:
    """What a command of forerun's writes to standard output."""
    done = CliRunner().invoke(cli.app, arguments, input="Once upon a time\n", env={"NO_COLOR": "1"})
    assert done.exit_code == 0, done.output
    return done.stdout


def run_forerun(arguments: list[str]) -> None:
    """It runs and prints something, and prints the same without its drafter."""
    command = arguments[0]
    arguments = [*arguments, *SHORTER[command]]
    output = run(arguments)
    assert output.strip(), arguments
    if command in ("generate", "chat") and "--draft" in arguments:
        at = arguments.index("--draft")
        assert run(arguments[:at] + arguments[at + 2 :]) == output


def run_hf(arguments: list[str]) -> None:
    """As Hugging Face's own command does: a folder is fetched; there is no login here."""
    if arguments[0] == "download":
        _, name, option, folder = arguments
        assert option == "--local-dir"
        shutil.copytree(huggingface_hub.snapshot_download(name, allow_patterns=["*"], ignore_patterns=[]), folder)
    else:
        assert arguments == ["auth", "login"]


def run_pip(arguments: list[str]) -> None:
    """What is to be installed is there: the package and its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    command, package = arguments
    wanted = re.fullmatch(r"([\w-]+)\[([\w,-]+)\]", package)
    assert command == "install"
    assert wanted
    assert wanted[1] == project["name"]
    assert set(wanted[2].split(",")) <= project["optional-dependencies"].keys()


RUN = {"forerun": run_forerun, "hf": run_hf, "pip": run_pip}


@pytest.mark.parametrize("block", [body for body, _ in blocks(PAGE, "sh")], ids=lambda body: body.splitlines()[0][:50])
def test_commands_run_line_by_line(block: str, reader: Path) -> None:
    with unchecked():
        for line in block.replace("\\\n", " ").splitlines():
            make(line)
            program, *arguments = shlex.split(line, comments=True)
            RUN[program](arguments)


def test_python_runs_from_top_to_bottom(reader: Path) -> None:
    scope: dict[str, object] = {"__name__": "docs"}
    with unchecked():
        for body, _ in blocks(PAGE, "python"):
            make(body)
            exec(compile(body, PAGE.name, "exec"), scope)
