"""Access: who may ask, by the key of a request, and by the names and pages that it comes by.

A file of keys has one a line, with a name in front of it if wanted; # begins a comment. A key is compared with all keys
of the file, each in constant time, so that the time of a refusal tells nothing.

A page of another site can make its reader's browser ask a server on the reader's machine, under a name of its own that
it resolves to that machine. The browser then names the page's host in `Host`, and in `Origin` where the page came from.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path

from forerun.errors import InvalidRequest
from forerun.limits import shown
from forerun.serve.problems import ApiError

ANY = "*"
AUTHORITY = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[^\s\x00-\x1f\x7f-\x9f:/@?#,\\\[\]]+)(?::(?P<port>[0-9]{1,5}))?")
DEFAULT_PORTS = {"http": "80", "https": "443"}
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
        key_digest, tenant = digest(key.strip()), None
        for known, name in self.tenants.items():
            if hmac.compare_digest(known, key_digest):
                tenant = name
        if scheme.lower() != SCHEME or tenant is None:
            problem = "there is no API key" if not authorization else "the API key is not a known one"
            raise ApiError(
                401, f"{problem}: send Authorization: Bearer KEY, or x-api-key: KEY.", code="invalid_api_key"
            )
        return tenant


def warn_of_readers(path: Path) -> None:
    """Warn where other users of this machine may read a file of keys."""
    with suppress(OSError):
        if os.name == "posix" and path.stat().st_mode & 0o044:
            log.warning("Others on this machine can read the keys in %s: chmod 600 keeps them from it.", path)


def digest(key: str) -> bytes:
    """A key as it is kept and compared: of fixed length."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True, slots=True)
class Authority:
    """A host's name in lower case, without brackets, and its port as it was written."""

    name: str
    port: str | None

    @classmethod
    def of(cls, text: str) -> Authority | None:
        """The authority that a header names; None where it is none."""
        match = AUTHORITY.fullmatch(text.lower())
        return match and cls(match["name"].strip("[]").removesuffix("."), match["port"])

    def origin(self, scheme: str) -> tuple[str, str, str | None]:
        """The origin of pages that came from this host by the scheme."""
        return scheme, self.name, self.port or DEFAULT_PORTS.get(scheme)


@dataclass(frozen=True, slots=True)
class Hosts:
    """Whose names a server answers to. `bound` is the address that it listens on, `allowed` what its user allows.

    A server of the loopback answers to names of the loopback and to those allowed, any other one to every name unless
    some are allowed. A page may ask under the host that it came from, and from allowed hosts. Raises InvalidRequest.
    """

    bound: str
    allowed: frozenset[str]
    names: frozenset[str] = field(init=False)  # those allowed, as headers are read

    def __post_init__(self) -> None:
        authorities = {name: Authority.of(name) for name in self.allowed - {ANY}}
        for name, authority in authorities.items():
            if authority is None or authority.port is not None:
                fix = 'name hosts, without scheme and port, such as "models.example"'
                raise InvalidRequest("allowed_hosts", f"{name!r} is no name of a host: {fix}.")
        object.__setattr__(self, "names", frozenset(each.name for each in authorities.values() if each))

    def check(self, hosts: Iterable[str], origins: Iterable[str], scheme: str) -> None:
        """Raise the ApiError for 403 unless a request with these headers is answered."""
        if ANY in self.allowed:
            return
        asked = None
        for host in hosts:
            asked = Authority.of(host)
            if not self.answers_to(asked):
                raise refusal("host", host)
        for origin in origins:
            its_scheme, _, rest = origin.partition("://")
            page = Authority.of(rest)
            if page is None or not (
                page.name in self.names or (asked and page.origin(its_scheme.lower()) == asked.origin(scheme))
            ):
                raise refusal("origin", origin)

    def answers_to(self, authority: Authority | None) -> bool:
        """Whether a request may name this host."""
        if not self.allowed and not is_loopback(self.bound):
            return True
        return authority is not None and (authority.name in self.names or is_loopback(authority.name))


def is_loopback(name: str) -> bool:
    """Whether a name or an address is of this machine alone."""
    name = name.lower().removesuffix(".")
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def refusal(what: str, value: str) -> ApiError:
    """The answer to a request from elsewhere."""
    message = f"requests with the {what} {shown(value)} are not answered here: --allowed-hosts names hosts that are."
    return ApiError(403, message, code=f"{what}_not_allowed")
