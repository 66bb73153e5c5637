"""Dialects: a table of the differences between engines with an OpenAI-compatible interface.

An entry has the properties by which an engine is recognised, the prefix of its metrics, the request fields that switch
off sampling filters, and the options that set the draft depth.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

UNFILTERED: Mapping[str, Any] = {"top_p": 1.0, "min_p": 0.0}


@dataclass(frozen=True, slots=True)
class Dialect:
    """One engine. `owner`: `owned_by` in its list of models; `prefix`: the prefix of its metrics' names.

    `unfiltered`: request fields that switch off all sampling filters, including the server's defaults. `exact_tokens`:
    fields with which log-probabilities identify tokens unambiguously. `plain_options` and `depth_options`: the server
    options for plain decoding, and for a depth with the same method and model; "" if unknown. In them, `tree` is one
    more than `depth`. `counters_advice`: how to make the server report its speculation counters.
    """

    name: str
    owner: str
    prefix: str
    unfiltered: Mapping[str, Any] = field(default_factory=lambda: {"top_p": 1.0})
    exact_tokens: Mapping[str, Any] = field(default_factory=dict)
    plain_options: str = ""
    depth_options: str = ""
    counters_advice: str = ""

    def options(self, depth: int) -> str | None:
        """The server options for a depth (0: plain decoding); None if unknown."""
        form = self.depth_options if depth or not self.plain_options else self.plain_options
        return form.format(depth=depth, tree=depth + 1) or None


DIALECTS = (
    Dialect(
        "forerun",
        "forerun",
        "forerun:",
        {**UNFILTERED, "top_k": 0, "repetition_penalty": 1.0},
        depth_options='forerun serve --depth {depth}, or "speculation": {depth} in a request',
    ),
    Dialect(
        "vLLM",
        "vllm",
        "vllm:",
        {**UNFILTERED, "top_k": -1, "repetition_penalty": 1.0},
        {"return_tokens_as_token_ids": True},
        "vllm serve without --speculative-config",
        "vllm serve --speculative-config '{{\"num_speculative_tokens\": {depth}, …}}', with the same method and model",
    ),
    Dialect(
        "SGLang",
        "sglang",
        "sglang:",
        {**UNFILTERED, "top_k": -1, "repetition_penalty": 1.0},
        plain_options="without --speculative-algorithm",
        depth_options="--speculative-num-steps {depth} --speculative-eagle-topk 1 "
        "--speculative-num-draft-tokens {tree} (NGRAM: --speculative-num-draft-tokens {depth})",
        counters_advice="start it with --enable-metrics",
    ),
    Dialect(
        "llama.cpp",
        "llamacpp",
        "llamacpp:",
        {**UNFILTERED, "top_k": 0, "repeat_penalty": 1.0},
        plain_options="llama-server --spec-type none, without a draft model",
        depth_options="llama-server --spec-draft-n-max {depth} (--draft-max in older versions; ngrams: "
        "--spec-ngram-simple-size-m)",
        counters_advice="start llama-server with --metrics",
    ),
)
UNKNOWN = Dialect("unknown", "", "", counters_advice="use a server that reports its counts of draft tokens")


def dialect_of(owner: str, metrics: str | None) -> Dialect:
    """The engine, by the owner of its models or, behind a gateway, by the names of its metrics."""
    by_owner = next((each for each in DIALECTS if each.owner == owner), None)
    by_metrics = (each for each in DIALECTS if metrics and f"\n{each.prefix}" in f"\n{metrics}")
    return by_owner or next(by_metrics, UNKNOWN)
