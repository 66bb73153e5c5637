"""Batches: answer the prompts of a file with continuous batching, and write each answer when it is finished.

Each line of the input has its own seed, the first seed plus the line's index, so that an answer depends only on its own
line: not on the batch, its order, or interruptions. A line that cannot be answered is reported by its number and
skipped.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from forerun.accept.commit import Origin
from forerun.bench.material import messages_of
from forerun.card import AnswerTiming, run_card
from forerun.commands.answer_file import AnswerFile, digest_of
from forerun.commands.answering import build_llm, llm_arguments, require_template, setting_of, stats_object
from forerun.commands.running import Result, patient_interrupt
from forerun.engine.engine import Engine
from forerun.errors import InvalidRequest
from forerun.llm import LLM
from forerun.options import AnswerOptions, BatchOptions, ModelOptions, OutputOptions
from forerun.output import Answers
from forerun.progress import LoadingBar
from forerun.prove.prompts import at_line, file_lines, object_of, prompt_of, text_of
from forerun.replicas.settings import ReplicaSettings
from forerun.request import Conversation, Request
from forerun.sampling.params import SamplingParams
from forerun.streams import show_error, show_note

if TYPE_CHECKING:
    from forerun.replicas.shared_batch import SharedBatch

SAMPLING = frozenset(each.name for each in fields(SamplingParams))
DRAIN_S = 60.0  # time that a replica gets for its open requests when it is shut down
SUBMITTED_BATCHES = 2  # submitted requests, as a multiple of the batch size
MOST_SHOWN = 20  # skipped lines that are reported individually


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt, or messages for the chat template, with its line number in the input and its id."""

    line: int
    id: Any
    prompt: str | tuple[int, ...] = ()
    messages: Conversation = ()

    @property
    def digest(self) -> str:
        """A digest of the prompt or the messages."""
        return digest_of(self.messages or self.prompt)


@dataclass(slots=True)
class BatchTally:
    """Counts of the batch so far."""

    num_lines: int = 0
    num_before: int = 0
    num_now: int = 0
    num_skipped: int = 0
    origins: list[Origin] = field(default_factory=list)
    first_s: float = 0.0
    total_s: float = 0.0

    @property
    def num_answered(self) -> int:
        """Lines answered in this run or an earlier one."""
        return self.num_before + self.num_now

    def skip(self, problem: object) -> None:
        """Report a line that cannot be answered."""
        self.num_skipped += 1
        if self.num_skipped <= MOST_SHOWN:
            show_error(problem)
        elif self.num_skipped == MOST_SHOWN + 1:
            show_error("more lines cannot be answered; their number is shown at the end")

    def as_object(self) -> dict[str, int]:
        """The counts as a JSON object."""
        return {
            "num_lines": self.num_lines,
            "num_answered": self.num_answered,
            "num_answered_before": self.num_before,
            "num_skipped": self.num_skipped,
        }

    def summary(self, stopped: bool) -> str:
        """One sentence for the user, and what to do if lines are left."""
        line = f"{self.num_answered} of {self.num_lines} lines answered"
        if self.num_before:
            line += f", {self.num_before} of them in earlier runs"
        if self.num_skipped:
            line += f"; {self.num_skipped} skipped: fix them and run the same command again"
        return f"Interrupted: {line}. The same command resumes." if stopped else f"{line}."


