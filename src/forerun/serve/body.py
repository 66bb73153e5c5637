"""Request bodies: parsing JSON, and checking field names and types against the table of `schema.py`.

Unknown and unserved fields are refused at any depth. The work is linear in the length of a body, and error messages
are short even for long bodies.
"""

from __future__ import annotations

import logging
import sys
from codecs import BOM_UTF8
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from forerun.did_you_mean import nearest
from forerun.limits import shown, strict_json
from forerun.serve.problems import ApiError, refused, unserved
from forerun.serve.schema import KNOWN, OBJECTS, Endpoint, FieldTable

MOST_LOGGED = 5  # unknown names that are logged per body
TYPES = {  # for error messages
    "boolean": "true or false",
    "integer": "a whole number",
    "string": "text",
    "array": "a list",
    "object": "an object",
    OBJECTS: "a list of objects",
}
log = logging.getLogger(__name__)


def parse_json_body(raw: bytes) -> dict[str, Any]:
    """Parse a body as a JSON object. Raises ApiError 400 for anything else."""
    try:
        body = strict_json(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        if isinstance(error, UnicodeDecodeError):
            why = f"byte {error.start} is not UTF-8"
        elif raw.startswith(BOM_UTF8):
            why = "it begins with a byte order mark: leave that out"
        elif why.startswith("Exceeds the limit"):  # the advice of Python's message is for programs
            why = f"a number has more than {sys.get_int_max_str_digits()} digits"
        raise ApiError(400, f"the body is not JSON in UTF-8 ({why}).", code="invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object.", code="invalid_json")
    return body


@dataclass(slots=True)
class NameCheck:
    """Handles unknown names in one body: with `lenient` they are ignored and logged, otherwise the first is refused."""

    lenient: bool = False
    unknown: list[str] = field(default_factory=list)
    num_unknown: int = 0

    def add(self, path: str, name: str, known: Collection[str]) -> None:
        """Record an unknown name of the object at `path`; unless `lenient`, raise ApiError 400."""
        self.num_unknown += 1
        if self.num_unknown > MOST_LOGGED:
            return
        similar = nearest(name, known)
        place = f"{path} has no field" if path else "there is no field"
        problem = f"{place} {shown(name)} here" + (f": did you mean {similar!r}?" if similar else ".")
        if not self.lenient:
            raise ApiError(400, problem, code="unknown_parameter", param=joined(path, name))
        self.unknown.append(problem)

    def log_ignored(self) -> None:
        """Log the names that were ignored."""
        if self.unknown:
            more = self.num_unknown - len(self.unknown)
            note = "It was ignored." if self.num_unknown == 1 else f"These and {more} more names were ignored."
            log.warning("%s %s", " ".join(self.unknown), note)


def served_fields(body: Mapping[str, Any], endpoint: Endpoint, lenient: bool = False) -> dict[str, Any]:
    """The served fields of a body that are not null; objects in them keep their served members only.

    Raises ApiError 400, naming the first invalid field. With `lenient` unknown names are logged and ignored.
    """
    check = NameCheck(lenient)
    kept = served_members(body, KNOWN[endpoint], "", check)
    check.log_ignored()
    return {name: value for name, value in kept.items() if value is not None}


def served_members(members: Mapping[str, Any], known: FieldTable, path: str, check: NameCheck) -> dict[str, Any]:
    """The served members of the object at `path` in the body."""
    kept: dict[str, Any] = {}
    for name, value in members.items():
        entry = known.get(name)
        if entry is None:
            check.add(path, name, known)
        elif entry.kind == "served":
            if entry.types and value is not None and not entry.takes(value):
                param, kinds = joined(path, name), " or ".join(TYPES[each] for each in entry.types)
                raise refused(param, f"{shown(value)} must be {kinds}.", param=param)
            kept[name] = served_value(value, entry.members, joined(path, name), check) if entry.members else value
        elif entry.kind == "unserved" and value is not None and not entry.accepts(value):
            param = joined(path, name)
            raise unserved(param, value, entry.answer, param)
    return kept


def served_value(value: Any, known: FieldTable, path: str, check: NameCheck) -> Any:
    """An object, or each object of a list, with its served members only; other values unchanged."""
    if isinstance(value, list):
        return [
            served_members(each, known, f"{path}[{i}]", check) if isinstance(each, dict) else each
            for i, each in enumerate(value)
        ]
    return served_members(value, known, path, check) if isinstance(value, dict) else value


def joined(path: str, name: str) -> str:
    """The dotted path of a member."""
    return f"{path}.{name}" if path else name
