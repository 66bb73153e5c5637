"""An imagined GPU: tensors that claim to be on a GPU and are computed on the CPU, with checks of their use.

An operation that mixes them with tensors of the host raises, as a GPU would. Operations for which the host would wait
are recorded by name: copies to the host, and copies to the GPU that are not asynchronous. So are the operations that
the host sends to the GPU: those that are no views, each by itself or as one graph of many.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from forerun import LLM, SamplingParams
from forerun import device as devices
from forerun.device import Placement
from forerun.models.backends.gpu import backend, groups, ops
from forerun.models.backends.gpu.capture import Graphs
from forerun.models.backends.gpu.ops import TorchOps
from forerun.request import Request

CARD, MPS = torch.device("cuda", 0), torch.device("mps", 0)
PLACEMENT = Placement(CARD, fixed=True)
aten = torch.ops.aten
DEVICE_OF, IS_CUDA = (getattr(Tensor, name).__get__ for name in ("device", "is_cuda"))
INDEXED = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default)
MEMORY = ("empty", "empty_like", "new_empty", "empty_strided", "detach", "alias")  # takes no launch
WAITS = (aten.nonzero.default, aten._local_scalar_dense.default, aten.equal.default, aten.masked_select.default)


class OnCard(Tensor):
    """A tensor on the imagined GPU, whose numbers are those of `inner`."""

    inner: Tensor  # type: ignore[assignment]  # torch has an operator of this name, which no model uses

    @staticmethod
    def __new__(cls, inner: Tensor) -> OnCard:
        kept = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=torch.device("meta"),
        )  # fmt: skip
        kept.inner = inner
        return kept

    @classmethod
    @override
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch declares a method of instances
        raise AssertionError(f"{func} outside of the card's mode")


def inner_of(x: Any) -> Any:
    """The value without tensors on the imagined GPU, which torch's pytrees would need five times as long for."""
    if isinstance(x, OnCard):
        return x.inner
    if isinstance(x, (tuple, list)):
        return type(x)([inner_of(each) for each in x])
    return {name: inner_of(each) for name, each in x.items()} if isinstance(x, dict) else x


def on_card(x: Any) -> Any:
    """An operation's result with its tensors on the imagined GPU."""
    if isinstance(x, Tensor):
        return OnCard(x)
    return type(x)([on_card(each) for each in x]) if isinstance(x, (tuple, list)) else x


def tensors_in(x: Any) -> list[Tensor]:
    """All tensors of an operation's arguments or of its result."""
    if isinstance(x, Tensor):
        return [x]
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, (tuple, list)) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


@dataclass
class Seen:
    """The host's waits, the operations that it sent to the GPU, and whether a graph is running (sent as one operation).

    `refuses` raises for operators or number formats that the GPU does not have.
    """

    waits: list[str] = field(default_factory=list)
    sent: list[str] = field(default_factory=list)
    replaying: bool = False
    card: torch.device = CARD
    refuses: Callable[[Any, Sequence[Tensor]], None] = lambda func, given: None

    def clear(self) -> None:
        self.waits.clear()
        self.sent.clear()

    def run(self, key: object, body: Callable[[], Any]) -> Any:
        """Run a graph's function; with a key it counts as one operation."""
        if key is None or self.replaying:
            return body()
        self.sent.append("graph")
        self.replaying = True
        try:
            return body()
        finally:
            self.replaying = False


def submit(llm: LLM, prompts: Sequence[str], params: SamplingParams) -> None:
    """Submit requests to the engine; the caller runs its steps."""
    for prompt in prompts:
        for sequence in llm.requests.sequences(Request.of(prompt, params)):
            llm.engine.submit(sequence)


class CardMode(TorchDispatchMode):
    """Computes on the CPU, and checks and records every operation."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.waits, self.seen = seen.waits, seen

    @override
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        flat = tensors_in((args, kwargs))
        carded = [x for x in flat if isinstance(x, OnCard)]
        hosted = [x for x in flat if not isinstance(x, OnCard) and x.dim() > 0]
        target, name = kwargs.get("device"), func.overloadpacket.__name__
        lands = bool(carded) if target is None else torch.device(target).type != "cpu"
        if func is aten.copy_.default:
            lands, mixed = isinstance(args[0], OnCard), bool(carded and hosted)
            if mixed and not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)):
                self.waits.append(f"copy_ {'to' if lands else 'from'} the card")
        elif func is aten._to_copy.default:
            if lands != bool(carded) and not kwargs.get("non_blocking", False):
                self.waits.append(f"copy {'to' if lands else 'from'} the card")
        elif carded and hosted:
            by_index = func in INDEXED and isinstance(args[0], OnCard)
            assert by_index, f"{func} of tensors of the host and the card"
            self.waits.append(f"{name} by numbers of the host")
        elif carded and (func in WAITS or (func in INDEXED and any(x.dtype == torch.bool for x in flat[1:]))):
            self.waits.append(name)
        changes = len(carded) + lands == 1  # of the device
        if (lands or carded) and not (self.seen.replaying or name in MEMORY or (func.is_view and not changes)):
            self.seen.sent.append(name)
        if lands or carded:
            self.seen.refuses(func, carded)
        if target is not None:
            kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
        if name in ("_pin_memory", "pin_memory"):
            return args[0].clone()
        found = func(*inner_of(args), **inner_of(kwargs))
        if lands:
            self.seen.refuses(None, tensors_in(found))
        if func._schema.is_mutable and isinstance(args[0], Tensor):
            return args[0]
        return on_card(found) if lands else found


class Held(TorchDispatchMode):
    """Counts the bytes of GPU memory that tensors made within it hold at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.num_tensors = Counter[int]()
        self.bytes = self.most_bytes = 0

    def drop(self, memory: int, size: int) -> None:
        self.num_tensors[memory] -= 1
        self.bytes -= 0 if self.num_tensors[memory] else size

    @override
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        given = {x.inner.untyped_storage().data_ptr() for x in tensors_in((args, kwargs)) if isinstance(x, OnCard)}
        for made in tensors_in(found):
            if isinstance(made, OnCard):
                memory, size = made.inner.untyped_storage().data_ptr(), made.inner.untyped_storage().nbytes()
                if not self.num_tensors[memory] and memory in given:
                    continue  # a view of what was there before
                self.bytes += 0 if self.num_tensors[memory] else size
                self.num_tensors[memory] += 1
                self.most_bytes = max(self.most_bytes, self.bytes)
                weakref.finalize(made, self.drop, memory, size)
        return found


