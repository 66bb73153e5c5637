"""The target's answers, as material to learn from: its tokens, and its states while it wrote them.

The engine answers prompts many at a time, with n-grams as drafter, and what its passes computed for the tokens that
became final is recorded as it goes: nothing is read a second time, and nothing is kept on disk unless asked for. Answer
number i is a function of the settings and of i alone, because the engine's answers depend neither on their batch
nor on what was guessed; so a training that goes on after a kill learns from the very same ones.

States take much room. Where trainings on the same data are to share the writing, a cache keeps them: what is read is to
the bit what was written, so a training is the same with a cache as without.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from forerun.annotations import Float, ProgressCallback
from forerun.cache.plan import size
from forerun.draft.base import Committed
from forerun.draft.text.ngram import NgramDrafter
from forerun.errors import FolderTaken, InvalidRequest
from forerun.heads.sizes import check_most
from forerun.heads.student import TargetText
from forerun.llm import LLM
from forerun.request import requests_of
from forerun.sampling.noise import mix
from forerun.store import writable, write_whole
from forerun.streams import show_note
from forerun.train.data import PromptIds, TrainingData
from forerun.train.objective import Objective
from forerun.train.settings import TrainSettings
from forerun.train.state import TrainFolder
from forerun.train.team import Team

TRAINED, HELD_OUT = 0, 1  # what an answer's seed is drawn for
ORDER = 3  # what an order of a group's answers is drawn for
SEEDS = 2**63
FORM = 1  # of the files of a cache
FIELDS = ("tokens", "num_prompt", "seed", "is_cut")  # of a text, beside its states
COUNTED_STEPS = 32  # whose answers decide a draft's vocabulary
VOCABULARY = "vocabulary.json"


class StateRecorder(NgramDrafter):
    """It drafts as n-grams do, and keeps the target's states at `taps` of all final tokens.

    States of a sequence are kept until they are taken, also after it is finished. One that is forgotten before it is
    finished, as preempted ones are, is recorded from its start again.
    """

    def __init__(self, taps: tuple[int, ...]) -> None:
        super().__init__()
        self.taps = taps
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
        super().observe(news)

    def adoptable(self, text: Sequence[int], most: int, salt: Hashable) -> int:
        """Nothing: all states are recorded."""
        return 0

    def forget(self, seq_ids: Sequence[int]) -> None:
        """Record these sequences from their start if they come back."""
        self.begun.difference_update(seq_ids)
        super().forget(seq_ids)

    def take(self, seq_id: int) -> Float[Tensor, "read taps hidden"]:
        """The states of a sequence, which are then no longer kept."""
        self.begun.discard(seq_id)
        return torch.cat(self.states.pop(seq_id))  # a copy outside of inference mode, for backward passes


@dataclass(frozen=True, slots=True)
class AnswerCache:
    """Groups of answers by number, in a folder that belongs to one target, one set of data and one set of taps."""

    folder: Path

    @classmethod
    def at(cls, folder: Path, about: Mapping[str, Any], num_bytes: int) -> AnswerCache:
        """The cache for answers that `about` decides, of so many bytes at most, which are told.

        Raises InvalidRequest where they are more than what is free.
        """
        name = sha256(json.dumps({"form": FORM, **about}, sort_keys=True).encode()).hexdigest()[:16]
        place = folder / name
        with writable(folder, "cache"):
            place.mkdir(parents=True, exist_ok=True)
            held = sum(path.stat().st_size for path in place.glob("*.safetensors"))
            free = shutil.disk_usage(place).free
        note = f"The cache {place} will take up to {size(num_bytes)}; it has {size(held)}, and {size(free)} are free."
        show_note(note)
        if num_bytes - held > free:
            raise InvalidRequest("cache", f"{note} Name a folder with more room, or leave --cache out.")
        return cls(place)

    def path(self, number: int) -> Path:
        """The file of a group."""
        return self.folder / f"{number:08}.safetensors"

    def load(self, number: int) -> Sequence[TargetText] | None:
        """A group's answers; None where it was not kept, or its file is damaged."""
        try:
            with safe_open(self.path(number), framework="pt") as file:
                texts: list[dict[str, Any]] = json.loads(file.metadata()["texts"])
                return [
                    TargetText(
                        tuple(text.pop("tokens")),
                        **text,
                        taps=file.get_tensor(f"{i}.taps"),
                        last=file.get_tensor(f"{i}.last"),
                    )
                    for i, text in enumerate(texts)
                ]
        except (FileNotFoundError, SafetensorError, KeyError, TypeError, ValueError):
            return None

    def save(self, number: int, texts: Sequence[TargetText]) -> None:
        """Keep a group's answers."""
        fields = [{name: getattr(text, name) for name in FIELDS} for text in texts]
        tensors: dict[str, Tensor] = {}
        for i, text in enumerate(texts):
            tensors |= {f"{i}.taps": text.taps.cpu().contiguous(), f"{i}.last": text.last.cpu().contiguous()}
        with writable(self.folder, "cache"):
            write_whole(self.path(number), lambda part: save_file(tensors, part, {"texts": json.dumps(fields)}))


