"""forerun: exact speculative decoding.

A fast drafter drafts the next tokens of a large language model, and the model verifies all of them in one pass. The
answer is exactly the model's own, but takes less time.

Names are imported at first use, so that `forerun --help` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from forerun.accept.delta import Delta
    from forerun.async_llm import AsyncLLM
    from forerun.config import EngineOptions, Speculation
    from forerun.errors import ForerunError, InvalidRequest
    from forerun.llm import LLM
    from forerun.models.spec import ModelSpec
    from forerun.output import CompletionOutput, RequestMetrics, RequestOutput
    from forerun.request import ChatOptions, Request
    from forerun.sampling.grammar import Grammar
    from forerun.sampling.params import SamplingParams
    from forerun.shape import StaticTree

__all__ = [
    "LLM",
    "AsyncLLM",
    "ChatOptions",
    "CompletionOutput",
    "Delta",
    "EngineOptions",
    "ForerunError",
    "Grammar",
    "InvalidRequest",
    "ModelSpec",
    "Request",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "Speculation",
    "StaticTree",
    "__version__",
]

_MODULES = {
    "async_llm": ("AsyncLLM",),
    "config": ("EngineOptions", "Speculation"),
    "accept.delta": ("Delta",),
    "errors": ("ForerunError", "InvalidRequest"),
    "llm": ("LLM",),
    "models.spec": ("ModelSpec",),
    "output": ("CompletionOutput", "RequestMetrics", "RequestOutput"),
    "request": ("ChatOptions", "Request"),
    "sampling.grammar": ("Grammar",),
    "sampling.params": ("SamplingParams",),
    "shape": ("StaticTree",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """A public name, imported from its module at first use."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    """All names of the module, including those that are not imported yet."""
    return sorted({*globals(), *__all__})
