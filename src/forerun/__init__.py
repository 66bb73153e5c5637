"""forerun: speculative decoding that is exact.

A small drafter guesses the next tokens of a large language model, the large model checks all guesses in one pass,
and the answer is exactly what it would have said alone, only sooner.
"""

__version__ = "0.1.0"  # before the imports: modules that they load read it

from forerun.async_llm import AsyncLLM
from forerun.config import EngineOptions, Speculation
from forerun.engine.delta import Delta
from forerun.errors import ForerunError, InvalidRequest
from forerun.llm import LLM
from forerun.output import CompletionOutput, RequestMetrics, RequestOutput
from forerun.request import Request
from forerun.sampling.params import SamplingParams
from forerun.shape import StaticTree

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Delta",
    "EngineOptions",
    "ForerunError",
    "InvalidRequest",
    "Request",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "Speculation",
    "StaticTree",
    "__version__",
]