class CardFunctions(TorchFunctionMode):
    """Handles those of torch's functions that do not reach the dispatcher."""

    def __init__(self, seen: Seen) -> None:
        super().__init__()
        self.waits, self.card, self.seen = seen.waits, seen.card, seen

    @override
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if func in (DEVICE_OF, IS_CUDA) and isinstance(args[0], OnCard):
            return self.card if func == DEVICE_OF else self.card.type == "cuda"
        if func is torch.tensor or (func is torch.as_tensor and not isinstance(args[0], Tensor)):
            kwargs.pop("pin_memory", None)
            target = torch.device(kwargs.pop("device", None) or "cpu")
            made = func(*args, **kwargs)
            if target.type == "cpu":
                return made
            self.waits.append("numbers to the card")
            return OnCard(made)
        if name == "pin_memory":
            return args[0].clone()
        if name == "data_ptr" and isinstance(args[0], OnCard):
            return args[0].inner.data_ptr()
        if name in ("tolist", "numpy") and isinstance(args[0], OnCard):
            assert name == "tolist", "numpy() of a tensor on the card"
            self.waits.append("tolist")
            return args[0].inner.tolist()
        if func in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[0], OnCard):
            return self.indexed(func, args)
        return func(*args, **kwargs)

    def indexed(self, func: Callable[..., Any], args: Sequence[Any]) -> object:
        """The result of indexing, where a GPU receives tensor indices only."""
        by = args[1] if isinstance(args[1], tuple) else args[1:2]
        if not self.seen.replaying and (len(args) > 2 or any(isinstance(each, (list, Tensor)) for each in by)):
            self.seen.sent.append(func.__name__)
        for each in by:
            of_host = isinstance(each, list) or (isinstance(each, Tensor) and not isinstance(each, OnCard))
            if of_host or (isinstance(each, Tensor) and each.dtype == torch.bool):
                self.waits.append("index by numbers of the host" if of_host else "index by truth")
        if len(args) > 2 and isinstance(args[2], Tensor) and not isinstance(args[2], OnCard):
            self.waits.append("copy to the card")
        found = func(*inner_of(args))
        return OnCard(found) if isinstance(found, Tensor) else found


@contextmanager
def imagined(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """Within it the machine has a GPU; yields the record of the host's waits and operations."""
    seen = Seen()

    def run(_graphs: Graphs, key: object, body: Callable[[], Any]) -> Any:
        return seen.run(key, body)

    with monkeypatch.context() as patch:
        patch.setattr(Graphs, "run", run)
        patch.setattr("forerun.models.backends.gpu.fixed.ops_for", lambda _device: TorchOps())
        patch.setattr(backend, "ops_for", lambda _device: TorchOps())
        patch.setattr(backend.GpuBackend, "arithmetic", "imagined")
        patch.setattr(devices, "free_bytes", lambda _device: 1 << 34)
        patch.setattr("forerun.engine.memory.free_bytes", lambda _device: 1 << 34)
        patch.setattr(torch.cuda, "get_device_name", lambda _device: "imagined")
        for name in ("current_stream", "_lazy_init"):
            patch.setattr(torch.cuda, name, MagicMock())
        patch.setattr(torch.cuda, "Event", lambda **_: MagicMock(elapsed_time=lambda _: 1.0))
        with CardFunctions(seen), CardMode(seen):
            yield seen


@contextmanager
def imagined_mps(monkeypatch: pytest.MonkeyPatch, refuses: Callable[[Any, Sequence[Tensor]], None]) -> Iterator[Seen]:
    """Within it the machine has Apple's GPU, and CUDA and Triton fail."""
    seen = Seen(card=MPS, refuses=refuses)

    def refused(*_: object, **__: object) -> NoReturn:
        raise AssertionError("there is no such thing on MPS")

    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.mps, "is_available", lambda: True)
        patch.setattr(torch.mps, "recommended_max_memory", lambda: 1 << 34)
        patch.setattr(torch.mps, "driver_allocated_memory", lambda: 0)
        for name in ("current_stream", "_lazy_init", "Event", "Stream", "CUDAGraph", "device", "device_of", "graph"):
            patch.setattr(torch.cuda, name, refused)
        for module in (ops, groups, backend):
            patch.setattr(module, "load_kernels", refused)
        patch.setattr(Tensor, "pin_memory", refused)
        with CardFunctions(seen), CardMode(seen):
            yield seen
