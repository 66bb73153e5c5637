"""Workloads: the texts that a benchmark generates or replays.

This file decides which texts ship with the package and what a line of a user's file may hold, and checks that every
text fits the model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from forerun.bench.plan import GENERATED, SHIPPED
from forerun.errors import InvalidRequest
from forerun.limits import shown_as_json
from forerun.prove.prompts import read_prompts
from forerun.text.tokenizer import Tokenizer

TextOrIds = str | list[int]
DEFAULT_WORKLOADS = "code,edits"


@dataclass(frozen=True, slots=True)
class Passage:
    """A prompt, its recorded answer or None, and its place."""

    prompt: TextOrIds
    answer: TextOrIds | None
    place: str


@dataclass(frozen=True, slots=True)
class Item:
    """A passage as tokens."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...] | None
    place: str


@dataclass(frozen=True, slots=True)
class Workload:
    """Texts under one name; either all of them are replayed or none."""

    name: str
    items: tuple[Item, ...]

    @property
    def replayed(self) -> bool:
        """Whether the answers are recorded ones."""
        return self.items[0].answer is not None

    def digest(self) -> str:
        """A hash of all tokens."""
        tokens = [[item.prompt, item.answer] for item in self.items]
        return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()

    def longest(self, num_tokens: int) -> int:
        """Tokens of the longest text, prompt and answer."""
        return max(len(i.prompt) + (num_tokens if i.answer is None else len(i.answer)) for i in self.items)


def shipped(name: str) -> list[Passage]:
    """The passages of a workload that ships."""
    if name not in SHIPPED:
        raise InvalidRequest("workload", f"{name!r} does not ship: choose of {', '.join(SHIPPED)}.")
    folder = resources.files("forerun").joinpath("bench")
    if name in GENERATED:
        text = folder.joinpath(f"{name}.json").read_text(encoding="utf-8")
        return [Passage(entry["text"], None, entry["path"]) for entry in json.loads(text)["prompts"]]
    lines = folder.joinpath(f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    return [Passage(e["prompt"], e["answer"], f"{e['source']}, edit {i}") for i, e in enumerate(entries, start=1)]


def passages_of(workload: str | None, prompts: Path | None, replay: Path | None) -> dict[str, list[Passage]]:
    """The texts that are asked for, by the name of their workload: what ships, or one file of the user's."""
    given = [
        name for name, value in (("workload", workload), ("prompts", prompts), ("replay", replay)) if value is not None
    ]
    if len(given) > 1:
        raise InvalidRequest(given[1], f"it says what to run, and so does --{given[0]}: give one of them.")
    if prompts is not None:
        return {prompts.stem: prompt_file(prompts)}
    if replay is not None:
        return {replay.stem: replay_file(replay)}
    names = (workload or DEFAULT_WORKLOADS).split(",")
    return {name.strip(): shipped(name.strip()) for name in names}


def prompt_file(path: Path) -> list[Passage]:
    """The prompts of a user's file, as `prove` takes them."""
    return [Passage(prompt.text, None, prompt.place) for prompt in read_prompts(path)]


def replay_file(path: Path) -> list[Passage]:
    """The recorded answers of a user's file: a JSON object a line, with "prompt" and "answer", text or token ids."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InvalidRequest("replay", f"{path}: it cannot be read ({error.strerror}): give a .jsonl file") from error
    numbered = [(f"{path}:{number}", line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise InvalidRequest("replay", f'{path}: there is nothing in it: write {{"prompt": ..., "answer": ...}} a line')
    return [replay_line(line, place) for place, line in numbered]


def replay_line(line: bytes, place: str) -> Passage:
    """One line of a replay file."""
    try:
        entry = json.loads(line.decode("utf-8"))
    except ValueError as error:
        raise InvalidRequest("replay", f"{place}: not JSON in UTF-8 ({error}): write one object a line") from error
    if not isinstance(entry, dict):
        message = f'{place}: {shown_as_json(entry)} is not an object: write {{"prompt": ..., "answer": ...}}'
        raise InvalidRequest("replay", message)
    for name in ("prompt", "answer"):
        words = entry.get(name)
        ids = isinstance(words, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in words)
        if not words or not (ids or isinstance(words, str)):
            given = json.dumps(words)[:40] if name in entry else "missing"
            raise InvalidRequest("replay", f'{place}: "{name}" is {given}: it must be some text or a list of token ids')
    return Passage(entry["prompt"], entry["answer"], place)


def workload_of(name: str, passages: Sequence[Passage], most: int, tokenizer: Tokenizer) -> Workload:
    """The first `most` passages as tokens. An answer is spelled apart from its prompt, behind it."""
    items = []
    for passage in passages[:most]:
        prompt = spelled(passage.prompt, tokenizer, True, passage.place)
        answer = None if passage.answer is None else spelled(passage.answer, tokenizer, False, passage.place)
        items.append(Item(prompt, answer, passage.place))
    return Workload(name, tuple(items))


def spelled(words: TextOrIds, tokenizer: Tokenizer, begins: bool, place: str) -> tuple[int, ...]:
    """Text or ids as ids, all of them known."""
    ids = tokenizer.encode(words, begins) if isinstance(words, str) else words
    unknown = next((token_id for token_id in ids if not 0 <= token_id < tokenizer.num_ids), None)
    if unknown is not None:
        raise InvalidRequest("replay", f"{place}: {unknown} is not a token id from 0 to {tokenizer.num_ids - 1}")
    if not ids:
        raise InvalidRequest("prompts", f"{place}: the tokenizer makes nothing of it: write more")
    return tuple(ids)


def check_lengths(workload: Workload, num_tokens: int, max_positions: int) -> None:
    """Raise InvalidRequest, with its place, for a text that is longer than the model's context."""
    for item in workload.items:
        needed = len(item.prompt) + (num_tokens if item.answer is None else len(item.answer))
        if needed > max_positions:
            fix = "shorten the prompt or ask for fewer --max-tokens" if item.answer is None else "shorten it"
            message = f"{item.place}: it needs {needed} tokens of a context of {max_positions}: {fix}"
            raise InvalidRequest(workload.name, message)
