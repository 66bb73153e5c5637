"""llama.cpp: its server, built for this machine from the sources that llama-cpp-python ships; bf16, q8_0, q4_K_M.

This file decides how the server is built, how its model files are made, and which flags a mode has. The flags of
speculation are fixed when a server starts, so every mode has its own server, started at the mode's first answer. Times
are those that the server reports, so they exclude HTTP; its decoding time begins with the first token.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.peers.place import Peer, Place
from benchmarks.peers.protocol import Answer, Mode, Service, Setup, serve
from benchmarks.processes import ServerProcess, StepFailed, free_port
from typing_extensions import override

PACKAGE = "llama-cpp-python"
GGUF = ".gguf"
MATCHED_TOKENS = 3  # length of its n-grams; its default, 12, hardly ever matches in a text this short
ASK_LIMIT_S = 1800.0
CMAKE_FLAGS = (
    "-GNinja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF "
    "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF"
)
AVX2 = "-DGGML_NATIVE=OFF -DGGML_SSE42=ON -DGGML_AVX=ON -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON"
AVX512 = f"{AVX2} -DGGML_AVX512=ON -DGGML_AVX512_VNNI=ON"
ISA_FLAGS: Mapping[str | None, str] = {
    None: "-DGGML_NATIVE=ON",
    "avx2": AVX2,
    "avx512": AVX512,
    "amx": f"{AVX512} -DGGML_AVX512_BF16=ON -DGGML_AMX_TILE=ON -DGGML_AMX_INT8=ON -DGGML_AMX_BF16=ON",
}
INCLUDED = Path(__file__).with_name("tile_config.h")  # says why
BINARIES = ("llama-server", "llama-quantize", "llama-perplexity")


class LlamaCpp(Peer):
    """Reads GGUF files, which are written from the checkpoints in bfloat16 and quantised with llama.cpp's own tool."""

    name = "llama.cpp"
    formats: Mapping[str, str] = {"16-bit": "bf16", "8-bit": "q8_0", "4-bit": "q4_K_M"}
    module = "benchmarks.peers.llama_cpp"

    @override
    def make(self, place: Place, setup: Setup) -> None:
        """Build llama.cpp and write both models in the setup's format; GGUF files are used without conversion."""
        self.make_programs(place)
        for folder in (Path(each) for each in (setup.target, setup.draft) if each and not each.endswith(GGUF)):
            first, wanted = (gguf_of(place.folder, folder, each) for each in ("bf16", setup.format))
            place.once(first.stem, str(folder), partial(self.export, place, folder, first))
            if wanted != first:
                command = [binary(place.folder, "llama-quantize"), str(first), str(wanted), setup.format]
                place.once(wanted.stem, str(folder), partial(place.run, f"quantising to {setup.format}", command))

    def make_programs(self, place: Place) -> None:
        """Build the programs, unless they were built before with the same flags."""
        place.install(["cmake", "ninja"])
        key = f"{cmake_flags(place)}{INCLUDED.read_text(encoding='utf-8')}{BINARIES}"
        place.once("build", key, partial(self.build, place))

    def build(self, place: Place) -> None:
        """Fetch the sources and compile."""
        download = ["download", "--quiet", "--no-deps", "--no-binary", PACKAGE, "-d", str(place.folder), PACKAGE]
        place.run(f"pip download {PACKAGE}", [place.python, "-m", "pip", *download])
        archive = max(place.folder.glob("llama_cpp_python-*.tar.gz"), key=lambda path: path.stat().st_mtime)
        with tarfile.open(archive) as sources:
            sources.extractall(place.folder, filter="data")
        source = place.folder / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"
        tools = {"PATH": f"{place.folder / 'venv' / 'bin'}:{os.environ['PATH']}"}
        built = str(place.folder / "cmake")
        include = f"-DCMAKE_CXX_FLAGS=-include {INCLUDED}"
        place.run("cmake", ["cmake", "-S", str(source), "-B", built, *cmake_flags(place).split(), include], tools)
        jobs = ["--parallel", str(place.jobs)]
        place.run("compiling (long)", ["cmake", "--build", built, *jobs, "--target", *BINARIES], tools)

    def export(self, place: Place, source: Path, file: Path) -> None:
        """Write one model in bfloat16."""
        place.run(
            f"writing {file.name}", [sys.executable, "-m", "benchmarks.peers.gguf_export", str(source), str(file)]
        )


