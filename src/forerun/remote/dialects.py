"""Dialects: a table of the differences between engines with an OpenAI-compatible interface.

An entry says how an engine is recognised, the prefix of its metrics, the request fields that switch off sampling
filters, and the options that set the draft depth.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

UNFILTERED: Mapping[str, Any] = {"top_p": 1.0, "min_p": 0.0}


@dataclass(frozen=True, slots=True)
class Dialect:
    """One engine. `owner`: `owned_by` in its list of models; `prefix`: of its metrics' names.

    `unfiltered`: request fields that switch off all sampling filters, including the server's defaults. `exact_tokens`:
    fields that make log-probabilities identify tokens unambiguously. `depth_options`: the server options for a depth
    (0: plain decoding); None if unknown.
    """

    name: str
    owner: str
    prefix: str
    unfiltered: Mapping[str, Any] = field(default_factory=lambda: {"top_p": 1.0})
    exact_tokens: Mapping[str, Any] = field(default_factory=dict)
    depth_options: Callable[[int], str] | None = None
    counters_advice: str = ""


def forerun_options(depth: int) -> str:
    """The options of `forerun serve`, or of a request, for a depth."""
    return f'forerun serve --depth {depth}, or "speculation": {depth} in a request'


def vllm_options(depth: int) -> str:
    """The options of `vllm serve` for a depth, with method and model unchanged."""
    if depth == 0:
        return "vllm serve without --speculative-config"
    config = json.dumps({"num_speculative_tokens": depth})
    return f"vllm serve --speculative-config '{config[:-1]}, …}}', its method and model as they are"


def sglang_options(depth: int) -> str:
    """The options of SGLang for a depth; a chain needs one more draft token than steps."""
    if depth == 0:
        return "without --speculative-algorithm"
    chain = f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {depth + 1}"
    return f"--speculative-num-steps {depth} {chain} (NGRAM: --speculative-num-draft-tokens {depth})"


def llama_cpp_options(depth: int) -> str:
    """The options of llama-server for a depth."""
    if depth == 0:
        return "llama-server --spec-type none, without a draft model"
    return (
        f"llama-server --spec-draft-n-max {depth} (--draft-max in older versions; ngrams: --spec-ngram-simple-size-m)"
    )


DIALECTS = (
    Dialect(
        "forerun",
        "forerun",
        "forerun:",
        {**UNFILTERED, "top_k": 0, "repetition_penalty": 1.0},
        depth_options=forerun_options,
    ),
    Dialect(
        "vLLM",
        "vllm",
        "vllm:",
        {**UNFILTERED, "top_k": -1, "repetition_penalty": 1.0},
        {"return_tokens_as_token_ids": True},
        vllm_options,
    ),
    Dialect(
        "SGLang",
        "sglang",
        "sglang:",
        {**UNFILTERED, "top_k": -1, "repetition_penalty": 1.0},
        depth_options=sglang_options,
        counters_advice="start it with --enable-metrics",
    ),
    Dialect(
        "llama.cpp",
        "llamacpp",
        "llamacpp:",
        {**UNFILTERED, "top_k": 0, "repeat_penalty": 1.0},
        depth_options=llama_cpp_options,
        counters_advice="start llama-server with --metrics",
    ),
)
UNKNOWN = Dialect("an engine that is not known", "", "", counters_advice="name an engine that counts its guesses")


def dialect_of(owner: str, metrics: str | None) -> Dialect:
    """The engine, by the owner of its models or, behind a gateway, by the names of its metrics."""
    by_owner = next((each for each in DIALECTS if each.owner == owner), None)
    by_metrics = (each for each in DIALECTS if metrics and f"\n{each.prefix}" in f"\n{metrics}")
    return by_owner or next(by_metrics, UNKNOWN)
