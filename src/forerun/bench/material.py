"""Workloads: the texts of all measurements, bundled or from a user's file, and their tokenization.

This file defines the format of users' files, and checks that every text fits the model's context. `mixed_passages`
interleaves categories, so that a prefix of the list has some of each.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from forerun.bench.plan import GENERATED, SHIPPED
from forerun.errors import InvalidRequest
from forerun.limits import shown
from forerun.prove.prompts import at_line, object_of, prompt_lines, prompt_of
from forerun.request import ChatOptions, Conversation, with_text
from forerun.text.tokenizer import Tokenizer

TextOrIds = str | list[int]
DEFAULT_WORKLOADS = "code,edits"
CATEGORIES = ("code", "prose")  # bundled workloads that `mixed_passages` uses if there is no file


@dataclass(frozen=True, slots=True)
class Passage:
    """A line of a file: text, token ids, or a conversation; its source (`place`), recorded answer, and category."""

    prompt: TextOrIds | Conversation
    place: str
    answer: TextOrIds | None = None
    category: str = ""

    @property
    def conversation(self) -> Conversation | None:
        """The messages of a conversation; None for text."""
        is_conversation = not isinstance(self.prompt, str) and isinstance(self.prompt[0], Mapping)
        return self.prompt if is_conversation else None  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Item:
    """A passage as token ids."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...] | None
    place: str
    category: str = ""


@dataclass(frozen=True, slots=True)
class Template:
    """The chat template's variables, and whether plain texts become conversations too (`always`)."""

    options: Mapping[str, Any] = field(default_factory=dict)
    always: bool = False

    @property
    def thinking(self) -> bool | None:
        """The template's thinking option; None if it is not set."""
        enabled = self.options.get("enable_thinking", self.options.get("thinking"))
        return enabled if isinstance(enabled, bool) else None


@dataclass(frozen=True, slots=True)
class Workload:
    """A named list of texts; either all are replayed or none. `template`: the chat template's hash, if used."""

    name: str
    items: tuple[Item, ...]
    template: str | None = None

    @property
    def replayed(self) -> bool:
        """Whether recorded answers are replayed."""
        return self.items[0].answer is not None

    def recorded(self) -> list[str]:
        """The hashes of the recorded answers."""
        return [hash_of(item.answer) for item in self.items if item.answer is not None]

    def digest(self) -> str:
        """A hash of all tokens."""
        tokens = [[item.prompt, item.answer] for item in self.items]
        return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()

    def longest(self, num_tokens: int) -> int:
        """The maximum number of tokens of a prompt with its answer."""
        return max(len(i.prompt) + (num_tokens if i.answer is None else len(i.answer)) for i in self.items)


def hash_of(answer: Sequence[int]) -> str:
    """A hash of an answer's tokens."""
    return hashlib.sha256(",".join(map(str, answer)).encode()).hexdigest()[:16]