def run_batch(
    model_options: ModelOptions,
    answer_options: AnswerOptions,
    batch: BatchOptions,
    engines: ReplicaSettings | None,
    output: OutputOptions,
) -> tuple[BatchTally, bool]:
    """Answer the lines that are not answered yet. Returns the counts, and whether Ctrl-C stopped the batch."""
    assert batch.input is not None, "a batch has an input"
    SamplingParams(**answer_options.sampling())  # raises before anything is loaded
    tally = BatchTally()
    tasks = list(read_tasks(batch.input, tally, batch.chat))
    if any(task.messages for task in tasks):
        require_template(model_options.spec)  # before the weights are loaded
    file = None if output.output is None else AnswerFile.open(output.output, batch.fresh)
    finished = False
    errors = Console(stderr=True, no_color=answer_options.raw or None)
    try:
        with batch_engine(model_options, batch, engines, errors) as (llm, engine):
            settings, seed = settings_of(llm, model_options, answer_options), first_seed(answer_options.seed, file)
            if any(task.messages for task in tasks):
                settings |= {"template": llm.tokenizer.template().digest()}
            if file is not None:
                file.check(settings | {"seed": seed}, {task.line: task.digest for task in tasks})
            done = frozenset(() if file is None else file.digests)
            tally.num_before = len(done)
            params = replace(llm.get_default_sampling_params(), **answer_options.sampling())
            job = BatchJob(llm, engine, params, settings | {"seed": seed}, tally, file)
            with LoadingBar(errors) as bar:
                stopped = job.run((task for task in tasks if task.line not in done), bar)
            finished = not stopped
    finally:
        if file is not None:
            file.close(finished)
    setting = setting_of(llm, model_options, seed)
    timing = AnswerTiming(len(tally.origins), tally.first_s, tally.total_s)
    if not output.as_json:
        errors.print(run_card(setting, timing, llm.stats, tally.origins, llm.plan.lines(), llm.drafter_names))
    show_note(tally.summary(stopped))
    record = settings | {"seed": seed, "stats": stats_object(llm.stats, timing, llm.drafter_names)}
    Result(output.as_json).write(tally.as_object() | record)
    return tally, stopped


@contextmanager
def batch_engine(
    model_options: ModelOptions, batch: BatchOptions, engines: ReplicaSettings | None, errors: Console
) -> Iterator[tuple[LLM, Engine | SharedBatch]]:
    """The model, and its engine in this process or replicas, which are shut down at the end of the context."""
    if engines is None:
        llm = build_llm(model_options, errors, batch.max_num_seqs)
        yield llm, llm.engine
        return
    from forerun.replicas.on_ray import ray_replicas
    from forerun.replicas.shared_batch import SharedBatch

    show_note(f"starting {engines} replicas with Ray")
    arguments = llm_arguments(model_options, batch.max_num_seqs, 512)
    starting = ray_replicas(arguments, engines, DRAIN_S, f"file-{os.getpid()}")
    with starting as (model, replicas), closing(SharedBatch(model, replicas)) as shared:
        yield model, shared


def read_tasks(path: Path, tally: BatchTally, chat: bool) -> Iterator[Task]:
    """The prompts of a .jsonl or .txt file; invalid lines are reported, empty ones are ignored.

    With `chat` a text is a user's message.
    """
    for number, line in enumerate(file_lines(path, "input"), start=1):
        if not line.strip():
            continue
        tally.num_lines += 1
        try:
            task = task_of(line, number, path)
        except InvalidRequest as error:
            tally.skip(str(error).removeprefix("prompts: "))
            continue
        if chat and isinstance(task.prompt, str):  # not token ids, nor messages
            task = replace(task, messages=[{"role": "user", "content": task.prompt}])
        yield task


def task_of(line: bytes, number: int, path: Path) -> Task:
    """Parse a line; its id defaults to its number. Raises InvalidRequest."""
    with at_line(f"{path}:{number}"):
        text = text_of(line)
        if path.suffix == ".txt":
            return Task(number, number, text)
        named = object_of(text)
        for field_name in named:
            if field_name in SAMPLING:
                problem = "cannot be set in a line: remove it, and use the command's options for all lines"
                raise InvalidRequest("prompts", f"{field_name} {problem}")
        if "messages" in named:
            return Task(number, named.get("id", number), messages=messages_of(named["messages"]))
        ids = named.get("prompt_token_ids")
        if ids is None:
            return Task(number, named.get("id", number), prompt_of(named))
        request = Request.of({"prompt_token_ids": ids})
        assert request.prompt_token_ids is not None, "it was made of token ids"
        return Task(number, named.get("id", number), request.prompt_token_ids)


