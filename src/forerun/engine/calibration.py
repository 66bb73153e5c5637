"""Calibration: measures the time of rounds on this machine, and the acceptance, before the first request.

The engine answers sample prompts, and a script sets the drafter and the depth of each round. The controller learns from
these rounds as from any others, so it starts with estimates for every batch size and depth. They are saved on disk
under everything that they depend on, and the controller corrects them while the engine runs.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256

from forerun.accept.outcome import Outcome, RowOutcome, Stats
from forerun.annotations import ProgressCallback
from forerun.cache.paged import Spare
from forerun.config import AUTO_DEPTH, Speculation
from forerun.control.controller import Load
from forerun.control.costs import Curve, Kind
from forerun.control.drafters import BEHIND, Assignment
from forerun.control.kept_costs import as_json, from_json, keep, read_kept
from forerun.control.measured import MeasuredDepth
from forerun.device import Captures
from forerun.draft.base import Budget, Draft, Outlook
from forerun.engine.engine import Engine
from forerun.engine.request_check import RequestChecker
from forerun.engine.sequence import Sequence as TextSequence
from forerun.errors import InvalidRequest, TokenizerError
from forerun.guard import attempt
from forerun.machine import Neighbours, disturbance
from forerun.request import Request
from forerun.sampling.params import SamplingParams
from forerun.text.tokenizer import Tokenizer
from forerun.tree import DraftTree

BATCHES = (1, 8, 32)
DEPTHS = {1: (0, 4, 8, 1, 2, 16), 8: (0, 4, 2, 8), 32: (0, 2, 4)}  # by batch size, the most important ones first
NUM_ROUNDS = {1: 4, 8: 3, 32: 2}  # measured rounds for each drafter and depth, after one that is not measured
NUM_WARMUP_ROUNDS = 3  # not measured, at the start of each batch size
TIME_SHARES = {1: 0.6, 8: 0.85, 32: 1.0}  # of the time limit: when the rounds of a batch size must end
LIMIT_S = 3.6  # no round starts later
PROMPT_TOKENS = 24
MAX_CHAT_TOKENS = 96  # of a question in the model's chat template
PREFILL_TOKENS = 192  # of each prompt with which the drafters' prefill is timed
NUM_PREFILLS = 2  # such prompts; the first one is a warm-up
TEXT_TOKENS = 256  # the most tokens of an answer to a sample prompt

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Script:
    """The controller during a calibration: all sequences are drafted with the same drafter and depth.

    Of rounds of the same kind and size the fastest one counts, since other programs on the same cores only make times
    longer. `counts`: whether the controller learns from the rounds. `times_prefill`: whether the drafters' prefill is
    timed instead of rounds.
    """

    controller: MeasuredDepth
    drafter: int = 0
    depth: int = 0
    counts: bool = False
    times_prefill: bool = False
    rounds: dict[tuple[Kind, int], tuple[Sequence[tuple[RowOutcome, Assignment]], Outcome]] = field(
        default_factory=dict
    )  # the fastest, by kind and number of tokens

    def skips(self, load: Load) -> bool:
        """False: every round is measured."""
        return False

    def budgets(self, load: Load, outlook: Outlook, spare: Spare) -> Sequence[Budget]:
        """The script's depth for each sequence, cut to the free cache slots."""
        return self.controller.follow(load, outlook, spare, self.drafter, self.depth)

    def admit(self, draft: Draft, load: Load) -> DraftTree:
        """The entire draft."""
        return draft.tree

    def record(self, outcome: Outcome) -> None:
        """Learn acceptance from rounds that count, and remember the fastest round of each kind and size."""
        if not self.counts or outcome.num_prompt_tokens or outcome.captured:
            return
        if not self.times_prefill:
            for record in self.controller.drafters.all:
                record.acceptance.unit = 1.0  # gives all rounds the same weight; normally recent ones weigh more
        drafted = self.controller.drafted(outcome)
        self.controller.accepted(drafted)
        options = [each.option for _, each in drafted]
        if self.times_prefill:
            if any(max(option.num_unread.values()) > BEHIND for option in options):
                steps = [(each.option, each.depth) for _, each in drafted]
                self.controller.drafters.time(steps, outcome, self.controller.planning_s)
            return
        key = self.controller.search.kind(len(outcome.rows), options), outcome.num_tokens
        fastest = self.rounds.get(key)
        if fastest is None or outcome.round_s < fastest[1].round_s:
            self.rounds[key] = drafted, outcome

    def plain_s(self, num_rows: int) -> float | None:
        """None: the time of plain decoding is not known yet."""
        return None

    def finish(self) -> None:
        """Let the controller learn the times of the rounds since the last call."""
        for (kind, _), (drafted, outcome) in self.rounds.items():
            self.controller.costs.kinds.setdefault(kind, Curve())
            self.controller.time(drafted, outcome)
        self.rounds = {}


