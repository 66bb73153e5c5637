"""The command: plain answers first, then all modes of all engines alternating, then the tables and JSON.

This file decides the options, the modes of each engine, and the name of a run, by which an interrupted run is found and
continued.
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
from benchmarks.spec_bench.figures import Summary, distinct_by_task, markdown, summaries
from benchmarks.spec_bench.questions import SOURCE, Question, read_questions

from forerun import LLM, SamplingParams
from forerun.demo import chat_model
from forerun.models.loading import Blueprint

KIND = "spec_bench"  # name of the files and records of answers
DRAFTS = ("ngram", "suffix", "mix[ngram,suffix]", "auto")
PEERS = (LlamaCpp.name, Transformers.name)
FORMATS = {OURS: "as stored", LlamaCpp.name: "as stored", Transformers.name: "bfloat16"}
PREFILL_TOKENS, PREFILL_ANSWER = 512, 8  # lengths of the prompt whose first token is timed, and of its answer


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests to every engine: the turns, followed by a prompt whose first token is timed."""

    turns: Sequence[Turn]

    @property
    def prompts(self) -> list[list[int]]:
        """The token ids of the prompts."""
        tokens = itertools.chain.from_iterable(turn.prompt_ids for turn in itertools.cycle(self.turns))
        return [*(list(turn.prompt_ids) for turn in self.turns), list(itertools.islice(tokens, PREFILL_TOKENS))]

    @property
    def lengths(self) -> list[int]:
        """The lengths of the answers in tokens."""
        return [*(len(turn.answer_ids) for turn in self.turns), PREFILL_ANSWER]


@dataclass(frozen=True, slots=True)
class Step:
    """An engine's plain decoding.

    `of_bandwidth` is the time to read the weights at the measured bandwidth, as a share of the time of a step.
    """

    engine: str
    step_s: float
    of_bandwidth: float
    first_token_s: float | None


@dataclass(slots=True)
class Options:
    """The options of a run; `repeats` may grow from one call to the next."""

    questions: Path = option(what=f"the questions. {SOURCE}", required=True)
    model: str = option(
        str(chat_model.cached_path()),
        "a GGUF file, a Hugging Face folder or a bundled name (default: the chat model that `make demo` fetches)",
    )
    draft: Sequence[str] = option(None, f"a mode; default: {DRAFTS}", action="append", metavar="DRAFT[@DEPTH]")
    prompts_per_category: int | None = option(None, "N questions of each category (default: all)", metavar="N")
    tokens: int = option(256, "maximum tokens of an answer (default %(default)s)")
    temperature: float = option(0.0, "temperature; --peers needs 0 (default 0)")
    repeats: int = option(3, "repetitions (default %(default)s)")
    context: int = option(4096, "tokens of the longest text (default %(default)s)")
    threads: int = option(os.cpu_count(), "threads of every engine (default: all cores)")
    peers: Sequence[str] = option(
        "", f"which of {', '.join(PEERS)}; without a value all", type=several(str), nargs="?", const=PEERS
    )
    peer_depth: int = option(5, "draft tokens of the peers' n-grams (default %(default)s)")
    jobs: int = option(2, "compilers at once (default %(default)s)")
    folder: Path = option(ROOT / "build" / "peers", "folder of environments and answers")
    output: Path | None = option(None, "a JSON file to write; the tables are written next to it, as .md")
    time_limit: float | None = option(None, "stop after S seconds; the same command continues", metavar="S")

    def __post_init__(self) -> None:
        self.draft, self.peers = list(self.draft or DRAFTS), list(self.peers)
        require_known(self.peers, PEERS)
        if self.peers and self.temperature:
            raise ValueError("--peers needs temperature 0, where all engines give the same text: leave one option out")
        if LlamaCpp.name in self.peers and not self.model.endswith(GGUF):
            raise ValueError(f"--model {self.model}: {LlamaCpp.name} needs a GGUF file; give one, or other --peers")
        if self.model.endswith(GGUF):
            self.model = str(Path(self.model).resolve())


def mode_of(draft: str) -> Mode:
    """The mode of a drafter; without a depth, forerun chooses the depth."""
    return Mode.parse(draft if "@" in draft else f"{draft}@{CHOSEN}")


def wanted(options: Options) -> Iterator[tuple[Peer, Place, Setup]]:
    """The engines, with their places and the setups of their workers."""
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
    """The names of the set of plain answers and of the run: 16 hex digits each, which depend on all settings."""
    answers = [about["fingerprint"], about["template"], options.tokens, options.temperature, options.context]
    answers += [[question.number, question.turns] for question in questions]
    modes = [source_digest(), options.threads, options.draft, options.peers, options.peer_depth]
    words = (json.dumps(answers), json.dumps([answers, modes]))
    return hashlib.sha256(words[0].encode()).hexdigest()[:16], hashlib.sha256(words[1].encode()).hexdigest()[:16]


def prepared(options: Options, questions: Sequence[Question]) -> tuple[Workload, str, dict[str, Any]]:
    """Generate the plain answers that are missing; the workload, the run's name, and facts about the model."""
    model = options.model
    llm = LLM(model, max_model_len=options.context, max_num_seqs=BATCH, threads=options.threads, use_tqdm_on_load=False)
    template = template_of(llm)
    about: dict[str, Any] = {"model": llm.name, "fingerprint": llm.fingerprint, "format": llm.format}
    about |= {"kernels": llm.kernels, "template": template, "weights_bytes": Blueprint.of(model).pass_bytes}
    answers, run = run_names(options, questions, about)
    params = SamplingParams(temperature=options.temperature, max_tokens=options.tokens, seed=0)
    saved = AnswerFile(options.folder / f"{KIND}_answers.jsonl", answers)
    return Workload(answer_all(llm, questions, params, saved)), run, about


