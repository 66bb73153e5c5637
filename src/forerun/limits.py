"""Limits: which numbers a request may contain, and how a value that cannot be served is shown.

A whole number is anything that Python or numpy counts as an integer; a real number may also be a `Fraction`; a bool is
neither. A number that passes a check is a plain int or float that fits int64 or float32, so that no later arithmetic
overflows. The callers decide which field has which bounds.
"""

from __future__ import annotations

import math
import reprlib
from numbers import Integral, Real

from forerun.errors import InvalidRequest

INT64 = 2**63 - 1  # the largest
FLOAT32 = (2.0 - 2.0**-23) * 2.0**127  # the largest that is finite
FLOAT32_LEAST = 2.0**-126  # the smallest above 0 that every device computes with; some take smaller ones for 0

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 3, 60, 60, 60
_SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = 5


def whole(field: str, value: object, fix: str, least: int = 0, most: int = INT64) -> int:
    """The value as an int from `least` to `most`; anything else raises InvalidRequest naming the field and the fix."""
    if isinstance(value, Integral) and not isinstance(value, bool) and least <= (number := int(value)) <= most:
        return number
    raise refusal(field, value, fix)


def real(field: str, value: object, fix: str, least: float = -FLOAT32, most: float = FLOAT32) -> float:
    """The value as a float from `least` to `most`; anything else, NaN among it, raises InvalidRequest likewise."""
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # 10**400 has no float
            number = math.nan
        if least <= number <= most:
            return number
    raise refusal(field, value, fix)


def refusal(field: str, value: object, fix: str) -> InvalidRequest:
    """The error for a value that cannot be served."""
    return InvalidRequest(field, f"{shown(value)} cannot be served; {fix}")


def shown(value: object) -> str:
    """A value as Python writes it, cut short where it is long."""
    try:
        text = _SHORT.repr(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        return f"{'an integer' if isinstance(value, int) else type(value).__name__} of thousands of digits"
    return text if len(text) <= 100 else f"{text[:100]}…"
