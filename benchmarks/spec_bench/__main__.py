"""The command: plain answers first, then every mode of every engine by turns, then the tables and JSON.

Decides options, who is asked in which mode, and what names a run, so that it can go on where it was stopped.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.markdown import table
from benchmarks.options import option, options_of, several
from benchmarks.peers.__main__ import ENGINES, STOPPED, all_made, print_progress, require_known
from benchmarks.peers.huggingface import Transformers
from benchmarks.peers.llama_cpp import GGUF, LlamaCpp
from benchmarks.peers.machine import machine, source_digest
from benchmarks.peers.place import Peer, Place
from benchmarks.peers.protocol import CHOSEN, Mode, Setup
from benchmarks.peers.race import PLAIN, Race
from benchmarks.peers.state import State
from benchmarks.peers.tables import OURS, Repetitions
from benchmarks.processes import ROOT
from benchmarks.spec_bench.answers import BATCH, AnswerFile, Turn, answer_all, template_of
from benchmarks.spec_bench.figures import Summary, as_objects, distinct_by_task, markdown, summaries
from benchmarks.spec_bench.questions import SOURCE, Question, read_questions

from forerun import LLM, SamplingParams
from forerun.demo import chat_model
from forerun.models.loading import Blueprint

KIND = "spec_bench"  # of what is kept
DRAFTS = ("ngram", "suffix", "mix[ngram,suffix]", "auto")
PEERS = (LlamaCpp.name, Transformers.name)
FORMATS = {OURS: "as stored", LlamaCpp.name: "as stored", Transformers.name: "bfloat16"}
READ_TOKENS, READ_ANSWER = 512, 8  # of the prompt whose first token is timed


@dataclass(frozen=True, slots=True)
class Asked:
    """What all engines are asked: the turns, and behind them the prompt whose first token is timed."""

    turns: Sequence[Turn]

    @property
    def prompts(self) -> list[list[int]]:
        """As tokens."""
        tokens = itertools.chain.from_iterable(turn.prompt_ids for turn in itertools.cycle(self.turns))
        return [*(list(turn.prompt_ids) for turn in self.turns), list(itertools.islice(tokens, READ_TOKENS))]

    @property
    def lengths(self) -> list[int]:
        """Of their answers."""
        return [*(len(turn.answer_ids) for turn in self.turns), READ_ANSWER]


@dataclass(frozen=True, slots=True)
class Step:
    """An engine's plain decoding: a step, what it is of the time that reading its weights takes, the first token."""

    engine: str
    step_s: float
    of_bandwidth: float
    first_token_s: float | None


@dataclass(slots=True)
class Options:
    """What a run is; `repeats` may grow from one call to the next."""

    questions: Path = option(what=f"the questions. {SOURCE}", required=True)
    model: str = option(
        str(chat_model.cached_path()),
        "a GGUF file, a Hugging Face folder or a bundled name (default: the chat model that `make demo` fetches)",
    )
    draft: Sequence[str] = option(None, f"a mode; default: {DRAFTS}", action="append", metavar="DRAFT[@DEPTH]")
    prompts_per_category: int | None = option(None, "N of each category (default: all)", metavar="N")
    tokens: int = option(256, "most tokens of an answer (default %(default)s)")
    temperature: float = option(0.0, "peers are asked at 0 alone (default 0)")
    repeats: int = option(3, "repetitions (default %(default)s)")
    context: int = option(4096, "tokens of the longest text (default %(default)s)")
    threads: int = option(os.cpu_count(), "of every engine (default: all cores)")
    peers: Sequence[str] = option("", f"of {', '.join(PEERS)}, or all", type=several(str), nargs="?", const=PEERS)
    peer_depth: int = option(5, "that peers guess by n-grams (default %(default)s)")
    jobs: int = option(2, "compilers at once (default %(default)s)")
    folder: Path = option(ROOT / "build" / "peers", "where everything is kept")
    output: Path | None = option(None, "a JSON file to write; the tables are written beside it, as .md")
    time_limit: float | None = option(None, "stop after so many seconds; call again to go on", metavar="S")

    def __post_init__(self) -> None:
        self.draft, self.peers = list(self.draft or DRAFTS), list(self.peers)
        require_known(self.peers, PEERS)
        if self.peers and self.temperature:
            raise ValueError("peers are compared at temperature 0, where all give the same text: leave them or it out")
        if LlamaCpp.name in self.peers and not self.model.endswith(GGUF):
            raise ValueError(f"{LlamaCpp.name} reads GGUF files: name one, or leave it out")
        if self.model.endswith(GGUF):
            self.model = str(Path(self.model).resolve())


