"""Translations: a drafter and a depth as options of other engines, if they have the method.

The option names are those of the engines' manuals and are not tested here. Methods of the same name differ in detail,
and the fastest choice in forerun need not be the fastest one there.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass

from forerun.draft.spec import DraftSpec, parse_spec
from forerun.ecosystem import NGRAM_LENGTH, SUFFIX_DEPTH

VLLM, SGLANG, LLAMA_CPP = "vLLM", "SGLang", "llama.cpp"


@dataclass(frozen=True, slots=True)
class Translation:
    """Options for an engine; if it lacks the method, `options` is empty and `note` says so."""

    engine: str
    options: str
    note: str = ""


def translations(draft: str, depth: int) -> list[Translation]:
    """The options of each engine for this drafter. For a mix or cascade, notes name the members to use instead."""
    spec = parse_spec(draft)
    return [Translation(engine, *write(spec, depth)) for engine, write in ENGINES.items()]


def vllm(spec: DraftSpec, depth: int) -> tuple[str, str]:
    """(options, note) for vLLM."""
    config: dict[str, object]
    if spec.name == "ngram":
        longest = int(spec.argument or NGRAM_LENGTH)
        config = {"method": "ngram", "num_speculative_tokens": depth, "prompt_lookup_max": longest}
    elif spec.name == "model":
        config = {"method": "draft_model", "model": spec.argument, "num_speculative_tokens": depth}
    elif spec.name == "suffix":
        config = {"method": "suffix", "num_speculative_tokens": SUFFIX_DEPTH}
    else:
        return "", no_method(spec)
    return f"--speculative-config {shlex.quote(json.dumps(config))}", ""


def sglang(spec: DraftSpec, depth: int) -> tuple[str, str]:
    """(options, note) for SGLang, which counts the bonus token as a draft token for draft models."""
    if spec.name == "ngram":
        return f"--speculative-algorithm NGRAM --speculative-num-draft-tokens {depth}", ""
    if spec.name == "model":
        model = shlex.quote(spec.argument or "")
        chain = f"--speculative-num-steps {depth} --speculative-eagle-topk 1 --speculative-num-draft-tokens {depth + 1}"
        return f"--speculative-algorithm STANDALONE --speculative-draft-model-path {model} {chain}", ""
    return "", no_method(spec)


def llama_cpp(spec: DraftSpec, depth: int) -> tuple[str, str]:
    """(options, note) for llama.cpp's server."""
    if spec.name == "ngram":
        return f"--spec-type ngram-simple --draft-max {depth}", "newer versions call it --spec-draft-n-max"
    if spec.name == "model":
        model = shlex.quote(f"{spec.argument}.gguf")
        return f"--model-draft {model} --draft-max {depth}", "the draft model has to be converted to GGUF first"
    return "", no_method(spec)


def no_method(spec: DraftSpec) -> str:
    """The note for a method that an engine lacks."""
    parts = ", ".join(str(member) for member in spec.members)
    return f"it has no {spec.name}" + (f"; try one of {parts} alone" if parts else "")


ENGINES: dict[str, Callable[[DraftSpec, int], tuple[str, str]]] = {VLLM: vllm, SGLANG: sglang, LLAMA_CPP: llama_cpp}
