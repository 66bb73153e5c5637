"""Dialects: what differs between the engines behind an OpenAI-compatible interface, as one table.

This file alone names the engines. It decides how one is recognised, under which names it counts guesses, which fields
of a request leave sampling to the temperature alone, and which options set the depth when the server is started.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

UNFILTERED: Mapping[str, Any] = {"top_p": 1.0, "min_p": 0.0}


@dataclass(frozen=True, slots=True)
class Dialect:
    """One engine. `owner` is what its list of models says, `prefix` begins the names of its metrics.

    `unfiltered` are the fields that switch off every filter of the law, those that a server sets by itself among them.
    `exact_tokens` make tokens unmistakable where log-probabilities name them. `depth_options` says what to start the
    server with for so many guesses a round, 0 being plain decoding; None where that is not known.
    """

    name: str
    owner: str
    prefix: str
    unfiltered: Mapping[str, Any] = field(default_factory=lambda: {"top_p": 1.0})
    exact_tokens: Mapping[str, Any] = field(default_factory=dict)
    depth_options: Callable[[int], str] | None = None
    counters_advice: str = ""


def forerun_options(depth: int) -> str:
    """The options of `forerun serve`, and of a request, that set the depth of drafts."""
    return f'forerun serve --depth {depth}, or "speculation": {depth} in a request'


def vllm_options(depth: int) -> str:
    """The options of `vllm serve` that set the depth of drafts; method and model stay as they are."""
    if depth == 0:
        return "vllm serve without --speculative-config"
    config = json.dumps({"num_speculative_tokens": depth})
    return f"vllm serve --speculative-config '{config[:-1]}, …}}', its method and model as they are"


def sglang_options(depth: int) -> str:
    """The options of SGLang that set the depth of drafts; a chain needs one draft token more than steps."""
    if depth == 0:
        return "without --speculative-algorithm"
    chain = f"--speculative-eagle-topk 1 --speculative-num-draft-tokens {depth + 1}"
    return f"--speculative-num-steps {depth} {chain} (NGRAM: --speculative-num-draft-tokens {depth})"


def llama_cpp_options(depth: int) -> str:
    """The options of llama-server that set the depth of drafts."""
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
    """The engine, by what its list of models says, or else, behind a gateway, by the names of its metrics."""
    by_owner = next((each for each in DIALECTS if each.owner == owner), None)
    by_metrics = (each for each in DIALECTS if metrics and f"\n{each.prefix}" in f"\n{metrics}")
    return by_owner or next(by_metrics, UNKNOWN)
