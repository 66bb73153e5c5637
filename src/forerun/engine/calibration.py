"""Calibration: what rounds take on this machine, and how much is accepted, measured before the first request.

The engine answers sample texts, and a script says in each round how far they are drafted and by whom. The controller
learns from these rounds as from any others, so it begins with every batch size and depth measured. What it learned is
kept on disk, by everything that it depends on; while the engine runs the controller corrects it.
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
DEPTHS = {1: (0, 4, 8, 1, 2, 16), 8: (0, 4, 2, 8), 32: (0, 2, 4)}  # by batch; what matters most comes first
NUM_ROUNDS = {1: 4, 8: 3, 32: 2}  # that count, behind one that does not
WARM = 3  # further rounds at the very first that do not
SHARES = {1: 0.6, 8: 0.85, 32: 1.0}  # of the time that is over when a batch size must be done
LIMIT_S = 3.6  # a round that is under way then is finished
PROMPT_TOKENS = 24
CHAT_TOKENS = 96  # of a question in the model's chat template, at most
READ_TOKENS = 192  # of the texts by which it is measured how fast drafters read
NUM_READ = 2  # of them, the first of which only warms up
TEXT_TOKENS = 256  # that a sample's answer has at most

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Script:
    """The controller of an engine that is being measured: all sequences are drafted by one drafter, equally far.

    Of rounds of the same kind and size the shortest one counts: neighbours on the same cores only make times longer.
    """

    controller: MeasuredDepth
    drafter: int = 0
    depth: int = 0
    counts: bool = False
    reads: bool = False  # whether what counts is how long drafters take for a text that is new to them
    rounds: dict[tuple[Kind, int], tuple[Sequence[tuple[RowOutcome, Assignment]], Outcome]] = field(
        default_factory=dict
    )

    def skips(self, load: Load) -> bool:
        """Never: every round is to be measured."""
        return False

    def budgets(self, load: Load, outlook: Outlook, spare: Spare) -> Sequence[Budget]:
        """What the script says, as far as it fits."""
        return self.controller.follow(load, outlook, spare, self.drafter, self.depth)

    def admit(self, draft: Draft, load: Load) -> DraftTree:
        """All of it is verified."""
        return draft.tree

    def record(self, outcome: Outcome) -> None:
        """Learn what was accepted in rounds that count, and remember the shortest."""
        if not self.counts or outcome.num_prompt_tokens or outcome.captured:
            return
        if not self.reads:
            for record in self.controller.drafters.all:
                record.acceptance.unit = 1.0  # all rounds of a calibration count the same, not the latest most
        drafted = self.controller.drafted(outcome)
        self.controller.accepted(drafted)
        options = [each.option for _, each in drafted]
        if self.reads:
            if any(max(option.num_unread.values()) > BEHIND for option in options):
                steps = [(each.option, each.depth) for _, each in drafted]
                self.controller.drafters.time(steps, outcome, self.controller.planning_s)
            return
        place = self.controller.weighing.kind(len(outcome.rows), options), outcome.num_tokens
        shortest = self.rounds.get(place)
        if shortest is None or outcome.round_s < shortest[1].round_s:
            self.rounds[place] = drafted, outcome

    def plain_s(self, num_rows: int) -> float | None:
        """It is not known yet."""
        return None

    def finish(self) -> None:
        """Learn what the rounds so far took."""
        for (kind, _), (drafted, outcome) in self.rounds.items():
            self.controller.costs.kinds.setdefault(kind, Curve())
            self.controller.time(drafted, outcome)
        self.rounds = {}


def calibrate(
    engine: Engine, requests: RequestChecker, params: SamplingParams, key: str, progress: ProgressCallback | None = None
) -> MeasuredDepth:
    """A controller for this idle engine that knows what rounds take: from disk, or measured now in about LIMIT_S.

    `params` are those of usual requests. `key` is everything that the measurement depends on. Nothing is left behind in
    the engine, and drafters do not remember the sample texts.
    """
    assert engine.drafter is not None, "something drafts"
    key = f"{key} {sha256(repr((SAMPLES, QUESTIONS)).encode()).hexdigest()[:8]}"
    kept = read_kept(key, engine.drafter.names)
    if kept is not None:
        return kept
    controller, neighbours = MeasuredDepth(), Neighbours()
    error = attempt(lambda: measure(engine, requests, params, controller, progress))
    if error is None and controller.costs.kinds:
        costs, disturbed = as_json(controller), disturbance(neighbours.num_busy())
        if disturbed:
            logger.warning("What drafting costs was measured, but %s: the next start measures it again.", disturbed)
        else:
            keep(key, costs)
        return from_json(costs, engine.drafter.names)  # so the first start begins with what later ones read
    logger.debug("The costs of rounds could not be measured at the start.", exc_info=error)
    return MeasuredDepth()


def measure(
    engine: Engine,
    requests: RequestChecker,
    params: SamplingParams,
    controller: MeasuredDepth,
    progress: ProgressCallback | None,
) -> None:
    """Let the engine answer samples, at every batch size that it may have, as long as there is time."""
    began_s = clock_s()
    usual, engine.controller = engine.controller, (script := Script(controller))
    most = min(engine.options.max_num_seqs, engine.runner.cache.num_free_tokens // TEXT_TOKENS)
    batches = {min(batch, most): batch for batch in reversed(BATCHES) if most > 0}
    sample_requests = replace(requests, request_ids=itertools.count(-(2**40)), seq_ids=itertools.count(-(2**40)))
    try:
        for number, (batch, like) in enumerate(sorted(batches.items())):
            ends_s = began_s + SHARES[like] * LIMIT_S
            if clock_s() > ends_s:
                continue
            sequences = list(itertools.islice(samples(sample_requests, params), batch))
            for sequence in sequences:
                engine.submit(sequence)
            for done in play(engine, script, sequences, like, ends_s):
                if progress is not None:
                    progress("measuring what drafting costs, once on this machine", (number + done) / len(batches))
            for sequence in sequences:
                engine.cancel(sequence.request_id)
            if number == 0:
                read(engine, script, sample_requests, params, ends_s)
    finally:
        for sequence in list(engine.sequences.values()):
            engine.cancel(sequence.request_id)
        engine.controller, engine.stats = usual, Stats()


def play(
    engine: Engine, script: Script, sequences: Sequence[TextSequence], like: int, ends_s: float
) -> Iterator[float]:
    """Play the script of this batch size; yields the share that is done. Ends early where there is no time or room."""
    assert engine.drafter is not None, "something drafts"
    drafters = range(len(engine.drafter.names))
    lines = [(depth, drafter) for depth in DEPTHS[like] for drafter in drafters if depth or not drafter]
    script.counts, (script.depth, script.drafter) = False, max(lines[:2])
    num_left = len(sequences) + 1  # rounds at most in which prompts are read
    while num_left and any(sequence.unread for sequence in sequences):
        num_left -= 1
        if clock_s() > ends_s or not advanced(engine):
            return
    for _ in range(WARM):
        if clock_s() > ends_s or not advanced(engine):
            return
    for number, (script.depth, script.drafter) in enumerate(lines, 1):
        for turn in range(1 + NUM_ROUNDS[like]):
            script.counts = turn > 0
            late = clock_s() > ends_s or min(each.room for each in sequences) <= script.depth + 1
            if late or not advanced(engine):
                return
        script.finish()
        yield number / len(lines)


def read(engine: Engine, script: Script, requests: RequestChecker, params: SamplingParams, ends_s: float) -> None:
    """Find out how fast drafters read: each of them drafts texts that it has seen nothing of."""
    drafters = range(len(script.controller.drafters.all))
    script.reads = True
    for number, sequence in enumerate(itertools.islice(samples(requests, params, READ_TOKENS), NUM_READ)):
        engine.submit(sequence)
        script.counts, script.depth = False, 0
        while sequence.unread and clock_s() < ends_s and advanced(engine):
            pass
        script.counts, script.depth = number > 0, 1
        for script.drafter in drafters:
            if clock_s() > ends_s or not advanced(engine):
                break
        engine.cancel(sequence.request_id)
    script.reads = False


def clock_s() -> float:
    """Seconds from some time on, without those in which passes are captured, which are not what a limit is for."""
    return time.perf_counter() - Captures.taken_s


def advanced(engine: Engine) -> bool:
    """One round; whether nothing ended in it."""
    return all(delta.finish_reason is None for delta in engine.step())


def samples(
    requests: RequestChecker, params: SamplingParams, num_tokens: int = PROMPT_TOKENS
) -> Iterator[TextSequence]:
    """Sequences that do not end before they are long: answers to questions where a model has a chat template, since how
    often guesses are right differs much between an answer and a text that it was not trained to go on with.

    Other prompts begin in different places of the sample texts, each of which is followed by the next ones. They
    have so many tokens, as far as the context leaves room for an answer.
    """
    assert requests.tokenizer is not None, "samples are text"
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


def chats(tokenizer: Tokenizer, most: int) -> list[list[int]]:
    """The questions as the model's chat template has them; none where it has none, or one is longer than `most`."""
    if not tokenizer.template().is_usable:
        return []
    prompts = []
    for question in QUESTIONS:
        try:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
            )
        except (TokenizerError, InvalidRequest):
            return []
        prompts.append(tokenizer.encode(text, add_special_tokens=False))
    return prompts if max(map(len, prompts)) <= min(most, CHAT_TOKENS) else []


def passages(requests: RequestChecker, num_tokens: int) -> Iterator[list[int]]:
    """Pieces of the sample texts, without end."""
    assert requests.tokenizer is not None, "samples are text"
    texts = [requests.tokenizer.encode(text) for text in SAMPLES]
    most = max(1, min(num_tokens, requests.max_length // 4))
    for number in itertools.count():
        text = texts[number % len(texts)]
        start = number // len(texts) * 5 % max(1, len(text) - most)
        others = [token for later in range(1, len(texts)) for token in texts[(number + later) % len(texts)]]
        yield [*text[start:], *others][:most]


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
