"""Ctrl-C: its effect while modules are imported, and while rounds run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from forerun.options import INTERRUPTED


@contextmanager
def importing() -> Iterator[None]:
    """Within it, Ctrl-C ends the process at once and without a word; behind it, Ctrl-C is a KeyboardInterrupt.

    An interrupted import has nothing to save, and its traceback would fill the screen.
    """
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(slots=True)
class Interrupt:
    """Whether Ctrl-C was pressed."""

    asked: bool = False


@contextmanager
def patient_interrupt() -> Iterator[Interrupt]:
    """Within it the first Ctrl-C is only noted, so that a round is never torn; a second one acts at once."""
    interrupt = Interrupt()
    before = signal.getsignal(signal.SIGINT)

    def note(*_: object) -> None:
        interrupt.asked = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