def state_bytes(num_texts: int, longest: int, num_taps: int, hidden: int, dtype: torch.dtype) -> int:
    """What the states of so many texts take at most; those behind the last layer are one more than the taps."""
    return num_texts * longest * (num_taps + 1) * hidden * dtype.itemsize


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
    group: tuple[int, Sequence[TargetText]] = (-1, ())
    recorder: StateRecorder = field(init=False)

    def __post_init__(self) -> None:
        last = self.llm.engine.runner.decoder.config.layers
        self.recorder = StateRecorder((*self.taps, last))
        self.llm.engine.drafter = self.recorder

    @property
    def objective(self) -> Objective:
        """What students of these answers learn by."""
        return Objective(self.settings, self.llm.engine.runner.decoder.logits, self.llm.requests.num_ids)

    def of_step(self, step: int, progress: ProgressCallback) -> Sequence[TargetText]:
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

    def held_out(self, progress: ProgressCallback) -> Sequence[TargetText]:
        """The answers to the held-out prompts."""
        prompts = self.data.held_out
        return self.written(prompts, HELD_OUT, range(len(prompts)), progress)

    def prompt(self, number: int) -> PromptIds:
        """The prompt of an answer."""
        epoch, place = divmod(number, len(self.data.train))
        dice = torch.Generator().manual_seed(mix((self.settings.seed, epoch)) % SEEDS)
        return self.data.train[int(torch.randperm(len(self.data.train), generator=dice)[place])]

    def written(
        self, prompts: Sequence[PromptIds], purpose: int, numbers: Sequence[int], progress: ProgressCallback
    ) -> list[TargetText]:
        """Answers to prompts; the seed of each is that of its number."""
        params = [self.settings.sampling(mix((self.settings.seed, purpose, i)) % SEEDS) for i in numbers]
        answers = self.llm.ask(requests_of([list(prompt) for prompt in prompts], params))
        for delta in self.llm.deltas(answers.sequences):
            answers.add(delta)
            progress("the target writes", answers.share_finished)
        texts = []
        for sequence, request in zip(answers.sequences, answers.outputs(), strict=True):
            states, is_cut = self.recorder.take(sequence.id), request.outputs[0].finish_reason == "length"
            assert len(states) == len(sequence.tokens) - 1, "the target reads all tokens but the last one"
            tokens, taps, last = tuple(sequence.tokens), states[:, :-1], states[:, -1]
            texts.append(TargetText(tokens, sequence.num_prompt, sequence.seed, taps, last, is_cut))
        return texts


def draft_vocabulary(source: AnswerSource, size: int, folder: TrainFolder, progress: ProgressCallback) -> Sequence[int]:
    """The ids of a draft of `size` tokens, in ascending order, as an earlier run has chosen them.

    Raises InvalidRequest for more than the tokenizer has, FolderTaken where the choice of an earlier run is damaged.
    """
    check_most("draft_vocab", size, source.llm.requests.num_ids)
    path, team = folder.state_folder / VOCABULARY, source.team
    if (known := team.of_first(lambda: read_vocabulary(path, size) if path.exists() else None)) is not None:
        return known
    ids = most_said(source, size, progress)
    with writable(folder.folder):
        write_whole(path, json.dumps(ids) + "\n")
    return ids


def most_said(source: AnswerSource, size: int, progress: ProgressCallback) -> Sequence[int]:
    """The tokens that occur most often in the answers, and then in the prompts."""
    counts, read = Counter[int](), Counter(token for prompt in source.data.train for token in prompt)
    steps = COUNTED_STEPS if source.settings.steps is None else min(COUNTED_STEPS, source.settings.steps)
    for step in range(steps):
        for text in source.of_step(step, progress):
            counts.update(text.tokens[text.num_prompt :])
    num_said = source.team.sums([float(counts[token]) for token in range(source.llm.requests.num_ids)])
    ids = sorted(range(len(num_said)), key=lambda token: (-num_said[token], -read[token], token))
    return sorted(ids[:size])


def read_vocabulary(path: Path, size: int) -> Sequence[int]:
    """The choice of an earlier run."""
    try:
        ids = json.loads(path.read_text("utf-8"))
    except ValueError:
        ids = None
    if not isinstance(ids, list) or len(ids) != size or not all(isinstance(token, int) for token in ids):
        raise FolderTaken(f"{path} is damaged: start over with --force")
    return ids
