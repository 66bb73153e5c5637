"""Keys: who may ask. The file has one key a line, with a name in front of it if wanted; # begins a comment.

A key is compared with all keys of the file, each in constant time, so that the time of a refusal tells nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from forerun.errors import InvalidRequest
from forerun.serve.problems import ApiError

log = logging.getLogger(__name__)
SCHEME = "bearer"
WANTED = "write one key a line, with a name in front if wanted"


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """The tenants, by the digests of their keys. Without any, everybody is one tenant without a name."""

    tenants: Mapping[bytes, str] = field(default_factory=dict, repr=False)

    @classmethod
    def read(cls, path: Path) -> ApiKeys:
        """The keys of a file. Raises InvalidRequest where it cannot be read or has none."""
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, ValueError) as error:
            raise InvalidRequest("api_keys", f"{path} cannot be read ({type(error).__name__}): {WANTED}.") from error
        tenants: dict[bytes, str] = {}
        for number, line in enumerate(lines, start=1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            if len(words) > 2:
                raise InvalidRequest("api_keys", f"{path}, line {number}, has {len(words)} words: {WANTED}.")
            if not (words[-1].isascii() and words[-1].isprintable()):
                raise InvalidRequest("api_keys", f"{path}, line {number}: a key is of ASCII characters: {WANTED}.")
            key = digest(words[-1])
            if key in tenants:
                raise InvalidRequest("api_keys", f"{path}, line {number}, has a key that is there already.")
            tenants[key] = words[0] if len(words) == 2 else f"key-{key.hex()[:12]}"
        if not tenants:
            raise InvalidRequest("api_keys", f"{path} holds no key: {WANTED}.")
        return cls(tenants)

    def tenant(self, authorization: str | None) -> str:
        """Whose request it is, by its header. Raises the ApiError for 401 where a key is wanted and not given."""
        if not self.tenants:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        given, found = digest(key.strip()), None
        for known, name in self.tenants.items():
            if hmac.compare_digest(known, given):
                found = name
        if scheme.lower() != SCHEME or found is None:
            problem = "there is no API key" if not authorization else "the API key is not a known one"
            raise ApiError(
                401, f"{problem}: send Authorization: Bearer KEY, or x-api-key: KEY.", code="invalid_api_key"
            )
        return found


def warn_of_readers(path: Path) -> None:
    """Warn where other users of this machine may read a file of keys."""
    with suppress(OSError):
        if os.name == "posix" and path.stat().st_mode & 0o044:
            log.warning("Others on this machine can read the keys in %s: chmod 600 keeps them from it.", path)


def digest(key: str) -> bytes:
    """A key as it is kept and compared: of fixed length."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
