"""The memory of an imagined GPU: entire models run on it without numbers, and the bytes that they hold are counted.

Tensors on the GPU have shapes only. Each of their storages counts as the caching allocator counts it: in blocks of
BLOCK_BYTES, from its first tensor to the end of its last. Memory that captured graphs free stays reserved for them.
Kernels are not launched, and the host reads zeros. Workspaces inside of torch's own kernels are not counted.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map
from typing_extensions import override

from forerun.models.backends.gpu import backend, groups, ops, tiles
from forerun.models.backends.gpu.ops import load_kernels
from kit import card
from kit.card import CardFunctions, CardMode, OnCard, Seen, inner_of

BLOCK_BYTES = 512
META = torch.device("meta")


@dataclass
class CardMemory:
    """Bytes on the GPU: those held now, those reserved for graphs, and the maximum of their sum."""

    held: int = 0
    of_graphs: int = 0  # held by graphs now
    kept: int = 0  # the maximum of `of_graphs`, which stays reserved
    peak: int = 0
    capturing: bool = False
    storages: set[int] = field(default_factory=set)

    def add(self, tensor: Tensor) -> None:
        """Count the tensor's storage, unless it is counted already."""
        storage = tensor.untyped_storage()
        key, in_graph = storage._cdata, self.capturing
        if key in self.storages:
            return
        self.storages.add(key)
        size = -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        self.change(size, in_graph)
        weakref.finalize(storage, self.drop, key, size, in_graph)

    def drop(self, key: int, size: int, in_graph: bool) -> None:
        """Subtract a freed storage."""
        self.storages.discard(key)
        self.change(-size, in_graph)

    def change(self, size: int, in_graph: bool) -> None:
        """Add `size` bytes, which may be negative."""
        if in_graph:
            self.of_graphs += size
            self.kept = max(self.kept, self.of_graphs)
        else:
            self.held += size
        self.peak = max(self.peak, self.held + self.kept)

    @contextmanager
    def capture(self, *_: object, **__: object) -> Iterator[None]:
        """Takes the place of torch.cuda.graph."""
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False


class ShapesMode(CardMode):
    """Computes shapes only, and counts the bytes that the tensors would take."""

    def __init__(self, memory: CardMemory) -> None:
        super().__init__(Seen())
        self.memory = memory

    @override
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        carded = any(isinstance(x, OnCard) for x in tree_flatten((args, kwargs))[0])
        target = kwargs.get("device")
        lands = carded if target is None else torch.device(target).type == "cuda"
        kwargs.pop("pin_memory", None)
        if func is torch.ops.aten.copy_.default and not isinstance(args[0], OnCard):
            return args[0].zero_() if carded else func(*args, **kwargs)
        if name == "_to_copy" and carded and not lands:
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if carded and name in ("_local_scalar_dense", "equal"):
            return name == "equal"
        if lands:
            kwargs |= {"device": META} if target is not None else {}
        result = func(*tree_map(inner_of, args), **tree_map(inner_of, kwargs))
        if not lands:
            return result
        if func._schema.is_mutable and isinstance(args[0], Tensor):
            return args[0]

        def on_card(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            self.memory.add(x)
            return OnCard(x)

        return tree_map(on_card, result)


class ShapesFunctions(CardFunctions):
    """Handles those of torch's functions that do not reach the dispatcher."""

    def __init__(self, memory: CardMemory) -> None:
        super().__init__(Seen())
        self.memory = memory

    @override
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if getattr(func, "__name__", "") == "tolist" and isinstance(args[0], OnCard):
            return torch.zeros(args[0].shape, dtype=args[0].dtype).tolist()
        if func is torch.tensor and torch.device((kwargs or {}).get("device") or "cpu").type == "cuda":
            return torch.tensor(*args, **{**(kwargs or {}), "device": "cpu"}).to(card.CARD)
        return super().__torch_function__(func, types, args, kwargs)


class Unlaunched:
    """Takes the place of a module of kernels; their launches do nothing."""

    def __init__(self, name: str = "triton_kernels") -> None:
        self.module = load_kernels(name)

    def __getattr__(self, name: str) -> Any:
        member = getattr(self.module, name)
        return Unlaunchable() if hasattr(member, "run") else member


class Unlaunchable:
    """Takes the place of a kernel, on any grid."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *arguments, **options: None


@contextmanager
def counted_memory(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> Iterator[CardMemory]:
    """Within it the machine has an empty GPU with `free_bytes` of memory."""
    memory, modules = CardMemory(), dict[str, Unlaunched]()

    def kernels(name: str = "triton_kernels") -> Unlaunched:
        return modules.setdefault(name, Unlaunched(name))

    with monkeypatch.context() as patch:
        for module in (ops, groups, backend):
            patch.setattr(module, "load_kernels", kernels)
        patch.setattr(backend, "tiles_agree", lambda _device: True)
        patch.setattr(tiles, "SMALL_BYTES", math.inf)  # so that no tiles are measured
        patch.setattr(backend.GpuBackend, "arithmetic", "imagined")
        for name in ("device", "device_of", "stream"):
            patch.setattr(torch.cuda, name, lambda *_: nullcontext())
        for name in ("current_stream", "_lazy_init", "Stream", "CUDAGraph", "synchronize"):
            patch.setattr(torch.cuda, name, MagicMock())
        patch.setattr(torch.cuda, "Event", lambda **_: MagicMock(elapsed_time=lambda _: 1.0))
        patch.setattr(torch.cuda, "graph", memory.capture)
        patch.setattr(torch.cuda, "get_device_name", lambda _device: "imagined")
        patch.setattr("forerun.engine.memory.free_bytes", lambda _device: free_bytes)
        with ShapesFunctions(memory), ShapesMode(memory):
            yield memory
