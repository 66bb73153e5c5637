"""Limits: which numbers and which JSON a request may contain, and how error messages show a value.

A whole number is an integer of Python or numpy; a real number may also be a `Fraction`; a bool is neither. A number
that passes a check becomes a plain int or float within int64 or float32, so that no later arithmetic overflows. The
callers decide the bounds of each field.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from numbers import Integral, Real
from typing import Any

from forerun.errors import InvalidRequest

INT64 = 2**63 - 1  # the largest
MOST_DIGITS = 15  # of a number in a text: such numbers are exact in JSON, and int() refuses thousands of digits
FLOAT32 = (2.0 - 2.0**-23) * 2.0**127  # the largest finite one
FLOAT32_LEAST = 2.0**-126  # the smallest normal number; some devices treat smaller ones as 0


class _ShortJson(reprlib.Repr):
    """Short forms of values in JSON syntax; `Repr` finds the methods by the names of types."""

    def repr_NoneType(self, _value: None, _level: int) -> str:  # noqa: N802
        return "null"

    def repr_bool(self, value: bool, _level: int) -> str:
        return "true" if value else "false"

    def repr_str(self, text: str, _level: int) -> str:
        cut = text if len(text) <= self.maxstring else f"{text[: self.maxstring]}…"
        return json.dumps(cut, ensure_ascii=False)

    def repr_tuple(self, values: tuple[object, ...], level: int) -> str:
        return self.repr_list(list(values), level)


def _bounded(short: reprlib.Repr) -> reprlib.Repr:
    short.maxlevel, short.maxstring, short.maxlong, short.maxother = 3, 60, 60, 60
    short.maxlist = short.maxtuple = short.maxset = 5
    return short


PYTHON, JSON = _bounded(reprlib.Repr()), _bounded(_ShortJson())
_spelling = ContextVar("spelling", default=PYTHON)


def whole(field: str, value: object, fix: str, least: int = 0, most: int = INT64) -> int:
    """The value as an int from `least` to `most`. Raises InvalidRequest, with the field and the fix, for others."""
    if isinstance(value, Integral) and not isinstance(value, bool) and least <= (number := int(value)) <= most:
        return number
    raise refusal(field, value, fix)


def real(field: str, value: object, fix: str, least: float = -FLOAT32, most: float = FLOAT32) -> float:
    """The value as a float from `least` to `most`. Raises InvalidRequest for others, NaN included."""
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # 10**400 has no float
            number = math.nan
        if least <= number <= most:
            return number
    raise refusal(field, value, fix)


def strict_json(text: str) -> Any:
    """Parse JSON. Raises RecursionError for deep nesting, and ValueError for what else is invalid.

    That includes NaN, infinities, numbers beyond float64, and a name that occurs twice in an object.
    """
    return json.loads(text, parse_constant=finite, parse_float=finite, object_pairs_hook=_unique_members)


def finite(text: str) -> float:
    """Parse a number of JSON. Raises ValueError for NaN and infinities, which Python's parser accepts."""
    if not math.isfinite(value := float(text)):
        raise ValueError(f"{text[:30]} is not a finite number")
    return value


def _unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members: dict[str, Any] = {}
    for name, value in pairs:
        if name in members:
            raise ValueError(f"{shown(name)} occurs twice")
        members[name] = value
    return members


def is_whole(text: str) -> bool:
    """Whether a text is a whole number, of at most MOST_DIGITS decimal digits."""
    return text.isdecimal() and len(text) <= MOST_DIGITS


def refusal(field: str, value: object, fix: str) -> InvalidRequest:
    """The error for a value that cannot be served."""
    return InvalidRequest(field, f"{shown(value)} cannot be served; {fix}")


@contextmanager
def values_in_json() -> Iterator[None]:
    """Makes error messages show values in JSON syntax, for clients that have sent JSON."""
    token = _spelling.set(JSON)
    try:
        yield
    finally:
        _spelling.reset(token)


def shown(value: object) -> str:
    """A value in Python syntax, or in JSON syntax within `values_in_json`; a long one is shortened."""
    try:
        text = _spelling.get().repr(value)
    except ValueError:  # Python does not convert integers of more than 4,300 digits
        return f"{'an integer' if isinstance(value, int) else type(value).__name__} of thousands of digits"
    return text if len(text) <= 100 else f"{text[:100]}…"
