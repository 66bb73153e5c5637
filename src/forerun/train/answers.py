"""The target's answers as training data: their tokens, and the target's hidden states while it generated them.

The engine answers prompts in batches, with an n-gram drafter, and the hidden states of final tokens are recorded during
generation, so nothing is computed twice. Answer i is a function of the settings and of i alone, because the engine's
answers depend neither on the batch nor on drafts; so a resumed training uses exactly the same answers.

States are large, and are not stored unless requested. A cache on disk lets several trainings on the same data share
them; it is bit-exact, so a training has the same result with and without it.
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
from torch import Tensor

from forerun.annotations import Float, ProgressCallback
from forerun.cache.plan import size
from forerun.draft.base import Committed
from forerun.draft.text.ngram import NgramDrafter
from forerun.errors import FolderTaken, InvalidRequest
from forerun.fields import is_list_of_whole
from forerun.heads.sizes import check_most
from forerun.heads.student import TargetText
from forerun.llm import LLM
from forerun.request import requests_of
from forerun.sampling.noise import mix
from forerun.store import save_tensors, writable, write_whole
from forerun.streams import show_note
from forerun.train.data import PromptIds, TrainingData
from forerun.train.objective import Objective
from forerun.train.settings import TrainSettings
from forerun.train.state import TrainFolder, unreadable
from forerun.train.team import Team

TRAINED, HELD_OUT = 0, 1  # purposes of an answer's seed
ORDER = 3  # purpose of the seed of a group's order
SEEDS = 2**63
FORM = 1  # format version of cache files
FIELDS = ("tokens", "num_prompt", "seed", "is_cut")  # of a TargetText, besides its states
COUNTED_STEPS = 32  # steps whose answers are counted to choose a draft vocabulary
VOCABULARY = "vocabulary.json"


class StateRecorder(NgramDrafter):
    """An n-gram drafter that also records the target's states at `taps` for all final tokens.

    The states of a sequence are stored until `take` is called, also after it is finished. A sequence that is forgotten
    before it is finished, because of preemption, is recorded from its start again.
    """

    def __init__(self, taps: tuple[int, ...]) -> None:
        super().__init__()
        self.taps = taps
        self.begun: set[int] = set()
        self.states: dict[int, list[Tensor]] = {}

    def observe(self, committed: Committed) -> None:
        assert committed.features is not None, "a drafter with taps gets states"
        for i, seq_id in enumerate(committed.seq_ids):
            if seq_id not in self.begun:
                self.begun.add(seq_id)
                self.states[seq_id] = []
            self.states[seq_id].append(committed.features[committed.offsets[i] : committed.offsets[i + 1]])
        super().observe(committed)

    def adoptable(self, text: Sequence[int], most: int, salt: Hashable) -> int:
        """0, since the states of all tokens are recorded."""
        return 0

    def forget(self, seq_ids: Sequence[int]) -> None:
        """Record these sequences from their start again if they resume."""
        self.begun.difference_update(seq_ids)
        super().forget(seq_ids)

    def take(self, seq_id: int) -> Float[Tensor, "read taps hidden"]:
        """Remove and return the states of a sequence."""
        self.begun.discard(seq_id)
        return torch.cat(self.states.pop(seq_id))  # a copy outside of inference mode, for backward passes


@dataclass(frozen=True, slots=True)
class AnswerCache:
    """Groups of answers by number, in a folder for one target, data set and set of taps."""

    folder: Path

    @classmethod
    def at(cls, folder: Path, about: Mapping[str, Any], num_bytes: int) -> AnswerCache:
        """Open the cache of the answers that `about` determines, and log its size, at most `num_bytes`.

        Raises InvalidRequest if there is not enough disk space.
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
            raise InvalidRequest("cache", f"{note} Name a folder on a larger disk, or leave --cache out.")
        return cls(place)

    def path(self, number: int) -> Path:
        """The file of a group."""
        return self.folder / f"{number:08}.safetensors"

    def load(self, number: int) -> Sequence[TargetText] | None:
        """A group's answers; None if it is not stored, or its file is damaged."""
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
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, AttributeError, RecursionError):
            return None

    def save(self, number: int, texts: Sequence[TargetText]) -> None:
        """Store a group's answers."""
        fields = [{name: getattr(text, name) for name in FIELDS} for text in texts]
        tensors: dict[str, Tensor] = {}
        for i, text in enumerate(texts):
            tensors |= {f"{i}.taps": text.taps.cpu().contiguous(), f"{i}.last": text.last.cpu().contiguous()}
        with writable(self.folder, "cache"):
            write_whole(self.path(number), lambda part: save_tensors(tensors, part, {"texts": json.dumps(fields)}))


