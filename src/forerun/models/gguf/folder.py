"""A GGUF file as a checkpoint folder: configuration and tokenizer as Hugging Face files, with the weights in place.

The folder is in forerun's cache and is written once for each state of the file. All readers of checkpoints can read it;
the tensors stay in the GGUF file, and INDEX holds their locations.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any

from forerun import __version__
from forerun.errors import MissingWeights, ModelNotFound, TokenizerError
from forerun.fields import read_fields
from forerun.models.families import FAMILIES
from forerun.models.gguf.config import config_json, generation_json
from forerun.models.gguf.file import PART, GgufFile, Place, parts_of
from forerun.models.gguf.tensors import GgufTensor, eagle_tensors, hugging_face_tensors
from forerun.models.gguf.tokenizer import tokenizer_files
from forerun.store import cache_folder, replace_file
from forerun.text.files import PROBLEM

INDEX = "model.gguf.json"
FORM = 4  # version of the files in the folder, increased with every change of their content


def folder_of(path: Path) -> Path:
    """The folder that represents a GGUF file, written if it does not exist. Raises ModelError."""
    states = [(str(part), part.stat().st_size, part.stat().st_mtime_ns) for part in parts_of(path.absolute())]
    digest = sha256(json.dumps([__version__, FORM, states]).encode()).hexdigest()[:16]
    folder = cache_folder("gguf") / f"{path.stem}-{digest}"
    if not (folder / INDEX).exists():
        file = GgufFile.read(path.absolute())
        texts = files_of(file)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in sorted(texts, key=lambda name: name == INDEX):  # last, since it marks a complete folder
                replace_file(folder / name, texts[name].encode())
        except OSError as error:
            cure = "free space there, or let XDG_CACHE_HOME name a folder that can be written"
            raise ModelNotFound(f"{folder}, where {path} is unpacked, cannot be written ({error}): {cure}") from error
    return folder


def choose_file(folder: Path, wanted: str | None, name: str) -> Path | None:
    """The GGUF file in a folder whose name contains the format `wanted`, such as "Q4_K_M"; None without GGUF files.

    Of a split model it is the first part. `name` is the user's name of the folder. Raises ModelNotFound if several
    files or none match.
    """
    files = [path for path in sorted(folder.rglob("*.gguf")) if not path.name.startswith(("mmproj", "imatrix"))]
    files = [path for path in files if (part := PART.fullmatch(path.name)) is None or int(part[2]) == 1]
    matching = [path for path in files if wanted is None or wanted.lower() in path.name.lower()]
    if len(matching) > 1 or (files and not matching):
        names = ", ".join(path.name for path in files[:8])
        raise ModelNotFound(f"{name} has {names}: choose one by its format, as in {name}:Q4_K_M, or name the file")
    return matching[0] if matching else None


def files_of(file: GgufFile) -> dict[str, str]:
    """The contents of the files in the folder, by name."""
    config = config_json(file)
    family = FAMILIES.get(config["architectures"][0])
    tensors = eagle_tensors(file) if family is None else hugging_face_tensors(file, family)
    return {
        "config.json": json.dumps(config, indent=2),
        "generation_config.json": json.dumps(generation_json(file), indent=2),
        INDEX: json.dumps({name: asdict(tensor) for name, tensor in tensors.items()}, default=str),
        **tokenizer_or_problem(file),
    }


def tokenizer_or_problem(file: GgufFile) -> dict[str, str]:
    """The files of its tokenizer or, if it cannot be read, a file with the error to raise when it is needed."""
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
        raise MissingWeights(f"{folder / INDEX} is damaged ({error!r}): remove {folder}, it is made anew") from error


def tensor_of(entry: dict[str, Any]) -> GgufTensor:
    """A tensor from its entry in INDEX."""
    places = tuple(
        Place(**{**place, "file": Path(place["file"]), "shape": tuple(place["shape"])}) for place in entry["places"]
    )
    return GgufTensor(**{**entry, "shape": tuple(entry["shape"]), "places": places})
