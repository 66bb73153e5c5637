"""Represents a GGUF file as a checkpoint folder in the cache, with configuration and tokenizer as in Hugging Face.

The folder is written once for each state of the file. The tensors stay in the GGUF file; INDEX holds their locations.
"""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from glob import glob
from hashlib import sha256
from pathlib import Path
from typing import Any

from forerun import __version__
from forerun.errors import MissingWeights, ModelNotFound, TokenizerError
from forerun.fields import read_fields
from forerun.models.families import FAMILIES
from forerun.models.gguf.config import config_json, generation_json
from forerun.models.gguf.file import PART, GgufFile, TensorLocation, parts_of
from forerun.models.gguf.tensors import GgufTensor, eagle_tensors, hugging_face_tensors
from forerun.models.gguf.tokenizer import tokenizer_files
from forerun.store import cache_folder, replace_file
from forerun.text.files import PROBLEM

INDEX = "model.gguf.json"
NO_MODELS = ("mmproj", "imatrix")  # the beginnings of names of other GGUF files
FORM = 6  # the version of the files in the folder, increased when their content changes


def folder_of(path: Path) -> Path:
    """The folder that represents a GGUF file, written if it does not exist. Raises ModelError."""
    try:
        states = [(str(part), part.stat().st_size, part.stat().st_mtime_ns) for part in parts_of(path.absolute())]
    except OSError as error:
        raise ModelNotFound(f"{path} cannot be read ({error}): correct the path") from error
    digest = sha256(json.dumps([__version__, FORM, states]).encode()).hexdigest()[:16]
    folder = cache_folder("gguf") / f"{path.stem[:50]}-{digest}"  # a whole name may be too long with the digest
    if not (folder / INDEX).exists():
        file = GgufFile.read(path.absolute())
        texts = folder_files(file)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in sorted(texts, key=lambda name: name == INDEX):  # INDEX last, since it marks a complete folder
                replace_file(folder / name, texts[name].encode())
        except OSError as error:
            fix = "free space there, or let XDG_CACHE_HOME name a folder that can be written"
            raise ModelNotFound(f"{folder}, which represents {path}, cannot be written ({error}): {fix}") from error
    return folder


def choose_file(folder: Path, number_format: str | None, name: str) -> Path | None:
    """The GGUF file in a folder with `number_format`, such as "Q4_K_M", in its name; None without GGUF files.

    The folders in it are searched too, but not those inside them, which may be a whole disk. For a split model it is
    the first part. `name` is the user's name of the folder. Raises ModelNotFound unless one file matches.
    """
    paths = (folder / file for pattern in ("*.gguf", "*/*.gguf") for file in glob(pattern, root_dir=folder))
    files = sorted(path for path in paths if not path.name.startswith(NO_MODELS))
    files = [path for path in files if (part := PART.fullmatch(path.name)) is None or int(part[2]) == 1]
    matching = [path for path in files if number_format is None or number_format.lower() in path.name.lower()]
    if len(matching) > 1 or (files and not matching):
        names = ", ".join(path.name for path in files[:8])
        raise ModelNotFound(
            f"{name} has the files {names}: choose one by its format, as in {name}:Q4_K_M, or name the file"
        )
    return matching[0] if matching else None


def folder_files(file: GgufFile) -> dict[str, str]:
    """The contents of the files in the folder, by file name."""
    config = config_json(file)
    family = FAMILIES.get(config["architectures"][0])
    tensors = eagle_tensors(file) if family is None else hugging_face_tensors(file, family)
    return {
        "config.json": json.dumps(config, indent=2),
        "generation_config.json": json.dumps(generation_json(file), indent=2),
        INDEX: json.dumps(tensors, default=index_entry),  # `asdict` copies deeply, in three times the time
        **tokenizer_or_problem(file),
    }


def index_entry(value: object) -> object:
    """The fields of a tensor or of its location; of what else JSON does not know, such as a path, the text."""
    return {each.name: getattr(value, each.name) for each in fields(value)} if is_dataclass(value) else str(value)


def tokenizer_or_problem(file: GgufFile) -> dict[str, str]:
    """The files of the tokenizer or, if it is not supported, a file with the error, raised when it is needed."""
    try:
        return tokenizer_files(file)
    except TokenizerError as error:
        return {PROBLEM: str(error)}


def stored_tensors(folder: Path) -> dict[str, GgufTensor]:
    """The tensors of a GGUF file by Hugging Face's names, from the folder that represents it."""
    entries = read_fields(folder / INDEX, MissingWeights, MissingWeights).values
    try:
        return {name: tensor_of(entry) for name, entry in entries.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise MissingWeights(f"{folder / INDEX} is damaged ({error!r}): remove {folder} and try again") from error


def tensor_of(entry: dict[str, Any]) -> GgufTensor:
    """The tensor of an entry in INDEX."""
    locations = tuple(
        TensorLocation(**{**each, "file": Path(each["file"]), "shape": tuple(each["shape"])})
        for each in entry["locations"]
    )
    return GgufTensor(**{**entry, "shape": tuple(entry["shape"]), "locations": locations})