@dataclass
class AnswerSource:
    """Answers to training prompts by number, and to the held-out prompts; `taps` are the student's.

    Answers to training prompts are generated in groups. The latest group is kept in memory: its answers are used once
    in their order and then `passes` - 1 times in shuffled orders. All prompts are answered once before any is answered
    again, in a new random order each time. `settings.batch` is this process's share of a step's answers.
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
        """The objective of students that are trained on these answers."""
        return Objective(self.settings, self.llm.engine.runner.decoder.logits, self.llm.requests.num_ids)

    def of_step(self, step: int, progress: ProgressCallback) -> Sequence[TargetText]:
        """The answers of a step."""
        batch, group_steps = self.settings.batch, self.settings.group_steps
        number, place = divmod(step, group_steps * self.settings.passes)
        if self.group[0] != number:
            texts = None if self.cache is None else self.cache.load(number)
            if texts is None:
                numbers = self.team.numbers(range(number * group_steps * batch, (number + 1) * group_steps * batch))
                texts = self.generate([self.prompt(i) for i in numbers], TRAINED, numbers, progress)
                if self.cache is not None:
                    self.cache.save(number, texts)
            self.group = number, texts
        turn, start = divmod(place, group_steps)
        generator = torch.Generator().manual_seed(mix((self.settings.seed, ORDER, number, turn)) % SEEDS)
        order = torch.randperm(len(self.group[1]), generator=generator) if turn else torch.arange(len(self.group[1]))
        return [self.group[1][int(i)] for i in order[start * batch : (start + 1) * batch]]

    def held_out(self, progress: ProgressCallback) -> Sequence[TargetText]:
        """The answers to the held-out prompts."""
        prompts = self.data.held_out
        return self.generate(prompts, HELD_OUT, range(len(prompts)), progress)

    def prompt(self, number: int) -> PromptIds:
        """The prompt of answer `number`."""
        epoch, place = divmod(number, len(self.data.train))
        generator = torch.Generator().manual_seed(mix((self.settings.seed, epoch)) % SEEDS)
        return self.data.train[int(torch.randperm(len(self.data.train), generator=generator)[place])]

    def generate(
        self, prompts: Sequence[PromptIds], purpose: int, numbers: Sequence[int], progress: ProgressCallback
    ) -> list[TargetText]:
        """Answer prompts; each answer's seed is derived from its number."""
        params = [self.settings.sampling(mix((self.settings.seed, purpose, i)) % SEEDS) for i in numbers]
        answers = self.llm.ask(requests_of([list(prompt) for prompt in prompts], params))
        for delta in self.llm.deltas(answers.sequences):
            answers.add(delta)
            progress("the target generates", answers.share_finished)
        texts = []
        for sequence, request in zip(answers.sequences, answers.outputs(), strict=True):
            states, is_cut = self.recorder.take(sequence.id), request.outputs[0].finish_reason == "length"
            assert len(states) == len(sequence.tokens) - 1, "the target reads all tokens except the last one"
            tokens, taps, last = tuple(sequence.tokens), states[:, :-1], states[:, -1]
            texts.append(TargetText(tokens, sequence.num_prompt, sequence.seed, taps, last, is_cut))
        return texts


def draft_vocabulary(source: AnswerSource, size: int, folder: TrainFolder, progress: ProgressCallback) -> Sequence[int]:
    """The token ids of a draft vocabulary of `size`, ascending; a resumed training uses the choice of its first run.

    Raises InvalidRequest for more than the tokenizer has, FolderTaken if the stored choice is damaged.
    """
    most = source.llm.requests.num_ids
    check_most("draft_vocab", size, most)
    path, team = folder.state_folder / VOCABULARY, source.team
    if (known := team.of_first(lambda: read_vocabulary(path, size, most) if path.exists() else None)) is not None:
        return known
    ids = most_frequent(source, size, progress)
    with writable(folder.folder):
        write_whole(path, json.dumps(ids) + "\n")
    return ids


def most_frequent(source: AnswerSource, size: int, progress: ProgressCallback) -> Sequence[int]:
    """The most frequent tokens of the answers; ties are broken by their frequency in the prompts."""
    counts, read = Counter[int](), Counter(token for prompt in source.data.train for token in prompt)
    steps = COUNTED_STEPS if source.settings.steps is None else min(COUNTED_STEPS, source.settings.steps)
    for step in range(steps):
        for text in source.of_step(step, progress):
            counts.update(text.tokens[text.num_prompt :])
    totals = source.team.sums([float(counts[token]) for token in range(source.llm.requests.num_ids)])
    ids = sorted(range(len(totals)), key=lambda token: (-totals[token], -read[token], token))
    return sorted(ids[:size])


def read_vocabulary(path: Path, size: int, most: int) -> Sequence[int]:
    """The stored choice of an earlier run: `size` ids below `most`. Raises FolderTaken if it cannot be read."""
    try:
        ids = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError):
        ids = None
    if not is_list_of_whole(ids, 0, most - 1) or len(ids) != size or sorted(set(ids)) != ids:
        raise FolderTaken(f"{path} is damaged: start over with --force")
    return [*ids]