def shipped(name: str) -> list[Passage]:
    """The passages of a bundled workload; its name is their category. Raises InvalidRequest."""
    if name not in SHIPPED:
        raise InvalidRequest("workload", f"{name!r} is not bundled: choose from {', '.join(SHIPPED)}.")
    folder = resources.files("forerun").joinpath("bench")
    if name in GENERATED:
        text = folder.joinpath(f"{name}.json").read_text(encoding="utf-8")
        return [Passage(entry["text"], entry["path"], None, name) for entry in json.loads(text)["prompts"]]
    lines = folder.joinpath(f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    entries = enumerate(map(json.loads, lines), start=1)
    return [Passage(e["prompt"], f"{e['source']}, edit {i}", e["answer"], name) for i, e in entries]


def passages_of(workload: str | None, prompts: Path | None, replay: Path | None) -> dict[str, list[Passage]]:
    """The passages of the options by workload name: bundled workloads, or one file of the user's."""
    options = {"workload": workload, "prompts": prompts, "replay": replay}
    chosen = [name for name, value in options.items() if value is not None]
    if len(chosen) > 1:
        raise InvalidRequest(chosen[1], f"it cannot be combined with --{chosen[0]}, which also sets the prompts.")
    if prompts is not None:
        return {prompts.stem: read_passages(prompts)}
    if replay is not None:
        return {replay.stem: read_passages(replay, recorded=True)}
    names = [name.strip() for name in (workload or DEFAULT_WORKLOADS).split(",")]
    return {name: shipped(name) for name in names}


def mixed_passages(prompts: Path | None = None, replay: Path | None = None) -> list[Passage]:
    """The passages of a file, or the bundled ones, with categories interleaved."""
    ours = prompts is None and replay is None
    kinds: dict[str, list[Passage]] = {}
    for passage in chain.from_iterable(passages_of(",".join(CATEGORIES) if ours else None, prompts, replay).values()):
        kinds.setdefault(passage.category, []).append(passage)
    return [passage for passage in chain.from_iterable(zip_longest(*kinds.values())) if passage is not None]


def read_passages(path: Path, recorded: bool = False, most: int | None = None) -> list[Passage]:
    """The first `most` lines of a user's file: prompts of a .txt, objects of a .jsonl, with answers if `recorded`.

    Raises InvalidRequest, naming file and line.
    """
    if recorded and path.suffix != ".jsonl":
        raise InvalidRequest("replay", f"{path}: its name does not end in .jsonl: give such a file")
    try:
        lines = list(prompt_lines(path, most))
        if path.suffix == ".txt":
            return [Passage(line, place) for place, line in lines]
        return [passage_of(line, place, recorded) for place, line in lines]
    except InvalidRequest as error:
        if not recorded:
            raise
        raise InvalidRequest("replay", str(error).removeprefix(f"{error.field}: ")) from error


def passage_of(line: str, place: str, recorded: bool) -> Passage:
    """Parse one JSON line. Raises InvalidRequest."""
    with at_line(place):
        entry = object_of(line)
        category = entry.get("category") or ""
        if not isinstance(category, str):
            raise InvalidRequest("prompts", f'"category" is {shown(category)}: it must be text')
        answer = text_or_ids(entry, "answer") if recorded else None
        prompt: TextOrIds | Conversation
        if "messages" in entry:
            prompt = messages_of(entry["messages"])
        else:
            ids = recorded and "turns" not in entry
            prompt = text_or_ids(entry, "prompt") if ids else prompt_of(entry)
        return Passage(prompt, place, answer, category)


def text_or_ids(entry: Mapping[str, Any], name: str) -> TextOrIds:
    """The text or token ids of a field. Raises InvalidRequest."""
    value = entry.get(name)
    are_ids = isinstance(value, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in value)
    if not value or not (are_ids or isinstance(value, str)):
        excerpt = json.dumps(value)[:40] if name in entry else "missing"
        raise InvalidRequest("prompts", f'"{name}" is {excerpt}: it must be a non-empty text or list of token ids')
    return value  # type: ignore[no-any-return]


def messages_of(messages: object) -> Conversation:
    """The messages of a conversation; the last one must not be the assistant's. Raises InvalidRequest."""
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest("messages", f"{shown(messages)} is not a conversation: write a list of messages.")
    conversation = [with_text(message) for message in messages]
    if conversation[-1]["role"] == "assistant":
        raise InvalidRequest("prompts", 'the last message is the assistant\'s: leave it out, or move it to "answer"')
    return conversation


def workload_of(
    name: str, passages: Sequence[Passage], most: int, tokenizer: Tokenizer, template: Template | None = None
) -> Workload:
    """Tokenize the first `most` passages; conversations are rendered by the chat template.

    An answer is tokenized separately from its prompt. Raises InvalidRequest or TokenizerError, naming the source.
    """
    template, passages = template or Template(), passages[:most]
    items = tuple(item_of(passage, tokenizer, template) for passage in passages)
    uses_template = template.always or any(passage.conversation for passage in passages)
    return Workload(name, items, tokenizer.template().digest() if uses_template else None)


def item_of(passage: Passage, tokenizer: Tokenizer, template: Template) -> Item:
    """Tokenize a passage. Raises InvalidRequest or TokenizerError."""
    place, prompt, messages = passage.place, passage.prompt, passage.conversation
    if messages is None and template.always and isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    if messages is not None:
        with at_line(place):
            prompt = ChatOptions(chat_template_kwargs=template.options).render(tokenizer, messages)
    ids = encoded(prompt, tokenizer, messages is None, place)  # type: ignore[arg-type]
    answer = None if passage.answer is None else encoded(passage.answer, tokenizer, False, place)
    return Item(ids, answer, place, passage.category)


def encoded(text: TextOrIds, tokenizer: Tokenizer, add_special_tokens: bool, place: str) -> tuple[int, ...]:
    """The token ids of a text, or the given ids. Raises InvalidRequest for unknown ids, or an empty list."""
    ids = tokenizer.encode(text, add_special_tokens) if isinstance(text, str) else text
    unknown = next((token_id for token_id in ids if not 0 <= token_id < tokenizer.num_ids), None)
    if unknown is not None:
        raise InvalidRequest("replay", f"{place}: {unknown} is not a token id from 0 to {tokenizer.num_ids - 1}")
    if not ids:
        raise InvalidRequest("prompts", f"{place}: it has no tokens: write a longer text")
    return tuple(ids)


def check_lengths(workload: Workload, num_tokens: int, max_positions: int) -> None:
    """Raise InvalidRequest, naming the source, for a text that is longer than the model's context."""
    for item in workload.items:
        needed = len(item.prompt) + (num_tokens if item.answer is None else len(item.answer))
        if needed > max_positions:
            fix = "shorter --prompts, or fewer --max-tokens" if item.answer is None else "a --replay with shorter texts"
            problem = f"it needs {needed} tokens, and the context has {max_positions}"
            raise InvalidRequest(workload.name, f"{item.place}: {problem}: use {fix}")
