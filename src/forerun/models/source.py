"""Finds the files of a checkpoint: in a folder, in the package, or on the Hugging Face hub, in this order.

The error for an unknown name suggests similar names. huggingface_hub is imported only to download files, so folders and
bundled checkpoints work without it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

from forerun.errors import InvalidRequest, MissingPackage, ModelNotFound
from forerun.fields import mistaken
from forerun.models.bundled import BUNDLED, BUNDLED_DRAFTS, BUNDLED_HEADS
from forerun.models.foreign import describe_unreadable
from forerun.models.gguf.folder import choose_file, folder_of

HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
TOKENIZER_FILES = ("*.json", "tokenizer*", "*.txt", "*.jinja")
HUB_FILES = ("*.safetensors", *TOKENIZER_FILES)
HUB_DUPLICATES = (  # copies of weights in other layouts; only chat templates are read from subfolders
    *("*/*.safetensors", "*/*.bin", "*/*.pt", "*/*.json", "*/*.txt", "tokenizer*/*"),
    "consolidated*",
)
GGUF_NAME = re.compile(r"(.+):((?:I?Q\d|F16|F32|BF16|MXFP4|UD-)\w*)", re.IGNORECASE)  # NAME:FORMAT
USUAL_FORMAT = "Q4_K_M"  # the default format of GGUF repositories
MOST_SIBLINGS = 2000  # folders that are searched for names similar to a missing one


def find_checkpoint(model: str, revision: str | None = None) -> Path:
    """The folder of `model`: an existing folder, else the bundled checkpoint of this name, else the local copy of a hub
    id at `revision`, downloaded if needed.

    Raises ModelNotFound if none of these exists, InvalidRequest for a revision of a folder or bundled checkpoint.
    """
    return find_folder(model, revision, HUB_FILES, "config.json")


def find_tokenizer(name: str) -> Path:
    """The folder of a separate tokenizer, which is found like a checkpoint but needs no weights."""
    return find_folder(name, None, TOKENIZER_FILES, "tokenizer.json")


def find_folder(
    name: str, revision: str | None, files: Sequence[str], needed: str, bundled: Iterable[str] = BUNDLED
) -> Path:
    """The folder of this name, which must contain the file `needed`; `files` are downloaded from the hub.

    A GGUF file, alone or in a folder or repository, is represented by such a folder; `NAME:FORMAT` chooses a file.
    Errors suggest the names in `bundled`.
    """
    try:
        in_gguf = None if Path(name).expanduser().exists() else GGUF_NAME.fullmatch(name)
        name, number_format = (in_gguf[1], in_gguf[2]) if in_gguf else (name, None)
        path = Path(name).expanduser()
        exists, is_a_file = path.exists(), path.is_file()
    except (OSError, RuntimeError, ValueError) as error:  # a name too long, no permission
        raise ModelNotFound(f"{name[:200]!r} cannot be looked up ({error}): name another folder") from error
    if not name or str(path) == path.anchor:
        raise ModelNotFound(f"{name!r} names no model: name a folder that holds {needed}, or a hub id as owner/name")
    if is_a_file and path.suffix == ".gguf":
        return folder_of(path)
    if is_a_file:
        raise ModelNotFound(f"{path} {mistaken(path) or f'is a file: name the folder that holds {needed}'}")
    if not exists and path.suffix == ".gguf":
        raise ModelNotFound(f"there is no file {path}: correct the path, or name a hub id, as owner/name:Q4_K_M")
    if not exists and name in BUNDLED:
        path, exists = BUNDLED[name], True
        if not path.exists():
            raise ModelNotFound(f"{name} should be in the package, but {path} is missing: install forerun again")
    if not exists:
        return find_on_hub(name, revision, number_format, files, needed, bundled)
    if revision is not None:
        raise InvalidRequest("revision", f"{revision!r} is only for hub ids, and {name} is a folder: leave it out.")
    has_needed = is_file(path / needed)
    file = None if has_needed and number_format is None else choose_file(path, number_format, name)
    if file is not None:
        return folder_of(file)
    if not has_needed:
        weights = " and *.safetensors" if needed == "config.json" else ""
        kind = describe_unreadable(path)
        more = f" and {kind}" if kind else f": name the folder that holds {needed}{weights}"
        raise ModelNotFound(f"{path} has no {needed}{more}")
    return path


def find_on_hub(
    name: str,
    revision: str | None,
    number_format: str | None,
    files: Sequence[str],
    needed: str,
    bundled: Iterable[str],
) -> Path:
    """The local copy of a hub id; a GGUF file if the user names its format, or if the file `needed` is not there."""
    if number_format is None:
        folder = fetch(name, revision, files, bundled)
        if is_file(folder / needed):
            return folder
    number_format = number_format or USUAL_FORMAT
    folder = fetch(name, revision, (f"*{number_format}*.gguf",), bundled)
    file = choose_file(folder, number_format, name)
    if file is None:
        problem = describe_unreadable(folder) or f"has no {needed} on the hub, and no {number_format} in GGUF"
        raise ModelNotFound(f"{name} {problem}: choose another repository, or a format, as in {name}:Q8_0")
    return folder_of(file)


def fetch(name: str, revision: str | None, files: Sequence[str], bundled: Iterable[str]) -> Path:
    """The local cache folder of a hub id, with these files, downloaded if needed.

    A name without an owner that is similar to a local name counts as a typo, so nothing is downloaded.
    """
    if name in BUNDLED_HEADS:
        raise ModelNotFound(f"{name} is a drafter for stdlib, not a model: write {BUNDLED_DRAFTS[name]} as a drafter")
    near, names = similar_names(name, bundled), ", ".join(bundled)
    others = f"bundled are {names}"
    hint = f"did you mean {' or '.join(near)}? Otherwise " if near else ""
    if not HUB_ID.fullmatch(name):
        fix = f"{hint}correct it, or use what is bundled: {names}"
        raise ModelNotFound(f"there is no folder {name}, and it is not a hub id such as owner/name: {fix}")
    if near and "/" not in name:
        fix = f"{hint}write a hub id as owner/name; {others}"
        raise ModelNotFound(f"{name} is neither a folder here nor a bundled checkpoint: {fix}")
    try:
        from huggingface_hub import errors as hub
        from huggingface_hub import snapshot_download
    except ImportError as error:
        fix = f"install it (`pip install huggingface_hub`), or name a folder; {others}"
        raise MissingPackage(
            f"{name} is not a local folder, and downloading from the hub needs huggingface_hub: {hint}{fix}"
        ) from error
    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=[*files], ignore_patterns=[*HUB_DUPLICATES])
        )
    except hub.GatedRepoError as error:
        fix = f"accept its terms at https://huggingface.co/{name}, then log in with `hf auth login`"
        raise ModelNotFound(f"{name} is gated: {fix}") from error
    except hub.RevisionNotFoundError as error:
        raise ModelNotFound(f"{name} has no revision {revision!r} on the hub: name a branch, tag or commit") from error
    except hub.RepositoryNotFoundError as error:
        fix = f"{hint}check the spelling, or log in with `hf auth login` if it is private; {others}"
        raise ModelNotFound(f"{name} is neither a folder here nor a model on the hub: {fix}") from error
    except hub.LocalEntryNotFoundError as error:
        fix = f"{hint}connect (is HF_HUB_OFFLINE set?), or run `hf download {name}` where there is a connection"
        raise ModelNotFound(f"{name} is not a local folder, and the hub cannot be reached: {fix}; {others}") from error
    except hub.HFValidationError as error:
        fix = f"{hint}correct it, or use what is bundled: {names}"
        raise ModelNotFound(f"there is no folder {name}, and as a hub id it is not valid ({error}): {fix}") from error
    except (hub.HfHubHTTPError, OSError) as error:
        fix = "try again, which continues the download"
        raise ModelNotFound(f"{name} could not be downloaded from the hub ({error}): {fix}") from error


def similar_names(name: str, bundled: Iterable[str] = BUNDLED) -> list[str]:
    """At most two bundled names or sibling folders with similar names, the most similar first."""
    path = Path(name).expanduser()
    try:
        siblings = [
            str(path.with_name(entry.name))
            for entry in islice(path.parent.iterdir(), MOST_SIBLINGS)
            if is_file(entry / "config.json")
        ]
    except (OSError, ValueError):
        siblings = []
    return get_close_matches(str(path), [*bundled, *siblings], n=2, cutoff=0.75)


def is_file(path: Path) -> bool:
    """Whether the file exists; False if it cannot be accessed."""
    try:
        return path.is_file()
    except OSError:
        return False
