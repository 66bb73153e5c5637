"""Stored measurements: a value that was written as JSON, read back and checked against the types that it is made of.

Files of measurements may be damaged or edited: each number, list and key is checked here, so that no figure is
computed from NaN, a negative time or a text.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from forerun.limits import shown

LARGEST = 1e15  # of numbers: larger ones are damage, and their products may overflow
SMALLEST = 1e-12  # of numbers above 0, whose reciprocals may overflow


def of_json(kind: Any, value: Any, name: str = "it", least: float = 0) -> Any:
    """The value of this type from its JSON form, in which tuples are lists and keys are texts.

    Types are dataclasses, named tuples, tuples, lists, mappings from whole numbers, optional ones, text, int, float and
    Any; `Annotated[int, LEAST]` has another minimum than 0. Raises ValueError, naming the part that does not fit.
    """
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        return of_json(parts[0], value, name, parts[1])
    if origin in (Union, UnionType):
        return None if value is None else of_json(parts[0], value, name)
    if is_dataclass(kind):
        return of_json_object(kind, value, name)
    if kind in (int, float):
        is_number = isinstance(value, int | kind) and not isinstance(value, bool)
        if not is_number or not least <= value <= LARGEST or 0 < value < SMALLEST:
            whole = "a whole number" if kind is int else "a number"
            raise ValueError(f"{name} is {shown(value)} and not {whole} from {least:g} to {LARGEST:g}")
        return kind(value)
    expected: Any = dict if origin in (dict, Mapping) else str if kind is str else list
    if not isinstance(value, expected):
        raise ValueError(f"{name} is {shown(value)} and not a {expected.__name__}")
    if kind is str:
        return value
    if expected is dict:
        numbers = {int(key): each for key, each in value.items() if key.isascii() and key.isdecimal() and len(key) < 16}
        if len(numbers) < len(value):
            raise ValueError(f"{name} has the keys {shown(list(value))}, which must be whole numbers")
        return {key: of_json(parts[1], each, f"{name}.{key}") for key, each in numbers.items()}
    has_any_length = bool(parts) and (origin is not tuple or parts[1:] == (...,))
    kinds = [parts[0]] * len(value) if has_any_length else [*(parts or get_type_hints(kind).values())]
    if len(value) != len(kinds):
        raise ValueError(f"{name} has {len(value)} values and not {len(kinds)}")
    items = [of_json(part, each, f"{name}.{i}") for i, (part, each) in enumerate(zip(kinds, value, strict=True))]
    if not parts:  # a named tuple
        return kind(*items)
    return tuple(items) if origin is tuple else items


def of_json_object(kind: Any, value: Any, name: str) -> Any:
    """The dataclass from an object with its fields; those with defaults may be missing."""
    hints = hints_of(kind)
    required = {each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING}
    if not isinstance(value, dict):
        raise ValueError(f"{name} is {shown(value)} and not an object")
    if wrong := sorted(required - value.keys()) or sorted(value.keys() - hints.keys()):
        problem = "lacks" if wrong[0] in required else "does not have"
        raise ValueError(f"{name} {problem} {shown(wrong[0])}")
    return kind(**{key: of_json(hints[key], each, f"{name}.{key}".removeprefix("it.")) for key, each in value.items()})


@cache
def hints_of(kind: Any) -> Mapping[str, Any]:
    """The types of a dataclass's fields, by name."""
    return get_type_hints(kind, include_extras=True)