def cmake_flags(place: Place) -> str:
    """The options of cmake for the instruction set of the place."""
    return f"{CMAKE_FLAGS} {ISA_FLAGS[place.isa]}"


def gguf_of(folder: Path, checkpoint: Path, number_format: str) -> Path:
    """The path of a checkpoint's GGUF file in this number format; a GGUF checkpoint is its own file."""
    if checkpoint.suffix == GGUF:
        return checkpoint
    return folder / f"{checkpoint.name}-{number_format}.gguf"


def binary(folder: Path, name: str) -> str:
    """The path of one of the programs that were built."""
    return str(folder / "cmake" / "bin" / name)


def mode_flags(mode: Mode, draft: Path, threads: int) -> list[str]:
    """The server's flags of speculation for a mode."""
    depth, count = str(mode.depth), str(threads)
    if mode.drafter == "model":
        flags = ["--spec-type", "draft-simple", "--model-draft", str(draft), "--spec-draft-n-max", depth]
        return [*flags, "--threads-draft", count, "--threads-batch-draft", count]
    if mode.drafter == "ngram":
        matched = ["--spec-ngram-simple-size-n", str(MATCHED_TOKENS)]
        return ["--spec-type", "ngram-simple", *matched, "--spec-ngram-simple-size-m", depth]
    return []


def server_command(setup: Setup, mode: Mode, port: int, num_seqs: int, context_tokens: int) -> list[str]:
    """The command of a server in a mode, for `num_seqs` requests at once with `context_tokens` each."""
    place, count = Path(setup.place), str(setup.threads)
    target, draft = (gguf_of(place, Path(each), setup.format) for each in (setup.target, setup.draft))
    return [
        *(binary(place, "llama-server"), "--model", str(target), "--host", "127.0.0.1", "--port", str(port)),
        *("--parallel", str(num_seqs), "--ctx-size", str(num_seqs * context_tokens)),
        *("--threads", count, "--threads-batch", count),
        *mode_flags(mode, draft, setup.threads),
    ]


class Server(ServerProcess):
    """One llama-server, which runs and is stopped together with the worker process."""

    def __init__(self, setup: Setup, mode: Mode) -> None:
        port = free_port()
        log = Path(setup.place) / f"server-{setup.format}-{mode}.log"
        super().__init__(server_command(setup, mode, port, 1, setup.context_tokens), port, log, {}, apart=False)

    def complete(self, prompt_ids: Sequence[int], num_tokens: int) -> dict[str, Any]:
        """The server's greedy answer to token ids, ignoring the end-of-sequence token and without its prompt cache."""
        body = {
            "prompt": list(prompt_ids),
            "n_predict": num_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/completion", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=ASK_LIMIT_S) as response:
            answer: dict[str, Any] = json.load(response)
        return answer


def load(setup: Setup, stack: ExitStack) -> Service:
    """A service that starts the server of each mode at the mode's first answer; `stack` ends the servers."""
    servers: dict[Mode, Server] = {}

    def generate(mode: Mode, prompt_ids: Sequence[int], num_tokens: int) -> Answer:
        if mode not in servers:
            servers[mode] = Server(setup, mode)
            stack.callback(servers[mode].close)
        answer = servers[mode].complete(prompt_ids, num_tokens)
        tokens, timings = answer["tokens"], answer["timings"]
        num_rounds = num_tokens - 1 - timings.get("draft_n_accepted", 0)
        if len(tokens) != num_tokens:
            raise StepFailed(f"llama-server returned {len(tokens)} tokens instead of {num_tokens}")
        prompt_s, decode_s = timings["prompt_ms"] / 1e3, timings["predicted_ms"] / 1e3
        return Answer(tokens, num_tokens - 1, prompt_s, decode_s, num_rounds)

    sources = next(Path(setup.place).glob("llama_cpp_python-*/"), Path("unknown")).name
    ended = subprocess.run([binary(Path(setup.place), "llama-server"), "--version"], capture_output=True, check=True)
    build = b" ".join((ended.stdout + ended.stderr).split()).decode(errors="replace")
    return Service({"sources": sources, "build": build}, generate)


if __name__ == "__main__":
    with ExitStack() as servers_up:
        serve(lambda setup: load(setup, servers_up))
