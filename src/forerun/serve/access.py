"""Access control: API keys, and protection against requests that foreign web pages send.

A key file has one key per line, optionally with a tenant name before it; # starts a comment. A key is compared with
all keys of the file, each in constant time, so that timing reveals nothing about them.

A page of another site can make a browser send requests to a server on the user's machine, under a host name that
resolves to that machine (DNS rebinding). The browser then sends that name in `Host`, and the page's site in `Origin`.
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
KEY_FORMAT = "write one key per line, optionally with a tenant name before it"


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """Tenant names by the digests of their keys. Without keys, all clients are one tenant named ""."""

    tenants: Mapping[bytes, str] = field(default_factory=dict, repr=False)

    @classmethod
    def read(cls, path: Path) -> ApiKeys:
        """Read a key file. Raises InvalidRequest if it cannot be read, is malformed or has no key."""
        try:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
        except (OSError, ValueError) as error:
            problem = f"{path} cannot be read ({getattr(error, 'strerror', None) or 'it is not UTF-8'})"
            raise InvalidRequest("api_keys", f"{problem}: {KEY_FORMAT}.") from error
        tenants: dict[bytes, str] = {}
        for number, line in enumerate(lines, start=1):
            words = line.partition("#")[0].split()
            if not words:
                continue
            if len(words) > 2:
                raise InvalidRequest("api_keys", f"{path}, line {number}, has {len(words)} words: {KEY_FORMAT}.")
            if not (words[-1].isascii() and words[-1].isprintable()):
                raise InvalidRequest("api_keys", f"{path}, line {number}: a key must be printable ASCII: {KEY_FORMAT}.")
            key = digest(words[-1])
            if key in tenants:
                raise InvalidRequest("api_keys", f"{path}, line {number}, repeats a key: choose another one.")
            tenants[key] = words[0] if len(words) == 2 else f"key-{key.hex()[:12]}"
        if not tenants:
            raise InvalidRequest("api_keys", f"{path} holds no key: {KEY_FORMAT}.")
        return cls(tenants)

    def tenant(self, authorization: str | None) -> str:
        """The tenant of a request, from its Authorization header. Raises ApiError 401 without a valid key."""
        if not self.tenants:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        key_digest, tenant = digest(key.strip()), None
        for known, name in self.tenants.items():
            if hmac.compare_digest(known, key_digest):
                tenant = name
        if scheme.lower() != SCHEME or tenant is None:
            problem = "there is no API key" if not authorization else "the API key is unknown"
            raise ApiError(
                401, f"{problem}: send Authorization: Bearer KEY, or x-api-key: KEY.", code="invalid_api_key"
            )
        return tenant


def warn_if_readable(path: Path) -> None:
    """Log a warning if other users of this machine may read a key file."""
    with suppress(OSError):
        if os.name == "posix" and path.stat().st_mode & 0o044:
            log.warning("Other users of this machine can read the API keys in %s: run chmod 600 on it.", path)


def digest(key: str) -> bytes:
    """The SHA-256 digest of a key; digests are stored and compared instead of keys."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True, slots=True)
class Authority:
    """A host name in lower case, without brackets, and its port as written in the header."""

    name: str
    port: str | None

    @classmethod
    def of(cls, text: str) -> Authority | None:
        """Parse a Host header or the authority of an Origin; None if it is malformed."""
        match = AUTHORITY.fullmatch(text.lower())
        return match and cls(match["name"].strip("[]").removesuffix("."), match["port"])

    def origin(self, scheme: str) -> tuple[str, str, str | None]:
        """The web origin (scheme, host, port) of pages loaded from this host."""
        return scheme, self.name, self.port or DEFAULT_PORTS.get(scheme)


@dataclass(frozen=True, slots=True)
class Hosts:
    """The host names that a server answers to. `bound` is the address it listens on, `allowed` the user's list.

    A server on a loopback address answers to loopback names and allowed names; any other server answers to every name
    unless there is a list. A page may send requests to its own host, and from allowed hosts. Raises InvalidRequest.
    """

    bound: str
    allowed: frozenset[str]
    names: frozenset[str] = field(init=False)  # `allowed`, parsed

    def __post_init__(self) -> None:
        authorities = {name: Authority.of(name) for name in self.allowed - {ANY}}
        for name, authority in authorities.items():
            if authority is None or authority.port is not None:
                fix = 'name hosts, without scheme and port, such as "models.example"'
                raise InvalidRequest("allowed_hosts", f"{name!r} is not a host name: {fix}.")
        object.__setattr__(self, "names", frozenset(each.name for each in authorities.values() if each))

    def check(self, hosts: Iterable[str], origins: Iterable[str], scheme: str) -> None:
        """Raise ApiError 403 unless these Host and Origin headers are allowed."""
        if ANY in self.allowed:
            return
        server = None
        for host in hosts:
            server = Authority.of(host)
            if not self.answers_to(server):
                raise refusal("host", host)
        for origin in origins:
            page_scheme, _, rest = origin.partition("://")
            page = Authority.of(rest)
            if page is None or not (
                page.name in self.names or (server and page.origin(page_scheme.lower()) == server.origin(scheme))
            ):
                raise refusal("origin", origin)

    def answers_to(self, authority: Authority | None) -> bool:
        """Whether a request may have this host in its Host header."""
        if not self.allowed and not is_loopback(self.bound):
            return True
        return authority is not None and (authority.name in self.names or is_loopback(authority.name))


def is_loopback(name: str) -> bool:
    """Whether a host name or address is a loopback one."""
    name = name.lower().removesuffix(".")
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return name == "localhost" or name.endswith(".localhost")


def refusal(what: str, value: str) -> ApiError:
    """The ApiError 403 for a Host or Origin that is not allowed."""
    message = f"requests with the {what} {shown(value)} are refused: add the host to --allowed-hosts to allow them."
    return ApiError(403, message, code=f"{what}_not_allowed")