def mode_of(draft: str) -> Mode:
    """A drafter's mode; one without a depth chooses it."""
    return Mode.parse(draft if "@" in draft else f"{draft}@{CHOSEN}")


def wanted(options: Options) -> Iterator[tuple[Peer, Place, Setup]]:
    """The engines, with their places and what their workers are started with."""
    for name in (OURS, *options.peers):
        place = Place(options.folder / name, options.jobs)
        yield (
            ENGINES[name],
            place,
            Setup(
                target=options.model,
                draft="",
                format=FORMATS[name],
                threads=options.threads,
                place=str(place.folder),
                context_tokens=options.context,
                temperature=options.temperature,
            ),
        )


def run_names(options: Options, questions: Sequence[Question], about: Mapping[str, Any]) -> tuple[str, str]:
    """16 hex digits each for what must be equal: that plain answers belong together, and that all answers do."""
    answers = [about["fingerprint"], about["template"], options.tokens, options.temperature, options.context]
    answers += [[question.number, question.turns] for question in questions]
    modes = [source_digest(), options.threads, options.draft, options.peers, options.peer_depth]
    words = (json.dumps(answers), json.dumps([answers, modes]))
    return hashlib.sha256(words[0].encode()).hexdigest()[:16], hashlib.sha256(words[1].encode()).hexdigest()[:16]


def prepared(options: Options, questions: Sequence[Question]) -> tuple[Asked, str, dict[str, Any]]:
    """The plain answers, the run's name, and what is to be told about the model."""
    model = options.model
    llm = LLM(model, max_model_len=options.context, max_num_seqs=BATCH, threads=options.threads, use_tqdm_on_load=False)
    template = template_of(llm)
    about: dict[str, Any] = {"model": llm.name, "fingerprint": llm.fingerprint, "format": llm.format}
    about |= {"kernels": llm.kernels, "template": template, "weights_bytes": Blueprint.of(model).pass_bytes}
    answers, run = run_names(options, questions, about)
    params = SamplingParams(temperature=options.temperature, max_tokens=options.tokens, seed=0)
    kept = AnswerFile(options.folder / f"{KIND}_answers.jsonl", answers)
    return Asked(answer_all(llm, questions, params, kept)), run, about


def measure(options: Options, asked: Asked, state: State) -> bool:
    """All repetitions that are not there yet; False if the time limit came first."""
    until_s = time.monotonic() + options.time_limit if options.time_limit else None
    missing = state.missing(KIND, options.repeats)
    if not missing:
        return True
    ready, failures = all_made(wanted(options))
    grams = Mode("ngram", options.peer_depth)
    modes = [PLAIN, *map(mode_of, options.draft), *([grams] if options.peers else [])]
    race = Race(ready, modes, asked.prompts, len(asked.prompts), print_progress, failures, left_out=[(OURS, grams)])
    return race.measure(state, KIND, missing, asked.lengths, options.threads, until_s)


