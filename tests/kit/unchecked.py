"""Switches run-time shape checks off for tests that run thousands of sequences."""

from collections.abc import Iterator
from contextlib import contextmanager

from shape_checks import Current


@contextmanager
def unchecked() -> Iterator[None]:
    """Within it shapes are not checked at run time: for so many sequences the checks take longer than the work."""
    before, Current.off = Current.off, True
    try:
        yield
    finally:
        Current.off = before
