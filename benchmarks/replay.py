"""Recorded answers, replayed through the controller and a drafter of texts: `python -m benchmarks.replay MODEL`.

The model answers the demo's questions by plain decoding at temperatures 0 and 0.7; `--answers FILE` keeps the answers.
They are then decoded again without the model: the drafter drafts (`ngram`, or `suffix` with its table), the controller
chooses, and a draft token is accepted if the answer has it. The controller is given fixed times of passes and of the
host, so its choices are the same in every run, however busy the machine is. Printed are the speed-up that these times
give, and the processor time per round that the host really needs for the controller and the drafter, by kind of round.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from benchmarks.markdown import show, show_header
from benchmarks.options import option, options_of

from forerun import LLM, SamplingParams
from forerun.accept.outcome import Outcome, RowOutcome
from forerun.cache.paged import Spare
from forerun.config import AUTO_DEPTH, Speculation
from forerun.control.controller import Controller, Load
from forerun.control.measured import MeasuredDepth
from forerun.demo.material import QUESTIONS
from forerun.draft.base import Committed, Drafter
from forerun.sampling.draws import Draws
from forerun.sampling.tables import RowSampling

TEMPERATURES = (0.0, 0.7)
AMPLE = 10**6
# Seconds of the host that the controller is given, by kind of round, as measured with SmolLM2 on an Intel Xeon
PLAIN, LOOKED, DRAFTED = "plain", "looked, not drafted", "drafted"
DRAFT_S = {PLAIN: 5e-5, LOOKED: 2e-4, DRAFTED: 3.5e-4}
VERDICT_S = {PLAIN: 2e-4, LOOKED: 2e-4, DRAFTED: 2.5e-4}


@dataclass(frozen=True, slots=True)
class Options:
    model: str = option(what="a GGUF file, folder or name of a model with a chat template")
    draft: str = option("auto", "a drafter without a model of its own: ngram, suffix, suffix:DIR")
    batch: Sequence[int] = option("1,8", "answers that are decoded at the same time")
    max_tokens: int = option(256, "of an answer")
    answers: Path | None = option(None, "a file of answers; it is written if it does not exist")
    pass_ms: float = option(2.9, "milliseconds of a pass over one token")
    token_ms: float = option(0.38, "milliseconds that each further token of a pass takes")


@dataclass(frozen=True, slots=True)
class Answer:
    """The token ids of a prompt and of its answer."""

    prompt: Sequence[int]
    tokens: Sequence[int]


@dataclass(slots=True)
class Running:
    """An answer that is replayed: `place` is the index of its root, of which the drafter knows all before `known`."""

    seq_id: int
    answer: Answer
    place: int = 0
    known: int = 0

    @property
    def left(self) -> int:
        """Tokens behind the root."""
        return len(self.answer.tokens) - 1 - self.place

    def num_accepted(self, chain: Sequence[int]) -> int:
        """How many tokens of a chain, which follows the root, the answer has in these places."""
        rest = self.answer.tokens[self.place + 1 :]
        return next((i for i, token in enumerate(chain) if i >= len(rest) or token != rest[i]), len(chain))


@dataclass(frozen=True, slots=True)
class Round:
    """What a round was: its kind, the processor time of controller and drafter, its simulated time, its tokens."""

    kind: str
    host_s: float
    round_s: float
    plain_s: float  # simulated time of plain decoding for the same tokens
    num_tokens: int
    num_drafted: int


def answers_of(llm: LLM, options: Options) -> list[Answer]:
    """The answers of the file, or those that the model gives now."""
    if options.answers is not None and options.answers.exists():
        return [Answer(*each) for each in json.loads(options.answers.read_text(encoding="utf-8"))]
    answers = []
    for temperature in TEMPERATURES:
        for turns in QUESTIONS.values():
            params = SamplingParams(max_tokens=options.max_tokens, temperature=temperature, seed=1)
            (output,) = llm.chat([{"role": "user", "content": turns[0]}], params, speculation=False)
            answers.append(Answer(list(output.prompt_token_ids), list(output.outputs[0].token_ids)))
    if options.answers is not None:
        options.answers.write_text(json.dumps([[each.prompt, each.tokens] for each in answers]), encoding="utf-8")
    return answers


def committed(rows: Sequence[Running]) -> Committed:
    """What the drafter has not received of these answers: first the prompt, later the tokens before the root."""
    packed: list[int] = []
    offsets = [0]
    for row in rows:
        packed += row.answer.tokens[row.known : row.place] if row.place else row.answer.prompt
        offsets.append(len(packed))
        row.known = row.place
    return Committed(
        [row.seq_id for row in rows],
        packed,
        offsets,
        [row.answer.tokens[row.place] for row in rows],
        tenants=[""] * len(rows),
        num_prompts=[len(row.answer.prompt) for row in rows],
    )


def chains_of(
    controller: Controller, drafter: Drafter, rows: Sequence[Running], load: Load, vocab: int
) -> tuple[str, list[Sequence[int]]]:
    """The kind of the round, and the draft tokens of each row."""
    nothing: list[Sequence[int]] = [()] * len(rows)
    if controller.skips(load):
        return PLAIN, nothing
    if late := [row for row in rows if row.known < row.place]:
        drafter.observe(committed(late))
    spare = Spare(dict.fromkeys(load.seq_ids, AMPLE), AMPLE, 16)
    budgets = controller.budgets(load, drafter.outlook(load.seq_ids), spare)
    if not any(budget.depth for budget in budgets):
        return LOOKED, nothing
    draft = drafter.propose(draws_of(rows, vocab), budgets)
    chains: list[Sequence[int]] = [tree.tokens[1:] for tree in controller.admit(draft, load).host()]
    return (DRAFTED if any(chains) else LOOKED), chains


def draws_of(rows: Sequence[Running], vocab: int) -> Draws:
    """Draws of the rows' texts; drafters of texts use the roots alone."""
    texts = [[row.answer.tokens[row.place]] for row in rows]
    params = SamplingParams()
    return Draws([RowSampling(row.seq_id, params, 0, 0, text, 1) for row, text in zip(rows, texts, strict=True)], vocab)


