"""Trial: compiles a long grammar in another process first, to find out whether this process can compile it.

llguidance resolves references by recursion and builds automata without a limit of time: a few thousand rules overflow
the stack, which ends the process, and a long expression takes minutes. This file decides which grammars need a trial,
and how much time, memory and stack they may take.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

UNTRIED_CHARACTERS = 4000  # grammars up to this length need no trial: the stack has room for ten times their rules
LIMIT_S = 2  # of processor time: ten times what long schemas in practice take
PATIENCE_S = 20.0  # of elapsed time, for busy machines and systems without limits of processor time
NICENESS = 10  # lets running requests go first
MOST_MEMORY = 1 << 30  # bytes
STACK_BYTES = 1 << 22  # half of what threads have, so that a grammar which passes the trial also compiles there
TOO_MUCH = "compiling it takes too much time, memory or depth."
PROGRAM = "import sys; sys.path += sys.argv[1:]; from forerun.sampling.trial import main; main()"


def problem_of_trial(source: str, num_tokens: int, special: Mapping[int, str]) -> str | None:
    """What is wrong with a grammar in llguidance's own format, for a vocabulary of `num_tokens`; None if it compiles.

    `special` has the names of the ids that the grammar may name. Takes at most PATIENCE_S, and is safe for any source.
    """
    origins = [spec.origin for name in ("forerun", "llguidance") if (spec := find_spec(name)) is not None]
    folders = dict.fromkeys(str(Path(origin).absolute().parents[1]) for origin in origins if origin is not None)
    command = [sys.executable, "-I", "-S", "-c", PROGRAM, *folders]
    request = json.dumps([source, num_tokens, list(special.items())]).encode()
    try:
        done = subprocess.run(command, input=request, capture_output=True, timeout=PATIENCE_S, process_group=0)
    except subprocess.TimeoutExpired:
        return TOO_MUCH
    return json.loads(done.stdout)[0] if done.returncode == 0 else TOO_MUCH


class TokenTable:
    """The attributes that llguidance reads of a tokenizer: the bytes of each token, then an additional end token, since
    the request decides which ids end a text. `special` ids are not text."""

    def __init__(self, tokens: Sequence[bytes], special: Iterable[int], encode: Callable[[str], Iterable[int]]) -> None:
        self.eos_token_id, self.bos_token_id = len(tokens), None
        self.tokens = [*tokens, b"<end of the grammar>"]
        self.special_token_ids = sorted({*special, self.eos_token_id})
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        return list(self._encode(text))


def limit_resources() -> None:
    """Limit this process's time and memory, and switch off core dumps, if the system supports it."""
    with suppress(ImportError, OSError, ValueError, AttributeError):
        import resource

        os.nice(NICENESS)

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S + 1))
        resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))


def compile_grammar(source: str, num_tokens: int, special: Sequence[tuple[int, str]]) -> str | None:
    """Compile a grammar and compute its first mask; returns llguidance's error message, if any."""
    import llguidance

    tokens = [bytes([i]) if i < 256 else b"\xff" + i.to_bytes(4, "big") for i in range(num_tokens)]  # stand-ins
    for token, name in special:
        tokens[token] = name.encode()
    vocabulary: Any = llguidance.TokenizerWrapper(TokenTable(tokens, dict(special), str.encode))
    limits = llguidance.LLParserLimits(verbose_errors=False)
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer(vocabulary), source, log_level=0, limits=limits)
    if matcher.is_error():
        return str(matcher.get_error())
    matcher.compute_bitmask()
    return None


def main() -> None:
    """Compile the grammar on standard input and write its error message or null; without success the process ends."""
    request = json.load(sys.stdin.buffer)
    limit_resources()
    threading.stack_size(STACK_BYTES)
    outcome = list[str | None]()
    thread = threading.Thread(target=lambda: outcome.append(compile_grammar(*request)))
    thread.start()
    thread.join()
    sys.stdout.write(json.dumps(outcome))
    sys.exit(not outcome)
