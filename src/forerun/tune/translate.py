"""Translations: a drafter and a depth in the words of other engines, where they have the method.

Nothing here was run: names of options are those of their manuals, methods of one name differ in detail, and what is
fastest here need not be fastest there.
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
    """Options for an engine; where it has no such method `options` is empty and `note` says so."""

    engine: str
    options: str
    note: str = ""


def translations(draft: str, depth: int) -> list[Translation]:
    """The options of each engine for this drafter. Of a mix or a cascade the parts are named that it could use."""
    spec = parse_spec(draft)
    return [Translation(engine, *write(spec, depth)) for engine, write in ENGINES.items()]


def vllm(spec: DraftSpec, depth: int) -> tuple[str, str]:
    """vLLM's speculative configuration."""
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
    """SGLang's options; it counts the token behind the guesses as a draft token of a draft model."""
    if spec.name == "ngram":
        return f"--speculative-algorithm NGRAM --speculative-num-draft-tokens {depth}", ""
    if spec.name == "model":
        model = shlex.quote(spec.argument or "")
        chain = f"--speculative-num-steps {depth} --speculative-eagle-topk 1 --speculative-num-draft-tokens {depth + 1}"
        return f"--speculative-algorithm STANDALONE --speculative-draft-model-path {model} {chain}", ""
    return "", no_method(spec)


def llama_cpp(spec: DraftSpec, depth: int) -> tuple[str, str]:
    """llama.cpp's options, of its server."""
    if spec.name == "ngram":
        return f"--spec-type ngram-simple --draft-max {depth}", "newer versions spell it --spec-draft-n-max"
    if spec.name == "model":
        model = shlex.quote(f"{spec.argument}.gguf")
        return f"--model-draft {model} --draft-max {depth}", "the draft model has to be converted to GGUF first"
    return "", no_method(spec)


def no_method(spec: DraftSpec) -> str:
    """What is said of a drafter that an engine does not have."""
    parts = ", ".join(str(member) for member in spec.members)
    return f"it has no {spec.name}" + (f"; try one of {parts} alone" if parts else "")


ENGINES: dict[str, Callable[[DraftSpec, int], tuple[str, str]]] = {VLLM: vllm, SGLANG: sglang, LLAMA_CPP: llama_cpp}
