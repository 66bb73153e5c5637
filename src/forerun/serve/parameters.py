"""Parameters: what the JSON schema of a function says of each of its arguments.

Forms of calls that write every argument by itself need to know which of them are text. This file decides that, also
where a schema names alternatives or refers to its definitions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

MOST_DEPTH = 32  # of references and alternatives
MOST_ALTERNATIVES = 64
ALTERNATIVES = ("anyOf", "oneOf", "allOf")
DEFINITIONS = ("$defs", "definitions")
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
Schema = Mapping[str, Any]


def parameters_of(schema: Schema) -> dict[str, list[Schema]]:
    """The alternatives of every parameter, by its name; those of one that is only required allow anything."""
    properties = object_of(schema).get("properties")
    named: dict[str, Any] = dict(properties) if isinstance(properties, Mapping) else {}
    named |= {name: {} for name in required_of(schema) if name not in named}
    return {name: list(islice(leaves(each, schema), MOST_ALTERNATIVES)) for name, each in named.items()}


def required_of(schema: Schema) -> list[str]:
    """The names of the parameters that must be there."""
    required = object_of(schema).get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


def object_of(schema: Schema) -> Schema:
    """The schema of all arguments together, behind its references."""
    return next(leaves(schema, schema), {})


def types_of(alternatives: list[Schema]) -> set[str]:
    """The types that a parameter may have; none where its schema names none."""
    return {str(leaf["type"]) for leaf in alternatives if "type" in leaf}


def leaves(schema: Any, root: Schema, depth: int = 0) -> Iterator[Schema]:
    """The alternatives of a schema, each with one type or none. References into the definitions are followed."""
    if not isinstance(schema, Mapping) or depth > MOST_DEPTH:
        yield {}
        return
    rest = dict(schema)
    several = next((word for word in ALTERNATIVES if rest.get(word) and isinstance(rest[word], list)), None)
    if "$ref" in rest:
        yield from leaves(referred(rest.pop("$ref"), root) | rest, root, depth + 1)
    elif several is not None and (several != "allOf" or len(rest[several]) == 1):
        for each in rest.pop(several):
            yield from leaves({**rest, **each} if isinstance(each, Mapping) else each, root, depth + 1)
    elif isinstance(rest.get("type"), list):
        for each in rest["type"]:
            yield from leaves({**rest, "type": each}, root, depth + 1)
    elif "type" not in rest and ("enum" in rest or "const" in rest):
        for value in rest["enum"] if isinstance(rest.get("enum"), list) else [rest.get("const")]:
            yield {**rest, "enum": [value], "type": TYPES.get(type(value), "null")}
    else:
        yield rest


def referred(reference: object, root: Schema) -> dict[str, Any]:
    """The definition that a reference names; an empty schema for any other reference."""
    _, _, path = str(reference).partition("#/")
    kind, _, name = path.partition("/")
    known = root.get(kind) if kind in DEFINITIONS else None
    found = known.get(name) if isinstance(known, Mapping) else None
    return dict(found) if isinstance(found, Mapping) else {}
