"""A made-up corpus for the recipes, and runs that die."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from recipes.stdlib.training import Run, Schedule

SHORT = Schedule(steps=6, batch_tokens=128, context=32, long_context=64, long_share=0.34, warmup=2)


class Killed(Exception):
    """The power went out."""


def write_source(folder: Path) -> Path:
    """A corpus, the same every time."""
    for number in range(160):
        path = folder / f"part{number % 3}" / f"module_{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        body = "\n".join(f"    value_{i} = compute({i} + {number}, name='n{number}')" for i in range(12))
        text = f'"""Module {number}: naïve 你好."""\n\ndef function_{number}(x):\n{body}\n    return x\n'
        path.write_text(text, "utf-8")
    return folder


@contextmanager
def dying(*saves: int) -> Iterator[None]:
    """Runs end behind these of their states that are saved."""
    save, num_saves = Run.save, 0

    def save_and_die(run: Run) -> None:
        nonlocal num_saves
        num_saves += 1
        save(run)
        if num_saves in saves:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "save", save_and_die)
        yield