def measure(options: Options, workload: Workload, state: State) -> bool:
    """Run the missing repetitions; False if the time limit ended this early."""
    until_s = time.monotonic() + options.time_limit if options.time_limit else None
    missing = state.missing(KIND, options.repeats)
    if not missing:
        return True
    ready, failures = all_made(wanted(options))
    grams = Mode("ngram", options.peer_depth)
    modes = [PLAIN, *map(mode_of, options.draft), *([grams] if options.peers else [])]
    prompts = workload.prompts
    race = Race(ready, modes, prompts, len(prompts), print_progress, failures, left_out=[(OURS, grams)])
    return race.measure(state, KIND, missing, workload.lengths, options.threads, until_s)


def steps(workload: Workload, repetitions: Repetitions, about: Mapping[str, Any]) -> list[Step]:
    """The plain decoding of every engine, with medians over all answers."""
    cells = [cell for answers in repetitions.values() for cell in answers if cell.mode == str(PLAIN)]
    least_s = about["weights_bytes"] / about["bandwidth_bytes_per_s"]
    by_engine = []
    for engine in dict.fromkeys(cell.engine for cell in cells):
        answers = [(cell.prompt, cell.answer) for cell in cells if cell.engine == engine]
        first = [answer.prompt_s for prompt, answer in answers if prompt == len(workload.turns)]
        step_s = statistics.median(a.decode_s / a.num_decoded for _, a in answers if a.num_decoded)
        by_engine.append(Step(engine, step_s, least_s / step_s, statistics.median(first) if first else None))
    return by_engine


def steps_table(by_engine: Sequence[Step], about: Mapping[str, Any]) -> str:
    """A table with the time of a plain step and the time to the first token of each engine."""
    size, speed = about["weights_bytes"] / 1e6, about["bandwidth_bytes_per_s"] / 1e9
    rows = []
    for each in by_engine:
        first = "" if each.first_token_s is None else f"{1e3 * each.first_token_s:.1f}"
        rows.append([each.engine, f"{1e3 * each.step_s:.2f}", f"{each.of_bandwidth:.0%}", first])
    heads = ("engine", "plain step, ms", "share of bandwidth", f"first token after {PREFILL_TOKENS} tokens, ms")
    text = f"A plain step reads {size:.1f} MB of weights; a gigabyte was summed at {speed:.1f} GB/s."
    return f"{text}\n\n{table(heads, rows)}"


def report(options: Options, workload: Workload, state: State, about: Mapping[str, Any]) -> list[Summary]:
    """Print the tables, write them and the figures to `--output`, and return the summary of every mode."""
    repetitions = {i: cells for i, cells in state.repetitions(KIND).items() if i < options.repeats}
    everything = dict(about) | state.about(KIND) | {"machine": machine(), "commit": commit(), "run": state.run}
    turns = workload.turns
    by_mode, by_engine = summaries(turns, repetitions), steps(workload, repetitions, everything)
    num_questions = len({turn.number for turn in turns})
    processor, cores = everything["machine"]["processor"], options.threads
    title = (
        f"### Spec-Bench: {Path(str(about['model'])).name}, {about['format']}\n\n"
        f"{num_questions} questions, {len(turns)} answers of at most {options.tokens} tokens, temperature "
        f"{options.temperature:g}, chat template {about['template'] or 'none'}, {len(repetitions)} repetitions; "
        f"{processor}, {cores} threads, {about['kernels']}; commit {everything['commit']}.\n"
    )
    lines = [title, markdown(by_mode, turns), steps_table(by_engine, everything)]
    lines += [f"{failed['engine']} {failed['mode']} failed: {failed['reason']}" for failed in everything["failures"]]
    text = "\n".join(lines)
    print(f"\n{text}")
    if options.output:
        settings = {name: str(v) if isinstance(v, Path) else v for name, v in asdict(options).items()}
        content = everything | {"settings": settings, "summaries": [asdict(each) for each in by_mode]}
        content |= {"steps": [asdict(each) for each in by_engine], "distinct": distinct_by_task(turns)}
        content["lengths"] = [[len(turn.prompt_ids), len(turn.answer_ids)] for turn in turns]
        options.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        options.output.with_suffix(".md").write_text(text, encoding="utf-8")
    return by_mode


def commit() -> str:
    """The short hash of the commit that is checked out."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def main(arguments: Sequence[str]) -> int:
    """Run the command; returns 1 if tokens differ or a mode failed, STOPPED at the time limit, otherwise 0."""
    options = options_of(Options, arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the race ends its workers
    questions = read_questions(options.questions, options.prompts_per_category)
    workload, run, about = prepared(options, questions)
    state = State(options.folder / f"{KIND}.jsonl", run)
    if not measure(options, workload, state):
        print("stopped by --time-limit; the same command continues", flush=True)
        return STOPPED
    by_mode = report(options, workload, state, about)
    differ = any(each.num_different for each in by_mode if each.engine == OURS)
    return 1 if differ or state.about(KIND)["failures"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