def calibrate(
    engine: Engine, requests: RequestChecker, params: SamplingParams, key: str, progress: ProgressCallback | None = None
) -> MeasuredDepth:
    """A controller with measured estimates for this idle engine: read from disk, or measured now in about LIMIT_S.

    `params` are the usual sampling parameters of requests. `key` names everything that the estimates depend on. The
    engine's state does not change, and drafters do not store the sample prompts.
    """
    assert engine.drafter is not None, "an engine without a drafter needs no calibration"
    key = f"{key} {sha256(repr((SAMPLES, QUESTIONS)).encode()).hexdigest()[:8]}"
    saved = read_kept(key, engine.drafter.names)
    if saved is not None:
        return saved
    controller, neighbours = MeasuredDepth(), Neighbours()
    error = attempt(lambda: measure(engine, requests, params, controller, progress))
    if error is None and controller.costs.kinds:
        costs, disturbed = as_json(controller), disturbance(neighbours.num_busy())
        if disturbed:
            logger.warning("The costs of drafting were measured, but %s. The next start measures again.", disturbed)
        else:
            keep(key, costs)
        return from_json(costs, engine.drafter.names)  # rounded as on disk, so that later starts behave the same
    logger.debug("The costs of drafting could not be measured at the start.", exc_info=error)
    return MeasuredDepth()


def measure(
    engine: Engine,
    requests: RequestChecker,
    params: SamplingParams,
    controller: MeasuredDepth,
    progress: ProgressCallback | None,
) -> None:
    """Measure rounds with sample prompts, at the batch sizes of this engine, until LIMIT_S has passed."""
    began_s = clock_s()
    usual, engine.controller = engine.controller, (script := Script(controller))
    most = min(engine.options.max_num_seqs, engine.runner.cache.num_free_tokens // TEXT_TOKENS)
    batches = {min(batch, most): batch for batch in reversed(BATCHES) if most > 0}
    sample_requests = replace(requests, request_ids=itertools.count(-(2**40)), seq_ids=itertools.count(-(2**40)))
    try:
        for number, (batch, script_batch) in enumerate(sorted(batches.items())):
            end_s = began_s + TIME_SHARES[script_batch] * LIMIT_S
            if clock_s() > end_s:
                continue
            sequences = list(itertools.islice(samples(sample_requests, params), batch))
            for sequence in sequences:
                engine.submit(sequence)
            for done in measure_rounds(engine, script, sequences, script_batch, end_s):
                if progress is not None:
                    progress("measuring the costs of drafting, once on this machine", (number + done) / len(batches))
            for sequence in sequences:
                engine.cancel(sequence.request_id)
            if number == 0:
                time_prefill(engine, script, sample_requests, params, end_s)
    finally:
        for sequence in list(engine.sequences.values()):
            engine.cancel(sequence.request_id)
        engine.controller, engine.stats = usual, Stats()


def measure_rounds(
    engine: Engine, script: Script, sequences: Sequence[TextSequence], script_batch: int, end_s: float
) -> Iterator[float]:
    """Run the script of a batch size; yields the finished share. Ends early if time or tokens run out."""
    assert engine.drafter is not None, "an engine without a drafter needs no calibration"
    drafters = range(len(engine.drafter.names))
    steps = [(depth, drafter) for depth in DEPTHS[script_batch] for drafter in drafters if depth or not drafter]
    script.counts, (script.depth, script.drafter) = False, max(steps[:2])
    max_rounds = len(sequences) + 1  # of prefill
    while max_rounds and any(sequence.unread for sequence in sequences):
        max_rounds -= 1
        if clock_s() > end_s or not step(engine):
            return
    for _ in range(NUM_WARMUP_ROUNDS):
        if clock_s() > end_s or not step(engine):
            return
    for number, (script.depth, script.drafter) in enumerate(steps, 1):
        for round_number in range(1 + NUM_ROUNDS[script_batch]):
            script.counts = round_number > 0
            has_room = min(sequence.room for sequence in sequences) > script.depth + 1
            if clock_s() > end_s or not has_room or not step(engine):
                return
        script.finish()
        yield number / len(steps)


def time_prefill(
    engine: Engine, script: Script, requests: RequestChecker, params: SamplingParams, end_s: float
) -> None:
    """Time the drafters' prefill: each drafts a sequence of which it has read nothing yet."""
    drafters = range(len(script.controller.drafters.all))
    script.times_prefill = True
    for number, sequence in enumerate(itertools.islice(samples(requests, params, PREFILL_TOKENS), NUM_PREFILLS)):
        engine.submit(sequence)
        script.counts, script.depth = False, 0
        while sequence.unread and clock_s() < end_s and step(engine):
            pass
        script.counts, script.depth = number > 0, 1
        for script.drafter in drafters:
            if clock_s() > end_s or not step(engine):
                break
        engine.cancel(sequence.request_id)
    script.times_prefill = False


def clock_s() -> float:
    """The time in seconds, without the time of capturing CUDA graphs, which does not count towards LIMIT_S."""
    return time.perf_counter() - Captures.taken_s


def step(engine: Engine) -> bool:
    """Run one round; returns whether all sequences are still unfinished."""
    return all(delta.finish_reason is None for delta in engine.step())


def samples(
    requests: RequestChecker, params: SamplingParams, num_tokens: int = PROMPT_TOKENS
) -> Iterator[TextSequence]:
    """Sequences of TEXT_TOKENS tokens whose prompts are questions, if the model has a chat template, else passages.

    The acceptance rate of an answer differs much from that of a text which the model was not trained to continue.
    Passages have `num_tokens` tokens, or a quarter of the context if that is shorter.
    """
    assert requests.tokenizer is not None, "sample prompts need a tokenizer"
    endless = SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        max_tokens=TEXT_TOKENS,
        ignore_eos=True,
        seed=0,
    )
    questions = chats(requests.tokenizer, requests.max_length // 4) if num_tokens == PROMPT_TOKENS else []
    for prompt in itertools.cycle(questions) if questions else passages(requests, num_tokens):
        request = Request(None, endless, Speculation(AUTO_DEPTH, auto=True), prompt_token_ids=tuple(prompt))
        (sequence,) = requests.sequences(request)
        sequence.tenant = None
        yield sequence


def chats(tokenizer: Tokenizer, max_tokens: int) -> list[list[int]]:
    """The questions in the model's chat template; none without a template or if one is longer than `max_tokens`."""
    prompts = []
    for question in QUESTIONS:
        try:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
            )
        except (TokenizerError, InvalidRequest):
            return []
        prompts.append(tokenizer.encode(text, add_special_tokens=False))
    return prompts if max(map(len, prompts)) <= min(max_tokens, MAX_CHAT_TOKENS) else []


