"""The target's answers, as material to learn from: its tokens, and its states while it wrote them.

The engine answers prompts many at a time, with n-grams as drafter, and what its passes computed for the tokens that
became final is recorded as it goes: nothing is read a second time, and nothing is kept on disk unless asked for. Answer
number i is a function of the settings and of i alone, because the engine's answers depend neither on their batch
nor on what was guessed; so a training that goes on after a kill learns from the very same ones.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun.accept.outcome import Stats
from forerun.annotations import Float, ProgressCallback
from forerun.draft.base import Budget, Committed, Draft, Drafter, Outlook
from forerun.draft.text.ngram import NgramDrafter
from forerun.engine.sequence import Sequence
from forerun.heads.student import TargetText
from forerun.llm import LLM
from forerun.request import requests_of
from forerun.sampling.draws import Draws
from forerun.sampling.noise import mix
from forerun.train.answer_cache import AnswerCache
from forerun.train.data import PromptIds, TrainingData
from forerun.train.settings import TrainSettings
from forerun.train.team import Team

TRAINED, HELD_OUT = 0, 1  # what an answer's seed is drawn for
ORDER = 3  # what an order of a group's answers is drawn for
SEEDS = 2**63


class StateRecorder:
    """A drafter that drafts what another one drafts, and keeps the target's states at `taps` of all final tokens.

    States of a sequence are kept until they are taken, also after it is finished. One that is forgotten before it is
    finished, as preempted ones are, is recorded from its start again.
    """

    def __init__(self, drafter: Drafter, taps: Seq[int]) -> None:
        assert not drafter.taps, "the drafter that is asked for guesses reads no states"
        self.drafter = drafter
        self.taps = tuple(taps)
        self.names = tuple(drafter.names)
        self.begun: set[int] = set()
        self.states: dict[int, list[Tensor]] = {}

    def observe(self, news: Committed) -> None:
        """Keep the states of what became final."""
        assert news.features is not None, "states are shown to a drafter that asks for them"
        for i, seq_id in enumerate(news.seq_ids):
            if seq_id not in self.begun:
                self.begun.add(seq_id)
                self.states[seq_id] = []
            self.states[seq_id].append(news.features[news.offsets[i] : news.offsets[i + 1]])
        self.drafter.observe(news)

    def adoptable(self, text: Seq[int], most: int, salt: Hashable) -> int:
        """Nothing: all states are recorded."""
        return 0

    def propose(self, draws: Draws, budgets: Seq[Budget], tail: Committed | None = None) -> Draft:
        """The other drafter's guesses."""
        return self.drafter.propose(draws, budgets, tail)

    def outlook(self, seq_ids: Seq[int]) -> Outlook:
        """The other drafter's."""
        return self.drafter.outlook(seq_ids)

    def forget(self, seq_ids: Seq[int]) -> None:
        """Record these sequences from their start if they come back."""
        self.begun.difference_update(seq_ids)
        self.drafter.forget(seq_ids)

    def take(self, seq_id: int) -> Float[Tensor, "read taps hidden"]:
        """The states of a sequence, which are then no longer kept."""
        self.begun.discard(seq_id)
        return torch.cat(self.states.pop(seq_id))  # a copy outside of inference mode, for backward passes


@dataclass
class AnswerSource:
    """Answers to training prompts by number, and to the held-out ones; `taps` are the student's.

    Answers to training prompts are written in groups that begin at multiples of the group's size, and the latest
    group is kept: its answers are learnt from once in their order and then, as `passes` says, again in other orders.
    Every prompt is answered once before any is answered again, in an order of its own each time. `settings.batch` is
    this process's part of a step's answers.
    """

    llm: LLM
    data: TrainingData
    settings: TrainSettings
    taps: tuple[int, ...]
    cache: AnswerCache | None = None
    team: Team = field(default_factory=Team)
    group: tuple[int, Seq[TargetText]] = (-1, ())
    recorder: StateRecorder = field(init=False)

    def __post_init__(self) -> None:
        last = self.llm.engine.runner.decoder.config.layers
        self.recorder = StateRecorder(NgramDrafter(), (*self.taps, last))
        self.llm.engine.drafter = self.recorder

    @property
    def stats(self) -> Stats:
        """What the engine counted while it wrote."""
        return self.llm.engine.stats

    def of_step(self, step: int, progress: ProgressCallback) -> Seq[TargetText]:
        """The answers that a step learns from."""
        batch, group_steps = self.settings.batch, self.settings.group_steps
        number, place = divmod(step, group_steps * self.settings.passes)
        if self.group[0] != number:
            texts = None if self.cache is None else self.cache.load(number)
            if texts is None:
                numbers = self.team.numbers(range(number * group_steps * batch, (number + 1) * group_steps * batch))
                texts = self.written([self.prompt(i) for i in numbers], TRAINED, numbers, progress)
                if self.cache is not None:
                    self.cache.save(number, texts)
            self.group = number, texts
        turn, start = divmod(place, group_steps)
        dice = torch.Generator().manual_seed(mix((self.settings.seed, ORDER, number, turn)) % SEEDS)
        order = torch.randperm(len(self.group[1]), generator=dice) if turn else torch.arange(len(self.group[1]))
        return [self.group[1][int(i)] for i in order[start * batch : (start + 1) * batch]]

    def held_out(self, progress: ProgressCallback) -> Seq[TargetText]:
        """The answers to the held-out prompts."""
        prompts = self.data.held_out
        return self.written(prompts, HELD_OUT, range(len(prompts)), progress)

    def prompt(self, number: int) -> PromptIds:
        """The prompt of an answer."""
        epoch, place = divmod(number, len(self.data.train))
        dice = torch.Generator().manual_seed(mix((self.settings.seed, epoch)) % SEEDS)
        return self.data.train[int(torch.randperm(len(self.data.train), generator=dice)[place])]

    def written(
        self, prompts: Seq[PromptIds], purpose: int, numbers: Seq[int], progress: ProgressCallback
    ) -> list[TargetText]:
        """Answers to prompts; the seed of each is that of its number."""
        params = [self.settings.sampling(mix((self.settings.seed, purpose, i)) % SEEDS) for i in numbers]
        answers = self.llm.ask(requests_of([list(prompt) for prompt in prompts], params))
        for delta in self.llm.deltas(answers.sequences):
            answers.add(delta)
            progress("the target writes", answers.share_finished)
        outputs = [request.outputs[0] for request in answers.outputs()]
        return [self.text(s, o.finish_reason == "length") for s, o in zip(answers.sequences, outputs, strict=True)]

    def text(self, sequence: Sequence, is_cut: bool) -> TargetText:
        """A finished answer with its states."""
        states = self.recorder.take(sequence.id)
        assert len(states) == len(sequence.tokens) - 1, "the target reads all tokens but the last one"
        tokens = tuple(sequence.tokens)
        return TargetText(tokens, sequence.num_prompt, sequence.seed, states[:, :-1], states[:, -1], is_cut)
