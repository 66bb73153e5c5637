"""The servers that are compared, the command of each, and the modes in which they are measured.

This file decides every option of every server. All serve the same checkpoints with the same number of threads and the
same batch size. Prefix caches are switched off, because all prompts are sent repeatedly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.llama_cpp import LlamaCpp, server_command
from benchmarks.peers.ours import Forerun
from benchmarks.peers.place import Place
from benchmarks.peers.protocol import Mode, Setup
from benchmarks.peers.vllm_cpu import Vllm

from forerun.config import QUANTIZATIONS

OURS, LLAMA, LLAMA_DRAFT, VLLM = "forerun", "llama.cpp", "llama.cpp draft", "vllm-cpu"
PLAIN = Mode()
DRAFT_DEPTH = 3  # for llama.cpp, whose server has one depth for all loads
ENGINES = {engine.name: engine for engine in (Forerun(), LlamaCpp(), Vllm())}


@dataclass(frozen=True, slots=True)
class Places:
    """The batch size of a server, and the context length of each request in tokens, prompt and answer."""

    num_seqs: int
    context_tokens: int


@dataclass(frozen=True, slots=True)
class ServerKind:
    """A server: its peer, its command for a place, setup and port, and additional fields of request bodies."""

    name: str
    engine: str
    command: Callable[[Place, Setup, Places, int], list[str]]
    extra: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Contender:
    """A server in one mode: `speculation` as in `forerun bench serve`, "" if requests cannot choose it."""

    server: str
    speculation: str = ""

    @property
    def name(self) -> str:
        """The name of the contender in tables and records."""
        return f"{self.server} {self.speculation}".strip()


def forerun_command(place: Place, setup: Setup, places: Places, port: int) -> list[str]:
    """The command of this repository's server, with the draft model."""
    numbers = ["--quantize", setup.format] if setup.format in QUANTIZATIONS else []
    return [
        *(sys.executable, "-m", "forerun", "serve", "--port", str(port)),
        *("--model", setup.target, "--draft", f"model:{setup.draft}", "--dtype", "bfloat16", *numbers),
        *("--threads", str(setup.threads), "--no-prefix-cache"),
        *("--max-num-seqs", str(places.num_seqs), "--max-model-len", str(places.context_tokens)),
    ]


def llama_command(place: Place, setup: Setup, places: Places, port: int, mode: Mode = PLAIN) -> list[str]:
    """The command of llama-server in a mode, which is fixed when the server starts."""
    return [*server_command(setup, mode, port, places.num_seqs, places.context_tokens), "--cache-ram", "0"]


def llama_draft_command(place: Place, setup: Setup, places: Places, port: int) -> list[str]:
    """The command of llama-server with the draft model."""
    return llama_command(place, setup, places, port, Mode("model", DRAFT_DEPTH))


def vllm_command(place: Place, setup: Setup, places: Places, port: int) -> list[str]:
    """The command of vLLM's server in plain mode."""
    return [
        *(place.python, "-m", "vllm.entrypoints.openai.api_server", "--model", setup.target),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", setup.format, "--enforce-eager"),
        *("--max-num-seqs", str(places.num_seqs), "--max-model-len", str(places.context_tokens)),
        "--no-enable-prefix-caching",
    ]


NO_REUSE = {"cache_prompt": False}
VLLM_ENVIRONMENT = {name: value for name, value in Vllm.environment.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
SERVERS: Mapping[str, ServerKind] = {
    server.name: server
    for server in (
        ServerKind(OURS, Forerun.name, forerun_command, environment=Forerun.environment),
        ServerKind(LLAMA, LlamaCpp.name, llama_command, NO_REUSE),
        ServerKind(LLAMA_DRAFT, LlamaCpp.name, llama_draft_command, NO_REUSE),
        ServerKind(VLLM, Vllm.name, vllm_command, environment=VLLM_ENVIRONMENT),
    )
}


def contenders(peers: Sequence[str], modes: Sequence[str], precision: str) -> list[Contender]:
    """forerun in every mode, and the servers of those peers that support this class of precision."""
    ours = [Contender(OURS, mode) for mode in modes]
    theirs = [each for each in SERVERS.values() if each.engine in peers and precision in ENGINES[each.engine].formats]
    return [*ours, *(Contender(server.name) for server in theirs)]