def replayed(answers: Sequence[Answer], drafter: Drafter, batch: int, options: Options, vocab: int) -> Iterator[Round]:
    """The rounds in which these answers are decoded, `batch` at a time, by a new controller."""
    controller, waiting, running = MeasuredDepth(), list(enumerate(answers)), list[Running]()
    speculation = Speculation(AUTO_DEPTH, auto=True)
    while waiting or running:
        while waiting and len(running) < batch:
            running.append(Running(*waiting.pop(0)))
            drafter.observe(committed(running[-1:]))
        seq_ids = [row.seq_id for row in running]
        num_context = sum(len(row.answer.prompt) + row.place for row in running)
        load = Load(seq_ids, [speculation] * len(running), [row.left - 1 for row in running], 0, num_context)
        started_s = time.thread_time()
        kind, chains = chains_of(controller, drafter, running, load, vocab)
        host_s = time.thread_time() - started_s
        outcomes = []
        for row, chain in zip(running, chains, strict=True):
            accepted = row.num_accepted(chain)
            judged = min(len(chain), accepted + 1)
            outcomes.append(RowOutcome(row.seq_id, len(chain), judged, accepted, accepted + 1))
            row.place += accepted + 1
        num_drafted = sum(map(len, chains))
        plain_s = 1e-3 * (options.pass_ms + options.token_ms * (len(running) - 1))
        outcome = Outcome(
            outcomes, 0, DRAFT_S[kind], plain_s + 1e-3 * options.token_ms * num_drafted, verdict_s=VERDICT_S[kind]
        )
        started_s = time.thread_time()
        controller.record(outcome)
        host_s += time.thread_time() - started_s
        num_tokens = sum(row.num_emitted for row in outcomes)
        plain_s += DRAFT_S[PLAIN] + VERDICT_S[PLAIN]
        yield Round(kind, host_s, outcome.round_s, plain_s * num_tokens / len(running), num_tokens, num_drafted)
        if ended := [row.seq_id for row in running if row.left <= 0]:
            drafter.forget(ended)
            running = [row for row in running if row.left > 0]


def main(options: Options) -> None:
    """Print a table: for each batch size the speed-up, and by kind of round how many there were and their host time."""
    llm = LLM(options.model, options.draft, max_num_seqs=1)
    answers = [each for each in answers_of(llm, options) if len(each.tokens) > 1]
    show_header("batch", "speed-up", "round", "rounds", "tokens", "draft tokens", "µs of the host, median")
    for batch in options.batch:
        drafter = LLM(options.model, options.draft, max_num_seqs=1).engine.drafter
        if drafter is None or drafter.taps:
            raise SystemExit(f"{options.draft} is no drafter of texts: choose ngram or suffix")
        by_kind: dict[str, list[Round]] = defaultdict(list)
        for each in replayed(answers, drafter, batch, options, llm.engine.runner.vocab_size):
            by_kind[each.kind].append(each)
        rounds = [each for kind in by_kind.values() for each in kind]
        speedup = sum(each.plain_s for each in rounds) / sum(each.round_s for each in rounds)
        for kind in (PLAIN, LOOKED, DRAFTED):
            if found := by_kind[kind]:
                tokens, drafted = (sum(getattr(each, name) for each in found) for name in ("num_tokens", "num_drafted"))
                host_us = 1e6 * median(each.host_s for each in found)
                show(batch, f"×{speedup:.3f}", kind, len(found), tokens, drafted, f"{host_us:.0f}")


if __name__ == "__main__":
    torch.set_num_threads(2)
    main(options_of(Options))
