"""Prompts to tune on: what a line of a user's file may hold, and how it becomes tokens.

Categories take turns, so that the first prompts have some of each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from forerun.bench.material import Item, TextOrIds, Workload, replay_file, shipped, spelled
from forerun.errors import InvalidRequest, TokenizerError
from forerun.limits import shown
from forerun.messages import ChatOptions, Conversation, with_text
from forerun.prove.prompts import prompt_lines, prompt_of
from forerun.text.tokenizer import Tokenizer

USUAL = ("code", "prose")  # what ships and is used where no file is given


@dataclass(frozen=True, slots=True)
class TunePrompt:
    """One line: text, token ids, or the messages of a conversation; its recorded answer, its category, its place."""

    words: TextOrIds | None
    place: str
    messages: Conversation | None = None
    answer: TextOrIds | None = None
    category: str = ""


@dataclass(frozen=True, slots=True)
class Template:
    """How conversations become text: the options of the chat template, and whether every prompt is one."""

    options: Mapping[str, Any] = field(default_factory=dict)
    always: bool = False

    @property
    def thinking(self) -> bool | None:
        """What the template is told about thinking; None where nothing."""
        told = self.options.get("enable_thinking", self.options.get("thinking"))
        return told if isinstance(told, bool) else None


@dataclass(frozen=True, slots=True)
class TuneTexts:
    """The prompts as tokens, and their categories; `template` is a hash of the chat template where one was used."""

    workload: Workload
    categories: tuple[str, ...]
    template: str | None


def read_tune_prompts(prompts: Path | None, replay: Path | None) -> list[TunePrompt]:
    """The prompts of a file, or of one with recorded answers, or those that ship, by turns of their categories.

    Raises InvalidRequest, with file and line, for what cannot be read.
    """
    if prompts is not None and replay is not None:
        raise InvalidRequest("replay", "it says what to run, and so does --prompts: give one of them.")
    if replay is not None:
        found = [recorded(line, place) for place, line in prompt_lines_of(replay)]
    elif prompts is not None:
        txt = prompts.suffix == ".txt"
        found = [TunePrompt(line, place) if txt else tune_line(line, place) for place, line in prompt_lines(prompts)]
    else:
        found = [TunePrompt(text.prompt, text.place, category=name) for name in USUAL for text in shipped(name)]
    return by_turns(found)


def prompt_lines_of(replay: Path) -> list[tuple[str, str]]:
    """The lines of a file of recorded answers. Raises InvalidRequest as for any such file."""
    if replay.suffix != ".jsonl":
        raise InvalidRequest("replay", f"{replay}: the name ends in {replay.suffix!r}: give a .jsonl file")
    if not replay.is_file():
        replay_file(replay)  # it says what is wrong
    return prompt_lines(replay)


def tune_line(line: str, place: str) -> TunePrompt:
    """One JSON line without a recorded answer."""
    entry = parsed_line(line, place)
    category = category_of(entry, place)
    if "messages" in entry:
        return TunePrompt(None, place, messages_of(entry["messages"], place), category=category)
    return TunePrompt(prompt_of(line, place), place, category=category)


def recorded(line: str, place: str) -> TunePrompt:
    """One JSON line with an answer, text or token ids."""
    entry = parsed_line(line, place)
    answer = words_of(entry, "answer", place)
    category = category_of(entry, place)
    if "messages" in entry:
        return TunePrompt(None, place, messages_of(entry["messages"], place), answer, category)
    words = prompt_of(line, place) if "turns" in entry else words_of(entry, "prompt", place)
    return TunePrompt(words, place, answer=answer, category=category)


def parsed_line(line: str, place: str) -> dict[str, Any]:
    """The object of a JSON line."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("prompts", f"{place}: not JSON ({error}): write one object a line") from error
    if not isinstance(entry, dict):
        raise InvalidRequest("prompts", f'{place}: {shown(entry)} is no object: write {{"prompt": ...}}')
    return entry


def words_of(entry: Mapping[str, Any], name: str, place: str) -> TextOrIds:
    """Text or token ids under a name."""
    words = entry.get(name)
    ids = isinstance(words, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in words)
    if not words or not (ids or isinstance(words, str)):
        given = shown(words) if name in entry else "missing"
        raise InvalidRequest("replay", f'{place}: "{name}" is {given}: it must be some text or a list of token ids')
    return words  # type: ignore[no-any-return]


def messages_of(messages: object, place: str) -> Conversation:
    """The messages of a conversation that the model is to go on with."""
    try:
        if not isinstance(messages, list) or not messages:
            raise InvalidRequest("messages", f"{shown(messages)} is no conversation: write a list of messages.")
        talk = [with_text(message) for message in messages]
    except InvalidRequest as error:
        raise InvalidRequest("prompts", f"{place}: {error}") from error
    if talk[-1]["role"] == "assistant":
        raise InvalidRequest(
            "prompts", f'{place}: the last message is the model\'s own: leave it out, or name it "answer"'
        )
    return talk


def category_of(entry: Mapping[str, Any], place: str) -> str:
    """The category of a line; empty without one."""
    category = entry.get("category")
    if category is not None and not isinstance(category, str):
        raise InvalidRequest("prompts", f'{place}: "category" is {shown(category)}: it must be a word')
    return category or ""


def by_turns(prompts: Sequence[TunePrompt]) -> list[TunePrompt]:
    """The prompts, one of each category after the other, so that a part of them has some of each."""
    kinds: dict[str, list[TunePrompt]] = {}
    for prompt in prompts:
        kinds.setdefault(prompt.category, []).append(prompt)
    rounds = zip_longest(*kinds.values())
    return [prompt for prompt in chain.from_iterable(rounds) if prompt is not None]


def texts_of(prompts: Sequence[TunePrompt], most: int, tokenizer: Tokenizer, template: Template) -> TuneTexts:
    """The first `most` prompts as tokens. Raises InvalidRequest, with its place, for one that cannot be used."""
    taken = prompts[:most]
    items = [item_of(prompt, tokenizer, template) for prompt in taken]
    chat = any(prompt.messages is not None for prompt in taken) or template.always
    return TuneTexts(
        workload=Workload("tune", tuple(items)),
        categories=tuple(prompt.category for prompt in taken),
        template=tokenizer.template_digest() if chat else None,
    )


def item_of(prompt: TunePrompt, tokenizer: Tokenizer, template: Template) -> Item:
    """A prompt as tokens, through the template where it is a conversation."""
    talk = prompt.messages
    if talk is None and template.always and isinstance(prompt.words, str):
        talk = [{"role": "user", "content": prompt.words}]
    if talk is None:
        assert prompt.words is not None, "a prompt has words or messages"
        ids = spelled(prompt.words, tokenizer, True, prompt.place)
    else:
        ids = spelled(rendered(talk, tokenizer, template, prompt.place), tokenizer, False, prompt.place)
    answer = None if prompt.answer is None else spelled(prompt.answer, tokenizer, False, prompt.place)
    return Item(ids, answer, prompt.place)


def rendered(talk: Conversation, tokenizer: Tokenizer, template: Template, place: str) -> str:
    """A conversation as the model reads it."""
    try:
        return ChatOptions(chat_template_kwargs=template.options).render(tokenizer, talk)
    except InvalidRequest as error:
        raise InvalidRequest("prompts", f"{place}: {error}") from error
    except TokenizerError as error:
        raise TokenizerError(f"{place} holds messages, and {error}") from error
