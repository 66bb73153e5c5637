"""Parameters: finds the schema of each argument in a function's JSON schema.

Tagged formats of tool calls write every argument separately and need to know which ones are strings. This file
determines that, including for schemas with alternatives and references to definitions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

MOST_DEPTH = 32  # of nested references and alternatives
MOST_LEAVES = 64
MOST_MEMBERS = 100_000
ALTERNATIVES = ("anyOf", "oneOf", "allOf")
DEFINITIONS = ("$defs", "definitions")
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
Schema = Mapping[str, Any]


@dataclass(slots=True)
class CopyLimit:
    """A limit on the schema members that may be copied, since references can repeat a schema exponentially often."""

    num_members: int = MOST_MEMBERS

    def joined(self, first: Schema, second: Schema) -> Schema:
        """A schema with the members of both; empty beyond the limit."""
        if not first or not second:
            return first or second
        self.num_members -= len(first) + len(second)
        return {**first, **second} if self.num_members >= 0 else {}

    def without(self, word: str, schema: Schema) -> Schema:
        """A schema without one of its members; empty beyond the limit."""
        self.num_members -= len(schema)
        return {name: value for name, value in schema.items() if name != word} if self.num_members >= 0 else {}


def parameters_of(schema: Schema, limit: CopyLimit | None = None) -> dict[str, list[Schema]]:
    """The alternative schemas of every parameter, by name; a required parameter without a schema allows anything.

    At most MOST_LEAVES + 1 are returned per parameter. Once `limit` is reached, schemas allow anything.
    """
    limit = limit or CopyLimit()
    properties = object_of(schema).get("properties")
    named: dict[str, Any] = dict(properties) if isinstance(properties, Mapping) else {}
    named |= {name: {} for name in required_of(schema) if name not in named}
    return {name: list(islice(leaves(each, schema, limit), MOST_LEAVES + 1)) for name, each in named.items()}


def required_of(schema: Schema) -> list[str]:
    """The names of the required parameters."""
    required = object_of(schema).get("required")
    return [name for name in required if isinstance(name, str)] if isinstance(required, list) else []


def object_of(schema: Schema) -> Schema:
    """The schema of the argument object, with references resolved."""
    return next(leaves(schema, schema, CopyLimit()), {})


def types_of(schema: Schema) -> dict[str, set[str]]:
    """The types that each parameter may have, by name; empty if its schema names none."""
    return {
        name: {str(leaf["type"]) for leaf in every if "type" in leaf} for name, every in parameters_of(schema).items()
    }


def leaves(schema: Any, root: Schema, limit: CopyLimit, depth: int = 0) -> Iterator[Schema]:
    """The alternatives of a schema, each with at most one type. References to definitions are resolved."""
    if not isinstance(schema, Mapping) or depth > MOST_DEPTH:
        yield {}
        return
    keyword = next((word for word in ALTERNATIVES if schema.get(word) and isinstance(schema[word], list)), None)
    if "$ref" in schema:
        resolved = limit.joined(referred(schema["$ref"], root), limit.without("$ref", schema))
        yield from leaves(resolved, root, limit, depth + 1)
    elif keyword is not None and (keyword != "allOf" or len(schema[keyword]) == 1):
        rest = limit.without(keyword, schema)
        for each in schema[keyword]:
            yield from leaves(limit.joined(rest, each) if isinstance(each, Mapping) else each, root, limit, depth + 1)
    elif isinstance(schema.get("type"), list):
        for each in schema["type"]:
            yield from leaves(limit.joined(schema, {"type": each}), root, limit, depth + 1)
    elif "type" not in schema and ("enum" in schema or "const" in schema):
        values: dict[str, list[Any]] = {}
        for value in schema["enum"] if isinstance(schema.get("enum"), list) else [schema.get("const")]:
            values.setdefault(TYPES.get(type(value), "null"), []).append(value)
        for kind, enum in values.items():
            yield limit.joined(schema, {"enum": enum, "type": kind})
    else:
        yield schema


def referred(reference: object, root: Schema) -> Schema:
    """The definition that a reference names; an empty schema if there is none."""
    _, _, path = str(reference).partition("#/")
    kind, _, name = path.partition("/")
    known = root.get(kind) if kind in DEFINITIONS else None
    definition = known.get(name) if isinstance(known, Mapping) else None
    return definition if isinstance(definition, Mapping) else {}