def settings_of(llm: LLM, model_options: ModelOptions, answer_options: AnswerOptions) -> dict[str, Any]:
    """The settings that affect answers besides prompt and seed; the drafter does not in coupled verification."""
    settings = {
        "model": llm.name or model_options.model,
        "fingerprint": llm.fingerprint,
        "verification": model_options.verification,
        "max_model_len": model_options.max_model_len,
        **llm.generation_defaults.given,
        **{name: value for name, value in answer_options.sampling().items() if name != "seed"},
    }
    if model_options.tokenizer is not None:
        settings |= {"tokenizer": model_options.tokenizer}
    if model_options.verification != "coupled":
        tree = model_options.tree and str(model_options.tree)
        settings |= {"draft": model_options.draft, "depth": model_options.depth, "tree": tree}
    return settings


def first_seed(requested: int | None, file: AnswerFile | None) -> int:
    """The seed of the first line: the option, else that of the existing answers, else a random one."""
    if requested is not None:
        return requested % 2**64
    if file is not None and file.seeds:
        line, seed = next(iter(file.seeds.items()))
        return (seed - line + 1) % 2**64
    return secrets.randbits(63)


@dataclass(slots=True)
class BatchJob:
    """A running batch: submits the tasks to the engine and writes each answer when it is finished."""

    llm: LLM
    engine: Engine | SharedBatch
    params: SamplingParams
    settings: Mapping[str, Any]
    tally: BatchTally
    file: AnswerFile | None
    open: dict[int, tuple[Task, Answers]] = field(default_factory=dict)  # by sequence id

    def run(self, tasks: Iterator[Task], bar: LoadingBar) -> bool:
        """Answer the tasks with continuous batching; returns whether Ctrl-C stopped it, after the current round."""
        started_s, engine = time.perf_counter(), self.engine
        with patient_interrupt() as interrupt:
            try:
                while not interrupt.is_set():
                    self.fill(tasks, bar)
                    if not self.open:
                        return False
                    for delta in engine.step():
                        task, answers = self.open[delta.seq_id]
                        if delta.error is not None:
                            raise delta.error
                        answers.add(delta)
                        self.tally.total_s = time.perf_counter() - started_s
                        self.tally.first_s = self.tally.first_s or self.tally.total_s
                        if delta.finish_reason is not None:
                            del self.open[delta.seq_id]
                            self.finish(task, answers)
                            share = self.tally.num_answered / self.tally.num_lines
                            bar("answering", share, f"{self.tally.num_answered} of {self.tally.num_lines} lines")
                return True
            finally:
                for sequence_id in list(self.open):
                    engine.cancel(self.open.pop(sequence_id)[1].sequences[0].request_id)

    def fill(self, tasks: Iterator[Task], bar: LoadingBar) -> None:
        """Submit tasks until the engine has SUBMITTED_BATCHES batches of requests; report those it cannot serve."""
        most = SUBMITTED_BATCHES * self.llm.options.max_num_seqs
        while len(self.open) < most and (task := next(tasks, None)) is not None:
            seed = (self.settings["seed"] + task.line - 1) % 2**64
            try:
                prompt = self.llm.chat_prompt(task.messages) if task.messages else task.prompt
                answers = self.llm.ask([Request.of(prompt, replace(self.params, seed=seed))])
            except InvalidRequest as error:
                bar.stop()
                self.tally.skip(f"line {task.line}: {error}")
                continue
            (sequence,) = answers.sequences
            self.open[sequence.id] = task, answers
            self.engine.submit(sequence)

    def finish(self, task: Task, answers: Answers) -> None:
        """Write a finished answer."""
        (output,) = answers.outputs()
        (sample,) = output.outputs
        answer = {
            "line": task.line,
            "id": task.id,
            "text": sample.text,
            "token_ids": list(sample.token_ids),
            "finish_reason": sample.finish_reason,
            "stop_reason": sample.stop_reason,
            "num_prompt_tokens": len(output.prompt_token_ids),
            "seed": output.seed,
            "prompt_digest": task.digest,
            "settings": dict(self.settings),
        }
        if self.file is None:
            typer.echo(json.dumps(answer))
        else:
            self.file.add(answer)
        self.tally.num_now += 1
        self.tally.origins += sample.origins
