"""CUDA graphs without a GPU: a replay runs the captured function again, into the tensors that the capture returned.

Before that, results of other graphs are overwritten, as may happen where graphs share a pool of memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import pytest
from torch import Tensor

from forerun.device import Captures
from forerun.models.backends.gpu.capture import Graphs


@dataclass
class RunAgain:
    """Takes the place of a captured graph."""

    body: Callable[[], Any]
    result: Any

    def replay(self) -> None:
        for old, new in zip(tensors_of(self.result), tensors_of(self.body()), strict=True):
            old.copy_(new)


def tensors_of(result: Any) -> Iterator[Tensor]:
    """All tensors in a body's result."""
    if isinstance(result, Tensor):
        yield result
    elif is_dataclass(result):
        for field in fields(result):
            yield from tensors_of(getattr(result, field.name))
    elif isinstance(result, (tuple, list)):
        for each in result:
            yield from tensors_of(each)


def spoil(graphs: Graphs, key: Any) -> None:
    """Overwrite the results of all graphs but this one, as far as they lie in the pool."""
    fixed = {kept.untyped_storage().data_ptr() for kept in graphs.kept_logits.values()}
    for other, (_, result) in graphs.captured.items():
        for tensor in () if other == key else tensors_of(result):
            if tensor.untyped_storage().data_ptr() not in fixed:
                tensor.fill_(math.nan if tensor.is_floating_point() else -9)


def imagine_captures(monkeypatch: pytest.MonkeyPatch) -> list[Hashable]:
    """From now on let new Graphs objects capture on the CPU; the list of keys, which grows with every capture."""
    keys: list[Hashable] = []
    make = Graphs.__init__

    def enabled(graphs: Graphs, *args: Any, **options: Any) -> None:
        make(graphs, *args, **options)
        graphs.enabled = True

    def run(graphs: Graphs, key: Any, body: Callable[[], Any]) -> Any:
        if key is None:
            return body()
        spoil(graphs, key)
        return graphs.replay(key, body)

    def capture(graphs: Graphs, key: Any, body: Callable[[], Any]) -> None:
        result = body()
        graphs.captured[key] = RunAgain(body, result), result  # type: ignore[assignment]
        keys.append(key)
        Captures.num += 1

    monkeypatch.setattr(Graphs, "__init__", enabled)
    monkeypatch.setattr(Graphs, "run", run)
    monkeypatch.setattr(Graphs, "try_capture", capture)
    monkeypatch.setattr(Captures, "num", 0)
    return keys