def steps(asked: Asked, repetitions: Repetitions, about: Mapping[str, Any]) -> list[Step]:
    """Plain decoding of every engine: medians over all answers."""
    cells = [cell for found in repetitions.values() for cell in found if cell.mode == str(PLAIN)]
    least_s = about["weights_bytes"] / about["bandwidth_bytes_per_s"]
    found = []
    for engine in dict.fromkeys(cell.engine for cell in cells):
        own = [cell for cell in cells if cell.engine == engine]
        first = [cell.answer.prompt_s for cell in own if cell.prompt == len(asked.turns)]
        times = [c.answer.decode_s / c.answer.num_decoded for c in own if c.answer.num_decoded]
        step_s = statistics.median(times)
        found.append(Step(engine, step_s, least_s / step_s, statistics.median(first) if first else None))
    return found


def steps_table(found: Sequence[Step], about: Mapping[str, Any]) -> str:
    """What a plain step takes, and how long the first token."""
    size, speed = about["weights_bytes"] / 1e6, about["bandwidth_bytes_per_s"] / 1e9
    rows = []
    for each in found:
        first = "" if each.first_token_s is None else f"{1e3 * each.first_token_s:.1f}"
        rows.append([each.engine, f"{1e3 * each.step_s:.2f}", f"{each.of_bandwidth:.0%}", first])
    heads = ("engine", "plain step, ms", "of the memory's speed", f"first token of {READ_TOKENS} tokens, ms")
    said = f"A plain step reads {size:.1f} MB of weights; a gigabyte was summed at {speed:.1f} GB/s."
    return f"{said}\n\n{table(heads, rows)}"


def report(options: Options, asked: Asked, state: State, about: Mapping[str, Any]) -> list[Summary]:
    """Print and write the tables and everything behind them."""
    repetitions = {i: cells for i, cells in state.repetitions(KIND).items() if i < options.repeats}
    everything = dict(about) | state.about(KIND) | {"machine": machine(), "commit": commit(), "run": state.run}
    found, timed = summaries(asked.turns, repetitions), steps(asked, repetitions, everything)
    num_questions = len({turn.number for turn in asked.turns})
    processor, cores = everything["machine"]["processor"], options.threads
    title = (
        f"### Spec-Bench: {Path(str(about['model'])).name}, {about['format']}\n\n"
        f"{num_questions} questions, {len(asked.turns)} answers of at most {options.tokens} tokens, temperature "
        f"{options.temperature:g}, chat template {about['template'] or 'none'}, {len(repetitions)} repetitions; "
        f"{processor}, {cores} threads, {about['kernels']}; commit {everything['commit']}.\n"
    )
    lines = [title, markdown(found, asked.turns), steps_table(timed, everything)]
    lines += [f"{failed['engine']} {failed['mode']} failed: {failed['reason']}" for failed in everything["failures"]]
    text = "\n".join(lines)
    print(f"\n{text}")
    if options.output:
        settings = {name: str(v) if isinstance(v, Path) else v for name, v in asdict(options).items()}
        content = everything | {"settings": settings, "summaries": as_objects(found)}
        content |= {"steps": [asdict(each) for each in timed], "distinct": distinct_by_task(asked.turns)}
        content["lengths"] = [[len(turn.prompt_ids), len(turn.answer_ids)] for turn in asked.turns]
        options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        options.output.with_suffix(".md").write_text(text, encoding="utf-8")
    return found


def commit() -> str:
    """The commit that is checked out."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def main(arguments: Sequence[str]) -> int:
    """1 if a drafter changed forerun's tokens or a peer failed; STOPPED if the time limit came first."""
    options = options_of(Options, arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # workers are ended on the way out
    questions = read_questions(options.questions, options.prompts_per_category)
    asked, run, about = prepared(options, questions)
    state = State(options.folder / f"{KIND}.jsonl", run)
    if not measure(options, asked, state):
        print("the time is over; the same command goes on", flush=True)
        return STOPPED
    found = report(options, asked, state, about)
    differ = any(each.num_different for each in found if each.engine == OURS)
    return 1 if differ or state.about(KIND)["failures"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