def passages(requests: RequestChecker, num_tokens: int) -> Iterator[list[int]]:
    """An endless sequence of passages from the sample texts, each from another place on."""
    assert requests.tokenizer is not None, "sample prompts need a tokenizer"
    texts = [requests.tokenizer.encode(text) for text in SAMPLES]
    length = max(1, min(num_tokens, requests.max_length // 4))
    for number in itertools.count():
        text = texts[number % len(texts)]
        start = number // len(texts) * 5 % max(1, len(text) - length)
        next_texts = [token for later in range(1, len(texts)) for token in texts[(number + later) % len(texts)]]
        yield [*text[start:], *next_texts][:length]


# Questions that are answered in a calibration.
QUESTIONS = (
    "How does a bicycle stay upright?",
    "Write a Python function that merges two sorted lists, and explain it.",
    "Write a short letter in which you thank a colleague for her help.",
    "What were the main causes of the First World War?",
    "A shirt costs 24 dollars after a discount of 20 percent. What did it cost before?",
    "Name five ways to save energy at home, with one sentence for each.",
    "Explain what photosynthesis is to a child of eight.",
    "Tell me a story about a fox that is afraid of the dark.",
)

# Texts that are continued in a calibration: prose, code, a table and a dialogue, a few lines of each.
SAMPLES = (
    """The harbour lay quiet in the early morning. Two boats had come in during the night, and their crews were asleep
below deck. On the quay an old man was mending a net, slowly and with great care, as he had done every day for forty
years. When the first buses arrived, he looked up, nodded to the drivers, and went on with his work. Nobody asked him
why he never went to sea himself.""",
    '''def merge_intervals(intervals):
    """Return the union of closed intervals as a sorted list of disjoint ones."""
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


class IntervalTest(unittest.TestCase):
    def test_merge(self):
''',
    """| city | country | population | river |
| --- | --- | --- | --- |
| Lisbon | Portugal | 545,000 | Tagus |
| Vienna | Austria | 1,980,000 | Danube |
| Prague | Czech Republic | 1,360,000 | Vltava |
| Cologne | Germany | 1,090,000 | Rhine |
""",
    """Question: My train leaves at 9:40, and the way to the station takes 25 minutes on foot. When should I leave if I
want to be there ten minutes early?
Answer: You want to be there at 9:30. The way takes 25 minutes, so you should leave at 9:05.
Question: And if I take the bus, which needs 12 minutes and leaves every full quarter of an hour?
Answer:""",
)
