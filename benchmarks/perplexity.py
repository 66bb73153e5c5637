"""The perplexity of pages of text, compared with llama.cpp's on the same GGUF file.

    python -m benchmarks.perplexity --model MODEL.gguf [--pages 20] [--tokens 512] [--folder build/peers]

The pages are docstrings of this Python's standard library, module after module by name, with single spaces between
words, so that any machine with the same Python has the same text. A page has `--tokens` tokens; the perplexity is that
of its second half, given all earlier tokens of the page. `llama-perplexity` evaluates the same tokens: the tokens of
both engines are compared, with the tokenizer of llama.cpp's server.

The exit status is 1 if the two differ by more than half a percent.
"""

from __future__ import annotations

import ast
import json
import math
import os
import re
import subprocess
import sys
import sysconfig
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.options import option, options_of
from benchmarks.peers.llama_cpp import LlamaCpp, Server, binary
from benchmarks.peers.place import Place
from benchmarks.peers.protocol import Mode, Setup
from benchmarks.processes import ROOT, StepFailed, tail

from forerun import LLM, SamplingParams

MAX_DIFFERENCE = 0.005
LEAST_WORDS = 40  # minimum length of a docstring
FINAL = re.compile(r"Final estimate: PPL = ([\d.]+)")


def documentation() -> Iterator[str]:
    """The long docstrings of the standard library's modules."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        nodes = [tree, *(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef | ast.FunctionDef))]
        for node in nodes:
            words = (ast.get_docstring(node) or "").split()
            if len(words) >= LEAST_WORDS:
                yield " ".join(words)


def pages_text(llm: LLM, num_tokens: int) -> str:
    """Text of at least `num_tokens` tokens."""
    text = ""
    for passage in documentation():
        text += f"{passage}\n"
        if len(text) > 3 * num_tokens and len(llm.tokenizer.encode(text)) > num_tokens:
            return text
    raise SystemExit(f"the standard library's docstrings have fewer than {num_tokens} tokens: use fewer --pages")


def pages_of(tokens: Sequence[int], count: int, length: int, begins: int | None) -> list[list[int]]:
    """`count` pages of `length` tokens; with `begins`, every page starts with that token, such as BOS."""
    pages = [list(tokens[i * length : (i + 1) * length]) for i in range(count)]
    return pages if begins is None else [[begins, *page[1:]] for page in pages]


def perplexity(llm: LLM, pages: Sequence[Sequence[int]]) -> float:
    """The perplexity of the second halves of the pages."""
    logprobs = []
    for page in pages:
        (result,) = llm.generate([list(page)], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
        num_judged = len(page) - len(page) // 2 - 1
        logprobs += [token.logprob for token in result.prompt_logprobs[-num_judged:]]
    return math.exp(-math.fsum(logprobs) / len(logprobs))


def peer_perplexity(setup: Setup, text: Path, count: int, length: int) -> float:
    """The perplexity that llama.cpp computes."""
    program = binary(Path(setup.place), "llama-perplexity")
    command = [program, "--model", setup.target, "--file", str(text), "--ctx-size", str(length)]
    command += ["--chunks", str(count), "--threads", str(setup.threads), "--batch-size", str(length)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    estimate = FINAL.search(done.stdout + done.stderr)
    if estimate is None:
        raise StepFailed(f"llama-perplexity printed no estimate: exit status {done.returncode}\n{tail(done.stderr)}")
    return float(estimate[1])


def peer_tokens(setup: Setup, text: str) -> list[int]:
    """The text's tokens from llama.cpp's tokenizer."""
    with closing(Server(setup, Mode())) as server:
        body = json.dumps({"content": text, "add_special": True}).encode()
        request = urllib.request.Request(f"{server.url}/tokenize", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            tokens: list[int] = json.load(response)["tokens"]
    return tokens


@dataclass(slots=True, kw_only=True)
class Options:
    """The model file and the amount of text."""

    model: str = option(what="a GGUF file", required=True)
    pages: int = option(20, "pages (default %(default)s)")
    tokens: int = option(512, "tokens of a page (default %(default)s)")
    threads: int = option(os.cpu_count(), "threads of both engines (default: all cores)")
    jobs: int = option(2, "compilers at once (default %(default)s)")
    folder: Path = option(ROOT / "build" / "peers", "folder in which llama.cpp is built")


def main() -> int:
    """Print both perplexities and their relative difference; returns 1 if it exceeds MAX_DIFFERENCE, otherwise 0."""
    options = options_of(Options)
    place = Place(options.folder.resolve() / LlamaCpp.name, options.jobs)
    model = str(Path(options.model).resolve())
    setup = Setup(model, "", "as stored", options.threads, str(place.folder), options.tokens)
    LlamaCpp().make(place, setup)
    llm = LLM(model, max_model_len=options.tokens + 1, max_num_seqs=1, threads=options.threads)
    text = pages_text(llm, (options.pages + 1) * options.tokens)
    file = place.folder / "pages.txt"
    file.write_text(text, encoding="utf-8")
    tokens = llm.tokenizer.encode(text)
    other_tokens = peer_tokens(setup, text)
    if tokens != other_tokens:
        pairs = enumerate(zip(tokens, other_tokens, strict=False))
        first = next((i for i, pair in pairs if pair[0] != pair[1]), "the end")
        raise SystemExit(f"the engines encode the text as different tokens, from token {first} on")
    begins = tokens[0] if llm.tokenizer.encode("") else None
    ours = perplexity(llm, pages_of(tokens, options.pages, options.tokens, begins))
    theirs = peer_perplexity(setup, file, options.pages, options.tokens)
    difference = ours / theirs - 1
    goal = f"goal: at most {MAX_DIFFERENCE:.1%}"
    print(f"{options.pages} pages of {options.tokens} tokens, {model}: {llm.format}, {llm.kernels}")
    print(f"perplexity: forerun {ours:.4f}, llama.cpp {theirs:.4f}, difference {difference:+.3%} ({goal})")
    return 1 if abs(difference) > MAX_DIFFERENCE else 0


if __name__ == "__main__":
    sys.exit(main())
